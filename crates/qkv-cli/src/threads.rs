//! The number of compute threads: `--threads`, or all cores.

use crate::failure::Failure;

/// Runs work on `threads` threads, or on all cores.
pub(crate) fn on<T: Send>(
    threads: Option<usize>,
    work: impl FnOnce() -> Result<T, Failure> + Send,
) -> Result<T, Failure> {
    let Some(threads) = threads else { return work() };
    match rayon::ThreadPoolBuilder::new().num_threads(threads).build() {
        Ok(pool) => pool.install(work),
        Err(error) => Err(refused(threads, &error)),
    }
}

/// Sets the thread count of the global pool, for work that other threads start.
pub(crate) fn set_global(threads: Option<usize>) -> Result<(), Failure> {
    let Some(threads) = threads else { return Ok(()) };
    rayon::ThreadPoolBuilder::new().num_threads(threads).build_global().map_err(|error| refused(threads, &error))
}

fn refused(threads: usize, error: &rayon::ThreadPoolBuildError) -> Failure {
    Failure::new(format!("cannot start {}: {error}", count(threads)))
}

/// `1 thread`, `2 threads`.
pub(crate) fn count(threads: usize) -> String {
    format!("{threads} thread{}", if threads == 1 { "" } else { "s" })
}
