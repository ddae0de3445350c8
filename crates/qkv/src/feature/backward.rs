//! The backward pass. With `p_ij` the weight of a pair, `g_i` the gradient of the output and `c_i = d_lse_i −
//! g_i·out_i`, the gradient of `ln φ(q_i)·φ(k_j)` is `p_ij (g_i·v_j + c_i)`: in features, products of `[g_i, c_i]` and
//! `[v_j, 1]`. So there are two scans like that of the forward pass. Queries walk forward with the sum of `[v_j, 1]
//! φ(k_j)ᵀ` over the keys before them; keys walk backward with the sum of `[g_i, c_i] φ(q_i)ᵀ` over the queries behind
//! them. Nothing is kept from the forward pass but its output and log-sum-exp.
//!
//! The log of a query is that of its features minus its log-sum-exp, so the factor of a pair is `exp` of the sum of two
//! logs and `p_ij`, which is at most 1, never leaves its range.

use super::chunk::{Block, Facing, Sizes, State, pack};
use super::forward::{KeyChunk, Prefixes, Walk, load_keys, sizes_of};
use super::sequence::{Plan, Query, Sequence};
use super::sums::{Sums, Unit};
use crate::gradients::GradientsMut;
use crate::inputs::Upstream;
use crate::output::OutputRef;
use crate::problem::Problem;
use crate::scratch::{Buffer, Scratch};
use crate::tuning::CHUNK;
use qkv_simd::features::{Decay, decay, highest, row_dots};
use qkv_simd::shared::{Rows, for_each_task};
use qkv_simd::tile::{RowOp, row_op};
use qkv_simd::{Element, Matrix, Panels, Real, Target, ViewMut, padded, product, product_skipping_zeros};
use std::ops::Range;

/// Computes the gradients of queries, keys and values.
pub(crate) fn backward<T: Element>(
    problem: &Problem<'_, T>,
    out: OutputRef<'_, T>,
    upstream: &Upstream<'_, T>,
    mut into: GradientsMut<'_, T>,
    scratch: &Scratch<T::Acc>,
    threads: usize,
) {
    // Queries that see no key and keys that no query sees are not written below.
    for view in [&mut into.q, &mut into.k, &mut into.v] {
        clear(view.reborrow(), scratch);
    }
    let (sizes, plan) = (sizes_of(problem), Plan::new(problem));
    let above = Above { problem, out, upstream, sizes: &sizes };
    above.queries(&plan, Rows::new(into.q), scratch, threads);
    above.keys(&plan, Rows::new(into.k), Rows::new(into.v), scratch, threads);
}

/// Writes zeros.
fn clear<T: Element>(view: ViewMut<'_, T>, scratch: &Scratch<T::Acc>) {
    let [b, h, n, d] = view.shape();
    let (rows, zeros) = (Rows::new(view), scratch.zeros(d));
    for at in 0..b * h * n {
        rows.write(at / (h * n), at / n % h, at % n, &zeros);
    }
}

/// The upstream gradients, and the call that they belong to.
struct Above<'a, T: Element> {
    problem: &'a Problem<'a, T>,
    out: OutputRef<'a, T>,
    upstream: &'a Upstream<'a, T>,
    sizes: &'a Sizes<T::Acc>,
}

impl<T: Element> Above<'_, T> {
    /// Loads queries with `[g_i, c_i]` as payload, and with their logs minus the log-sum-exp. A query without a
    /// denominator has features and payload of zero and a log of −∞.
    fn load(&self, [b, h]: [usize; 2], queries: &[Query], room: &mut Room<'_, T::Acc>) {
        let Room { queries: block, outputs: room, .. } = room;
        let (zero, Sizes { map, dv, v_row }) = (T::Acc::ZERO, self.sizes);
        let indices = || queries.iter().map(|query| query.i);
        block.load(self.sizes, self.problem.inputs.q.into(), [b, h], indices());
        block.load_values(self.sizes, self.upstream.values.into(), [b, h], indices());
        let outputs = self.out.values;
        for (i, room) in indices().zip(room.chunks_exact_mut(*v_row)) {
            outputs.load_row(b, h, i, room);
        }
        let mut deltas = [zero; CHUNK];
        row_dots(map.isa, (&block.values, *v_row), (room, *v_row), *v_row, &mut deltas[..queries.len()]);
        for (r, i) in indices().enumerate() {
            let at = (b * self.problem.heads.query + h) * self.problem.n + i;
            let (lse, values) = (self.out.row_statistic[at], &mut block.values[r * v_row..][..*v_row]);
            if lse == T::Acc::NEG_INFINITY {
                values.fill(zero);
                block.features[r * map.row..][..map.row].fill(zero);
                block.logs[r] = lse;
                continue;
            }
            values[*dv] = self.upstream.lse.map_or(zero, |d_lse| d_lse[at]) - deltas[r];
            block.finite[1] &= values[*dv].is_finite();
            block.logs[r] = block.logs[r] - map.divisor_log() - lse;
        }
    }

    /// Forward over the keys: the gradients of queries.
    fn queries(&self, plan: &Plan, d_q: Rows<'_, T>, scratch: &Scratch<T::Acc>, threads: usize) {
        let Above { problem, sizes, .. } = *self;
        let prefixes = Prefixes::new(problem, sizes, plan, Facing::Features, scratch, threads);
        let (heads, row) = (problem.heads, sizes.map.row);
        let worker = || {
            let grads = (scratch.take(CHUNK * row), scratch.take(CHUNK * sizes.map.d_row));
            (Walk::new(&prefixes, scratch), Room::new(sizes, scratch), grads)
        };
        for_each_task(threads, plan.pieces.len() * heads.key, worker, |(walk, room, (d_features, d_x)), task| {
            let (piece, key_head) = (&plan.pieces[task / heads.key], task % heads.key);
            let sequence = &plan.sequences[piece.sequence];
            walk.piece(piece, key_head, |state, chunk, queries| {
                if let Some(KeyChunk { block, .. }) = chunk {
                    pack(&block.values, sizes.v_row, block.len, sizes.dv + 1, &mut room.value_panels);
                }
                for h in key_head * heads.group..(key_head + 1) * heads.group {
                    for tile in sequence.queries[queries.clone()].chunks(CHUNK) {
                        self.load([sequence.b, h], tile, room);
                        carried(sizes, &room.queries, state, d_features);
                        if let Some(KeyChunk { first, block }) = chunk {
                            let counts = room.count(tile, *first);
                            let depth = room.pair(sizes, block, &counts, Pair::Gradient);
                            let multiply = if block.finite[0] { product } else { product_skipping_zeros };
                            let (a, b) = (Matrix::rows(&room.tile, CHUNK), Panels::rows(&block.features, row));
                            multiply(
                                sizes.map.isa,
                                Target::accumulate(d_features, row),
                                a,
                                b,
                                tile.len(),
                                row / T::Acc::LANES,
                                depth,
                            );
                        }
                        let Block { x, features, .. } = &room.queries;
                        sizes.map.back(x, features, tile.len(), d_features, d_x);
                        for (r, query) in tile.iter().enumerate() {
                            d_q.write(sequence.b, h, query.i, &d_x[r * sizes.map.d_row..]);
                        }
                    }
                }
            });
        });
    }

    /// Adds queries, of all heads of a group, to a state.
    fn absorb(
        &self,
        shape: State,
        sequence: &Sequence,
        key_head: usize,
        queries: Range<usize>,
        room: &mut Room<'_, T::Acc>,
        state: &mut [T::Acc],
    ) {
        let group = self.problem.heads.group;
        for h in key_head * group..(key_head + 1) * group {
            for tile in sequence.queries[queries.clone()].chunks(CHUNK) {
                self.load([sequence.b, h], tile, room);
                shape.absorb(self.sizes, state, &mut room.queries);
            }
        }
    }

    /// Backward over the queries: the gradients of keys and values.
    fn keys(&self, plan: &Plan, d_k: Rows<'_, T>, d_v: Rows<'_, T>, scratch: &Scratch<T::Acc>, threads: usize) {
        let Above { problem, sizes, .. } = *self;
        let shape = State::new(sizes, Facing::Features);
        let heads = problem.heads;
        // The units of a causal sequence are the queries of its spans except the first, from the last one back; those
        // of another are its pieces.
        let units: Vec<Vec<Range<usize>>> = plan
            .sequences
            .iter()
            .enumerate()
            .map(|(at, sequence)| {
                if sequence.causal {
                    return (1..sequence.spans()).rev().map(|span| sequence.queries_in(sequence.span(span))).collect();
                }
                let pieces = plan.pieces_of(at).iter().map(|piece| piece.queries.clone());
                let pieces: Vec<Range<usize>> = pieces.collect();
                if pieces.len() > 1 || sequence.spans() > 1 { pieces } else { Vec::new() }
            })
            .collect();
        let counts = units.iter().map(Vec::len);
        let worker = || Room::new(sizes, scratch);
        let suffixes = Sums::new(sizes, shape, heads.key, counts, scratch, threads, worker, |room, at, state| {
            let (sequence, queries) = (&plan.sequences[at.sequence], units[at.sequence][at.unit].clone());
            self.absorb(shape, sequence, at.key_head, queries, room, state);
        });
        let spans: Vec<(usize, usize)> = (0..plan.sequences.len())
            .flat_map(|at| (0..plan.sequences[at].spans()).map(move |span| (at, span)))
            .collect();
        let worker = || KeyWalk::new(sizes, shape, scratch);
        for_each_task(threads, spans.len() * heads.key, worker, |walk, task| {
            let ((at, span), key_head) = (spans[task / heads.key], task % heads.key);
            let sequence = &plan.sequences[at];
            let behind = match sequence.causal {
                false => suffixes.last(at, key_head),
                true => (sequence.spans() - 1 - span)
                    .checked_sub(1)
                    .map(|unit| suffixes.after(Unit { sequence: at, key_head, unit })),
            };
            walk.start(self, sequence, key_head, behind);
            for chunk in sequence.span(span).rev() {
                load_keys(problem, sizes, sequence, key_head, chunk, &mut walk.keys);
                walk.chunk(self, sequence, key_head, chunk);
                let KeyWalk { d_x, d_values, .. } = walk;
                for (r, at) in sequence.chunk(chunk).enumerate() {
                    let j = sequence.key(at);
                    d_k.write(sequence.b, key_head, j, &d_x[r * sizes.map.d_row..]);
                    d_v.write(sequence.b, key_head, j, &d_values[r * sizes.v_row..]);
                }
            }
        });
    }
}

/// `d_features = exp(log + log of the state) · (payload of the rows · state)`; 0 for an empty state.
fn carried<A: Real>(sizes: &Sizes<A>, block: &Block<'_, A>, state: &[A], d_features: &mut [A]) {
    let (map, before) = (&sizes.map, state[state.len() - 1]);
    let d_features = &mut d_features[..block.len * map.row];
    d_features.fill(A::ZERO);
    if before == A::NEG_INFINITY {
        return;
    }
    let (a, b) = (Matrix::rows(&block.values, sizes.v_row), Panels::rows(state, map.row));
    product(map.isa, Target::accumulate(d_features, map.row), a, b, block.len, map.row / A::LANES, sizes.dv + 1);
    scale_rows(sizes, block, before, d_features, map.row);
}

/// Multiplies each row by `exp(its log + log)`, kept finite.
fn scale_rows<A: Real>(sizes: &Sizes<A>, block: &Block<'_, A>, log: A, rows: &mut [A], row: usize) {
    for (rows, &own) in rows.chunks_exact_mut(row.max(1)).zip(&block.logs[..block.len]) {
        let log = own + log;
        let factor = if log > highest() { highest::<A>().exp() } else { log.exp() };
        row_op(sizes.map.isa, rows, RowOp::Scale(factor));
    }
}

/// Which tile over pairs is computed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pair {
    /// The weights `p_ij`.
    Weight,
    /// `(g_i·v_j + c_i)` times the factor of the pair.
    Gradient,
}

/// The buffers of a worker in either scan.
struct Room<'s, A: Real> {
    queries: Block<'s, A>,
    /// The keys and values of a chunk, packed in panels.
    key_panels: Buffer<'s, A>,
    value_panels: Buffer<'s, A>,
    tile: Buffer<'s, A>,
    /// A tile of outputs of the forward pass.
    outputs: Buffer<'s, A>,
}

impl<'s, A: Real> Room<'s, A> {
    fn new(sizes: &Sizes<A>, scratch: &'s Scratch<A>) -> Self {
        Room {
            queries: Block::new(sizes, scratch),
            key_panels: scratch.take(CHUNK * sizes.map.count),
            value_panels: scratch.take(CHUNK * (sizes.dv + 1)),
            tile: scratch.take(CHUNK * CHUNK),
            outputs: scratch.take(CHUNK * sizes.v_row),
        }
    }

    /// How many keys of the chunk that begins at `first` each query sees; none if it has no denominator.
    fn count(&self, tile: &[Query], first: usize) -> [usize; CHUNK] {
        let mut counts = [0; CHUNK];
        for (r, query) in tile.iter().enumerate() {
            let nothing = self.queries.logs[r] == A::NEG_INFINITY;
            counts[r] = if nothing { 0 } else { query.seen - first };
        }
        counts
    }

    /// Fills the tile for the loaded queries and the packed keys, and returns how many keys it covers.
    fn pair(&mut self, sizes: &Sizes<A>, keys: &Block<'_, A>, counts: &[usize; CHUNK], pair: Pair) -> usize {
        let (map, rows) = (&sizes.map, self.queries.len);
        let depth = counts[..rows].iter().copied().max().unwrap_or(0);
        let width = padded::<A>(depth);
        let (a, b, over) = match pair {
            Pair::Weight => {
                (Matrix::rows(&self.queries.features, map.row), Panels::packed(&self.key_panels, map.count), map.count)
            }
            Pair::Gradient => {
                let depth = sizes.dv + 1;
                (Matrix::rows(&self.queries.values, sizes.v_row), Panels::packed(&self.value_panels, depth), depth)
            }
        };
        let tile = &mut self.tile[..rows * CHUNK];
        tile.fill(A::ZERO);
        product(map.isa, Target::accumulate(tile, CHUNK), a, b, rows, width / A::LANES, over);
        let columns = if map.has_logs() { &keys.logs[..] } else { &[] };
        decay(map.isa, tile, CHUNK, rows, width, Decay { seen: counts, rows: &self.queries.logs, columns });
        depth
    }
}

/// The scan over keys from the last one back, with the state of the queries behind them.
struct KeyWalk<'s, A: Real> {
    shape: State,
    room: Room<'s, A>,
    keys: Block<'s, A>,
    behind: Buffer<'s, A>,
    local: Buffer<'s, A>,
    state: Buffer<'s, A>,
    /// The state transposed, `[F, v_row]`.
    turned: Buffer<'s, A>,
    d_features: Buffer<'s, A>,
    d_values: Buffer<'s, A>,
    d_x: Buffer<'s, A>,
}

impl<'s, A: Real> KeyWalk<'s, A> {
    fn new(sizes: &Sizes<A>, shape: State, scratch: &'s Scratch<A>) -> Self {
        KeyWalk {
            shape,
            room: Room::new(sizes, scratch),
            keys: Block::new(sizes, scratch),
            behind: scratch.take(shape.size()),
            local: scratch.take(shape.size()),
            state: scratch.take(shape.size()),
            turned: scratch.take(sizes.map.count * sizes.v_row),
            d_features: scratch.take(CHUNK * sizes.map.row),
            d_values: scratch.take(CHUNK * sizes.v_row),
            d_x: scratch.take(CHUNK * sizes.map.d_row),
        }
    }

    /// Starts behind a span, from the sum over the queries behind it, if there is one.
    fn start<T: Element<Acc = A>>(
        &mut self,
        above: &Above<'_, T>,
        sequence: &Sequence,
        key_head: usize,
        behind: Option<&[A]>,
    ) {
        self.shape.clear(&mut self.local);
        match behind {
            Some(behind) => self.behind.copy_from_slice(behind),
            None => self.shape.clear(&mut self.behind),
        }
        if !sequence.causal {
            if behind.is_none() {
                let all = 0..sequence.queries.len();
                above.absorb(self.shape, sequence, key_head, all, &mut self.room, &mut self.behind);
            }
            self.state.copy_from_slice(&self.behind);
            self.turn(above.sizes);
        }
    }

    fn turn(&mut self, sizes: &Sizes<A>) {
        for (x, row) in self.state.chunks_exact(sizes.map.row.max(1)).take(sizes.dv).enumerate() {
            for (f, &value) in row[..sizes.map.count].iter().enumerate() {
                self.turned[f * sizes.v_row + x] = value;
            }
        }
    }

    /// Computes the gradients of the loaded keys, in `d_x` and `d_values`, then moves the state in front of them.
    fn chunk<T: Element<Acc = A>>(&mut self, above: &Above<'_, T>, sequence: &Sequence, key_head: usize, chunk: usize) {
        let sizes = above.sizes;
        if sequence.causal {
            self.shape.combine(sizes, &mut self.state, &self.behind, &self.local);
            self.turn(sizes);
        }
        carried(sizes, &self.keys, &self.state, &mut self.d_features);
        self.carried_values(sizes);
        if sequence.causal {
            let KeyWalk { room, keys, .. } = self;
            pack(&keys.features, sizes.map.row, keys.len, sizes.map.count, &mut room.key_panels);
            pack(&keys.values, sizes.v_row, keys.len, sizes.dv + 1, &mut room.value_panels);
            let (queries, group) = (sequence.queries_in(chunk..chunk + 1), above.problem.heads.group);
            for h in key_head * group..(key_head + 1) * group {
                for tile in sequence.queries[queries.clone()].chunks(CHUNK) {
                    above.load([sequence.b, h], tile, &mut self.room);
                    self.seen_by(sizes, self.room.count(tile, chunk * CHUNK));
                    self.shape.absorb(sizes, &mut self.local, &mut self.room.queries);
                }
            }
        }
        let KeyWalk { keys, d_features, d_x, .. } = self;
        sizes.map.back(&keys.x, &keys.features, keys.len, d_features, d_x);
    }

    /// Computes the gradients of values from the queries behind the chunk.
    fn carried_values(&mut self, sizes: &Sizes<A>) {
        let Sizes { map, dv, v_row } = sizes;
        let (len, log) = (self.keys.len, self.shape.log(&self.state));
        let d_values = &mut self.d_values[..len * v_row];
        d_values.fill(A::ZERO);
        if log != A::NEG_INFINITY {
            let (a, b) = (Matrix::rows(&self.keys.features, map.row), Panels::rows(&self.turned, *v_row));
            product(map.isa, Target::accumulate(d_values, *v_row), a, b, len, padded::<A>(*dv) / A::LANES, map.count);
            scale_rows(sizes, &self.keys, log, d_values, *v_row);
        }
    }

    /// Adds the gradients from a tile of queries that end in the chunk and see `counts` of its keys.
    fn seen_by(&mut self, sizes: &Sizes<A>, counts: [usize; CHUNK]) {
        let (Sizes { map, dv, v_row }, KeyWalk { room, keys, d_features, d_values, .. }) = (sizes, self);
        let (isa, rows, [features_finite, values_finite]) = (map.isa, room.queries.len, room.queries.finite);
        let choose = |finite: bool| if finite { product } else { product_skipping_zeros };
        let reached = room.pair(sizes, keys, &counts, Pair::Weight);
        let (a, b) = (Matrix::transposed(&room.tile, CHUNK), Panels::rows(&room.queries.values, *v_row));
        choose(values_finite)(
            isa,
            Target::accumulate(d_values, *v_row),
            a,
            b,
            reached,
            padded::<A>(*dv) / A::LANES,
            rows,
        );
        room.pair(sizes, keys, &counts, Pair::Gradient);
        let (a, b) = (Matrix::transposed(&room.tile, CHUNK), Panels::rows(&room.queries.features, map.row));
        choose(features_finite)(isa, Target::accumulate(d_features, map.row), a, b, reached, map.row / A::LANES, rows);
    }
}
