//! The files of the repository, as git lists them.

use std::process::Command;

/// Tracked and new files with one of these extensions, as paths relative to the root.
pub fn tracked(extensions: &[&str]) -> Result<Vec<String>, String> {
    let arguments = ["ls-files", "--cached", "--others", "--exclude-standard"];
    let output = Command::new("git").args(arguments).output().map_err(|error| format!("error: git: {error}"))?;
    if !output.status.success() {
        return Err("error: `git ls-files` failed\nhint: run this in a git checkout".into());
    }
    let paths = String::from_utf8_lossy(&output.stdout);
    let wanted = |path: &&str| path.rsplit_once('.').is_some_and(|(_, extension)| extensions.contains(&extension));
    Ok(paths.lines().filter(wanted).map(str::to_string).collect())
}
