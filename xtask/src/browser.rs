//! A browser for the tests of the explorer's page: an installed one, or Chromium from the system's packages.

use std::env;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Executables that the tests look for.
const NAMES: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];

fn on_path(name: &str) -> Option<PathBuf> {
    let folders = env::var_os("PATH")?;
    env::split_paths(&folders).map(|folder| folder.join(name)).find(|path| path.is_file())
}

fn is_there() -> bool {
    env::var_os("QKV_BROWSER").is_some() || NAMES.iter().any(|name| on_path(name).is_some())
}

/// Installs a browser if there is none; the error is the message to print.
pub fn installed() -> Result<(), String> {
    if is_there() {
        return Ok(());
    }
    let hint = "hint: install Chromium, or name a browser in QKV_BROWSER";
    if on_path("apt-get").is_none() {
        return Err(format!("error: there is no browser for the tests of the page\n{hint}"));
    }
    eprintln!("\n── a browser for the tests of the page, from the system's packages");
    let root = Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout.trim_ascii() == b"0");
    for arguments in [&["update"][..], &["install", "--yes", "--no-install-recommends", "chromium"]] {
        let mut command = if root { Command::new("apt-get") } else { Command::new("sudo") };
        if !root {
            command.args(["--non-interactive", "apt-get"]);
        }
        let done = command.args(arguments).env("DEBIAN_FRONTEND", "noninteractive").stdout(Stdio::null()).status();
        if !done.is_ok_and(|status| status.success()) {
            let typed = arguments.join(" ");
            return Err(format!("error: `apt-get {typed}` failed\n{hint}"));
        }
    }
    match is_there() {
        true => Ok(()),
        false => Err(format!("error: the package `chromium` brought no browser\n{hint}")),
    }
}
