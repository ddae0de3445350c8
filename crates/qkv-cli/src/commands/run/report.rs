//! What `qkv run` says about a call: the same facts as one JSON object or as a few lines for a person.

use crate::arguments::Engine;
use crate::computation::Ran;
use qkv::{Attention, Tiles};
use serde::{Serialize, Serializer};
use std::fmt::{self, Display};

/// The facts about a call, in the order in which they are told.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// Where the tensors came from; nothing for the example.
    pub input: Option<String>,
    /// Where the results went, if anywhere.
    pub output: Option<String>,
    /// The type that was computed in.
    pub dtype: &'static str,
    pub engine: &'static str,
    /// The kernels that ran on a GPU, if any did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ran: Option<Ran>,
    /// The instruction set that kernels were picked for.
    pub isa: &'static str,
    pub threads: usize,
    /// Of every tensor that was read or computed.
    #[serde(serialize_with = "as_map")]
    pub shapes: Shapes,
    pub tiles: Tiles,
    pub milliseconds: Milliseconds,
    /// The most that the process has had, where the system tells.
    pub peak_memory_bytes: Option<u64>,
    /// The description, in the form in which the library reads it back.
    pub attention: Attention,
}

/// Names and shapes, inputs first.
pub(crate) type Shapes = Vec<(String, Vec<usize>)>;

/// How long the two passes took.
#[derive(Debug, Serialize)]
pub(crate) struct Milliseconds {
    pub forward: f64,
    pub backward: Option<f64>,
}

fn as_map<S: Serializer>(shapes: &Shapes, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(shapes.iter().map(|(name, shape)| (name, shape)))
}

impl Report {
    /// As one JSON object on a line.
    pub fn json(&self) -> String {
        // Nothing in it can fail: names are strings and numbers are finite, checked when they were typed.
        serde_json::to_string(self).expect("a report is plain data") + "\n"
    }
}

impl Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { engine, isa, dtype, threads, tiles, milliseconds, .. } = self;
        let many = if *threads == 1 { "" } else { "s" };
        writeln!(f, "engine   {engine}, {dtype}, {isa}, {threads} thread{many}")?;
        if let Some(Ran { card, forward, backward }) = &self.ran {
            let backward = backward.as_ref().map_or(String::new(), |kernel| format!(" · backward `{kernel}`"));
            writeln!(f, "kernels  forward `{forward}`{backward} on {card}")?;
        }
        for (at, line) in self.shapes.chunks(4).enumerate() {
            let line: Vec<String> = line.iter().map(|(name, shape)| format!("{name} {shape:?}")).collect();
            writeln!(f, "{:9}{}", if at == 0 { "shapes" } else { "" }, line.join(" · "))?;
        }
        if *engine != Engine::Feature.name() {
            // Linear attention has none.
            writeln!(f, "tiles    {} empty · {} partial · {} full", tiles.empty, tiles.partial, tiles.full)?;
        }
        write!(f, "time     {:.3} ms forward", milliseconds.forward)?;
        if let Some(backward) = milliseconds.backward {
            write!(f, " · {backward:.3} ms backward")?;
        }
        writeln!(f)?;
        if let Some(bytes) = self.peak_memory_bytes {
            writeln!(f, "memory   {:.1} MiB at most", bytes as f64 / f64::from(1 << 20))?;
        }
        match &self.output {
            Some(path) => writeln!(f, "written  {path}"),
            None => writeln!(f, "written  nowhere: `--output FILE` keeps the results"),
        }
    }
}
