//! Token and position embeddings.

use super::Builder;
use crate::float::Float;
use crate::ops::embedding::Positions;
use crate::parameters::{Init, Param};
use crate::tape::{Tape, Var};
use qkv_cuda::operations::DecodeBatch;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// How a model encodes positions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PositionKind {
    /// Sines and cosines of decreasing frequency (Vaswani et al. 2017): not trained.
    #[default]
    Sinusoidal,
    /// A trained vector for each position.
    Learned,
    /// Queries and keys are rotated by angles that grow with the position (RoPE, Su et al. 2021); the embedding adds
    /// nothing.
    Rotary,
    /// No encoding: for recurrent models, or attention with a positional bias (ALiBi, relative).
    None,
}

/// A token embedding table with position embeddings.
#[derive(Clone, Debug)]
pub struct Embedding {
    /// `[V, C]`.
    pub weight: Param,
    scale: f64,
    width: usize,
    learned: Option<Param>,
    fixed: Option<Arc<Vec<f64>>>,
    positions: usize,
}

/// Sines in even columns and cosines in odd ones, `sin(p / 10000^(2i/C))`, for every position and `parts − 1`
/// fractional positions between it and the next.
pub(super) fn sinusoids(positions: usize, parts: usize, width: usize) -> Vec<f64> {
    let mut table = vec![0.0; positions * parts * width];
    let wavelengths: Vec<f64> = (0..width).map(|x| 1e4f64.powf((x / 2 * 2) as f64 / width as f64)).collect();
    for (row_index, row) in table.chunks_exact_mut(width).enumerate() {
        let p = row_index as f64 / parts as f64;
        for (x, (value, wavelength)) in row.iter_mut().zip(&wavelengths).enumerate() {
            let angle = p / wavelength;
            *value = if x % 2 == 0 { angle.sin() } else { angle.cos() };
        }
    }
    table
}

impl Embedding {
    /// A table for `vocabulary` tokens and `positions` positions. Embeddings are initialized with a standard deviation
    /// of `C^(−1/2)` and multiplied by `√C`, so that the table can be tied to the output projection (Vaswani et al.
    /// 2017).
    pub fn new<T: Float>(
        at: &mut Builder<'_, T>,
        vocabulary: usize,
        width: usize,
        kind: PositionKind,
        positions: usize,
    ) -> Self {
        let weight = at.add("weight", &[vocabulary, width], Init::Normal((width as f64).powf(-0.5)));
        let learned = (kind == PositionKind::Learned)
            .then(|| at.add("positions.weight", &[positions, width], Init::Normal(0.02)));
        let fixed = (kind == PositionKind::Sinusoidal).then(|| Arc::new(sinusoids(positions, 1, width)));
        Embedding { weight, scale: (width as f64).sqrt(), width, learned, fixed, positions }
    }

    /// The same embedding without the factor `√C`, as in GPT and recurrent models.
    pub fn unscaled(mut self) -> Self {
        self.scale = 1.0;
        self
    }

    /// The longest sequence it accepts; `usize::MAX` without position embeddings.
    pub fn max_len(&self) -> usize {
        if self.learned.is_some() || self.fixed.is_some() { self.positions } else { usize::MAX }
    }

    /// The embeddings of `ids [B, N]`, the first at position `start`: `[B, N, C]`.
    ///
    /// # Panics
    /// If a sequence goes beyond [`max_len`](Embedding::max_len).
    pub fn forward<T: Float>(&self, tape: &mut Tape<'_, T>, ids: &[u32], length: usize, start: usize) -> Var<T> {
        assert!(start.saturating_add(length) <= self.max_len(), "position {} of {}", start + length, self.positions);
        let fixed: Option<Vec<T>> = self.fixed.as_ref().map(|table| {
            let rows = &table[start * self.width..][..length * self.width];
            rows.iter().map(|&x| T::of_f64(x)).collect()
        });
        match (&fixed, self.learned) {
            (Some(fixed), _) => tape.embedding(ids, length, self.weight, self.scale, Positions::Fixed(fixed), 0),
            (_, Some(learned)) => {
                tape.embedding(ids, length, self.weight, self.scale, Positions::Learned(learned), start)
            }
            _ => tape.embedding(ids, length, self.weight, self.scale, Positions::None, 0),
        }
    }

    /// The embeddings of the next token of each sequence, `[B, 1, C]`, with tokens and positions tracked on a device.
    /// For inference.
    ///
    /// # Panics
    /// If the batch has room for more tokens than [`max_len`](Embedding::max_len).
    pub fn forward_counted<T: Float>(&self, tape: &mut Tape<'_, T>, batch: &DecodeBatch) -> Var<T> {
        assert!(batch.room() <= self.max_len(), "{} positions of {}", batch.room(), self.positions);
        let fixed: Option<Vec<T>> = self.fixed.as_ref().map(|table| {
            let rows = &table[..batch.room() * self.width];
            rows.iter().map(|&x| T::of_f64(x)).collect()
        });
        let positions = match (&fixed, self.learned) {
            (Some(fixed), _) => Positions::Fixed(fixed),
            (_, Some(learned)) => Positions::Learned(learned),
            _ => Positions::None,
        };
        tape.embedding_counted(batch, self.weight, self.scale, positions)
    }

    /// The embeddings of `ids [B, N]`, `[B, N, C]`, where column `n` of every sequence is at position `places[n]`.
    ///
    /// # Panics
    /// If a position goes beyond [`max_len`](Embedding::max_len).
    pub fn forward_places<T: Float>(&self, tape: &mut Tape<'_, T>, ids: &[u32], places: &[usize]) -> Var<T> {
        let length = places.len();
        if places.iter().enumerate().all(|(at, &place)| at == place) {
            return self.forward(tape, ids, length, 0);
        }
        let fixed: Option<Vec<T>> = self.fixed.as_ref().map(|table| {
            let row = |&place: &usize| &table[place * self.width..][..self.width];
            places.iter().flat_map(row).map(|&x| T::of_f64(x)).collect()
        });
        if let Some(fixed) = &fixed {
            return tape.embedding(ids, length, self.weight, self.scale, Positions::Fixed(fixed), 0);
        }
        let x = tape.embedding(ids, length, self.weight, self.scale, Positions::None, 0);
        let Some(learned) = self.learned else { return x };
        let numbers: Vec<u32> = (0..ids.len()).map(|at| places[at % length] as u32).collect();
        let positions = tape.embedding(&numbers, length, learned, 1.0, Positions::None, 0);
        tape.add(&x, positions)
    }

    /// The embeddings of tokens at arbitrary positions, one position per token: `[1, T, C]`. For inference.
    ///
    /// # Panics
    /// If a position goes beyond [`max_len`](Embedding::max_len).
    pub fn forward_at<T: Float>(&self, tape: &mut Tape<'_, T>, ids: &[u32], positions: &[u32]) -> Var<T> {
        let length = ids.len();
        let fixed: Option<Vec<T>> = self.fixed.as_ref().map(|table| {
            let row = |&position: &u32| &table[position as usize * self.width..][..self.width];
            positions.iter().flat_map(row).map(|&x| T::of_f64(x)).collect()
        });
        if let Some(fixed) = &fixed {
            return tape.embedding(ids, length, self.weight, self.scale, Positions::Fixed(fixed), 0);
        }
        let x = tape.embedding(ids, length, self.weight, self.scale, Positions::None, 0);
        match self.learned {
            Some(learned) => {
                let positions = tape.embedding(positions, length, learned, 1.0, Positions::None, 0);
                tape.add(&x, positions)
            }
            None => x,
        }
    }
}
