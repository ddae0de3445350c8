//! The backward pass, in one go over the tiles: five products a tile and no second look.
//!
//! A task owns a tile of keys: it packs them once, walks the tiles of queries that see them, and sums the gradients of its
//! keys and values by itself. The gradients of queries are shared between tasks, so a task adds its part only when the task
//! before it, in the order of the keys, has: a *turn* for each tile of queries. Tasks are taken in that same order, so the
//! one waited for is always under way already; and since the order depends on shapes alone, so do the bits.

use super::bias_gradient::{BiasGradient, Step, Steps, TableGradient};
use super::operand::Operand;
use super::order::Places;
use super::plan::{Piece, Plan};
use super::projection::{Compared, From, back};
use super::rule::{Rule, Verdict};
use super::select::{chosen_in, one_hot};
use super::tile::{Kept, RowAt, TileOps};
use crate::attention::{Gradients, Output};
use crate::error::Result;
use crate::inputs::Upstream;
use crate::problem::Problem;
use crate::scratch::{Buffer, Scratch};
use crate::select::{Choice, Select};
use crate::tensor::Tensor;
use crate::tuning::{KEYS, QUERIES};
use qkv_simd::shared::{Rows, Turnstile, for_each_task};
use qkv_simd::tile::{RowGradient, RowOp, dot, row_op, softmax_gradient, sparsemax_gradient};
use qkv_simd::{
    Element, Matrix, Panels, Real, Target, View, ViewMut, padded, pairwise, product, product_skipping_zeros,
};

/// Computes the gradients of everything that was given.
pub(crate) fn backward<T: Element>(
    problem: &Problem<'_, T>,
    out: &Output<T>,
    upstream: &Upstream<'_, T>,
    scratch: &Scratch<T::Acc>,
    threads: usize,
) -> Result<Gradients<T>> {
    let inputs = &problem.inputs;
    let bias_shape = inputs.bias.filter(|_| upstream.for_bias).map(|bias| bias.shape());
    // The gradient of a bias is as large as the natural order of things: nothing is gained by another. What a selection
    // chose is known by its natural index.
    let plan = match bias_shape {
        None if problem.attention.select == Select::Soft => Plan::new(problem),
        _ => Plan::natural(Rule::of(problem), &problem.scene),
    };
    let compared = Compared::new(problem, scratch, threads);
    let rows = RowTerms::new(problem, out, upstream, scratch, threads);
    let pass = Pass {
        ops: TileOps::after(problem, out),
        queries: compared.queries(problem),
        keys: compared.keys(problem),
        values: Operand::Given(inputs.v),
        upstream: Operand::Given(upstream.values.into()),
        out,
        log_prob: upstream.log_prob.unwrap_or_default(),
        rows: &rows,
        scratch,
        threads,
    };
    let mut bias_room = scratch.zeros(bias_shape.map_or(0, BiasGradient::<T::Acc>::room));
    let table_shape = inputs.table.map(|table| table.shape());
    let mut table_room = scratch.zeros(table_shape.map_or(0, |shape| shape[2] * shape[3]));
    let mut parts: Vec<Part<'_, T::Acc>> = Vec::new();
    {
        // With a gradient of the bias there is one piece; tables take their turns piece after piece.
        let steps = |piece: &Piece| Steps {
            b: problem.b,
            key_heads: problem.heads.key,
            key_tiles: piece.key_tiles().len(),
            group: problem.heads.group,
            query_tiles: piece.query_tiles(),
        };
        for piece in &plan.pieces {
            let bias = bias_shape.map(|shape| BiasGradient::new(shape, steps(piece), &mut bias_room));
            let table = table_shape
                .map(|[_, _, rows, entries]| TableGradient::new(rows, entries, steps(piece), &mut table_room));
            parts.push(pass.piece(piece, bias.as_ref(), table.as_ref()));
        }
    }
    let queries = gathered(problem, &parts, Which::Queries, scratch, threads);
    let d_q = back(problem, From::Queries, queries.view(), scratch, threads)?;
    drop(queries);
    let keys = gathered(problem, &parts, Which::Keys, scratch, threads);
    let d_k = back(problem, From::Keys, keys.view(), scratch, threads)?;
    drop(keys);
    let mut d_v = Tensor::zeros("d_v", inputs.v.shape())?;
    gathered(problem, &parts, Which::Values, scratch, threads).write(&mut d_v, threads);

    let narrowed = |numbers: Vec<T::Acc>| numbers.into_iter().map(T::narrow).collect::<Vec<T>>();
    let small = |range: std::ops::Range<usize>| {
        let mut sum = vec![T::Acc::ZERO; range.len()];
        for part in &parts {
            for task in part.small.chunks_exact(part.small_len.max(1)) {
                sum.iter_mut().zip(&task[range.clone()]).for_each(|(sum, &x)| *sum += x);
            }
        }
        sum
    };
    let v_score = inputs.v_score.map(|v| narrowed(small(0..v.len())));
    let scale = inputs.scale.map(|scale| narrowed(pass.scale_gradient(&parts, scale.len())));
    let mut bias = bias_shape.map(|shape| Tensor::zeros("d_bias", shape)).transpose()?;
    if let (Some(shape), Some(bias)) = (bias_shape, &mut bias) {
        BiasGradient::read(shape, &bias_room, bias);
    }
    let table = table_shape.map(|shape| Tensor::new(narrowed(table_room.to_vec()), shape)).transpose()?;
    let sinks = inputs.sinks.map(|sinks| narrowed(rows.sink_gradient(problem, sinks)));
    let additive = problem.attention.score == crate::score::Score::Additive;
    let (w, w_q) = if additive { (None, d_q.matrix) } else { (d_q.matrix, None) };
    let center = inputs.center.map(|_| narrowed(center_gradient(problem, &parts)));
    let (q, k, v) = (d_q.rows, d_k.rows, d_v);
    Ok(Gradients { q, k, v, w, w_q, w_k: d_k.matrix, v_score, scale, bias, table, sinks, center })
}

/// What the gradient needs to know of every row, one number each, `[B, Hq, N]`.
struct RowTerms<'s, A: Real> {
    lse: Vec<A>,
    /// Subtracted from the gradient of each weight.
    delta: Buffer<'s, A>,
    /// The gradient of the entropy; empty where there is none.
    entropy: Vec<A>,
    /// `delta` without what only kept pairs feel: the gradient of a sink's share.
    sink: Buffer<'s, A>,
}

impl<'s, A: Real> RowTerms<'s, A> {
    fn new<T: Element<Acc = A>>(
        problem: &Problem<'_, T>,
        out: &Output<T>,
        upstream: &Upstream<'_, T>,
        scratch: &'s Scratch<A>,
        threads: usize,
    ) -> Self {
        let (heads, n, row) = (problem.heads.query, problem.n, padded::<A>(problem.dv));
        let count = problem.b * heads * n;
        let (mut delta, mut sink) = (scratch.take(count), scratch.take(count));
        let values = View::from(&out.values);
        let kept = out.kept.as_ref().map(View::from);
        let isa = qkv_simd::Isa::best();
        {
            let shape = [problem.b, heads, n, 1];
            let to_delta = Rows::new(ViewMut::new(&mut delta, shape).expect("one number a row"));
            let to_sink = Rows::new(ViewMut::new(&mut sink, shape).expect("one number a row"));
            for_each_task(
                threads,
                problem.b * heads,
                || (scratch.take(row), scratch.take(row)),
                |(a, c), task| {
                    let (b, h) = (task / heads, task % heads);
                    let logit = problem.inputs.sinks.map_or(A::NEG_INFINITY, |sinks| sinks[h].widen());
                    for i in 0..n {
                        let at = task * n + i;
                        let lse = out.lse.data()[at];
                        if lse == A::NEG_INFINITY {
                            to_delta.write(b, h, i, &[A::ZERO]);
                            to_sink.write(b, h, i, &[A::ZERO]);
                            continue;
                        }
                        // What the gradients of weights are relative to: the output that they made, if they did.
                        match (problem.attention.select, &kept) {
                            (_, Some(kept)) => _ = kept.load_row(b, h, i, a),
                            (Select::Hard(_), None) => a.fill(A::ZERO),
                            _ => _ = values.load_row(b, h, i, a),
                        }
                        upstream.values.load_row(b, h, i, c);
                        let mut share = dot(isa, a, c) - upstream.lse.map_or(A::ZERO, |d| d[at]);
                        share += upstream.log_prob.map_or(A::ZERO, |d| d[at]);
                        let mut delta = share;
                        if let (Some(d), Some(entropy)) = (upstream.entropy, &out.entropy) {
                            let mass = A::ONE - if logit == A::NEG_INFINITY { A::ZERO } else { (logit - lse).exp() };
                            share += d[at] * (entropy.data()[at] - mass);
                            delta = share + d[at];
                        }
                        to_delta.write(b, h, i, &[delta]);
                        to_sink.write(b, h, i, &[share]);
                    }
                },
            );
        }
        let entropy = upstream.entropy.map_or(Vec::new(), |d| d.to_vec());
        RowTerms { lse: out.lse.data().to_vec(), delta, entropy, sink }
    }

    /// `−Σ p_sink · share` over the rows of each head.
    fn sink_gradient<T: Element<Acc = A>>(&self, problem: &Problem<'_, T>, sinks: &[T]) -> Vec<A> {
        let (heads, n) = (problem.heads.query, problem.n);
        let of_head = |h: usize| -> A {
            let rows = (0..problem.b).flat_map(|b| (0..n).map(move |i| (b * heads + h) * n + i));
            let seen = rows.filter(|&at| self.lse[at] != A::NEG_INFINITY && sinks[h].widen() != A::NEG_INFINITY);
            seen.map(|at| -((sinks[h].widen() - self.lse[at]).exp() * self.sink[at])).sum()
        };
        (0..heads).map(of_head).collect()
    }
}

/// What one piece leaves: the gradients of its queries, keys and values in its own order, and small sums of its tasks.
struct Part<'s, A: Real> {
    query_places: Places,
    key_places: Places,
    /// Tiles of queries, each of [`QUERIES`] padded rows.
    queries: Buffer<'s, A>,
    query_tiles: usize,
    query_row: usize,
    /// Padded rows, one a key of the piece.
    keys: Buffer<'s, A>,
    values: Buffer<'s, A>,
    key_count: usize,
    /// For each task: the gradient of the additive vector, then that of the scale of each head of the group.
    small: Buffer<'s, A>,
    small_len: usize,
    /// The gradients of centres, one a query of each tile; empty where there are none.
    centers: Buffer<'s, A>,
}

/// What is added in turn, a tile of queries at a time.
struct Turns<'a, A> {
    queries: Turnstile<'a, A>,
    centers: Turnstile<'a, A>,
}

/// What is the same for every piece.
struct Pass<'a, T: Element> {
    ops: TileOps<'a, T>,
    queries: Operand<'a, T>,
    keys: Operand<'a, T>,
    values: Operand<'a, T>,
    upstream: Operand<'a, T>,
    out: &'a Output<T>,
    log_prob: &'a [T::Acc],
    rows: &'a RowTerms<'a, T::Acc>,
    scratch: &'a Scratch<T::Acc>,
    threads: usize,
}

/// What a worker needs of its own.
struct Worker<'s, A: Real> {
    rows: Vec<RowAt>,
    /// One padded row.
    row: Buffer<'s, A>,
    queries: Buffer<'s, A>,
    upstream: Buffer<'s, A>,
    scores: Buffer<'s, A>,
    grads: Buffer<'s, A>,
    raw: Buffer<'s, A>,
    slopes: Buffer<'s, A>,
    /// The gradients of weights, where centres need them.
    d_weights: Buffer<'s, A>,
    key_panels: Buffer<'s, A>,
    key_rows: Buffer<'s, A>,
    value_panels: Buffer<'s, A>,
    d_keys: Buffer<'s, A>,
    d_values: Buffer<'s, A>,
    d_queries: Buffer<'s, A>,
    table: Buffer<'s, A>,
    small: Buffer<'s, A>,
}

impl<'a, T: Element> Pass<'a, T> {
    fn worker(&self) -> Worker<'a, T::Acc> {
        let (ops, take) = (&self.ops, |len: usize| self.scratch.take(len));
        let problem = ops.problem;
        let (query_row, value_row) = (ops.query_row, padded::<T::Acc>(problem.dv));
        let if_needed = |needed: bool, len: usize| take(if needed { len } else { 0 });
        let table = problem.inputs.table.map_or(0, |table| table.shape()[3]);
        Worker {
            rows: Vec::with_capacity(QUERIES),
            row: take(query_row.max(value_row)),
            queries: take(QUERIES * query_row),
            upstream: take(QUERIES * value_row),
            scores: take(QUERIES * KEYS),
            grads: take(QUERIES * KEYS),
            raw: if_needed(problem.inputs.scale.is_some(), QUERIES * KEYS),
            slopes: if_needed(problem.attention.softcap.is_some(), QUERIES * KEYS),
            d_weights: if_needed(problem.attention.local.is_some(), QUERIES * KEYS),
            key_panels: take(KEYS * ops.width),
            key_rows: take(KEYS * query_row),
            value_panels: take(KEYS * problem.dv),
            d_keys: take(KEYS * query_row),
            d_values: take(KEYS * value_row),
            d_queries: if_needed(ops.pairwise().is_some(), QUERIES * query_row),
            table: take(table),
            small: take(self.small_len()),
        }
    }

    fn small_len(&self) -> usize {
        let problem = self.ops.problem;
        problem.inputs.v_score.map_or(0, |v| v.len()) + problem.inputs.scale.map_or(0, |_| problem.heads.group)
    }

    /// Sums what the tasks found for the learned scale, in their order.
    fn scale_gradient(&self, parts: &[Part<'_, T::Acc>], len: usize) -> Vec<T::Acc> {
        let problem = self.ops.problem;
        let (group, key_heads, skip) = (problem.heads.group, problem.heads.key, self.small_len() - problem.heads.group);
        let mut sum = vec![T::Acc::ZERO; len];
        for part in parts {
            let tasks = part.small.chunks_exact(part.small_len);
            let per_head = tasks.len() / (problem.b * key_heads).max(1);
            for (task, found) in tasks.enumerate() {
                for (g, &x) in found[skip..].iter().enumerate() {
                    sum[(task / per_head % key_heads * group + g) % len] += x;
                }
            }
        }
        sum
    }

    /// Runs the backward pass over one piece.
    fn piece(
        &self,
        piece: &Piece,
        bias: Option<&BiasGradient<'_, T::Acc>>,
        table: Option<&TableGradient<'_, T::Acc>>,
    ) -> Part<'a, T::Acc> {
        let (ops, scratch) = (&self.ops, self.scratch);
        let problem = ops.problem;
        let (batch, heads) = (problem.b, problem.heads);
        let (query_row, value_row) = (ops.query_row, padded::<T::Acc>(problem.dv));
        let (query_tiles, key_tiles, key_count) = (piece.query_tiles(), piece.key_tiles(), piece.keys.len());
        let tasks = batch * heads.key * key_tiles.len();
        let regions = batch * heads.query * query_tiles;
        let mut part = Part {
            query_places: piece.places_of_queries(problem.n),
            key_places: piece.places_of_keys(problem.m),
            queries: scratch.zeros(batch * heads.query * query_tiles * QUERIES * query_row),
            query_tiles,
            query_row,
            keys: scratch.take(batch * heads.key * key_count * query_row),
            values: scratch.take(batch * heads.key * key_count * value_row),
            key_count,
            small: scratch.zeros(tasks * self.small_len()),
            small_len: self.small_len(),
            centers: scratch.zeros(if problem.attention.local.is_some() { regions * QUERIES } else { 0 }),
        };
        let first = |region: usize| {
            let (b, h, tile) =
                (region / (heads.query * query_tiles), region / query_tiles % heads.query, region % query_tiles);
            next_turn(problem, piece, b, h, tile, 0)
        };
        let per_center = if problem.attention.local.is_some() { QUERIES } else { 0 };
        let turns = Turns {
            queries: Turnstile::new(&mut part.queries, regions, QUERIES * query_row, first),
            centers: Turnstile::new(&mut part.centers, regions, per_center, first),
        };
        let rows_of = |data, width| {
            Rows::new(ViewMut::new(data, [batch, heads.key, key_count, width]).expect("as long as its shape"))
        };
        let (to_keys, to_values) = (rows_of(&mut part.keys, query_row), rows_of(&mut part.values, value_row));
        let small_shape = [1, 1, tasks, self.small_len()];
        let to_small = Rows::new(ViewMut::new(&mut part.small, small_shape).expect("as long as its shape"));
        for_each_task(
            self.threads,
            tasks,
            || self.worker(),
            |worker, task| {
                let per_sequence = heads.key * key_tiles.len();
                let (b, key_head, key_tile) =
                    (task / per_sequence, task % per_sequence / key_tiles.len(), task % key_tiles.len());
                let step = Step { b, key_head, key_tile, g: 0, query_tile: 0 };
                self.task(piece, step, worker, &turns, bias, table);
                let keys = piece.tile_keys(b, key_head, key_tile);
                if ops.pairwise().is_some() {
                    unpack(&worker.d_keys, ops.width, keys.len, query_row, &mut worker.key_rows);
                    std::mem::swap(&mut worker.d_keys, &mut worker.key_rows);
                }
                for at in 0..keys.len {
                    to_keys.write(b, key_head, keys.start + at, &worker.d_keys[at * query_row..][..query_row]);
                    to_values.write(b, key_head, keys.start + at, &worker.d_values[at * value_row..][..value_row]);
                }
                to_small.write(0, 0, task, &worker.small);
            },
        );
        drop((turns, to_keys, to_values, to_small));
        part
    }

    /// One tile of keys against all the queries that see it.
    fn task(
        &self,
        piece: &Piece,
        step: Step,
        worker: &mut Worker<'_, T::Acc>,
        turns: &Turns<'_, T::Acc>,
        bias: Option<&BiasGradient<'_, T::Acc>>,
        table: Option<&TableGradient<'_, T::Acc>>,
    ) {
        let (ops, problem) = (&self.ops, self.ops.problem);
        let Step { b, key_head, key_tile, .. } = step;
        let (scene, keys, heads) = (&problem.scene, piece.tile_keys(b, key_head, key_tile), problem.heads);
        let Worker { row, key_panels, key_rows, value_panels, d_keys, d_values, small, .. } = worker;
        self.keys.load_panels(b, key_head, &keys, &mut row[..ops.width], key_panels);
        let keys_finite = self.keys.load_rows(b, key_head, &keys, key_rows);
        self.values.load_panels(b, key_head, &keys, &mut row[..problem.dv], value_panels);
        d_keys.fill(T::Acc::ZERO);
        d_values.fill(T::Acc::ZERO);
        small.fill(T::Acc::ZERO);
        for g in 0..heads.group {
            let h = key_head * heads.group + g;
            worker.table.fill(T::Acc::ZERO);
            let mut passed = 0;
            let pass_turns = |from: usize, to: usize| {
                if let Some(bias) = bias {
                    (from..to).for_each(|query_tile| bias.add(Step { g, query_tile, ..step }, None, 0, 0));
                }
            };
            for (query_tile, verdict) in piece.column(scene, b, h, key_tile) {
                pass_turns(passed, query_tile);
                passed = query_tile + 1;
                let at = Step { g, query_tile, ..step };
                self.tile(piece, at, verdict, keys_finite, worker, turns, bias);
            }
            pass_turns(passed, piece.query_tiles());
            if let Some(table) = table {
                table.add(Step { g, ..step }, &worker.table);
            }
        }
    }

    /// One tile: scores again, then every gradient that goes through them.
    #[allow(clippy::too_many_arguments)]
    fn tile(
        &self,
        piece: &Piece,
        step: Step,
        verdict: Verdict,
        keys_finite: bool,
        worker: &mut Worker<'_, T::Acc>,
        turns: &Turns<'_, T::Acc>,
        bias: Option<&BiasGradient<'_, T::Acc>>,
    ) {
        let (ops, problem) = (&self.ops, self.ops.problem);
        let (isa, heads, keys) = (ops.isa, problem.heads, piece.tile_keys(step.b, step.key_head, step.key_tile));
        let (b, h) = (step.b, step.key_head * heads.group + step.g);
        let (query_row, value_row) = (ops.query_row, padded::<T::Acc>(problem.dv));
        let (width, lanes) = (padded::<T::Acc>(keys.len), T::Acc::LANES);
        let Worker {
            rows,
            queries,
            upstream,
            scores,
            grads,
            raw,
            slopes,
            d_weights,
            key_panels,
            key_rows,
            value_panels,
            d_keys,
            d_values,
            d_queries,
            table,
            small,
            ..
        } = worker;
        rows.clear();
        rows.extend(piece.query_range(step.query_tile).map(|at| {
            let i = piece.queries.index(b, h, at);
            RowAt { b, h, i, p: problem.scene.place(b, i) }
        }));
        let count = rows.len();
        let [mut lse, mut delta, mut entropy] = [[T::Acc::ZERO; QUERIES]; 3];
        let (mut queries_finite, mut upstream_finite) = (true, true);
        for (r, row) in rows.iter().enumerate() {
            queries_finite &= self.queries.load_row(b, h, row.i, &mut queries[r * query_row..][..query_row]);
            upstream_finite &= self.upstream.load_row(b, h, row.i, &mut upstream[r * value_row..][..value_row]);
            let at = (b * heads.query + h) * problem.n + row.i;
            lse[r] = self.rows.lse[at];
            delta[r] = self.rows.delta[at];
            if let Some(&of_row) = self.rows.entropy.get(at) {
                entropy[r] = of_row;
            }
        }
        let of = RowGradient {
            lse: &lse,
            delta: &delta,
            entropy: if self.rows.entropy.is_empty() { &[] } else { &entropy },
        };

        // S, then P and dS: dP = dO · Vᵀ, dS = P ∘ (dP − δ).
        ops.raw(queries, count, key_panels, keys.len, scores);
        let scale =
            ops.finish(piece, &keys, verdict, rows, scores, Kept { raw: &mut raw[..], slopes: &mut slopes[..] });
        let select = problem.attention.select;
        grads[..count * KEYS].fill(T::Acc::ZERO);
        if !matches!(select, Select::Hard(Choice { straight_through: false, .. })) {
            let (d_out, v) = (Matrix::rows(upstream, value_row), Panels::packed(value_panels, problem.dv));
            product(isa, Target::onto(grads, KEYS), d_out, v, count, width / lanes, problem.dv);
        }
        ops.modulate(rows, &keys, grads);
        if !d_weights.is_empty() {
            d_weights[..count * KEYS].copy_from_slice(&grads[..count * KEYS]);
        }
        if select == Select::Sparsemax {
            for r in 0..count {
                let at = r * KEYS..r * KEYS + width;
                sparsemax_gradient(isa, &mut scores[at.clone()], &mut grads[at], scale, lse[r], delta[r]);
            }
        } else {
            softmax_gradient(isa, scores, grads, KEYS, count, width, scale, of);
        }
        if let (Select::Hard(_), Some(chosen)) = (select, &self.out.chosen) {
            for (r, row) in rows.iter().enumerate() {
                if let Some(at) = chosen_in(chosen, row, &keys) {
                    let of_row = (b * heads.query + h) * problem.n + row.i;
                    grads[r * KEYS + at] += self.log_prob.get(of_row).copied().unwrap_or(T::Acc::ZERO);
                }
                one_hot(chosen, row, &keys, &mut scores[r * KEYS..][..width]);
            }
        }
        let region = (b * heads.query + h) * piece.query_tiles() + step.query_tile;
        let turn = step.key_tile as u64;
        let next = next_turn(problem, piece, b, h, step.query_tile, step.key_tile + 1);
        if !d_weights.is_empty() {
            let mut to = turns.centers.enter(region, turn);
            for (r, row) in rows.iter().enumerate() {
                let at = r * KEYS..r * KEYS + keys.len;
                to[r] += ops.center_gradient(row, &keys, &scores[at.clone()], &d_weights[at]);
            }
            to.leave(next);
        }
        ops.modulate(rows, &keys, scores);

        // dV += Pᵀ · dO.
        let multiply = if upstream_finite { product } else { product_skipping_zeros };
        let (p, d_out) = (Matrix::transposed(scores, KEYS), Panels::rows(upstream, value_row));
        multiply(isa, Target::onto(d_values, value_row), p, d_out, keys.len, value_row / lanes, count);

        if let Some(bias) = bias {
            bias.add(step, Some(grads), count, keys.len);
        }
        if !table.is_empty() {
            TableGradient::gather(problem, rows, &keys, grads, table);
        }
        for r in 0..count {
            let grads = &mut grads[r * KEYS..][..width];
            if !slopes.is_empty() {
                row_op(isa, grads, RowOp::Multiply(&slopes[r * KEYS..][..width]));
            }
            if !raw.is_empty() {
                let at = problem.inputs.v_score.map_or(0, |v| v.len()) + step.g;
                small[at] += dot_of_kept(grads, &raw[r * KEYS..][..width]) / T::Acc::from_f64(problem.temperature());
            }
            row_op(isa, grads, RowOp::Scale(ops.scales[h]));
        }

        // dK += dSᵀ · Q and dQ += dS · K, the latter when it is this tile's turn.
        if let Some(of) = ops.pairwise() {
            d_queries.fill(T::Acc::ZERO);
            let into = pairwise::Into { queries: d_queries, keys: d_keys, v: small };
            pairwise::gradients(isa, of, ops.sides(queries, count, key_panels, keys.len), grads, KEYS, into);
            let mut to = turns.queries.enter(region, turn);
            to.iter_mut().zip(&d_queries[..]).for_each(|(to, &x)| *to += x);
            to.leave(next);
        } else {
            let multiply = if queries_finite { product } else { product_skipping_zeros };
            let (ds, q) = (Matrix::transposed(grads, KEYS), Panels::rows(queries, query_row));
            multiply(isa, Target::onto(d_keys, query_row), ds, q, keys.len, query_row / lanes, count);
            let multiply = if keys_finite { product } else { product_skipping_zeros };
            let mut to = turns.queries.enter(region, turn);
            let (ds, k) = (Matrix::rows(grads, KEYS), Panels::rows(key_rows, query_row));
            multiply(isa, Target::onto(&mut to, query_row), ds, k, count, query_row / lanes, keys.len);
            to.leave(next);
        }
    }
}

/// The key tile, from `from` on, whose turn it is at a tile of queries.
fn next_turn<T: Element>(
    problem: &Problem<'_, T>,
    piece: &Piece,
    b: usize,
    h: usize,
    query_tile: usize,
    from: usize,
) -> u64 {
    let next = piece.row(&problem.scene, b, h, query_tile, from).next();
    next.map_or(u64::MAX >> 2, |(tile, _)| tile as u64)
}

/// The gradients of centres in the natural order, `[B, Hq, N]`: the pieces added up.
fn center_gradient<T: Element>(problem: &Problem<'_, T>, parts: &[Part<'_, T::Acc>]) -> Vec<T::Acc> {
    let (heads, n) = (problem.heads.query, problem.n);
    let of = |at: usize| {
        let (b, h, i) = (at / (heads * n), at / n % heads, at % n);
        let part = |part: &Part<'_, T::Acc>| {
            let place = part.query_places.of(b, h, i)?;
            Some(part.centers[(b * heads + h) * part.query_tiles * QUERIES + place])
        };
        parts.iter().filter_map(part).sum()
    };
    (0..problem.b * heads * n).map(of).collect()
}

/// `Σ grad · raw` over the pairs that are there: the gradient of one that is absent is exactly 0.
fn dot_of_kept<A: Real>(grads: &[A], raw: &[A]) -> A {
    grads.iter().zip(raw).filter(|(grad, _)| **grad != A::ZERO).map(|(&grad, &raw)| grad * raw).sum()
}

/// From packed panels to padded rows.
fn unpack<A: Real>(panels: &[A], width: usize, keys: usize, row: usize, out: &mut [A]) {
    out.fill(A::ZERO);
    for key in 0..keys {
        let panel = &panels[key / A::LANES * width * A::LANES..];
        for x in 0..width {
            out[key * row + x] = panel[x * A::LANES + key % A::LANES];
        }
    }
}

/// Which gradient is put together from the parts.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Which {
    Queries,
    Keys,
    Values,
}

/// A gradient in the natural order: the only part's own memory, or the sum of several.
struct Gathered<'a, A: Real> {
    one: Option<&'a [A]>,
    sum: Buffer<'a, A>,
    shape: [usize; 4],
    strides: [isize; 4],
}

impl<A: Real> Gathered<'_, A> {
    fn view(&self) -> View<'_, A> {
        View::strided(self.one.unwrap_or(&self.sum), 0, self.shape, self.strides).expect("as long as its shape")
    }

    fn write<T: Element<Acc = A>>(&self, to: &mut Tensor<T, 4>, threads: usize) {
        let out = Rows::new(ViewMut::from(to));
        let ([batch, heads, len, _], view) = (self.shape, self.view());
        for_each_task(
            threads,
            batch * heads,
            || (),
            |(), task| {
                for i in 0..len {
                    let (b, h) = (task / heads, task % heads);
                    out.write(b, h, i, view.row(b, h, i).expect("rows are contiguous"));
                }
            },
        );
    }
}

/// Adds up the parts of a gradient, row by row, in the order of the pieces.
fn gathered<'a, T: Element>(
    problem: &Problem<'_, T>,
    parts: &'a [Part<'_, T::Acc>],
    which: Which,
    scratch: &'a Scratch<T::Acc>,
    threads: usize,
) -> Gathered<'a, T::Acc> {
    let heads = if which == Which::Queries { problem.heads.query } else { problem.heads.key };
    let len = if which == Which::Queries { problem.n } else { problem.m };
    let width = if which == Which::Values { problem.dv } else { problem.width };
    let row = padded::<T::Acc>(width);
    let shape = [problem.b, heads, len, width];
    // Where rows lie in a part: how many a head has, and which memory.
    let of = |part: &'a Part<'_, T::Acc>| match which {
        Which::Queries => (part.query_tiles * QUERIES, &part.queries[..], &part.query_places),
        Which::Keys => (part.key_count, &part.keys[..], &part.key_places),
        Which::Values => (part.key_count, &part.values[..], &part.key_places),
    };
    let strides = |per_head: usize| [heads * per_head * row, per_head * row, row, 1].map(|x| x as isize);
    if let [part] = parts {
        let (per_head, data, _) = of(part);
        debug_assert!(which != Which::Queries || part.query_row == row);
        return Gathered { one: Some(data), sum: scratch.take(0), shape, strides: strides(per_head) };
    }
    let mut sum = scratch.zeros(problem.b * heads * len * row);
    {
        let padded_shape = [problem.b, heads, len, row];
        let out = Rows::new(ViewMut::new(&mut sum, padded_shape).expect("as long as its shape"));
        for_each_task(
            threads,
            problem.b * heads,
            || scratch.take(row),
            |total, task| {
                for i in 0..len {
                    total.fill(T::Acc::ZERO);
                    for (per_head, data, places) in parts.iter().map(of) {
                        if let Some(place) = places.of(task / heads, task % heads, i) {
                            let from = &data[(task * per_head + place) * row..][..row];
                            total.iter_mut().zip(from).for_each(|(total, &x)| *total += x);
                        }
                    }
                    out.write(task / heads, task % heads, i, total);
                }
            },
        );
    }
    Gathered { one: None, sum, shape, strides: strides(len) }
}
