//! The inputs of one attention of a pass, saved for the backward pass and for [captures](crate::Captured).

use crate::context::SharedContext;
use crate::float::Float;
use crate::heads::{Heads, split_heads};
use crate::parameters::{Param, Parameters};
use crate::tensor::Tensor;
use qkv::{Attention, Inputs, Source, View};
use std::sync::Arc;

/// The trained parameters of a score. Each is present if and only if the description needs it.
#[derive(Clone, Copy, Debug, Default)]
pub struct ScoreParameters {
    /// The general score's matrix, `[D, Dk]`.
    pub w: Option<Param>,
    /// The additive score's vector, `[A]`; queries and keys are assumed to be projected already.
    pub v: Option<Param>,
    /// The learned scale, `[1]`.
    pub scale: Option<Param>,
    /// The relative bias table, `[H, 2·reach + 1]`.
    pub table: Option<Param>,
    /// The sinks, `[H]`.
    pub sinks: Option<Param>,
}

/// The inputs of a call, saved for the backward pass and for captures.
pub(crate) struct SavedCall<T: Float> {
    pub(crate) attention: Attention,
    pub(crate) heads: Heads,
    pub(crate) parameters: ScoreParameters,
    pub(crate) key_lengths: Option<Arc<[usize]>>,
    pub(crate) positions: Option<Vec<i64>>,
    pub(crate) segments: Option<Arc<[i32]>>,
    /// The seed of dropout or of a sampled choice.
    pub(crate) seed: Option<u64>,
    pub(crate) q: Tensor<T>,
    pub(crate) k: Tensor<T>,
    pub(crate) v: Tensor<T>,
    pub(crate) center: Option<Tensor<T>>,
    pub(crate) buckets: Option<[qkv::Tensor<i32, 4>; 2]>,
    /// Present if the call is computed jointly with other tapes.
    pub(crate) context: Option<SharedContext<T>>,
}

impl<T: Float> SavedCall<T> {
    pub(crate) fn inputs<'c>(&'c self, parameters: &'c Parameters<T>) -> Inputs<'c, T> {
        let (k, v) = (split_heads(&self.k, self.heads.key), split_heads(&self.v, self.heads.key));
        self.inputs_over(parameters, [split_heads(&self.q, self.heads.query), k, v])
    }

    /// The inputs with other queries, keys and values, such as those of some of the sequences.
    pub(crate) fn inputs_over<'c>(
        &'c self,
        parameters: &'c Parameters<T>,
        [q, k, v]: [View<'c, T>; 3],
    ) -> Inputs<'c, T> {
        self.inputs_from(parameters, q, k.into(), v.into())
    }

    /// The inputs with keys and values stored in rows or pages.
    pub(crate) fn inputs_from<'c>(
        &'c self,
        parameters: &'c Parameters<T>,
        q: View<'c, T>,
        k: Source<'c, T>,
        v: Source<'c, T>,
    ) -> Inputs<'c, T> {
        let mut inputs = Inputs::new(q, k, v);
        let view = |param: Param| {
            let &[rows, columns] = parameters.shape(param) else { panic!("`{}` is no matrix", parameters.name(param)) };
            View::new(parameters.get(param), [1, 1, rows, columns]).expect("a parameter holds its shape")
        };
        let ScoreParameters { w, v, scale, table, sinks } = self.parameters;
        if let Some(w) = w {
            inputs = inputs.w(view(w));
        }
        if let Some(v) = v {
            inputs = inputs.v_score(parameters.get(v));
        }
        if let Some(scale) = scale {
            inputs = inputs.scale(parameters.get(scale));
        }
        if let Some(table) = table {
            inputs = inputs.table(view(table));
        }
        if let Some(sinks) = sinks {
            inputs = inputs.sinks(parameters.get(sinks));
        }
        if let Some(lengths) = &self.key_lengths {
            inputs = inputs.lengths(lengths);
        }
        if let Some(segments) = &self.segments {
            inputs = inputs.segments(segments, segments);
        }
        if let Some(center) = &self.center {
            inputs = inputs.center(center.data());
        }
        if let Some([q, k]) = &self.buckets {
            inputs = inputs.buckets(q, k);
        }
        if let Some(positions) = &self.positions {
            inputs = inputs.positions(positions);
        }
        inputs.seed = self.seed;
        inputs
    }
}
