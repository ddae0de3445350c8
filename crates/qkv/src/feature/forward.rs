//! The forward pass. States of spans are computed in parallel and summed in order; then pieces of queries, again in
//! parallel, walk the chunks of their span from the state at its start: keys before a query's chunk contribute through
//! the state, keys in it through the masked product of features.
//!
//! A row's arithmetic depends only on the keys it sees and on where chunks and spans begin, so a row has the same bits
//! alone, in a batch, on any number of threads, and in the recurrence.

use super::chunk::{Block, Facing, Sizes, State, larger, pack, shrink};
use super::map::Map;
use super::sequence::{Piece, Plan, Sequence};
use super::sums::{Sums, Unit};
use crate::output::OutputMut;
use crate::problem::Problem;
use crate::score::Score;
use crate::scratch::{Buffer, Scratch};
use crate::tuning::CHUNK;
use qkv_simd::features::{Decay, decay};
use qkv_simd::shared::{Rows, for_each_task};
use qkv_simd::tile::{RowOp, row_op};
use qkv_simd::{Element, Matrix, Panels, Real, Target, padded, product, product_skipping_zeros};
use std::ops::Range;

/// Computes linear attention into `into`.
pub(crate) fn forward<T: Element>(
    problem: &Problem<'_, T>,
    into: OutputMut<'_, T>,
    scratch: &Scratch<T::Acc>,
    threads: usize,
) {
    let sizes = sizes_of(problem);
    let plan = Plan::new(problem);
    let (values, lse) = (Rows::new(into.values), Rows::new(into.lse));
    let nothing = scratch.zeros(problem.dv);
    for &(b, i) in &plan.blind {
        for h in 0..problem.heads.query {
            values.write(b, h, i, &nothing);
            lse.write(b, h, i, &[T::Acc::NEG_INFINITY]);
        }
    }
    let prefixes = Prefixes::new(problem, &sizes, &plan, Facing::Values, scratch, threads);
    let heads = problem.heads;
    for_each_task(
        threads,
        plan.pieces.len() * heads.key,
        || (Walk::new(&prefixes, scratch), Attend::new(&sizes, scratch)),
        |(walk, attend), task| {
            let (piece, key_head) = (task / heads.key, task % heads.key);
            let piece = &plan.pieces[piece];
            let sequence = &plan.sequences[piece.sequence];
            walk.piece(piece, key_head, |state, chunk, queries| {
                attend.see(&sizes, state, chunk);
                for h in key_head * heads.group..(key_head + 1) * heads.group {
                    for tile in sequence.queries[queries.clone()].chunks(CHUNK) {
                        let at = [sequence.b, h];
                        attend.queries.load(&sizes, problem.inputs.q.into(), at, tile.iter().map(|query| query.i));
                        let seen = |r: usize| tile[r].seen - chunk.map_or(0, |chunk| chunk.first);
                        attend.run(&sizes, state, chunk, seen, |r, row, log| {
                            values.write(sequence.b, h, tile[r].i, row);
                            lse.write(sequence.b, h, tile[r].i, &[log]);
                        });
                    }
                }
            });
        },
    );
}

/// The sizes of a problem's passes.
pub(crate) fn sizes_of<T: Element>(problem: &Problem<'_, T>) -> Sizes<T::Acc> {
    let Score::Linear(features) = problem.attention.score else { unreachable!("only linear scores come here") };
    Sizes::new(Map::new(features, problem.attention.scale, problem.d), problem.dv)
}

/// The states before every span of every long sequence, and after the last of those that are not causal. A sequence of
/// one span has none: its tasks compute their own, so that many short sequences need no memory for states.
pub(super) struct Prefixes<'a, T: Element> {
    pub problem: &'a Problem<'a, T>,
    pub sizes: &'a Sizes<T::Acc>,
    pub plan: &'a Plan,
    pub shape: State,
    sums: Sums<'a, T::Acc>,
}

impl<'a, T: Element> Prefixes<'a, T> {
    pub fn new(
        problem: &'a Problem<'a, T>,
        sizes: &'a Sizes<T::Acc>,
        plan: &'a Plan,
        facing: Facing,
        scratch: &'a Scratch<T::Acc>,
        threads: usize,
    ) -> Self {
        let shape = State::new(sizes, facing);
        let counts = plan.sequences.iter().map(|sequence| match sequence.spans() {
            0 | 1 => 0,
            spans if sequence.causal => spans - 1,
            spans => spans,
        });
        let worker = || Block::new(sizes, scratch);
        let sums = Sums::new(sizes, shape, problem.heads.key, counts, scratch, threads, worker, |block, at, state| {
            let sequence = &plan.sequences[at.sequence];
            for chunk in sequence.span(at.unit) {
                load_keys(problem, sizes, sequence, at.key_head, chunk, block);
                shape.absorb(sizes, state, block);
            }
        });
        Prefixes { problem, sizes, plan, shape, sums }
    }
}

/// Loads a chunk of keys with their values.
pub(super) fn load_keys<T: Element>(
    problem: &Problem<'_, T>,
    sizes: &Sizes<T::Acc>,
    sequence: &Sequence,
    key_head: usize,
    chunk: usize,
    block: &mut Block<'_, T::Acc>,
) {
    let (at, keys) = ([sequence.b, key_head], sequence.chunk(chunk));
    block.load(sizes, problem.inputs.k, at, keys.clone().map(|at| sequence.key(at)));
    block.load_values(sizes, problem.inputs.v, at, keys.map(|at| sequence.key(at)));
}

/// A chunk of keys, and where in the sequence it begins.
pub(super) struct KeyChunk<'s, A: Real> {
    pub first: usize,
    pub block: Block<'s, A>,
}

/// Walks the chunks of a piece with the state before each.
pub(super) struct Walk<'a, 's, T: Element> {
    prefixes: &'a Prefixes<'a, T>,
    chunk: KeyChunk<'s, T::Acc>,
    empty: Buffer<'s, T::Acc>,
    local: Buffer<'s, T::Acc>,
    state: Buffer<'s, T::Acc>,
}

impl<'a, 's, T: Element> Walk<'a, 's, T> {
    pub fn new(prefixes: &'a Prefixes<'a, T>, scratch: &'s Scratch<T::Acc>) -> Self {
        let size = prefixes.shape.size();
        let mut empty = scratch.take(size);
        prefixes.shape.clear(&mut empty);
        Walk {
            prefixes,
            chunk: KeyChunk { first: 0, block: Block::new(prefixes.sizes, scratch) },
            empty,
            local: scratch.take(size),
            state: scratch.take(size),
        }
    }

    /// Calls `visit` with the state before each chunk that queries of the piece end in, the chunk, and these queries;
    /// or, if the sequence is not causal, once with the state after all keys and no chunk.
    pub fn piece(
        &mut self,
        piece: &Piece,
        key_head: usize,
        mut visit: impl FnMut(&[T::Acc], Option<&KeyChunk<'s, T::Acc>>, Range<usize>),
    ) {
        let Prefixes { problem, sizes, plan, shape, .. } = *self.prefixes;
        let sequence = &plan.sequences[piece.sequence];
        shape.clear(&mut self.local);
        if !sequence.causal {
            if let Some(all) = self.prefixes.sums.last(piece.sequence, key_head) {
                return visit(all, None, piece.queries.clone());
            }
            for chunk in 0..sequence.chunks() {
                load_keys(problem, sizes, sequence, key_head, chunk, &mut self.chunk.block);
                shape.absorb(sizes, &mut self.local, &mut self.chunk.block);
            }
            return visit(&self.local, None, piece.queries.clone());
        }
        let before = match piece.span {
            0 => &self.empty[..],
            span => self.prefixes.sums.after(Unit { sequence: piece.sequence, key_head, unit: span - 1 }),
        };
        let last = (sequence.queries[piece.queries.end - 1].seen - 1) / CHUNK;
        for chunk in sequence.span(piece.span).start..=last {
            load_keys(problem, sizes, sequence, key_head, chunk, &mut self.chunk.block);
            self.chunk.first = chunk * CHUNK;
            let queries = sequence.queries_in(chunk..chunk + 1);
            let queries = queries.start.max(piece.queries.start)..queries.end.min(piece.queries.end);
            if !queries.is_empty() {
                shape.combine(sizes, &mut self.state, before, &self.local);
                visit(&self.state, Some(&self.chunk), queries);
            }
            if chunk < last {
                shape.absorb(sizes, &mut self.local, &mut self.chunk.block);
            }
        }
    }
}

/// The buffers of a worker that attends from a tile of queries.
pub(super) struct Attend<'s, A: Real> {
    pub queries: Block<'s, A>,
    /// The keys of the chunk, packed in panels.
    panels: Buffer<'s, A>,
    /// The log that a row is relative to, by the number of keys of the chunk that it sees.
    tops: Vec<A>,
    tile: Buffer<'s, A>,
    out: Buffer<'s, A>,
}

impl<'s, A: Real> Attend<'s, A> {
    pub fn new(sizes: &Sizes<A>, scratch: &'s Scratch<A>) -> Self {
        Attend {
            queries: Block::new(sizes, scratch),
            panels: scratch.take(CHUNK * sizes.map.count),
            tops: Vec::with_capacity(CHUNK + 1),
            tile: scratch.take(CHUNK * CHUNK),
            out: scratch.take(CHUNK * sizes.v_row),
        }
    }

    /// Prepares a state and a chunk to be attended to.
    pub fn see(&mut self, sizes: &Sizes<A>, state: &[A], chunk: Option<&KeyChunk<'_, A>>) {
        self.tops.clear();
        self.tops.push(state[state.len() - 1]);
        if let Some(KeyChunk { block, .. }) = chunk {
            pack(&block.features, sizes.map.row, block.len, sizes.map.count, &mut self.panels);
            for &log in &block.logs[..block.len] {
                self.tops.push(larger(self.tops[self.tops.len() - 1], log));
            }
        }
    }

    /// Attends from the loaded queries to a state and to the first keys of a chunk, `seen` of them for each query, and
    /// passes each row with its log-sum-exp to `done`.
    pub fn run(
        &mut self,
        sizes: &Sizes<A>,
        state: &[A],
        chunk: Option<&KeyChunk<'_, A>>,
        seen: impl Fn(usize) -> usize,
        mut done: impl FnMut(usize, &[A], A),
    ) {
        let Sizes { map, dv, v_row } = sizes;
        let (rows, v_row, isa) = (self.queries.len, *v_row, map.isa);
        let out = &mut self.out[..rows * v_row];
        out.fill(A::ZERO);
        let before = self.tops[0]; // the log that the state is relative to
        let features = Matrix::rows(&self.queries.features, map.row);
        if before != A::NEG_INFINITY {
            let state = Panels::rows(state, v_row);
            product(isa, Target::accumulate(out, v_row), features, state, rows, v_row / A::LANES, map.count);
        }
        let mut counts = [0; CHUNK];
        let mut tops = [before; CHUNK];
        if let Some(KeyChunk { block, .. }) = chunk {
            let mut shifts = [A::ZERO; CHUNK];
            for r in 0..rows {
                counts[r] = seen(r);
                tops[r] = self.tops[counts[r]];
                shifts[r] = -tops[r];
                if before != tops[r] && before != A::NEG_INFINITY {
                    row_op(isa, &mut out[r * v_row..][..v_row], RowOp::Scale(shrink(before, tops[r])));
                }
            }
            let depth = counts[..rows].iter().copied().max().unwrap_or(0);
            let width = padded::<A>(depth);
            let tile = &mut self.tile[..rows * CHUNK];
            tile.fill(A::ZERO);
            let keys = Panels::packed(&self.panels, map.count);
            product(isa, Target::accumulate(tile, CHUNK), features, keys, rows, width / A::LANES, map.count);
            let columns = if map.has_logs() { &block.logs[..] } else { &[] };
            decay(isa, tile, CHUNK, rows, width, Decay { seen: &counts, rows: &shifts, columns });
            let multiply = if block.finite[1] { product } else { product_skipping_zeros };
            let (tile, values) = (Matrix::rows(tile, CHUNK), Panels::rows(&block.values, v_row));
            multiply(isa, Target::accumulate(out, v_row), tile, values, rows, v_row / A::LANES, depth);
        }
        for (r, row) in out.chunks_exact_mut(v_row).enumerate() {
            let whole = row[*dv];
            if whole == A::ZERO {
                row.fill(A::ZERO);
                done(r, row, A::NEG_INFINITY);
            } else {
                let lse = self.queries.logs[r] - map.divisor_log() + tops[r] + whole.ln();
                row_op(isa, row, RowOp::Scale(A::ONE / whole));
                done(r, row, lse);
            }
        }
    }
}
