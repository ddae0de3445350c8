//! Sums and maxima of rows.

use qkv_simd::pass::{Pass, Smooth};

/// `self.0 += self.1`.
pub struct AddAssign<'a, T>(pub(crate) &'a mut [T], pub(crate) &'a [T]);

impl<T: Smooth> Pass for AddAssign<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (sum, &x) in self.0.iter_mut().zip(self.1) {
            *sum += x;
        }
    }
}

/// `self.0 = max(self.0, self.1)`; an element of `self.0` stays if the other is not larger, or is NaN.
pub struct MaxAssign<'a, T>(pub(crate) &'a mut [T], pub(crate) &'a [T]);

impl<T: Smooth> Pass for MaxAssign<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (best, &x) in self.0.iter_mut().zip(self.1) {
            *best = if x > *best { x } else { *best };
        }
    }
}

/// `out[x] += Σ rows[r][from + x]`.
pub struct AddColumns<'a, T> {
    pub(crate) rows: &'a [T],
    pub(crate) width: usize,
    pub(crate) from: usize,
    pub(crate) out: &'a mut [T],
}

impl<T: Smooth> Pass for AddColumns<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for row in self.rows.chunks_exact(self.width) {
            for (sum, &x) in self.out.iter_mut().zip(&row[self.from..]) {
                *sum += x;
            }
        }
    }
}
