//! The scores of one tile: computed raw, then scaled, capped, biased and masked in passes over memory that lies in the
//! first-level cache. Everything that is not needed is skipped for the whole tile, not decided number by number.

use super::plan::{Piece, TileKeys};
use super::rule::{Bits, Verdict};
use crate::problem::Problem;
use crate::score::Score;
use crate::select::Dropout;
use crate::tuning::KEYS;
use qkv_simd::pairwise::{self, Pairwise, Sides};
use qkv_simd::tile::{RowOp, keep_bits, row_op, soft_cap};
use qkv_simd::{Element, Isa, Matrix, Panels, Real, padded, philox, product};

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
        }
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
                product(self.isa, scores, KEYS, q, k, rows, keys.div_ceil(T::Acc::LANES), self.width);
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
        let whole = verdict == Verdict::Full && keys.len == width;
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
            if verdict == Verdict::Partial {
                let bits = piece.bits(&self.problem.scene, row, keys);
                keep_bits(self.isa, scores, &bits, T::Acc::ONE, T::Acc::NEG_INFINITY);
            } else {
                scores[keys.len..].fill(T::Acc::NEG_INFINITY);
            }
        }
        T::Acc::ONE
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

    /// Drops weights, or the gradients of weights, and scales up what is kept.
    pub fn drop(&self, dropout: Dropout, rows: &[RowAt], keys: &TileKeys<'_>, weights: &mut [T::Acc]) {
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
