//! Conversion between rows `[B, L, H·D]` and heads `[B, H, L, D]`.

use crate::float::Float;
use crate::loops::MergeHeads;
use crate::machine::Machine;
use crate::pool::Pool;
use crate::tensor::Tensor;
use qkv::{View, ViewMut};

/// Number of query heads, and of the key/value heads that they share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Query heads, `Hq`.
    pub query: usize,
    /// Key/value heads, `Hk`.
    pub key: usize,
}

/// `[B, L, H·D]` as `[B, H, L, D]`.
pub(crate) fn split_heads<T: Float>(tensor: &Tensor<T>, heads: usize) -> View<'_, T> {
    let &[batch, length, width] = tensor.shape() else {
        panic!("attention takes [B, L, H·D], not {:?}", tensor.shape())
    };
    assert!(width.is_multiple_of(heads), "{heads} heads cannot share a width of {width}");
    View::strided(tensor.data(), 0, [batch, heads, length, width / heads], head_strides(length, heads, width / heads))
        .expect("a tensor holds its shape")
}

/// [`split_heads`], mutable.
pub(crate) fn split_heads_mut<T: Float>(tensor: &mut Tensor<T>, heads: usize) -> ViewMut<'_, T> {
    let &[batch, length, width] = tensor.shape() else { unreachable!("shaped as an input that was split") };
    let (shape, strides) = ([batch, heads, length, width / heads], head_strides(length, heads, width / heads));
    ViewMut::strided(tensor.data_mut(), 0, shape, strides).expect("a tensor holds its shape")
}

/// Strides of `[B, H, L, D]` in memory of `[B, L, H·D]`.
pub(crate) fn head_strides(length: usize, heads: usize, d: usize) -> [isize; 4] {
    [length * heads * d, d, heads * d, 1].map(|stride| stride as isize)
}

/// Copies `[B, H, L, D]` to `[B, L, H·D]`.
pub(crate) fn merge_heads<T: Float>(pool: &Pool<T>, machine: &Machine, from: &qkv::Tensor<T, 4>) -> Tensor<T> {
    let [batch, heads, length, d] = from.shape();
    let mut to = Tensor::unwritten(pool, &[batch, length, heads * d]);
    merge_heads_into(machine, to.data_mut(), from);
    to
}

/// [`merge_heads`] into a slice.
pub(crate) fn merge_heads_into<T: Float>(machine: &Machine, to: &mut [T], from: &qkv::Tensor<T, 4>) {
    let [batch, heads, length, d] = from.shape();
    let (each, size) = (machine.rows_each(batch, length * heads * d), length * heads * d);
    let parts = to.chunks_mut((each * size).max(1)).zip(from.data().chunks((each * size).max(1))).collect();
    machine.each(parts, |_, (to, from): (&mut [T], &[T])| {
        for (to, from) in to.chunks_exact_mut(size).zip(from.chunks_exact(size)) {
            machine.run(MergeHeads { to, from, heads, length, d });
        }
    });
}
