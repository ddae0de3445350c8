//! Where the rows of a tile come from, and how keys and values are packed for the products.

use super::order::TileKeys;
use super::plan::Piece;
use crate::scratch::{Buffer, Scratch};
use crate::source::Source;
use crate::tuning::KEYS;
use qkv_simd::shared::LazyBlocks;
use qkv_simd::{Element, Real, View, padded};

/// Rows as they were given, or as a projection made them.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Operand<'a, T: Element> {
    Given(Source<'a, T>),
    Made(View<'a, T::Acc>),
}

impl<T: Element> Operand<'_, T> {
    /// `[B, H, length, width]`.
    pub fn shape(&self) -> [usize; 4] {
        match self {
            Operand::Given(source) => source.shape(),
            Operand::Made(view) => view.shape(),
        }
    }

    pub fn width(&self) -> usize {
        self.shape()[3]
    }

    /// Copies a row, pads it with zeros, and says whether all of it was finite.
    #[inline]
    pub fn load_row(&self, b: usize, h: usize, i: usize, out: &mut [T::Acc]) -> bool {
        match self {
            Operand::Given(source) => source.load_row(b, h, i, out),
            Operand::Made(view) => view.load_row(b, h, i, out),
        }
    }

    /// Copies the keys of a tile as padded rows.
    pub fn load_rows(&self, b: usize, h: usize, keys: &TileKeys<'_>, out: &mut [T::Acc]) -> bool {
        let row = padded::<T::Acc>(self.width());
        let mut finite = true;
        for (at, out) in out.chunks_exact_mut(row.max(1)).take(keys.len).enumerate() {
            finite &= self.load_row(b, h, keys.index(at), out);
        }
        finite
    }

    /// Packs the keys of a tile as panels: `LANES` keys side by side, number by number of the width; zeros where the last
    /// panel has no key. `row` is room for one row.
    pub fn load_panels(&self, b: usize, h: usize, keys: &TileKeys<'_>, row: &mut [T::Acc], out: &mut [T::Acc]) -> bool {
        let (lanes, width) = (T::Acc::LANES, self.width());
        let mut finite = true;
        for (panel, out) in out.chunks_exact_mut((width * lanes).max(1)).take(keys.len.div_ceil(lanes)).enumerate() {
            for lane in 0..lanes {
                let at = panel * lanes + lane;
                if at < keys.len {
                    finite &= self.load_row(b, h, keys.index(at), row);
                } else {
                    row.fill(T::Acc::ZERO);
                }
                for (x, &value) in row[..width].iter().enumerate() {
                    out[x * lanes + lane] = value;
                }
            }
        }
        finite
    }
}

/// The keys and values of a piece, packed block by block when first needed and shared by everyone.
pub(crate) struct KeyBlocks<'a, T: Element> {
    piece: &'a Piece,
    keys: Operand<'a, T>,
    values: Operand<'a, T>,
    panels: LazyBlocks<'a, T::Acc>,
    rows: LazyBlocks<'a, T::Acc>,
    heads: usize,
    /// The first head that there is room for.
    first: usize,
}

/// The room that [`KeyBlocks`] needs for one piece.
pub(crate) struct Room<'s, A: Real> {
    panels: Buffer<'s, A>,
    rows: Buffer<'s, A>,
    /// Numbers in a block of each.
    sizes: [usize; 2],
    blocks: usize,
}

impl<'s, A: Real> Room<'s, A> {
    /// For `heads` heads in all (sequences times key heads), keys of `width` and values of `dv`.
    pub fn new(scratch: &'s Scratch<A>, piece: &Piece, heads: usize, width: usize, dv: usize) -> Self {
        let tiles = piece.key_tiles().len();
        let most = KEYS.min(piece.keys.len());
        let sizes = [padded::<A>(most) * width, most * padded::<A>(dv)];
        let blocks = tiles * heads;
        Room { panels: scratch.take(blocks * sizes[0]), rows: scratch.take(blocks * sizes[1]), sizes, blocks }
    }
}

impl<'a, T: Element> KeyBlocks<'a, T> {
    pub fn new(
        piece: &'a Piece,
        keys: Operand<'a, T>,
        values: Operand<'a, T>,
        heads: usize,
        room: &'a mut Room<'_, T::Acc>,
    ) -> Self {
        let panels = LazyBlocks::new(&mut room.panels, room.blocks, room.sizes[0]);
        let rows = LazyBlocks::new(&mut room.rows, room.blocks, room.sizes[1]);
        KeyBlocks { piece, keys, values, panels, rows, heads, first: 0 }
    }

    /// With room only from this head of this sequence on.
    pub fn starting_at(self, b: usize, h: usize) -> Self {
        KeyBlocks { first: b * self.heads + h, ..self }
    }

    fn block(&self, b: usize, h: usize, tile: usize) -> usize {
        let tiles = self.piece.key_tiles();
        (b * self.heads + h - self.first) * tiles.len() + tile - tiles.start
    }

    /// The keys of a tile as packed panels.
    pub fn key_panels(&self, b: usize, h: usize, tile: usize) -> &[T::Acc] {
        let keys = self.piece.tile_keys(b, h, tile);
        let pack = |out: &mut [T::Acc]| {
            let mut row = vec![T::Acc::ZERO; self.keys.width()];
            self.keys.load_panels(b, h, &keys, &mut row, out)
        };
        self.panels.get(self.block(b, h, tile), pack).0
    }

    /// The values of a tile as padded rows, and whether all are finite.
    pub fn value_rows(&self, b: usize, h: usize, tile: usize) -> (&[T::Acc], bool) {
        let keys = self.piece.tile_keys(b, h, tile);
        self.rows.get(self.block(b, h, tile), |out| self.values.load_rows(b, h, &keys, out))
    }
}
