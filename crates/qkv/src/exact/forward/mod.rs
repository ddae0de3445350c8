//! The forward pass: for each tile of queries, the tiles of keys it touches, with an online softmax.
//!
//! A plan of one piece writes its rows as it goes. Of several pieces (scattered masks, a split cache) each leaves, for every
//! row, its unnormalised sum with the maximum and the mass that belong to it; these are then merged in the order of the
//! pieces.

use crate::exact::gemm::{Arithmetic, Desk, Weighed};
use crate::exact::pack::{KeyBlocks, Operand, Room};
use crate::exact::plan::order::Places;
use crate::exact::plan::rule::Verdict;
use crate::exact::plan::{Piece, Plan};
use crate::exact::scores::projection::Compared;
use crate::exact::scores::{Kept, Live, RowAt, TileOps};
use crate::output::OutputMut;
use crate::problem::Problem;
use crate::scratch::{Buffer, Scratch};
use crate::tuning::{KEYS, QUERIES, TOGETHER};
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

/// The state of a row between tiles, and between pieces: an unnormalised sum of values, the largest score so far, the mass
/// relative to it, and the moment that the entropy needs.
pub(super) struct State<'a, A> {
    pub values: &'a mut [A],
    pub max: A,
    pub sum: A,
    pub moment: A,
}

/// The states of a tile's rows: values at distance `row`, and the rest one a row.
struct Tile<'a, A> {
    values: &'a mut [A],
    row: usize,
    max: &'a [A],
    sum: &'a [A],
    moment: &'a [A],
}

/// What a piece leaves of its rows: their values, and their maximum, sum and moment.
pub(super) struct Partial<'s, A: Real> {
    pub places: Places,
    pub values: Buffer<'s, A>,
    pub states: Buffer<'s, A>,
    pub shape: [usize; 4],
}

impl<'s, A: Real> Partial<'s, A> {
    /// Room for what a piece leaves.
    pub fn new<T: Element<Acc = A>>(problem: &Problem<'_, T>, piece: &Piece, scratch: &'s Scratch<A>) -> Self {
        let shape = [problem.b, problem.heads.query, piece.queries.len(), padded::<A>(problem.dv)];
        let rows = shape[..3].iter().product::<usize>();
        let (values, states) = (scratch.take(rows * shape[3]), scratch.take(rows * 3));
        Partial { places: piece.places_of_queries(problem.n), values, states, shape }
    }

    /// Its values and its states, as rows that are written once.
    pub fn writable(&mut self) -> (Rows<'_, A>, Rows<'_, A>) {
        let [batch, heads, length, _] = self.shape;
        let values = ViewMut::new(&mut self.values, self.shape).expect("as long as its shape");
        let states = ViewMut::new(&mut self.states, [batch, heads, length, 3]).expect("as long as its shape");
        (Rows::new(values), Rows::new(states))
    }
}

/// Where finished rows go.
pub(super) struct Finished<'a, T: Element> {
    values: Rows<'a, T>,
    lse: Rows<'a, T::Acc>,
    entropy: Option<Rows<'a, T::Acc>>,
    sinks: Vec<T::Acc>,
}

impl<'a, T: Element> Finished<'a, T> {
    pub fn new(problem: &Problem<'_, T>, into: OutputMut<'a, T>) -> Self {
        Finished {
            values: Rows::new(into.values),
            lse: Rows::new(into.lse),
            entropy: into.entropy.map(Rows::new),
            sinks: problem.inputs.sinks.unwrap_or_default().iter().map(|sink| sink.widen()).collect(),
        }
    }

    /// Counts the sink, normalises, and writes a row.
    pub fn write(&self, row: &RowAt, isa: qkv_simd::Isa, state: State<'_, T::Acc>) {
        let State { values, max, sum, moment } = state;
        let (factor, lse, entropy) = self.normal(row, max, sum, moment);
        row_op(isa, values, RowOp::Scale(factor));
        self.values.write(row.b, row.h, row.i, values);
        self.lse.write(row.b, row.h, row.i, &[lse]);
        if let Some(out) = &self.entropy {
            out.write(row.b, row.h, row.i, &[entropy]);
        }
    }

    /// The same for a tile of rows. Where they follow one another, they are written together.
    fn write_tile(&self, rows: &[RowAt], isa: qkv_simd::Isa, tile: Tile<'_, T::Acc>) {
        let Tile { values, row: size, max, sum, moment } = tile;
        let (first, count) = (rows[0], rows.len());
        if rows.iter().enumerate().any(|(r, row)| row.h != first.h || row.i != first.i + r) {
            for (r, row) in rows.iter().enumerate() {
                let values = &mut values[r * size..][..size];
                self.write(row, isa, State { values, max: max[r], sum: sum[r], moment: moment[r] });
            }
            return;
        }
        let [mut factors, mut lses, mut entropies] = [[T::Acc::ZERO; QUERIES]; 3];
        for (r, row) in rows.iter().enumerate() {
            (factors[r], lses[r], entropies[r]) = self.normal(row, max[r], sum[r], moment[r]);
        }
        self.values.write_scaled(first.b, first.h, first.i, &factors[..count], values, size);
        self.lse.write_all(first.b, first.h, first.i, count, &lses, 1);
        if let Some(out) = &self.entropy {
            out.write_all(first.b, first.h, first.i, count, &entropies, 1);
        }
    }

    /// What a row is multiplied by, its lse and its entropy, the sink counted.
    fn normal(&self, row: &RowAt, max: T::Acc, sum: T::Acc, moment: T::Acc) -> (T::Acc, T::Acc, T::Acc) {
        let (zero, least) = (T::Acc::ZERO, T::Acc::NEG_INFINITY);
        let sink = self.sinks.get(row.h).copied().unwrap_or(least);
        let top = if sink > max || sink.is_nan() { sink } else { max };
        if top == least {
            return (zero, least, zero);
        }
        let shrink = if max == top { T::Acc::ONE } else { (max - top).exp() };
        let whole = sum * shrink + if sink == least { zero } else { (sink - top).exp() };
        let (lse, factor) = (top + whole.ln(), shrink / whole);
        (factor, lse, if sum == zero { zero } else { sum * factor * (lse - max) - moment * factor })
    }
}

/// How the queries of a piece are cut into tiles: by head, or, where a few queries share keys, all heads of a group together.
pub(super) struct QueryTiles {
    /// Heads that a tile belongs to, and how many of them it takes.
    pub slots: usize,
    pub heads: usize,
    pub tiles: usize,
}

impl QueryTiles {
    pub fn new<T: Element>(problem: &Problem<'_, T>, piece: &Piece) -> Self {
        let group = problem.heads.group;
        let shared = piece.queries.is_shared() && !head_matters(problem);
        if group > 1 && piece.queries.len() * group <= QUERIES && shared {
            QueryTiles { slots: problem.heads.key, heads: group, tiles: piece.query_tiles() }
        } else {
            QueryTiles { slots: problem.heads.query, heads: 1, tiles: piece.query_tiles() }
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
                RowAt { b, h, i, p: problem.scene.place(b, i) }
            }));
        }
    }
}

/// Whether the mask can differ between the heads of a group, so that one verdict does not do for all.
fn head_matters<T: Element>(problem: &Problem<'_, T>) -> bool {
    problem.scene.bits.is_some_and(|bits| bits.strides()[1] != 0)
        || problem.scene.buckets.is_some()
        || problem.scene.centers.is_some()
}

/// What a worker needs of its own.
struct Worker<'s, A: Real> {
    desk: Desk<'s, A>,
    live: Live,
    scores: Buffer<'s, A>,
    /// The tiles of queries that it takes past the keys together.
    lanes: Vec<Lane<'s, A>>,
}

/// A tile of queries on its way past the keys.
struct Lane<'s, A: Real> {
    rows: Vec<RowAt>,
    queries: Buffer<'s, A>,
    finite: bool,
    /// Sums of values, once the first tile of keys has begun them.
    values: Buffer<'s, A>,
    begun: bool,
    max: [A; QUERIES],
    sum: [A; QUERIES],
    moment: [A; QUERIES],
}

impl<'s, A: Real> Worker<'s, A> {
    fn new<T: Element<Acc = A>>(scratch: &'s Scratch<A>, ops: &TileOps<'_, T>, lanes: usize) -> Self {
        let lane = |_| Lane {
            rows: Vec::with_capacity(QUERIES),
            queries: scratch.take(QUERIES * ops.query_row),
            finite: true,
            values: scratch.take(QUERIES * padded::<A>(ops.problem.dv)),
            begun: false,
            max: [A::NEG_INFINITY; QUERIES],
            sum: [A::ZERO; QUERIES],
            moment: [A::ZERO; QUERIES],
        };
        Worker {
            desk: ops.desk(scratch),
            live: Live::default(),
            scores: scratch.take(ops.arithmetic.rows_at_once() * KEYS),
            lanes: (0..lanes).map(lane).collect(),
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
    let finished = Finished::new(problem, into);
    let compared = Compared::new(problem, scratch, threads);
    let ops = TileOps::new(problem);
    let pass = Pass {
        ops: &ops,
        queries: compared.queries(problem),
        keys: compared.keys(problem),
        values: Operand::Given(problem.inputs.v),
        scratch,
        threads,
    };
    if let [piece] = &plan.pieces[..] {
        pass.piece(piece, |_, rows, tile| finished.write_tile(rows, ops.isa, tile));
        return;
    }
    let mut partials: Vec<Partial<'_, T::Acc>> = Vec::new();
    for piece in &plan.pieces {
        let mut partial = Partial::new(problem, piece, scratch);
        {
            let (written, states) = partial.writable();
            pass.piece(piece, |places, rows, tile| {
                let Tile { values, row: size, max, sum, moment } = tile;
                for (r, row) in rows.iter().enumerate() {
                    let place = places.start + r % places.len();
                    written.write(row.b, row.h, place, &values[r * size..][..size]);
                    states.write(row.b, row.h, place, &[max[r], sum[r], moment[r]]);
                }
            });
        }
        partials.push(partial);
    }
    merge(problem, &partials, &finished, &ops, scratch, threads);
}

/// Keys and values on their way into products: packed for all who need them, or a tile at a time in memory that is used again.
enum Keys<'k, 's, T: Element> {
    Packed(&'k KeyBlocks<'k, T>),
    Passing(&'k mut Room<'s, T::Acc>),
}

/// What is the same for every piece.
struct Pass<'a, T: Element> {
    ops: &'a TileOps<'a, T>,
    queries: Operand<'a, T>,
    keys: Operand<'a, T>,
    values: Operand<'a, T>,
    scratch: &'a Scratch<T::Acc>,
    threads: usize,
}

impl<T: Element> Pass<'_, T> {
    /// Runs every tile of queries of a piece, and hands each to `done` with its places in the piece.
    fn piece(&self, piece: &Piece, done: impl Fn(Range<usize>, &[RowAt], Tile<'_, T::Acc>) + Sync) {
        let (ops, scratch, problem) = (self.ops, self.scratch, self.ops.problem);
        let cut = QueryTiles::new(problem, piece);
        let order = piece.longest_first(&problem.scene);
        let (key_heads, heads) = (problem.heads.key, problem.b * problem.heads.key);
        let slots = cut.slots / key_heads.max(1);
        let room = |heads| Room::new(scratch, ops.arithmetic, piece, heads, problem.width, problem.dv);
        // A worker takes whole heads and packs their keys for itself, in memory that it uses again: they stay in its caches.
        // The last heads, one for each worker, are shared, so that all end together.
        let whole = if self.threads > 1 { heads.saturating_sub(self.threads) } else { heads };
        let shared = heads - whole;
        // Fewer together where there would not be enough to hand out.
        let together = (shared * slots * cut.tiles / (4 * self.threads.max(1))).clamp(1, TOGETHER);
        // Bf16x3Gemm take half as much memory again. Packed by each worker a tile at a time they take next to none, and a twentieth of the
        // time where they are used for as many queries as can be.
        let passing = ops.arithmetic == Arithmetic::Bf16x3 && together == TOGETHER;
        let mut rooms = room(if passing { 0 } else { shared });
        let blocks = KeyBlocks::new(piece, self.keys, self.values, key_heads, &mut rooms).starting_at(whole);
        let per_slot = cut.tiles.div_ceil(together);
        let worker = || (Worker::new(scratch, ops, TOGETHER.min(cut.tiles)), None, None);
        for_each_task(self.threads, whole + shared * slots * per_slot, worker, |(worker, own, passed), task| {
            if task < whole {
                let own = own.get_or_insert_with(|| room(1));
                let blocks = KeyBlocks::new(piece, self.keys, self.values, key_heads, own).starting_at(task);
                for at in task * slots..(task + 1) * slots {
                    for tiles in order.chunks(TOGETHER) {
                        let slot = (at / cut.slots, at % cut.slots);
                        self.tiles(piece, &cut, Keys::Packed(&blocks), (slot, tiles), worker, &done);
                    }
                }
            } else {
                let (at, group) = (whole * slots + (task - whole) / per_slot, (task - whole) % per_slot);
                let tiles = order.chunks(together).nth(group).unwrap_or_default();
                let slot = (at / cut.slots, at % cut.slots);
                if passing {
                    let one = || Room::of_tiles(scratch, ops.arithmetic, piece, 1, problem.width, problem.dv);
                    let keys = Keys::Passing(passed.get_or_insert_with(one));
                    self.tiles(piece, &cut, keys, (slot, tiles), worker, &done);
                } else {
                    self.tiles(piece, &cut, Keys::Packed(&blocks), (slot, tiles), worker, &done);
                }
            }
        });
    }

    /// Some tiles of queries of a slot against every tile of keys that any of them touches, one after the other.
    fn tiles(
        &self,
        piece: &Piece,
        cut: &QueryTiles,
        mut keys: Keys<'_, '_, T>,
        ((b, slot), tiles): ((usize, usize), &[usize]),
        worker: &mut Worker<'_, T::Acc>,
        done: &impl Fn(Range<usize>, &[RowAt], Tile<'_, T::Acc>),
    ) {
        let scene = &self.ops.problem.scene;
        let Worker { desk, live, scores, lanes } = worker;
        for (lane, &tile) in lanes.iter_mut().zip(tiles) {
            cut.rows(self.ops.problem, piece, b, slot, tile, &mut lane.rows);
            let rows = lane.rows.iter().map(|row| (b, row.h, row.i));
            lane.finite = desk.load_left(self.queries, rows, &mut lane.queries);
            lane.begun = false;
            lane.max.fill(T::Acc::NEG_INFINITY);
            lane.sum.fill(T::Acc::ZERO);
            lane.moment.fill(T::Acc::ZERO);
        }
        let first = slot * cut.heads;
        let mut touched: [_; TOGETHER] =
            std::array::from_fn(|at| tiles.get(at).map(|&tile| piece.row(scene, b, first, tile, 0).peekable()));
        let next = |touched: &mut [Option<Peekable<_>>]| {
            touched.iter_mut().flatten().filter_map(|tiles| tiles.peek().map(|&(tile, _)| tile)).min()
        };
        let problem = self.ops.problem;
        let (key_heads, head) = (problem.heads.key, b * problem.heads.key + first / problem.heads.group);
        while let Some(key_tile) = next(&mut touched) {
            let passing;
            let blocks = match &mut keys {
                Keys::Packed(blocks) => *blocks,
                Keys::Passing(room) => {
                    passing = KeyBlocks::new(piece, self.keys, self.values, key_heads, room).only(head, key_tile);
                    &passing
                }
            };
            for (lane, touched) in lanes.iter_mut().zip(touched.iter_mut().flatten()) {
                if let Some((_, verdict)) = touched.next_if(|&(tile, _)| tile == key_tile) {
                    self.tile(piece, blocks, (key_tile, verdict), lane, (desk, live, scores));
                }
            }
        }
        for (lane, &tile) in lanes.iter_mut().zip(tiles) {
            let Lane { rows, values, begun, max, sum, moment, .. } = lane;
            if !*begun {
                values.fill(T::Acc::ZERO);
            }
            let row = padded::<T::Acc>(self.ops.problem.dv);
            done(piece.query_range(tile), rows, Tile { values, row, max, sum, moment });
        }
    }

    /// One tile of queries against one tile of keys.
    fn tile(
        &self,
        piece: &Piece,
        blocks: &KeyBlocks<'_, T>,
        (key_tile, verdict): (usize, Verdict),
        lane: &mut Lane<'_, T::Acc>,
        (desk, live, scores): (&mut Desk<'_, T::Acc>, &mut Live, &mut [T::Acc]),
    ) {
        let (ops, problem) = (self.ops, self.ops.problem);
        let Lane { rows, queries, finite: queries_finite, values, begun, max, sum, moment } = lane;
        let (value_row, count, at_once) = (padded::<T::Acc>(problem.dv), rows.len(), ops.arithmetic.rows_at_once());
        let (b, key_head) = (rows[0].b, rows[0].h / problem.heads.group);
        let keys = piece.tile_keys(b, key_head, key_tile);
        ops.live(piece, &keys, verdict, rows, live);
        let anew = !std::mem::replace(begun, true);
        let columns = blocks.keys(b, key_head, key_tile, desk);
        let (value_rows, finite) = blocks.values(b, key_head, key_tile, desk);
        let weighed = Weighed { rows: value_rows, finite, from: self.values, b, h: key_head, keys: &keys };
        for start in (0..count).step_by(at_once) {
            let some = start..(start + at_once).min(count);
            let (extent, len) = (live.extent(some.clone()), some.len());
            let queries = (&queries[start * ops.query_row..], *queries_finite);
            ops.raw(desk, queries, columns, keys.len, (live, some.clone()), scores);
            let scale = ops.finish(&keys, (live, start), &rows[some.clone()], scores, Kept::default());
            let mut factor = [T::Acc::ONE; QUERIES];
            let running = Running {
                max: &mut max[some.clone()],
                sum: &mut sum[some.clone()],
                moment: if problem.attention.entropy { &mut moment[some.clone()] } else { &mut [] },
                factor: &mut factor,
            };
            let modulate = |scores: &mut [T::Acc]| ops.modulate(&rows[some.clone()], &keys, scores);
            let modulate = ops.modulates().then_some(modulate);
            desk.soften(scores, len, keys.len, ops.exponential(scale, extent), running, modulate);
            let values = &mut values[start * value_row..];
            if !anew {
                scale_rows(ops.isa, values, value_row, &factor[..len]);
            }
            desk.weigh(scores, len, weighed, extent, values, anew);
        }
    }
}

/// Merges what the pieces left of each row, in their order.
pub(super) fn merge<T: Element>(
    problem: &Problem<'_, T>,
    partials: &[Partial<'_, T::Acc>],
    finished: &Finished<'_, T>,
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
                let (mut max, mut sum, mut moment) = (T::Acc::NEG_INFINITY, T::Acc::ZERO, T::Acc::ZERO);
                values.fill(T::Acc::ZERO);
                for partial in partials {
                    let Some(place) = partial.places.of(b, h, i) else { continue };
                    let at = (b * heads + h) * partial.shape[2] + place;
                    let [part_max, part_sum, part_moment] = [0, 1, 2].map(|x| partial.states[at * 3 + x]);
                    if part_max == T::Acc::NEG_INFINITY {
                        continue;
                    }
                    let part = &partial.values[at * value_row..][..value_row];
                    let top = if part_max > max || part_max.is_nan() { part_max } else { max };
                    let shrink = |of: T::Acc| if of == top { T::Acc::ONE } else { (of - top).exp() };
                    let (mine, theirs) = (shrink(max), shrink(part_max));
                    let moved = |of: T::Acc, sum: T::Acc| if sum == T::Acc::ZERO { sum } else { (of - top) * sum };
                    moment = mine * (moment + moved(max, sum)) + theirs * (part_moment + moved(part_max, part_sum));
                    sum = mine * sum + theirs * part_sum;
                    max = top;
                    for (value, &part) in values.iter_mut().zip(part) {
                        *value = mine * *value + theirs * part;
                    }
                }
                let row = RowAt { b, h, i, p: 0 };
                finished.write(&row, ops.isa, State { values, max, sum, moment });
            }
        },
    );
}
