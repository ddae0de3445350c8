//! How the choices of hard attention are trained, and what they led to.

use crate::float::Float;

/// How choices are trained.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reinforce {
    /// The weight of the estimate.
    pub weight: f64,
    /// The share of sequences whose attention is soft instead.
    pub expected: f64,
    /// The log-likelihood of a target that is to be expected, a mean of those before: see
    /// [`Tape::reward`](crate::Tape::reward).
    pub baseline: f64,
}

/// What the choices of each sequence led to.
#[derive(Clone, Debug)]
pub(crate) struct Rewards {
    /// Factors of the log-probabilities, `[B]`.
    pub factors: Vec<f64>,
    /// The choices of each sequence that count, `[B]`: those before its padding.
    pub lengths: Vec<usize>,
}

impl Rewards {
    /// The gradient of the loss with respect to the log-probability of each choice, `[B, Hq, N]`; the first is at step
    /// `start`.
    pub fn gradients<T: Float>(&self, drawn: &[bool], heads: usize, length: usize, start: usize) -> Vec<T> {
        let row = |at: usize| {
            let (b, i) = (at / (heads * length), at % length);
            let counts = drawn[b] && start + i < self.lengths[b];
            T::of_f64(if counts { -self.factors[b] } else { 0.0 })
        };
        (0..drawn.len() * heads * length).map(row).collect()
    }
}
