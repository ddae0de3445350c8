//! Decoding: attention of a few queries against a long cache.
//!
//! It is bound by memory bandwidth, so each row of keys and values is read once, in place, for all queries of a group's
//! heads: nothing is packed or copied. The cache is split into pieces of a fixed size (split-K decoding), which are
//! separate tasks, like sequences and heads; their results are merged in order. Sequences of at most a tile of keys are
//! left to [`short`].
//!
//! More than a few rows of queries, projected scores, rows that are not contiguous, and [`Decode::Exact`], which has
//! the bits of the full pass, use the [`forward`](super::forward) pass instead.

mod short;

use crate::compiled::tile::TileKeys;
use crate::decode::Decode;
use crate::exact::forward::{OutputWriter, PartialOutput, QueryTiling, RowState, merge, run};
use crate::exact::pack::Operand;
use crate::exact::plan::{Piece, Plan};
use crate::exact::scores::projection::ScoreOperands;
use crate::exact::scores::{SavedScores, TileMask, TileOps};
use crate::mask::RowAt;
use crate::output::OutputMut;
use crate::problem::Problem;
use crate::score::Score;
use crate::scratch::{Buffer, Scratch};
use crate::source::Source;
use crate::tuning::{DECODE_SPLIT, GEMV_ROWS, KEYS, QUERIES};
use qkv_simd::gemv::{RowTable, dots, weighted_sum};
use qkv_simd::shared::for_each_task;
use qkv_simd::tile::{Running, scale_rows, softmax};
use qkv_simd::{Element, Real, padded};

/// Computes the attention of a few queries at the end of many keys.
pub(crate) fn decode<T: Element>(
    problem: &Problem<'_, T>,
    into: OutputMut<'_, T>,
    how: Decode,
    scratch: &Scratch<T::Acc>,
    threads: usize,
) {
    let plan = Plan::new(problem);
    if how == Decode::Exact || problem.n > QUERIES {
        return run(problem, plan, into, scratch, threads);
    }
    let plan = plan.split(DECODE_SPLIT);
    let tilings: Vec<QueryTiling> = plan.pieces.iter().map(|piece| QueryTiling::new(problem, piece)).collect();
    let few = |(piece, tiling): (&Piece, &QueryTiling)| piece.queries.len() * tiling.heads <= GEMV_ROWS;
    if reads_in_place(problem) && plan.pieces.iter().zip(&tilings).all(few) {
        decode_in_place(problem, &plan, &tilings, into, scratch, threads)
    } else {
        run(problem, plan, into, scratch, threads)
    }
}

/// Whether scores are dot products with the keys themselves, and rows of keys and values are contiguous.
fn reads_in_place<T: Element>(problem: &Problem<'_, T>) -> bool {
    let products = matches!(problem.attention.score, Score::Dot | Score::ScaledDot | Score::General);
    products && problem.inputs.k.rows_are_slices() && problem.inputs.v.rows_are_slices()
}

fn decode_in_place<T: Element>(
    problem: &Problem<'_, T>,
    plan: &Plan,
    tilings: &[QueryTiling],
    into: OutputMut<'_, T>,
    scratch: &Scratch<T::Acc>,
    threads: usize,
) {
    let writer = OutputWriter::new(problem, into);
    let operands = ScoreOperands::new(problem, scratch, threads);
    let ops = TileOps::new(problem);
    let mut pass = DecodePass {
        ops: &ops,
        plan,
        tilings,
        queries: operands.queries(problem),
        sequences: (0..problem.b).collect(),
        scratch,
        threads,
    };
    if plan.pieces.len() == 1 {
        let short = pass.take_short();
        pass.run_short(&short, &writer);
        return pass.run(|_, _, row, state| writer.write(row, ops.isa, state));
    }
    let mut partials: Vec<PartialOutput<'_, T::Acc>> =
        plan.pieces.iter().map(|piece| PartialOutput::new(problem, piece, scratch)).collect();
    {
        let written: Vec<_> = partials.iter_mut().map(PartialOutput::writable).collect();
        pass.run(|piece, place, row, state| {
            let RowState { values, max, sum, entropy_acc } = state;
            written[piece].0.write(row.b, row.h, place, values);
            written[piece].1.write(row.b, row.h, place, &[max, sum, entropy_acc]);
        });
    }
    merge(problem, &partials, &writer, &ops, scratch, threads);
}

/// The buffers of a worker.
struct DecodeWorker<'s, A: Real> {
    rows: Vec<RowAt>,
    mask: TileMask,
    queries: Buffer<'s, A>,
    scores: Buffer<'s, A>,
    values: Buffer<'s, A>,
}

/// Rows in place: the keys of a tile, then its values, then the keys of the next tile.
struct RowQueue<'a, T> {
    rows: [&'a [T]; 3 * KEYS],
    len: usize,
}

impl<'a, T: Element> RowQueue<'a, T> {
    fn new() -> Self {
        RowQueue { rows: [&[]; 3 * KEYS], len: 0 }
    }

    fn push(&mut self, source: Source<'a, T>, b: usize, key_head: usize, keys: &TileKeys<'_>) {
        let rows = &mut self.rows[self.len..][..keys.len];
        self.len += keys.len;
        match keys.natural() {
            Some(start) => source.rows(b, key_head, start, rows),
            None => {
                for (at, row) in rows.iter_mut().enumerate() {
                    source.rows(b, key_head, keys.index(at), std::slice::from_mut(row));
                }
            }
        }
    }

    /// `len` rows of `width` elements after the first `skipped`, followed by the rows to prefetch.
    fn table(&self, skipped: usize, len: usize, width: usize) -> RowTable<'_, T> {
        RowTable { rows: &self.rows[skipped..self.len], len, width }
    }

    /// Removes the first rows.
    fn pop(&mut self, rows: usize) {
        self.rows.copy_within(rows..self.len, 0);
        self.len -= rows;
    }
}

/// The operands that all pieces share.
struct DecodePass<'a, T: Element> {
    ops: &'a TileOps<'a, T>,
    plan: &'a Plan,
    tilings: &'a [QueryTiling],
    queries: Operand<'a, T>,
    /// The sequences that [`run`](DecodePass::run) computes.
    sequences: Vec<usize>,
    scratch: &'a Scratch<T::Acc>,
    threads: usize,
}

impl<T: Element> DecodePass<'_, T> {
    /// Runs every tile of queries of every piece, and passes each row's state to `done` with its piece and its position
    /// there.
    fn run(&self, done: impl Fn(usize, usize, &RowAt, RowState<'_, T::Acc>) + Sync) {
        let (problem, count) = (self.ops.problem, self.sequences.len());
        let value_row = padded::<T::Acc>(problem.dv);
        let worker = || DecodeWorker {
            rows: Vec::with_capacity(GEMV_ROWS),
            mask: TileMask::default(),
            queries: self.scratch.take(GEMV_ROWS * padded::<T::Acc>(self.ops.width)),
            scores: self.scratch.take(GEMV_ROWS * KEYS),
            values: self.scratch.take(GEMV_ROWS * value_row),
        };
        // The tasks of a piece follow those of the previous one.
        let mut tasks = 0;
        let end = |tiling: &QueryTiling| {
            tasks += count * tiling.slots * tiling.tiles;
            tasks
        };
        let ends: Vec<usize> = self.tilings.iter().map(end).collect();
        for_each_task(self.threads, tasks, worker, |worker, task| {
            let piece = ends.partition_point(|&end| end <= task);
            let tiling = &self.tilings[piece];
            let task = task + count * tiling.slots * tiling.tiles - ends[piece];
            let (at, slot, tile) =
                (task / (tiling.slots * tiling.tiles), task / tiling.tiles % tiling.slots, task % tiling.tiles);
            let b = self.sequences[at];
            let of = &self.plan.pieces[piece];
            tiling.rows(problem, of, b, slot, tile, &mut worker.rows);
            self.tile(worker, of, b, tile, |place, row, state| done(piece, place, row, state));
        });
    }

    /// A tile of queries against all keys of a piece that it sees.
    fn tile(
        &self,
        worker: &mut DecodeWorker<'_, T::Acc>,
        piece: &Piece,
        b: usize,
        tile: usize,
        done: impl Fn(usize, &RowAt, RowState<'_, T::Acc>),
    ) {
        let (ops, problem) = (self.ops, self.ops.problem);
        let DecodeWorker { rows, mask, queries, scores, values } = worker;
        let (count, query_row, value_row) = (rows.len(), padded::<T::Acc>(ops.width), padded::<T::Acc>(problem.dv));
        for (r, row) in rows.iter().enumerate() {
            self.queries.load_row(b, row.h, row.i, &mut queries[r * query_row..][..query_row]);
        }
        values[..count * value_row].fill(T::Acc::ZERO);
        let (mut max, mut sum) = ([T::Acc::NEG_INFINITY; GEMV_ROWS], [T::Acc::ZERO; GEMV_ROWS]);
        let (mut entropy_acc, mut factor) = ([T::Acc::ZERO; GEMV_ROWS], [T::Acc::ONE; GEMV_ROWS]);
        let (first, key_head) = (rows[0].h, rows[0].h / problem.heads.group);
        let mut row_queue = RowQueue::new();
        let mut tiles = piece.row(&problem.mask_data, b, first, tile, 0);
        // The next tile is determined before the values of this one are read, so that its keys can be prefetched.
        let mut next = tiles.next();
        if let Some((key_tile, _)) = next {
            row_queue.push(problem.inputs.k, b, key_head, &piece.tile_keys(b, key_head, key_tile));
        }
        while let Some((key_tile, verdict)) = next {
            let keys = piece.tile_keys(b, key_head, key_tile);
            row_queue.push(problem.inputs.v, b, key_head, &keys);
            dots(ops.isa, scores, KEYS, queries, query_row, count, row_queue.table(0, keys.len, ops.width));
            ops.tile_mask(piece, &keys, verdict, rows, mask);
            let scale = ops.finish(&keys, (mask, 0), rows, scores, SavedScores::default());
            let entropy_acc = if problem.attention.entropy { &mut entropy_acc[..] } else { &mut [] };
            let running = Running { max: &mut max, sum: &mut sum, entropy_acc, factor: &mut factor };
            let how = ops.exponential(scale, mask.visible(0..count));
            softmax(ops.isa, scores, KEYS, count, padded::<T::Acc>(keys.len), how, running);
            ops.modulate(rows, &keys, scores);
            scale_rows(ops.isa, values, value_row, &factor[..count]);
            next = tiles.next();
            if let Some((key_tile, _)) = next {
                row_queue.push(problem.inputs.k, b, key_head, &piece.tile_keys(b, key_head, key_tile));
            }
            let table = row_queue.table(keys.len, keys.len, problem.dv);
            weighted_sum(ops.isa, values, value_row, scores, KEYS, count, table);
            row_queue.pop(2 * keys.len);
        }
        let per_head = piece.query_range(tile);
        for (r, row) in rows.iter().enumerate() {
            let place = per_head.start + r % per_head.len();
            let values = &mut values[r * value_row..][..value_row];
            done(place, row, RowState { values, max: max[r], sum: sum[r], entropy_acc: entropy_acc[r] });
        }
    }
}
