//! The backward pass, in one go over the tiles: five products a tile and no second look.
//!
//! A task owns a tile of keys: it packs them once, walks the tiles of queries that see them, and sums the gradients of its
//! keys and values by itself. The gradients of queries are shared between tasks, so a task adds its part only when the task
//! before it, in the order of the keys, has: a *turn* for each tile of queries. Tasks are taken in that same order, so the
//! one waited for is always under way already; and since the order depends on shapes alone, so do the bits.

use super::bias_gradient::{BiasGradient, Step, Steps, TableGradient};
use super::operand::Operand;
use super::order::TileKeys;
use super::parts::{Part, Which, center_gradient, gathered};
use super::plan::{Piece, Plan};
use super::products::{Arithmetic, Desk, Gathering, Weighed};
use super::projection::{Compared, From, back};
use super::query_blocks::{QueryBlocks, QueryRoom};
use super::row_terms::RowTerms;
use super::rule::{Rule, Verdict};
use super::select::{chosen_in, one_hot};
use super::tile::{Kept, Live, RowAt, TileOps};
use crate::attention::{Gradients, Output};
use crate::error::Result;
use crate::inputs::Upstream;
use crate::problem::Problem;
use crate::score::Score;
use crate::scratch::{Buffer, Scratch};
use crate::select::{Choice, Select};
use crate::tensor::Tensor;
use crate::tuning::{KEYS, PAIR_ROWS, QUERIES, WHOLE_HEADS_BACKWARD};
use qkv_simd::shared::{Rows, Turnstile, for_each_task};
use qkv_simd::tile::{RowGradient, RowOp, Span, row_op, softmax_gradient, sparsemax_gradient};
use qkv_simd::{Element, Real, ViewMut, padded, pairwise};
use std::ops::Range;

/// Computes the gradients of everything that was given.
pub(crate) fn backward<T: Element>(
    problem: &Problem<'_, T>,
    out: &Output<T>,
    upstream: &Upstream<'_, T>,
    scratch: &Scratch<T::Acc>,
    threads: usize,
) -> Result<Gradients<T>> {
    let inputs = &problem.inputs;
    let narrowed = |numbers: Vec<T::Acc>| numbers.into_iter().map(T::narrow).collect::<Vec<T>>();
    let bias_shape = inputs.bias.filter(|_| upstream.for_bias).map(|bias| bias.shape());
    // The gradient of a bias is as large as the natural order of things: nothing is gained by another. What a selection
    // chose is known by its natural index.
    let plan = match bias_shape {
        None if problem.attention.select == Select::Soft => Plan::new(problem),
        _ => Plan::natural(Rule::of(problem), &problem.scene),
    };
    let compared = Compared::new(problem, scratch, threads);
    let ops = TileOps::after(problem, out);
    let rows = RowTerms::new(&ops, out, upstream, scratch, threads);
    let pass = Pass {
        ops,
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
    let sinks = || inputs.sinks.map(|sinks| narrowed(rows.sink_gradient(problem, sinks)));
    if let Some(piece) = pass.whole_heads(&plan, bias_shape.is_some()) {
        let [q, k, v] = pass.heads(piece)?;
        let (w, w_q, w_k, bias, table) = (None, None, None, None, None);
        let (v_score, scale, center, sinks) = (None, None, None, sinks());
        return Ok(Gradients { q, k, v, w, w_q, w_k, v_score, scale, bias, table, sinks, center });
    }
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
    let sinks = sinks();
    let additive = problem.attention.score == crate::score::Score::Additive;
    let (w, w_q) = if additive { (None, d_q.matrix) } else { (d_q.matrix, None) };
    let center = inputs.center.map(|_| narrowed(center_gradient(problem, &parts)));
    let (q, k, v) = (d_q.rows, d_k.rows, d_v);
    Ok(Gradients { q, k, v, w, w_q, w_k: d_k.matrix, v_score, scale, bias, table, sinks, center })
}

/// The gradients of queries and centres while they are summed up.
enum Sums<'t, 'a, A> {
    /// Shared between tasks and entered in turn, a tile of queries at a time.
    Turns { queries: &'t Turnstile<'a, A>, centers: &'t Turnstile<'a, A> },
    /// A worker's own: the tiles, of some size, of all query heads of one key head.
    Own { tiles: &'t mut [A], size: usize },
}

impl<A: Real> Sums<'_, '_, A> {
    /// Adds to the gradients of a tile of queries, when it is its turn: region `of.0` of all or `of.1` of a key head's own.
    fn add(&mut self, of: (usize, usize), turn: u64, next: impl Fn() -> u64, add: impl FnOnce(&mut [A])) {
        match self {
            Sums::Turns { queries, .. } => {
                let next = next();
                let mut to = queries.enter(of.0, turn);
                add(&mut to);
                to.leave(next);
            }
            Sums::Own { tiles, size } => add(&mut tiles[of.1 * *size..][..*size]),
        }
    }
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
    desk: Desk<'s, A>,
    rows: Vec<RowAt>,
    live: Live,
    scores: Buffer<'s, A>,
    grads: Buffer<'s, A>,
    raw: Buffer<'s, A>,
    slopes: Buffer<'s, A>,
    /// The gradients of weights, where centres need them.
    d_weights: Buffer<'s, A>,
    key_columns: Buffer<'s, A>,
    key_rows: Buffer<'s, A>,
    value_columns: Buffer<'s, A>,
    d_keys: Buffer<'s, A>,
    d_values: Buffer<'s, A>,
    /// Weights and gradients of scores by key, where products take them like that, and those of them that are not added yet.
    by_key: [Buffer<'s, A>; 2],
    waiting: Waiting,
    /// Gradients of keys or values on their way out.
    turned: Buffer<'s, A>,
    d_queries: Buffer<'s, A>,
    table: Buffer<'s, A>,
    small: Buffer<'s, A>,
}

/// Rows of tiles that are kept whole, one after the other among those that are packed together, whose part in the gradients of keys
/// and values is still to be added.
#[derive(Default)]
struct Waiting {
    /// The last of the tiles.
    tile: usize,
    rows: Range<usize>,
}

impl<'a, T: Element> Pass<'a, T> {
    fn worker(&self) -> Worker<'a, T::Acc> {
        let (ops, take) = (&self.ops, |len: usize| self.scratch.take(len));
        let problem = ops.problem;
        let (row, value_row) = (padded::<T::Acc>(problem.width), padded::<T::Acc>(problem.dv));
        let if_needed = |needed: bool, len: usize| take(if needed { len } else { 0 });
        let table = problem.inputs.table.map_or(0, |table| table.shape()[3]);
        Worker {
            desk: ops.desk(self.scratch),
            rows: Vec::with_capacity(QUERIES),
            live: Live::default(),
            scores: take(QUERIES * KEYS),
            grads: take(QUERIES * KEYS),
            raw: if_needed(problem.inputs.scale.is_some(), QUERIES * KEYS),
            slopes: if_needed(problem.attention.softcap.is_some(), QUERIES * KEYS),
            d_weights: if_needed(problem.attention.local.is_some(), QUERIES * KEYS),
            key_columns: take(ops.arithmetic.columns_len::<T::Acc>(KEYS, ops.width)),
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

    /// Room for the packed queries of some heads.
    fn room(&self, piece: &Piece, heads: usize) -> QueryRoom<'a, T::Acc> {
        let widths = [self.queries, self.upstream].map(|of| of.width());
        QueryRoom::new(self.scratch, self.ops.arithmetic, widths, piece, heads)
    }

    /// The packed queries from a head on, counted over all sequences.
    fn blocks<'r>(&self, piece: &'r Piece, room: &'r mut QueryRoom<'_, T::Acc>, first: usize) -> QueryBlocks<'r, T>
    where
        'a: 'r,
    {
        let heads = self.ops.problem.heads.query;
        QueryBlocks::new([self.queries, self.upstream], self.ops.arithmetic, piece, room, (first, heads))
    }

    /// The piece of a plan whose heads are so many that a worker takes each as a whole, if nothing but the gradients of
    /// queries, keys and values is asked for and they need no more than to be written.
    fn whole_heads<'p>(&self, plan: &'p Plan, for_bias: bool) -> Option<&'p Piece> {
        let problem = self.ops.problem;
        let inputs = &problem.inputs;
        let as_they_are = matches!(problem.attention.score, Score::Dot | Score::ScaledDot | Score::Distance);
        let more = for_bias || inputs.table.is_some() || inputs.center.is_some() || self.small_len() > 0;
        match &plan.pieces[..] {
            [piece] if as_they_are && !more && piece.is_natural() => {
                (problem.b * problem.heads.key >= WHOLE_HEADS_BACKWARD * self.threads).then_some(piece)
            }
            _ => None,
        }
    }

    /// Runs the backward pass head by head: all that a head needs is used again for the next.
    fn heads(&self, piece: &Piece) -> Result<[Tensor<T, 4>; 3]> {
        let (ops, scratch) = (&self.ops, self.scratch);
        let problem = ops.problem;
        let (heads, query_tiles) = (problem.heads, piece.query_tiles());
        let row = padded::<T::Acc>(problem.width);
        let shapes = [problem.inputs.q.shape(), problem.inputs.k.shape(), problem.inputs.v.shape()];
        let mut d_q = Tensor::unwritten("d_q", shapes[0])?;
        let mut d_k = Tensor::unwritten("d_k", shapes[1])?;
        let mut d_v = Tensor::unwritten("d_v", shapes[2])?;
        let [to_queries, to_keys, to_values] = [&mut d_q, &mut d_k, &mut d_v].map(|d| Rows::new(d.view()));
        let tiles = heads.group * query_tiles;
        let worker = || (self.worker(), self.room(piece, heads.group), scratch.take(tiles * QUERIES * row));
        for_each_task(self.threads, problem.b * heads.key, worker, |(worker, room, sums), task| {
            let (b, key_head) = (task / heads.key, task % heads.key);
            let blocks = self.blocks(piece, room, b * heads.query + key_head * heads.group);
            sums.fill(T::Acc::ZERO);
            let mut own = Sums::Own { tiles: sums, size: QUERIES * row };
            for key_tile in piece.key_tiles() {
                let step = Step { b, key_head, key_tile, g: 0, query_tile: 0 };
                self.task(piece, step, &blocks, worker, &mut own, None, None);
                self.write(piece, step, worker, &to_keys, &to_values);
            }
            for g in 0..heads.group {
                let of_head = &sums[g * query_tiles * QUERIES * row..];
                to_queries.write_all(b, key_head * heads.group + g, 0, problem.n, of_head, row);
            }
        });
        drop((to_queries, to_keys, to_values));
        let [q, k, v] = shapes;
        Ok([Tensor::new(d_q.written(), q)?, Tensor::new(d_k.written(), k)?, Tensor::new(d_v.written(), v)?])
    }

    /// Writes the gradients of the keys and values of a tile.
    fn write<U: Element<Acc = T::Acc>>(
        &self,
        piece: &Piece,
        step: Step,
        worker: &mut Worker<'_, T::Acc>,
        to_keys: &Rows<'_, U>,
        to_values: &Rows<'_, U>,
    ) {
        let (ops, problem) = (&self.ops, self.ops.problem);
        let keys = piece.tile_keys(step.b, step.key_head, step.key_tile);
        let (row, value_row) = (padded::<T::Acc>(problem.width), padded::<T::Acc>(problem.dv));
        let Worker { desk, d_keys, d_values, turned, .. } = worker;
        let rows = if ops.pairwise().is_some() {
            unpack(d_keys, ops.width, keys.len, row, turned);
            &**turned
        } else {
            desk.key_rows(d_keys, problem.width, turned)
        };
        to_keys.write_all(step.b, step.key_head, keys.start, keys.len, rows, row);
        let rows = desk.key_rows(d_values, problem.dv, turned);
        to_values.write_all(step.b, step.key_head, keys.start, keys.len, rows, value_row);
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
        let scratch = self.scratch;
        let problem = self.ops.problem;
        let (batch, heads) = (problem.b, problem.heads);
        let (query_row, value_row) = (padded::<T::Acc>(problem.width), padded::<T::Acc>(problem.dv));
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
        let queries = Turnstile::new(&mut part.queries, regions, QUERIES * query_row, first);
        let centers = Turnstile::new(&mut part.centers, regions, per_center, first);
        let rows_of = |data, width| {
            Rows::new(ViewMut::new(data, [batch, heads.key, key_count, width]).expect("as long as its shape"))
        };
        let (to_keys, to_values) = (rows_of(&mut part.keys, query_row), rows_of(&mut part.values, value_row));
        let small_shape = [1, 1, tasks, self.small_len()];
        let to_small = Rows::new(ViewMut::new(&mut part.small, small_shape).expect("as long as its shape"));
        // Tasks of one head wait for each other's turns, so as many heads as there are threads go side by side; gradients that
        // all heads share take their turns head by head.
        let (all, per_head) = (batch * heads.key, key_tiles.len());
        let abreast = if bias.is_some() || table.is_some() { 1 } else { self.threads.clamp(1, all.max(1)) };
        let order = |task: usize| {
            let (first, rest) = (task / (abreast * per_head) * abreast, task % (abreast * per_head));
            let width = abreast.min(all - first);
            (first + rest % width, rest / width)
        };
        let mut room = self.room(piece, batch * heads.query);
        let blocks = self.blocks(piece, &mut room, 0);
        for_each_task(
            self.threads,
            tasks,
            || self.worker(),
            |worker, task| {
                let (head, key_tile) = order(task);
                let (b, key_head) = (head / heads.key, head % heads.key);
                let step = Step { b, key_head, key_tile, g: 0, query_tile: 0 };
                let mut turns = Sums::Turns { queries: &queries, centers: &centers };
                self.task(piece, step, &blocks, worker, &mut turns, bias, table);
                self.write(piece, step, worker, &to_keys, &to_values);
                to_small.write(0, 0, head * key_tiles.len() + key_tile, &worker.small);
            },
        );
        drop((queries, centers, to_keys, to_values, to_small));
        part
    }

    /// One tile of keys against all the queries that see it.
    #[allow(clippy::too_many_arguments)]
    fn task(
        &self,
        piece: &Piece,
        step: Step,
        blocks: &QueryBlocks<'_, T>,
        worker: &mut Worker<'_, T::Acc>,
        sums: &mut Sums<'_, '_, T::Acc>,
        bias: Option<&BiasGradient<'_, T::Acc>>,
        table: Option<&TableGradient<'_, T::Acc>>,
    ) {
        let Step { b, key_head, key_tile, .. } = step;
        let problem = self.ops.problem;
        let (scene, keys, heads) = (&problem.scene, piece.tile_keys(b, key_head, key_tile), problem.heads);
        let Worker { desk, key_columns, key_rows, value_columns, d_keys, d_values, small, .. } = worker;
        desk.load_columns(self.keys, (b, key_head), &keys, key_columns);
        let keys_finite = desk.load_rows(self.keys, (b, key_head), &keys, key_rows);
        desk.load_columns(self.values, (b, key_head), &keys, value_columns);
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
                self.tile(piece, at, verdict, blocks, keys_finite, worker, sums, bias);
            }
            self.add_waiting(&keys, (b, h), blocks, worker);
            pass_turns(passed, piece.query_tiles());
            if let Some(table) = table {
                table.add(Step { g, ..step }, &worker.table);
            }
        }
    }

    /// Adds what waits to the gradients of a tile of keys and values.
    fn add_waiting(
        &self,
        keys: &TileKeys<'_>,
        (b, h): (usize, usize),
        blocks: &QueryBlocks<'_, T>,
        worker: &mut Worker<'_, T::Acc>,
    ) {
        let Worker { desk, d_keys, d_values, by_key: [weights, grads], waiting, .. } = worker;
        let Waiting { tile, rows } = std::mem::take(waiting);
        if !rows.is_empty() {
            let span = Span::all::<T::Acc>(padded::<T::Acc>(keys.len));
            let problem = self.ops.problem;
            let (queries, upstream) = (blocks.queries((b, h, tile), desk), blocks.upstream((b, h, tile), desk));
            desk.gather_rows(weights, upstream, rows.clone(), span, problem.dv, d_values);
            desk.gather_rows(grads, queries, rows, span, problem.width, d_keys);
        }
    }

    /// One tile: scores again, then every gradient that goes through them.
    #[allow(clippy::too_many_arguments)]
    fn tile(
        &self,
        piece: &Piece,
        step: Step,
        verdict: Verdict,
        blocks: &QueryBlocks<'_, T>,
        keys_finite: bool,
        worker: &mut Worker<'_, T::Acc>,
        sums: &mut Sums<'_, '_, T::Acc>,
        bias: Option<&BiasGradient<'_, T::Acc>>,
    ) {
        let (ops, problem) = (&self.ops, self.ops.problem);
        let (isa, heads, keys) = (ops.isa, problem.heads, piece.tile_keys(step.b, step.key_head, step.key_tile));
        let (b, h) = (step.b, step.key_head * heads.group + step.g);
        let width = padded::<T::Acc>(keys.len);
        let at = (b, h, step.query_tile);
        let (queries, upstream) = (blocks.queries(at, &mut worker.desk), blocks.upstream(at, &mut worker.desk));
        let finite = queries.finite && upstream.finite;
        worker.rows.clear();
        worker.rows.extend(piece.query_range(step.query_tile).map(|at| {
            let i = piece.queries.index(b, h, at);
            RowAt { b, h, i, p: problem.scene.place(b, i) }
        }));
        let count = worker.rows.len();
        ops.live(piece, &keys, verdict, &worker.rows, &mut worker.live);
        // What goes on between the gradients of scores and those of raw scores; mostly nothing but a scale.
        let more = bias.is_some() || !worker.table.is_empty() || !worker.slopes.is_empty() || !worker.raw.is_empty();
        let select = problem.attention.select;
        let scaled = select == Select::Soft && !more;
        // In pairs, where nothing else comes between, results are rounded as they are made, and those of whole tiles wait for each
        // other.
        let plain = scaled && !ops.modulates() && self.rows.entropy.is_empty();
        let rounded = ops.arithmetic == Arithmetic::Pairs && plain && finite;
        let waits = rounded && !worker.live.partly();
        if !waits || queries.first == 0 || worker.waiting.tile + 1 != step.query_tile {
            self.add_waiting(&keys, (b, h), blocks, worker);
        }
        let Worker {
            desk,
            rows,
            live,
            scores,
            grads,
            raw,
            slopes,
            d_weights,
            key_columns,
            key_rows,
            value_columns,
            d_keys,
            d_values,
            by_key: [weights_by_key, grads_by_key],
            waiting,
            d_queries,
            table,
            small,
            ..
        } = worker;
        let extent = live.extent(0..count);
        let place = (queries.first, queries.together);
        let [mut lse, mut delta, mut entropy] = [[T::Acc::ZERO; QUERIES]; 3];
        for (r, row) in rows.iter().enumerate() {
            let at = (b * heads.query + h) * problem.n + row.i;
            lse[r] = self.rows.lse[at];
            delta[r] = self.rows.delta[at];
            if let Some(&of_row) = self.rows.entropy.get(at) {
                entropy[r] = of_row;
            }
        }
        // S, then P and dS: dP = dO · Vᵀ, dS = P ∘ (dP − δ).
        if rounded {
            let upstream_row = ops.arithmetic.left_row::<T::Acc>(problem.dv);
            for start in (0..count).step_by(PAIR_ROWS) {
                let some = start..(start + PAIR_ROWS).min(count);
                let (extent, len) = (live.extent(some.clone()), some.len());
                ops.raw(
                    desk,
                    &queries.rows[start * ops.query_row..],
                    key_columns,
                    keys.len,
                    (live, some.clone()),
                    scores,
                );
                let scale = ops.finish(&keys, (live, start), &rows[some], scores, Kept::default());
                let grads = &mut grads[start * KEYS..];
                desk.scores(&upstream.rows[start * upstream_row..], len, value_columns, problem.dv, extent, grads);
                let of = RowGradient { lse: &lse[start..], delta: &delta[start..], entropy: &[], scale: ops.scales[h] };
                let into = [&mut weights_by_key[..], &mut grads_by_key[..]];
                let (how, place) = (ops.exponential(scale, extent), (place.0 + start, place.1));
                desk.soften_back(scores, grads, (len, keys.len), how, of, place, into);
            }
        } else {
            ops.raw(desk, queries.rows, key_columns, keys.len, (live, 0..count), scores);
            let kept = Kept { raw: &mut raw[..], slopes: &mut slopes[..] };
            let scale = ops.finish(&keys, (live, 0), rows, scores, kept);
            if matches!(select, Select::Hard(Choice { straight_through: false, .. })) {
                grads[..count * KEYS].fill(T::Acc::ZERO);
            } else {
                desk.scores(upstream.rows, count, value_columns, problem.dv, extent, grads);
            }
            ops.modulate(rows, &keys, grads);
            if !d_weights.is_empty() {
                d_weights[..count * KEYS].copy_from_slice(&grads[..count * KEYS]);
            }
            if select == Select::Sparsemax {
                ops.fill_absent(live, count, scores);
                for r in 0..count {
                    let at = r * KEYS..r * KEYS + width;
                    sparsemax_gradient(isa, &mut scores[at.clone()], &mut grads[at], scale, lse[r], delta[r]);
                }
            } else {
                let of = RowGradient {
                    lse: &lse,
                    delta: &delta,
                    entropy: if self.rows.entropy.is_empty() { &[] } else { &entropy },
                    scale: if scaled { ops.scales[h] } else { T::Acc::ONE },
                };
                softmax_gradient(isa, scores, grads, KEYS, count, width, ops.exponential(scale, extent), of);
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
        }
        let region = (b * heads.query + h) * piece.query_tiles() + step.query_tile;
        let own = step.g * piece.query_tiles() + step.query_tile;
        let turn = step.key_tile as u64;
        let next = || next_turn(problem, piece, b, h, step.query_tile, step.key_tile + 1);
        if let (Sums::Turns { centers, .. }, false) = (&*sums, d_weights.is_empty()) {
            let mut to = centers.enter(region, turn);
            for (r, row) in rows.iter().enumerate() {
                let at = r * KEYS..r * KEYS + keys.len;
                to[r] += ops.center_gradient(row, &keys, &scores[at.clone()], &d_weights[at]);
            }
            to.leave(next());
        }
        if !rounded {
            ops.modulate(rows, &keys, scores);
            desk.turn(scores, count, extent, place, weights_by_key);
        }

        // dV += Pᵀ · dO.
        if waits {
            let start = if waiting.rows.is_empty() { queries.first } else { waiting.rows.start };
            *waiting = Waiting { tile: step.query_tile, rows: start..queries.first + count };
        } else {
            let gathering = Gathering { packed: upstream, from: self.upstream, rows, keys: keys.len };
            desk.gather((scores, weights_by_key), gathering, extent, d_values);
        }

        if let Some(bias) = bias {
            bias.add(step, Some(grads), count, keys.len);
        }
        if !table.is_empty() {
            TableGradient::gather(problem, rows, &keys, grads, table);
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

        // dK += dSᵀ · Q and dQ += dS · K, the latter when it is this tile's turn.
        if let Some(of) = ops.pairwise() {
            d_queries.fill(T::Acc::ZERO);
            let into = pairwise::Into { queries: d_queries, keys: d_keys, v: small };
            pairwise::gradients(isa, of, ops.sides(queries.rows, count, key_columns, keys.len), grads, KEYS, into);
            sums.add((region, own), turn, next, |to| {
                to.iter_mut().zip(&d_queries[..]).for_each(|(to, &x)| *to += x);
            });
        } else {
            if !rounded {
                desk.turn(grads, count, extent, place, grads_by_key);
            }
            if !waits {
                let gathering = Gathering { packed: queries, from: self.queries, rows, keys: keys.len };
                desk.gather((grads, grads_by_key), gathering, extent, d_keys);
            }
            if !rounded {
                desk.round(grads, count, keys.len);
            }
            let of = Weighed { rows: key_rows, finite: keys_finite, from: self.keys, b, h: step.key_head, keys: &keys };
            sums.add((region, own), turn, next, |to| desk.weigh(grads, count, of, extent, to));
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
