//! The backward pass, in a single loop over the tiles with five products per tile.
//!
//! A task owns a tile of keys: it packs them once, loops over the tiles of queries that see them, and accumulates the
//! gradients of its keys and values, which no other task touches. The gradients of queries are shared between tasks, so
//! a task adds to a tile of queries only in its *turn*, after the previous task in the order of the keys. Tasks are
//! taken in that same order, so a task only ever waits for one that is already running; and since the order depends
//! only on shapes, so do the bits.

mod bias;
mod piece_gradients;
pub(crate) mod row_terms;
mod tile;

use crate::compiled::Expr;
use crate::exact::pack::Operand;
use crate::exact::pack::query_blocks::{QueryBlocks, QueryBuffers};
use crate::exact::plan::{Piece, Plan};
use crate::exact::scores::TileOps;
use crate::exact::scores::projection::{ProjectedSide, ScoreOperands, backward_projection};
use crate::gradients::GradientsMut;
use crate::inputs::Upstream;
use crate::output::OutputRef;
use crate::problem::Problem;
use crate::score::Score;
use crate::scratch::Scratch;
use crate::select::Select;
use crate::tuning::{QUERIES, takes_whole_heads};
use bias::{BiasGradient, StepCounts, TableGradient, TileStep};
use piece_gradients::{GradientOf, PieceGradients, center_gradient, gather_gradient};
use qkv_simd::shared::{Rows, Turnstile, for_each_task};
use qkv_simd::{Element, Real, ViewMut, padded};
use row_terms::RowTerms;
use tile::BackwardWorker;

/// Computes the gradients of all inputs, into the memory of `into`.
pub(crate) fn backward<T: Element>(
    problem: &Problem<'_, T>,
    out: OutputRef<'_, T>,
    upstream: &Upstream<'_, T>,
    into: GradientsMut<'_, T>,
    scratch: &Scratch<T::Acc>,
    threads: usize,
) {
    let inputs = &problem.inputs;
    let GradientsMut { q, k, v, w, w_q, w_k, v_score, scale, bias, table, sinks, center, .. } = into;
    let write = |to: Option<&mut [T]>, numbers: Vec<T::Acc>| {
        to.into_iter().flatten().zip(numbers).for_each(|(to, x)| *to = T::narrow(x));
    };
    let bias_shape = bias.as_ref().map(ViewMut::shape);
    // The gradient of a bias covers the natural order, so another order gains nothing. Selections store natural
    // indices.
    let plan = match bias_shape {
        None if problem.attention.select == Select::Soft => Plan::new(problem),
        _ => Plan::natural(Expr::of(problem), &problem.mask_data),
    };
    let operands = ScoreOperands::new(problem, scratch, threads);
    let ops = TileOps::after(problem, out);
    let rows = RowTerms::new(&ops, out, upstream);
    let pass = BackwardPass {
        ops,
        queries: operands.queries(problem),
        keys: operands.keys(problem),
        values: Operand::Input(inputs.v),
        out,
        log_prob: upstream.log_prob.unwrap_or_default(),
        wanted: Wanted { queries: upstream.for_queries, keys: upstream.for_keys },
        rows: &rows,
        scratch,
        threads,
    };
    if inputs.sinks.is_some() {
        write(sinks, rows.sink_gradient(&pass.ops, scratch, threads));
    }
    if let Some(piece) = pass.simple_piece(&plan, bias_shape.is_some()) {
        let whole_heads = takes_whole_heads(problem.b * problem.heads.key, problem.m, threads);
        return if whole_heads { pass.run_by_head(piece, [q, k, v]) } else { pass.run_shared(piece, [q, k, v]) };
    }
    let mut bias_buffer = scratch.zeros(bias_shape.map_or(0, BiasGradient::<T::Acc>::buffer_len));
    let table_shape = inputs.table.map(|table| table.shape());
    let mut table_buffer = scratch.zeros(table_shape.map_or(0, |shape| shape[2] * shape[3]));
    let mut parts: Vec<PieceGradients<'_, T::Acc>> = Vec::new();
    {
        // With a gradient of the bias there is one piece; tables are added piece after piece.
        let steps = |piece: &Piece| StepCounts {
            b: problem.b,
            key_heads: problem.heads.key,
            key_tiles: piece.key_tiles().len(),
            group: problem.heads.group,
            query_tiles: piece.query_tiles(),
        };
        for piece in &plan.pieces {
            let bias = bias_shape.map(|shape| BiasGradient::new(shape, steps(piece), &mut bias_buffer));
            let table = table_shape
                .map(|[_, _, rows, entries]| TableGradient::new(rows, entries, steps(piece), &mut table_buffer));
            parts.push(pass.run_piece(piece, bias.as_ref(), table.as_ref(), None));
        }
    }
    let queries = gather_gradient(problem, &parts, GradientOf::Queries, scratch, threads);
    let query_matrix = if problem.attention.score == Score::Additive { w_q } else { w };
    backward_projection(problem, ProjectedSide::Queries, queries.view(), (q, query_matrix), scratch, threads);
    drop(queries);
    let keys = gather_gradient(problem, &parts, GradientOf::Keys, scratch, threads);
    backward_projection(problem, ProjectedSide::Keys, keys.view(), (k, w_k), scratch, threads);
    drop(keys);
    gather_gradient(problem, &parts, GradientOf::Values, scratch, threads).write(v, threads);

    let small = |range: std::ops::Range<usize>| {
        let mut sum = vec![T::Acc::ZERO; range.len()];
        for part in &parts {
            for task in part.small.chunks_exact(part.small_len.max(1)) {
                sum.iter_mut().zip(&task[range.clone()]).for_each(|(sum, &x)| *sum += x);
            }
        }
        sum
    };
    if let Some(given) = inputs.v_score {
        write(v_score, small(0..given.len()));
    }
    if let Some(given) = inputs.scale {
        write(scale, pass.scale_gradient(&parts, given.len()));
    }
    if let Some(bias) = bias {
        BiasGradient::read(&bias_buffer, bias);
    }
    if let (Some([_, _, rows, entries]), Some(table)) = (table_shape, table) {
        Rows::new(table).write_all(0, 0, 0, rows, &table_buffer, entries);
    }
    if inputs.center.is_some() {
        write(center, center_gradient(problem, &parts));
    }
}

/// The gradients of queries and centers while they are accumulated.
enum QueryGradients<'t, 'a, A> {
    /// Shared between tasks and entered in turn, a tile of queries at a time. The first turn of each tile finds
    /// arbitrary contents in its memory and clears them; the last passes the sum on.
    Shared {
        queries: &'t Turnstile<'a, A>,
        centers: &'t Turnstile<'a, A>,
        first: &'t [u64],
        finished: &'t (dyn Fn(usize, &[A]) + Sync),
    },
    /// Owned by a worker: the tiles of all query heads of one key head.
    Own { tiles: &'t mut [A], size: usize },
}

impl<A: Real> QueryGradients<'_, '_, A> {
    /// Adds to the gradients of a tile of queries, in its turn: region `of.0` if they are shared, tile `of.1` if the
    /// worker owns them.
    pub fn add(&mut self, of: (usize, usize), turn: u64, next: impl Fn() -> u64, add: impl FnOnce(&mut [A])) {
        match self {
            QueryGradients::Shared { queries, first, finished, .. } => {
                let next = next();
                let mut to = queries.enter(of.0, turn);
                if turn == first[of.0] {
                    to.fill(A::ZERO);
                }
                add(&mut to);
                if next == NO_TURN {
                    finished(of.0, &to);
                }
                to.leave(next);
            }
            QueryGradients::Own { tiles, size } => add(&mut tiles[of.1 * *size..][..*size]),
        }
    }
}

/// The turn of a tile of queries that no further tile of keys adds to.
const NO_TURN: u64 = u64::MAX >> 2;

/// Which gradients are requested.
#[derive(Clone, Copy)]
struct Wanted {
    queries: bool,
    /// Of keys and values.
    keys: bool,
}

/// The operands that all pieces share.
struct BackwardPass<'a, T: Element> {
    pub ops: TileOps<'a, T>,
    pub queries: Operand<'a, T>,
    pub keys: Operand<'a, T>,
    pub values: Operand<'a, T>,
    pub out: OutputRef<'a, T>,
    pub log_prob: &'a [T::Acc],
    pub wanted: Wanted,
    pub rows: &'a RowTerms<'a, T>,
    pub scratch: &'a Scratch<T::Acc>,
    pub threads: usize,
}

impl<'a, T: Element> BackwardPass<'a, T> {
    /// Buffers for the packed queries of some heads.
    fn buffers(&self, piece: &Piece, heads: usize) -> QueryBuffers<'a, T::Acc> {
        let widths = [self.queries, self.rows.upstream].map(|of| of.width());
        QueryBuffers::new(self.scratch, (self.ops.arithmetic, self.ops.scoring), widths, piece, heads)
    }

    /// The packed queries from a head on, counted over all sequences.
    fn blocks<'r>(
        &self,
        piece: &'r Piece,
        buffers: &'r mut QueryBuffers<'_, T::Acc>,
        first: usize,
    ) -> QueryBlocks<'r, T>
    where
        'a: 'r,
    {
        let heads = self.ops.problem.heads.query;
        QueryBlocks::new(
            self.queries,
            self.rows,
            (self.ops.arithmetic, self.ops.scoring),
            piece,
            buffers,
            (first, heads),
        )
    }

    /// The only piece of a plan, if only the gradients of queries, keys and values are needed and they need no further
    /// work.
    fn simple_piece<'p>(&self, plan: &'p Plan, for_bias: bool) -> Option<&'p Piece> {
        let problem = self.ops.problem;
        let inputs = &problem.inputs;
        let unprojected = matches!(problem.attention.score, Score::Dot | Score::ScaledDot | Score::Distance);
        let more = for_bias || inputs.table.is_some() || inputs.center.is_some() || self.small_len() > 0;
        match &plan.pieces[..] {
            [piece] if unprojected && !more && piece.is_natural() => Some(piece),
            _ => None,
        }
    }

    /// Runs the backward pass with heads shared by all workers, and writes the gradients as they are finished.
    fn run_shared(&self, piece: &Piece, into: [ViewMut<'_, T>; 3]) {
        self.run_piece(piece, None, None, Some(&into.map(Rows::new)));
    }

    /// Runs the backward pass head by head, reusing all buffers; needs enough heads for all workers.
    fn run_by_head(&self, piece: &Piece, into: [ViewMut<'_, T>; 3]) {
        let (ops, scratch) = (&self.ops, self.scratch);
        let problem = ops.problem;
        let (heads, query_tiles) = (problem.heads, piece.query_tiles());
        let row = padded::<T::Acc>(problem.width);
        let [to_queries, to_keys, to_values] = into.map(Rows::new);
        let tiles = heads.group * query_tiles;
        let worker = || (self.worker(), self.buffers(piece, heads.group), scratch.take(tiles * QUERIES * row));
        for_each_task(self.threads, problem.b * heads.key, worker, |(worker, buffers, sums), task| {
            let (b, key_head) = (task / heads.key, task % heads.key);
            let blocks = self.blocks(piece, buffers, b * heads.query + key_head * heads.group);
            sums.fill(T::Acc::ZERO);
            let mut own = QueryGradients::Own { tiles: sums, size: QUERIES * row };
            for key_tile in piece.key_tiles() {
                let step = TileStep { b, key_head, key_tile, g: 0, query_tile: 0 };
                self.key_tile(piece, step, &blocks, worker, &mut own, None, None);
                self.write_key_gradients(piece, step, worker, &to_keys, &to_values);
            }
            for g in 0..heads.group {
                let of_head = &sums[g * query_tiles * QUERIES * row..];
                to_queries.write_all(b, key_head * heads.group + g, 0, problem.n, of_head, row);
            }
        });
    }

    /// Writes the gradients of the keys and values of a tile.
    fn write_key_gradients<U: Element<Acc = T::Acc>>(
        &self,
        piece: &Piece,
        step: TileStep,
        worker: &mut BackwardWorker<'_, T::Acc>,
        to_keys: &Rows<'_, U>,
        to_values: &Rows<'_, U>,
    ) {
        let (ops, problem) = (&self.ops, self.ops.problem);
        let keys = piece.tile_keys(step.b, step.key_head, step.key_tile);
        let (row, value_row) = (padded::<T::Acc>(problem.width), padded::<T::Acc>(problem.dv));
        let BackwardWorker { gemm, d_keys, d_values, transposed, .. } = worker;
        let rows = if ops.pairwise().is_some() {
            unpack(d_keys, ops.width, keys.len, row, transposed);
            &**transposed
        } else {
            gemm.unpack_key_rows(d_keys, problem.width, transposed)
        };
        to_keys.write_all(step.b, step.key_head, keys.start, keys.len, rows, row);
        let rows = gemm.unpack_key_rows(d_values, problem.dv, transposed);
        to_values.write_all(step.b, step.key_head, keys.start, keys.len, rows, value_row);
    }

    pub(super) fn small_len(&self) -> usize {
        let problem = self.ops.problem;
        problem.inputs.v_score.map_or(0, |v| v.len()) + problem.inputs.scale.map_or(0, |_| problem.heads.group)
    }

    /// Accumulates the tasks' gradients of the learned scale, in order.
    fn scale_gradient(&self, parts: &[PieceGradients<'_, T::Acc>], len: usize) -> Vec<T::Acc> {
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

    /// Runs the backward pass over one piece. The gradients go to `written`, or else into the result.
    fn run_piece(
        &self,
        piece: &Piece,
        bias: Option<&BiasGradient<'_, T::Acc>>,
        table: Option<&TableGradient<'_, T::Acc>>,
        written: Option<&[Rows<'_, T>; 3]>,
    ) -> PieceGradients<'a, T::Acc> {
        let scratch = self.scratch;
        let problem = self.ops.problem;
        let (batch, heads) = (problem.b, problem.heads);
        let (query_row, value_row) = (padded::<T::Acc>(problem.width), padded::<T::Acc>(problem.dv));
        let (query_tiles, key_tiles) = (piece.query_tiles(), piece.key_tiles());
        let key_count = if written.is_some() { 0 } else { piece.keys.len() };
        let tasks = batch * heads.key * key_tiles.len();
        let regions = batch * heads.query * query_tiles;
        let place_of = |region: usize| {
            (region / (heads.query * query_tiles), region / query_tiles % heads.query, region % query_tiles)
        };
        let next = |(b, h, tile)| next_turn(problem, piece, b, h, tile, 0);
        let first: Vec<u64> = (0..regions).map(|region| next(place_of(region))).collect();
        let mut part = PieceGradients {
            query_places: piece.places_of_queries(problem.n),
            key_places: piece.places_of_keys(problem.m),
            queries: scratch.take(regions * QUERIES * query_row),
            query_tiles,
            query_row,
            keys: scratch.take(batch * heads.key * key_count * query_row),
            values: scratch.take(batch * heads.key * key_count * value_row),
            key_count,
            small: scratch.zeros(tasks * self.small_len()),
            small_len: self.small_len(),
            centers: scratch.zeros(if problem.attention.local.is_some() { regions * QUERIES } else { 0 }),
        };
        let write_queries = |region: usize, sums: &[T::Acc]| {
            if let Some([to_queries, ..]) = written {
                let (b, h, tile) = place_of(region);
                let rows = piece.query_range(tile);
                to_queries.write_all(b, h, rows.start, rows.len(), sums, query_row);
            }
        };
        // Tiles of queries that no turn clears and finishes: those that see nothing, or all if the gradients of queries
        // are not requested.
        let asked = self.wanted.queries || self.ops.pairwise().is_some();
        for region in (0..regions).filter(|&region| !asked || first[region] == NO_TURN) {
            let of_tile = &mut part.queries[region * QUERIES * query_row..][..QUERIES * query_row];
            of_tile.fill(T::Acc::ZERO);
            write_queries(region, of_tile);
        }
        let per_center = if problem.attention.local.is_some() { QUERIES } else { 0 };
        let queries = Turnstile::new(&mut part.queries, regions, QUERIES * query_row, |region| first[region]);
        let centers = Turnstile::new(&mut part.centers, regions, per_center, |region| first[region]);
        let rows_of = |data, width| {
            Rows::new(ViewMut::new(data, [batch, heads.key, key_count, width]).expect("as long as its shape"))
        };
        let (to_keys, to_values) = (rows_of(&mut part.keys, query_row), rows_of(&mut part.values, value_row));
        let small_shape = [1, 1, tasks, self.small_len()];
        let to_small = Rows::new(ViewMut::new(&mut part.small, small_shape).expect("as long as its shape"));
        // Tasks of one head wait for each other's turns, so as many heads as there are threads run side by side;
        // with gradients that all heads share, heads run one by one.
        let (all, per_head) = (batch * heads.key, key_tiles.len());
        let heads_at_once = if bias.is_some() || table.is_some() { 1 } else { self.threads.clamp(1, all.max(1)) };
        let order = |task: usize| {
            let (first, rest) = (task / (heads_at_once * per_head) * heads_at_once, task % (heads_at_once * per_head));
            let width = heads_at_once.min(all - first);
            (first + rest % width, rest / width)
        };
        let mut buffers = self.buffers(piece, batch * heads.query);
        let blocks = self.blocks(piece, &mut buffers, 0);
        for_each_task(
            self.threads,
            tasks,
            || self.worker(),
            |worker, task| {
                let (head, key_tile) = order(task);
                let (b, key_head) = (head / heads.key, head % heads.key);
                let step = TileStep { b, key_head, key_tile, g: 0, query_tile: 0 };
                let (queries, centers, first) = (&queries, &centers, &first[..]);
                let mut turns = QueryGradients::Shared { queries, centers, first, finished: &write_queries };
                self.key_tile(piece, step, &blocks, worker, &mut turns, bias, table);
                match written {
                    Some([_, to_keys, to_values]) => self.write_key_gradients(piece, step, worker, to_keys, to_values),
                    None => self.write_key_gradients(piece, step, worker, &to_keys, &to_values),
                }
                to_small.write(0, 0, head * key_tiles.len() + key_tile, &worker.small);
            },
        );
        drop((queries, centers, to_keys, to_values, to_small));
        part
    }

    /// A tile of keys against all queries that see it.
    #[allow(clippy::too_many_arguments)]
    fn key_tile(
        &self,
        piece: &Piece,
        step: TileStep,
        blocks: &QueryBlocks<'_, T>,
        worker: &mut BackwardWorker<'_, T::Acc>,
        sums: &mut QueryGradients<'_, '_, T::Acc>,
        bias: Option<&BiasGradient<'_, T::Acc>>,
        table: Option<&TableGradient<'_, T::Acc>>,
    ) {
        let TileStep { b, key_head, key_tile, .. } = step;
        let problem = self.ops.problem;
        let (mask_data, keys, heads) = (&problem.mask_data, piece.tile_keys(b, key_head, key_tile), problem.heads);
        let BackwardWorker { gemm, score_gemm, key_columns, key_rows, value_columns, d_keys, d_values, small, .. } =
            worker;
        let at = (b, key_head);
        let finite = if self.ops.scoring == self.ops.arithmetic {
            (gemm.pack_b_both(self.keys, at, &keys, (key_columns, key_rows)), true)
        } else {
            let finite = gemm.pack_b(self.keys, at, &keys, key_rows);
            (finite, score_gemm.pack_b_transposed(self.keys, at, &keys, key_columns))
        };
        gemm.pack_b_transposed(self.values, at, &keys, value_columns);
        d_keys.fill(T::Acc::ZERO);
        d_values.fill(T::Acc::ZERO);
        small.fill(T::Acc::ZERO);
        for g in 0..heads.group {
            let h = key_head * heads.group + g;
            worker.table.fill(T::Acc::ZERO);
            let mut passed = 0;
            let skip_turns = |from: usize, to: usize| {
                if let Some(bias) = bias {
                    (from..to).for_each(|query_tile| bias.add(TileStep { g, query_tile, ..step }, None, 0, 0));
                }
            };
            for (query_tile, verdict) in piece.column(mask_data, b, h, key_tile) {
                skip_turns(passed, query_tile);
                passed = query_tile + 1;
                let at = TileStep { g, query_tile, ..step };
                self.tile(piece, at, verdict, blocks, finite, worker, sums, bias);
            }
            self.flush_deferred(&keys, (b, h), blocks, worker);
            skip_turns(passed, piece.query_tiles());
            if let Some(table) = table {
                table.add(TileStep { g, ..step }, &worker.table);
            }
        }
    }
}

/// The next key tile, from `from` on, that adds to a tile of queries.
fn next_turn<T: Element>(
    problem: &Problem<'_, T>,
    piece: &Piece,
    b: usize,
    h: usize,
    query_tile: usize,
    from: usize,
) -> u64 {
    let next = piece.row(&problem.mask_data, b, h, query_tile, from).next();
    next.map_or(NO_TURN, |(tile, _)| tile as u64)
}

/// Unpacks panels to padded rows.
fn unpack<A: Real>(panels: &[A], width: usize, keys: usize, row: usize, out: &mut [A]) {
    out.fill(A::ZERO);
    for key in 0..keys {
        let panel = &panels[key / A::LANES * width * A::LANES..];
        for x in 0..width {
            out[key * row + x] = panel[x * A::LANES + key % A::LANES];
        }
    }
}
