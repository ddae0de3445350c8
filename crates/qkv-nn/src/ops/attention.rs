//! Attention on the tape: calls `qkv` on heads stored side by side in each row, `[B, L, H·D]`.
//!
//! The engine writes directly into the tape's memory, with the tape's scratch and [`Machine::threads`]. Selections
//! other than softmax, attentions with an entropy penalty, and captured ones use the call that allocates its output.

mod in_half;
mod on_device;
mod shared;

use crate::captured::{Captured, HeadGates};
use crate::context::SharedContext;
use crate::float::Float;
use crate::heads::{Heads, head_strides, merge_heads, merge_heads_into, split_heads, split_heads_mut};
use crate::layers::KvCache;
use crate::parameters::{Gradients, Param};
use crate::saved_call::{SavedCall, ScoreParameters};
use crate::tape::{Backward, BackwardContext, Tape, Var};
use crate::tensor::Tensor;
use on_device::DeviceOutput;
use qkv::{
    Attention, Choice, Decode, GradientsMut, Inputs, Mask, Output, OutputMut, OutputRef, Select, Upstream, View,
    ViewMut,
};
use std::sync::Arc;
use std::time::Instant;

/// Options of one call of [`Tape::attend`].
#[derive(Clone, Copy, Debug)]
pub struct AttendOptions<'a> {
    /// The description. Dropout and sampling draw from the tape's stream in training and are off in inference.
    pub attention: &'a Attention,
    /// Names this attention when it is [captured](Tape::capture).
    pub label: &'a str,
    /// Query and key/value heads.
    pub heads: Heads,
    /// The score's parameters.
    pub parameters: ScoreParameters,
    /// Number of keys of each sequence, `[B]`; keys beyond are padding.
    pub key_lengths: Option<&'a [usize]>,
    /// Number of queries of each sequence, `[B]`; the entropy penalty ignores padding.
    pub query_lengths: Option<&'a [usize]>,
    /// Weight of the entropy penalty: this factor times the mean entropy of the rows of weights is added to the loss. A
    /// positive weight keeps attention from spreading, a negative one from collapsing.
    pub entropy: f64,
    /// Position of the first query among the keys.
    pub start: usize,
    /// The segment of each token, `[B, N]`, in self-attention over packed sequences: a token attends within its
    /// segment.
    pub segments: Option<&'a [i32]>,
}

impl<'a> AttendOptions<'a> {
    /// One head, no label, no parameters, no padding, no penalty.
    pub fn new(attention: &'a Attention) -> Self {
        AttendOptions {
            attention,
            label: "",
            heads: Heads { query: 1, key: 1 },
            parameters: ScoreParameters::default(),
            key_lengths: None,
            query_lengths: None,
            entropy: 0.0,
            start: 0,
            segments: None,
        }
    }
}

/// Which entry point of the engine computes the queries.
#[derive(Clone, Copy)]
pub(super) enum Pass {
    Forward,
    Decode,
}

/// The parts of the output that the backward pass reads.
enum SavedOutput<T: Float> {
    /// From a softmax: the values `[B, N, Hq·Dv]`, whose memory is shared with the next operation, and the log-sum-exp
    /// `[B, Hq, N]`.
    Softmax { values: Tensor<T>, lse: Tensor<T> },
    /// From a device.
    OnDevice(DeviceOutput<T>),
    /// From any selection, with entropy if it was requested.
    Any(Box<Output<T>>),
}

struct AttentionBackward<T: Float> {
    call: Arc<SavedCall<T>>,
    slots: [Option<usize>; 3],
    center: Option<usize>,
    out: SavedOutput<T>,
    /// Gradient of each row's entropy, `[B, Hq, N]`.
    d_entropy: Option<Vec<T>>,
    /// If choices are rewarded: which sequences' choices were drawn, and the step of the first query.
    drawn: Option<(Vec<bool>, usize)>,
    /// Filled in if the attention is captured.
    gates: Option<HeadGates>,
}

impl<T: Float> Tape<'_, T> {
    /// Saves a call's inputs, with a seed from this tape for dropout and sampling, or with both turned off.
    pub(super) fn save_call(
        &mut self,
        q: &Var<T>,
        k: &Tensor<T>,
        v: &Tensor<T>,
        center: Option<&Var<T>>,
        options: &AttendOptions<'_>,
    ) -> SavedCall<T> {
        let mut attention = options.attention.clone();
        let mut seed = None;
        if !self.has_noise() {
            attention = attention.for_evaluation();
        } else if attention.dropout.is_some() || matches!(attention.select, Select::Hard(Choice { sample: true, .. })) {
            seed = Some(self.stream());
        }
        if options.key_lengths.is_some() {
            attention.mask = attention.mask & Mask::lengths();
        }
        if options.segments.is_some() {
            attention.mask = attention.mask & Mask::segments();
        }
        attention.entropy = self.is_training() && options.entropy != 0.0;
        let &[batch, length, _] = q.shape() else { panic!("attention takes [B, L, H·D], not {:?}", q.shape()) };
        let positions = (options.start > 0).then(|| {
            attention.place = qkv::Place::Given;
            (0..batch).flat_map(|_| (0..length).map(|i| (options.start + i) as i64)).collect()
        });
        SavedCall {
            attention,
            heads: options.heads,
            parameters: options.parameters,
            key_lengths: options.key_lengths.map(Into::into),
            positions,
            segments: options.segments.map(Into::into),
            seed,
            q: q.value.clone(),
            k: k.clone(),
            v: v.clone(),
            center: center.map(|center| center.value.clone()),
            buckets: None,
            context: self.context.clone(),
        }
    }

    /// Computes a call of which only the values are needed, directly into `out [B, N, Hq·Dv]`.
    pub(super) fn attend_into(
        &self,
        attention: &Attention,
        inputs: Inputs<'_, T>,
        pass: Pass,
        out: &mut [T],
    ) -> qkv::Result<()> {
        if attention.select == Select::Soft {
            return self.softmax_into(attention, inputs, pass, out).map(|_| ());
        }
        let threads = self.machine.threads();
        let found = match pass {
            Pass::Forward => attention.forward_with(inputs, &self.scratch, threads)?,
            Pass::Decode => attention.decode_with(inputs, Decode::Fast, &self.scratch, threads)?,
        };
        merge_heads_into(self.machine, out, &found.values);
        Ok(())
    }

    /// Softmax attention directly into `out [B, N, Hq·Dv]`; returns the log-sum-exp, `[B, Hq, N]`.
    fn softmax_into(
        &self,
        attention: &Attention,
        inputs: Inputs<'_, T>,
        pass: Pass,
        out: &mut [T],
    ) -> qkv::Result<Tensor<T>> {
        let ([batch, heads, length, _], d) = (inputs.q.shape(), inputs.v.shape()[3]);
        let mut lse = Tensor::unwritten(self.pool, &[batch, heads, length]);
        let values = ViewMut::strided(out, 0, [batch, heads, length, d], head_strides(length, heads, d))?;
        let into = OutputMut::new(values, ViewMut::new(lse.data_mut(), [batch, heads, length, 1])?);
        let threads = self.machine.threads();
        match pass {
            Pass::Forward => attention.forward_into(inputs, into, &self.scratch, threads)?,
            Pass::Decode => {
                let [keys, values] = [inputs.k.shape(), inputs.v.shape()].map(|shape| shape.iter().product::<usize>());
                let decode = || attention.decode_into(inputs, into, Decode::Fast, &self.scratch, threads);
                self.run_decode((keys + values) * size_of::<T>(), decode)?;
            }
        }
        Ok(lse)
    }

    /// Runs a decoding step on the machine's team, and counts its time and the bytes of keys and values that it reads.
    fn run_decode(&self, bytes: usize, decode: impl FnOnce() -> qkv::Result<()>) -> qkv::Result<()> {
        let start = Instant::now();
        let done = if self.machine.threads() == 1 { decode() } else { self.machine.team().within(decode) };
        self.machine.count(start, bytes, |usage, seconds, bytes| {
            usage.attention += seconds;
            usage.attention_bytes += bytes;
        });
        done
    }

    /// Attention from `q [B, N, Hq·D]` to `k [B, M, Hk·Dk]` and `v [B, M, Hk·Dv]`: a tensor `[B, N, Hq·Dv]`. `center
    /// [B, N, Hq]` is for predictive local attention, which has one head.
    ///
    /// # Errors
    /// If `qkv` rejects the call: shapes that do not match, choices that exclude each other, or missing data that the
    /// description needs.
    pub fn attend(
        &mut self,
        q: &Var<T>,
        k: &Var<T>,
        v: &Var<T>,
        center: Option<&Var<T>>,
        options: &AttendOptions<'_>,
    ) -> qkv::Result<Var<T>> {
        let &[batch, length, _] = q.shape() else { panic!("attention takes [B, L, H·D], not {:?}", q.shape()) };
        let Some(drawn) = self.drawn(batch, options) else {
            return self.attend_once(q, k, v, center, options, None);
        };
        let chosen = self.attend_once(q, k, v, center, options, Some((drawn.clone(), options.start)))?;
        if drawn.iter().all(|&drawn| drawn) {
            return Ok(chosen);
        }
        let soft = options.attention.clone().select(Select::Soft);
        let options = AttendOptions { attention: &soft, label: "", entropy: 0.0, ..*options };
        let expected = self.attend_once(q, k, v, center, &options, None)?;
        let row = |at: usize| Some(if drawn[at / length] { at } else { batch * length + at });
        let rows: Vec<_> = (0..batch * length).map(row).collect();
        Ok(self.gather(&[&chosen, &expected], &rows, [batch, length]))
    }

    /// One call, optionally with choices that are rewarded.
    fn attend_once(
        &mut self,
        q: &Var<T>,
        k: &Var<T>,
        v: &Var<T>,
        center: Option<&Var<T>>,
        options: &AttendOptions<'_>,
        drawn: Option<(Vec<bool>, usize)>,
    ) -> qkv::Result<Var<T>> {
        let mut call = self.save_call(q, &k.value, &v.value, center, options);
        if let Some(lsh) = call.attention.mask.lsh_buckets() {
            let (q, k) = (split_heads(&call.q, options.heads.query), split_heads(&call.k, options.heads.key));
            call.buckets = Some([lsh.hash(q)?, lsh.hash(k)?]);
        }
        let capture = self.captures(options.label);
        let slots = [q.slot, k.slot, v.slot, center.and_then(|center| center.slot)];
        let ScoreParameters { w, v: vector, scale, table, sinks } = options.parameters;
        let depends = self.depends(&slots, &[w, vector, scale, table, sinks]);
        if call.context.is_some() {
            return self.attend_shared(call, depends, slots);
        }
        if let Some(operations) = self.machine.cuda().filter(|_| !capture)
            && let Some((values, out)) = self.attend_on_device(operations, &call, depends)?
        {
            return Ok(self.record_attention(values, depends, call, slots, SavedOutput::OnDevice(out), drawn));
        }
        let inputs = call.inputs(self.parameters);
        if call.attention.select == Select::Soft && !capture && !call.attention.entropy {
            let ([batch, heads, length, _], d) = (inputs.q.shape(), inputs.v.shape()[3]);
            let mut values = Tensor::unwritten(self.pool, &[batch, length, heads * d]); // (B, N, Hq·Dv)
            let lse = self.softmax_into(&call.attention, inputs, Pass::Forward, values.data_mut())?;
            let out = SavedOutput::Softmax { values: values.clone(), lse };
            return Ok(self.record_attention(values, depends, call, slots, out, None));
        }
        let out = call.attention.forward_with(inputs, &self.scratch, self.machine.threads())?;
        let values = merge_heads(self.pool, self.machine, &out.values);
        let d_entropy = out.entropy.as_ref().map(|entropy| self.penalize(entropy, options));
        let call = Arc::new(call);
        let gates = capture.then(|| {
            let gates = HeadGates::default();
            let (call, out) = (call.clone(), out.clone());
            self.captured.push(Captured { label: options.label.into(), call, out, gates: gates.clone() });
            gates
        });
        let [q, k, v, center] = slots;
        let (slots, out) = ([q, k, v], SavedOutput::Any(Box::new(out)));
        Ok(self.record(values, depends, || AttentionBackward { call, slots, center, out, d_entropy, drawn, gates }))
    }

    /// Records a call without an entropy penalty that is not captured. `slots` are those of queries, keys, values and
    /// center.
    fn record_attention(
        &mut self,
        values: Tensor<T>,
        depends: bool,
        call: SavedCall<T>,
        [q, k, v, center]: [Option<usize>; 4],
        out: SavedOutput<T>,
        drawn: Option<(Vec<bool>, usize)>,
    ) -> Var<T> {
        let (slots, d_entropy, gates) = ([q, k, v], None, None);
        let call = Arc::new(call);
        self.record(values, depends, || AttentionBackward { call, slots, center, out, d_entropy, drawn, gates })
    }

    /// Adds the weighted mean entropy of the rows that are not padding to the penalty; returns its gradient,
    /// `[B, Hq, N]`.
    fn penalize(&mut self, entropy: &qkv::Tensor<T, 3>, options: &AttendOptions<'_>) -> Vec<T> {
        let [_, heads, length] = entropy.shape();
        let live =
            |row: usize| options.query_lengths.is_none_or(|lengths| row % length < lengths[row / (heads * length)]);
        let rows = (0..entropy.data().len()).filter(|&row| live(row)).count().max(1);
        let total: f64 = entropy.data().iter().enumerate().filter(|(r, _)| live(*r)).map(|(_, e)| e.to_f64()).sum();
        let each = self.penalty_factor() * options.entropy / rows as f64;
        self.add_penalty(each * total);
        let each = T::of_f64(each);
        (0..entropy.data().len()).map(|row| if live(row) { each } else { T::ZERO }).collect()
    }

    /// Attention from new queries `q [B, N, Hq·D]` to a cache: a tensor `[B, N, Hq·Dv]`. For inference: nothing is
    /// saved for a backward pass.
    ///
    /// # Errors
    /// As [`attend`](Tape::attend).
    pub fn attend_cached(
        &mut self,
        q: &Var<T>,
        cache: &KvCache<T>,
        options: &AttendOptions<'_>,
    ) -> qkv::Result<Var<T>> {
        let empty = Tensor::new(Vec::new(), &[0]);
        let mut call = self.save_call(q, &empty, &empty, None, options);
        call.attention.entropy = false;
        if let (Some(operations), Some(rows)) = (self.machine.cuda(), cache.on_device())
            && call.attention.mask.lsh_buckets().is_none()
            && let Some(out) = self.attend_rows(operations, &mut call, rows, cache)?
        {
            return Ok(self.constant(out));
        }
        if let Some(half) = cache.half()
            && let Some(out) = self.attend_half(&call, half, cache.len())?
        {
            return Ok(self.constant(out));
        }
        let cache = &*cache.on_host();
        if let Some(lsh) = call.attention.mask.lsh_buckets() {
            // Hashing into buckets needs the rows in order.
            let keys = qkv::Tensor::new(cache.keys()?.to_vec(), cache.keys()?.shape())?;
            call.buckets = Some([lsh.hash(split_heads(&call.q, options.heads.query))?, lsh.hash(&keys)?]);
        }
        let (q, k, v) = (split_heads(&call.q, options.heads.query), cache.keys()?, cache.values()?);
        let ([batch, heads, length, _], d) = (q.shape(), v.shape()[3]);
        let mut out = Tensor::unwritten(self.pool, &[batch, length, heads * d]); // (B, N, Hq·Dv)
        let inputs = call.inputs_from(self.parameters, q, k, v);
        self.attend_into(&call.attention, inputs, Pass::Decode, out.data_mut())?;
        Ok(self.constant(out))
    }
}

/// A view of a gradient in the shape of its matrix.
fn matrix<'g, T: Float>(
    gradient: &'g mut Option<Vec<T>>,
    of: Option<View<'_, T>>,
) -> qkv::Result<Option<ViewMut<'g, T>>> {
    let (Some(gradient), Some(of)) = (gradient, of) else { return Ok(None) };
    Ok(Some(ViewMut::new(gradient, of.shape())?))
}

/// The gradients of one call, in the tape's layout.
struct CallGradients<T: Float> {
    /// Gradients of `q`, `k` and `v`, `[B, L, H·D]`.
    rows: [Tensor<T>; 3],
    center: Option<Vec<T>>,
    w: Option<Vec<T>>,
    v_score: Option<Vec<T>>,
    scale: Option<Vec<T>>,
    table: Option<Vec<T>>,
    sinks: Option<Vec<T>>,
}

impl<T: Float> AttentionBackward<T> {
    /// The gradient of the log-probability of each choice, `[B, Hq, N]`, if choices are rewarded.
    fn d_log_prob<U: Float>(&self, context: &BackwardContext<'_, T>) -> Option<Vec<U>> {
        let ((drawn, start), rewards) = self.drawn.as_ref().zip(context.rewards)?;
        Some(rewards.gradients(drawn, self.call.heads.query, self.call.q.shape()[1], *start))
    }

    /// The gradients of a softmax: the engine reads and writes the tape's memory directly.
    fn of_softmax(
        &self,
        out: OutputRef<'_, T>,
        d_out: Upstream<'_, T>,
        context: &BackwardContext<'_, T>,
    ) -> qkv::Result<CallGradients<T>> {
        let SavedCall { attention, heads, q, k, v, .. } = &*self.call;
        let inputs = self.call.inputs(context.parameters);
        let zeros = |len: Option<usize>| len.map(|len| vec![T::ZERO; len]);
        let count = |view: View<'_, T>| view.shape().iter().product();
        let mut found = CallGradients {
            rows: [q, k, v].map(|x| Tensor::unwritten(context.pool, x.shape())),
            center: zeros(inputs.center.map(<[T]>::len)),
            w: zeros(inputs.w.map(count)),
            v_score: zeros(inputs.v_score.map(<[T]>::len)),
            scale: zeros(inputs.scale.map(<[T]>::len)),
            table: zeros(inputs.table.map(count)),
            sinks: zeros(inputs.sinks.map(<[T]>::len)),
        };
        let [d_q, d_k, d_v] = &mut found.rows;
        let mut into = GradientsMut::new(
            split_heads_mut(d_q, heads.query),
            split_heads_mut(d_k, heads.key),
            split_heads_mut(d_v, heads.key),
        );
        into.center = found.center.as_deref_mut();
        into.w = matrix(&mut found.w, inputs.w)?;
        into.v_score = found.v_score.as_deref_mut();
        into.scale = found.scale.as_deref_mut();
        into.table = matrix(&mut found.table, inputs.table)?;
        into.sinks = found.sinks.as_deref_mut();
        attention.backward_into(inputs, out, d_out, into, context.scratch, context.machine.threads())?;
        Ok(found)
    }

    /// The gradients of any selection.
    fn of_any(
        &self,
        out: &Output<T>,
        d_out: Upstream<'_, T>,
        context: &BackwardContext<'_, T>,
    ) -> qkv::Result<CallGradients<T>> {
        let inputs = self.call.inputs(context.parameters);
        let (attention, threads) = (&self.call.attention, context.machine.threads());
        let found = match &self.call.context {
            Some(SharedContext { with, length }) => with.backward(*length, attention, inputs, out, d_out, threads)?,
            None => attention.backward_with(inputs, out, d_out, context.scratch, threads)?,
        };
        Ok(CallGradients {
            rows: [&found.q, &found.k, &found.v].map(|x| merge_heads(context.pool, context.machine, x)),
            center: found.center,
            w: found.w.map(qkv::Tensor::into_data),
            v_score: found.v_score,
            scale: found.scale,
            table: found.table.map(qkv::Tensor::into_data),
            sinks: found.sinks,
        })
    }
}

fn accumulate<T: Float>(gradients: &mut Gradients<T>, param: Option<Param>, gradient: Option<Vec<T>>) {
    if let (Some(param), Some(gradient)) = (param, gradient) {
        gradients.sum(param).into_iter().flatten().zip(gradient).for_each(|(sum, x)| *sum += x);
    }
}

/// The gradient of a gate on each head: the sum over the head of the output times its gradient.
fn gate_gradients<T: Float>(values: &qkv::Tensor<T, 4>, upstream: View<'_, T>) -> Vec<f64> {
    let [_, heads, length, d] = values.shape();
    let mut sums = vec![0.0; heads];
    for (at, value) in values.data().iter().enumerate() {
        let (row, x) = (at / d, at % d);
        let (b, h, i) = (row / (heads * length), row / length % heads, row % length);
        sums[h] += value.to_f64() * upstream.at(b, h, i, x).to_f64();
    }
    sums
}

impl<T: Float> Backward<T> for AttentionBackward<T> {
    fn parameters(&self) -> Option<Vec<Param>> {
        let ScoreParameters { w, v, scale, table, sinks } = self.call.parameters;
        Some([w, v, scale, table, sinks].into_iter().flatten().collect())
    }

    fn backward(self: Box<Self>, upstream: Tensor<T>, context: &mut BackwardContext<'_, T>) {
        if let (SavedOutput::OnDevice(out), Some(operations)) = (&self.out, context.machine.cuda()) {
            return self.backward_on_device(operations, out, &upstream, context);
        }
        let (call, heads) = (&*self.call, self.call.heads.query);
        let &[batch, length, _] = call.q.shape() else { unreachable!("`save_call` checked the axes") };
        let width = upstream.len() / (batch * length).max(1);
        let upstream = upstream.reshaped(&[batch, length, width]);
        let d_out = Upstream::new(split_heads(&upstream, heads));
        let found = match &self.out {
            SavedOutput::Softmax { values, lse } => {
                self.of_softmax(OutputRef::new(split_heads(values, heads), lse.data()), d_out, context)
            }
            SavedOutput::OnDevice(_) => unreachable!("computed above"),
            SavedOutput::Any(out) => {
                if let Some(gates) = &self.gates {
                    gates.set(gate_gradients(&out.values, d_out.values)).expect("the backward pass runs once");
                }
                let d_out = match &self.d_entropy {
                    Some(d_entropy) => d_out.entropy(d_entropy),
                    None => d_out,
                };
                let d_log_prob = self.d_log_prob::<T>(context);
                let d_out = match &d_log_prob {
                    Some(d_log_prob) => d_out.log_prob(d_log_prob),
                    None => d_out,
                };
                self.of_any(out, d_out, context)
            }
        };
        let CallGradients { rows, center, w, v_score, scale, table, sinks } =
            found.expect("inputs that forward accepted");
        for (slot, gradient) in self.slots.into_iter().zip(rows) {
            if slot.is_some() {
                context.add(slot, gradient);
            }
        }
        if let (Some(slot), Some(gradient)) = (self.center, center) {
            let shape = call.center.as_ref().expect("its gradient was computed").shape().to_vec();
            context.add(Some(slot), Tensor::adopted(context.pool, gradient, &shape));
        }
        let parameters = call.parameters;
        accumulate(context.gradients, parameters.w, w);
        accumulate(context.gradients, parameters.v, v_score);
        accumulate(context.gradients, parameters.scale, scale);
        accumulate(context.gradients, parameters.table, table);
        accumulate(context.gradients, parameters.sinks, sinks);
    }
}
