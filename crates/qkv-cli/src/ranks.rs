//! Runs a command on several ranks. `--ranks N` starts them on this machine with `mpiexec`; a process started by a
//! launcher joins its job. A failure on one rank ends all of them and states its reason.

use crate::arguments::{Argument, Kind};
use crate::failure::Failure;
use crate::output::note;
use qkv_ranks::{Mpi, MpiOptions, Ranks, launch};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// `--ranks`.
pub(crate) const RANKS: Argument = Argument::new(
    "ranks",
    Kind::Integer(1, 4096),
    "Start N ranks on this machine with `mpiexec`; on several machines use `mpiexec -n N qkv …` or `srun`",
)
.value("N");

/// `--rank-timeout`.
pub(crate) const RANK_TIMEOUT: Argument = Argument::new(
    "rank-timeout",
    Kind::Integer(1, 86_400),
    "Seconds without a heartbeat after which a rank counts as lost",
)
.value("SECONDS")
.default("30");

/// Hands over to `mpiexec` if `--ranks` asks for more than this process.
pub(crate) fn start(count: Option<usize>) -> Result<(), Failure> {
    let Some(count) = count.filter(|&count| count > 1 && !launch::is_rank()) else { return Ok(()) };
    let refused = |error: std::io::Error| Failure::new(format!("cannot start {count} ranks: {error}"));
    let program = std::env::current_exe().map_err(refused)?;
    let mut command = launch::command(count, &program, std::env::args_os().skip(1))?;
    #[cfg(unix)]
    {
        // Signals then reach the launcher, which passes them on.
        Err(refused(std::os::unix::process::CommandExt::exec(&mut command)))
    }
    #[cfg(not(unix))]
    {
        let status = command.status().map_err(refused)?;
        std::process::exit(status.code().unwrap_or(1));
    }
}

/// This process as one rank of a job, or on its own.
pub(crate) struct RankJob {
    mpi: Option<Arc<Mpi>>,
    ranks: Ranks,
}

impl RankJob {
    /// Joins the job of the launcher that started this process.
    pub fn join(timeout: Duration) -> Result<RankJob, Failure> {
        if !launch::is_rank() {
            return Ok(RankJob { mpi: None, ranks: Ranks::alone() });
        }
        let on_lost = |error: &qkv_ranks::Error| note(format!("error: {error}"));
        let mpi = Arc::new(Mpi::start(MpiOptions { timeout, on_lost })?);
        Ok(RankJob { ranks: Ranks::new(mpi.clone()), mpi: Some(mpi) })
    }

    /// Threads of this rank: the requested number, or its share of this machine's cores; `None` means all of them.
    pub fn threads(&self, asked: Option<usize>) -> Result<Option<usize>, Failure> {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let all = self.ranks.all_gather(host.as_bytes())?;
        let here = all.iter().filter(|other| **other == host.as_bytes()).count();
        let cores = thread::available_parallelism().map_or(1, usize::from);
        Ok(asked.or((here > 1).then(|| (cores / here).max(1))))
    }

    /// Runs the command's work, and leaves the job together with the other ranks. A failure on one rank ends all.
    pub fn run<T>(&self, work: impl FnOnce(&Ranks) -> Result<T, Failure>) -> Result<T, Failure> {
        match (work(&self.ranks), &self.mpi) {
            (Ok(done), Some(mpi)) => {
                mpi.finish()?;
                Ok(done)
            }
            (Err(failure), Some(mpi)) if self.ranks.size() > 1 => {
                // If ranks fail for the same reason, only the first reports it: it aborts the others while they wait.
                if !self.ranks.is_first() {
                    thread::sleep(Duration::from_secs(1));
                }
                note(format!("{failure}").trim_end().replacen("error: ", &format!("error: {:?}: ", self.ranks), 1));
                // On an abort, a launcher may drop output that it has not forwarded yet.
                thread::sleep(Duration::from_millis(300));
                mpi.abort(1)
            }
            (result, _) => result,
        }
    }
}
