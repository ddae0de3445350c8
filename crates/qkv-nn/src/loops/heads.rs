//! Rows of heads side by side.

use qkv_simd::pass::{Pass, Smooth};

/// Copies `[H, L, D]` to `[L, H·D]`.
pub struct MergeHeads<'a, T> {
    pub(crate) to: &'a mut [T],
    pub(crate) from: &'a [T],
    pub(crate) heads: usize,
    pub(crate) length: usize,
    pub(crate) d: usize,
}

impl<T: Smooth> Pass for MergeHeads<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let MergeHeads { to, from, heads, length, d } = self;
        for (at, row) in from.chunks_exact(d).enumerate() {
            let (h, i) = (at / length, at % length);
            to[(i * heads + h) * d..][..d].copy_from_slice(row);
        }
    }
}
