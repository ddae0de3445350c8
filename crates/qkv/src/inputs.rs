//! The tensors of a call, forward ([`Inputs`]) and backward ([`Upstream`]). Which of them a description needs, and
//! which shapes go together, is checked by [`Problem`](crate::engine::Problem).
//!
//! Letters in shapes: `B` sequences, `Hq` query heads, `Hk` key heads, `N` queries, `M` keys, `D` and `Dk` the widths
//! of queries and keys, `Dv` the width of values, `A` the width of the additive score.

use crate::source::Source;
use qkv_simd::{Element, View};

/// The optional tensors of a call, as one table: [`Inputs`], [`OwnedInputs`](crate::OwnedInputs),
/// [`Gradients`](crate::Gradients) and [`GradientsMut`](crate::GradientsMut) take their fields from it. Each row has a
/// name, the borrowed and the owned type. Those in the first group have gradients; the string documents the gradient.
macro_rules! for_each_input {
    ($callback:ident) => {
        $callback! {
            differentiable {
                w: View<'a, T>, Tensor<T, 4>, ViewMut<'a, T>, "the general score's matrix, `[1, 1 or Hq, D, Dk]`";
                w_q: View<'a, T>, Tensor<T, 4>, ViewMut<'a, T>, "the additive score's query matrix, `[1, 1 or Hq, A, D]`";
                w_k: View<'a, T>, Tensor<T, 4>, ViewMut<'a, T>, "the additive score's key matrix, `[1, 1 or Hk, A, Dk]`";
                v_score: &'a [T], Vec<T>, &'a mut [T], "the additive score's vector, `[A]`";
                scale: &'a [T], Vec<T>, &'a mut [T], "the learned scale, `[1 or Hq]`";
                bias: View<'a, T>, Tensor<T, 4>, ViewMut<'a, T>, "the bias tensor, in the shape of the input";
                table: View<'a, T>, Tensor<T, 4>, ViewMut<'a, T>, "the relative table, `[1, 1, 1 or Hq, 2·reach + 1]`";
                sinks: &'a [T], Vec<T>, &'a mut [T], "the sinks, `[Hq]`";
                center: &'a [T], Vec<T>, &'a mut [T], "the predicted centers, `[B, Hq, N]`";
            }
            constant {
                lengths: &'a [usize], Vec<usize>;
                segments: (&'a [i32], &'a [i32]), [Vec<i32>; 2];
                bits: View<'a, u8>, Tensor<u8, 4>;
                positions: &'a [i64], Vec<i64>;
                buckets: (View<'a, i32>, View<'a, i32>), [Tensor<i32, 4>; 2];
                seed: u64, u64;
            }
        }
    };
}
pub(crate) use for_each_input;

macro_rules! inputs {
    (
        differentiable { $($with:ident: $view:ty, $owned:ty, $mut:ty, $doc:literal;)* }
        constant { $($name:ident: $data:ty, $kept:ty;)* }
    ) => {
        /// The tensors of a call. `q`, `k` and `v` are always needed; the others only if the description uses them, and
        /// it is an error to pass a tensor that the description does not use.
        ///
        /// ```
        /// use qkv::{Attention, Inputs, Mask, Tensor};
        /// let q = Tensor::<f32, 4>::randn([2, 4, 10, 16], 1); // [B, Hq, N, D]
        /// let k = Tensor::<f32, 4>::randn([2, 2, 12, 16], 2); // [B, Hk, M, D]
        /// let padded = Attention::scaled_dot().mask(Mask::lengths());
        /// let out = padded.forward(Inputs::new(&q, &k, &k).lengths(&[12, 7]))?;
        /// assert_eq!(out.values.shape(), [2, 4, 10, 16]);
        /// # Ok::<(), qkv::Error>(())
        /// ```
        #[derive(Clone, Copy, Debug)]
        #[non_exhaustive]
        pub struct Inputs<'a, T: Element> {
            /// Queries, `[B, Hq, N, D]`.
            pub q: View<'a, T>,
            /// Keys, `[B, Hk, M, Dk]`.
            pub k: Source<'a, T>,
            /// Values, `[B, Hk, M, Dv]`.
            pub v: Source<'a, T>,
            $(
                #[doc = concat!("See [`Inputs::", stringify!($with), "`](method@Inputs::", stringify!($with), ").")]
                pub $with: Option<$view>,
            )*
            $(
                #[doc = concat!("See [`Inputs::", stringify!($name), "`](method@Inputs::", stringify!($name), ").")]
                pub $name: Option<$data>,
            )*
        }

        impl<'a, T: Element> Inputs<'a, T> {
            /// Queries `[B, Hq, N, D]`, keys `[B, Hk, M, Dk]` and values `[B, Hk, M, Dv]`. Keys and values may be
            /// [pages](crate::Pages) of a cache.
            pub fn new(q: impl Into<View<'a, T>>, k: impl Into<Source<'a, T>>, v: impl Into<Source<'a, T>>) -> Self {
                Inputs { q: q.into(), k: k.into(), v: v.into(), $($with: None,)* $($name: None,)* }
            }
        }
    };
}
for_each_input!(inputs);

impl<'a, T: Element> Inputs<'a, T> {
    /// The matrix of the general score, `[D, Dk]`, or `[Hq, D, Dk]` for one per head.
    pub fn w(mut self, w: impl Into<View<'a, T>>) -> Self {
        self.w = Some(w.into());
        self
    }

    /// The query matrix of the additive score, `[A, D]`, or `[Hq, A, D]`. Without it, `q` counts as already projected.
    pub fn w_q(mut self, w_q: impl Into<View<'a, T>>) -> Self {
        self.w_q = Some(w_q.into());
        self
    }

    /// The key matrix of the additive score, `[A, Dk]`, or `[Hk, A, Dk]`. Without it, `k` counts as already projected.
    pub fn w_k(mut self, w_k: impl Into<View<'a, T>>) -> Self {
        self.w_k = Some(w_k.into());
        self
    }

    /// The vector of the additive score, `[A]`.
    pub fn v_score(mut self, v_score: &'a [T]) -> Self {
        self.v_score = Some(v_score);
        self
    }

    /// The learned scale: one number for all heads, or one per query head.
    pub fn scale(mut self, scale: &'a [T]) -> Self {
        self.scale = Some(scale);
        self
    }

    /// The bias tensor, which broadcasts to `[B, Hq, N, M]`: each axis has that size or 1.
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

    /// The predicted center of each query among the keys, `[B, Hq, N]`, for
    /// [`Attention::local`](crate::Attention::local).
    pub fn center(mut self, center: &'a [T]) -> Self {
        self.center = Some(center);
        self
    }

    /// The number of keys of each sequence, `[B]`, for [`Mask::lengths`](crate::Mask::lengths).
    pub fn lengths(mut self, lengths: &'a [usize]) -> Self {
        self.lengths = Some(lengths);
        self
    }

    /// The segment of each query, `[B, N]`, and of each key, `[B, M]`, for [`Mask::segments`](crate::Mask::segments).
    pub fn segments(mut self, queries: &'a [i32], keys: &'a [i32]) -> Self {
        self.segments = Some((queries, keys));
        self
    }

    /// The bits of [`Mask::bits`](crate::Mask::bits), which broadcast to `[B, Hq, N, M]`: each axis has that size or 1.
    /// A pair is visible if its bit is `true`, or not 0. Tensors of `bool` and of `u8` are both accepted.
    ///
    /// ```
    /// # use qkv::*; let x = Tensor::<f32, 4>::randn([1, 2, 3, 4], 1);
    /// let by_bits = Attention::scaled_dot().mask(Mask::bits());
    /// let bools = Tensor::from_fn([1, 1, 3, 3], |[_, _, i, j]| j <= i);
    /// let bytes = bools.map(|&visible| u8::from(visible));
    /// let out = by_bits.forward(Inputs::new(&x, &x, &x).bits(&bools))?;
    /// assert_eq!(out, by_bits.forward(Inputs::new(&x, &x, &x).bits(&bytes))?);
    /// # Ok::<(), qkv::Error>(())
    /// ```
    pub fn bits(mut self, bits: impl Into<View<'a, u8>>) -> Self {
        self.bits = Some(bits.into());
        self
    }

    /// The position of each query among the keys, `[B, N]`, for [`Place::Given`](crate::Place::Given).
    pub fn positions(mut self, positions: &'a [i64]) -> Self {
        self.positions = Some(positions);
        self
    }

    /// The hash buckets of queries, `[B, Hq, N, rounds]`, and of keys, `[B, Hk, M, rounds]`, for
    /// [`Mask::lsh`](crate::Mask::lsh).
    pub fn buckets(mut self, queries: impl Into<View<'a, i32>>, keys: impl Into<View<'a, i32>>) -> Self {
        self.buckets = Some((queries.into(), keys.into()));
        self
    }

    /// The seed of dropout and of sampled hard attention: the same seed draws the same on every device. A training loop
    /// passes a new one at each step, and the backward pass gets the seed of its forward pass. A call that draws
    /// nothing ignores it.
    ///
    /// ```
    /// # use qkv::*; let x = Tensor::<f32, 4>::randn([1, 2, 9, 4], 1);
    /// let dropping = Attention::scaled_dot().dropout(0.1);
    /// let inputs = Inputs::new(&x, &x, &x);
    /// assert_eq!(dropping.forward(inputs.seed(7))?, dropping.forward(inputs.seed(7))?);
    /// assert_ne!(dropping.forward(inputs.seed(7))?, dropping.forward(inputs.seed(8))?);
    /// assert!(dropping.forward(inputs).is_err()); // no seed: an error, not the same mask at every step
    /// # Ok::<(), qkv::Error>(())
    /// ```
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }
}

/// The upstream gradients: of the loss with respect to the output, and, if the caller used them, with respect to the
/// log-sum-exp, the entropy and the log-probability of hard attention's choice.
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
    /// Whether the gradient of the queries is computed: see [`Upstream::only_keys`].
    pub for_queries: bool,
    /// Whether the gradients of keys and values are computed: see [`Upstream::only_queries`].
    pub for_keys: bool,
}

impl<'a, T: Element> Upstream<'a, T> {
    /// With respect to the output, `[B, Hq, N, Dv]`.
    pub fn new(d_out: impl Into<View<'a, T>>) -> Self {
        let [for_bias, for_queries, for_keys] = [true; 3];
        let (lse, entropy, log_prob) = (None, None, None);
        Upstream { values: d_out.into(), lse, entropy, log_prob, for_bias, for_queries, for_keys }
    }

    /// With respect to the log-sum-exp as well, `[B, Hq, N]`.
    pub fn lse(mut self, d_lse: &'a [T::Acc]) -> Self {
        self.lse = Some(d_lse);
        self
    }

    /// With respect to the entropy as well, `[B, Hq, N]`. The forward pass must have returned it.
    pub fn entropy(mut self, d_entropy: &'a [T::Acc]) -> Self {
        self.entropy = Some(d_entropy);
        self
    }

    /// With respect to the log-probability of hard attention's choice as well, `[B, Hq, N]`: the REINFORCE gradient.
    pub fn log_prob(mut self, d_log_prob: &'a [T::Acc]) -> Self {
        self.log_prob = Some(d_log_prob);
        self
    }

    /// Skips the products that only the gradients of keys and values need, two of five. The returned values of these
    /// gradients are then meaningless.
    pub fn only_queries(mut self) -> Self {
        (self.for_queries, self.for_keys) = (true, false);
        self
    }

    /// Skips the product that only the gradient of the queries needs, one of five. The returned value of this gradient
    /// is then meaningless.
    pub fn only_keys(mut self) -> Self {
        (self.for_queries, self.for_keys) = (false, true);
        self
    }

    /// Treats the bias tensor as a constant: its gradient, as large as itself, is not computed.
    pub fn constant_bias(mut self) -> Self {
        self.for_bias = false;
        self
    }
}
