//! The project's chores, one command each; `cargo xtask test` is what CI runs.
//!
//! They need nothing but a Rust toolchain. Anything else that a step needs, it installs (a browser from the system's
//! packages, NVRTC and MPICH from PyPI), or it is skipped with a reason, which the summary repeats.

mod browser;
mod cycles;
mod files;
mod fuzz;
mod glossary;
mod lines;
#[cfg(test)]
mod markdown;
mod mpich;
mod nvrtc;
mod python;
mod step;
mod suites;
mod test;
mod toolchain;
mod unsafe_code;
mod words;

use std::env;
use std::process::ExitCode;
use step::Step;

const USAGE: &str = "\
usage: cargo xtask COMMAND

  test [--full]   everything CI runs: format, lints, tests, doc tests, docs, packages, other targets, and the promises
                  (conformance, determinism, absence, sizes, memory) on every instruction set of this CPU, over a sample
                  (QKV_SEED repeats one); binaries of tests run three at a time, and what one prints comes when it has
                  ended; with --full every case, Miri, the sanitizers, cargo-deny and NEON (an hour)
  python          the Python package with every framework, in target/python: built, installed, tested (gigabytes)
  words           retired words that came back (docs/glossary.md)
  cycles          circles of more than three files that use one another
  lines           lines of code wider than 120 columns
  package         packs every published crate, without verifying
  targets         checks `qkv` for other targets, where they are installed
  neon            kernels and promises on aarch64, run by QEMU
  miri            Miri over the views, shared memory and portable lanes of qkv-simd (nightly)
  sanitize        AddressSanitizer and ThreadSanitizer over the crates with unsafe code (nightly)
  deny            licenses, bans, sources and advisories of the dependencies (cargo-deny)
  bench           the figures that the README claims, measured on this machine
  docs            the pages and pictures that commands make: docs/run.md, docs/patterns.svg
  mechanisms      the table of every mechanism against length, docs/mechanisms.md (minutes)
  long            the table of long documents, docs/long.md (most of an hour)
  kills [N]       kills N (20) ranks of a training run at random moments, over MPI: its end has the bytes of one process
  hashes [STEPS]  trains three recipes for 50 steps on 1, 2, 3, 4 and 8 ranks, killed and resumed: the same bytes
  fuzz [TARGET] [--seconds N]   hostile bytes for every format, N seconds (60) a target; all targets, or one";

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let steps = match words[..] {
        ["fuzz", ..] => return fuzz::fuzz(&arguments[1..]),
        ["test"] => test::steps(false),
        ["test", "--full"] => test::steps(true),
        ["kills"] => mpich::kills(20),
        ["kills", times] if times.parse::<u32>().is_ok() => mpich::kills(times.parse().unwrap_or(20)),
        ["hashes"] => mpich::hashes(50),
        ["hashes", steps] if steps.parse::<u32>().is_ok() => mpich::hashes(steps.parse().unwrap_or(50)),
        ["words"] => vec![Step::check("retired words", "words", words::check)],
        ["cycles"] => vec![Step::check("circles of files", "cycles", cycles::check)],
        ["lines"] => vec![Step::check("width of lines", "lines", lines::check)],
        ["browser"] => vec![Step::check("a browser for the explorer's tests", "browser", browser::installed)],
        ["python"] => python::all_steps(),
        ["package"] => vec![Step::cargo("packages", test::PACKAGE)],
        ["targets"] => test::targets(),
        ["neon"] => test::neon(),
        ["miri"] => unsafe_code::miri(),
        ["sanitize"] => unsafe_code::sanitize(),
        ["deny"] => unsafe_code::deny(),
        ["bench"] => vec![Step::cargo("claims", "bench -p qkv --bench claims")],
        ["docs"] => vec![
            Step::cargo("the page of qkv run", "run --quiet -p qkv-cli -- page").into_file("docs/run.md"),
            Step::cargo("the picture of masks", "run --quiet -p figures --bin patterns").into_file("docs/patterns.svg"),
        ],
        ["mechanisms"] => {
            let command = "run --quiet --release -p figures --bin mechanisms";
            vec![Step::cargo("every mechanism against length", command).into_file("docs/mechanisms.md")]
        }
        ["long"] => {
            let command = "run --quiet --release -p figures --bin long";
            vec![Step::cargo("long documents", command).into_file("docs/long.md")]
        }
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    if step::run_all(&steps) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
