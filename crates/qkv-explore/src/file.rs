//! Recordings as `.safetensors` files: our own, and files of other programs that hold queries and keys, or weights.
//!
//! **Our own** files have the key `recording` in their metadata (JSON: text, sides, steps, form, and for each layer its
//! name, group, sides and attention) and the tensors of layer `i` as `layers.i.q`, `layers.i.k`, `layers.i.lse` and any
//! other inputs of its attention.
//!
//! **Other** files have `q` and `k`, each `[B, H, N, D]`, `[H, N, D]` or `[N, D]`, and optionally `v` and `lse`
//! (`[B, H, N]`, natural logarithm); or `weights`, `[B, H, N, M]`, `[H, N, M]` or `[N, M]`. With several layers each
//! name has a prefix (`layers.0.q`, `layers.1.q`). The metadata may hold `tokens`, or `query_tokens` and `key_tokens`
//! (JSON lists of strings), and `attention` (a description as `qkv` writes it; scaled dot product by default).

mod header;
mod others;

pub(crate) use self::header::Writer;

use self::header::File;
use crate::layer::{AttentionCall, Layer, WeightSource};
use crate::recording::{Form, Recording, Side, Step};
use qkv::{Attention, Output, OwnedInputs, Select, Tensor};
use qkv_models::files::atomic;
use qkv_models::{Error, Result};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Information that files of other programs may lack.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// The tokens of both sides.
    pub tokens: Option<Vec<String>>,
    /// Index of the sequence in the batch.
    pub sequence: usize,
    /// The attention, if the file does not describe it.
    pub attention: Option<Attention>,
}

/// The metadata key of our own recordings.
const RECORDING: &str = "recording";

/// A recording without its tensors.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RecordingHeader {
    text: String,
    output: Option<String>,
    sides: Vec<Side>,
    steps: Vec<Step>,
    layers: Vec<LayerHeader>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    form: Option<Form>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct LayerHeader {
    name: String,
    group: String,
    queries: usize,
    keys: usize,
    /// `None` if the weights are stored.
    attention: Option<Attention>,
    importance: Option<Vec<f64>>,
}

/// Optional inputs of an attention that are float tensors with four axes.
const FLOATS: [&str; 5] = ["w", "w_q", "w_k", "bias", "table"];
/// Optional inputs that are lists of floats.
const LISTS: [&str; 4] = ["v_score", "scale", "sinks", "center"];

fn floats<'o>(inputs: &'o OwnedInputs<f32>, name: &str) -> Option<&'o Tensor<f32, 4>> {
    match name {
        "w" => inputs.w.as_ref(),
        "w_q" => inputs.w_q.as_ref(),
        "w_k" => inputs.w_k.as_ref(),
        "bias" => inputs.bias.as_ref(),
        _ => inputs.table.as_ref(),
    }
}

fn list<'o>(inputs: &'o OwnedInputs<f32>, name: &str) -> Option<&'o Vec<f32>> {
    match name {
        "v_score" => inputs.v_score.as_ref(),
        "scale" => inputs.scale.as_ref(),
        "sinks" => inputs.sinks.as_ref(),
        _ => inputs.center.as_ref(),
    }
}

/// Writes a recording atomically.
///
/// # Errors
/// If the log-sum-exp of a layer cannot be computed, or the file cannot be written.
pub fn save(recording: &Recording, path: impl AsRef<Path>) -> Result<()> {
    Ok(atomic::write(path, &bytes(recording)?)?)
}

fn bytes(recording: &Recording) -> Result<Vec<u8>> {
    let mut to = Writer::default();
    for (at, layer) in recording.layers.iter().enumerate() {
        let name = |part: &str| format!("layers.{at}.{part}");
        let call = match &layer.weights {
            WeightSource::Stored(weights) => {
                to.floats(name("weights"), &weights.shape(), weights.data());
                continue;
            }
            WeightSource::Call(call) => call,
        };
        let (inputs, output) = (&call.inputs, call.output()?);
        for (part, tensor) in [("q", &inputs.q), ("k", &inputs.k), ("v", &inputs.v)] {
            to.floats(name(part), &tensor.shape(), tensor.data());
        }
        if output.threshold.is_none() {
            to.floats(name("lse"), &output.lse.shape(), output.lse.data());
        }
        for part in FLOATS {
            if let Some(tensor) = floats(inputs, part) {
                to.floats(name(part), &tensor.shape(), tensor.data());
            }
        }
        for part in LISTS {
            if let Some(values) = list(inputs, part) {
                to.floats(name(part), &[values.len()], values);
            }
        }
        if let Some(lengths) = &inputs.lengths {
            to.integers(name("lengths"), &[lengths.len()], lengths.iter().map(|&x| x as i64));
        }
        if let Some(positions) = &inputs.positions {
            to.integers(name("positions"), &[positions.len()], positions.iter().copied());
        }
        if let Some([q, k]) = &inputs.segments {
            to.integers(name("q_segments"), &[q.len()], q.iter().map(|&x| i64::from(x)));
            to.integers(name("k_segments"), &[k.len()], k.iter().map(|&x| i64::from(x)));
        }
        if let Some([q, k]) = &inputs.buckets {
            to.integers(name("q_buckets"), &q.shape(), q.data().iter().map(|&x| i64::from(x)));
            to.integers(name("k_buckets"), &k.shape(), k.data().iter().map(|&x| i64::from(x)));
        }
        if let Some(bits) = &inputs.bits {
            to.integers(name("mask"), &bits.shape(), bits.data().iter().map(|&x| i64::from(x)));
        }
    }
    let layers = recording.layers.iter().map(|layer| LayerHeader {
        name: layer.name.clone(),
        group: layer.group.clone(),
        queries: layer.queries,
        keys: layer.keys,
        attention: layer.call().map(|call| call.attention.clone()),
        importance: layer.importance.clone(),
    });
    let header = RecordingHeader {
        text: recording.text.clone(),
        output: recording.output.clone(),
        sides: recording.sides.clone(),
        steps: recording.steps.clone(),
        layers: layers.collect(),
        form: recording.form.clone(),
    };
    let json = serde_json::to_string(&header).expect("plain values");
    Ok(to.bytes(&[(RECORDING, &json)]))
}

/// Reads a recording, our own or of another program.
///
/// # Errors
/// Names the file, the tensor and what is wrong with it.
pub fn open(path: impl AsRef<Path>, options: &OpenOptions) -> Result<Recording> {
    open_at(path.as_ref(), options)
}

fn open_at(path: &Path, options: &OpenOptions) -> Result<Recording> {
    let mut file = File::open(path)?;
    let mut recording = match file.metadata(RECORDING) {
        Some(_) if options.tokens.is_some() || options.sequence > 0 || options.attention.is_some() => {
            return Err(Error::invalid("the recording has its own tokens and attention")
                .with_hint("leave out the options that describe them"));
        }
        Some(json) => own(&mut file, &json)?,
        None => others::read(&mut file, options)?,
    };
    // Names are printed: control characters could move the cursor.
    let names = recording.layers.iter_mut().flat_map(|layer| [&mut layer.name, &mut layer.group]);
    for name in names.chain(recording.sides.iter_mut().map(|side| &mut side.name)) {
        *name = name.chars().map(|c| if c.is_control() { '·' } else { c }).collect();
    }
    check(&recording, path)?;
    Ok(recording)
}

fn own(file: &mut File, json: &str) -> Result<Recording> {
    let header: RecordingHeader =
        serde_json::from_str(json).map_err(|e| file.wrong("metadata `recording`", e.to_string()))?;
    let mut layers = Vec::with_capacity(header.layers.len().min(1024));
    for (at, layer) in header.layers.into_iter().enumerate() {
        let weights = match layer.attention {
            None => WeightSource::Stored(file.three(&format!("layers.{at}.weights"), 0)?),
            Some(attention) => WeightSource::Call(Box::new(call(file, &format!("layers.{at}."), attention)?)),
        };
        let LayerHeader { name, group, queries, keys, importance, .. } = layer;
        layers.push(Layer { name, group, queries, keys, weights, importance });
    }
    let RecordingHeader { text, output, sides, steps, form, .. } = header;
    Ok(Recording { text, output, sides, layers, steps, form })
}

/// The attention call of a layer whose tensors are named with `prefix`.
fn call(file: &mut File, prefix: &str, attention: Attention) -> Result<AttentionCall> {
    let name = |part: &str| format!("{prefix}{part}");
    let mut inputs = OwnedInputs::new(file.four(&name("q"), 0)?, file.four(&name("k"), 0)?, file.four(&name("v"), 0)?);
    for part in FLOATS {
        let found = file.has(&name(part)).then(|| file.four(&name(part), usize::MAX)).transpose()?;
        match part {
            "w" => inputs.w = found,
            "w_q" => inputs.w_q = found,
            "w_k" => inputs.w_k = found,
            "bias" => inputs.bias = found,
            _ => inputs.table = found,
        }
    }
    for part in LISTS {
        let found = file.has(&name(part)).then(|| file.floats(&name(part))).transpose()?;
        match part {
            "v_score" => inputs.v_score = found,
            "scale" => inputs.scale = found,
            "sinks" => inputs.sinks = found,
            _ => inputs.center = found,
        }
    }
    let whole = |file: &mut File, part: &str| -> Result<Option<Vec<i64>>> {
        file.has(&name(part)).then(|| file.integers(&name(part))).transpose()
    };
    inputs.positions = whole(file, "positions")?;
    inputs.lengths = whole(file, "lengths")?.map(|all| all.into_iter().map(|x| x.max(0) as usize).collect());
    let small = |all: Vec<i64>| {
        let fits = |x: i64| i32::try_from(x).map_err(|_| Error::invalid(format!("{x} is not a segment or bucket id")));
        all.into_iter().map(fits).collect::<Result<Vec<i32>>>()
    };
    if let (Some(q), Some(k)) = (whole(file, "q_segments")?, whole(file, "k_segments")?) {
        inputs.segments = Some([small(q)?, small(k)?]);
    }
    if let (Some(q), Some(k)) = (whole(file, "q_buckets")?, whole(file, "k_buckets")?) {
        let shaped = |file: &File, part: &str, all| Ok::<_, Error>(Tensor::new(small(all)?, file.axes(&name(part))?)?);
        inputs.buckets = Some([shaped(file, "q_buckets", q)?, shaped(file, "k_buckets", k)?]);
    }
    if let Some(bits) = whole(file, "mask")? {
        let bits = bits.into_iter().map(|x| u8::from(x != 0)).collect();
        inputs.bits = Some(Tensor::new(bits, file.axes(&name("mask"))?)?);
    }
    let lse = file.has(&name("lse")).then(|| file.floats(&name("lse"))).transpose()?;
    with_lse(file, prefix, attention, inputs, lse)
}

/// A call with the log-sum-exp that the file stores. If it has none, it is computed when weights first need it.
fn with_lse(
    file: &File,
    prefix: &str,
    attention: Attention,
    inputs: OwnedInputs<f32>,
    lse: Option<Vec<f32>>,
) -> Result<AttentionCall> {
    let refused = |e: qkv::Error| file.wrong(&format!("the tensors `{prefix}…`"), e.to_string());
    let ([_, heads, n, _], [_, _, _, dv]) = (inputs.q.shape(), inputs.v.shape());
    let of_lse = |lse: Vec<f32>| -> Result<Output<f32>> {
        // The values stay empty: weights need only the log-sum-exp.
        let lse = Tensor::new(lse, [1, heads, n]).map_err(refused)?;
        let output = Output::of_lse(lse, dv, attention.place).map_err(refused)?;
        attention.weights(inputs.inputs(), &output).map_err(refused)?;
        Ok(output)
    };
    let output = match lse {
        Some(lse) if attention.select == Select::Soft => Some(of_lse(lse)?),
        None if attention.select == Select::Soft => {
            // Any log-sum-exp will do to check that the shapes fit the description.
            of_lse(vec![0.0; heads * n])?;
            None
        }
        _ => Some(attention.forward(inputs.inputs()).map_err(refused)?),
    };
    Ok(AttentionCall::new(attention, inputs, output))
}

/// Checks that sides exist and are as long as the tensors, and that weights are valid.
fn check(recording: &Recording, path: &Path) -> Result<()> {
    let wrong = |what: String| Error::format(path, "recording", what);
    if recording.layers.is_empty() {
        return Err(wrong("it has no attention layers".into()));
    }
    if let Some(form) = &recording.form {
        form.check(recording).map_err(wrong)?;
    }
    for layer in &recording.layers {
        let [n, m] = layer.size();
        for (side, length) in [(layer.queries, n), (layer.keys, m)] {
            let Some(side) = recording.sides.get(side) else {
                return Err(wrong(format!("`{}` has no side {side}", layer.name)));
            };
            if side.len() != length {
                let found = side.len();
                return Err(wrong(format!("`{}` has {length} tokens, side `{}` has {found}", layer.name, side.name)));
            }
        }
        if layer.importance.as_ref().is_some_and(|all| all.len() != layer.heads()) {
            return Err(wrong(format!(
                "`{}` has {} heads, its importance has a different number",
                layer.name,
                layer.heads()
            )));
        }
        // Catches a log-sum-exp from another attention, or in another base.
        let rows: Vec<usize> = [0, n / 2, n.saturating_sub(1)].into_iter().filter(|&row| row < n).collect();
        if layer.call().is_some_and(|call| call.known_output().is_some()) {
            let weights = layer.rows_at(0, &rows)?;
            for (row, of_row) in rows.iter().zip(weights.data().chunks_exact(m.max(1))) {
                let sum: f32 = of_row.iter().sum();
                if !(sum.is_finite() && sum < 1.01) {
                    let what = format!("the weights of query {row} of `{}` sum to {sum}", layer.name);
                    return Err(Error::invalid(what)
                        .with_hint("`lse` must be the natural log-sum-exp of this same attention: was it causal?"));
                }
            }
        }
        if let WeightSource::Stored(weights) = &layer.weights
            && let Some(bad) = weights.data().iter().find(|w| !(w.is_finite() && **w >= 0.0))
        {
            return Err(wrong(format!("`{}` has a weight of {bad}", layer.name)));
        }
    }
    Ok(())
}
