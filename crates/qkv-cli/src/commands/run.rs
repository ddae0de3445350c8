//! `qkv run`: attention on the tensors of a file, forward and backward.
//!
//! | module | owns |
//! | --- | --- |
//! | `args` | the arguments, the tables of tensors, and the examples |
//! | `features`, `pattern`, `place`, `selection` | values with their own syntax |
//! | `source`, `tensors` | the input file, and the tensors in it |
//! | `memory_estimate` | whether a call fits this machine |
//! | `attention`, `compute`, `over_ranks` | the description, and the call, in this process or on several ranks |
//! | `results`, `target` | the output tensors, and the output file |
//! | `report`, `example` | what is printed, and the built-in example |

pub(super) mod args;
mod attention;
mod compute;
mod example;
mod features;
mod memory_estimate;
mod over_ranks;
mod pattern;
mod place;
mod report;
mod results;
mod selection;
mod source;
mod target;
mod tensors;

use crate::atomic_file::OutputPath;
use crate::command::{Command, Run, Status};
use crate::dtype::{Computable, Precision};
use crate::failure::Failure;
use crate::output::{Print, note};
use crate::ranks::{self, RankJob};
use crate::{memory, threads};
use args::{ARGUMENTS, EXAMPLES, Engine, INPUTS, RunArgs, TensorRow, notes};
use compute::{CallOptions, RunOutput, compute};
use half::{bf16, f16};
use memory_estimate::MemoryEstimate;
use over_ranks::Division;
use pattern::Pattern;
use qkv::{Element, Features, Score, Select};
use qkv_models::files::safetensors::TensorInfo;
use qkv_ranks::Number;
use report::{Milliseconds, RunReport};
use source::Source;
use tensors::{InputTensors, precision_of};

pub(super) const COMMAND: Command =
    Command::new("run", "Compute attention on tensors from a file, forward and backward", ARGUMENTS, |matches| {
        Ok(Box::new(RunArgs::parse(matches)?))
    })
    .examples(EXAMPLES)
    .notes(notes);

impl Run for RunArgs {
    fn run(&self, print: Print<'_>) -> Result<Status, Failure> {
        ranks::start(self.ranks)?;
        let job = RankJob::join(self.rank_timeout)?;
        let threads = job.threads(self.threads)?;
        job.run(|ranks| self.call(&Division { ranks: ranks.clone(), way: self.way }, threads, print))
    }
}

impl RunArgs {
    /// Opens the files and makes the call, alone or as one of several ranks.
    fn call(&self, division: &Division, threads: Option<usize>, print: Print<'_>) -> Result<Status, Failure> {
        let source = self.input.as_deref().map(Source::open).transpose()?;
        let output = self.output.as_deref().map(|path| OutputPath::new(path, self.input.as_deref())).transpose()?;
        let precision = match (self.dtype, &source) {
            (Some(dtype), _) => dtype,
            (None, Some(source)) => precision_of(source)?,
            (None, None) => Precision::F32,
        };
        if let Some(source) = source.as_ref().filter(|_| division.ranks.is_first()) {
            warn_of_unknown_tensors(source);
        }
        memory_estimate(self, source.as_ref()).check(self.input.as_deref())?;
        let call = move || match precision {
            Precision::F32 => run_in::<f32>(self, source, output, division),
            Precision::F64 => run_in::<f64>(self, source, output, division),
            Precision::Bf16 => run_in::<bf16>(self, source, output, division),
            Precision::F16 => run_in::<f16>(self, source, output, division),
        };
        if let Some(report) = threads::on(threads, call)? {
            print(&report)?;
        }
        Ok(Status::Done)
    }
}

/// Runs the call in one element type. Returns what to print, on the first rank only.
fn run_in<T>(
    args: &RunArgs,
    source: Option<Source>,
    target: Option<OutputPath>,
    division: &Division,
) -> Result<Option<String>, Failure>
where
    T: Computable + Number,
    T::Acc: Element<Acc = T::Acc> + Number,
{
    let (tensors, input) = match source {
        Some(mut source) => (InputTensors::<T>::read(&mut source)?, Some(source.path().to_path_buf())),
        None => (example::tensors(), None),
    };
    let attention = attention::describe(args, &tensors)?;
    let with_weights = args.weights || input.is_none(); // the example draws them
    let hash = args.pattern.and_then(Pattern::hash);
    let (engine, seed, path) = (args.engine, args.seed, input.as_deref());
    let options = CallOptions { engine, seed, with_weights, path, division };
    let Some(mut output) = compute(&attention, hash, &tensors, &options)? else { return Ok(None) };
    let drawing = (input.is_none() && !args.json).then(|| example::drawing(&output));
    if !args.weights {
        output.weights = None;
    }
    let RunOutput { tiles, forward_ms, backward_ms, .. } = output;
    let (kernels, ranks) = (output.kernels.take(), output.ranks.take());
    let mut shapes = tensors.shapes();
    let results = results::results(&tensors, output);
    shapes.extend(results.iter().map(|result| (result.name.clone(), result.shape.clone())));
    if let Some(target) = &target {
        target::write(target, results)?;
    }
    let report = RunReport {
        input: input.map(|path| path.display().to_string()),
        output: target.map(|target| target.path().display().to_string()),
        dtype: T::NAME,
        engine: args.engine.name(),
        kernels,
        ranks,
        isa: qkv::Isa::best().name(),
        threads: rayon::current_num_threads(),
        shapes,
        tiles,
        milliseconds: Milliseconds { forward: forward_ms, backward: backward_ms },
        peak_memory_bytes: memory::peak(),
        attention,
    };
    Ok(Some(match drawing {
        _ if args.json => report.to_json(),
        Some(drawing) => {
            format!("{drawing}\n{report}\nNext: `qkv run --causal start`, or `qkv run --help` for your own files\n")
        }
        None => report.to_string(),
    }))
}

fn warn_of_unknown_tensors(source: &Source) {
    let known = |name: &String| INPUTS.iter().any(|(known, ..)| known == name);
    let unknown: Vec<String> =
        source.names().into_iter().filter(|name| !known(name)).map(|name| format!("`{name}`")).collect();
    if !unknown.is_empty() {
        let (path, unknown) = (source.path().display(), unknown.join(", "));
        note(format!("warning: `{path}`: ignoring unknown tensors: {unknown}"));
    }
}

/// Estimates the memory of the call from the header of the file. Wrong shapes count as 0: reading them is refused.
fn memory_estimate(args: &RunArgs, source: Option<&Source>) -> MemoryEstimate {
    let info = |name: &'static str| source.and_then(|source| source.info(name));
    let axes = |name: &'static str| match source {
        Some(_) => info(name).and_then(|info| info.shape[..].try_into().ok()).unwrap_or([0; 4]),
        None => example::SHAPE,
    };
    let bytes = |(name, ..): &TensorRow| info(name).map_or(0, TensorInfo::byte_len);
    MemoryEstimate {
        q: axes("q"),
        k: axes("k"),
        v: axes("v"),
        a: info("v_score").and_then(|info| info.shape.first().copied()).unwrap_or(0),
        file: 2 * INPUTS.iter().map(bytes).sum::<u64>(), // as read, and as converted
        backward: info("d_out").is_some(),
        reference: args.engine == Engine::Reference,
        weights: args.weights,
        chosen: match args.select {
            Select::Hard(_) => 1,
            Select::TopK(k) => k.min(axes("k")[2]),
            _ => 0,
        },
        hash: args.pattern.and_then(Pattern::hash),
        features: match args.score {
            Score::Linear(Features::Favor { count, .. }) => count,
            Score::Linear(_) => axes("q")[3],
            _ => 0,
        },
        threads: args.threads.unwrap_or_else(rayon::current_num_threads),
    }
}
