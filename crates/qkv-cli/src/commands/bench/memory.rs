//! What one call takes beyond its inputs, found by a process that does nothing else: the hidden command `qkv bench-memory`.
//! The anchor finds its own in the same way, in a process of its own: the peak of what is resident, counted anew from just
//! before the call. Linux tells it; elsewhere it is not known.

use super::anchor::Memory;
use super::case::{Case, Direction};
use super::shape::Shape;
use super::{formula, ours};
use crate::failure::Failure;
use crate::memory;
use crate::number::Precision;
use clap::{Arg, ArgMatches, Command, value_parser};
use serde_json::json;
use std::fs;

/// The call whose memory is asked for: one head of width 64, forward, in f32.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    pub n: usize,
    pub threads: usize,
    /// The materialised formula, not the engine.
    pub formula: bool,
}

impl Held {
    pub fn command() -> Command {
        let number = |name| Arg::new(name).required(true).value_parser(value_parser!(u64).range(1..=1 << 20));
        Command::new("bench-memory")
            .hide(true)
            .about("Prints what one forward call takes beyond its inputs, for `qkv bench --lengths`")
            .args([number("n"), number("threads")])
            .arg(Arg::new("formula").long("formula").num_args(0))
    }

    pub fn read(matches: &ArgMatches) -> Held {
        let number = |name| matches.get_one::<u64>(name).map_or(1, |&x| x as usize); // at most 2²⁰
        Held { n: number("n"), threads: number("threads"), formula: matches.get_flag("formula") }
    }

    /// The case of a length.
    pub fn case(n: usize) -> Case {
        let shape = Shape::new([1, 1, 1, n, n, 64]);
        Case { shape, precision: Precision::F32, causal: false, direction: Direction::Forward }
    }

    /// Asks a process of its own.
    pub fn ask(self) -> Result<Option<u64>, Failure> {
        let failed = |why: String| Failure::new(format!("the memory of a call could not be measured: {why}"));
        let program = std::env::current_exe().map_err(|error| failed(error.to_string()))?;
        let mut command = std::process::Command::new(program);
        command.args(["bench-memory", &self.n.to_string(), &self.threads.to_string()]);
        command.args(self.formula.then_some("--formula"));
        let ran = command.output().map_err(|error| failed(error.to_string()))?;
        let Memory { beyond_bytes } = serde_json::from_slice(&ran.stdout)
            .map_err(|_| failed(format!("{}: {}", ran.status, String::from_utf8_lossy(&ran.stderr).trim_end())))?;
        Ok(beyond_bytes)
    }

    /// Measures it, in this process.
    pub fn measure(self) -> Result<String, Failure> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(self.threads).build();
        let pool = pool.map_err(|error| Failure::new(format!("no threads could be started: {error}")))?;
        let beyond_bytes = pool.install(|| self.beyond())?;
        Ok(format!("{}\n", json!({ "beyond_bytes": beyond_bytes })))
    }

    fn beyond(self) -> Result<Option<u64>, Failure> {
        let prepare = |n| if self.formula { formula::prepare(Held::case(n)) } else { ours::prepare(Held::case(n)) };
        prepare(64)?(); // threads and what else any call has
        let mut call = prepare(self.n)?;
        if fs::write("/proc/self/clear_refs", "5").is_err() {
            return Ok(None);
        }
        let before = memory::field("/proc/self/status", "VmRSS:");
        call();
        Ok(memory::peak().zip(before).map(|(peak, before)| peak.saturating_sub(before)))
    }
}
