//! Sinusoidal positions with trained factors.

use super::embedding::sinusoids;
use super::{Builder, Norm, NormKind};
use crate::float::Float;
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;
use std::sync::Arc;

/// Sines and cosines of the position, with a trained factor for each channel. The model learns the amplitude of each
/// channel, so that sequences which advance at different speeds, such as letters and sounds, can have different factors
/// (Li et al. 2019, arXiv:1809.08895, with one factor for all channels).
#[derive(Clone, Debug)]
pub struct ScaledPositions {
    table: Arc<Vec<f64>>,
    factors: Norm,
    width: usize,
    parts: usize,
}

impl ScaledPositions {
    /// Encodings for `positions` positions, of an even width. Parameter: `weight [C]`.
    pub fn new<T: Float>(at: &mut Builder<'_, T>, positions: usize, width: usize) -> Self {
        Self::in_parts(at, positions, 1, width)
    }

    /// The same, with fractional positions: each step from one position to the next is divided into `parts` parts.
    pub fn in_parts<T: Float>(at: &mut Builder<'_, T>, positions: usize, parts: usize, width: usize) -> Self {
        // The mean square of a sine and its cosine is ½, so an RMS norm multiplies a row by √2 and the gain.
        let factors = Norm::new(at, width, NormKind::Rms, 0.0);
        ScaledPositions { table: Arc::new(sinusoids(positions, parts, width)), factors, width, parts }
    }

    /// The longest sequence it accepts.
    pub fn max_len(&self) -> usize {
        self.table.len() / self.width / self.parts
    }

    /// Adds the encodings to `x [B, N, C]`, whose first token is at position `start`.
    ///
    /// # Panics
    /// If a sequence goes beyond [`max_len`](ScaledPositions::max_len).
    pub fn add<T: Float>(&self, tape: &mut Tape<'_, T>, x: &Var<T>, start: usize) -> Var<T> {
        let &[batch, length, width] = x.shape() else { panic!("sequences have three axes, not {:?}", x.shape()) };
        assert!(start + length <= self.max_len(), "position {} of {}", start + length, self.max_len());
        let rows = self.table.chunks_exact(width).step_by(self.parts).skip(start).take(length);
        let rows = rows.flatten().map(|&x| T::of_f64(x)).collect();
        let places: Vec<Option<usize>> = (0..batch).flat_map(|_| (0..length).map(Some)).collect();
        self.add_rows(tape, x, Tensor::new(rows, &[1, length, width]), &places)
    }

    /// Adds to each token of `x [B, N, C]` the encoding of its place, `[B, N]`; fractional places are rounded down to
    /// whole parts.
    ///
    /// # Panics
    /// If the number of places is not that of the tokens, or a place is not within the positions.
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

    /// Adds to each token of `x [B, N, C]` the scaled row of `rows [1, R, C]` at the index in `places`.
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
