//! MPI for the tests of ranks: the library named by `QKV_MPI`, the `mpiexec` on the path, or PyPI's `mpich`, installed
//! into `target/mpich`.

use crate::step::Step;
use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The folder in which it is installed.
const FOLDER: &str = "target/mpich";

/// The package; 5 is the first version with the standard ABI.
const PACKAGE: &str = "mpich>=5";

/// Python interpreters in the order in which they are tried.
const PYTHONS: [&str; 2] = ["python3", "python"];

/// The library for `QKV_MPI`; `None` if the tests find one themselves. The error says why there is none.
pub fn library() -> Result<Option<PathBuf>, String> {
    let on_path = |folder: PathBuf| folder.join("mpiexec").is_file();
    let path = env::var_os("PATH").unwrap_or_default();
    if env::var_os("QKV_MPI").is_some() || env::split_paths(&path).any(on_path) {
        return Ok(None);
    }
    if let Some(found) = find() {
        return Ok(Some(found));
    }
    let python = PYTHONS.into_iter().find(|python| {
        let mut probe = Command::new(python);
        probe.args(["-c", "import venv, ensurepip"]).stdout(Stdio::null()).stderr(Stdio::null());
        probe.status().is_ok_and(|status| status.success())
    });
    let python = python.ok_or("no Python to bring mpich with")?;
    eprintln!("\n── mpich, from PyPI");
    let runs = |program: &Path, arguments: &[&str]| {
        Command::new(program).args(arguments).status().is_ok_and(|status| status.success())
    };
    // In a separate virtual environment, into which every pip may install.
    let pip = Path::new(FOLDER).join("bin/pip");
    let install = ["install", "--quiet", "--disable-pip-version-check", "--retries", "1", "--timeout", "15", PACKAGE];
    if !(runs(Path::new(python), &["-m", "venv", FOLDER]) && runs(&pip, &install)) {
        return Err(format!("`pip install '{PACKAGE}'` failed"));
    }
    find().map(Some).ok_or_else(|| format!("`{PACKAGE}` has no library for this system"))
}

/// The library in the folder, by its absolute path.
fn find() -> Option<PathBuf> {
    Path::new(FOLDER).join("lib/libmpi_abi.so.1").canonicalize().ok()
}

/// The test of [`kills`].
const KILLS: &str = "test -p qkv-cli --test cli -- --nocapture --exact \
models::ranks::ranks_that_are_killed_or_stopped_end_all_and_nothing_is_lost";

/// The test of [`hashes`].
const HASHES: &str = "test -p qkv-cli --test cli -- --nocapture --exact \
models::rank_hashes::three_recipes_have_the_same_hash_on_any_number_of_ranks";

/// Kills ranks at random moments, `times` times.
pub fn kills(times: u32) -> Vec<Step> {
    over_mpi(Step::cargo(format!("{times} ranks killed"), KILLS).with("QKV_RANK_KILLS", times.to_string()))
}

/// Trains three recipes for `steps` steps on 1 to 8 ranks and compares their bytes.
pub fn hashes(steps: u32) -> Vec<Step> {
    over_mpi(Step::cargo("hashes of three recipes", HASHES).with("QKV_RANK_HASHES", steps.to_string()))
}

fn over_mpi(step: Step) -> Vec<Step> {
    match library() {
        Ok(None) => vec![step],
        Ok(Some(library)) => vec![step.with("QKV_MPI", library.display().to_string())],
        Err(reason) => vec![Step::skip("ranks over MPI", reason)],
    }
}
