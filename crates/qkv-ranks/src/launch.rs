//! Whether a launcher started this process as a rank, and how ranks are started on this machine.

use crate::error::{Error, Result};
use std::env;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The variable that names the MPI library.
pub const LIBRARY: &str = "QKV_MPI";
/// The variable that names the launcher.
pub const LAUNCHER: &str = "QKV_MPIEXEC";

/// Variables that launchers set for each rank: MPICH, Intel MPI and Slurm's PMI; PMIx; Open MPI.
const RANK_VARIABLES: [&str; 3] = ["PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"];

/// Variables that launchers set to a rank's number on its machine: torchrun and others; MPICH and Intel MPI; Open MPI;
/// Slurm.
const LOCAL_VARIABLES: [&str; 5] =
    ["LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"];

/// File names of a library with the standard ABI.
pub(crate) const LIBRARIES: [&str; 3] = ["libmpi_abi.so.1", "libmpi_abi.so", "libmpi_abi.dylib"];

/// Whether a launcher (`mpiexec`, `srun`) started this process as one of its ranks.
pub fn is_rank() -> bool {
    RANK_VARIABLES.iter().any(|name| env::var_os(name).is_some())
}

/// This rank's number among the ranks of its machine, from `LOCAL_RANK` or the launcher's variables.
pub fn local_rank() -> Option<usize> {
    LOCAL_VARIABLES.iter().find_map(|name| env::var(name).ok()?.parse().ok())
}

/// The launcher: the one named in `QKV_MPIEXEC`, the one next to the library named in `QKV_MPI`, or `mpiexec` on the
/// path.
pub fn mpiexec() -> Option<PathBuf> {
    if let Some(named) = env::var_os(LAUNCHER) {
        return Some(named.into());
    }
    let beside = env::var_os(LIBRARY).and_then(|library| {
        let prefix = Path::new(&library).parent()?.parent()?;
        Some(prefix.join("bin").join("mpiexec")).filter(|path| path.is_file())
    });
    beside.or_else(|| {
        let path = env::var_os("PATH")?;
        env::split_paths(&path).map(|folder| folder.join("mpiexec")).find(|path| path.is_file())
    })
}

/// Where the MPI library may be, in the order in which it is tried.
pub(crate) fn libraries() -> Vec<PathBuf> {
    if let Some(named) = env::var_os(LIBRARY) {
        return vec![named.into()];
    }
    // A Python environment has it in `lib`, next to `bin`.
    let prefixes = [
        mpiexec().and_then(|path| Some(path.parent()?.parent()?.to_owned())),
        env::var_os("VIRTUAL_ENV").map(PathBuf::from),
    ];
    let folders = prefixes.into_iter().flatten().map(|prefix| prefix.join("lib"));
    let named = |folder: PathBuf| LIBRARIES.map(|name| folder.join(name));
    let mut found: Vec<PathBuf> = folders.flat_map(named).filter(|path| path.is_file()).collect();
    found.extend(LIBRARIES.map(PathBuf::from));
    found
}

/// The command that starts `ranks` ranks of a program on this machine.
///
/// # Errors
/// If there is no launcher.
pub fn command<S: AsRef<OsStr>>(
    ranks: usize,
    program: &Path,
    arguments: impl IntoIterator<Item = S>,
) -> Result<Command> {
    let launcher = mpiexec().ok_or_else(|| Error::NoMpi("there is no `mpiexec` on the path".to_owned()))?;
    let mut command = Command::new(launcher);
    command.arg("-n").arg(ranks.to_string()).arg(program).args(arguments);
    Ok(command)
}
