//! One step of a command: a cargo command with its environment, or a check of this crate.

use crate::suites::{self, Again};
use std::env;
use std::fs;
use std::io::{BufRead, BufReader, IsTerminal, Read, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Instant;

/// The prefix of a line by which a test reports that it was skipped, and why.
pub const SKIPPED: &str = "skipped: ";

/// Environment variables.
pub type Variables = Vec<(&'static str, String)>;

/// A named step.
pub struct Step {
    name: String,
    action: Action,
}

enum Action {
    Cargo {
        arguments: String,
        environment: Variables,
        file: Option<&'static str>,
    },
    /// All tests of the workspace.
    Tests {
        environment: Variables,
        again: Vec<Again>,
    },
    Program {
        program: PathBuf,
        arguments: Vec<String>,
        environment: Variables,
    },
    Check {
        typed: &'static str,
        check: fn() -> Result<(), String>,
    },
    /// A step that cannot run here, with the reason.
    Skip(String),
}

impl Step {
    /// `cargo ARGUMENTS`.
    pub fn cargo(name: impl Into<String>, arguments: impl Into<String>) -> Step {
        let action = Action::Cargo { arguments: arguments.into(), environment: Vec::new(), file: None };
        Step { name: name.into(), action }
    }

    /// All tests and doc tests, with some of them repeated in other environments.
    pub fn tests(name: impl Into<String>, again: Vec<Again>) -> Step {
        Step { name: name.into(), action: Action::Tests { environment: Vec::new(), again } }
    }

    /// Another program.
    pub fn program(name: impl Into<String>, program: PathBuf, arguments: &[&str]) -> Step {
        let arguments = arguments.iter().map(|argument| argument.to_string()).collect();
        Step { name: name.into(), action: Action::Program { program, arguments, environment: Vec::new() } }
    }

    /// A check of this crate, also run by `cargo xtask TYPED`.
    pub fn check(name: impl Into<String>, typed: &'static str, check: fn() -> Result<(), String>) -> Step {
        Step { name: name.into(), action: Action::Check { typed, check } }
    }

    /// A step that cannot run here; the summary shows the reason.
    pub fn skip(name: impl Into<String>, reason: impl Into<String>) -> Step {
        Step { name: name.into(), action: Action::Skip(reason.into()) }
    }

    /// Adds an environment variable.
    pub fn with(mut self, variable: &'static str, value: impl Into<String>) -> Step {
        if let Action::Cargo { environment, .. }
        | Action::Tests { environment, .. }
        | Action::Program { environment, .. } = &mut self.action
        {
            environment.push((variable, value.into()));
        }
        self
    }

    /// Writes its standard output to this file if the step succeeds.
    pub fn into_file(mut self, path: &'static str) -> Step {
        if let Action::Cargo { file, .. } = &mut self.action {
            *file = Some(path);
        }
        self
    }

    /// The command line that runs the step.
    fn typed(&self) -> String {
        match &self.action {
            Action::Cargo { arguments, environment, .. } => {
                let set: String = environment.iter().map(|(name, value)| format!("{name}='{value}' ")).collect();
                format!("{set}cargo {arguments}")
            }
            Action::Program { program, arguments, environment } => {
                let set: String = environment.iter().map(|(name, value)| format!("{name}='{value}' ")).collect();
                format!("{set}{} {}", program.display(), arguments.join(" "))
            }
            Action::Check { typed, .. } => format!("cargo xtask {typed}"),
            // These report what failed themselves.
            Action::Tests { .. } | Action::Skip(_) => String::new(),
        }
    }

    /// Runs the step, with temporary files in this folder; returns what it skipped, or the error to print.
    fn run(&self, temporary: &Temporary) -> Result<Vec<String>, String> {
        match &self.action {
            Action::Skip(reason) => Ok(vec![format!("{}: {reason}", self.name)]),
            Action::Check { check, .. } => check().map(|()| Vec::new()),
            Action::Tests { environment, again } => suites::run(&cargo(), environment, again, &temporary.0),
            Action::Program { program, arguments, environment } => {
                let mut command = Command::new(program);
                command.args(arguments).env("TMPDIR", &temporary.0).envs(environment.clone());
                run_collecting(command).ok_or_else(|| format!("error: `{}` failed", self.name))
            }
            Action::Cargo { arguments, environment, file } => {
                // Only rustup's cargo on the path understands `+nightly`; `CARGO` names the cargo of the current
                // toolchain.
                let mut command = Command::new(if arguments.starts_with('+') { "cargo".into() } else { cargo() });
                command.args(arguments.split(' ')).env("TMPDIR", &temporary.0).envs(environment.clone());
                let failed = || format!("error: `{}` failed", self.name);
                match file {
                    None => run_collecting(command).ok_or_else(failed),
                    Some(file) => {
                        let output = command.stderr(Stdio::inherit()).output().map_err(|_| failed())?;
                        let written = output.status.success() && fs::write(file, output.stdout).is_ok();
                        if written { Ok(Vec::new()) } else { Err(failed()) }
                    }
                }
            }
        }
    }
}

/// The cargo of the current toolchain.
fn cargo() -> PathBuf {
    env::var_os("CARGO").unwrap_or_else(|| "cargo".into()).into()
}

/// A folder for temporary files, removed with everything left in it, because browsers and MPI launchers that a test
/// kills leave files behind. Its path is short, because sockets are created there.
struct Temporary(PathBuf);

impl Temporary {
    fn new() -> Temporary {
        let system = env::temp_dir();
        let folder = system.join(format!("qkv-xtask-{}", std::process::id()));
        Temporary(if fs::create_dir_all(&folder).is_ok() { folder } else { system })
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if self.0 != env::temp_dir() {
            let _ = fs::remove_dir_all(&self.0);
        }
    }
}

/// Runs a command, passes its output through, and collects the reasons of skipped tests; `None` if it fails.
fn run_collecting(mut command: Command) -> Option<Vec<String>> {
    if std::io::stderr().is_terminal() {
        command.env("CARGO_TERM_COLOR", "always");
    }
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().ok()?;
    let (out, err) = (child.stdout.take()?, child.stderr.take()?);
    let out = thread::spawn(move || pass_through(out, &mut std::io::stdout()));
    let mut skipped = pass_through(err, &mut std::io::stderr());
    skipped.extend(out.join().unwrap_or_default());
    child.wait().is_ok_and(|status| status.success()).then_some(skipped)
}

fn pass_through(from: impl Read, to: &mut impl Write) -> Vec<String> {
    let (mut from, mut line, mut skipped) = (BufReader::new(from), Vec::new(), Vec::new());
    while from.read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
        // A closed pipe (`| head`) must not stop the tests.
        let _ = to.write_all(&line).and_then(|()| to.flush());
        if let Some(reason) = String::from_utf8_lossy(&line).trim_end().strip_prefix(SKIPPED) {
            skipped.push(reason.to_string());
        }
        line.clear();
    }
    skipped
}

/// Runs the steps up to the first failure, and prints a summary of the times and of what was skipped. Returns whether
/// all steps succeeded.
pub fn run_all(steps: &[Step]) -> bool {
    let (start, mut times, mut skipped) = (Instant::now(), Vec::new(), Vec::new());
    let temporary = Temporary::new();
    for step in steps {
        eprintln!("\n── {}", step.name);
        let began = Instant::now();
        match step.run(&temporary) {
            Ok(reasons) => skipped.extend(reasons),
            Err(error) => {
                let typed = step.typed();
                let hint = if typed.is_empty() { typed } else { format!("\nhint: run it alone with `{typed}`") };
                eprintln!("\n{error}{hint}");
                return false;
            }
        }
        times.push((began.elapsed().as_secs_f64(), &step.name));
    }
    if steps.len() > 1 {
        eprintln!("\n── {} steps, {:.0} s", steps.len(), start.elapsed().as_secs_f64());
        for (seconds, name) in times {
            eprintln!("{seconds:>6.0} s  {name}");
        }
        eprint!("{}", summary(skipped));
    }
    true
}

/// The list of what was skipped, each reason once.
fn summary(mut skipped: Vec<String>) -> String {
    skipped.sort();
    let mut text = String::from("\n── skipped\n");
    for same in skipped.chunk_by(|a, b| a == b) {
        let times = if same.len() > 1 { format!(" ({} times)", same.len()) } else { String::new() };
        text += &format!("{}{times}\n", same[0]);
    }
    if skipped.is_empty() {
        text += "nothing\n";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_step_leaves_among_temporary_files_is_removed() {
        let temporary = Temporary::new();
        let folder = temporary.0.clone();
        assert!(folder.starts_with(env::temp_dir()) && folder != env::temp_dir());
        fs::create_dir(folder.join("litter")).unwrap();
        fs::write(folder.join("litter/socket"), "").unwrap();
        drop(temporary);
        assert!(!folder.exists());
    }

    #[test]
    fn lines_of_skipped_tests_are_collected_and_all_lines_passed_on() {
        let output = "running 2 tests\nskipped: no GPU\nok, not skipped: this\nskipped: no AMX";
        let mut passed = Vec::new();
        assert_eq!(pass_through(output.as_bytes(), &mut passed), ["no GPU", "no AMX"]);
        assert_eq!(passed, output.as_bytes());
    }

    #[test]
    fn the_summary_has_each_reason_once() {
        let reasons = ["no GPU", "no AMX", "no GPU"].map(String::from).to_vec();
        assert_eq!(summary(reasons), "\n── skipped\nno AMX\nno GPU (2 times)\n");
        assert_eq!(summary(Vec::new()), "\n── skipped\nnothing\n");
    }
}
