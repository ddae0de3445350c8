//! Attentions recorded during a pass, for inspection: their inputs and outputs, from which weights are recomputed.
//!
//! Each carries the label of the layer that called it, so that a reader can find a layer by name instead of counting
//! calls.

use crate::float::Float;
use crate::parameters::Parameters;
use crate::saved_call::SavedCall;
use qkv::{Attention, Output, OwnedInputs};
use std::sync::{Arc, OnceLock};

/// Gradient of the loss with respect to a gate of 1 on each head's output; filled in by the backward pass.
pub(crate) type HeadGates = Arc<OnceLock<Vec<f64>>>;

/// One attention of a pass, with what is needed to recompute its weights; nothing stored is as large as the weights
/// themselves.
#[derive(Clone)]
pub struct Captured<T: Float> {
    pub(crate) label: Arc<str>,
    pub(crate) call: Arc<SavedCall<T>>,
    pub(crate) out: Output<T>,
    pub(crate) gates: HeadGates,
}

impl<T: Float> std::fmt::Debug for Captured<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Captured({}: {:?})", self.label, self.call.attention)
    }
}

impl<T: Float> Captured<T> {
    /// The [label](crate::AttendOptions::label) of the call. The layers of this crate use the prefix of their
    /// parameters, such as `decoder.layers.2.self_attn`; a layer that is called several times produces several captures
    /// with the same label.
    pub fn label(&self) -> &str {
        &self.label
    }

    /// The attention that was computed, with the lengths in its mask, and without dropout or sampling unless the tape
    /// had noise.
    pub fn attention(&self) -> &Attention {
        &self.call.attention
    }

    /// `[B, Hq, N, M]`.
    pub fn shape(&self) -> [usize; 4] {
        let [batch, heads, queries, _] = self.out.values.shape();
        [batch, heads, queries, self.call.k.shape()[1]]
    }

    /// The weights of one head for a range of queries, `[queries, M]`, recomputed exactly.
    ///
    /// # Errors
    /// If the sequence, head or query does not exist.
    pub fn weights(
        &self,
        parameters: &Parameters<T>,
        sequence: usize,
        head: usize,
        queries: std::ops::Range<usize>,
    ) -> qkv::Result<qkv::Tensor<T, 2>> {
        self.call.attention.weights(self.call.inputs(parameters), &self.out)?.rows(sequence, head, queries)
    }

    /// A copy of the call's inputs, independent of the tape and of its parameters.
    pub fn inputs(&self, parameters: &Parameters<T>) -> OwnedInputs<T> {
        OwnedInputs::of(self.call.inputs(parameters))
    }

    /// The output: `values [B, Hq, N, Dv]` and the log-sum-exp of each row.
    pub fn output(&self) -> &Output<T> {
        &self.out
    }

    /// Gradient of the loss with respect to a gate of 1 on each head's output, summed over the batch: how much the loss
    /// depends on the head (Michel et al. 2019, arXiv:1905.10650). `None` before the backward pass.
    pub fn gates(&self) -> Option<&[f64]> {
        self.gates.get().map(Vec::as_slice)
    }
}
