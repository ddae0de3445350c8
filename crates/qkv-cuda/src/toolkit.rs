//! Where a library of the CUDA toolkit may be: a file named by an environment variable, a folder named by the program,
//! the loader's path, an installed toolkit, or the packages of a Python environment.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Folders that the program names, in addition to those below: see [`look_in`].
static FOLDERS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Looks for the toolkit's libraries in this folder first, before the loader's path: say, where a framework that shares
/// the device has its own. It has to be called before the first of them is needed.
pub fn look_in(folder: impl Into<PathBuf>) {
    let (folder, mut folders) = (folder.into(), FOLDERS.lock().unwrap_or_else(PoisonError::into_inner));
    if !folders.contains(&folder) {
        folders.push(folder);
    }
}

/// Candidates in the order in which they are tried. `names` are for the loader, `prefix` begins the file's name, and
/// `package` is the folder of its Python package before CUDA 13.
pub(crate) fn candidates(variable: &str, names: &[&str], prefix: &str, package: &str) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> = env::var_os(variable).map(PathBuf::from).into_iter().collect();
    for folder in FOLDERS.lock().unwrap_or_else(PoisonError::into_inner).iter() {
        all.extend(newest_first(folder, prefix));
    }
    all.extend(names.iter().map(PathBuf::from));
    let roots = ["CUDA_HOME", "CUDA_PATH", "CUDA_ROOT"].into_iter().filter_map(env::var_os).map(PathBuf::from);
    for root in roots.chain(["/usr/local/cuda".into(), "/opt/cuda".into()]) {
        for folder in ["lib64", "lib", "targets/x86_64-linux/lib"] {
            all.extend(newest_first(&root.join(folder), prefix));
        }
    }
    let environments = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(env::var_os).map(PathBuf::from);
    for environment in environments {
        for python in entries(&environment.join("lib"), "python3") {
            for package in ["cu13", package] {
                let folder = python.join("site-packages/nvidia").join(package).join("lib");
                all.extend(newest_first(&folder, prefix));
            }
        }
    }
    all
}

fn newest_first(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let mut found = entries(folder, prefix);
    found.sort_by_key(|path| std::cmp::Reverse(path.clone()));
    found
}

/// The files of a folder whose names begin with `prefix`, sorted.
pub(crate) fn entries(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let starts = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix));
    let mut found: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).filter(starts).collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_that_the_program_names_come_before_the_loaders_path() {
        let folder = tempfile::tempdir().unwrap();
        let library = folder.path().join("libnamed.so.13");
        fs::write(&library, b"").unwrap();
        look_in(folder.path());
        look_in(folder.path());
        let found = candidates("QKV_NO_SUCH_VARIABLE", &["libnamed.so"], "libnamed.so", "none");
        assert_eq!(found[..2], [library, PathBuf::from("libnamed.so")]);
    }
}
