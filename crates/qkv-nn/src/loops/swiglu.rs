//! The gated activation `silu(gate) · up`, and its gradients.

use qkv_simd::pass::{Pass, Smooth};

/// `y = silu(gate) · up`.
pub struct SwiGlu<'a, T> {
    pub(crate) y: &'a mut [T],
    pub(crate) gate: &'a [T],
    pub(crate) up: &'a [T],
}

impl<T: Smooth> Pass for SwiGlu<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for ((y, &gate), &up) in self.y.iter_mut().zip(self.gate).zip(self.up) {
            *y = gate * gate.sigmoid() * up;
        }
    }
}

/// Replaces the gradient of the output by that of `up` and writes that of `gate`.
pub struct SwiGluGradient<'a, T> {
    pub(crate) gradient: &'a mut [T],
    pub(crate) d_gate: &'a mut [T],
    pub(crate) gate: &'a [T],
    pub(crate) up: &'a [T],
}

impl<T: Smooth> Pass for SwiGluGradient<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let outs = self.gradient.iter_mut().zip(self.d_gate);
        for (((g, d_gate), &gate), &up) in outs.zip(self.gate).zip(self.up) {
            let open = gate.sigmoid();
            *d_gate = *g * up * open * (T::ONE + gate * (T::ONE - open));
            *g = *g * gate * open;
        }
    }
}
