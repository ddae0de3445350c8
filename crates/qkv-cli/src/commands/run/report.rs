//! The report of `qkv run`: the same facts as one JSON object or as a few lines of text.

use super::args::Engine;
use super::compute::DeviceKernels;
use super::over_ranks::RankReport;
use super::tensors::Shapes;
use crate::threads;
use qkv::{Attention, Tiles};
use serde::{Serialize, Serializer};
use std::fmt::{self, Display};

/// The facts about a call, in the order of the JSON.
#[derive(Debug, Serialize)]
pub(crate) struct RunReport {
    /// The file of the tensors; none for the example.
    pub input: Option<String>,
    /// The file of the results.
    pub output: Option<String>,
    /// The element type.
    pub dtype: &'static str,
    pub engine: &'static str,
    /// With `--device cuda`.
    #[serde(rename = "ran", skip_serializing_if = "Option::is_none")]
    pub kernels: Option<DeviceKernels>,
    /// On several ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ranks: Option<RankReport>,
    /// The instruction set of the CPU kernels.
    pub isa: &'static str,
    pub threads: usize,
    /// Every tensor that was read or computed.
    #[serde(serialize_with = "as_map")]
    pub shapes: Shapes,
    pub tiles: Tiles,
    pub milliseconds: Milliseconds,
    /// If the system reports it.
    pub peak_memory_bytes: Option<u64>,
    /// The description, which the library can read back.
    pub attention: Attention,
}

/// How long the two passes took.
#[derive(Debug, Serialize)]
pub(crate) struct Milliseconds {
    pub forward: f64,
    pub backward: Option<f64>,
}

fn as_map<S: Serializer>(shapes: &Shapes, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(shapes.iter().map(|(name, shape)| (name, shape)))
}

impl RunReport {
    /// One JSON object, on one line.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("a report is plain data") + "\n"
    }
}

impl Display for RunReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RunReport { engine, isa, dtype, threads, tiles, milliseconds, .. } = self;
        writeln!(f, "engine   {engine}, {dtype}, {isa}, {}", threads::count(*threads))?;
        if let Some(DeviceKernels { device, forward, backward }) = &self.kernels {
            let backward = backward.as_ref().map_or(String::new(), |kernel| format!(" · backward `{kernel}`"));
            writeln!(f, "kernels  forward `{forward}`{backward} on {device}")?;
        }
        if let Some(RankReport { count, way, sent_bytes, waited_milliseconds }) = &self.ranks {
            let sent = *sent_bytes as f64 / f64::from(1 << 20);
            writeln!(
                f,
                "ranks    {count}, by {way} · {sent:.2} MiB sent · {waited_milliseconds:.3} ms waited at most"
            )?;
        }
        for (at, line) in self.shapes.chunks(4).enumerate() {
            let line: Vec<String> = line.iter().map(|(name, shape)| format!("{name} {shape:?}")).collect();
            writeln!(f, "{:9}{}", if at == 0 { "shapes" } else { "" }, line.join(" · "))?;
        }
        // Linear attention has no tiles.
        if *engine != Engine::Feature.name() {
            writeln!(f, "tiles    {} empty · {} partial · {} full", tiles.empty, tiles.partial, tiles.full)?;
        }
        write!(f, "time     {:.3} ms forward", milliseconds.forward)?;
        if let Some(backward) = milliseconds.backward {
            write!(f, " · {backward:.3} ms backward")?;
        }
        writeln!(f)?;
        if let Some(bytes) = self.peak_memory_bytes {
            writeln!(f, "memory   {:.1} MiB peak", bytes as f64 / f64::from(1 << 20))?;
        }
        match &self.output {
            Some(path) => writeln!(f, "written  {path}"),
            None => writeln!(f, "written  nothing; `--output FILE` saves the results"),
        }
    }
}
