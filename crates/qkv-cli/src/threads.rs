//! Work on as many threads as were asked for.

use crate::failure::Failure;

/// Does it on `threads` threads, or on every core.
pub(crate) fn on<T: Send>(
    threads: Option<usize>,
    work: impl FnOnce() -> Result<T, Failure> + Send,
) -> Result<T, Failure> {
    let Some(threads) = threads else { return work() };
    match rayon::ThreadPoolBuilder::new().num_threads(threads).build() {
        Ok(pool) => pool.install(work),
        Err(error) => Err(Failure::new(format!("{threads} threads could not be started: {error}"))),
    }
}

/// From here on, all of the program works on `threads` threads, or on every core.
pub(crate) fn everywhere(threads: Option<usize>) -> Result<(), Failure> {
    let Some(threads) = threads else { return Ok(()) };
    let failed = |error| Failure::new(format!("{threads} threads could not be started: {error}"));
    rayon::ThreadPoolBuilder::new().num_threads(threads).build_global().map_err(failed)
}

/// How many, in words.
pub(crate) fn told(threads: usize) -> String {
    format!("{threads} thread{}", if threads == 1 { "" } else { "s" })
}
