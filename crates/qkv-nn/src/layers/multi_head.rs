//! Multi-head attention with its four projections, W_Q, W_K, W_V and W_O (Vaswani et al. 2017): self- or
//! cross-attention with any mechanism of the library, and a cache for decoding.

use super::{Builder, KvCache, Linear, Norm, NormKind};
use crate::float::Float;
use crate::heads::Heads;
use crate::loops::Gate;
use crate::ops::attention::AttendOptions;
use crate::ops::guide::Guide;
use crate::ops::rotary::Angles;
use crate::parameters::Init;
use crate::saved_call::ScoreParameters;
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;
use qkv::{Attention, Mask, Scale, Score};
use qkv_cuda::Cuda;
use qkv_cuda::operations::{DecodeBatch, Operations};
use std::sync::Arc;

/// The configuration of a layer's attention.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionConfig {
    /// The description.
    pub attention: Attention,
    /// Query and key/value heads.
    pub heads: Heads,
    /// Width of a head, `D`; `None` divides the model's width by the query heads.
    pub head_width: Option<usize>,
    /// Whether the projections of queries, keys and values have biases.
    pub bias: bool,
    /// Whether the output projection has a bias.
    pub out_bias: bool,
    /// `ε` of an RMS norm of each query and key head before rotation (Henry et al. 2020, arXiv:2010.04245); `None` for
    /// no norm.
    pub head_norm: Option<f64>,
    /// Whether a second output projection is the gate of the first: attention on attention (Huang et al. 2019,
    /// arXiv:1908.06954), without the query.
    pub gated: bool,
    /// Weight of the entropy penalty: see [`AttendOptions::entropy`].
    pub entropy: f64,
    /// Guidance towards the diagonal in training.
    pub guide: Option<Guide>,
}

impl AttentionConfig {
    /// All biases, head width `C / Hq`, no norm of heads, no gate, no penalty and no guide.
    pub fn new(attention: Attention, heads: Heads) -> Self {
        AttentionConfig {
            attention,
            heads,
            head_width: None,
            bias: true,
            out_bias: true,
            head_norm: None,
            gated: false,
            entropy: 0.0,
            guide: None,
        }
    }
}

/// The last map of a sublayer: a linear layer, optionally gated by a second one.
#[derive(Clone, Copy, Debug)]
pub(super) struct OutputMap {
    linear: Linear,
    gate: Option<Linear>,
}

impl OutputMap {
    /// A map without a gate.
    pub fn plain(linear: Linear) -> OutputMap {
        OutputMap { linear, gate: None }
    }

    /// `W x + b`, times the sigmoid of the gate if there is one.
    pub fn forward<T: Float>(&self, tape: &mut Tape<'_, T>, x: &Var<T>) -> Var<T> {
        let Some(gate) = self.gate else { return self.linear.forward(tape, x) };
        let both = [self.linear, gate].map(|linear| (linear.weight, linear.bias));
        let [y, gate] = tape.linear_together(x, both);
        tape.gated(&gate, &y, Gate::Sigmoid)
    }

    /// `residual + dropout(`[`forward`](OutputMap::forward)`(x))`.
    pub fn added<T: Float>(&self, tape: &mut Tape<'_, T>, x: &Var<T>, residual: &Var<T>, dropout: f64) -> Var<T> {
        if self.gate.is_none() {
            return self.linear.added(tape, x, residual, dropout);
        }
        let y = self.forward(tape, x);
        tape.residual(residual, y, dropout)
    }
}

/// A multi-head attention layer.
#[derive(Clone, Debug)]
pub struct MultiHead {
    q: Linear,
    k: Linear,
    v: Linear,
    out: OutputMap,
    /// The norm of each query head, and of each key head.
    norms: Option<[Norm; 2]>,
    parameters: ScoreParameters,
    config: AttentionConfig,
    head_width: usize,
    label: Arc<str>,
}

/// Rejects descriptions that need data which a layer does not have.
pub(super) fn check(attention: &Attention) -> qkv::Result<()> {
    let needs = |tensor, needed_by| Err(qkv::Error::Missing { tensor, needed_by });
    if attention.bias.wants_tensor() {
        return needs("bias", "a bias tensor, which a layer has not (use `alibi` or `relative`)");
    }
    if attention.local.is_some() {
        return needs("center", "predictive local attention, which only the recurrent decoder has");
    }
    if attention.mask.uses(&Mask::Bits) || attention.mask.uses(&Mask::Segments) {
        return needs("mask", "a mask of bits or segments, which a layer has not");
    }
    Ok(())
}

impl MultiHead {
    /// A layer for rows of `width`. Parameters: `q_proj`, `k_proj`, `v_proj`, `out_proj`, `out_gate`, `q_norm`,
    /// `k_norm`, and those of the score.
    ///
    /// # Errors
    /// If the query heads do not divide the width and `head_width` is `None`, the key/value heads do not divide the
    /// query heads, or the description needs data that a layer does not have.
    pub fn new<T: Float>(at: &mut Builder<'_, T>, width: usize, config: &AttentionConfig) -> qkv::Result<Self> {
        let Heads { query, key } = config.heads;
        qkv::Heads::new(query, key)?;
        check(&config.attention)?;
        let even = query > 0 && width.is_multiple_of(query);
        let head_width = config.head_width.or(even.then(|| width / query)).ok_or_else(|| qkv::Error::Value {
            name: "heads",
            found: query.to_string(),
            expected: format!("a divisor of the width, {width}"),
        })?;
        let linear = |at: &mut Builder<'_, T>, name: &str, inputs, outputs| {
            let bias = if name.starts_with("out") { config.out_bias } else { config.bias };
            Linear::new(&mut at.at(name), inputs, outputs, bias)
        };
        let q = linear(at, "q_proj", width, query * head_width);
        let k = linear(at, "k_proj", width, key * head_width);
        let v = linear(at, "v_proj", width, key * head_width);
        let out = OutputMap {
            linear: linear(at, "out_proj", query * head_width, width),
            gate: config.gated.then(|| linear(at, "out_gate", query * head_width, width)),
        };
        let norms = config.head_norm.map(|epsilon| {
            ["q_norm", "k_norm"].map(|name| Norm::new(&mut at.at(name), head_width, NormKind::Rms, epsilon))
        });
        let attention = &config.attention;
        let parameters = ScoreParameters {
            w: (attention.score == Score::General)
                .then(|| at.add("score.weight", &[head_width, head_width], Init::Xavier)),
            v: (attention.score == Score::Additive)
                .then(|| at.add("score.v", &[head_width], Init::Uniform((head_width as f64).powf(-0.5)))),
            scale: (attention.scale == Scale::Learned).then(|| at.add("score.scale", &[1], Init::Ones)),
            table: attention.bias.reach().map(|reach| at.add("score.relative", &[query, 2 * reach + 1], Init::Zeros)),
            sinks: attention.sinks.then(|| at.add("score.sinks", &[query], Init::Zeros)),
        };
        Ok(MultiHead { q, k, v, out, norms, parameters, config: config.clone(), head_width, label: at.label() })
    }

    /// Queries or keys, `[B, N, H·D]`, with every head normalized: `which` selects the norm of queries (0) or keys (1).
    fn normalized_head<T: Float>(&self, tape: &mut Tape<'_, T>, which: usize, y: Var<T>) -> Var<T> {
        let Some(norms) = &self.norms else { return y };
        let shape = y.shape().to_vec();
        let rows = y.value().len() / self.head_width.max(1);
        let y = y.reshaped(&[1, rows, self.head_width]);
        norms[which].forward(tape, &y).reshaped(&shape)
    }

    /// Queries and keys with normalized heads.
    fn normalized<T: Float>(&self, tape: &mut Tape<'_, T>, [q, k]: [Var<T>; 2]) -> [Var<T>; 2] {
        [self.normalized_head(tape, 0, q), self.normalized_head(tape, 1, k)]
    }

    /// Queries and keys with normalized heads, rotated by the angles of their positions.
    fn turned<T: Float>(&self, tape: &mut Tape<'_, T>, pair: [Var<T>; 2], angles: Option<&Angles<T>>) -> [Var<T>; 2] {
        self.normalized(tape, pair).map(|y| rotated(tape, y, angles))
    }

    fn options(&self) -> AttendOptions<'_> {
        let AttentionConfig { attention, heads, entropy, .. } = &self.config;
        let (heads, parameters, entropy) = (*heads, self.parameters, *entropy);
        AttendOptions { label: &self.label, heads, parameters, entropy, ..AttendOptions::new(attention) }
    }

    /// Attends from `x [B, N, C]` to `memory [B, M, C]`, which is `x` itself in self-attention: `[B, N, C]`. If
    /// sequences are padded, `key_lengths` and `query_lengths`, `[B]` each, count the tokens of each memory and of each
    /// sequence in `x`. `angles` rotates queries and keys by their positions.
    ///
    /// # Errors
    /// As [`Tape::attend`].
    pub fn forward<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        x: &Var<T>,
        memory: &Var<T>,
        key_lengths: Option<&[usize]>,
        query_lengths: Option<&[usize]>,
        angles: Option<&Angles<T>>,
    ) -> qkv::Result<Var<T>> {
        let heads = self.heads(tape, x, memory, key_lengths, query_lengths, angles)?;
        Ok(self.out.forward(tape, &heads))
    }

    /// The output projection.
    pub(super) fn output(&self) -> OutputMap {
        self.out
    }

    /// The heads of [`forward`](MultiHead::forward) before the output projection: `[B, N, Hq·D]`.
    pub(super) fn heads<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        x: &Var<T>,
        memory: &Var<T>,
        key_lengths: Option<&[usize]>,
        query_lengths: Option<&[usize]>,
        angles: Option<&Angles<T>>,
    ) -> qkv::Result<Var<T>> {
        let [q, k] = [self.q.forward(tape, x), self.k.forward(tape, memory)];
        let [q, k] = self.turned(tape, [q, k], angles);
        let v = self.v.forward(tape, memory);
        let options = AttendOptions { key_lengths, query_lengths, ..self.options() };
        if let Some(guide) = self.config.guide {
            tape.guide(&q, &k, guide, &options)?;
        }
        tape.attend(&q, &k, &v, None, &options)
    }

    /// The heads for packed sequences, `x [B, N, C]` with the segment of each token, `[B, N]`. A token attends within
    /// its segment. `angles` are those of each token's position in its segment.
    ///
    /// # Errors
    /// As [`Tape::attend`].
    pub(super) fn forward_segments<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        x: &Var<T>,
        segments: &[i32],
        angles: Option<&Angles<T>>,
    ) -> qkv::Result<Var<T>> {
        let [q, k] = [self.q, self.k].map(|projection| projection.forward(tape, x));
        let [q, k] = self.turned(tape, [q, k], angles);
        let v = self.v.forward(tape, x);
        let options = AttendOptions { segments: Some(segments), ..self.options() };
        tape.attend(&q, &k, &v, None, &options)
    }

    /// The heads for packed sequences `x [1, T, C]` of these lengths. For inference; see [`Tape::attend_packed`].
    ///
    /// # Errors
    /// As [`Tape::attend`].
    pub(super) fn forward_packed<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        x: &Var<T>,
        lengths: &[usize],
    ) -> qkv::Result<Var<T>> {
        let [q, k, v] = [self.q, self.k, self.v].map(|projection| projection.forward(tape, x));
        let [q, k] = self.normalized(tape, [q, k]);
        tape.attend_packed([&q, &k, &v], lengths, &self.options())
    }

    /// An empty cache for `batch` sequences.
    pub fn cache<T: Float>(&self, batch: usize) -> KvCache<T> {
        KvCache::new(batch, self.config.heads, [self.head_width; 2])
    }

    /// Whether a GPU can compute its attention.
    pub fn runs_on_gpu(&self) -> bool {
        let attention = &self.config.attention;
        Cuda::supports(attention).is_ok() && attention.mask.lsh_buckets().is_none()
    }

    /// Whether its attention depends on the positions of queries.
    pub(super) fn sees_positions(&self) -> bool {
        let attention = &self.config.attention;
        attention.mask != qkv::Mask::full() || attention.bias != qkv::Bias::none() || attention.local.is_some()
    }

    /// A cache for sequences whose positions are tracked on a device.
    pub fn counted_cache<T: Float>(&self, operations: &Operations, batch: &DecodeBatch) -> KvCache<T> {
        KvCache::counted(operations, batch, self.config.heads, [self.head_width; 2])
    }

    /// Fills an empty cache with the keys and values of `memory [B, M, C]`.
    ///
    /// # Errors
    /// If the cache has another number of sequences.
    pub fn fill<T: Float>(&self, tape: &mut Tape<'_, T>, memory: &Var<T>, cache: &mut KvCache<T>) -> qkv::Result<()> {
        let [k, v] = tape.linear_together(memory, [self.k, self.v].map(|linear| (linear.weight, linear.bias)));
        let k = self.normalized_head(tape, 1, k);
        cache.fill(k.value(), v.value())
    }

    /// The heads for new tokens `x [B, new, C]`: appends their keys and values to the cache, then attends to all of it.
    /// `angles` are those of the new positions.
    ///
    /// # Errors
    /// As [`Tape::attend`].
    pub(super) fn step<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        x: &Var<T>,
        cache: &mut KvCache<T>,
        angles: Option<&Angles<T>>,
    ) -> qkv::Result<Var<T>> {
        let start = cache.len();
        let layers = [self.q, self.k, self.v].map(|linear| (linear.weight, linear.bias));
        if self.norms.is_none()
            && let Some(q) = tape.few_rows_appended(x, layers, cache, angles)
        {
            return tape.attend_cached(&q, cache, &self.options());
        }
        let [q, k, v] = tape.linear_together(x, layers);
        let [q, k] = self.normalized(tape, [q, k]);
        if let Some(q) = cache.append_counted(q.value(), k.value(), v.value(), angles)? {
            return tape.attend_cached(&tape.constant(q), cache, &self.options());
        }
        let [q, k] = [q, k].map(|y| rotated(tape, y, angles));
        self.choose_rows(tape, cache);
        cache.append(k.value(), v.value())?;
        // A prompt for an empty cache is a full forward pass, in tiles.
        if start == 0 && x.shape()[1] > 1 {
            tape.attend(&q, &k, &v, None, &self.options())
        } else {
            tape.attend_cached(&q, cache, &AttendOptions { start, ..self.options() })
        }
    }

    /// If the layer's weights are quantized, an empty cache stores its rows in f16, whose rounding error is far smaller
    /// than that of the weights.
    fn choose_rows<T: Float>(&self, tape: &Tape<'_, T>, cache: &mut KvCache<T>) {
        if tape.parameters.has_quantized(self.k.weight) && tape.machine.cuda().is_none() {
            cache.keep_half();
        }
    }

    /// The heads for the next token of each of several sequences, `x [B, 1, C]`, each with a separate cache, to which
    /// its key and value are appended: `[B, 1, Hq·D]`. `angles` are those of their positions.
    ///
    /// # Errors
    /// As [`Tape::attend`].
    pub(super) fn step_each<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        x: &Var<T>,
        caches: &mut [&mut KvCache<T>],
        angles: Option<&Angles<T>>,
    ) -> qkv::Result<Var<T>> {
        let [q, k, v] = tape.linear_together(x, [self.q, self.k, self.v].map(|linear| (linear.weight, linear.bias)));
        let [q, k] = self.turned(tape, [q, k], angles);
        let mut heads = Vec::with_capacity(q.value().len());
        for (b, cache) in caches.iter_mut().enumerate() {
            let [q, k, v] = [&q, &k, &v].map(|x| x.value().select(&[b]));
            let start = cache.len();
            self.choose_rows(tape, cache);
            cache.append(&k, &v)?;
            let options = AttendOptions { start, ..self.options() };
            let found = tape.attend_cached(&tape.constant(q), cache, &options)?;
            heads.extend_from_slice(found.value().data());
        }
        Ok(tape.constant(Tensor::new(heads, &[caches.len(), 1, q.value().width()])))
    }

    /// The heads for new tokens `x [B, new, C]`, the first at position `start`, over a cache that is not modified: the
    /// cross-attention of a decoding step.
    ///
    /// # Errors
    /// As [`Tape::attend`].
    pub(super) fn attend_cache<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        x: &Var<T>,
        cache: &KvCache<T>,
        key_lengths: Option<&[usize]>,
        start: usize,
    ) -> qkv::Result<Var<T>> {
        let q = self.q.forward(tape, x);
        let q = self.normalized_head(tape, 0, q);
        let options = AttendOptions { key_lengths, start, ..self.options() };
        tape.attend_cached(&q, cache, &options)
    }
}

fn rotated<T: Float>(tape: &mut Tape<'_, T>, y: Var<T>, angles: Option<&Angles<T>>) -> Var<T> {
    match angles {
        Some(angles) => tape.rotary(y, angles),
        None => y,
    }
}
