//! The regression loss of a row, and its gradient.

use qkv_simd::pass::{Pass, Smooth};

/// `Σ |x − y| + (x − y)²`, in f64, and its gradient times `scale`.
pub struct Distance<'a, T> {
    pub(crate) found: &'a [T],
    pub(crate) expected: &'a [T],
    pub(crate) scale: f64,
    pub(crate) gradient: &'a mut [T],
    pub(crate) loss: &'a mut f64,
}

impl<T: Smooth> Pass for Distance<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        *self.loss = 0.0;
        for ((gradient, found), there) in self.gradient.iter_mut().zip(self.found).zip(self.expected) {
            let apart = found.to_f64() - there.to_f64();
            *self.loss += apart.abs() + apart * apart;
            let sign = if apart == 0.0 { 0.0 } else { apart.signum() };
            *gradient = T::of_f64(self.scale * (sign + 2.0 * apart));
        }
    }
}
