//! The forward pass: for each tile of queries, the tiles of keys that it sees, with an online softmax.
//!
//! A plan of one piece writes finished rows. With several pieces (scattered masks, a split cache) each piece leaves an
//! unnormalized sum, a maximum and a mass per row, which are merged in the order of the pieces.

mod division;

use crate::compiled::Verdict;
use crate::exact::gemm::{Arithmetic, PackedRows, TileGemm};
use crate::exact::pack::{KeyBlocks, KeyBuffers, Operand};
use crate::exact::plan::order::Places;
use crate::exact::plan::{Piece, Plan};
use crate::exact::scores::projection::ScoreOperands;
use crate::exact::scores::{SavedScores, TileMask, TileOps};
use crate::mask::RowAt;
use crate::output::OutputMut;
use crate::problem::Problem;
use crate::scratch::{Buffer, Scratch};
use crate::tuning::{KEYS, QUERIES, QUERY_TILES_AT_ONCE};
use division::Division;
use qkv_simd::shared::{Rows, for_each_task};
use qkv_simd::tile::{RowOp, Running, row_op, scale_rows};
use qkv_simd::{Element, Real, ViewMut, padded};
use std::iter::Peekable;
use std::ops::Range;

/// Computes the attention of a problem into `into`.
pub(crate) fn forward<T: Element>(
    problem: &Problem<'_, T>,
    into: OutputMut<'_, T>,
    scratch: &Scratch<T::Acc>,
    threads: usize,
) {
    run(problem, Plan::new(problem), into, scratch, threads);
}

/// The state of a row between tiles and between pieces: the unnormalized sum of values, the largest score so far, the
/// sum of exponentials relative to it, and the entropy accumulator.
pub(super) struct RowState<'a, A> {
    pub values: &'a mut [A],
    pub max: A,
    pub sum: A,
    pub entropy_acc: A,
}

/// The states of a tile's rows; values have stride `row`.
struct RowStates<'a, A> {
    values: &'a mut [A],
    row: usize,
    max: &'a [A],
    sum: &'a [A],
    entropy_acc: &'a [A],
}

/// The states of the rows of a piece.
pub(super) struct PartialOutput<'s, A: Real> {
    pub places: Places,
    pub values: Buffer<'s, A>,
    pub states: Buffer<'s, A>,
    pub shape: [usize; 4],
}

impl<'s, A: Real> PartialOutput<'s, A> {
    /// Memory for the states of a piece.
    pub fn new<T: Element<Acc = A>>(problem: &Problem<'_, T>, piece: &Piece, scratch: &'s Scratch<A>) -> Self {
        let shape = [problem.b, problem.heads.query, piece.queries.len(), padded::<A>(problem.dv)];
        let rows = shape[..3].iter().product::<usize>();
        let (values, states) = (scratch.take(rows * shape[3]), scratch.take(rows * 3));
        PartialOutput { places: piece.places_of_queries(problem.n), values, states, shape }
    }

    /// The values and the statistics, as rows that are written once.
    pub fn writable(&mut self) -> (Rows<'_, A>, Rows<'_, A>) {
        let [batch, heads, length, _] = self.shape;
        let values = ViewMut::new(&mut self.values, self.shape).expect("as long as its shape");
        let states = ViewMut::new(&mut self.states, [batch, heads, length, 3]).expect("as long as its shape");
        (Rows::new(values), Rows::new(states))
    }
}

/// Normalizes finished rows and writes them.
pub(super) struct OutputWriter<'a, T: Element> {
    values: Rows<'a, T>,
    lse: Rows<'a, T::Acc>,
    entropy: Option<Rows<'a, T::Acc>>,
    sinks: Vec<T::Acc>,
}

impl<'a, T: Element> OutputWriter<'a, T> {
    pub fn new(problem: &Problem<'_, T>, into: OutputMut<'a, T>) -> Self {
        OutputWriter {
            values: Rows::new(into.values),
            lse: Rows::new(into.lse),
            entropy: into.entropy.map(Rows::new),
            sinks: problem.inputs.sinks.unwrap_or_default().iter().map(|sink| sink.widen()).collect(),
        }
    }

    /// Adds the sink, normalizes, and writes a row.
    pub fn write(&self, row: &RowAt, isa: qkv_simd::Isa, state: RowState<'_, T::Acc>) {
        let RowState { values, max, sum, entropy_acc } = state;
        let (factor, lse, entropy) = self.normalizer(row, max, sum, entropy_acc);
        row_op(isa, values, RowOp::Scale(factor));
        self.values.write(row.b, row.h, row.i, values);
        self.lse.write(row.b, row.h, row.i, &[lse]);
        if let Some(out) = &self.entropy {
            out.write(row.b, row.h, row.i, &[entropy]);
        }
    }

    /// [`write`](OutputWriter::write) for a tile of rows; consecutive rows are written together.
    fn write_tile(&self, rows: &[RowAt], isa: qkv_simd::Isa, tile: RowStates<'_, T::Acc>) {
        let RowStates { values, row: size, max, sum, entropy_acc } = tile;
        let (first, count) = (rows[0], rows.len());
        if rows.iter().enumerate().any(|(r, row)| row.h != first.h || row.i != first.i + r) {
            for (r, row) in rows.iter().enumerate() {
                let values = &mut values[r * size..][..size];
                self.write(row, isa, RowState { values, max: max[r], sum: sum[r], entropy_acc: entropy_acc[r] });
            }
            return;
        }
        let [mut factors, mut lses, mut entropies] = [[T::Acc::ZERO; QUERIES]; 3];
        for (r, row) in rows.iter().enumerate() {
            (factors[r], lses[r], entropies[r]) = self.normalizer(row, max[r], sum[r], entropy_acc[r]);
        }
        self.values.write_scaled(first.b, first.h, first.i, &factors[..count], values, size);
        self.lse.write_all(first.b, first.h, first.i, count, &lses, 1);
        if let Some(out) = &self.entropy {
            out.write_all(first.b, first.h, first.i, count, &entropies, 1);
        }
    }

    /// Normalizer, log-sum-exp and entropy of a row, sink included.
    fn normalizer(&self, row: &RowAt, max: T::Acc, sum: T::Acc, entropy_acc: T::Acc) -> (T::Acc, T::Acc, T::Acc) {
        let (zero, least) = (T::Acc::ZERO, T::Acc::NEG_INFINITY);
        let sink = self.sinks.get(row.h).copied().unwrap_or(least);
        let top = if sink > max || sink.is_nan() { sink } else { max };
        if top == least {
            return (zero, least, zero);
        }
        let shrink = if max == top { T::Acc::ONE } else { (max - top).exp() };
        let whole = sum * shrink + if sink == least { zero } else { (sink - top).exp() };
        let (lse, factor) = (top + whole.ln(), shrink / whole);
        (factor, lse, if sum == zero { zero } else { sum * factor * (lse - max) - entropy_acc * factor })
    }
}

/// How the queries of a piece are cut into tiles: by head, or, for a few queries that share keys, all heads of a group
/// together.
pub(super) struct QueryTiling {
    /// Groups of heads that share a tile, and the heads in each.
    pub slots: usize,
    pub heads: usize,
    pub tiles: usize,
}

impl QueryTiling {
    pub fn new<T: Element>(problem: &Problem<'_, T>, piece: &Piece) -> Self {
        let group = problem.heads.group;
        let shared = piece.queries.is_shared() && !mask_varies_by_head(problem);
        if group > 1 && piece.queries.len() * group <= QUERIES && shared {
            QueryTiling { slots: problem.heads.key, heads: group, tiles: piece.query_tiles() }
        } else {
            QueryTiling { slots: problem.heads.query, heads: 1, tiles: piece.query_tiles() }
        }
    }

    /// The rows of a tile, in the order of the piece.
    pub fn rows<T: Element>(
        &self,
        problem: &Problem<'_, T>,
        piece: &Piece,
        b: usize,
        slot: usize,
        tile: usize,
        out: &mut Vec<RowAt>,
    ) {
        out.clear();
        for h in slot * self.heads..(slot + 1) * self.heads {
            out.extend(piece.query_range(tile).map(|at| {
                let i = piece.queries.index(b, h, at);
                RowAt { b, h, i, p: problem.mask_data.position(b, i) }
            }));
        }
    }
}

/// Whether the mask can differ between the heads of a group, so that they cannot share a tile.
fn mask_varies_by_head<T: Element>(problem: &Problem<'_, T>) -> bool {
    problem.mask_data.bits.is_some_and(|bits| bits.strides()[1] != 0)
        || problem.mask_data.buckets.is_some()
        || problem.mask_data.centers.is_some()
}

/// The buffers of a worker.
struct ForwardWorker<'s, A: Real> {
    gemm: TileGemm<'s, A>,
    mask: TileMask,
    scores: Buffer<'s, A>,
    /// The tiles of queries that it computes together.
    query_tiles: Vec<QueryTile<'s, A>>,
}

/// A tile of queries, and the running state of its rows.
struct QueryTile<'s, A: Real> {
    rows: Vec<RowAt>,
    queries: Buffer<'s, A>,
    finite: bool,
    /// Weighted sums of values; uninitialized until the first tile of keys.
    values: Buffer<'s, A>,
    started: bool,
    max: [A; QUERIES],
    sum: [A; QUERIES],
    entropy_acc: [A; QUERIES],
}

impl<'s, A: Real> ForwardWorker<'s, A> {
    fn new<T: Element<Acc = A>>(scratch: &'s Scratch<A>, ops: &TileOps<'_, T>, query_tiles: usize) -> Self {
        let query_tile = |_| QueryTile {
            rows: Vec::with_capacity(QUERIES),
            queries: scratch.take(QUERIES * ops.query_row),
            finite: true,
            values: scratch.take(QUERIES * padded::<A>(ops.problem.dv)),
            started: false,
            max: [A::NEG_INFINITY; QUERIES],
            sum: [A::ZERO; QUERIES],
            entropy_acc: [A::ZERO; QUERIES],
        };
        ForwardWorker {
            gemm: ops.tile_gemm(scratch),
            mask: TileMask::default(),
            scores: scratch.take(ops.arithmetic.rows_at_once() * KEYS),
            query_tiles: (0..query_tiles).map(query_tile).collect(),
        }
    }
}

pub(super) fn run<T: Element>(
    problem: &Problem<'_, T>,
    plan: Plan,
    into: OutputMut<'_, T>,
    scratch: &Scratch<T::Acc>,
    threads: usize,
) {
    let writer = OutputWriter::new(problem, into);
    let operands = ScoreOperands::new(problem, scratch, threads);
    let ops = TileOps::new(problem);
    let pass = ForwardPass {
        ops: &ops,
        queries: operands.queries(problem),
        keys: operands.keys(problem),
        values: Operand::Input(problem.inputs.v),
        scratch,
        threads,
    };
    if let [piece] = &plan.pieces[..] {
        pass.run_piece(piece, |_, rows, tile| writer.write_tile(rows, ops.isa, tile));
        return;
    }
    let mut partials: Vec<PartialOutput<'_, T::Acc>> = Vec::new();
    for piece in &plan.pieces {
        let mut partial = PartialOutput::new(problem, piece, scratch);
        {
            let (written, states) = partial.writable();
            pass.run_piece(piece, |places, rows, tile| {
                let RowStates { values, row: size, max, sum, entropy_acc } = tile;
                for (r, row) in rows.iter().enumerate() {
                    let place = places.start + r % places.len();
                    written.write(row.b, row.h, place, &values[r * size..][..size]);
                    states.write(row.b, row.h, place, &[max[r], sum[r], entropy_acc[r]]);
                }
            });
        }
        partials.push(partial);
    }
    merge(problem, &partials, &writer, &ops, scratch, threads);
}

/// The source of packed keys and values: blocks that workers share, or one buffer that is repacked for each tile.
enum KeySource<'k, 's, T: Element> {
    Shared(&'k KeyBlocks<'k, T>),
    PerTile(&'k mut KeyBuffers<'s, T::Acc>),
}

/// The operands that all pieces share.
struct ForwardPass<'a, T: Element> {
    ops: &'a TileOps<'a, T>,
    queries: Operand<'a, T>,
    keys: Operand<'a, T>,
    values: Operand<'a, T>,
    scratch: &'a Scratch<T::Acc>,
    threads: usize,
}

impl<T: Element> ForwardPass<'_, T> {
    /// Runs every tile of queries of a piece, and passes its state to `done` with its positions in the piece.
    fn run_piece(&self, piece: &Piece, done: impl Fn(Range<usize>, &[RowAt], RowStates<'_, T::Acc>) + Sync) {
        let (ops, scratch, problem) = (self.ops, self.scratch, self.ops.problem);
        let tiling = QueryTiling::new(problem, piece);
        let order = piece.longest_first(&problem.mask_data);
        let (key_heads, heads) = (problem.heads.key, problem.b * problem.heads.key);
        let slots = tiling.slots / key_heads.max(1);
        let buffers = |heads| KeyBuffers::new(scratch, ops.arithmetic, piece, heads, problem.width, problem.dv);
        // A worker packs keys and values for itself: those of a whole head into memory that it reuses and that stays in
        // its caches, those for a part of a head one tile at a time. If they were packed once for all, they would have
        // to come from another core's cache, and workers that start on the same head would wait for one another. bf16
        // operands take a third of the memory, and packing them takes longer compared with their products, so they are
        // shared.
        let Division { whole, at_once } = Division::new(heads, slots, tiling.tiles, self.threads);
        let shares = ops.arithmetic == Arithmetic::Bf16;
        let mut shared_buffers = buffers(if shares { heads - whole } else { 0 });
        let blocks =
            KeyBlocks::new(piece, self.keys, self.values, key_heads, &mut shared_buffers).starting_at_head(whole);
        let per_slot = tiling.tiles.div_ceil(at_once);
        let tasks = whole + (heads - whole) * slots * per_slot;
        let worker = || (ForwardWorker::new(scratch, ops, QUERY_TILES_AT_ONCE.min(tiling.tiles)), None, None);
        for_each_task(self.threads, tasks, worker, |(worker, own, passed), task| {
            if task < whole {
                let own = own.get_or_insert_with(|| buffers(1));
                let blocks = KeyBlocks::new(piece, self.keys, self.values, key_heads, own).starting_at_head(task);
                for at in task * slots..(task + 1) * slots {
                    for tiles in order.chunks(QUERY_TILES_AT_ONCE) {
                        let slot = (at / tiling.slots, at % tiling.slots);
                        self.tiles(piece, &tiling, KeySource::Shared(&blocks), (slot, tiles), worker, &done);
                    }
                }
            } else {
                let (at, part) = (whole * slots + (task - whole) / per_slot, (task - whole) % per_slot);
                let tiles = order.chunks(at_once).nth(part).unwrap_or_default();
                let slot = (at / tiling.slots, at % tiling.slots);
                let keys = if shares {
                    KeySource::Shared(&blocks)
                } else {
                    let one = || KeyBuffers::of_tiles(scratch, ops.arithmetic, piece, 1, problem.width, problem.dv);
                    KeySource::PerTile(passed.get_or_insert_with(one))
                };
                self.tiles(piece, &tiling, keys, (slot, tiles), worker, &done);
            }
        });
    }

    /// Some tiles of queries of a slot against every tile of keys that any of them sees, in order.
    fn tiles(
        &self,
        piece: &Piece,
        tiling: &QueryTiling,
        mut keys: KeySource<'_, '_, T>,
        ((b, slot), tiles): ((usize, usize), &[usize]),
        worker: &mut ForwardWorker<'_, T::Acc>,
        done: &impl Fn(Range<usize>, &[RowAt], RowStates<'_, T::Acc>),
    ) {
        let mask_data = &self.ops.problem.mask_data;
        let ForwardWorker { gemm, mask, scores, query_tiles } = worker;
        for (query_tile, &tile) in query_tiles.iter_mut().zip(tiles) {
            tiling.rows(self.ops.problem, piece, b, slot, tile, &mut query_tile.rows);
            let rows = query_tile.rows.iter().map(|row| (b, row.h, row.i));
            query_tile.finite = gemm.pack_a(self.queries, rows, &mut query_tile.queries);
            query_tile.started = false;
            query_tile.max.fill(T::Acc::NEG_INFINITY);
            query_tile.sum.fill(T::Acc::ZERO);
            query_tile.entropy_acc.fill(T::Acc::ZERO);
        }
        let first = slot * tiling.heads;
        let mut touched: [_; QUERY_TILES_AT_ONCE] =
            std::array::from_fn(|at| tiles.get(at).map(|&tile| piece.row(mask_data, b, first, tile, 0).peekable()));
        let next = |touched: &mut [Option<Peekable<_>>]| {
            touched.iter_mut().flatten().filter_map(|tiles| tiles.peek().map(|&(tile, _)| tile)).min()
        };
        let problem = self.ops.problem;
        let (key_heads, head) = (problem.heads.key, b * problem.heads.key + first / problem.heads.group);
        while let Some(key_tile) = next(&mut touched) {
            let per_tile;
            let blocks = match &mut keys {
                KeySource::Shared(blocks) => *blocks,
                KeySource::PerTile(buffers) => {
                    per_tile =
                        KeyBlocks::new(piece, self.keys, self.values, key_heads, buffers).single_tile(head, key_tile);
                    &per_tile
                }
            };
            for (query_tile, touched) in query_tiles.iter_mut().zip(touched.iter_mut().flatten()) {
                if let Some((_, verdict)) = touched.next_if(|&(tile, _)| tile == key_tile) {
                    self.tile(piece, blocks, (key_tile, verdict), query_tile, (gemm, mask, scores));
                }
            }
        }
        for (query_tile, &tile) in query_tiles.iter_mut().zip(tiles) {
            let QueryTile { rows, values, started, max, sum, entropy_acc, .. } = query_tile;
            if !*started {
                values.fill(T::Acc::ZERO);
            }
            let row = padded::<T::Acc>(self.ops.problem.dv);
            done(piece.query_range(tile), rows, RowStates { values, row, max, sum, entropy_acc });
        }
    }

    /// One tile of queries against one tile of keys.
    fn tile(
        &self,
        piece: &Piece,
        blocks: &KeyBlocks<'_, T>,
        (key_tile, verdict): (usize, Verdict),
        query_tile: &mut QueryTile<'_, T::Acc>,
        (gemm, mask, scores): (&mut TileGemm<'_, T::Acc>, &mut TileMask, &mut [T::Acc]),
    ) {
        let (ops, problem) = (self.ops, self.ops.problem);
        let QueryTile { rows, queries, finite: queries_finite, values, started, max, sum, entropy_acc } = query_tile;
        let (value_row, count, at_once) = (padded::<T::Acc>(problem.dv), rows.len(), ops.arithmetic.rows_at_once());
        let (b, key_head) = (rows[0].b, rows[0].h / problem.heads.group);
        let keys = piece.tile_keys(b, key_head, key_tile);
        ops.tile_mask(piece, &keys, verdict, rows, mask);
        let overwrite = !std::mem::replace(started, true);
        let columns = blocks.keys(b, key_head, key_tile, gemm);
        let (value_rows, finite) = blocks.values(b, key_head, key_tile, gemm);
        let value_rows_packed = PackedRows { rows: value_rows, finite, from: self.values, b, h: key_head, keys: &keys };
        for start in (0..count).step_by(at_once) {
            let range = start..(start + at_once).min(count);
            let (visible, len) = (mask.visible(range.clone()), range.len());
            let queries = (&queries[start * ops.query_row..], *queries_finite);
            ops.raw(gemm, queries, columns, keys.len, (mask, range.clone()), scores);
            let scale = ops.finish(&keys, (mask, start), &rows[range.clone()], scores, SavedScores::default());
            let mut factor = [T::Acc::ONE; QUERIES];
            let running = Running {
                max: &mut max[range.clone()],
                sum: &mut sum[range.clone()],
                entropy_acc: if problem.attention.entropy { &mut entropy_acc[range.clone()] } else { &mut [] },
                factor: &mut factor,
            };
            let modulate = |scores: &mut [T::Acc]| ops.modulate(&rows[range.clone()], &keys, scores);
            let modulate = ops.modulates().then_some(modulate);
            gemm.softmax_tile(scores, len, keys.len, ops.exponential(scale, visible), running, modulate);
            let values = &mut values[start * value_row..];
            if !overwrite {
                scale_rows(ops.isa, values, value_row, &factor[..len]);
            }
            gemm.matmul_pv(scores, len, value_rows_packed, visible, values, overwrite);
        }
    }
}

/// Merges the partial states of each row, in the order of the pieces.
pub(super) fn merge<T: Element>(
    problem: &Problem<'_, T>,
    partials: &[PartialOutput<'_, T::Acc>],
    writer: &OutputWriter<'_, T>,
    ops: &TileOps<'_, T>,
    scratch: &Scratch<T::Acc>,
    threads: usize,
) {
    let value_row = padded::<T::Acc>(problem.dv);
    let blocks = problem.n.div_ceil(QUERIES);
    let heads = problem.heads.query;
    for_each_task(
        threads,
        problem.b * heads * blocks,
        || scratch.take(value_row),
        |values, task| {
            let (b, h, block) = (task / (heads * blocks), task / blocks % heads, task % blocks);
            for i in block * QUERIES..((block + 1) * QUERIES).min(problem.n) {
                let (mut max, mut sum, mut entropy_acc) = (T::Acc::NEG_INFINITY, T::Acc::ZERO, T::Acc::ZERO);
                values.fill(T::Acc::ZERO);
                for partial in partials {
                    let Some(place) = partial.places.of(b, h, i) else { continue };
                    let at = (b * heads + h) * partial.shape[2] + place;
                    let [part_max, part_sum, part_entropy_acc] = [0, 1, 2].map(|x| partial.states[at * 3 + x]);
                    if part_max == T::Acc::NEG_INFINITY {
                        continue;
                    }
                    let part = &partial.values[at * value_row..][..value_row];
                    let top = if part_max > max || part_max.is_nan() { part_max } else { max };
                    let shrink = |of: T::Acc| if of == top { T::Acc::ONE } else { (of - top).exp() };
                    let (mine, theirs) = (shrink(max), shrink(part_max));
                    let moved = |of: T::Acc, sum: T::Acc| if sum == T::Acc::ZERO { sum } else { (of - top) * sum };
                    entropy_acc = mine * (entropy_acc + moved(max, sum))
                        + theirs * (part_entropy_acc + moved(part_max, part_sum));
                    sum = mine * sum + theirs * part_sum;
                    max = top;
                    for (value, &part) in values.iter_mut().zip(part) {
                        *value = mine * *value + theirs * part;
                    }
                }
                let row = RowAt { b, h, i, p: 0 };
                writer.write(&row, ops.isa, RowState { values, max, sum, entropy_acc });
            }
        },
    );
}
