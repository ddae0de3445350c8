//! The command `qkv run`: from choices to a report. It only puts the parts in order: open, check, read, describe,
//! compute, write, tell.

use crate::arguments::{Choices, Engine};
use crate::choices::{INPUTS, TensorRow};
use crate::computation::{Computed, compute};
use crate::description::describe;
use crate::example;
use crate::failure::Failure;
use crate::given::{Given, precision_of};
use crate::memory::{self, Demand};
use crate::number::{Number, Precision};
use crate::pattern::Pattern;
use crate::report::{Milliseconds, Report};
use crate::results::results;
use crate::source::Source;
use crate::target::Target;
use crate::threads;
use half::{bf16, f16};
use qkv::{Features, Score, Select};
use qkv_models::files::safetensors::TensorInfo;
use std::io::Write;

/// Does it, and returns what goes to stdout.
pub(crate) fn run(choices: &Choices) -> Result<String, Failure> {
    let source = choices.input.as_deref().map(Source::open).transpose()?;
    let target = choices.output.as_deref().map(|path| Target::new(path, choices.input.as_deref())).transpose()?;
    let precision = match (choices.dtype, &source) {
        (Some(asked), _) => asked,
        (None, Some(source)) => precision_of(source)?,
        (None, None) => Precision::F32,
    };
    if let Some(source) = &source {
        warn_of_unknown_tensors(source);
    }
    demand(choices, source.as_ref()).check(choices.input.as_deref())?;
    let call = move || match precision {
        Precision::F32 => run_in::<f32>(choices, source, target),
        Precision::F64 => run_in::<f64>(choices, source, target),
        Precision::Bf16 => run_in::<bf16>(choices, source, target),
        Precision::F16 => run_in::<f16>(choices, source, target),
    };
    threads::on(choices.threads, call)
}

fn run_in<T: Number>(choices: &Choices, source: Option<Source>, target: Option<Target>) -> Result<String, Failure> {
    let (given, input) = match source {
        Some(mut source) => (Given::<T>::read(&mut source)?, Some(source.path().to_path_buf())),
        None => (example::given(), None),
    };
    let attention = describe(choices, &given)?;
    let with_weights = choices.weights || input.is_none(); // the example draws them
    let hash = choices.pattern.and_then(Pattern::hash);
    let mut computed = compute(choices.engine, &attention, hash, &given, choices.seed, with_weights, input.as_deref())?;
    let drawing = (input.is_none() && !choices.json).then(|| example::drawing(&computed));
    if !choices.weights {
        computed.weights = None;
    }
    let Computed { tiles, forward_ms, backward_ms, .. } = computed;
    let ran = computed.ran.take();
    let mut shapes = given.shapes();
    let results = results(&given, computed);
    shapes.extend(results.iter().map(|result| (result.name.clone(), result.shape.clone())));
    if let Some(target) = &target {
        target.write(results)?;
    }
    let report = Report {
        input: input.map(|path| path.display().to_string()),
        output: target.map(|target| target.path().display().to_string()),
        dtype: T::NAME,
        engine: choices.engine.name(),
        ran,
        isa: qkv::Isa::best().name(),
        threads: rayon::current_num_threads(),
        shapes,
        tiles,
        milliseconds: Milliseconds { forward: forward_ms, backward: backward_ms },
        peak_memory_bytes: memory::peak(),
        attention,
    };
    Ok(match drawing {
        _ if choices.json => report.json(),
        Some(drawing) => {
            format!("{drawing}\n{report}\nNext: `qkv run --causal start`, or `qkv run --help` for files of your own\n")
        }
        None => report.to_string(),
    })
}

fn warn_of_unknown_tensors(source: &Source) {
    let known = |name: &String| INPUTS.iter().any(|(known, ..)| known == name);
    let unknown: Vec<String> =
        source.names().into_iter().filter(|name| !known(name)).map(|name| format!("`{name}`")).collect();
    if !unknown.is_empty() {
        let (path, unknown) = (source.path().display(), unknown.join(", "));
        let _ =
            writeln!(std::io::stderr(), "warning: `{path}`: not used, because `qkv run` has no such tensor: {unknown}");
    }
}

/// What the call will take, from the header alone. Shapes that are wrong count for nothing here: reading them says so.
fn demand(choices: &Choices, source: Option<&Source>) -> Demand {
    let info = |name: &'static str| source.and_then(|source| source.info(name));
    let axes = |name: &'static str| match source {
        Some(_) => info(name).and_then(|info| info.shape[..].try_into().ok()).unwrap_or([0; 4]),
        None => example::SHAPE,
    };
    let bytes = |(name, ..): &TensorRow| info(name).map_or(0, TensorInfo::byte_len);
    Demand {
        q: axes("q"),
        k: axes("k"),
        v: axes("v"),
        a: info("v_score").and_then(|info| info.shape.first().copied()).unwrap_or(0),
        file: 2 * INPUTS.iter().map(bytes).sum::<u64>(), // as it lies in the file, and as it is computed with
        backward: info("d_out").is_some(),
        reference: choices.engine == Engine::Reference,
        weights: choices.weights,
        chosen: match choices.select {
            Select::Hard(_) => 1,
            Select::TopK(k) => k.min(axes("k")[2]),
            _ => 0,
        },
        hash: choices.pattern.and_then(Pattern::hash),
        features: match choices.score {
            Score::Linear(Features::Favor { count, .. }) => count,
            Score::Linear(_) => axes("q")[3],
            _ => 0,
        },
        threads: choices.threads.unwrap_or_else(rayon::current_num_threads),
    }
}
