//! The data of a call: the tensors that a description asks for, and the gradients that come back from above.

use crate::source::Source;
use qkv_simd::{Element, View};

/// Everything a call of an attention takes: q, k, v and what its choices ask for.
///
/// Letters, here and everywhere: `B` sequences, `Hq` query heads, `Hk` key heads, `N` queries, `M` keys, `D` and `Dk` the
/// widths of queries and keys, `Dv` that of values, `A` that of the additive score.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Inputs<'a, T: Element> {
    /// Queries, `[B, Hq, N, D]`.
    pub q: View<'a, T>,
    /// Keys, `[B, Hk, M, Dk]`.
    pub k: Source<'a, T>,
    /// Values, `[B, Hk, M, Dv]`.
    pub v: Source<'a, T>,
    /// See [`Inputs::w`].
    pub w: Option<View<'a, T>>,
    /// See [`Inputs::w_q`].
    pub w_q: Option<View<'a, T>>,
    /// See [`Inputs::w_k`].
    pub w_k: Option<View<'a, T>>,
    /// See [`Inputs::v_score`].
    pub v_score: Option<&'a [T]>,
    /// See [`Inputs::scale`].
    pub scale: Option<&'a [T]>,
    /// See [`Inputs::bias`].
    pub bias: Option<View<'a, T>>,
    /// See [`Inputs::table`].
    pub table: Option<View<'a, T>>,
    /// See [`Inputs::sinks`].
    pub sinks: Option<&'a [T]>,
    /// See [`Inputs::lengths`].
    pub lengths: Option<&'a [usize]>,
    /// See [`Inputs::segments`].
    pub segments: Option<(&'a [i32], &'a [i32])>,
    /// See [`Inputs::mask`].
    pub bits: Option<View<'a, u8>>,
    /// See [`Inputs::positions`].
    pub positions: Option<&'a [i64]>,
    /// See [`Inputs::buckets`].
    pub buckets: Option<(View<'a, i32>, View<'a, i32>)>,
    /// See [`Inputs::center`].
    pub center: Option<&'a [T]>,
}

impl<'a, T: Element> Inputs<'a, T> {
    /// Queries `[B, Hq, N, D]`, keys `[B, Hk, M, Dk]` and values `[B, Hk, M, Dv]`; keys and values may lie in
    /// [pages](crate::Pages).
    pub fn new(q: impl Into<View<'a, T>>, k: impl Into<Source<'a, T>>, v: impl Into<Source<'a, T>>) -> Self {
        Inputs {
            q: q.into(),
            k: k.into(),
            v: v.into(),
            w: None,
            w_q: None,
            w_k: None,
            v_score: None,
            scale: None,
            bias: None,
            table: None,
            sinks: None,
            lengths: None,
            segments: None,
            bits: None,
            positions: None,
            buckets: None,
            center: None,
        }
    }

    /// The matrix of the general score, `[D, Dk]`, or `[Hq, D, Dk]` for one a head.
    pub fn w(mut self, w: impl Into<View<'a, T>>) -> Self {
        self.w = Some(w.into());
        self
    }

    /// The query matrix of the additive score, `[A, D]`, or `[Hq, A, D]`. Left out, the queries count as projected.
    pub fn w_q(mut self, w_q: impl Into<View<'a, T>>) -> Self {
        self.w_q = Some(w_q.into());
        self
    }

    /// The key matrix of the additive score, `[A, Dk]`, or `[Hk, A, Dk]`. Left out, the keys count as projected.
    pub fn w_k(mut self, w_k: impl Into<View<'a, T>>) -> Self {
        self.w_k = Some(w_k.into());
        self
    }

    /// The vector of the additive score, `[A]`.
    pub fn v_score(mut self, v_score: &'a [T]) -> Self {
        self.v_score = Some(v_score);
        self
    }

    /// The learned scale, one for all heads or one for each.
    pub fn scale(mut self, scale: &'a [T]) -> Self {
        self.scale = Some(scale);
        self
    }

    /// The bias tensor: each axis of `[B, Hq, N, M]` as it is, or 1.
    pub fn bias(mut self, bias: impl Into<View<'a, T>>) -> Self {
        self.bias = Some(bias.into());
        self
    }

    /// The relative table, `[Hq, 2·reach + 1]`, or `[1, 2·reach + 1]` for all heads.
    pub fn table(mut self, table: impl Into<View<'a, T>>) -> Self {
        self.table = Some(table.into());
        self
    }

    /// The sink logits, `[Hq]`.
    pub fn sinks(mut self, sinks: &'a [T]) -> Self {
        self.sinks = Some(sinks);
        self
    }

    /// How many keys each sequence has, `[B]`.
    pub fn lengths(mut self, lengths: &'a [usize]) -> Self {
        self.lengths = Some(lengths);
        self
    }

    /// The segment of each query, `[B, N]`, and of each key, `[B, M]`.
    pub fn segments(mut self, queries: &'a [i32], keys: &'a [i32]) -> Self {
        self.segments = Some((queries, keys));
        self
    }

    /// The bits of [`Mask::bits`](crate::Mask::bits): each axis of `[B, Hq, N, M]` as it is, or 1. Not 0 means "may see".
    pub fn mask(mut self, bits: impl Into<View<'a, u8>>) -> Self {
        self.bits = Some(bits.into());
        self
    }

    /// The place of each query among the keys, `[B, N]`, for [`Place::Given`](crate::Place::Given).
    pub fn positions(mut self, positions: &'a [i64]) -> Self {
        self.positions = Some(positions);
        self
    }
}

impl<'a, T: Element> Inputs<'a, T> {
    /// The hash buckets of queries, `[B, Hq, N, rounds]`, and of keys, `[B, Hk, M, rounds]`, for
    /// [`Mask::lsh`](crate::Mask::lsh).
    pub fn buckets(mut self, queries: impl Into<View<'a, i32>>, keys: impl Into<View<'a, i32>>) -> Self {
        self.buckets = Some((queries.into(), keys.into()));
        self
    }

    /// The predicted centre of each query among the keys, `[B, Hq, N]`, for [`Attention::local`](crate::Attention::local).
    pub fn center(mut self, center: &'a [T]) -> Self {
        self.center = Some(center);
        self
    }
}

/// The gradients of the loss that come back from above: with respect to the output, and, where the caller used them, to the
/// log-sum-exp, the entropy and the log-probability of a choice.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Upstream<'a, T: Element> {
    /// See [`Upstream::new`].
    pub values: View<'a, T>,
    /// See [`Upstream::lse`].
    pub lse: Option<&'a [T::Acc]>,
    /// See [`Upstream::entropy`].
    pub entropy: Option<&'a [T::Acc]>,
    /// See [`Upstream::log_prob`].
    pub log_prob: Option<&'a [T::Acc]>,
    /// Whether the gradient of a bias tensor is computed: see [`Upstream::constant_bias`].
    pub for_bias: bool,
}

impl<'a, T: Element> Upstream<'a, T> {
    /// With respect to the output, `[B, Hq, N, Dv]`.
    pub fn new(d_out: impl Into<View<'a, T>>) -> Self {
        Upstream { values: d_out.into(), lse: None, entropy: None, log_prob: None, for_bias: true }
    }

    /// With respect to the log-sum-exp as well, `[B, Hq, N]`.
    pub fn lse(mut self, d_lse: &'a [T::Acc]) -> Self {
        self.lse = Some(d_lse);
        self
    }

    /// With respect to the entropy as well, `[B, Hq, N]`; the forward pass must have been asked for it.
    pub fn entropy(mut self, d_entropy: &'a [T::Acc]) -> Self {
        self.entropy = Some(d_entropy);
        self
    }

    /// With respect to the log-probability of what hard attention chose as well, `[B, Hq, N]`: what REINFORCE needs.
    pub fn log_prob(mut self, d_log_prob: &'a [T::Acc]) -> Self {
        self.log_prob = Some(d_log_prob);
        self
    }

    /// The bias tensor is a constant: its gradient, as large as itself, is not computed.
    pub fn constant_bias(mut self) -> Self {
        self.for_bias = false;
        self
    }
}
