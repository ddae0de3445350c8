//! The scores of one tile: computed raw, then scaled, capped, biased and masked in passes over memory that lies in the
//! first-level cache. Everything that is not needed is skipped for the whole tile, not decided number by number.

use super::order::TileKeys;
use super::plan::Piece;
use super::rule::{Bits, Verdict};
use crate::attention::Output;
use crate::problem::Problem;
use crate::score::Score;
use crate::select::{Dropout, Select};
use crate::tensor::Tensor;
use crate::tuning::KEYS;
use qkv_simd::pairwise::{self, Pairwise, Sides};
use qkv_simd::tile::{RowOp, keep_bits, row_op, soft_cap};
use qkv_simd::{Element, Isa, Matrix, Panels, Real, Target, padded, philox, product};

/// One query: its sequence, its head, its index and its place among the keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowAt {
    pub b: usize,
    pub h: usize,
    pub i: usize,
    pub p: i64,
}

/// What is the same for every tile of a problem.
pub(crate) struct TileOps<'a, T: Element> {
    pub isa: Isa,
    pub problem: &'a Problem<'a, T>,
    /// The width in which scores are computed, and the same in whole panels.
    pub width: usize,
    pub query_row: usize,
    /// What the scores of each query head are multiplied by.
    pub scales: Vec<T::Acc>,
    v_score: Vec<T::Acc>,
    slopes: Vec<T::Acc>,
    cap: Option<T::Acc>,
    biased: bool,
    /// The keys that top-k chose, `[B, Hq, N, k]`: all others are absent.
    chosen: Option<&'a Tensor<i64, 4>>,
}

/// Copies kept for the gradients of what happens between raw scores and the softmax; empty where not needed.
#[derive(Default)]
pub(crate) struct Kept<'a, A> {
    /// The scores before the scale.
    pub raw: &'a mut [A],
    /// The slopes of the cap.
    pub slopes: &'a mut [A],
}

impl<'a, T: Element> TileOps<'a, T> {
    pub fn new(problem: &'a Problem<'a, T>) -> Self {
        let real = |x: f64| T::Acc::from_f64(x);
        TileOps {
            isa: Isa::best(),
            problem,
            width: problem.width,
            query_row: padded::<T::Acc>(problem.width),
            scales: (0..problem.heads.query).map(|h| real(problem.scale(h))).collect(),
            v_score: problem.inputs.v_score.unwrap_or_default().iter().map(|x| x.widen()).collect(),
            slopes: problem.slopes.iter().map(|&slope| real(slope)).collect(),
            cap: problem.attention.softcap.map(real),
            biased: !problem.slopes.is_empty() || problem.bias.is_some() || problem.inputs.table.is_some(),
            chosen: None,
        }
    }

    /// With what the forward pass selected: after top-k, all keys but the chosen ones are absent.
    pub fn after(problem: &'a Problem<'a, T>, out: &'a Output<T>) -> Self {
        let top_k = matches!(problem.attention.select, Select::TopK(_));
        TileOps { chosen: out.chosen.as_ref().filter(|_| top_k), ..TileOps::new(problem) }
    }

    /// The score that is no product, if it is one.
    pub fn pairwise(&self) -> Option<Pairwise<'_, T::Acc>> {
        match self.problem.attention.score {
            Score::Additive => Some(Pairwise::Additive(&self.v_score)),
            Score::Distance => Some(Pairwise::Distance),
            _ => None,
        }
    }

    /// The two sides of a tile, as the pairwise kernels take them.
    pub fn sides<'b>(
        &self,
        queries: &'b [T::Acc],
        rows: usize,
        panels: &'b [T::Acc],
        keys: usize,
    ) -> Sides<'b, T::Acc> {
        let panel_count = keys.div_ceil(T::Acc::LANES);
        Sides { queries, query_row: self.query_row, keys: panels, rows, panels: panel_count, depth: self.width }
    }

    /// Writes the raw scores of a tile: rows of [`KEYS`], whole panels of keys.
    pub fn raw(&self, queries: &[T::Acc], rows: usize, panels: &[T::Acc], keys: usize, scores: &mut [T::Acc]) {
        match self.pairwise() {
            Some(of) => pairwise::scores(self.isa, of, self.sides(queries, rows, panels, keys), scores, KEYS),
            None => {
                scores[..rows * KEYS].fill(T::Acc::ZERO);
                let (q, k) = (Matrix::rows(queries, self.query_row), Panels::packed(panels, self.width));
                product(self.isa, Target::onto(scores, KEYS), q, k, rows, keys.div_ceil(T::Acc::LANES), self.width);
            }
        }
    }

    /// Scales, caps, biases and masks the raw scores of a tile. Where only a scale is left to do, it is returned for the
    /// next pass to apply; otherwise 1.
    pub fn finish(
        &self,
        piece: &Piece,
        keys: &TileKeys<'_>,
        verdict: Verdict,
        rows: &[RowAt],
        scores: &mut [T::Acc],
        kept: Kept<'_, T::Acc>,
    ) -> T::Acc {
        let width = padded::<T::Acc>(keys.len);
        let scale = self.scales[rows[0].h];
        let one_scale = rows.iter().all(|row| self.scales[row.h] == scale);
        let whole = verdict == Verdict::Full && keys.len == width && self.chosen.is_none();
        if whole && one_scale && self.cap.is_none() && !self.biased && kept.raw.is_empty() {
            return scale;
        }
        let mut bias = [T::Acc::ZERO; KEYS];
        for (r, row) in rows.iter().enumerate() {
            let at = r * KEYS..r * KEYS + width;
            let scores = &mut scores[at.clone()];
            if !kept.raw.is_empty() {
                kept.raw[at.clone()].copy_from_slice(scores);
            }
            row_op(self.isa, scores, RowOp::Scale(self.scales[row.h]));
            if let Some(cap) = self.cap {
                let slopes = (!kept.slopes.is_empty()).then(|| &mut kept.slopes[at.clone()]);
                soft_cap(self.isa, scores, slopes, cap);
            }
            if self.biased {
                self.bias_row(row, keys, &mut bias[..width]);
                row_op(self.isa, scores, RowOp::Add(&bias[..width]));
            }
            if verdict == Verdict::Partial || self.chosen.is_some() {
                let mut bits = piece.bits(&self.problem.scene, row, keys);
                if let Some(chosen) = self.chosen {
                    keep_chosen(chosen, row, keys, &mut bits);
                }
                keep_bits(self.isa, scores, &bits, T::Acc::ONE, T::Acc::NEG_INFINITY);
            } else {
                scores[keys.len..].fill(T::Acc::NEG_INFINITY);
            }
        }
        T::Acc::ONE
    }

    /// [`finish`](TileOps::finish), with nothing left to do.
    pub fn finish_all(
        &self,
        piece: &Piece,
        keys: &TileKeys<'_>,
        verdict: Verdict,
        rows: &[RowAt],
        scores: &mut [T::Acc],
    ) {
        let scale = self.finish(piece, keys, verdict, rows, scores, Kept::default());
        if scale != T::Acc::ONE {
            row_op(self.isa, &mut scores[..rows.len() * KEYS], RowOp::Scale(scale));
        }
    }

    /// All biases of one row of a tile, added up.
    fn bias_row(&self, row: &RowAt, keys: &TileKeys<'_>, out: &mut [T::Acc]) {
        let problem = self.problem;
        out.fill(T::Acc::ZERO);
        let out = &mut out[..keys.len];
        if let Some(&slope) = self.slopes.get(row.h) {
            match keys.natural() {
                Some(start) => {
                    for (at, out) in out.iter_mut().enumerate() {
                        *out += -(slope * T::Acc::from_f64((row.p - (start + at) as i64).abs() as f64));
                    }
                }
                None => {
                    for (at, out) in out.iter_mut().enumerate() {
                        *out += -(slope * T::Acc::from_f64((row.p - keys.index(at) as i64).abs() as f64));
                    }
                }
            }
        }
        if let Some(bias) = problem.bias {
            match (bias.row(row.b, row.h, row.i), keys.natural()) {
                (Some(bias), Some(start)) => {
                    for (out, bias) in out.iter_mut().zip(&bias[start..]) {
                        *out += bias.widen();
                    }
                }
                _ => {
                    for (at, out) in out.iter_mut().enumerate() {
                        *out += bias.at(row.b, row.h, row.i, keys.index(at)).widen();
                    }
                }
            }
        }
        if let Some(table) = problem.inputs.table {
            let head = row.h % table.shape()[2];
            for (at, out) in out.iter_mut().enumerate() {
                *out += table.at(0, 0, head, problem.table_entry(row.p, keys.index(at))).widen();
            }
        }
    }

    /// Multiplies weights, or the gradients of weights, by what comes after the softmax: what dropout keeps, and the Gaussian
    /// of predictive local attention.
    pub fn modulate(&self, rows: &[RowAt], keys: &TileKeys<'_>, weights: &mut [T::Acc]) {
        if let Some(dropout) = self.problem.attention.dropout {
            self.drop(dropout, rows, keys, weights);
        }
        if let Some(reach) = self.problem.attention.local {
            for (r, row) in rows.iter().enumerate() {
                let (center, inverse) = (self.center(row), inverse_variance(reach));
                for (at, weight) in weights[r * KEYS..][..keys.len].iter_mut().enumerate() {
                    let apart = keys.index(at) as f64 - center;
                    *weight *= T::Acc::from_f64((-0.5 * apart * apart * inverse).exp());
                }
            }
        }
    }

    fn center(&self, row: &RowAt) -> f64 {
        self.problem.scene.center(row.b, row.h).map_or(0.0, |center| center(row.i))
    }

    /// The gradient of a row's centre: `Σ weight · grad · (j − c)/σ²`, with `grads` those of the weights after the Gaussian.
    pub fn center_gradient(&self, row: &RowAt, keys: &TileKeys<'_>, weights: &[T::Acc], grads: &[T::Acc]) -> T::Acc {
        let (center, inverse) = (self.center(row), inverse_variance(self.problem.attention.local.unwrap_or(1)));
        let part = |at: usize| weights[at] * grads[at] * T::Acc::from_f64((keys.index(at) as f64 - center) * inverse);
        (0..keys.len).filter(|&at| weights[at] != T::Acc::ZERO).map(part).sum()
    }

    /// Drops weights, or the gradients of weights, and scales up what is kept.
    fn drop(&self, dropout: Dropout, rows: &[RowAt], keys: &TileKeys<'_>, weights: &mut [T::Acc]) {
        let width = padded::<T::Acc>(keys.len);
        let kept = T::Acc::from_f64(dropout.kept_scale());
        for (r, row) in rows.iter().enumerate() {
            let mut bits = Bits::default();
            match keys.natural() {
                Some(start) => philox::keep(dropout.seed, row.b, row.h, row.i, start, dropout.threshold(), &mut bits),
                None => keys.each(&mut bits, |_, j| {
                    u32::from(philox::bits(dropout.seed, row.b, row.h, row.i, j)) >= dropout.threshold()
                }),
            }
            keep_bits(self.isa, &mut weights[r * KEYS..][..width], &bits, kept, T::Acc::ZERO);
        }
    }
}

/// The keys that a row chose, ascending; −1, where fewer were there to choose, comes first.
pub(crate) fn chosen_by<'a>(chosen: &'a Tensor<i64, 4>, row: &RowAt) -> &'a [i64] {
    let [_, heads, n, k] = chosen.shape();
    &chosen.data()[((row.b * heads + row.h) * n + row.i) * k..][..k]
}

/// Clears the bits of keys that were not chosen.
fn keep_chosen(chosen: &Tensor<i64, 4>, row: &RowAt, keys: &TileKeys<'_>, bits: &mut Bits) {
    let chosen = chosen_by(chosen, row);
    let first = chosen.partition_point(|&j| j < keys.start as i64);
    let mut kept = Bits::default();
    for &j in chosen[first..].iter().take_while(|&&j| j < (keys.start + keys.len) as i64) {
        let at = j as usize - keys.start;
        kept[at / 64] |= 1 << (at % 64);
    }
    bits.iter_mut().zip(kept).for_each(|(bits, kept)| *bits &= kept);
}

/// One over σ², with Luong's `σ = D/2`.
fn inverse_variance(reach: usize) -> f64 {
    4.0 / (reach as f64 * reach as f64)
}
