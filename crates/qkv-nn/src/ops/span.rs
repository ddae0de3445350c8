//! The loss of extractive question answering: cross-entropy over the tokens of a sequence for the start and the end of
//! a span.

use super::loss::{Loss, PendingLoss};
use crate::float::Float;
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;

impl<T: Float> Tape<'_, T> {
    /// The loss of the logits `[B, N, 2]` of a span's start and end against the target tokens, over the first
    /// `lengths[b]` tokens of each sequence: the mean of the two cross-entropies. On a training tape the backward pass
    /// starts here, with the gradient of each sequence multiplied by `scale`.
    ///
    /// # Panics
    /// If the shapes do not match, or a target is beyond its sequence.
    pub fn span_loss(&mut self, scores: &Var<T>, spans: &[[u32; 2]], lengths: &[usize], scale: f64) -> PendingLoss {
        let &[batch, length, 2] = scores.shape() else { panic!("scores are [B, N, 2], not {:?}", scores.shape()) };
        assert_eq!((spans.len(), lengths.len()), (batch, batch), "a span and a length for each sequence");
        let mut loss = Loss { rows: batch, ..Loss::default() };
        let mut gradient = Tensor::zeros(self.pool, scores.shape());
        let sequences =
            scores.value.data().chunks_exact(2 * length).zip(gradient.data_mut().chunks_exact_mut(2 * length));
        for (((scores, gradient), span), &count) in sequences.zip(spans).zip(lengths) {
            let mut right = true;
            for (side, &place) in span.iter().enumerate() {
                let place = place as usize;
                assert!(place < count && count <= length, "place {place} of {count} tokens");
                let score = |at: usize| scores[2 * at + side].to_f64();
                let most = (0..count).map(score).fold(f64::NEG_INFINITY, f64::max);
                let mass: f64 = (0..count).map(|at| (score(at) - most).exp()).sum();
                loss.nll += (most + mass.ln() - score(place)) / 2.0;
                right &= score(place) == most;
                for at in 0..count {
                    let share = (score(at) - most).exp() / mass - f64::from(u8::from(at == place));
                    gradient[2 * at + side] = T::of_f64(share * scale / 2.0);
                }
            }
            loss.right += usize::from(right);
        }
        loss.smoothed = loss.nll;
        if self.is_training() {
            self.seed(scores, gradient);
        }
        loss.into()
    }
}
