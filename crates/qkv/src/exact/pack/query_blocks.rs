//! Queries and upstream gradients packed for the backward pass on first use and shared by all tiles of keys; with the
//! upstream gradients, the deltas of their rows.

use crate::exact::backward::row_terms::RowTerms;
use crate::exact::gemm::by_key::PackedQueries;
use crate::exact::gemm::{Arithmetic, TileGemm};
use crate::exact::pack::Operand;
use crate::exact::plan::Piece;
use crate::exact::plan::order::Order;
use crate::scratch::{Buffer, Scratch};
use crate::tuning::QUERIES;
use qkv_simd::shared::{BlockStates, LazyBlocks};
use qkv_simd::{Element, Real};
use std::ops::Range;

/// The packed rows of some heads, as many tiles per block as the arithmetic packs together.
pub(in crate::exact) struct QueryBlocks<'a, T: Element> {
    queries: Operand<'a, T>,
    terms: &'a RowTerms<'a, T>,
    packed: [LazyBlocks<'a, T::Acc>; 2],
    /// The arithmetics of gradients and of scores.
    arithmetic: Arithmetic,
    scoring: Arithmetic,
    piece: &'a Piece,
    /// The first head that the buffers hold, counted over all sequences, and the heads of a sequence.
    first: usize,
    heads: usize,
}

/// The memory of [`QueryBlocks`] for some heads.
pub(in crate::exact) struct QueryBuffers<'s, A: Real> {
    packed: [Buffer<'s, A>; 2],
    states: [BlockStates; 2],
    sizes: [usize; 2],
    blocks: usize,
}

/// Blocks per head.
fn blocks_of(piece: &Piece, arithmetic: Arithmetic) -> usize {
    piece.query_tiles().div_ceil(arithmetic.query_tiles_packed())
}

impl<'s, A: Real> QueryBuffers<'s, A> {
    /// For queries and upstream gradients of these widths.
    pub fn new(
        scratch: &'s Scratch<A>,
        (arithmetic, scoring): (Arithmetic, Arithmetic),
        widths: [usize; 2],
        piece: &Piece,
        heads: usize,
    ) -> Self {
        // The queries are followed by those packed for scores, if their arithmetic differs; the upstream gradients by a
        // delta per row.
        let [queries, upstream] = widths.map(|width| TileGemm::<A>::pack_both_len(arithmetic, width));
        let rows = arithmetic.query_tiles_packed() * QUERIES;
        let scored = if scoring == arithmetic { 0 } else { rows * scoring.packed_a_row::<A>(widths[0]) };
        let sizes = [queries + scored, upstream + rows];
        let blocks = heads * blocks_of(piece, arithmetic);
        QueryBuffers {
            packed: sizes.map(|size| scratch.take(blocks * size)),
            states: Default::default(),
            sizes,
            blocks,
        }
    }
}

impl<'a, T: Element> QueryBlocks<'a, T> {
    /// From head `first` on, counted over all sequences of `heads` heads.
    pub fn new(
        queries: Operand<'a, T>,
        terms: &'a RowTerms<'a, T>,
        (arithmetic, scoring): (Arithmetic, Arithmetic),
        piece: &'a Piece,
        buffers: &'a mut QueryBuffers<'_, T::Acc>,
        (first, heads): (usize, usize),
    ) -> Self {
        let QueryBuffers { packed: [q, o], states: [q_states, o_states], sizes, blocks } = buffers;
        let packed = [LazyBlocks::new(q, q_states, *blocks, sizes[0]), LazyBlocks::new(o, o_states, *blocks, sizes[1])];
        QueryBlocks { queries, terms, packed, arithmetic, scoring, piece, first, heads }
    }

    /// The block of a tile, packed by `pack` on first use, and the rows of the tile in it.
    fn block(
        &self,
        (which, width): (usize, usize),
        (b, h, tile): (usize, usize, usize),
        pack: impl FnOnce(HeadRows<'_>, &mut [T::Acc]) -> bool,
    ) -> (PackedQueries<'_, T::Acc>, &[T::Acc]) {
        let tiles = self.arithmetic.query_tiles_packed();
        let (block, in_head) = (tile / tiles, blocks_of(self.piece, self.arithmetic));
        let rows = block * tiles * QUERIES..((block + 1) * tiles * QUERIES).min(self.piece.queries.len());
        let rows = HeadRows { b, h, order: &self.piece.queries, rows };
        let (packed_rows, head) = (rows.rows.len(), b * self.heads + h - self.first);
        let (packed, finite) = self.packed[which].get(head * in_head + block, |out| pack(rows, out));
        let row = self.arithmetic.packed_a_row::<T::Acc>(width);
        let (both, rest) = packed.split_at(TileGemm::<T::Acc>::pack_both_len(self.arithmetic, width));
        let (rows, transposed) = both.split_at(tiles * QUERIES * row);
        let first = tile % tiles * QUERIES;
        (PackedQueries { rows: &rows[first * row..], transposed, packed_rows, first, finite, scored: None }, rest)
    }

    /// The queries of a tile, packed for gradients and, if that arithmetic differs, for scores.
    pub fn queries(
        &self,
        tile: (usize, usize, usize),
        gemm: &mut TileGemm<'_, T::Acc>,
        score_gemm: &mut TileGemm<'_, T::Acc>,
    ) -> PackedQueries<'_, T::Acc> {
        let (width, separate_scores) = (self.queries.width(), self.scoring != self.arithmetic);
        let pack = |rows: HeadRows<'_>, out: &mut [T::Acc]| {
            let (both, scored) = out.split_at_mut(TileGemm::<T::Acc>::pack_both_len(self.arithmetic, width));
            let no_overflow = !separate_scores || score_gemm.pack_a(self.queries, rows.iter(0), scored);
            gemm.pack_both(self.queries, rows.iter(0), both) && no_overflow
        };
        let (packed, rest) = self.block((0, width), tile, pack);
        let scored = separate_scores.then(|| &rest[packed.first * self.scoring.packed_a_row::<T::Acc>(width)..]);
        PackedQueries { scored, ..packed }
    }

    /// The upstream gradients of a tile, and the deltas of its rows.
    pub fn upstream(
        &self,
        tile: (usize, usize, usize),
        gemm: &mut TileGemm<'_, T::Acc>,
    ) -> (PackedQueries<'_, T::Acc>, &[T::Acc]) {
        let (terms, width) = (self.terms, self.terms.upstream.width());
        let row = self.arithmetic.packed_a_row::<T::Acc>(width);
        let pack = |rows: HeadRows<'_>, out: &mut [T::Acc]| {
            let (out, deltas) = out.split_at_mut(TileGemm::<T::Acc>::pack_both_len(self.arithmetic, width));
            let finite = gemm.pack_both(terms.upstream, rows.iter(0), out);
            for (at, deltas) in deltas[..rows.rows.len()].chunks_mut(QUERIES).enumerate() {
                let some = rows.iter(at * QUERIES).take(deltas.len());
                terms.deltas(gemm, &out[at * QUERIES * row..], some, deltas);
            }
            finite
        };
        let (packed, deltas) = self.block((1, width), tile, pack);
        (packed, &deltas[packed.first..])
    }
}

/// A range of a head's queries, in the order of a piece.
struct HeadRows<'a> {
    b: usize,
    h: usize,
    order: &'a Order,
    rows: Range<usize>,
}

impl HeadRows<'_> {
    /// The rows from `from` on.
    fn iter(&self, from: usize) -> impl ExactSizeIterator<Item = (usize, usize, usize)> + Clone {
        let &HeadRows { b, h, order, ref rows } = self;
        (rows.start + from..rows.end).map(move |at| (b, h, order.index(b, h, at)))
    }
}
