//! Rotary position embedding of a row.

use qkv_simd::pass::{Pass, Smooth};

/// Rotates one row.
pub struct Rotate<'a, T> {
    pub(crate) row: &'a mut [T],
    pub(crate) cos: &'a [T],
    pub(crate) sin: &'a [T],
    pub(crate) inverse: bool,
}

impl<T: Smooth> Pass for Rotate<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let half = self.cos.len();
        let sign = if self.inverse { -T::ONE } else { T::ONE };
        for head in self.row.chunks_exact_mut(2 * half) {
            let (first, second) = head.split_at_mut(half);
            for i in 0..half {
                let (a, b, sin) = (first[i], second[i], self.sin[i] * sign);
                first[i] = a * self.cos[i] - b * sin;
                second[i] = b * self.cos[i] + a * sin;
            }
        }
    }
}
