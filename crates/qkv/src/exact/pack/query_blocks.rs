//! The rows of queries and of upstream gradients for a backward pass, packed when first needed and shared by all tiles of keys; and, with
//! the latter, what the gradients of their weights are relative to.

use crate::exact::backward::row_terms::RowTerms;
use crate::exact::gemm::by_key::Packed;
use crate::exact::gemm::{Arithmetic, Desk};
use crate::exact::pack::Operand;
use crate::exact::plan::Piece;
use crate::exact::plan::order::Order;
use crate::scratch::{Buffer, Scratch};
use crate::tuning::QUERIES;
use qkv_simd::shared::{BlockStates, LazyBlocks};
use qkv_simd::{Element, Real};
use std::ops::Range;

/// The packed rows of some heads, as many tiles in a block as the arithmetic takes together.
pub(in crate::exact) struct QueryBlocks<'a, T: Element> {
    queries: Operand<'a, T>,
    terms: &'a RowTerms<'a, T>,
    packed: [LazyBlocks<'a, T::Acc>; 2],
    /// What gradients and what scores are made in.
    arithmetic: Arithmetic,
    scoring: Arithmetic,
    piece: &'a Piece,
    /// The first head that there is room for, counted over all sequences, and the heads of a sequence.
    first: usize,
    heads: usize,
}

/// The room that [`QueryBlocks`] needs for some heads.
pub(in crate::exact) struct QueryRoom<'s, A: Real> {
    packed: [Buffer<'s, A>; 2],
    states: [BlockStates; 2],
    sizes: [usize; 2],
    blocks: usize,
}

/// Blocks in a head.
fn blocks_of(piece: &Piece, arithmetic: Arithmetic) -> usize {
    piece.query_tiles().div_ceil(arithmetic.tiles_together())
}

impl<'s, A: Real> QueryRoom<'s, A> {
    /// For queries and upstream gradients of these widths.
    pub fn new(
        scratch: &'s Scratch<A>,
        (arithmetic, scoring): (Arithmetic, Arithmetic),
        widths: [usize; 2],
        piece: &Piece,
        heads: usize,
    ) -> Self {
        // After the queries come those that are scored, if they are others, after the upstream gradients a number for each.
        let [queries, upstream] = widths.map(|width| Desk::<A>::both_ways_len(arithmetic, width));
        let rows = arithmetic.tiles_together() * QUERIES;
        let scored = if scoring == arithmetic { 0 } else { rows * scoring.left_row::<A>(widths[0]) };
        let sizes = [queries + scored, upstream + rows];
        let blocks = heads * blocks_of(piece, arithmetic);
        QueryRoom { packed: sizes.map(|size| scratch.take(blocks * size)), states: Default::default(), sizes, blocks }
    }
}

impl<'a, T: Element> QueryBlocks<'a, T> {
    /// From the head `first` of all on, of sequences of so many heads.
    pub fn new(
        queries: Operand<'a, T>,
        terms: &'a RowTerms<'a, T>,
        (arithmetic, scoring): (Arithmetic, Arithmetic),
        piece: &'a Piece,
        room: &'a mut QueryRoom<'_, T::Acc>,
        (first, heads): (usize, usize),
    ) -> Self {
        let QueryRoom { packed: [q, o], states: [q_states, o_states], sizes, blocks } = room;
        let packed = [LazyBlocks::new(q, q_states, *blocks, sizes[0]), LazyBlocks::new(o, o_states, *blocks, sizes[1])];
        QueryBlocks { queries, terms, packed, arithmetic, scoring, piece, first, heads }
    }

    /// The block of a tile, made by `pack` from its rows if nobody has yet, and its rows as a left operand.
    fn block(
        &self,
        (which, width): (usize, usize),
        (b, h, tile): (usize, usize, usize),
        pack: impl FnOnce(RowsOf<'_>, &mut [T::Acc]) -> bool,
    ) -> (Packed<'_, T::Acc>, &[T::Acc]) {
        let tiles = self.arithmetic.tiles_together();
        let (block, in_head) = (tile / tiles, blocks_of(self.piece, self.arithmetic));
        let rows = block * tiles * QUERIES..((block + 1) * tiles * QUERIES).min(self.piece.queries.len());
        let rows = RowsOf { b, h, order: &self.piece.queries, rows };
        let (together, head) = (rows.rows.len(), b * self.heads + h - self.first);
        let (packed, finite) = self.packed[which].get(head * in_head + block, |out| pack(rows, out));
        let row = self.arithmetic.left_row::<T::Acc>(width);
        let (both_ways, rest) = packed.split_at(Desk::<T::Acc>::both_ways_len(self.arithmetic, width));
        let (lying, across) = both_ways.split_at(tiles * QUERIES * row);
        let first = tile % tiles * QUERIES;
        (Packed { rows: &lying[first * row..], across, together, first, finite, scored: None }, rest)
    }

    /// The queries of a tile of a head, packed by the desk of gradients and, if it is another, that of scores.
    pub fn queries(
        &self,
        tile: (usize, usize, usize),
        desk: &mut Desk<'_, T::Acc>,
        scorer: &mut Desk<'_, T::Acc>,
    ) -> Packed<'_, T::Acc> {
        let (width, apart) = (self.queries.width(), self.scoring != self.arithmetic);
        let pack = |rows: RowsOf<'_>, out: &mut [T::Acc]| {
            let (both_ways, scored) = out.split_at_mut(Desk::<T::Acc>::both_ways_len(self.arithmetic, width));
            let surely = !apart || scorer.load_left(self.queries, rows.iter(0), scored);
            desk.load_both_ways(self.queries, rows.iter(0), both_ways) && surely
        };
        let (packed, rest) = self.block((0, width), tile, pack);
        let scored = apart.then(|| &rest[packed.first * self.scoring.left_row::<T::Acc>(width)..]);
        Packed { scored, ..packed }
    }

    /// The upstream gradients of a tile of a head, and what the gradients of their weights are relative to.
    pub fn upstream(
        &self,
        tile: (usize, usize, usize),
        desk: &mut Desk<'_, T::Acc>,
    ) -> (Packed<'_, T::Acc>, &[T::Acc]) {
        let (terms, width) = (self.terms, self.terms.upstream.width());
        let row = self.arithmetic.left_row::<T::Acc>(width);
        let pack = |rows: RowsOf<'_>, out: &mut [T::Acc]| {
            let (out, deltas) = out.split_at_mut(Desk::<T::Acc>::both_ways_len(self.arithmetic, width));
            let finite = desk.load_both_ways(terms.upstream, rows.iter(0), out);
            for (at, deltas) in deltas[..rows.rows.len()].chunks_mut(QUERIES).enumerate() {
                let some = rows.iter(at * QUERIES).take(deltas.len());
                terms.deltas(desk, &out[at * QUERIES * row..], some, deltas);
            }
            finite
        };
        let (packed, deltas) = self.block((1, width), tile, pack);
        (packed, &deltas[packed.first..])
    }
}

/// Places of a head's queries, in the order of a piece.
struct RowsOf<'a> {
    b: usize,
    h: usize,
    order: &'a Order,
    rows: Range<usize>,
}

impl RowsOf<'_> {
    /// From one of them on.
    fn iter(&self, from: usize) -> impl ExactSizeIterator<Item = (usize, usize, usize)> + Clone {
        let &RowsOf { b, h, order, ref rows } = self;
        (rows.start + from..rows.end).map(move |at| (b, h, order.index(b, h, at)))
    }
}
