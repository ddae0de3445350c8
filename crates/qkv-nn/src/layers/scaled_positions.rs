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
    parts: usize,
}

impl ScaledPositions {
    /// For `positions` positions of an even width. Parameter: `weight [C]`.
    pub fn new<T: Float>(at: &mut Builder<'_, T>, positions: usize, width: usize) -> Self {
        Self::in_parts(at, positions, 1, width)
    }

    /// The same, with places between positions: the `parts`-th parts of the way to the next one.
    pub fn in_parts<T: Float>(at: &mut Builder<'_, T>, positions: usize, parts: usize, width: usize) -> Self {
        // A sine and its cosine have a mean square of ½, so an RMS norm of a row is the row times √2 and its gain.
        let factors = Norm::new(at, width, NormKind::Rms, 0.0);
        ScaledPositions { table: Arc::new(sinusoids(positions, parts, width)), factors, width, parts }
    }

    /// The longest sequence.
    pub fn max_len(&self) -> usize {
        self.table.len() / self.width / self.parts
    }

    /// Adds them to `x [B, N, C]`, whose first token is at position `start`.
    ///
    /// # Panics
    /// Where a sequence goes beyond [`max_len`](ScaledPositions::max_len).
    pub fn add<T: Float>(&self, tape: &mut Tape<'_, T>, x: &Var<T>, start: usize) -> Var<T> {
        let &[batch, length, width] = x.shape() else { panic!("sequences have three axes, not {:?}", x.shape()) };
        assert!(start + length <= self.max_len(), "position {} of {}", start + length, self.max_len());
        let rows = self.table.chunks_exact(width).step_by(self.parts).skip(start).take(length);
        let rows = rows.flatten().map(|&x| T::of_f64(x)).collect();
        let places: Vec<Option<usize>> = (0..batch).flat_map(|_| (0..length).map(Some)).collect();
        self.add_rows(tape, x, Tensor::new(rows, &[1, length, width]), &places)
    }

    /// Adds to each token of `x [B, N, C]` the position of its place, `[B, N]`: fractions are rounded down to parts.
    ///
    /// # Panics
    /// Where there is not a place for each token, or one is not among the positions.
    pub fn add_at<T: Float>(&self, tape: &mut Tape<'_, T>, x: &Var<T>, places: &[f32]) -> Var<T> {
        let &[batch, length, width] = x.shape() else { panic!("sequences have three axes, not {:?}", x.shape()) };
        assert_eq!(places.len(), batch * length, "a place for each token");
        let row = |&place: &f32| {
            assert!(place >= 0.0 && place < self.max_len() as f32, "place {place} of {}", self.max_len());
            Some((place * self.parts as f32) as usize)
        };
        let places: Vec<Option<usize>> = places.iter().map(row).collect();
        let rows: Vec<T> = self.table.iter().map(|&x| T::of_f64(x)).collect();
        let rows = Tensor::new(rows, &[1, self.max_len() * self.parts, width]);
        self.add_rows(tape, x, rows, &places)
    }

    /// Adds to `x [B, N, C]` scaled rows `[1, R, C]` of the table, of each token that which its place names.
    fn add_rows<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        x: &Var<T>,
        rows: Tensor<T>,
        places: &[Option<usize>],
    ) -> Var<T> {
        let rows = tape.constant(rows);
        let scaled = self.factors.forward(tape, &rows); // (1, R, C)
        let all = tape.gather(&[&scaled], places, [x.shape()[0], x.shape()[1]]);
        tape.add(x, all)
    }
}
