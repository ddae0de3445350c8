//! Attention on a device: softmax over dot products, additive attention of one head, and attention to caches in device
//! memory. Everything else is left to the CPU.

use super::{AttentionBackward, Heads, SavedCall, ScoreParameters};
use crate::float::Float;
use crate::layers::KvCache;
use crate::parameters::Param;
use crate::tape::{BackwardContext, Tape};
use crate::tensor::Tensor;
use qkv::{Attention, Choice, Mask, Select};
use qkv_cuda::operations::{
    AdditiveCall, AdditiveChoice, AdditiveOutput, Array, AttentionCall, AttentionOutput, Kind, Operations,
};

/// The values that the backward pass reads.
pub(super) enum DeviceOutput<T: Float> {
    /// From a softmax: the values `[B, N, Hq·Dv]` and the log-sum-exp `[B, Hq, N]`.
    Softmax { call: Box<AttentionCall>, values: Tensor<T>, lse: Tensor<T> },
    /// From additive attention.
    Additive { call: Box<AdditiveCall>, out: AdditiveOutput },
}

impl<T: Float> Tape<'_, T> {
    /// The forward pass; `None` if only the CPU can compute it.
    pub(super) fn attend_on_device(
        &self,
        operations: &Operations,
        call: &SavedCall<T>,
        backward: bool,
    ) -> qkv::Result<Option<(Tensor<T>, DeviceOutput<T>)>> {
        let counted = [call.lengths_on(operations), call.positions_on(operations)];
        if let Some((device_call, out)) = self.softmax_on_device(operations, call, counted, [backward, false])? {
            let Heads { query, key } = call.heads;
            let shape = [call.q.shape()[0], call.q.shape()[1], call.v.width() / key * query];
            let values = Tensor::on_device(operations, out.values, &shape); // (B, N, Hq·Dv)
            let lse = Tensor::on_device(operations, out.lse, &[shape[0], query, shape[1]]);
            let call = Box::new(device_call);
            return Ok(Some((values.clone(), DeviceOutput::Softmax { call, values, lse })));
        }
        let Some(call) = self.additive_call(operations, call) else { return Ok(None) };
        let [b, n, _, _, c] = call.sizes;
        let out = operations.additive_attention(&call);
        let values = Tensor::on_device(operations, out.values.clone(), &[b, n, c]); // (B, N, C)
        Ok(Some((values, DeviceOutput::Additive { call: Box::new(call), out })))
    }

    /// The device call of an additive attention of one head, soft or hard, with no mask but padding; `None` for
    /// anything else.
    fn additive_call(&self, operations: &Operations, call: &SavedCall<T>) -> Option<AdditiveCall> {
        let v = call.parameters.v?;
        let padded = call.key_lengths.is_some();
        let mask = if padded { Mask::full() & Mask::lengths() } else { Mask::full() };
        let mut plain = Attention::additive().mask(mask);
        plain.place = call.attention.place;
        let choice = match call.attention.select {
            Select::Hard(Choice { straight_through, .. }) => Some(AdditiveChoice { seed: call.seed, straight_through }),
            _ => None,
        };
        if choice.is_some() {
            plain.select = call.attention.select;
        }
        let one_head = call.heads == Heads { query: 1, key: 1 };
        if call.attention != plain || !one_head || call.center.is_some() {
            return None;
        }
        let (&[b, n, a], &[_, m, c]) = (call.q.shape(), call.v.shape()) else { return None };
        let lengths = call.key_lengths.as_ref().map(|lengths| {
            let lengths: Vec<u32> = lengths.iter().map(|&len| len.min(m) as u32).collect();
            operations.upload(Kind::U32, &lengths, "lengths")
        });
        let [q, k, values] = [&call.q, &call.k, &call.v].map(|x| x.array(operations));
        let (v, sizes) = (self.parameters.array(v, operations), [b, n, m, a, c]);
        Some(AdditiveCall { q, k, values, v, lengths, sizes, choice })
    }

    /// The device call of a softmax over dot products, with the key lengths and positions in device memory; `None` if
    /// only the CPU can compute it.
    fn softmax_call(
        &self,
        operations: &Operations,
        call: &SavedCall<T>,
        [key_lengths, positions]: [Option<Array>; 2],
        [backward, step]: [bool; 2],
    ) -> Option<AttentionCall> {
        let ScoreParameters { w, v, scale, table, sinks } = call.parameters;
        let on_cpu = call.attention.entropy || call.center.is_some() || call.buckets.is_some();
        if on_cpu || w.is_some() || v.is_some() || call.attention.select != Select::Soft {
            return None;
        }
        let (&[batch, n, _], &[_, m, _]) = (call.q.shape(), call.k.shape()) else {
            panic!("attention takes [B, L, H·D], not {:?} and {:?}", call.q.shape(), call.k.shape())
        };
        let rounded = |param: Option<Param>| param.map(|param| self.parameters.rounded_array(param, operations));
        Some(AttentionCall {
            attention: call.attention.clone(),
            inputs: [&call.q, &call.k, &call.v].map(|x| x.array(operations)),
            batch,
            lengths: [n, m],
            heads: [call.heads.query, call.heads.key],
            key_lengths,
            segments: call.segments.as_ref().map(|segments| operations.upload(Kind::U32, segments, "segments")),
            positions,
            parameters: [rounded(table), rounded(scale), rounded(sinks)],
            table_heads: table.map_or(1, |table| self.parameters.shape(table)[0]),
            seed: call.seed,
            backward,
            step,
        })
    }

    /// A softmax over dot products on a device; `None` if only the CPU can compute it.
    fn softmax_on_device(
        &self,
        operations: &Operations,
        call: &SavedCall<T>,
        counted: [Option<Array>; 2],
        [backward, step]: [bool; 2],
    ) -> qkv::Result<Option<(AttentionCall, AttentionOutput)>> {
        let Some(call) = self.softmax_call(operations, call, counted, [backward, step]) else { return Ok(None) };
        let out = softmax_into(operations, &call, operations.activations(call.output_len()))?;
        Ok(out.map(|out| (call, out)))
    }

    /// Self-attention within each packed sequence on a device: sequences of equal length, next to each other, are one
    /// batch. `None` if only the CPU can compute it.
    pub(in crate::ops) fn attend_packed_on_device(
        &self,
        operations: &Operations,
        call: &SavedCall<T>,
        lengths: &[usize],
    ) -> qkv::Result<Option<Tensor<T>>> {
        let Some(whole) = self.softmax_call(operations, call, [None, None], [false; 2]) else { return Ok(None) };
        let shape = [1, call.q.rows(), whole.output_len() / call.q.rows().max(1)];
        let out = operations.activations(shape.iter().product());
        let mut first = 0;
        for equal in lengths.chunk_by(|a, b| a == b) {
            let (rows, tokens) = (first..first + equal.len() * equal[0], call.q.rows());
            let part = |array: &Array| {
                let width = array.len() / tokens.max(1);
                array.slice(rows.start * width..rows.end * width)
            };
            let inputs = whole.inputs.each_ref().map(part);
            let call = AttentionCall { inputs, batch: equal.len(), lengths: [equal[0]; 2], ..whole.clone() };
            if softmax_into(operations, &call, part(&out))?.is_none() {
                return Ok(None);
            }
            first = rows.end;
        }
        Ok(Some(Tensor::on_device(operations, out, &shape))) // (1, T, Hq·Dv)
    }

    /// Attention to the first rows of a cache on a device; `None` if only the CPU can compute it.
    pub(super) fn attend_rows(
        &self,
        operations: &Operations,
        call: &mut SavedCall<T>,
        (rows, room): ([Array; 2], usize),
        cache: &KvCache<T>,
    ) -> qkv::Result<Option<Tensor<T>>> {
        let (batch, new) = (call.q.shape()[0], call.q.shape()[1]);
        if call.key_lengths.is_none() {
            // Rows beyond the length are spare room: masking them keeps the shapes, and so the plan, constant while a
            // cache fills.
            call.key_lengths = Some(vec![cache.len(); batch].into());
            let mask = std::mem::replace(&mut call.attention.mask, Mask::full());
            // The last token sees every earlier one.
            let sees_all = mask == Mask::full() || mask == Mask::causal() && new == 1;
            call.attention.mask = if sees_all { Mask::lengths() } else { mask & Mask::lengths() };
            if sees_all && call.attention.bias == qkv::Bias::none() {
                (call.positions, call.attention.place) = (None, qkv::Place::Start);
            } else if cache.decode_batch().is_some() {
                call.attention.place = qkv::Place::Given;
            }
        }
        let counted = match cache.decode_batch() {
            Some(batch) => {
                let given = call.attention.place == qkv::Place::Given;
                [Some(batch.lengths().clone()), given.then(|| batch.places().clone())]
            }
            None => {
                let kept = cache.kept_lengths().cloned();
                [kept.or_else(|| call.lengths_on(operations)), call.positions_on(operations)]
            }
        };
        let step = cache.decode_batch().is_some() && new == 1;
        let [k, v] = rows.map(|array| {
            let width = array.len() / (batch * room).max(1);
            Tensor::on_device(operations, array, &[batch, room, width])
        });
        (call.k, call.v) = (k, v);
        let Some((_, out)) = self.softmax_on_device(operations, call, counted, [false, step])? else { return Ok(None) };
        let width = call.v.width() / call.heads.key * call.heads.query;
        Ok(Some(Tensor::on_device(operations, out.values, &[batch, new, width])))
    }
}

/// Computes a call into `values`; `None` if only the CPU can compute it. A failure of the device is remembered, and
/// what it should have computed is then undefined.
fn softmax_into(operations: &Operations, call: &AttentionCall, values: Array) -> qkv::Result<Option<AttentionOutput>> {
    match operations.attention_into(call, values.clone()) {
        Ok(out) => Ok(Some(out)),
        Err(qkv_cuda::Error::CpuOnly { .. }) => Ok(None),
        Err(qkv_cuda::Error::Refused(error)) => Err(error),
        Err(error) => {
            operations.fail(error);
            let rows = call.batch * call.lengths[0] * call.heads[0];
            Ok(Some(AttentionOutput { values, lse: operations.empty(Kind::F32, rows, "attention") }))
        }
    }
}

impl<T: Float> SavedCall<T> {
    /// The number of keys of each sequence, i32.
    fn lengths_on(&self, operations: &Operations) -> Option<Array> {
        let lengths = self.key_lengths.as_ref()?.iter().map(|&len| i32::try_from(len).unwrap_or(i32::MAX));
        Some(operations.upload(Kind::U32, &lengths.collect::<Vec<_>>(), "lengths"))
    }

    /// The position of each query, i64.
    fn positions_on(&self, operations: &Operations) -> Option<Array> {
        self.positions.as_ref().map(|places| operations.upload(Kind::U64, places, "positions"))
    }
}

impl<T: Float> AttentionBackward<T> {
    /// The backward pass.
    pub(super) fn backward_on_device(
        &self,
        operations: &Operations,
        out: &DeviceOutput<T>,
        upstream: &Tensor<T>,
        context: &mut BackwardContext<'_, T>,
    ) {
        match out {
            DeviceOutput::Softmax { call, values, lse } => {
                let out = AttentionOutput { values: values.array(operations), lse: lse.array(operations) };
                self.softmax_backward(operations, call, &out, upstream, context);
            }
            DeviceOutput::Additive { call, out } => {
                let sum = self.call.parameters.v.and_then(|v| context.gradients.array(v, operations));
                let d_out = upstream.array(operations);
                let d_log_prob = self.d_log_prob::<f32>(context);
                let d_log_prob = d_log_prob.map(|d| operations.upload(Kind::F32, &d, "gradients of choices"));
                let found = operations.additive_gradients(call, out, &d_out, d_log_prob.as_ref(), sum.as_ref());
                self.add_rows(operations, found, context);
            }
        }
    }

    /// The backward pass of a softmax.
    fn softmax_backward(
        &self,
        operations: &Operations,
        call: &AttentionCall,
        out: &AttentionOutput,
        upstream: &Tensor<T>,
        context: &mut BackwardContext<'_, T>,
    ) {
        let found = match operations.attention_gradients(call, out, &upstream.array(operations)) {
            Ok(found) => found,
            Err(error) => return operations.fail(error),
        };
        self.add_rows(operations, found.inputs, context);
        let ScoreParameters { table, scale, sinks, .. } = self.call.parameters;
        for (param, gradient) in [table, scale, sinks].into_iter().zip(found.parameters) {
            if let (Some(param), Some(gradient)) = (param, gradient)
                && let Some(sum) = context.gradients.array(param, operations)
            {
                operations.add(&sum, &gradient);
            }
        }
    }

    /// Adds the gradients of queries, keys and values.
    fn add_rows(&self, operations: &Operations, rows: [Array; 3], context: &mut BackwardContext<'_, T>) {
        let inputs = [&self.call.q, &self.call.k, &self.call.v];
        for ((slot, gradient), input) in self.slots.into_iter().zip(rows).zip(inputs) {
            if slot.is_some() {
                context.add(slot, Tensor::on_device(operations, gradient, input.shape()));
            }
        }
    }
}
