//! The project's chores, one command each: `cargo xtask test` is what CI runs.
//!
//! It needs nothing but the Rust toolchain; what else a step needs, the step brings: the tests of the page need a browser, which
//! comes from the system's packages.

mod browser;
mod fuzz;
#[cfg(test)]
mod markdown;

use std::env;
use std::fs;
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

const USAGE: &str = "\
usage: cargo xtask COMMAND

  test    format, lints, tests, doc tests, docs, and the conformance suite on every instruction set of this CPU;
          installs a browser from the system's packages where there is none
  bench   the figures that the README claims, measured on this machine
  docs    the pages and pictures that commands make: docs/run.md, docs/patterns.svg
  mechanisms   the table of every mechanism against length, docs/mechanisms.md (minutes)
  fuzz [TARGET] [--seconds N]   hostile bytes for every format that is read, N seconds (60) a target; all targets, or one
  long    the table of long documents, docs/long.md (most of an hour)";

fn main() -> ExitCode {
    let command = env::args().nth(1);
    if command.as_deref() == Some("fuzz") {
        return fuzz::fuzz(&env::args().skip(2).collect::<Vec<_>>());
    }
    let steps: Vec<Step> = match command.as_deref() {
        Some("test") => test(),
        Some("bench") => vec![Step::cargo("claims", "bench -p qkv --bench claims")],
        Some("docs") => vec![
            Step::cargo("the page of qkv run", "run --quiet -p qkv-cli -- page").into("docs/run.md"),
            Step::cargo("the picture of masks", "run --quiet -p qkv --example patterns").into("docs/patterns.svg"),
        ],
        Some("mechanisms") => {
            let command = "run --quiet --release -p qkv --example mechanisms";
            vec![Step::cargo("every mechanism against length", command).into("docs/mechanisms.md")]
        }
        Some("long") => {
            let command = "run --quiet --release -p qkv-models --example long";
            vec![Step::cargo("long documents", command).into("docs/long.md")]
        }
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    if command.as_deref() == Some("test")
        && let Err(error) = browser::installed()
    {
        eprintln!("{error}");
        return ExitCode::FAILURE;
    }
    for step in steps {
        eprintln!("\n── {}", step.name);
        let start = Instant::now();
        if !step.run() {
            eprintln!("\nerror: `{}` failed", step.name);
            eprintln!("hint: run it alone with `{}`", step.typed());
            return ExitCode::FAILURE;
        }
        eprintln!("── {}: {:.0} s", step.name, start.elapsed().as_secs_f64());
    }
    ExitCode::SUCCESS
}

/// One command, with the environment it runs in.
struct Step {
    name: String,
    arguments: &'static str,
    environment: Vec<(&'static str, String)>,
    /// The file that its output becomes.
    file: Option<&'static str>,
}

impl Step {
    fn cargo(name: &str, arguments: &'static str) -> Step {
        Step { name: name.to_string(), arguments, environment: Vec::new(), file: None }
    }

    fn with(mut self, variable: &'static str, value: impl Into<String>) -> Step {
        self.environment.push((variable, value.into()));
        self
    }

    /// Its output becomes this file, whole or not at all.
    fn into(mut self, file: &'static str) -> Step {
        self.file = Some(file);
        self
    }

    fn run(&self) -> bool {
        let cargo = env::var("CARGO").unwrap_or_else(|_| "cargo".into());
        let mut command = Command::new(cargo);
        command.args(self.arguments.split(' ')).envs(self.environment.clone());
        match self.file {
            None => command.status().is_ok_and(|status| status.success()),
            Some(file) => match command.stderr(Stdio::inherit()).output() {
                Ok(output) => output.status.success() && fs::write(file, output.stdout).is_ok(),
                Err(_) => false,
            },
        }
    }

    /// As one would type it.
    fn typed(&self) -> String {
        let set: String = self.environment.iter().map(|(name, value)| format!("{name}='{value}' ")).collect();
        format!("{set}cargo {}", self.arguments)
    }
}

/// Cheapest first, so that a slip shows at once.
fn test() -> Vec<Step> {
    let mut steps = vec![
        Step::cargo("format", "fmt --all --check"),
        Step::cargo("lints", "clippy --workspace --all-targets -- -D warnings"),
        Step::cargo("tests and doc tests", "test --workspace"),
        Step::cargo("the library with ndarray", "check -p qkv --features ndarray"),
        Step::cargo("docs", "doc --workspace --no-deps").with("RUSTDOCFLAGS", "-D warnings"),
    ];
    // As part of the workspace, so that nothing is compiled again with other features.
    // The tests above ran with the best instruction set; every other one passes the same suite, in the types for which it
    // computes anything else.
    for (isa, types) in narrower() {
        let step = Step::cargo(&format!("conformance on {isa} in {types}"), "test --workspace --test conformance");
        steps.push(step.with("QKV_ISA", isa).with("QKV_TYPES", types));
    }
    steps
}

/// The instruction sets of this CPU but the best, each with the types in which it differs from the next.
fn narrower() -> Vec<(&'static str, &'static str)> {
    const ALL: &str = "f32,f64,bf16,f16";
    let mut found = vec![("portable", ALL)];
    #[cfg(target_arch = "x86_64")]
    {
        if std::is_x86_feature_detected!("avx512f") {
            found.push(("avx2", ALL));
        }
        if std::is_x86_feature_detected!("avx512bf16") {
            // A name that this CPU does not have is passed over; on one without the tile unit the last is the best.
            found.extend([("avx512", "bf16"), ("avx512bf16", "bf16")]);
        }
    }
    found
}
