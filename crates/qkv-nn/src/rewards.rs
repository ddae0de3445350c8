//! How the choices of hard attention are trained, and the rewards they earned.

use crate::float::Float;

/// How choices are trained.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reinforce {
    /// The weight of the estimate.
    pub weight: f64,
    /// The fraction of sequences whose attention is soft instead.
    pub expected: f64,
    /// The expected log-likelihood of a target, a mean over earlier ones: see [`Tape::reward`](crate::Tape::reward).
    pub baseline: f64,
}

/// The rewards of each sequence's choices.
#[derive(Clone, Debug)]
pub(crate) struct Rewards {
    /// Factors of the log-probabilities, `[B]`.
    pub factors: Vec<f64>,
    /// Number of choices of each sequence that count, `[B]`: those before its padding.
    pub lengths: Vec<usize>,
}

impl Rewards {
    /// The gradient of the loss with respect to the log-probability of each choice, `[B, Hq, N]`; the first query is at
    /// step `start`.
    pub fn gradients<T: Float>(&self, drawn: &[bool], heads: usize, length: usize, start: usize) -> Vec<T> {
        let row = |at: usize| {
            let (b, i) = (at / (heads * length), at % length);
            let counts = drawn[b] && start + i < self.lengths[b];
            T::of_f64(if counts { -self.factors[b] } else { 0.0 })
        };
        (0..drawn.len() * heads * length).map(row).collect()
    }
}
