//! Cross-entropy of a row of logits, and its gradient.

use super::{LANES, sum_over};
use qkv_simd::pass::{Pass, Smooth};

/// The loss of a row.
#[derive(Clone, Copy, Debug, Default)]
pub struct RowLoss {
    pub(crate) smoothed: f64,
    pub(crate) nll: f64,
    pub(crate) right: bool,
}

/// The loss of one row of logits; with `gradient`, the logits are replaced by their gradient.
pub struct CrossEntropyRow<'a, T> {
    pub(crate) scores: &'a mut [T],
    pub(crate) bias: Option<&'a [T]>,
    pub(crate) id: usize,
    /// Label smoothing.
    pub(crate) smoothing: f64,
    /// Factor of the gradient.
    pub(crate) scale: f64,
    pub(crate) gradient: bool,
    pub(crate) loss: &'a mut RowLoss,
}

impl<T: Smooth> Pass for CrossEntropyRow<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let scores = self.scores;
        if let Some(bias) = self.bias {
            for (score, &b) in scores.iter_mut().zip(bias) {
                *score += b;
            }
        }
        let mut highest = [T::NEG_INFINITY; LANES];
        let chunks = scores.chunks_exact(LANES);
        let mut most = T::NEG_INFINITY;
        for &x in chunks.remainder() {
            most = if x > most { x } else { most };
        }
        for chunk in chunks {
            for l in 0..LANES {
                highest[l] = if chunk[l] > highest[l] { chunk[l] } else { highest[l] };
            }
        }
        for x in highest {
            most = if x > most { x } else { most };
        }
        let right = scores[self.id];
        let total = sum_over!(T, scores, scores, |x, _y| x);
        for x in scores.iter_mut() {
            *x = (*x - most).exponential();
        }
        let mass = sum_over!(T, scores, scores, |x, _y| x);
        let classes = scores.len() as f64;
        let smoothing = self.smoothing;
        let lse = most.to_f64() + mass.to_f64().ln();
        let nll = lse - right.to_f64();
        let smoothed = (1.0 - smoothing) * nll + smoothing * (lse - total.to_f64() / classes);
        if self.gradient {
            let scale = self.scale;
            let (each, even) = (T::of_f64(scale / mass.to_f64()), T::of_f64(scale * smoothing / classes));
            for x in scores.iter_mut() {
                *x = *x * each - even;
            }
            scores[self.id] = scores[self.id] - T::of_f64(scale * (1.0 - smoothing));
        }
        *self.loss = RowLoss { smoothed, nll, right: right == most };
    }
}
