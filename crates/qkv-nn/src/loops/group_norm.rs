//! Group normalization of an image, and its gradients.

use qkv_simd::pass::{Pass, Smooth};

/// Normalizes one image.
pub struct GroupNorm<'a, T> {
    pub(crate) x: &'a [T],
    pub(crate) y: &'a mut [T],
    pub(crate) moments: &'a mut [T],
    pub(crate) gain: &'a [T],
    pub(crate) bias: &'a [T],
    pub(crate) epsilon: T,
}

impl<T: Smooth> Pass for GroupNorm<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let channels = self.gain.len();
        let each = channels / (self.moments.len() / 2);
        let count = T::of_f64((self.x.len() / channels * each) as f64);
        // Sums by channel, then by group: the same order for every instruction set.
        let mut sums = vec![T::ZERO; channels];
        for pixel in self.x.chunks_exact(channels) {
            for (sum, &x) in sums.iter_mut().zip(pixel) {
                *sum += x;
            }
        }
        let mut means = vec![T::ZERO; channels];
        for (group, (sums, moments)) in sums.chunks_exact(each).zip(self.moments.chunks_exact_mut(2)).enumerate() {
            let mut total = T::ZERO;
            for &sum in sums {
                total += sum;
            }
            moments[0] = total / count;
            means[group * each..][..each].fill(moments[0]);
        }
        sums.fill(T::ZERO);
        for pixel in self.x.chunks_exact(channels) {
            for ((sum, &x), &mean) in sums.iter_mut().zip(pixel).zip(&means) {
                *sum += (x - mean) * (x - mean);
            }
        }
        let mut factors = vec![T::ZERO; channels];
        for (group, (sums, moments)) in sums.chunks_exact(each).zip(self.moments.chunks_exact_mut(2)).enumerate() {
            let mut total = T::ZERO;
            for &sum in sums {
                total += sum;
            }
            moments[1] = T::ONE / (total / count + self.epsilon).sqrt();
            let gains = &self.gain[group * each..][..each];
            for (factor, &gain) in factors[group * each..][..each].iter_mut().zip(gains) {
                *factor = moments[1] * gain;
            }
        }
        for (x, y) in self.x.chunks_exact(channels).zip(self.y.chunks_exact_mut(channels)) {
            for c in 0..channels {
                y[c] = (x[c] - means[c]) * factors[c] + self.bias[c];
            }
        }
    }
}

/// The gradients of one image.
pub struct GroupNormGradient<'a, T> {
    pub(crate) x: &'a [T],
    pub(crate) d_y: &'a [T],
    pub(crate) d_x: &'a mut [T],
    pub(crate) moments: &'a [T],
    pub(crate) gain: &'a [T],
    /// The image's contribution to the gradients of gain and bias, `[2, C]`.
    pub(crate) sums: &'a mut [T],
}

impl<T: Smooth> Pass for GroupNormGradient<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let channels = self.gain.len();
        let each = channels / (self.moments.len() / 2);
        let count = T::of_f64((self.x.len() / channels * each) as f64);
        let (d_gain, d_bias) = self.sums.split_at_mut(channels);
        d_gain.fill(T::ZERO);
        d_bias.fill(T::ZERO);
        let of_channel =
            |which: usize| -> Vec<T> { (0..channels).map(|c| self.moments[c / each * 2 + which]).collect() };
        let (means, inverses) = (of_channel(0), of_channel(1));
        for (x, d_y) in self.x.chunks_exact(channels).zip(self.d_y.chunks_exact(channels)) {
            for c in 0..channels {
                d_gain[c] += d_y[c] * ((x[c] - means[c]) * inverses[c]);
                d_bias[c] += d_y[c];
            }
        }
        // Group means of the gradient of the normalized values, and of its product with those values.
        let (mut flat, mut tilt) = (vec![T::ZERO; channels], vec![T::ZERO; channels]);
        for from in (0..channels).step_by(each) {
            let (mut sum, mut product) = (T::ZERO, T::ZERO);
            for c in from..from + each {
                sum += d_bias[c] * self.gain[c];
                product += d_gain[c] * self.gain[c];
            }
            flat[from..from + each].fill(sum / count);
            tilt[from..from + each].fill(product / count);
        }
        let pixels = self.x.chunks_exact(channels).zip(self.d_y.chunks_exact(channels));
        for ((x, d_y), d_x) in pixels.zip(self.d_x.chunks_exact_mut(channels)) {
            for c in 0..channels {
                let normal = (x[c] - means[c]) * inverses[c];
                d_x[c] = (d_y[c] * self.gain[c] - flat[c] - normal * tilt[c]) * inverses[c];
            }
        }
    }
}
