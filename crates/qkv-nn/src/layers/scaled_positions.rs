//! Sinusoidal positions with trained factors.

use super::embedding::sinusoids;
use super::{Builder, Norm, NormKind};
use crate::float::Float;
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;
use std::sync::Arc;

/// Sines and cosines of the position, each channel with a trained factor: how fast positions matter is learned, and
/// sides that go at different speeds, such as letters and sounds, learn different factors (Li et al. 2019,
/// arXiv:1809.08895, with one factor for all channels).
#[derive(Clone, Debug)]
pub struct ScaledPositions {
    table: Arc<Vec<f64>>,
    factors: Norm,
    width: usize,
}

impl ScaledPositions {
    /// For `positions` positions of an even width. Parameter: `weight [C]`.
    pub fn new<T: Float>(at: &mut Builder<'_, T>, positions: usize, width: usize) -> Self {
        // A sine and its cosine have a mean square of ½, so an RMS norm of a row is the row times √2 and its gain.
        let factors = Norm::new(at, width, NormKind::Rms, 0.0);
        ScaledPositions { table: Arc::new(sinusoids(positions, width)), factors, width }
    }

    /// The longest sequence.
    pub fn max_len(&self) -> usize {
        self.table.len() / self.width
    }

    /// Adds them to `x [B, N, C]`, whose first token is at position `start`.
    ///
    /// # Panics
    /// Where a sequence goes beyond [`max_len`](ScaledPositions::max_len).
    pub fn add<T: Float>(&self, tape: &mut Tape<'_, T>, x: &Var<T>, start: usize) -> Var<T> {
        let &[batch, length, width] = x.shape() else { panic!("sequences have three axes, not {:?}", x.shape()) };
        assert!(start + length <= self.max_len(), "position {} of {}", start + length, self.max_len());
        let rows = self.table[start * width..][..length * width].iter().map(|&x| T::of_f64(x)).collect();
        let rows = tape.constant(Tensor::new(rows, &[1, length, width]));
        let scaled = self.factors.forward(tape, &rows); // (1, N, C)
        let places: Vec<Option<usize>> = (0..batch).flat_map(|_| (0..length).map(Some)).collect();
        let all = tape.gather(&[&scaled], &places, [batch, length]);
        tape.add(x, all)
    }
}
