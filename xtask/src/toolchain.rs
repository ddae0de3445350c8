//! What is installed: targets, components of a nightly toolchain, and programs.

use std::path::PathBuf;
use std::process::{Command, Stdio};

fn output(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).stderr(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_string())
}

/// Whether the standard library for a target is installed.
pub fn has_target(target: &str) -> bool {
    let sysroot = output("rustc", &["--print", "sysroot"]).map(PathBuf::from);
    sysroot.is_some_and(|sysroot| sysroot.join("lib/rustlib").join(target).join("lib").is_dir())
}

/// Whether a nightly toolchain has these components, such as `miri` or `rust-src`.
pub fn nightly_has(components: &[&str]) -> bool {
    let Some(installed) = output("rustup", &["component", "list", "--installed", "--toolchain", "nightly"]) else {
        return false;
    };
    components.iter().all(|wanted| installed.lines().any(|line| line.starts_with(wanted)))
}

/// The target of this machine, such as `x86_64-unknown-linux-gnu`.
pub fn host() -> Option<String> {
    output("rustc", &["--print", "host-tuple"])
}

/// Whether a program is installed.
pub fn has_program(name: &str) -> bool {
    output(name, &["--version"]).is_some()
}

/// Whether `cargo NAME` is installed.
pub fn has_cargo_command(name: &str) -> bool {
    output("cargo", &[name, "--version"]).is_some()
}

/// Whether `cargo deny` can fetch the database of advisories.
pub fn can_fetch_advisories() -> bool {
    output("cargo", &["deny", "fetch", "db"]).is_some()
}
