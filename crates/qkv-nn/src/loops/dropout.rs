//! Dropout of a row by a bit mask.

use qkv_simd::pass::{Pass, Smooth};

/// Multiplies elements whose bit is set by `scale` and zeroes the others.
pub struct ApplyDropout<'a, T> {
    pub(crate) row: &'a mut [T],
    pub(crate) words: &'a [u64],
    pub(crate) scale: T,
}

impl<T: Smooth> Pass for ApplyDropout<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (part, &word) in self.row.chunks_mut(64).zip(self.words) {
            for (j, x) in part.iter_mut().enumerate() {
                let scale = if word >> j & 1 == 1 { self.scale } else { T::ZERO };
                *x = if scale == T::ZERO { T::ZERO } else { *x * scale };
            }
        }
    }
}
