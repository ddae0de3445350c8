//! Tokens as vectors, and where they stand.

use super::Builder;
use crate::float::Float;
use crate::ops::embedding::Positions;
use crate::parameters::{Init, Param};
use crate::tape::{Tape, Var};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// How a model knows where a token stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PositionKind {
    /// Sines and cosines of falling frequency (Vaswani et al. 2017): they need no training and have no end.
    #[default]
    Sinusoidal,
    /// A vector for each position, trained.
    Learned,
    /// Queries and keys are turned by angles that grow with the position (Su et al. 2021): nothing is added here.
    Rotary,
    /// Not at all: for recurrent models, or where attention's bias tells (ALiBi, relative).
    None,
}

/// A table of token vectors, with positions.
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

/// Sines at even columns and cosines at odd ones: `sin(p / 10000^(2i/C))`.
fn sinusoids(positions: usize, width: usize) -> Vec<f64> {
    let mut table = vec![0.0; positions * width];
    for (p, row) in table.chunks_exact_mut(width).enumerate() {
        for (x, value) in row.iter_mut().enumerate() {
            let angle = p as f64 / 1e4f64.powf((x / 2 * 2) as f64 / width as f64);
            *value = if x % 2 == 0 { angle.sin() } else { angle.cos() };
        }
    }
    table
}

impl Embedding {
    /// For `vocabulary` tokens and `positions` places. Vectors are drawn with a deviation of `C^(−1/2)` and multiplied by
    /// `√C` on the way in, so that one table can serve the output as well (Vaswani et al. 2017).
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
        let fixed = (kind == PositionKind::Sinusoidal).then(|| Arc::new(sinusoids(positions, width)));
        Embedding { weight, scale: (width as f64).sqrt(), width, learned, fixed, positions }
    }

    /// Without the factor `√C`: as GPT and recurrent models have it.
    pub fn unscaled(mut self) -> Self {
        self.scale = 1.0;
        self
    }

    /// How many tokens a sequence may have; no limit where positions do not count.
    pub fn most(&self) -> usize {
        if self.learned.is_some() || self.fixed.is_some() { self.positions } else { usize::MAX }
    }

    /// The vectors of `ids [B, N]`, whose first stands at `start`: `[B, N, C]`.
    ///
    /// # Panics
    /// Where a sequence goes beyond [`most`](Embedding::most).
    pub fn forward<T: Float>(&self, tape: &mut Tape<'_, T>, ids: &[u32], length: usize, start: usize) -> Var<T> {
        assert!(start.saturating_add(length) <= self.most(), "position {} of {}", start + length, self.positions);
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

    /// The vectors of tokens that stand at any positions, `[1, T, C]`: for inference.
    ///
    /// # Panics
    /// Where a position goes beyond [`most`](Embedding::most).
    pub fn placed<T: Float>(&self, tape: &mut Tape<'_, T>, ids: &[u32], places: &[u32]) -> Var<T> {
        let length = ids.len();
        let fixed: Option<Vec<T>> = self.fixed.as_ref().map(|table| {
            let row = |&place: &u32| &table[place as usize * self.width..][..self.width];
            places.iter().flat_map(row).map(|&x| T::of_f64(x)).collect()
        });
        if let Some(fixed) = &fixed {
            return tape.embedding(ids, length, self.weight, self.scale, Positions::Fixed(fixed), 0);
        }
        let x = tape.embedding(ids, length, self.weight, self.scale, Positions::None, 0);
        match self.learned {
            Some(learned) => {
                let places = tape.embedding(places, length, learned, 1.0, Positions::None, 0);
                tape.add(&x, places)
            }
            None => x,
        }
    }
}
