//! `cargo xtask fuzz [TARGET] [--seconds N]`: the fuzz tests, for longer than in an ordinary test run.

use std::env;
use std::process::{Command, ExitCode};

/// Default time of each target.
const SECONDS: u64 = 60;

/// Runs one target or all of them.
pub fn fuzz(arguments: &[String]) -> ExitCode {
    let (mut seconds, mut target) = (SECONDS, None);
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        match (argument.as_str(), rest.as_slice().first().map(|next| next.parse())) {
            ("--seconds", Some(Ok(number))) => {
                seconds = number;
                rest.next();
            }
            (name, _) if !name.starts_with('-') && target.is_none() => target = Some(name),
            _ => {
                eprintln!("error: `{argument}` is not understood\nhint: cargo xtask fuzz [TARGET] [--seconds N]");
                return ExitCode::from(2);
            }
        }
    }
    let cargo = env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["test", "-p", "qkv-fuzz", "--tests", "--"]).args(target).args(["--nocapture", "--test-threads=1"]);
    match command.env("QKV_FUZZ_SECONDS", seconds.to_string()).status() {
        Ok(status) if status.success() => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    }
}
