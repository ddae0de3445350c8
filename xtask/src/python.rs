//! The Python module: built, put beside its Python files under `target/python`, and tested with pytest in a separate
//! virtual environment. `cargo xtask test` installs only NumPy; `cargo xtask python` installs every framework that the
//! package supports, installs the package with pip, and runs all of its tests.

use crate::step::Step;
use std::env::{self, consts};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The folder for everything that is built and installed.
const FOLDER: &str = "target/python";

/// The folder in which an interpreter finds the package.
const PACKAGE: &str = "target/python/package";

/// Cases of the conformance suite with the engine's results, for the tests.
const CASES: &str = "target/python/cases";

/// The packages that the tests need at least.
const NUMPY: [&str; 3] = ["numpy", "ml_dtypes", "pytest"];

/// The additional packages that all tests need. PyTorch's CPU-only wheels are on a separate index; set
/// `PIP_EXTRA_INDEX_URL` for the smaller download.
const FRAMEWORKS: [&str; 6] = ["maturin>=1.9.4,<2", "torch", "transformers>=5", "jax", "mypy", "typing_extensions"];

/// Names of interpreters in the order in which they are tried.
const PYTHONS: [&str; 6] = ["python3", "python", "python3.14", "python3.13", "python3.12", "python3.11"];

/// Builds the module with the test profile and tests it with NumPy. It is built as part of the workspace, so that
/// nothing is recompiled with other features.
pub fn numpy_steps() -> Vec<Step> {
    match environment(&NUMPY) {
        Err(reason) => vec![Step::skip("the Python module", reason)],
        Ok(python) => {
            let build = "build --workspace --lib --bin qkv --example export --profile test";
            let export = target().join("debug/examples").join(format!("export{}", consts::EXE_SUFFIX));
            vec![
                Step::cargo("the Python module", build).with("CARGO_INCREMENTAL", "0"),
                Step::check("the Python package", "python", || assemble("debug")),
                Step::program("conformance cases for Python", export, &[CASES]).with("QKV_SAMPLE", "0.25"),
                Step::program("tests of the Python module", python, &["-m", "pytest", "-q", "python/tests"])
                    .with("PYTHONPATH", package_path()),
            ]
        }
    }
}

/// Installs every framework, installs the package with pip, runs all tests, and checks the stubs.
pub fn all_steps() -> Vec<Step> {
    let python = match environment(&[&NUMPY[..], &FRAMEWORKS[..]].concat()) {
        Ok(python) => python,
        Err(reason) => return vec![Step::skip("the Python module", reason)],
    };
    let run = |name: &str, arguments: &[&str]| Step::program(name, python.clone(), arguments);
    let export = format!("run --quiet --release -p qkv-conformance --example export -- {CASES}");
    vec![
        Step::cargo("conformance cases for Python", export),
        run("the Python package, installed", &["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "."]),
        run("tests of the Python package", &["-m", "pytest", "-q", "python/tests"]),
        run("stubs", &["-m", "mypy.stubtest", "qkv._qkv"]),
    ]
}

/// Cargo's target folder.
fn target() -> PathBuf {
    env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into()).into()
}

fn package_path() -> String {
    Path::new(PACKAGE).canonicalize().unwrap_or_else(|_| PathBuf::from(PACKAGE)).display().to_string()
}

/// Copies the Python files and the module that cargo built into the package folder.
fn assemble(profile: &str) -> Result<(), String> {
    let failed = |what: &Path, error: std::io::Error| format!("error: {}: {error}", what.display());
    let package = Path::new(PACKAGE).join("qkv");
    let _ = fs::remove_dir_all(&package);
    let sources = Path::new("python/qkv");
    copy_folder(sources, &package).map_err(|error| failed(sources, error))?;
    let library = format!("{}_qkv{}", consts::DLL_PREFIX, consts::DLL_SUFFIX);
    let library = target().join(profile).join(library);
    let module = if cfg!(windows) { "_qkv.pyd" } else { "_qkv.abi3.so" };
    fs::copy(&library, package.join(module)).map_err(|error| failed(&library, error))?;
    Ok(())
}

/// Copies a folder of Python files recursively.
fn copy_folder(from: &Path, to: &Path) -> std::io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let (path, name) = entry.map(|entry| (entry.path(), entry.file_name()))?;
        match path.is_dir() {
            true if name == "__pycache__" => {}
            true => copy_folder(&path, &to.join(name))?,
            false => fs::copy(&path, to.join(name)).map(|_| ())?,
        }
    }
    Ok(())
}

/// The interpreter of a virtual environment with these packages. The error says why there is none.
fn environment(packages: &[&str]) -> Result<PathBuf, String> {
    let python = interpreter()?;
    let venv = Path::new(FOLDER).join("venv");
    let inside = venv.join(if cfg!(windows) { "Scripts/python.exe" } else { "bin/python" });
    if !inside.exists() {
        eprintln!("\n── a virtual environment for Python, {}", venv.display());
        let made = quiet(Command::new(&python).args(["-m", "venv"]).arg(&venv));
        if !made {
            let _ = fs::remove_dir_all(&venv);
            return Err(format!("`{python} -m venv` failed"));
        }
    }
    // Skip packages that were installed before, because pip takes seconds to find that out.
    let (list, wanted) = (Path::new(FOLDER).join("installed"), packages.join("\n"));
    let installed = fs::read_to_string(&list).unwrap_or_default();
    if packages.iter().any(|package| !installed.lines().any(|line| line == *package)) {
        eprintln!("\n── for Python, from PyPI: {}", packages.join(", "));
        let mut pip = Command::new(&inside);
        pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]).args(packages);
        if !quiet(pip.args(["--retries", "1", "--timeout", "15"])) {
            return Err(format!("`pip install {}` failed", packages.join(" ")));
        }
        fs::write(&list, wanted).map_err(|error| format!("{}: {error}", list.display()))?;
    }
    Ok(inside)
}

fn quiet(command: &mut Command) -> bool {
    command.stdin(Stdio::null()).stdout(Stdio::null()).status().is_ok_and(|status| status.success())
}

/// A Python of at least 3.11: the one named by `QKV_PYTHON`, or one on the path.
fn interpreter() -> Result<String, String> {
    let new_enough = |python: &String| {
        let mut probe = Command::new(python);
        probe.args(["-c", "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))"]);
        probe.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
    };
    let named = env::var("QKV_PYTHON").ok();
    let candidates = named.map_or_else(|| PYTHONS.map(String::from).to_vec(), |named| vec![named]);
    candidates.into_iter().find(new_enough).ok_or_else(|| "no Python of at least 3.11 with venv".into())
}
