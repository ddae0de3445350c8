//! The hidden `qkv bench-memory`: the memory of one call beyond its inputs, in a process that does nothing else.
//! PyTorch's process measures its own in the same way: the peak of resident memory, reset just before the call. Only
//! Linux reports it.

use super::case::{Case, Direction};
use super::shape::Shape;
use super::torch::MemoryReply;
use super::{formula, ours};
use crate::arguments::{Argument, Arguments, Kind, Matches};
use crate::command::{Command, Run, Status};
use crate::dtype::Precision;
use crate::failure::Failure;
use crate::memory;
use crate::output::Print;
use serde_json::json;
use std::fs;

pub(crate) const COMMAND: Command =
    Command::new("bench-memory", "Measure the memory of one call, for `qkv bench --lengths`", ARGUMENTS, |matches| {
        Ok(Box::new(MemoryProbe::parse(matches)))
    })
    .hidden();

const ARGUMENTS: Arguments = &[(
    "Call",
    &[
        Argument::new("n", Kind::TOKENS, "Length").value("N").positional().required(),
        Argument::new("threads", Kind::Integer(1, 1024), "Number of threads").value("THREADS").positional().required(),
        Argument::new("formula", Kind::Switch, "The materialized formula instead of the engine"),
    ],
)];

impl Run for MemoryProbe {
    fn run(&self, print: Print<'_>) -> Result<Status, Failure> {
        print(&self.measure()?).map(|_| Status::Done)
    }
}

/// A call whose memory is measured: one head of width 64, forward, in f32.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemoryProbe {
    pub n: usize,
    pub threads: usize,
    /// The materialized formula instead of the engine.
    pub formula: bool,
}

impl MemoryProbe {
    fn parse(matches: &Matches<'_>) -> MemoryProbe {
        let count = |name| matches.count(name).unwrap_or(1);
        MemoryProbe { n: count("n"), threads: count("threads"), formula: matches.switch("formula") }
    }

    /// The case of a length.
    pub fn case(n: usize) -> Case {
        let shape = Shape::new([1, 1, 1, n, n, 64]);
        Case { shape, precision: Precision::F32, causal: false, direction: Direction::Forward }
    }

    /// Measures in a separate process.
    pub fn spawn(self) -> Result<Option<u64>, Failure> {
        let failed = |why: String| Failure::new(format!("cannot measure the memory of a call: {why}"));
        let program = std::env::current_exe().map_err(|error| failed(error.to_string()))?;
        let mut command = std::process::Command::new(program);
        command.args(["bench-memory", &self.n.to_string(), &self.threads.to_string()]);
        command.args(self.formula.then_some("--formula"));
        let ran = command.output().map_err(|error| failed(error.to_string()))?;
        let MemoryReply { beyond_bytes } = serde_json::from_slice(&ran.stdout)
            .map_err(|_| failed(format!("{}: {}", ran.status, String::from_utf8_lossy(&ran.stderr).trim_end())))?;
        Ok(beyond_bytes)
    }

    /// Measures in this process.
    fn measure(self) -> Result<String, Failure> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(self.threads).build();
        let pool = pool.map_err(|error| Failure::new(format!("cannot start threads: {error}")))?;
        let beyond_bytes = pool.install(|| self.beyond_inputs())?;
        Ok(format!("{}\n", json!({ "beyond_bytes": beyond_bytes })))
    }

    fn beyond_inputs(self) -> Result<Option<u64>, Failure> {
        let prepare =
            |n| if self.formula { formula::prepare(MemoryProbe::case(n)) } else { ours::prepare(MemoryProbe::case(n)) };
        prepare(64)?(); // starts the threads, and makes the other allocations of a first call
        let mut call = prepare(self.n)?;
        if fs::write("/proc/self/clear_refs", "5").is_err() {
            return Ok(None);
        }
        let before = memory::field("/proc/self/status", "VmRSS:");
        call();
        Ok(memory::peak().zip(before).map(|(peak, before)| peak.saturating_sub(before)))
    }
}
