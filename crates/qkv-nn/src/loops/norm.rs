//! Layer and RMS normalization of rows, and their gradients.

use super::sum_over;
use qkv_simd::pass::{Pass, Smooth};

/// Normalizes rows.
pub struct LayerNorm<'a, T> {
    pub(crate) x: &'a [T],
    pub(crate) y: &'a mut [T],
    pub(crate) moments: &'a mut [T],
    pub(crate) gain: &'a [T],
    pub(crate) bias: &'a [T],
    pub(crate) epsilon: T,
}

impl<T: Smooth> Pass for LayerNorm<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let width = self.gain.len();
        let count = T::of_f64(width as f64);
        let rows = self.x.chunks_exact(width).zip(self.y.chunks_exact_mut(width)).zip(self.moments.chunks_exact_mut(2));
        for ((x, y), moments) in rows {
            let mean = sum_over!(T, x, x, |a, _b| a) / count;
            let variance = sum_over!(T, x, x, |a, _b| (a - mean) * (a - mean)) / count;
            let inverse = T::ONE / (variance + self.epsilon).sqrt();
            for j in 0..width {
                y[j] = (x[j] - mean) * inverse * self.gain[j] + self.bias[j];
            }
            moments[0] = mean;
            moments[1] = inverse;
        }
    }
}

/// The gradients of rows.
pub struct LayerNormGradient<'a, T> {
    pub(crate) x: &'a [T],
    pub(crate) d_y: &'a [T],
    pub(crate) d_x: &'a mut [T],
    pub(crate) moments: &'a [T],
    pub(crate) gain: &'a [T],
    /// Partial sums of the gradients of gain and bias over these rows, `[2, C]`.
    pub(crate) sums: &'a mut [T],
}

impl<T: Smooth> Pass for LayerNormGradient<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let width = self.gain.len();
        let count = T::of_f64(width as f64);
        let (d_gain, d_bias) = self.sums.split_at_mut(width);
        d_gain.fill(T::ZERO);
        d_bias.fill(T::ZERO);
        let rows = self.x.chunks_exact(width).zip(self.d_y.chunks_exact(width)).zip(self.d_x.chunks_exact_mut(width));
        for (((x, d_y), d_x), moments) in rows.zip(self.moments.chunks_exact(2)) {
            let (mean, inverse) = (moments[0], moments[1]);
            for j in 0..width {
                let normal = (x[j] - mean) * inverse;
                d_gain[j] += d_y[j] * normal;
                d_bias[j] += d_y[j];
                d_x[j] = d_y[j] * self.gain[j];
            }
            let flat = sum_over!(T, d_x, x, |g, _x| g) / count;
            let tilt = sum_over!(T, d_x, x, |g, x| g * ((x - mean) * inverse)) / count;
            for j in 0..width {
                d_x[j] = (d_x[j] - flat - (x[j] - mean) * inverse * tilt) * inverse;
            }
        }
    }
}

/// Normalizes rows.
pub struct RmsNorm<'a, T> {
    pub(crate) x: &'a [T],
    pub(crate) y: &'a mut [T],
    pub(crate) inverses: &'a mut [T],
    pub(crate) gain: &'a [T],
    pub(crate) epsilon: T,
}

impl<T: Smooth> Pass for RmsNorm<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let width = self.gain.len();
        let count = T::of_f64(width as f64);
        let rows = self.x.chunks_exact(width).zip(self.y.chunks_exact_mut(width));
        for ((x, y), inverse) in rows.zip(self.inverses) {
            let square = sum_over!(T, x, x, |a, b| a * b) / count;
            *inverse = T::ONE / (square + self.epsilon).sqrt();
            for j in 0..width {
                y[j] = x[j] * *inverse * self.gain[j];
            }
        }
    }
}

/// The gradients of rows.
pub struct RmsNormGradient<'a, T> {
    pub(crate) x: &'a [T],
    pub(crate) d_y: &'a [T],
    pub(crate) d_x: &'a mut [T],
    pub(crate) inverses: &'a [T],
    pub(crate) gain: &'a [T],
    pub(crate) d_gain: &'a mut [T],
}

impl<T: Smooth> Pass for RmsNormGradient<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let width = self.gain.len();
        let count = T::of_f64(width as f64);
        self.d_gain.fill(T::ZERO);
        let rows = self.x.chunks_exact(width).zip(self.d_y.chunks_exact(width)).zip(self.d_x.chunks_exact_mut(width));
        for (((x, d_y), d_x), &inverse) in rows.zip(self.inverses) {
            for j in 0..width {
                self.d_gain[j] += d_y[j] * x[j] * inverse;
                d_x[j] = d_y[j] * self.gain[j];
            }
            let tilt = sum_over!(T, d_x, x, |g, x| g * x) / count * inverse * inverse;
            for j in 0..width {
                d_x[j] = (d_x[j] - x[j] * tilt) * inverse;
            }
        }
    }
}
