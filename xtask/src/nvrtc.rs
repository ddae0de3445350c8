//! NVRTC for the tests that compile every CUDA program: the library named by `QKV_NVRTC`, or PyPI's
//! `nvidia-cuda-nvrtc`, installed into `target/nvrtc`.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The folder in which it is installed.
const FOLDER: &str = "target/nvrtc";

/// The package, in the oldest version whose compiler supports every architecture that the kernels name; newer ones
/// accept more code.
const PACKAGE: &str = "nvidia-cuda-nvrtc==13.0.*";

/// Python interpreters in the order in which they are tried.
const PYTHONS: [&str; 2] = ["python3", "python"];

/// The library to test with. The error says why there is none.
pub fn library() -> Result<PathBuf, String> {
    if let Some(named) = env::var_os("QKV_NVRTC") {
        return Ok(PathBuf::from(named));
    }
    if let Some(found) = find(Path::new(FOLDER)) {
        return Ok(found);
    }
    let python = PYTHONS.into_iter().find(|python| {
        let mut probe = Command::new(python);
        probe.args(["-m", "pip", "--version"]).stdout(Stdio::null()).stderr(Stdio::null());
        probe.status().is_ok_and(|status| status.success())
    });
    let python = python.ok_or("no Python with pip to install NVRTC with")?;
    eprintln!("\n── NVRTC, from PyPI");
    let arguments = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target", FOLDER];
    let installed = Command::new(python).args(arguments).arg(PACKAGE).status();
    if !installed.is_ok_and(|status| status.success()) {
        return Err(format!("`pip install '{PACKAGE}'` failed"));
    }
    find(Path::new(FOLDER)).ok_or_else(|| format!("`{PACKAGE}` has no library for this system"))
}

/// The NVRTC library below a folder, by its absolute path.
fn find(folder: &Path) -> Option<PathBuf> {
    let mut paths: Vec<PathBuf> = fs::read_dir(folder).ok()?.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    paths.into_iter().find_map(|path| {
        let name = path.file_name()?.to_str()?;
        let is_library = name.starts_with("libnvrtc.so") || name.starts_with("nvrtc64") && name.ends_with(".dll");
        match path.is_dir() {
            true => find(&path),
            false if is_library => path.canonicalize().ok(),
            false => None,
        }
    })
}
