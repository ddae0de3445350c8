//! The gradient of choices: hard attention that samples has no derivative with respect to its scores, and its gradient
//! is estimated from what the loss was after the choice (REINFORCE, Williams 1992, as in Xu et al. 2015,
//! arXiv:1502.03044). To the gradient of `−log p(y | s)` comes that of `−w (log p(y | s) − b) log p(s)`, with `b` what
//! was to be expected. For a part of the sequences the attention is soft, the expected value of the choice.

use super::attention::AttendOptions;
use crate::float::Float;
use crate::rewards::{Reinforce, Rewards};
use crate::tape::Tape;
use qkv::{Choice, Select};
use qkv_simd::philox;

impl<T: Float> Tape<'_, T> {
    /// Trains the choices of hard attention that samples.
    pub fn reinforce(mut self, how: Reinforce) -> Self {
        self.reinforce = Some(how);
        self
    }

    /// Whether an attention so far has made a choice whose gradient [`reward`](Tape::reward) gives.
    pub fn has_chosen(&self) -> bool {
        self.chosen
    }

    /// Says what the choices of each sequence led to, before the backward pass: the log-likelihoods of the targets of
    /// each, `log_likelihoods [B, N]`, of which the first `lengths[b]` count, each with the factor `scale` in the loss.
    /// What was to be expected of a sequence is the baseline times its targets.
    ///
    /// # Panics
    /// Where there is not one length for each sequence.
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

    /// For each of `batch` sequences, whether its choices are drawn; the attention of the others is soft. `None` where
    /// nothing is trained by its choices. A sequence's answer is the same for every attention of a pass.
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
