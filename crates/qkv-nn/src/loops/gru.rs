//! One step of a gated recurrent unit, and its gradients.

use qkv_simd::pass::{Pass, Smooth};

/// One step of one sequence.
pub struct GruCell<'a, T> {
    pub(crate) x: &'a [T],
    pub(crate) recurrent: &'a [T],
    pub(crate) bias: &'a [T],
    pub(crate) before: &'a [T],
    pub(crate) gates: &'a mut [T],
    pub(crate) after: &'a mut [T],
}

impl<T: Smooth> Pass for GruCell<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let width = self.before.len();
        let (x, h, b) = (self.x, self.recurrent, self.bias);
        let (x_r, x_z, x_n) = (&x[..width], &x[width..2 * width], &x[2 * width..]);
        let (h_r, h_z, h_n) = (&h[..width], &h[width..2 * width], &h[2 * width..]);
        let (b_r, b_z, b_n) = (&b[..width], &b[width..2 * width], &b[2 * width..]);
        let (r, rest) = self.gates.split_at_mut(width);
        let (z, rest) = rest.split_at_mut(width);
        let (n, inner) = rest.split_at_mut(width);
        for j in 0..width {
            r[j] = (x_r[j] + h_r[j] + b_r[j]).sigmoid();
            z[j] = (x_z[j] + h_z[j] + b_z[j]).sigmoid();
            inner[j] = h_n[j] + b_n[j];
            n[j] = (x_n[j] + r[j] * inner[j]).hyperbolic_tangent();
            self.after[j] = (T::ONE - z[j]) * n[j] + z[j] * self.before[j];
        }
    }
}

/// The gradients of one step of one sequence.
pub struct GruCellGradient<'a, T> {
    pub(crate) d_after: &'a [T],
    pub(crate) before: &'a [T],
    pub(crate) gates: &'a [T],
    /// Gradient of the input's parts.
    pub(crate) d_x: &'a mut [T],
    /// Gradient of the recurrent product.
    pub(crate) d_recurrent: &'a mut [T],
    /// Gradient of the previous state, without the path through the recurrent product.
    pub(crate) d_before: &'a mut [T],
}

impl<T: Smooth> Pass for GruCellGradient<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let width = self.before.len();
        let (r, z) = (&self.gates[..width], &self.gates[width..2 * width]);
        let (n, inner) = (&self.gates[2 * width..3 * width], &self.gates[3 * width..]);
        let (d_xr, rest) = self.d_x.split_at_mut(width);
        let (d_xz, d_xn) = rest.split_at_mut(width);
        for j in 0..width {
            let d = self.d_after[j];
            let d_n = d * (T::ONE - z[j]) * (T::ONE - n[j] * n[j]);
            d_xn[j] = d_n;
            d_xr[j] = d_n * inner[j] * r[j] * (T::ONE - r[j]);
            d_xz[j] = d * (self.before[j] - n[j]) * z[j] * (T::ONE - z[j]);
            self.d_before[j] = d * z[j];
        }
        let (d_hr, rest) = self.d_recurrent.split_at_mut(width);
        let (d_hz, d_hn) = rest.split_at_mut(width);
        for j in 0..width {
            d_hr[j] = d_xr[j];
            d_hz[j] = d_xz[j];
            d_hn[j] = d_xn[j] * r[j];
        }
    }
}
