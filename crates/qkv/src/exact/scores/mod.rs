//! The scores of a tile: the raw product, then scaled, capped, biased and masked in passes over memory in the
//! first-level cache. Whether a step is needed is decided once per tile, not per element.

pub(crate) mod projection;
pub(crate) mod visible;

use crate::compiled::tile::{TileKeys, bits_of};
use crate::compiled::{Bits, Verdict};
use crate::exact::gemm::{Arithmetic, TileGemm};
use crate::exact::plan::Piece;
use crate::mask::RowAt;
use crate::output::OutputRef;
use crate::problem::Problem;
use crate::score::Score;
use crate::scratch::Scratch;
use crate::select::{Dropout, Select};
use crate::tensor::Tensor;
use crate::tuning::{KEYS, QUERIES};
use qkv_simd::pairwise::{self, Pairwise, Sides};
use qkv_simd::tile::{Exponential, RowOp, Span, add_alibi, apply_mask, keep_bits, row_op, soft_cap};
use qkv_simd::{Element, Isa, Real, padded, philox};
use std::ops::Range;
use visible::VisiblePanels;

/// The parameters that all tiles of a problem share.
pub(crate) struct TileOps<'a, T: Element> {
    pub isa: Isa,
    /// The arithmetic of the scores, and of all other products.
    pub scoring: Arithmetic,
    pub arithmetic: Arithmetic,
    pub problem: &'a Problem<'a, T>,
    /// The width of the compared rows, and the number of accumulators that a packed query takes.
    pub width: usize,
    pub query_row: usize,
    /// The scale of each query head.
    pub scales: Vec<T::Acc>,
    /// Whether all scales are equal.
    one_scale: bool,
    v_score: Vec<T::Acc>,
    slopes: Vec<T::Acc>,
    cap: Option<T::Acc>,
    biased: bool,
    /// The keys that top-k chose, `[B, Hq, N, k]`: all others are absent.
    chosen: Option<&'a Tensor<i64, 4>>,
}

/// Copies that the gradients of scale and cap need; empty if they are not needed.
#[derive(Default)]
pub(crate) struct SavedScores<'a, A> {
    /// The scores before the scale.
    pub raw: &'a mut [A],
    /// The slopes of the cap.
    pub slopes: &'a mut [A],
}

/// The mask of a tile: which of its keys each row sees.
pub(crate) struct TileMask {
    panels: usize,
    /// Whether some keys of the panels are absent for some rows; and whether some rows see no key at all of some
    /// panels.
    absent: bool,
    partial: bool,
    bits: [Bits; QUERIES],
    spans: [Span; QUERIES],
}

impl Default for TileMask {
    fn default() -> Self {
        let (bits, spans) = ([Bits::default(); QUERIES], [Span::default(); QUERIES]);
        TileMask { panels: 0, absent: false, partial: false, bits, spans }
    }
}

impl TileMask {
    /// The panels of which a row sees any key, as a range of keys.
    pub fn row<A: Real>(&self, r: usize) -> Range<usize> {
        let all = Span { start: 0, end: self.panels as u16 };
        let span = if self.partial { self.spans[r] } else { all };
        span.start as usize * A::LANES..span.end as usize * A::LANES
    }

    /// Whether some rows see less than all panels.
    pub fn is_partial(&self) -> bool {
        self.partial
    }

    /// The panels of the tile, and those that each row sees.
    pub fn visible(&self, rows: Range<usize>) -> VisiblePanels<'_> {
        VisiblePanels { panels: self.panels, spans: if self.partial { &self.spans[rows] } else { &[] } }
    }
}

/// The panels that contain any of these bits.
fn span<A: Real>(&[low, high]: &Bits) -> Span {
    let bits = u128::from(high) << 64 | u128::from(low);
    let end = (128 - bits.leading_zeros()).div_ceil(A::LANES as u32);
    Span { start: end.min(bits.trailing_zeros() / A::LANES as u32) as u16, end: end as u16 }
}

impl<'a, T: Element> TileOps<'a, T> {
    pub fn new(problem: &'a Problem<'a, T>) -> Self {
        let real = |x: f64| T::Acc::from_f64(x);
        let isa = Isa::best();
        let arithmetic = Arithmetic::of(problem, isa);
        let scales: Vec<T::Acc> = (0..problem.heads.query).map(|h| real(problem.scale(h))).collect();
        TileOps {
            isa,
            scoring: arithmetic,
            arithmetic,
            problem,
            width: problem.width,
            query_row: arithmetic.packed_a_row::<T::Acc>(problem.width),
            one_scale: scales.windows(2).all(|pair| pair[0] == pair[1]),
            scales,
            v_score: problem.inputs.v_score.unwrap_or_default().iter().map(|x| x.widen()).collect(),
            slopes: problem.slopes.iter().map(|&slope| real(slope)).collect(),
            cap: problem.attention.softcap.map(real),
            biased: !problem.slopes.is_empty() || problem.bias.is_some() || problem.inputs.table.is_some(),
            chosen: None,
        }
    }

    /// For the backward pass: after top-k, all keys but the chosen ones are absent. Scores have the bits of the forward
    /// pass.
    pub fn after(problem: &'a Problem<'a, T>, out: OutputRef<'a, T>) -> Self {
        let top_k = matches!(problem.attention.select, Select::TopK(_));
        let ops = TileOps::new(problem);
        let arithmetic = ops.scoring.of_gradients();
        TileOps { chosen: out.chosen.filter(|_| top_k), arithmetic, ..ops }
    }

    /// The products of scores, for a worker.
    pub fn score_gemm<'s>(&self, scratch: &'s Scratch<T::Acc>) -> TileGemm<'s, T::Acc> {
        TileGemm::new(scratch, self.isa, self.scoring, self.width)
    }

    /// All other products, for a worker.
    pub fn tile_gemm<'s>(&self, scratch: &'s Scratch<T::Acc>) -> TileGemm<'s, T::Acc> {
        TileGemm::new(scratch, self.isa, self.arithmetic, self.width.max(self.problem.dv))
    }

    /// How scores become weights once they are scaled by `scale`.
    pub fn exponential<'b>(&self, scale: T::Acc, visible: VisiblePanels<'b>) -> Exponential<'b, T::Acc> {
        self.exponential_of(scale, visible.spans)
    }

    /// The same for rows that see these spans.
    pub fn exponential_of<'b>(&self, scale: T::Acc, spans: &'b [Span]) -> Exponential<'b, T::Acc> {
        // A bf16 result needs no more than 17 bits of a weight, in whatever arithmetic the weight is multiplied.
        Exponential { scale, spans, accurate_exp: !T::IS_BF16 }
    }

    /// Whether scores are products with one positive scale, and weights their softmax: no cap, bias, entropy or
    /// dropout.
    pub fn is_plain(&self) -> bool {
        let scaled = self.one_scale && self.scales.first().is_some_and(|&scale| scale > T::Acc::ZERO);
        let attention = self.problem.attention;
        scaled && self.cap.is_none() && !self.biased && !attention.entropy && !self.modulates()
    }

    /// The score, if it is not a dot product.
    pub fn pairwise(&self) -> Option<Pairwise<'_, T::Acc>> {
        match self.problem.attention.score {
            Score::Additive => Some(Pairwise::Additive(&self.v_score)),
            Score::Distance => Some(Pairwise::Distance),
            _ => None,
        }
    }

    /// The operands of the pairwise kernels.
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

    /// Computes which keys of a tile each row sees.
    pub fn tile_mask(&self, piece: &Piece, keys: &TileKeys<'_>, verdict: Verdict, rows: &[RowAt], mask: &mut TileMask) {
        let width = padded::<T::Acc>(keys.len);
        mask.panels = width / T::Acc::LANES;
        mask.partial = verdict != Verdict::Full || self.chosen.is_some();
        mask.absent = mask.partial || keys.len < width;
        if !mask.partial {
            // At most the end of the last panel is absent, for every row.
            if mask.absent {
                mask.spans[..rows.len()].fill(Span { start: 0, end: mask.panels as u16 });
                mask.bits[..rows.len()].fill(bits_of(0..keys.len));
            }
            return;
        }
        for (r, row) in rows.iter().enumerate() {
            match piece.seen(&self.problem.mask_data, row, keys) {
                Some(seen) if self.chosen.is_none() => {
                    mask.spans[r] = if seen.is_empty() {
                        Span::default()
                    } else {
                        Span {
                            start: (seen.start / T::Acc::LANES) as u16,
                            end: seen.end.div_ceil(T::Acc::LANES) as u16,
                        }
                    };
                    mask.bits[r] = bits_of(seen);
                }
                _ => {
                    let bits = &mut mask.bits[r];
                    *bits = piece.bits(&self.problem.mask_data, row, keys);
                    if let Some(chosen) = self.chosen {
                        keep_chosen(chosen, row, keys, bits);
                    }
                    mask.spans[r] = span::<T::Acc>(bits);
                }
            }
        }
    }

    /// Writes the raw scores of `rows` rows of a tile: rows of [`KEYS`], in the panels that the rows see. Each operand
    /// carries its no-overflow flag.
    pub fn raw(
        &self,
        gemm: &TileGemm<'_, T::Acc>,
        (queries, queries_no_overflow): (&[T::Acc], bool),
        (columns, keys_no_overflow): (&[T::Acc], bool),
        keys: usize,
        (mask, rows): (&TileMask, Range<usize>),
        scores: &mut [T::Acc],
    ) {
        match self.pairwise() {
            Some(of) => {
                let sides = self.sides(queries, rows.len(), columns, keys);
                pairwise::scores(self.isa, of, sides, scores, KEYS)
            }
            None => {
                let (count, no_overflow) = (rows.len(), queries_no_overflow && keys_no_overflow);
                gemm.matmul_qk(queries, count, columns, self.width, mask.visible(rows), no_overflow, scores)
            }
        }
    }

    /// Scales, caps, biases and masks the raw scores of some rows of a tile. If only a scale remains, it is returned
    /// for the next pass to apply; otherwise 1.
    pub fn finish(
        &self,
        keys: &TileKeys<'_>,
        (mask, first): (&TileMask, usize),
        rows: &[RowAt],
        scores: &mut [T::Acc],
        kept: SavedScores<'_, T::Acc>,
    ) -> T::Acc {
        let scale = self.scales[rows[0].h];
        let one_scale = self.one_scale || rows.iter().all(|row| self.scales[row.h] == scale);
        // An absent score stays −∞ under a positive scale, so the scale can be applied later.
        let later = one_scale && scale > T::Acc::ZERO && self.cap.is_none() && !self.biased && kept.raw.is_empty();
        if later && !mask.absent {
            return scale;
        }
        if !later {
            for (r, row) in rows.iter().enumerate() {
                let span = mask.row::<T::Acc>(first + r);
                let at = r * KEYS + span.start..r * KEYS + span.end;
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
                    self.add_bias(row, keys, span.clone(), scores);
                }
            }
        }
        if mask.absent {
            let some = first..first + rows.len();
            apply_mask(self.isa, scores, KEYS, &mask.bits[some.clone()], &mask.spans[some]);
        }
        if later { scale } else { T::Acc::ONE }
    }

    /// [`finish`](TileOps::finish) for selections that read whole rows: the scale is applied, and absent scores are −∞.
    pub fn finish_all(&self, keys: &TileKeys<'_>, mask: &TileMask, rows: &[RowAt], scores: &mut [T::Acc]) {
        let scale = self.finish(keys, (mask, 0), rows, scores, SavedScores::default());
        self.fill_absent(mask, rows.len(), scores);
        if scale != T::Acc::ONE {
            for scores in scores.chunks_exact_mut(KEYS).take(rows.len()) {
                row_op(self.isa, &mut scores[..padded::<T::Acc>(keys.len)], RowOp::Scale(scale));
            }
        }
    }

    /// Sets absent scores to −∞ outside the rows' spans too, for selections that read whole rows.
    pub fn fill_absent(&self, mask: &TileMask, rows: usize, scores: &mut [T::Acc]) {
        for (r, scores) in scores.chunks_exact_mut(KEYS).enumerate().take(rows) {
            let span = mask.row::<T::Acc>(r);
            scores[..span.start].fill(T::Acc::NEG_INFINITY);
            scores[span.end..].fill(T::Acc::NEG_INFINITY);
        }
    }

    /// Adds all biases to a row of a tile, over a span of whole panels.
    fn add_bias(&self, row: &RowAt, keys: &TileKeys<'_>, span: Range<usize>, scores: &mut [T::Acc]) {
        let problem = self.problem;
        let there = span.start..span.end.min(keys.len);
        if let Some(&slope) = self.slopes.get(row.h) {
            // Integers of this size are exact, so the distances of consecutive keys can be counted down from the first.
            let exact = 1 << (if size_of::<T::Acc>() == 4 { 23 } else { 51 });
            match keys.natural().map(|start| row.p - (start + span.start) as i64) {
                Some(from) if from.abs() < exact => {
                    add_alibi(self.isa, scores, slope, T::Acc::from_f64(from as f64));
                }
                _ => {
                    for (at, score) in there.clone().zip(&mut *scores) {
                        *score += -(slope * T::Acc::from_f64((row.p - keys.index(at) as i64).abs() as f64));
                    }
                }
            }
        }
        let mut added = [T::Acc::ZERO; KEYS];
        if let Some(bias) = problem.bias {
            match keys.natural() {
                Some(start) => {
                    let to = &mut added[..there.len()];
                    bias.load_part(row.b, row.h, row.i, start + there.start, to);
                }
                None => {
                    for (at, added) in there.clone().zip(&mut added) {
                        *added = bias.at(row.b, row.h, row.i, keys.index(at)).widen();
                    }
                }
            }
            row_op(self.isa, scores, RowOp::Add(&added[..span.len()]));
        }
        if let Some(table) = problem.inputs.table {
            let head = row.h % table.shape()[2];
            for (at, score) in there.zip(scores) {
                *score += table.at(0, 0, head, problem.table_entry(row.p, keys.index(at))).widen();
            }
        }
    }

    /// Whether anything changes the weights after the softmax.
    pub fn modulates(&self) -> bool {
        self.problem.attention.dropout.is_some() || self.problem.attention.local.is_some()
    }

    /// Multiplies weights, or gradients of weights, by dropout and by the Gaussian of predictive local attention.
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
        self.problem.mask_data.center(row.b, row.h).map_or(0.0, |center| center(row.i))
    }

    /// The gradient of a row's center: `Σ weight · grad · (j − c)/σ²`, with `grads` those of the weights after the
    /// Gaussian.
    pub fn center_gradient(&self, row: &RowAt, keys: &TileKeys<'_>, weights: &[T::Acc], grads: &[T::Acc]) -> T::Acc {
        let (center, inverse) = (self.center(row), inverse_variance(self.problem.attention.local.unwrap_or(1)));
        let part = |at: usize| weights[at] * grads[at] * T::Acc::from_f64((keys.index(at) as f64 - center) * inverse);
        (0..keys.len).filter(|&at| weights[at] != T::Acc::ZERO).map(part).sum()
    }

    /// Drops weights, or gradients of weights, and rescales the others.
    fn drop(&self, dropout: Dropout, rows: &[RowAt], keys: &TileKeys<'_>, weights: &mut [T::Acc]) {
        let width = padded::<T::Acc>(keys.len);
        let kept = T::Acc::from_f64(dropout.kept_scale());
        for (r, row) in rows.iter().enumerate() {
            let mut bits = Bits::default();
            match keys.natural() {
                Some(start) => {
                    let row = [row.b, row.h, row.i];
                    philox::keep(self.isa, self.problem.seed(), row, start, dropout.threshold(), &mut bits)
                }
                None => keys.each(&mut bits, |j| {
                    u32::from(philox::bits(self.problem.seed(), row.b, row.h, row.i, j)) >= dropout.threshold()
                }),
            }
            keep_bits(self.isa, &mut weights[r * KEYS..][..width], 0, &bits, kept, T::Acc::ZERO);
        }
    }
}

/// The keys that a row chose, ascending, after −1 for each that is missing.
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
