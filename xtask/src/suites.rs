//! The tests of the workspace: one cargo command compiles them, and their binaries run three at a time, the longest
//! first. `cargo test` would run them one at a time, and each ends with a single test on one core. A binary's output is
//! printed as a whole when it has ended.

use crate::step::{SKIPPED, Variables};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::Instant;

/// Compiles the tests and nothing else: examples are checked by lints, and compiled when they are run.
const COMPILE: &str = "test --workspace --tests --no-run --message-format=json-render-diagnostics";

/// Compiles and runs the examples in the documentation.
const DOC_TESTS: &str = "test --workspace --exclude qkv-simd-tests --doc --no-fail-fast";

/// Number of concurrent runs: while one waits for its last test, for a browser or for a disk, the others use the cores.
const AT_A_TIME: usize = 3;

/// The longest runs in descending order; they start first, so that no core is idle at the end.
const LONGEST: [&str; 9] = [
    "-p qkv-models --test suite",
    "-p qkv-cli --test cli",
    "-p qkv-fuzz --test fuzz",
    "-p qkv-cuda --test gpu",
    "-p qkv-cuda --lib",
    "-p qkv-ranks-tests --test ranks",
    "--doc",
    "-p qkv-nn-tests --test layers",
    "-p qkv-tests --test attention",
];

/// Some tests of a binary, repeated in another environment.
pub struct Again {
    /// The binaries, by name.
    pub binaries: &'static [&'static str],
    /// Substrings of the tests' names.
    pub filters: &'static str,
    /// Replaces the environment of the first run.
    pub environment: Variables,
}

/// A test binary built by cargo.
#[derive(Debug, PartialEq)]
struct Binary {
    package: String,
    /// `--lib`, `--bin NAME` or `--test NAME`.
    target: String,
    name: String,
    path: PathBuf,
    /// The folder of its package, in which cargo would run it.
    folder: PathBuf,
}

/// A command to run, and how to type it.
struct Run {
    typed: String,
    command: Command,
}

/// Runs all tests and doc tests, and repeats some of them; returns what they skipped.
pub fn run(cargo: &Path, environment: &Variables, again: &[Again], temporary: &Path) -> Result<Vec<String>, String> {
    let binaries = compile(cargo, environment).ok_or("error: the tests do not compile")?;
    let mut doc_tests = Command::new(cargo);
    doc_tests.args(DOC_TESTS.split(' ')).envs(environment.clone());
    let typed = format!("cargo {DOC_TESTS}");
    let mut runs = vec![Run { typed, command: doc_tests }];
    runs.extend(binaries.iter().map(|binary| binary.run("", environment)));
    for again in again {
        let named = binaries.iter().filter(|binary| again.binaries.contains(&binary.name.as_str()));
        runs.extend(named.map(|binary| binary.run(again.filters, &again.environment)));
    }
    runs.sort_by_key(|run| LONGEST.iter().position(|long| run.typed.contains(long)).unwrap_or(LONGEST.len()));
    for run in &mut runs {
        run.command.env("TMPDIR", temporary);
    }
    let done = Mutex::new(Done::default());
    let waiting = Mutex::new(runs.into_iter());
    let next = || waiting.lock().unwrap().next();
    thread::scope(|scope| {
        for _ in 0..AT_A_TIME {
            scope.spawn(|| {
                while let Some(Run { typed, mut command }) = next() {
                    let began = Instant::now();
                    let output = command.stdin(Stdio::null()).output();
                    let mut done = done.lock().unwrap();
                    print(&typed, began.elapsed().as_secs_f64(), &output);
                    done.add(typed, output);
                }
            });
        }
    });
    let Done { skipped, failed } = done.into_inner().unwrap();
    match failed[..] {
        [] => Ok(skipped),
        _ => Err(format!("error: tests failed\nhint: run them alone with\n  {}", failed.join("\n  "))),
    }
}

impl Binary {
    fn run(&self, filters: &str, environment: &Variables) -> Run {
        let filters: Vec<&str> = filters.split_whitespace().collect();
        let set: String = environment.iter().map(|(name, value)| format!("{name}='{value}' ")).collect();
        let mut typed = format!("{set}cargo test -p {} {}", self.package, self.target);
        if !filters.is_empty() {
            typed += &format!(" -- {}", filters.join(" "));
        }
        let mut command = Command::new(&self.path);
        command.args(filters).current_dir(&self.folder).envs(environment.clone());
        Run { typed, command }
    }
}

/// Builds the tests; `None` if cargo fails.
fn compile(cargo: &Path, environment: &Variables) -> Option<Vec<Binary>> {
    let mut command = Command::new(cargo);
    command.args(COMPILE.split(' ')).envs(environment.clone()).stdout(Stdio::piped());
    let mut child = command.spawn().ok()?;
    let messages = BufReader::new(child.stdout.take()?);
    let binaries = messages.lines().map_while(Result::ok).filter_map(|line| binary(&line)).collect();
    child.wait().is_ok_and(|status| status.success()).then_some(binaries)
}

/// The test binary that a cargo message announces.
fn binary(message: &str) -> Option<Binary> {
    let (target, profile) = message.split_once("\"profile\":{")?;
    if !profile.split('}').next()?.contains("\"test\":true") {
        return None;
    }
    let path = PathBuf::from(text(profile, "executable")?);
    let folder = Path::new(&text(target, "manifest_path")?).parent()?.to_path_buf();
    let package = text(message, "package_id").map(|id| package(&id))?;
    let name = text(target.split_once("\"target\":{")?.1, "name")?;
    let kind = target.split_once("\"kind\":[\"")?.1;
    let target = match kind.split('"').next()? {
        "test" => format!("--test {name}"),
        "bin" => format!("--bin {name}"),
        _ => "--lib".into(),
    };
    Some(Binary { package, target, name, path, folder })
}

/// The name in `path+file:///folder/name#version` or `path+file:///folder#name@version`.
fn package(id: &str) -> String {
    let (folder, version) = id.split_once('#').unwrap_or((id, ""));
    match version.split_once('@') {
        Some((name, _)) => name.into(),
        None => folder.rsplit('/').next().unwrap_or_default().into(),
    }
}

/// The text of the first member of this name in JSON.
fn text(json: &str, name: &str) -> Option<String> {
    let rest = json.split_once(&format!("\"{name}\":\""))?.1;
    let (mut found, mut characters) = (String::new(), rest.chars());
    loop {
        match characters.next()? {
            '"' => return Some(found),
            // In paths, only quotes and backslashes are escaped.
            '\\' => found.push(characters.next()?),
            other => found.push(other),
        }
    }
}

/// Results of the runs so far.
#[derive(Default)]
struct Done {
    skipped: Vec<String>,
    failed: Vec<String>,
}

/// Prints the whole output of one run.
fn print(typed: &str, seconds: f64, output: &std::io::Result<Output>) {
    eprintln!("\n── {typed} ({seconds:.0} s)");
    match output {
        // A closed pipe (`| head`) must not stop the tests.
        Ok(output) => {
            let _ = std::io::stderr().write_all(&output.stderr);
            let _ = std::io::stdout().write_all(&output.stdout);
            let _ = std::io::stdout().flush();
        }
        Err(error) => eprintln!("it cannot be started: {error}"),
    }
}

impl Done {
    /// Records what a run skipped, and whether it failed.
    fn add(&mut self, typed: String, output: std::io::Result<Output>) {
        if let Ok(output) = &output {
            let text = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
            let reasons = text.iter().flat_map(|text| text.lines()).filter_map(|line| line.strip_prefix(SKIPPED));
            self.skipped.extend(reasons.map(String::from));
        }
        if !output.is_ok_and(|output| output.status.success()) {
            self.failed.push(typed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUILT: &str = r#"{"reason":"compiler-artifact","package_id":"path+file:///home/a/crates/qkv#0.1.0","manifest_path":"/home/a/crates/qkv/Cargo.toml","target":{"kind":["test"],"crate_types":["bin"],"name":"attention","src_path":"/home/a/main.rs","edition":"2024","doc":false,"doctest":false,"test":true},"profile":{"opt_level":"2","debuginfo":0,"debug_assertions":true,"overflow_checks":true,"test":true},"features":[],"filenames":["/home/a/t\\attention"],"executable":"/home/a/t\\attention","fresh":true}"#;

    #[test]
    fn a_message_of_cargo_names_the_binary_and_where_it_runs() {
        let found = binary(BUILT).unwrap();
        assert_eq!((&*found.package, &*found.target, &*found.name), ("qkv", "--test attention", "attention"));
        assert_eq!(found.path, Path::new("/home/a/t\\attention"));
        assert_eq!(found.folder, Path::new("/home/a/crates/qkv"));
        let library = binary(&BUILT.replace("[\"test\"]", "[\"lib\"]")).unwrap();
        assert_eq!(library.target, "--lib");
    }

    #[test]
    fn what_is_no_test_is_not_run() {
        let program = BUILT.replace("\"test\":true},\"features\"", "\"test\":false},\"features\"");
        assert_eq!(binary(&program), None);
        let library = BUILT.replace("\"executable\":\"/home/a/t\\\\attention\"", "\"executable\":null");
        assert_eq!(binary(&library), None);
        assert_eq!(binary(r#"{"reason":"build-finished","success":true}"#), None);
    }

    #[test]
    fn a_package_has_the_name_of_its_folder_or_the_one_that_is_given() {
        assert_eq!(package("path+file:///home/a/crates/qkv#0.1.0"), "qkv");
        assert_eq!(package("path+file:///home/a/crates/python#qkv-python@0.1.0"), "qkv-python");
    }

    #[test]
    fn what_was_skipped_and_what_failed_is_kept_of_all_runs() {
        use std::process::ExitStatus;
        let ran = |status: i32, stdout: &str, stderr: &str| {
            // In the format of `wait`, the code is in the second byte; on Windows, it is the status itself.
            #[cfg(unix)]
            let status = <ExitStatus as std::os::unix::process::ExitStatusExt>::from_raw(status << 8);
            #[cfg(windows)]
            let status = <ExitStatus as std::os::windows::process::ExitStatusExt>::from_raw(status as u32);
            Ok(Output { status, stdout: stdout.into(), stderr: stderr.into() })
        };
        let mut done = Done::default();
        done.add("cargo test a".into(), ran(0, "ok\n", "skipped: no GPU\n"));
        done.add("cargo test b".into(), ran(101, "skipped: no AMX\nnot skipped: this", ""));
        done.add("cargo test c".into(), Err(std::io::ErrorKind::NotFound.into()));
        assert_eq!(done.skipped, ["no GPU", "no AMX"]);
        assert_eq!(done.failed, ["cargo test b", "cargo test c"]);
    }
}
