//! The user's Python, which runs PyTorch's side of every comparison: scripts, their last lines, and errors.

use crate::failure::Failure;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};

/// A Python command that runs a script, after the prelude of all scripts.
pub(super) fn running(python: &Path, script: &str) -> Command {
    let mut command = Command::new(python);
    command.args(["-c", &[include_str!("prelude.py"), script].concat()]);
    command
}

/// The failure of a Python that could not be started.
pub(super) fn not_started(python: &Path, error: &std::io::Error) -> Failure {
    Failure::in_file(python, format!("cannot start this Python: {error}"))
        .hint("select a Python that has PyTorch with `--python PATH`")
}

/// The failure that an answer reports, if any.
pub(super) fn refused(python: &Path, answer: &Value) -> Option<Failure> {
    let error = answer["error"].as_str()?;
    Some(match answer["missing"].as_bool() {
        Some(true) => Failure::in_file(python, format!("this Python has no PyTorch: {error}"))
            .hint("select one that has it with `--python PATH`, such as that of a virtual environment"),
        _ => Failure::in_file(python, format!("PyTorch failed: {error}")),
    })
}

/// Runs a script to its end; its last line is the answer.
pub(super) fn ask<T: DeserializeOwned>(python: &Path, script: &str, arguments: &[String]) -> Result<T, Failure> {
    let ran = running(python, script).args(arguments).output().map_err(|error| not_started(python, &error))?;
    if let Some(failure) = read::<Value>(&ran).and_then(|answer| refused(python, &answer)) {
        return Err(failure);
    }
    read(&ran).ok_or_else(|| Failure::in_file(python, format!("PyTorch failed: {}", last_line(&ran))))
}

/// The last line on stdout, as JSON.
pub(super) fn read<T: DeserializeOwned>(ran: &Output) -> Option<T> {
    let line = ran.stdout.split(|&byte| byte == b'\n').rfind(|line| !line.is_empty())?;
    serde_json::from_slice(line).ok()
}

/// The last line that a process printed.
pub(super) fn last_line(ran: &Output) -> String {
    let texts = [&ran.stderr[..], &ran.stdout[..]].map(|bytes| String::from_utf8_lossy(bytes).trim_end().to_owned());
    let line = texts.iter().find(|text| !text.is_empty()).and_then(|text| text.lines().last());
    line.map_or_else(|| ran.status.to_string(), |line| line.chars().take(200).collect())
}
