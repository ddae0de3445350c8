//! One tile of the backward pass: the scores are recomputed, then every gradient that depends on them.
//!
//! There are two paths. The general one makes passes over native rows, with whatever comes between scores and weights.
//! In bf16 arithmetic with nothing in between, the softmax gradient rounds its results to operands in the same pass.

use super::bias::{BiasGradient, TableGradient, TileStep};
use super::{BackwardPass, QueryGradients, next_turn};
use crate::compiled::Verdict;
use crate::compiled::tile::TileKeys;
use crate::exact::gemm::by_key::{PackedQueries, TransposedProduct};
use crate::exact::gemm::{Arithmetic, PackedRows, TileGemm};
use crate::exact::pack::query_blocks::QueryBlocks;
use crate::exact::plan::Piece;
use crate::exact::scores::{SavedScores, TileMask};
use crate::exact::select::{chosen_in, one_hot};
use crate::mask::RowAt;
use crate::scratch::Buffer;
use crate::select::{Choice, Select};
use crate::tuning::{BF16_ROWS, KEYS, QUERIES, partial_sum_len};
use qkv_simd::tile::{RowGradient, RowOp, Span, row_op, softmax_gradient, sparsemax_gradient};
use qkv_simd::{Element, Real, padded, pairwise};
use std::ops::Range;

/// The buffers of a worker.
pub(super) struct BackwardWorker<'s, A: Real> {
    pub gemm: TileGemm<'s, A>,
    pub score_gemm: TileGemm<'s, A>,
    rows: Vec<RowAt>,
    mask: TileMask,
    scores: Buffer<'s, A>,
    grads: Buffer<'s, A>,
    raw: Buffer<'s, A>,
    slopes: Buffer<'s, A>,
    /// The gradients of weights, if centers need them.
    d_weights: Buffer<'s, A>,
    pub key_columns: Buffer<'s, A>,
    pub key_rows: Buffer<'s, A>,
    pub value_columns: Buffer<'s, A>,
    pub d_keys: Buffer<'s, A>,
    pub d_values: Buffer<'s, A>,
    /// Weights and gradients of scores packed by key, in bf16 arithmetic, and those of their rows that are not added
    /// yet.
    by_key: [Buffer<'s, A>; 2],
    deferred: Deferred,
    /// Gradients of keys or values, unpacked to be written.
    pub transposed: Buffer<'s, A>,
    d_queries: Buffer<'s, A>,
    pub table: Buffer<'s, A>,
    pub small: Buffer<'s, A>,
}

/// Consecutive rows of fully visible tiles whose contribution to the gradients of keys and values is not added yet.
#[derive(Default)]
struct Deferred {
    /// The last of the tiles.
    tile: usize,
    rows: Range<usize>,
}

/// A tile with its packed queries and upstream gradients.
struct BackwardTile<'t, A> {
    step: TileStep,
    piece: &'t Piece,
    keys: TileKeys<'t>,
    /// The query head, counted within the sequence.
    h: usize,
    count: usize,
    /// Whether the scores of the keys cannot overflow.
    finite: bool,
    queries: PackedQueries<'t, A>,
    upstream: PackedQueries<'t, A>,
    /// The delta of each row.
    deltas: &'t [A],
}

/// The statistics of a tile's rows for the softmax gradient.
struct SoftmaxTerms<A> {
    lse: [A; QUERIES],
    entropy: [A; QUERIES],
}

impl<'a, T: Element> BackwardPass<'a, T> {
    /// The buffers of a worker.
    pub fn worker(&self) -> BackwardWorker<'a, T::Acc> {
        let (ops, take) = (&self.ops, |len: usize| self.scratch.take(len));
        let problem = ops.problem;
        let (row, value_row) = (padded::<T::Acc>(problem.width), padded::<T::Acc>(problem.dv));
        let if_needed = |needed: bool, len: usize| take(if needed { len } else { 0 });
        let table = problem.inputs.table.map_or(0, |table| table.shape()[3]);
        BackwardWorker {
            gemm: ops.tile_gemm(self.scratch),
            score_gemm: ops.score_gemm(self.scratch),
            rows: Vec::with_capacity(QUERIES),
            mask: TileMask::default(),
            scores: take(QUERIES * KEYS),
            grads: take(QUERIES * KEYS),
            raw: if_needed(problem.inputs.scale.is_some(), QUERIES * KEYS),
            slopes: if_needed(problem.attention.softcap.is_some(), QUERIES * KEYS),
            d_weights: if_needed(problem.attention.local.is_some(), QUERIES * KEYS),
            key_columns: take(ops.scoring.packed_b_transposed_len::<T::Acc>(KEYS, ops.width)),
            key_rows: take(ops.arithmetic.packed_b_len::<T::Acc>(KEYS, ops.width)),
            value_columns: take(ops.arithmetic.packed_b_transposed_len::<T::Acc>(KEYS, problem.dv)),
            d_keys: take(KEYS * row),
            d_values: take(KEYS * value_row),
            by_key: [(); 2].map(|()| take(TileGemm::<T::Acc>::transposed_len(ops.arithmetic))),
            deferred: Deferred::default(),
            transposed: take(KEYS * row.max(value_row)),
            d_queries: if_needed(ops.pairwise().is_some(), QUERIES * row),
            table: take(table),
            small: take(self.small_len()),
        }
    }

    /// Adds the deferred rows to the gradients of a tile of keys and values.
    pub fn flush_deferred(
        &self,
        keys: &TileKeys<'_>,
        (b, h): (usize, usize),
        blocks: &QueryBlocks<'_, T>,
        worker: &mut BackwardWorker<'_, T::Acc>,
    ) {
        let BackwardWorker { gemm, score_gemm, d_keys, d_values, by_key: [weights, grads], deferred, .. } = worker;
        let Deferred { tile, rows } = std::mem::take(deferred);
        if !rows.is_empty() {
            let span = Span::all::<T::Acc>(padded::<T::Acc>(keys.len));
            let problem = self.ops.problem;
            let queries = blocks.queries((b, h, tile), gemm, score_gemm);
            let (upstream, _) = blocks.upstream((b, h, tile), gemm);
            gemm.matmul_transposed_rows(weights, upstream, rows.clone(), span, problem.dv, d_values);
            gemm.matmul_transposed_rows(grads, queries, rows, span, problem.width, d_keys);
        }
    }

    /// Adds the gradients of a tile to those of its queries, keys and values.
    #[allow(clippy::too_many_arguments)]
    pub fn tile(
        &self,
        piece: &Piece,
        step: TileStep,
        verdict: Verdict,
        blocks: &QueryBlocks<'_, T>,
        (keys_finite, finite): (bool, bool),
        worker: &mut BackwardWorker<'_, T::Acc>,
        sums: &mut QueryGradients<'_, '_, T::Acc>,
        bias: Option<&BiasGradient<'_, T::Acc>>,
    ) {
        let (ops, problem) = (&self.ops, self.ops.problem);
        let (b, h) = (step.b, step.key_head * problem.heads.group + step.g);
        worker.rows.clear();
        worker.rows.extend(piece.query_range(step.query_tile).map(|at| {
            let i = piece.queries.index(b, h, at);
            RowAt { b, h, i, p: problem.mask_data.position(b, i) }
        }));
        let at = (b, h, step.query_tile);
        let queries = blocks.queries(at, &mut worker.gemm, &mut worker.score_gemm);
        let (upstream, deltas) = blocks.upstream(at, &mut worker.gemm);
        let (keys, count) = (piece.tile_keys(b, step.key_head, step.key_tile), worker.rows.len());
        let tile = BackwardTile { step, piece, keys, h, count, finite, queries, upstream, deltas };
        ops.tile_mask(piece, &tile.keys, verdict, &worker.rows, &mut worker.mask);
        // What comes between the gradients of scores and those of raw scores; mostly only a scale.
        let more = bias.is_some() || !worker.table.is_empty() || !worker.slopes.is_empty() || !worker.raw.is_empty();
        let only_scaled = problem.attention.select == Select::Soft && !more;
        let plain = only_scaled && !ops.modulates() && self.rows.entropy.is_empty();
        let rounds = ops.arithmetic == Arithmetic::Bf16 && plain && queries.finite && upstream.finite;
        // Consecutive fully visible tiles are added to keys and values together.
        let defers = rounds && !worker.mask.is_partial() && self.wanted.keys;
        if !defers || queries.first == 0 || worker.deferred.tile + 1 != step.query_tile {
            self.flush_deferred(&tile.keys, (b, h), blocks, worker);
        }
        if rounds {
            self.compute_rounded(&tile, worker);
            if defers {
                let Deferred { rows, .. } = &worker.deferred;
                let start = if rows.is_empty() { queries.first } else { rows.start };
                worker.deferred = Deferred { tile: step.query_tile, rows: start..queries.first + count };
            } else {
                self.matmul_transposed(&tile, KeySide::Values, worker);
                self.matmul_transposed(&tile, KeySide::Keys, worker);
            }
        } else {
            self.compute_in_passes(&tile, only_scaled, worker, sums, bias);
        }
        if ops.pairwise().is_none() && self.wanted.queries {
            let BackwardWorker { gemm, mask, grads, key_rows, .. } = worker;
            let keys = &tile.keys;
            let of = PackedRows { rows: key_rows, finite: keys_finite, from: self.keys, b, h: step.key_head, keys };
            self.add_to_queries(&tile, sums, |to| gemm.matmul_pv(grads, count, of, mask.visible(0..count), to, false));
        }
    }

    /// The statistics of the rows of a tile.
    fn softmax_terms(&self, tile: &BackwardTile<'_, T::Acc>, rows: &[RowAt]) -> SoftmaxTerms<T::Acc> {
        let problem = self.ops.problem;
        let [mut lse, mut entropy] = [[T::Acc::ZERO; QUERIES]; 2];
        for (r, row) in rows.iter().enumerate() {
            let at = (row.b * problem.heads.query + tile.h) * problem.n + row.i;
            lse[r] = self.rows.lse[at];
            if let Some(&of_row) = self.rows.entropy.get(at) {
                entropy[r] = of_row;
            }
        }
        SoftmaxTerms { lse, entropy }
    }

    /// Computes P and dS, rounded in the same pass, a few rows at a time, so that their scores stay in the first-level
    /// cache.
    fn compute_rounded(&self, tile: &BackwardTile<'_, T::Acc>, worker: &mut BackwardWorker<'_, T::Acc>) {
        let (ops, problem) = (&self.ops, self.ops.problem);
        let BackwardTile { keys, h, count, queries, upstream, deltas, .. } = tile;
        let BackwardWorker { gemm, rows, mask, scores, grads, key_columns, value_columns, by_key, .. } = worker;
        let SoftmaxTerms { lse, .. } = self.softmax_terms(tile, rows);
        let upstream_row = ops.arithmetic.packed_a_row::<T::Acc>(problem.dv);
        for start in (0..*count).step_by(BF16_ROWS) {
            let some = start..(start + BF16_ROWS).min(*count);
            let (visible, len) = (mask.visible(some.clone()), some.len());
            let (queries, upstream) = (&queries.rows[start * ops.query_row..], &upstream.rows[start * upstream_row..]);
            ops.raw(gemm, (queries, true), (key_columns, true), keys.len, (mask, some.clone()), scores);
            let scale = ops.finish(keys, (mask, start), &rows[some], scores, SavedScores::default());
            let grads = &mut grads[start * KEYS..];
            gemm.matmul_qk(upstream, len, value_columns, problem.dv, visible, true, grads);
            let of = RowGradient { lse: &lse[start..], delta: &deltas[start..], entropy: &[], scale: ops.scales[*h] };
            let (how, place) =
                (ops.exponential(scale, visible), (tile.queries.first + start, tile.queries.packed_rows));
            gemm.softmax_gradient_tile(
                scores,
                grads,
                (len, keys.len),
                how,
                of,
                place,
                by_key.each_mut().map(|by_key| &mut by_key[..]),
            );
        }
    }

    /// Computes P and dS in passes over the tile, and all gradients except those of queries.
    fn compute_in_passes(
        &self,
        tile: &BackwardTile<'_, T::Acc>,
        only_scaled: bool,
        worker: &mut BackwardWorker<'_, T::Acc>,
        sums: &mut QueryGradients<'_, '_, T::Acc>,
        bias: Option<&BiasGradient<'_, T::Acc>>,
    ) {
        let (ops, problem) = (&self.ops, self.ops.problem);
        let &BackwardTile { step, ref keys, h, count, queries, upstream, deltas, .. } = tile;
        let (isa, width, select) = (ops.isa, padded::<T::Acc>(keys.len), problem.attention.select);
        let BackwardWorker {
            gemm,
            score_gemm,
            rows,
            mask,
            scores,
            grads,
            raw,
            slopes,
            d_weights,
            key_columns,
            value_columns,
            ..
        } = worker;
        let visible = mask.visible(0..count);
        let SoftmaxTerms { lse, entropy } = self.softmax_terms(tile, rows);

        // S, then P and dS: dP = dO · Vᵀ, dS = P ∘ (dP − δ).
        let (scored, columns) = (queries.scored.unwrap_or(queries.rows), (&key_columns[..], tile.finite));
        ops.raw(score_gemm, (scored, queries.finite), columns, keys.len, (mask, 0..count), scores);
        let saved = SavedScores { raw: &mut raw[..], slopes: &mut slopes[..] };
        let scale = ops.finish(keys, (mask, 0), rows, scores, saved);
        if matches!(select, Select::Hard(Choice { straight_through: false, .. })) {
            grads[..count * KEYS].fill(T::Acc::ZERO);
        } else {
            gemm.matmul_qk(upstream.rows, count, value_columns, problem.dv, visible, true, grads);
        }
        ops.modulate(rows, keys, grads);
        if !d_weights.is_empty() {
            d_weights[..count * KEYS].copy_from_slice(&grads[..count * KEYS]);
        }
        if select == Select::Sparsemax {
            ops.fill_absent(mask, count, scores);
            for r in 0..count {
                let at = r * KEYS..r * KEYS + width;
                let (scores, grads) = (&mut scores[at.clone()], &mut grads[at]);
                match lse[r].is_nan() {
                    true => nan_row(scores, grads),
                    false => sparsemax_gradient(isa, scores, grads, scale, lse[r], deltas[r]),
                }
            }
        } else {
            let of = RowGradient {
                lse: &lse,
                delta: deltas,
                entropy: if self.rows.entropy.is_empty() { &[] } else { &entropy },
                scale: if only_scaled { ops.scales[h] } else { T::Acc::ONE },
            };
            softmax_gradient(isa, scores, grads, KEYS, count, width, ops.exponential(scale, visible), of);
        }
        if let (Select::Hard(_), Some(chosen)) = (select, self.out.chosen) {
            for (r, row) in rows.iter().enumerate() {
                if let Some(at) = chosen_in(chosen, row, keys) {
                    let of_row = (row.b * problem.heads.query + h) * problem.n + row.i;
                    grads[r * KEYS + at] += self.log_prob.get(of_row).copied().unwrap_or(T::Acc::ZERO);
                }
                if lse[r].is_nan() {
                    continue; // the weights are NaN, as they are for softmax
                }
                one_hot(chosen, row, keys, &mut scores[r * KEYS..][..width]);
            }
        }
        if let (QueryGradients::Shared { centers, .. }, false) = (&*sums, d_weights.is_empty()) {
            let mut to = centers.enter(self.region(tile), step.key_tile as u64);
            for (r, row) in rows.iter().enumerate() {
                let at = r * KEYS..r * KEYS + keys.len;
                to[r] += ops.center_gradient(row, keys, &scores[at.clone()], &d_weights[at]);
            }
            to.leave(self.next(tile));
        }
        ops.modulate(rows, keys, scores);

        // dV += Pᵀ · dO.
        self.pack_transposed(tile, KeySide::Values, worker);
        self.matmul_transposed(tile, KeySide::Values, worker);

        let BackwardWorker { rows, mask, grads, raw, slopes, key_columns, d_keys, d_queries, table, small, .. } =
            worker;
        if let Some(bias) = bias {
            bias.add(step, Some(grads), count, keys.len);
        }
        if !table.is_empty() {
            TableGradient::gather(problem, rows, keys, grads, table);
        }
        if !only_scaled {
            for r in 0..count {
                let span = mask.row::<T::Acc>(r);
                let at = r * KEYS + span.start..r * KEYS + span.end;
                let grads = &mut grads[at.clone()];
                if !slopes.is_empty() {
                    row_op(isa, grads, RowOp::Multiply(&slopes[at.clone()]));
                }
                if !raw.is_empty() {
                    let to = problem.inputs.v_score.map_or(0, |v| v.len()) + step.g;
                    small[to] += masked_dot(grads, &raw[at]) / T::Acc::from_f64(problem.temperature());
                }
                row_op(isa, grads, RowOp::Scale(ops.scales[h]));
            }
        }

        // dK += dSᵀ · Q; and the gradients of queries, if scores are not dot products.
        if let Some(of) = ops.pairwise() {
            d_queries.fill(T::Acc::ZERO);
            let into = pairwise::Into { queries: d_queries, keys: d_keys, v: small };
            pairwise::gradients(isa, of, ops.sides(queries.rows, count, key_columns, keys.len), grads, KEYS, into);
            self.add_to_queries(tile, sums, |to| to.iter_mut().zip(&d_queries[..]).for_each(|(to, &x)| *to += x));
        } else {
            self.pack_transposed(tile, KeySide::Keys, worker);
            self.matmul_transposed(tile, KeySide::Keys, worker);
            worker.gemm.round_weights(&mut worker.grads, count, keys.len);
        }
    }

    /// Packs weights, or gradients of scores, by key.
    fn pack_transposed(
        &self,
        tile: &BackwardTile<'_, T::Acc>,
        which: KeySide,
        worker: &mut BackwardWorker<'_, T::Acc>,
    ) {
        if !self.wanted.keys {
            return;
        }
        let BackwardWorker { gemm, mask, scores, grads, by_key: [weights_by_key, grads_by_key], .. } = worker;
        let (from, to) = match which {
            KeySide::Values => (scores, weights_by_key),
            KeySide::Keys => (grads, grads_by_key),
        };
        gemm.pack_transposed(
            from,
            tile.count,
            mask.visible(0..tile.count),
            (tile.queries.first, tile.queries.packed_rows),
            to,
        );
    }

    /// `dV += Pᵀ · dO`, or `dK += dSᵀ · Q`.
    fn matmul_transposed(
        &self,
        tile: &BackwardTile<'_, T::Acc>,
        which: KeySide,
        worker: &mut BackwardWorker<'_, T::Acc>,
    ) {
        if !self.wanted.keys {
            return;
        }
        let BackwardWorker { gemm, rows, mask, scores, grads, by_key: [weights_by_key, grads_by_key], .. } = worker;
        let (from, packed, of, to) = match which {
            KeySide::Values => {
                ((&scores[..], &weights_by_key[..]), tile.upstream, self.rows.upstream, &mut worker.d_values)
            }
            KeySide::Keys => ((&grads[..], &grads_by_key[..]), tile.queries, self.queries, &mut worker.d_keys),
        };
        let partial_sum = partial_sum_len(self.ops.problem.n);
        let operands = TransposedProduct { packed, from: of, rows, keys: tile.keys.len, partial_sum };
        gemm.matmul_transposed(from, operands, mask.visible(0..tile.count), to);
    }

    /// The region of a tile of queries among all.
    fn region(&self, tile: &BackwardTile<'_, T::Acc>) -> usize {
        (tile.step.b * self.ops.problem.heads.query + tile.h) * tile.piece.query_tiles() + tile.step.query_tile
    }

    /// The next tile of keys that adds to the same queries.
    fn next(&self, tile: &BackwardTile<'_, T::Acc>) -> u64 {
        let TileStep { b, query_tile, key_tile, .. } = tile.step;
        next_turn(self.ops.problem, tile.piece, b, tile.h, query_tile, key_tile + 1)
    }

    /// Adds to the gradients of the tile's queries, in its turn.
    fn add_to_queries(
        &self,
        tile: &BackwardTile<'_, T::Acc>,
        sums: &mut QueryGradients<'_, '_, T::Acc>,
        add: impl FnOnce(&mut [T::Acc]),
    ) {
        let own = tile.step.g * tile.piece.query_tiles() + tile.step.query_tile;
        sums.add((self.region(tile), own), tile.step.key_tile as u64, || self.next(tile), add);
    }
}

/// The gradients that a transposed product adds to.
#[derive(Clone, Copy)]
enum KeySide {
    Values,
    Keys,
}

/// `Σ grad · raw` over visible pairs; the gradient of an absent pair is exactly 0.
fn masked_dot<A: Real>(grads: &[A], raw: &[A]) -> A {
    grads.iter().zip(raw).filter(|(grad, _)| **grad != A::ZERO).map(|(&grad, &raw)| grad * raw).sum()
}

/// The weights and the gradients of a row whose threshold is NaN: NaN for every visible key, 0 for the others.
fn nan_row<A: Real>(scores: &mut [A], grads: &mut [A]) {
    let nan = A::from_f64(f64::NAN);
    for (score, grad) in scores.iter_mut().zip(grads) {
        (*score, *grad) = if *score == A::NEG_INFINITY { (A::ZERO, A::ZERO) } else { (nan, nan) };
    }
}
