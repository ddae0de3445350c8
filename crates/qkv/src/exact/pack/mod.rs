//! The sources of rows, and keys and values packed for the products, block by block on first use.

pub(crate) mod query_blocks;

use crate::exact::gemm::{Arithmetic, TileGemm};
use crate::exact::plan::Piece;
use crate::scratch::{Buffer, Scratch};
use crate::source::Source;
use crate::tuning::KEYS;
use half::bf16;
use qkv_simd::shared::{BlockStates, LazyBlocks};
use qkv_simd::{Element, Real, View};

/// Rows of an input, or rows that were computed in the accumulator type.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Operand<'a, T: Element> {
    Input(Source<'a, T>),
    Computed(View<'a, T::Acc>),
}

impl<T: Element> Operand<'_, T> {
    /// `[B, H, length, width]`.
    pub fn shape(&self) -> [usize; 4] {
        match self {
            Operand::Input(source) => source.shape(),
            Operand::Computed(view) => view.shape(),
        }
    }

    pub fn width(&self) -> usize {
        self.shape()[3]
    }

    /// Widens a row and pads it with zeros. Returns whether all of it is finite.
    #[inline]
    pub fn load_row(&self, b: usize, h: usize, i: usize, out: &mut [T::Acc]) -> bool {
        match self {
            Operand::Input(source) => source.load_row(b, h, i, out),
            Operand::Computed(view) => view.load_row(b, h, i, out),
        }
    }

    /// Widens the rows from `i` on and pads each with zeros to `row`: as many as fit into `out`. Returns whether all
    /// are finite.
    pub fn load_rows(&self, b: usize, h: usize, i: usize, out: &mut [T::Acc], row: usize) -> bool {
        match self {
            Operand::Input(source) => source.load_rows(b, h, i, out, row),
            Operand::Computed(view) => view.load_rows(b, h, i, out, row),
        }
    }

    /// Copies a row as bf16 and pads it with zeros. Returns whether all of it is finite.
    #[inline]
    pub fn load_bf16(&self, b: usize, h: usize, i: usize, out: &mut [bf16]) -> bool {
        match self {
            Operand::Input(source) => source.load_bf16(b, h, i, out),
            Operand::Computed(view) => view.load_bf16(b, h, i, out),
        }
    }
}

/// The packed keys and values of a piece, shared by all workers.
pub(crate) struct KeyBlocks<'a, T: Element> {
    piece: &'a Piece,
    keys: Operand<'a, T>,
    values: Operand<'a, T>,
    columns: LazyBlocks<'a, T::Acc>,
    rows: LazyBlocks<'a, T::Acc>,
    heads: usize,
    /// The first head, counted over all sequences, and the first tile that the buffers hold.
    first: usize,
    first_tile: usize,
    tiles: usize,
}

/// The memory of [`KeyBlocks`] for one piece.
pub(crate) struct KeyBuffers<'s, A: Real> {
    columns: Buffer<'s, A>,
    rows: Buffer<'s, A>,
    states: [BlockStates; 2],
    /// Accumulators in a block of keys and in a block of values.
    sizes: [usize; 2],
    blocks: usize,
}

impl<'s, A: Real> KeyBuffers<'s, A> {
    /// For `heads` heads in all (sequences times key heads), keys of `width` and values of `dv`.
    pub fn new(
        scratch: &'s Scratch<A>,
        arithmetic: Arithmetic,
        piece: &Piece,
        heads: usize,
        width: usize,
        dv: usize,
    ) -> Self {
        KeyBuffers::of_tiles(scratch, arithmetic, piece, heads * piece.key_tiles().len(), width, dv)
    }

    /// For this many tiles of keys.
    pub fn of_tiles(
        scratch: &'s Scratch<A>,
        arithmetic: Arithmetic,
        piece: &Piece,
        blocks: usize,
        width: usize,
        dv: usize,
    ) -> Self {
        let most = KEYS.min(piece.keys.len());
        let sizes = [arithmetic.packed_b_transposed_len::<A>(most, width), arithmetic.packed_b_len::<A>(most, dv)];
        KeyBuffers {
            columns: scratch.take(blocks * sizes[0]),
            rows: scratch.take(blocks * sizes[1]),
            states: Default::default(),
            sizes,
            blocks,
        }
    }
}

impl<'a, T: Element> KeyBlocks<'a, T> {
    pub fn new(
        piece: &'a Piece,
        keys: Operand<'a, T>,
        values: Operand<'a, T>,
        heads: usize,
        buffers: &'a mut KeyBuffers<'_, T::Acc>,
    ) -> Self {
        let KeyBuffers { columns, rows, states: [of_columns, of_rows], sizes, blocks } = buffers;
        let columns = LazyBlocks::new(columns, of_columns, *blocks, sizes[0]);
        let rows = LazyBlocks::new(rows, of_rows, *blocks, sizes[1]);
        let tiles = piece.key_tiles();
        KeyBlocks { piece, keys, values, columns, rows, heads, first: 0, first_tile: tiles.start, tiles: tiles.len() }
    }

    /// Restricts the blocks to one tile of one head, counted over all sequences.
    pub fn single_tile(self, head: usize, tile: usize) -> Self {
        KeyBlocks { first: head, first_tile: tile, tiles: 1, ..self }
    }

    /// Restricts the blocks to the heads from this one on, counted over all sequences.
    pub fn starting_at_head(self, first: usize) -> Self {
        KeyBlocks { first, ..self }
    }

    fn block(&self, b: usize, h: usize, tile: usize) -> usize {
        (b * self.heads + h - self.first) * self.tiles + tile - self.first_tile
    }

    /// The keys of a tile as the columns of a right operand, and whether their scores cannot overflow.
    pub fn keys(&self, b: usize, h: usize, tile: usize, gemm: &mut TileGemm<'_, T::Acc>) -> (&[T::Acc], bool) {
        let keys = self.piece.tile_keys(b, h, tile);
        self.columns.get(self.block(b, h, tile), |out| gemm.pack_b_transposed(self.keys, (b, h), &keys, out))
    }

    /// The values of a tile as the rows of a right operand, and whether all are finite.
    pub fn values(&self, b: usize, h: usize, tile: usize, gemm: &mut TileGemm<'_, T::Acc>) -> (&[T::Acc], bool) {
        let keys = self.piece.tile_keys(b, h, tile);
        self.rows.get(self.block(b, h, tile), |out| gemm.pack_b(self.values, (b, h), &keys, out))
    }
}
