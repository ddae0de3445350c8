//! The gradient of choices. Sampled hard attention has no derivative with respect to its scores, so the gradient is
//! estimated from the loss after the choice (REINFORCE, Williams 1992, as in Xu et al. 2015, arXiv:1502.03044). The
//! gradient of `−w (log p(y | s) − b) log p(s)`, with baseline `b`, is added to that of `−log p(y | s)`. For a fraction
//! of the sequences, attention is soft: the expected value of the choice.

use super::attention::AttendOptions;
use crate::float::Float;
use crate::rewards::{Reinforce, Rewards};
use crate::tape::Tape;
use qkv::{Choice, Select};
use qkv_simd::philox;

impl<T: Float> Tape<'_, T> {
    /// The same tape, training the choices of sampled hard attention.
    pub fn reinforce(mut self, how: Reinforce) -> Self {
        self.reinforce = Some(how);
        self
    }

    /// Whether any attention so far has made a choice that needs a [`reward`](Tape::reward).
    pub fn has_chosen(&self) -> bool {
        self.chosen
    }

    /// Rewards the choices of each sequence, before the backward pass. `log_likelihoods [B, N]` are those of each
    /// sequence's targets, of which the first `lengths[b]` count, each with the factor `scale` in the loss. The
    /// expected log-likelihood of a sequence is the baseline times its number of targets.
    ///
    /// # Panics
    /// If the log-likelihoods cannot be divided evenly among as many sequences as there are lengths.
    pub fn reward(&mut self, log_likelihoods: &[f64], lengths: &[usize], scale: f64) {
        let Some(Reinforce { weight, baseline, .. }) = self.reinforce else { return };
        let each = log_likelihoods.len() / lengths.len().max(1);
        assert_eq!(each * lengths.len(), log_likelihoods.len(), "a length for each sequence");
        let factor = |(b, &length): (usize, &usize)| {
            let found: f64 = log_likelihoods[b * each..][..length].iter().sum();
            weight * scale * (found - baseline * length as f64)
        };
        let factors = lengths.iter().enumerate().map(factor).collect();
        self.rewards = Some(Rewards { factors, lengths: lengths.to_vec() });
    }

    /// For each of `batch` sequences, whether its choices are drawn; the attention of the others is soft. `None` if the
    /// attention's choices are not trained. The decision for a sequence is the same in every attention of a pass.
    pub(super) fn drawn(&mut self, batch: usize, options: &AttendOptions<'_>) -> Option<Vec<bool>> {
        let sampled = Select::Hard(Choice { sample: true, straight_through: false });
        let Reinforce { expected, .. } =
            self.reinforce.filter(|_| self.has_noise() && self.is_training() && options.attention.select == sampled)?;
        self.chosen = true;
        let (seed, _) = self.draws();
        let drawn = |b: usize| f64::from(philox::words(seed, b, 0, 0, 0)[0]) / 4_294_967_296.0 >= expected;
        Some((0..batch).map(drawn).collect())
    }
}
