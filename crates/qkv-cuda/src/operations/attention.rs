//! Attention over tensors of the tape, `[B, L, H·D]`: plans are made once per description and shape.

use super::{Array, Kind, MAX_PLANS, Operations};
use crate::error::{Error, Result};
use crate::memory::Strided;
use crate::plan::{Plan, PlanOptions};
use crate::tensors::{Gradients, Outputs, Tensors, Upstreams, Vector};
use crate::workspace::Workspace;
use qkv::Attention;
use std::collections::HashMap;
use std::sync::Arc;

/// An attention and its inputs on the device.
#[derive(Clone, Debug)]
pub struct AttentionCall {
    /// The description.
    pub attention: Attention,
    /// Queries `[B, N, Hq·D]`, keys `[B, M, Hk·D]` and values `[B, M, Hk·Dv]`.
    pub inputs: [Array; 3],
    /// `B`.
    pub batch: usize,
    /// `N` and `M`.
    pub lengths: [usize; 2],
    /// `Hq` and `Hk`.
    pub heads: [usize; 2],
    /// The number of keys of each sequence, i32.
    pub key_lengths: Option<Array>,
    /// The segment of each token, i32 `[B, N]`, in self-attention.
    pub segments: Option<Array>,
    /// The position of each query, i64 `[B, N]`.
    pub positions: Option<Array>,
    /// The relative table `[H, 2·reach + 1]`, the learned scale and the sinks, as activations.
    pub parameters: [Option<Array>; 3],
    /// The number of heads that the table has rows for.
    pub table_heads: usize,
    /// The seed of dropout.
    pub seed: Option<u64>,
    /// Whether a backward pass follows.
    pub backward: bool,
    /// Whether it is a decoding step, with one query of each sequence in every batch: see
    /// [`PlanOptions::step`](crate::PlanOptions::step).
    pub step: bool,
}

/// The result of a forward pass.
#[derive(Clone, Debug)]
pub struct AttentionOutput {
    /// `[B, N, Hq·Dv]`.
    pub values: Array,
    /// The log-sum-exp, f32 `[B, Hq, N]`.
    pub lse: Array,
}

/// Gradients, in the shapes of the inputs.
#[derive(Clone, Debug)]
pub struct AttentionGradients {
    /// Of queries, keys and values.
    pub inputs: [Array; 3],
    /// Of the table, the scale and the sinks.
    pub parameters: [Option<Array>; 3],
}

/// What a plan depends on besides the description.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct PlanKey {
    /// The shape of every tensor, in the order of [`Tensors::shapes`].
    shapes: [Vec<usize>; 14],
    /// Whether queries, keys and values are aligned to 16 bytes.
    alignment: [bool; 3],
    options: PlanOptions,
}

/// Plans by key, with their descriptions.
pub(super) type Plans = HashMap<PlanKey, Vec<(Attention, Result<Arc<Plan>>)>>;

/// Views `[B, L, H·D]` as `[B, H, L, D]`.
fn heads_of(array: &Array, batch: usize, length: usize, heads: usize) -> Strided {
    let width = array.len() / (batch * length).max(1);
    let d = width / heads.max(1);
    let strides = [length * width, d, width, 1].map(|stride| stride as i64);
    Strided { ptr: array.ptr(), shape: [batch, heads, length, d], strides }
}

fn vector(array: &Array) -> Vector {
    Vector::new(array.ptr(), array.len())
}

impl AttentionCall {
    /// Number of elements of the values, `B·N·Hq·Dv`.
    pub fn output_len(&self) -> usize {
        let AttentionCall { inputs: [_, _, v], batch, lengths: [n, m], heads: [hq, hk], .. } = self;
        batch * n * hq * (v.len() / (batch * m * hk).max(1))
    }

    fn tensors(&self) -> Tensors {
        let AttentionCall { inputs: [q, k, v], batch, lengths: [n, m], heads: [hq, hk], .. } = self;
        let (q, k, v) = (heads_of(q, *batch, *n, *hq), heads_of(k, *batch, *m, *hk), heads_of(v, *batch, *m, *hk));
        let mut tensors = Tensors::new(q, k, v);
        tensors.lengths = self.key_lengths.as_ref().map(vector);
        tensors.segments = self.segments.as_ref().map(|segments| (vector(segments), vector(segments)));
        tensors.positions = self.positions.as_ref().map(vector);
        let [table, scale, sinks] = &self.parameters;
        let rows = self.table_heads.max(1);
        tensors.table = table.as_ref().map(|table| Strided::contiguous(table.ptr(), [1, 1, rows, table.len() / rows]));
        (tensors.scale, tensors.sinks) = (scale.as_ref().map(vector), sinks.as_ref().map(vector));
        tensors.seed = self.seed;
        tensors
    }
}

impl Operations {
    /// The plan of a call; an error if only the CPU supports it.
    fn plan(&self, call: &AttentionCall, tensors: &Tensors) -> Result<Arc<Plan>> {
        let AttentionCall { attention, backward, step, .. } = call;
        let aligned = |tensor: &Strided| tensor.ptr.is_multiple_of(16);
        let alignment = [&tensors.q, &tensors.k, &tensors.v].map(aligned);
        // The order of a sum does not depend on the number of splits, but that of a sum with a sink does.
        let step = self.batch_invariant && *step && !attention.sinks;
        let options = PlanOptions::default().backward(*backward).batch_invariant(self.batch_invariant).step(step);
        let key = PlanKey { shapes: tensors.shapes().map(|(_, shape)| shape), alignment, options };
        if let Some(plans) = self.plans().get(&key)
            && let Some((_, plan)) = plans.iter().find(|(planned, _)| planned == attention)
        {
            return plan.clone();
        }
        let dtype = self.shared.dtype;
        let plan = self.shared.cuda.plan(attention, dtype, attention.place, tensors, options).map(Arc::new);
        let mut plans = self.plans();
        if plans.values().map(Vec::len).sum::<usize>() >= MAX_PLANS {
            plans.clear();
        }
        plans.entry(key).or_default().push((attention.clone(), plan.clone()));
        plan
    }

    /// The forward pass.
    ///
    /// # Errors
    /// If the description is rejected, or runs only on the CPU.
    pub fn attention(&self, call: &AttentionCall) -> Result<AttentionOutput> {
        self.attention_into(call, self.activations(call.output_len()))
    }

    /// The forward pass with values of [`output_len`](AttentionCall::output_len) elements that are written here.
    ///
    /// # Errors
    /// As for [`attention`](Operations::attention).
    pub fn attention_into(&self, call: &AttentionCall, values: Array) -> Result<AttentionOutput> {
        let tensors = call.tensors();
        let [batch, hq, n, _] = tensors.q.shape;
        let lse = self.empty(Kind::F32, batch * hq * n, "attention");
        if let Some(error) = self.failed() {
            return Err(error);
        }
        let plan = self.plan(call, &tensors)?;
        let workspace = self.empty(Kind::U32, plan.forward_workspace().div_ceil(4), "the workspace of attention");
        let out = Outputs::new(heads_of(&values, batch, n, hq), vector(&lse));
        let space = Workspace::new(workspace.ptr(), plan.forward_workspace());
        // SAFETY: all arrays are as large as the plan's shapes, and stay valid until the stream is done with them:
        // dropped memory is reused only by later work on the same stream.
        unsafe { plan.forward(&tensors, &out, space, self.stream())? };
        Ok(AttentionOutput { values, lse })
    }

    /// The backward pass, from the gradient of the values.
    ///
    /// # Errors
    /// As for [`attention`](Operations::attention).
    ///
    /// # Panics
    /// If the call was made without `backward`.
    pub fn attention_gradients(
        &self,
        call: &AttentionCall,
        out: &AttentionOutput,
        d_values: &Array,
    ) -> Result<AttentionGradients> {
        assert!(call.backward, "a call that is planned for gradients");
        let tensors = call.tensors();
        let [batch, hq, n, _] = tensors.q.shape;
        let inputs = call.inputs.each_ref().map(|input| self.activations(input.len()));
        let parameters = call.parameters.each_ref().map(|p| p.as_ref().map(|p| self.activations(p.len())));
        if let Some(error) = self.failed() {
            return Err(error);
        }
        let plan = self.plan(call, &tensors)?;
        let workspace = self.empty(Kind::U32, plan.backward_workspace().div_ceil(4), "the workspace of attention");
        let AttentionCall { lengths: [_, m], heads: [_, hk], .. } = *call;
        let [d_q, d_k, d_v] = &inputs;
        let mut into =
            Gradients::new(heads_of(d_q, batch, n, hq), heads_of(d_k, batch, m, hk), heads_of(d_v, batch, m, hk));
        let [table, scale, sinks] = &parameters;
        (into.table, into.scale) = (table.as_ref().map(vector), scale.as_ref().map(vector));
        into.sinks = sinks.as_ref().map(vector);
        let outputs = Outputs::new(heads_of(&out.values, batch, n, hq), vector(&out.lse));
        let upstream = Upstreams::new(heads_of(d_values, batch, n, hq));
        let space = Workspace::new(workspace.ptr(), plan.backward_workspace());
        if let Some(error) = self.failed() {
            return Err(error);
        }
        // SAFETY: likewise.
        unsafe { plan.backward(&tensors, &outputs, &upstream, &into, space, self.stream())? };
        Ok(AttentionGradients { inputs, parameters })
    }

    /// Remembers an attention error that is not about the description.
    pub fn fail(&self, error: Error) {
        self.remember(Err(error));
    }
}
