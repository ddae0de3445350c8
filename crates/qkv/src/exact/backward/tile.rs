//! One tile of the backward pass: scores again, then every gradient that goes through them.
//!
//! Two ways lead through a tile. In passes over rows of sums, whatever lies between scores and weights; or, where products are made
//! from pairs of bf16 and nothing lies between, with results that are rounded as they are made.

use super::bias::{BiasGradient, Step, TableGradient};
use super::{Pass, Sums, next_turn};
use crate::exact::gemm::by_key::{Gathering, Packed};
use crate::exact::gemm::{Arithmetic, Desk, Weighed};
use crate::exact::pack::query_blocks::QueryBlocks;
use crate::exact::plan::Piece;
use crate::exact::plan::order::TileKeys;
use crate::exact::plan::rule::Verdict;
use crate::exact::scores::{Kept, Live, RowAt};
use crate::exact::select::{chosen_in, one_hot};
use crate::scratch::Buffer;
use crate::select::{Choice, Select};
use crate::tuning::{KEYS, PAIR_ROWS, QUERIES, gathered};
use qkv_simd::tile::{RowGradient, RowOp, Span, row_op, softmax_gradient, sparsemax_gradient};
use qkv_simd::{Element, Real, padded, pairwise};
use std::ops::Range;

/// What a worker needs of its own.
pub(super) struct Worker<'s, A: Real> {
    pub desk: Desk<'s, A>,
    pub scorer: Desk<'s, A>,
    rows: Vec<RowAt>,
    live: Live,
    scores: Buffer<'s, A>,
    grads: Buffer<'s, A>,
    raw: Buffer<'s, A>,
    slopes: Buffer<'s, A>,
    /// The gradients of weights, where centres need them.
    d_weights: Buffer<'s, A>,
    pub key_columns: Buffer<'s, A>,
    pub key_rows: Buffer<'s, A>,
    pub value_columns: Buffer<'s, A>,
    pub d_keys: Buffer<'s, A>,
    pub d_values: Buffer<'s, A>,
    /// Weights and gradients of scores by key, where products take them like that, and those of them that are not added yet.
    by_key: [Buffer<'s, A>; 2],
    waiting: Waiting,
    /// Gradients of keys or values on their way out.
    pub turned: Buffer<'s, A>,
    d_queries: Buffer<'s, A>,
    pub table: Buffer<'s, A>,
    pub small: Buffer<'s, A>,
}

/// Rows of tiles that are kept whole, one after the other among those that are packed together, whose part in the gradients of keys
/// and values is still to be added.
#[derive(Default)]
struct Waiting {
    /// The last of the tiles.
    tile: usize,
    rows: Range<usize>,
}

/// A tile: where it is, and its queries and upstream gradients.
struct Tile<'t, A> {
    step: Step,
    piece: &'t Piece,
    keys: TileKeys<'t>,
    /// The query head, counted within the sequence.
    h: usize,
    count: usize,
    /// Whether the keys are finite, where that matters to their scores.
    finite: bool,
    queries: Packed<'t, A>,
    upstream: Packed<'t, A>,
    /// What the gradients of weights are relative to, for each row.
    deltas: &'t [A],
}

/// What the gradient of the softmax needs to know of the rows of a tile.
struct Terms<A> {
    lse: [A; QUERIES],
    entropy: [A; QUERIES],
}

impl<'a, T: Element> Pass<'a, T> {
    /// The room of a worker.
    pub fn worker(&self) -> Worker<'a, T::Acc> {
        let (ops, take) = (&self.ops, |len: usize| self.scratch.take(len));
        let problem = ops.problem;
        let (row, value_row) = (padded::<T::Acc>(problem.width), padded::<T::Acc>(problem.dv));
        let if_needed = |needed: bool, len: usize| take(if needed { len } else { 0 });
        let table = problem.inputs.table.map_or(0, |table| table.shape()[3]);
        Worker {
            desk: ops.desk(self.scratch),
            scorer: ops.scorer(self.scratch),
            rows: Vec::with_capacity(QUERIES),
            live: Live::default(),
            scores: take(QUERIES * KEYS),
            grads: take(QUERIES * KEYS),
            raw: if_needed(problem.inputs.scale.is_some(), QUERIES * KEYS),
            slopes: if_needed(problem.attention.softcap.is_some(), QUERIES * KEYS),
            d_weights: if_needed(problem.attention.local.is_some(), QUERIES * KEYS),
            key_columns: take(ops.scoring.columns_len::<T::Acc>(KEYS, ops.width)),
            key_rows: take(ops.arithmetic.rows_len::<T::Acc>(KEYS, ops.width)),
            value_columns: take(ops.arithmetic.columns_len::<T::Acc>(KEYS, problem.dv)),
            d_keys: take(KEYS * row),
            d_values: take(KEYS * value_row),
            by_key: [(); 2].map(|()| take(Desk::<T::Acc>::turned_len(ops.arithmetic))),
            waiting: Waiting::default(),
            turned: take(KEYS * row.max(value_row)),
            d_queries: if_needed(ops.pairwise().is_some(), QUERIES * row),
            table: take(table),
            small: take(self.small_len()),
        }
    }

    /// Adds what waits to the gradients of a tile of keys and values.
    pub fn add_waiting(
        &self,
        keys: &TileKeys<'_>,
        (b, h): (usize, usize),
        blocks: &QueryBlocks<'_, T>,
        worker: &mut Worker<'_, T::Acc>,
    ) {
        let Worker { desk, scorer, d_keys, d_values, by_key: [weights, grads], waiting, .. } = worker;
        let Waiting { tile, rows } = std::mem::take(waiting);
        if !rows.is_empty() {
            let span = Span::all::<T::Acc>(padded::<T::Acc>(keys.len));
            let problem = self.ops.problem;
            let queries = blocks.queries((b, h, tile), desk, scorer);
            let (upstream, _) = blocks.upstream((b, h, tile), desk);
            desk.gather_rows(weights, upstream, rows.clone(), span, problem.dv, d_values);
            desk.gather_rows(grads, queries, rows, span, problem.width, d_keys);
        }
    }

    /// Adds the gradients of a tile to those of its queries, keys and values.
    #[allow(clippy::too_many_arguments)]
    pub fn tile(
        &self,
        piece: &Piece,
        step: Step,
        verdict: Verdict,
        blocks: &QueryBlocks<'_, T>,
        (keys_finite, finite): (bool, bool),
        worker: &mut Worker<'_, T::Acc>,
        sums: &mut Sums<'_, '_, T::Acc>,
        bias: Option<&BiasGradient<'_, T::Acc>>,
    ) {
        let (ops, problem) = (&self.ops, self.ops.problem);
        let (b, h) = (step.b, step.key_head * problem.heads.group + step.g);
        worker.rows.clear();
        worker.rows.extend(piece.query_range(step.query_tile).map(|at| {
            let i = piece.queries.index(b, h, at);
            RowAt { b, h, i, p: problem.scene.place(b, i) }
        }));
        let at = (b, h, step.query_tile);
        let queries = blocks.queries(at, &mut worker.desk, &mut worker.scorer);
        let (upstream, deltas) = blocks.upstream(at, &mut worker.desk);
        let (keys, count) = (piece.tile_keys(b, step.key_head, step.key_tile), worker.rows.len());
        let tile = Tile { step, piece, keys, h, count, finite, queries, upstream, deltas };
        ops.live(piece, &tile.keys, verdict, &worker.rows, &mut worker.live);
        // What goes on between the gradients of scores and those of raw scores; mostly nothing but a scale.
        let more = bias.is_some() || !worker.table.is_empty() || !worker.slopes.is_empty() || !worker.raw.is_empty();
        let scaled = problem.attention.select == Select::Soft && !more;
        let plain = scaled && !ops.modulates() && self.rows.entropy.is_empty();
        let rounded = ops.arithmetic == Arithmetic::Bf16 && plain && queries.finite && upstream.finite;
        // Of tiles that are kept whole, those that follow each other are added to keys and values together.
        let waits = rounded && !worker.live.partly();
        if !waits || queries.first == 0 || worker.waiting.tile + 1 != step.query_tile {
            self.add_waiting(&tile.keys, (b, h), blocks, worker);
        }
        if rounded {
            self.made_rounded(&tile, worker);
            if waits {
                let Waiting { rows, .. } = &worker.waiting;
                let start = if rows.is_empty() { queries.first } else { rows.start };
                worker.waiting = Waiting { tile: step.query_tile, rows: start..queries.first + count };
            } else {
                self.gather(&tile, Which::Values, worker);
                self.gather(&tile, Which::Keys, worker);
            }
        } else {
            self.made_in_passes(&tile, scaled, worker, sums, bias);
        }
        if ops.pairwise().is_none() {
            let Worker { desk, live, grads, key_rows, .. } = worker;
            let keys = &tile.keys;
            let of = Weighed { rows: key_rows, finite: keys_finite, from: self.keys, b, h: step.key_head, keys };
            self.add_to_queries(&tile, sums, |to| desk.weigh(grads, count, of, live.extent(0..count), to, false));
        }
    }

    /// The rows' part in the gradient of the softmax.
    fn terms(&self, tile: &Tile<'_, T::Acc>, rows: &[RowAt]) -> Terms<T::Acc> {
        let problem = self.ops.problem;
        let [mut lse, mut entropy] = [[T::Acc::ZERO; QUERIES]; 2];
        for (r, row) in rows.iter().enumerate() {
            let at = (row.b * problem.heads.query + tile.h) * problem.n + row.i;
            lse[r] = self.rows.lse[at];
            if let Some(&of_row) = self.rows.entropy.get(at) {
                entropy[r] = of_row;
            }
        }
        Terms { lse, entropy }
    }

    /// P and dS, rounded as they are made, a few rows at a time: their scores stay in the first-level cache.
    fn made_rounded(&self, tile: &Tile<'_, T::Acc>, worker: &mut Worker<'_, T::Acc>) {
        let (ops, problem) = (&self.ops, self.ops.problem);
        let Tile { keys, h, count, queries, upstream, deltas, .. } = tile;
        let Worker { desk, rows, live, scores, grads, key_columns, value_columns, by_key, .. } = worker;
        let Terms { lse, .. } = self.terms(tile, rows);
        let upstream_row = ops.arithmetic.left_row::<T::Acc>(problem.dv);
        for start in (0..*count).step_by(PAIR_ROWS) {
            let some = start..(start + PAIR_ROWS).min(*count);
            let (extent, len) = (live.extent(some.clone()), some.len());
            let (queries, upstream) = (&queries.rows[start * ops.query_row..], &upstream.rows[start * upstream_row..]);
            ops.raw(desk, (queries, true), (key_columns, true), keys.len, (live, some.clone()), scores);
            let scale = ops.finish(keys, (live, start), &rows[some], scores, Kept::default());
            let grads = &mut grads[start * KEYS..];
            desk.scores(upstream, len, value_columns, problem.dv, extent, true, grads);
            let of = RowGradient { lse: &lse[start..], delta: &deltas[start..], entropy: &[], scale: ops.scales[*h] };
            let (how, place) = (ops.exponential(scale, extent), (tile.queries.first + start, tile.queries.together));
            desk.soften_back(
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

    /// P and dS in passes over the tile, and all gradients but those of queries.
    fn made_in_passes(
        &self,
        tile: &Tile<'_, T::Acc>,
        scaled: bool,
        worker: &mut Worker<'_, T::Acc>,
        sums: &mut Sums<'_, '_, T::Acc>,
        bias: Option<&BiasGradient<'_, T::Acc>>,
    ) {
        let (ops, problem) = (&self.ops, self.ops.problem);
        let &Tile { step, ref keys, h, count, queries, upstream, deltas, .. } = tile;
        let (isa, width, select) = (ops.isa, padded::<T::Acc>(keys.len), problem.attention.select);
        let Worker {
            desk, scorer, rows, live, scores, grads, raw, slopes, d_weights, key_columns, value_columns, ..
        } = worker;
        let extent = live.extent(0..count);
        let Terms { lse, entropy } = self.terms(tile, rows);

        // S, then P and dS: dP = dO · Vᵀ, dS = P ∘ (dP − δ).
        let (scored, columns) = (queries.scored.unwrap_or(queries.rows), (&key_columns[..], tile.finite));
        ops.raw(scorer, (scored, queries.finite), columns, keys.len, (live, 0..count), scores);
        let kept = Kept { raw: &mut raw[..], slopes: &mut slopes[..] };
        let scale = ops.finish(keys, (live, 0), rows, scores, kept);
        if matches!(select, Select::Hard(Choice { straight_through: false, .. })) {
            grads[..count * KEYS].fill(T::Acc::ZERO);
        } else {
            desk.scores(upstream.rows, count, value_columns, problem.dv, extent, true, grads);
        }
        ops.modulate(rows, keys, grads);
        if !d_weights.is_empty() {
            d_weights[..count * KEYS].copy_from_slice(&grads[..count * KEYS]);
        }
        if select == Select::Sparsemax {
            ops.fill_absent(live, count, scores);
            for r in 0..count {
                let at = r * KEYS..r * KEYS + width;
                sparsemax_gradient(isa, &mut scores[at.clone()], &mut grads[at], scale, lse[r], deltas[r]);
            }
        } else {
            let of = RowGradient {
                lse: &lse,
                delta: deltas,
                entropy: if self.rows.entropy.is_empty() { &[] } else { &entropy },
                scale: if scaled { ops.scales[h] } else { T::Acc::ONE },
            };
            softmax_gradient(isa, scores, grads, KEYS, count, width, ops.exponential(scale, extent), of);
        }
        if let (Select::Hard(_), Some(chosen)) = (select, &self.out.chosen) {
            for (r, row) in rows.iter().enumerate() {
                if let Some(at) = chosen_in(chosen, row, keys) {
                    let of_row = (row.b * problem.heads.query + h) * problem.n + row.i;
                    grads[r * KEYS + at] += self.log_prob.get(of_row).copied().unwrap_or(T::Acc::ZERO);
                }
                one_hot(chosen, row, keys, &mut scores[r * KEYS..][..width]);
            }
        }
        if let (Sums::Turns { centers, .. }, false) = (&*sums, d_weights.is_empty()) {
            let mut to = centers.enter(self.region(tile), step.key_tile as u64);
            for (r, row) in rows.iter().enumerate() {
                let at = r * KEYS..r * KEYS + keys.len;
                to[r] += ops.center_gradient(row, keys, &scores[at.clone()], &d_weights[at]);
            }
            to.leave(self.next(tile));
        }
        ops.modulate(rows, keys, scores);

        // dV += Pᵀ · dO.
        self.turn(tile, Which::Values, worker);
        self.gather(tile, Which::Values, worker);

        let Worker { rows, live, grads, raw, slopes, key_columns, d_keys, d_queries, table, small, .. } = worker;
        if let Some(bias) = bias {
            bias.add(step, Some(grads), count, keys.len);
        }
        if !table.is_empty() {
            TableGradient::gather(problem, rows, keys, grads, table);
        }
        if !scaled {
            for r in 0..count {
                let span = live.row::<T::Acc>(r);
                let at = r * KEYS + span.start..r * KEYS + span.end;
                let grads = &mut grads[at.clone()];
                if !slopes.is_empty() {
                    row_op(isa, grads, RowOp::Multiply(&slopes[at.clone()]));
                }
                if !raw.is_empty() {
                    let to = problem.inputs.v_score.map_or(0, |v| v.len()) + step.g;
                    small[to] += dot_of_kept(grads, &raw[at]) / T::Acc::from_f64(problem.temperature());
                }
                row_op(isa, grads, RowOp::Scale(ops.scales[h]));
            }
        }

        // dK += dSᵀ · Q; and the gradients of queries, where they are no product.
        if let Some(of) = ops.pairwise() {
            d_queries.fill(T::Acc::ZERO);
            let into = pairwise::Into { queries: d_queries, keys: d_keys, v: small };
            pairwise::gradients(isa, of, ops.sides(queries.rows, count, key_columns, keys.len), grads, KEYS, into);
            self.add_to_queries(tile, sums, |to| to.iter_mut().zip(&d_queries[..]).for_each(|(to, &x)| *to += x));
        } else {
            self.turn(tile, Which::Keys, worker);
            self.gather(tile, Which::Keys, worker);
            worker.desk.round(&mut worker.grads, count, keys.len);
        }
    }

    /// Brings weights, or gradients of scores, into the order in which they are gathered.
    fn turn(&self, tile: &Tile<'_, T::Acc>, which: Which, worker: &mut Worker<'_, T::Acc>) {
        let Worker { desk, live, scores, grads, by_key: [weights_by_key, grads_by_key], .. } = worker;
        let (from, to) = match which {
            Which::Values => (scores, weights_by_key),
            Which::Keys => (grads, grads_by_key),
        };
        desk.turn(from, tile.count, live.extent(0..tile.count), (tile.queries.first, tile.queries.together), to);
    }

    /// `dV += Pᵀ · dO`, or `dK += dSᵀ · Q`.
    fn gather(&self, tile: &Tile<'_, T::Acc>, which: Which, worker: &mut Worker<'_, T::Acc>) {
        let Worker { desk, rows, live, scores, grads, by_key: [weights_by_key, grads_by_key], .. } = worker;
        let (from, packed, of, to) = match which {
            Which::Values => {
                ((&scores[..], &weights_by_key[..]), tile.upstream, self.rows.upstream, &mut worker.d_values)
            }
            Which::Keys => ((&grads[..], &grads_by_key[..]), tile.queries, self.queries, &mut worker.d_keys),
        };
        let chain = gathered(self.ops.problem.n);
        let gathering = Gathering { packed, from: of, rows, keys: tile.keys.len, chain };
        desk.gather(from, gathering, live.extent(0..tile.count), to);
    }

    /// The tile of queries among all.
    fn region(&self, tile: &Tile<'_, T::Acc>) -> usize {
        (tile.step.b * self.ops.problem.heads.query + tile.h) * tile.piece.query_tiles() + tile.step.query_tile
    }

    /// The tile of keys whose turn comes after this one.
    fn next(&self, tile: &Tile<'_, T::Acc>) -> u64 {
        let Step { b, query_tile, key_tile, .. } = tile.step;
        next_turn(self.ops.problem, tile.piece, b, tile.h, query_tile, key_tile + 1)
    }

    /// Adds to the gradients of the tile's queries, when it is its turn.
    fn add_to_queries(
        &self,
        tile: &Tile<'_, T::Acc>,
        sums: &mut Sums<'_, '_, T::Acc>,
        add: impl FnOnce(&mut [T::Acc]),
    ) {
        let own = tile.step.g * tile.piece.query_tiles() + tile.step.query_tile;
        sums.add((self.region(tile), own), tile.step.key_tile as u64, || self.next(tile), add);
    }
}

/// Whose gradients are gathered.
#[derive(Clone, Copy)]
enum Which {
    Values,
    Keys,
}

/// `Σ grad · raw` over the pairs that are there: the gradient of one that is absent is exactly 0.
fn dot_of_kept<A: Real>(grads: &[A], raw: &[A]) -> A {
    grads.iter().zip(raw).filter(|(grad, _)| **grad != A::ZERO).map(|(&grad, &raw)| grad * raw).sum()
}
