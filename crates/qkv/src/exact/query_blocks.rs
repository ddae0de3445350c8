//! The rows of queries and of upstream gradients for a backward pass, packed when first needed and shared by all tiles of keys.

use super::gather::Packed;
use super::operand::Operand;
use super::plan::Piece;
use super::products::{Arithmetic, Desk};
use crate::scratch::{Buffer, Scratch};
use crate::tuning::QUERIES;
use qkv_simd::shared::{BlockStates, LazyBlocks};
use qkv_simd::{Element, Real};

/// The packed rows of some heads, as many tiles in a block as the arithmetic takes together.
pub(super) struct QueryBlocks<'a, T: Element> {
    queries: Operand<'a, T>,
    upstream: Operand<'a, T>,
    packed: [LazyBlocks<'a, T::Acc>; 2],
    arithmetic: Arithmetic,
    piece: &'a Piece,
    /// The first head that there is room for, counted over all sequences, and the heads of a sequence.
    first: usize,
    heads: usize,
}

/// The room that [`QueryBlocks`] needs for some heads.
pub(super) struct QueryRoom<'s, A: Real> {
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
        arithmetic: Arithmetic,
        widths: [usize; 2],
        piece: &Piece,
        heads: usize,
    ) -> Self {
        let sizes = widths.map(|width| Desk::<A>::both_ways_len(arithmetic, width));
        let blocks = heads * blocks_of(piece, arithmetic);
        QueryRoom { packed: sizes.map(|size| scratch.take(blocks * size)), states: Default::default(), sizes, blocks }
    }
}

impl<'a, T: Element> QueryBlocks<'a, T> {
    /// From the head `first` of all on, of sequences of so many heads.
    pub fn new(
        [queries, upstream]: [Operand<'a, T>; 2],
        arithmetic: Arithmetic,
        piece: &'a Piece,
        room: &'a mut QueryRoom<'_, T::Acc>,
        (first, heads): (usize, usize),
    ) -> Self {
        let QueryRoom { packed: [q, o], states: [q_states, o_states], sizes, blocks } = room;
        let packed = [LazyBlocks::new(q, q_states, *blocks, sizes[0]), LazyBlocks::new(o, o_states, *blocks, sizes[1])];
        QueryBlocks { queries, upstream, packed, arithmetic, piece, first, heads }
    }

    fn block(
        &self,
        of: Operand<'_, T>,
        which: usize,
        (b, h, tile): (usize, usize, usize),
        desk: &mut Desk<'_, T::Acc>,
    ) -> Packed<'_, T::Acc> {
        let tiles = self.arithmetic.tiles_together();
        let (block, in_head) = (tile / tiles, blocks_of(self.piece, self.arithmetic));
        let rows = block * tiles * QUERIES..((block + 1) * tiles * QUERIES).min(self.piece.queries.len());
        let pack = |out: &mut [T::Acc]| {
            desk.load_both_ways(of, rows.clone().map(|at| (b, h, self.piece.queries.index(b, h, at))), out)
        };
        let head = b * self.heads + h - self.first;
        let (packed, finite) = self.packed[which].get(head * in_head + block, pack);
        let row = self.arithmetic.left_row::<T::Acc>(of.width());
        let (lying, across) = packed.split_at(tiles * QUERIES * row);
        let first = tile % tiles * QUERIES;
        Packed { rows: &lying[first * row..], across, together: rows.len(), first, finite }
    }

    /// The queries of a tile of a head.
    pub fn queries(&self, tile: (usize, usize, usize), desk: &mut Desk<'_, T::Acc>) -> Packed<'_, T::Acc> {
        self.block(self.queries, 0, tile, desk)
    }

    /// The upstream gradients of a tile of a head.
    pub fn upstream(&self, tile: (usize, usize, usize), desk: &mut Desk<'_, T::Acc>) -> Packed<'_, T::Acc> {
        self.block(self.upstream, 1, tile, desk)
    }
}
