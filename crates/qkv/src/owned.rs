//! Inputs that own their tensors: what a call was given, kept for later. Nothing here is as large as the weights.

use crate::element::Element;
use crate::inputs::Inputs;
use crate::source::Source;
use crate::tensor::Tensor;
use qkv_simd::View;

/// Everything that [`Inputs`] can hold, owned: to keep a call beyond the life of its tensors, look at it again, write it to a
/// file.
///
/// ```
/// use qkv::{Attention, Inputs, Mask, Owned, Tensor};
/// let causal = Attention::scaled_dot().mask(Mask::causal());
/// let (kept, out) = {
///     let x = Tensor::<f32, 4>::randn([1, 2, 10, 16], 1);
///     let inputs = Inputs::new(&x, &x, &x);
///     (Owned::of(inputs), causal.forward(inputs)?)
/// };
/// let row = causal.weights(kept.inputs(), &out)?.rows(0, 1, 3..4)?; // [1, 10]
/// assert_eq!(row[[0, 4]], 0.0);
/// # Ok::<(), qkv::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Owned<T> {
    /// `[B, Hq, N, D]`.
    pub q: Tensor<T, 4>,
    /// `[B, Hk, M, Dk]`.
    pub k: Tensor<T, 4>,
    /// `[B, Hk, M, Dv]`; `Dv` may be 0 where only weights are wanted.
    pub v: Tensor<T, 4>,
    /// See [`Inputs::w`].
    pub w: Option<Tensor<T, 4>>,
    /// See [`Inputs::w_q`].
    pub w_q: Option<Tensor<T, 4>>,
    /// See [`Inputs::w_k`].
    pub w_k: Option<Tensor<T, 4>>,
    /// See [`Inputs::v_score`].
    pub v_score: Option<Vec<T>>,
    /// See [`Inputs::scale`].
    pub scale: Option<Vec<T>>,
    /// See [`Inputs::bias`].
    pub bias: Option<Tensor<T, 4>>,
    /// See [`Inputs::table`].
    pub table: Option<Tensor<T, 4>>,
    /// See [`Inputs::sinks`].
    pub sinks: Option<Vec<T>>,
    /// See [`Inputs::lengths`].
    pub lengths: Option<Vec<usize>>,
    /// See [`Inputs::segments`].
    pub segments: Option<[Vec<i32>; 2]>,
    /// See [`Inputs::mask`].
    pub bits: Option<Tensor<u8, 4>>,
    /// See [`Inputs::positions`].
    pub positions: Option<Vec<i64>>,
    /// See [`Inputs::buckets`].
    pub buckets: Option<[Tensor<i32, 4>; 2]>,
    /// See [`Inputs::center`].
    pub center: Option<Vec<T>>,
}

fn tensor<T: Copy>(view: View<'_, T>) -> Tensor<T, 4> {
    Tensor::new(view.to_vec(), view.shape()).expect("a view holds its shape")
}

impl<T: Element> Owned<T> {
    /// Queries, keys and values, and nothing besides.
    pub fn new(q: Tensor<T, 4>, k: Tensor<T, 4>, v: Tensor<T, 4>) -> Self {
        Owned {
            q,
            k,
            v,
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

    /// A copy of what was given.
    pub fn of(inputs: Inputs<'_, T>) -> Self {
        let rows = |source: Source<'_, T>| match source {
            Source::Rows(view) => tensor(view),
            Source::Pages(pages) => Tensor::from_fn(pages.shape(), |[b, h, j, x]| pages.at(b, h, j, x)),
        };
        Owned {
            w: inputs.w.map(tensor),
            w_q: inputs.w_q.map(tensor),
            w_k: inputs.w_k.map(tensor),
            v_score: inputs.v_score.map(<[T]>::to_vec),
            scale: inputs.scale.map(<[T]>::to_vec),
            bias: inputs.bias.map(tensor),
            table: inputs.table.map(tensor),
            sinks: inputs.sinks.map(<[T]>::to_vec),
            lengths: inputs.lengths.map(<[usize]>::to_vec),
            segments: inputs.segments.map(|(q, k)| [q.to_vec(), k.to_vec()]),
            bits: inputs.bits.map(tensor),
            positions: inputs.positions.map(<[i64]>::to_vec),
            buckets: inputs.buckets.map(|(q, k)| [tensor(q), tensor(k)]),
            center: inputs.center.map(<[T]>::to_vec),
            ..Owned::new(tensor(inputs.q), rows(inputs.k), rows(inputs.v))
        }
    }

    /// As the inputs of a call.
    pub fn inputs(&self) -> Inputs<'_, T> {
        Inputs {
            w: self.w.as_ref().map(View::from),
            w_q: self.w_q.as_ref().map(View::from),
            w_k: self.w_k.as_ref().map(View::from),
            v_score: self.v_score.as_deref(),
            scale: self.scale.as_deref(),
            bias: self.bias.as_ref().map(View::from),
            table: self.table.as_ref().map(View::from),
            sinks: self.sinks.as_deref(),
            lengths: self.lengths.as_deref(),
            segments: self.segments.as_ref().map(|[q, k]| (&q[..], &k[..])),
            bits: self.bits.as_ref().map(View::from),
            positions: self.positions.as_deref(),
            buckets: self.buckets.as_ref().map(|[q, k]| (View::from(q), View::from(k))),
            center: self.center.as_deref(),
            ..Inputs::new(&self.q, &self.k, &self.v)
        }
    }
}
