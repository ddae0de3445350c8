//! Where the rows of a tile come from, and how keys and values are packed for the products.

pub(crate) mod query_blocks;

use crate::exact::gemm::{Arithmetic, TileGemm};
use crate::exact::plan::Piece;
use crate::scratch::{Buffer, Scratch};
use crate::source::Source;
use crate::tuning::KEYS;
use half::bf16;
use qkv_simd::shared::{BlockStates, LazyBlocks};
use qkv_simd::{Element, Real, View};

/// Rows as they were given, or as a projection made them.
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

    /// Copies a row, pads it with zeros, and says whether all of it was finite.
    #[inline]
    pub fn load_row(&self, b: usize, h: usize, i: usize, out: &mut [T::Acc]) -> bool {
        match self {
            Operand::Input(source) => source.load_row(b, h, i, out),
            Operand::Computed(view) => view.load_row(b, h, i, out),
        }
    }

    /// Copies the rows from `i` on, pads each with zeros to `row`, and says whether all was finite: as many as there is room for.
    pub fn load_rows(&self, b: usize, h: usize, i: usize, out: &mut [T::Acc], row: usize) -> bool {
        match self {
            Operand::Input(source) => source.load_rows(b, h, i, out, row),
            Operand::Computed(view) => view.load_rows(b, h, i, out, row),
        }
    }

    /// Copies a row that was given as bf16, pads it with zeros, and says whether all of it was finite.
    #[inline]
    pub fn load_bf16(&self, b: usize, h: usize, i: usize, out: &mut [bf16]) -> bool {
        match self {
            Operand::Input(source) => source.load_bf16(b, h, i, out),
            Operand::Computed(view) => view.load_bf16(b, h, i, out),
        }
    }
}

/// The keys and values of a piece, packed block by block when first needed and shared by everyone.
pub(crate) struct KeyBlocks<'a, T: Element> {
    piece: &'a Piece,
    keys: Operand<'a, T>,
    values: Operand<'a, T>,
    columns: LazyBlocks<'a, T::Acc>,
    rows: LazyBlocks<'a, T::Acc>,
    heads: usize,
    /// The first head that there is room for, and the first tile of each.
    first: usize,
    first_tile: usize,
    tiles: usize,
}

/// The room that [`KeyBlocks`] needs for one piece.
pub(crate) struct KeyBuffers<'s, A: Real> {
    columns: Buffer<'s, A>,
    rows: Buffer<'s, A>,
    states: [BlockStates; 2],
    /// Numbers in a block of each.
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

    /// For so many tiles of keys.
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

    /// With room for one tile of one head only, counted over all sequences.
    pub fn single_tile(self, head: usize, tile: usize) -> Self {
        KeyBlocks { first: head, first_tile: tile, tiles: 1, ..self }
    }

    /// With room only from this head on, counted over all sequences.
    pub fn from_head(self, first: usize) -> Self {
        KeyBlocks { first, ..self }
    }

    fn block(&self, b: usize, h: usize, tile: usize) -> usize {
        (b * self.heads + h - self.first) * self.tiles + tile - self.first_tile
    }

    /// The keys of a tile as the columns of a right operand, and whether all are finite where that matters.
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
