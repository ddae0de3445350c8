//! Matrices in quantized blocks in device memory: how they are packed for `blocks.cu`, and the operations on them.
//! Products of few rows read the blocks directly; for more rows, the elements are widened for the duration of the
//! product.

use super::launch::{Argument, count};
use super::{Array, CacheEnd, FewRowsInput, FewRowsProduct, Gate, Kind, Operations};
use Argument::{F32, Ptr, U32};
use qkv_simd::quantized::{BLOCK, Format, QuantizedMatrix};

/// A matrix in quantized blocks in device memory.
#[derive(Clone, Debug)]
pub struct BlockMatrix {
    words: Array,
    format: Format,
    outputs: usize,
    inner: usize,
}

/// A matrix `[outputs, inner]` in device memory.
#[derive(Clone, Copy, Debug)]
pub enum MatrixRef<'a> {
    /// Its elements.
    Elements(&'a Array),
    /// Its blocks.
    Blocks(&'a BlockMatrix),
}

impl<'a> From<&'a Array> for MatrixRef<'a> {
    fn from(array: &'a Array) -> Self {
        MatrixRef::Elements(array)
    }
}

impl<'a> MatrixRef<'a> {
    /// The elements, if it is not in blocks.
    pub(super) fn elements(self) -> Option<&'a Array> {
        match self {
            MatrixRef::Elements(array) => Some(array),
            MatrixRef::Blocks(_) => None,
        }
    }

    /// The blocks, if it is in blocks.
    pub(super) fn blocks(self) -> Option<&'a BlockMatrix> {
        match self {
            MatrixRef::Elements(_) => None,
            MatrixRef::Blocks(blocks) => Some(blocks),
        }
    }
}

/// The most rows of a product that reads blocks, eight at a time: with more, widening the matrix for cuBLASLt is
/// faster. Widening it to bf16, which writes it and reads it again, moves 2.3 times as many bytes as eight passes over
/// 4-bit blocks, which come from the cache after the first.
const MOST_ROWS: usize = 64;
/// Rows of the matrix that are stored side by side.
const OCTET: usize = 8;
/// Columns per tile.
const COLUMNS: usize = 128;
/// Blocks of 32 columns per tile.
const BLOCKS: usize = COLUMNS / BLOCK;

/// How the blocks of a format are laid out in a tile: `BlockTile` of `blocks.cu`.
struct TileLayout {
    /// The number of the format.
    number: u32,
    /// Bits of a code above the low four.
    high: usize,
    /// Words of scales per row.
    record: usize,
    /// Added to a code to make it unsigned.
    zero: i32,
}

impl TileLayout {
    fn of(format: Format) -> TileLayout {
        let (number, high, record) = match format {
            Format::Q4_0 => (0, 0, 2),
            Format::Q4_1 => (1, 0, 4),
            Format::Q5_0 => (2, 2, 2),
            Format::Q5_1 => (3, 2, 4),
            Format::Q8_0 => (4, 4, 2),
            Format::Q4K => (5, 0, 3),
            Format::Q5K => (6, 2, 3),
            Format::Q6K => (7, 2, 3),
        };
        TileLayout { number, high, record, zero: if format == Format::Q8_0 { 128 } else { format.zero() } }
    }

    /// Words per tile.
    fn words(&self) -> usize {
        COLUMNS + 32 * self.high + OCTET * self.record
    }

    /// Packs up to eight rows from `first` on.
    fn pack(&self, matrix: &QuantizedMatrix, first: usize, tiles: &mut [u32]) {
        for g in 0..OCTET.min(matrix.rows() - first) {
            for at in 0..matrix.width() / BLOCK {
                let (tile, word) = (&mut tiles[at / BLOCKS * self.words()..][..self.words()], at % BLOCKS);
                let block = matrix.block(first + g, at);
                for t in 0..4 {
                    let (mut low, mut high) = (0, 0);
                    // Four neighbors of each half are two pairs.
                    for x in 0..8 {
                        let code = (i32::from(block.codes[x / 4 * 16 + 4 * t + x % 4]) + self.zero) as u32;
                        low |= (code & 15) << (4 * (x / 2) + x % 2 * 16);
                        high |= (code >> 4) << (self.high * (x / 2) + x % 2 * 16);
                    }
                    let lane = 4 * g + t;
                    tile[4 * lane + word] = low;
                    match self.high {
                        0 => {}
                        2 => tile[COLUMNS + 2 * lane + word / 2] |= high << (8 * (word % 2)),
                        _ => tile[COLUMNS + 4 * lane + word] = high,
                    }
                }
                let scales = &mut tile[COLUMNS + 32 * self.high + g..];
                let halves = u32::from(block.scale.to_bits()) | u32::from(block.least.to_bits()) << 16;
                match self.record {
                    2 => scales[word / 2 * OCTET] |= halves << (word % 2 * 16),
                    4 => scales[word * OCTET] = halves,
                    _ => {
                        scales[0] = halves;
                        scales[(1 + word / 2) * OCTET] |= u32::from(u16::from_le_bytes(block.parts)) << (word % 2 * 16);
                    }
                }
            }
        }
    }
}

impl BlockMatrix {
    /// The pointer, after checking the shape.
    fn expect(&self, outputs: usize, inner: usize) -> u64 {
        assert_eq!([self.outputs, self.inner], [outputs, inner], "a matrix in blocks");
        self.words.ptr()
    }

    fn number(&self) -> Argument {
        U32(TileLayout::of(self.format).number)
    }

    /// Strips of two octets of rows; a block multiplies one strip.
    fn strips(&self) -> usize {
        self.outputs.div_ceil(2 * OCTET)
    }
}

impl Operations {
    /// Uploads a matrix in its blocks.
    pub fn upload_blocks(&self, matrix: &QuantizedMatrix) -> BlockMatrix {
        let (layout, [outputs, inner]) = (TileLayout::of(matrix.format()), [matrix.rows(), matrix.width()]);
        let octet = inner.div_ceil(COLUMNS) * layout.words();
        let mut words = vec![0; outputs.div_ceil(OCTET) * octet];
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let each = outputs.div_ceil(OCTET).div_ceil(threads).max(1);
        std::thread::scope(|scope| {
            for (part, words) in words.chunks_mut(each * octet).enumerate() {
                let layout = &layout;
                scope.spawn(move || {
                    let octets = words.chunks_exact_mut(octet).enumerate();
                    octets.for_each(|(at, to)| layout.pack(matrix, (part * each + at) * OCTET, to));
                });
            }
        });
        let words = self.upload(Kind::U32, &words, "a matrix in blocks");
        BlockMatrix { words, format: matrix.format(), outputs, inner }
    }

    /// The elements of a matrix in blocks, as activations.
    pub(super) fn widen_blocks(&self, w: &BlockMatrix) -> Array {
        let y = self.empty(self.activation_kind(), w.outputs * w.inner, "a matrix that is widened");
        self.rows_of_blocks(None, w, None, &y, 1.0, [1, 0]);
        y
    }

    /// [`embedding`](Operations::embedding) of a table in blocks; all of its rows if there are no ids.
    pub(super) fn rows_of_blocks(
        &self,
        ids: Option<&Array>,
        table: &BlockMatrix,
        positions: Option<&Array>,
        y: &Array,
        scale: f32,
        [length, start]: [usize; 2],
    ) {
        let (rows, width) = (ids.map_or(table.outputs, Array::len), table.inner);
        let positions = positions.map_or(0, |at| at.expect(Kind::F32, (start + length.min(rows)) * width));
        let ids = ids.map_or(0, |ids| ids.expect(Kind::U32, rows));
        let pointers = [ids, table.words.ptr(), positions, y.expect(self.activation_kind(), rows * width)];
        let numbers = [count(rows), count(width), F32(scale), count(length), count(start), table.number()];
        let grid = [self.blocks_of_eights(rows, width), 1];
        // SAFETY: `embedding_blocks(const u32* × 2, const float*, T*, u32, int, float, u32 × 3)`.
        unsafe { self.launch("embedding_blocks", grid, &[&pointers.map(Ptr)[..], &numbers].concat()) };
    }

    /// Whether a product of this many rows reads the blocks, eight rows at a time.
    fn reads_blocks(&self, rows: usize) -> bool {
        self.batch_invariant || rows <= MOST_ROWS
    }

    /// [`few_rows`](Operations::few_rows) with matrices in blocks, also for more rows.
    pub(super) fn few_rows_blocks(
        &self,
        x: FewRowsInput<'_>,
        rows: usize,
        products: &[(FewRowsProduct<'_>, &BlockMatrix)],
    ) -> bool {
        let (kind, inner) = (self.activation_kind(), products.first().map_or(0, |(_, w)| w.inner));
        if !self.reads_blocks(rows)
            || !self.is_few_rows_input(x, rows)
            || products.iter().any(|(to, _)| to.y.kind() != kind)
        {
            return false;
        }
        let residual = products.iter().find_map(|(product, _)| product.residual);
        assert!(products.len() <= 3 && (residual.is_none() || products.len() == 1), "three matrices, or a residual");
        let of = |get: &dyn Fn(&(FewRowsProduct<'_>, &BlockMatrix)) -> u64| {
            [0, 1, 2].map(|at| products.get(at).map_or(0, get))
        };
        let outputs = of(&|(product, _)| product.outputs as u64).map(|outputs| outputs as usize);
        let w = of(&|(product, w)| w.expect(product.outputs, inner));
        let bias = of(&|(product, _)| product.bias.map_or(0, |bias| bias.expect(kind, product.outputs)));
        let y = of(&|(product, _)| product.y.expect(kind, rows * product.outputs));
        let formats = [0, 1, 2].map(|at| products.get(at).map_or(U32(0), |(_, w)| w.number()));
        let residual = residual.map_or(0, |residual| residual.expect(kind, rows * outputs[0]));
        let (x, epsilon) = x.arguments(kind, rows, inner);
        let pointers = [&x[..], &w, &bias, &y, &[residual]].concat();
        let numbers = [&[rows, inner][..], &outputs].concat();
        let strips: usize = products.iter().map(|(_, w)| w.strips()).sum();
        let arguments = pointers.into_iter().map(Ptr).chain(numbers.into_iter().map(count));
        let arguments: Vec<Argument> = arguments.chain(formats).chain([epsilon]).collect();
        // SAFETY: `few_rows_blocks(const T*, const float* × 2, const u32* × 3, const T* × 3, T* × 3, const T*, u32,
        // int × 4, u32 × 3, float)`, a block for each 16 outputs of eight rows.
        unsafe { self.launch("few_rows_blocks", [strips * rows.div_ceil(8), 1], &arguments) };
        true
    }

    /// [`few_rows_gated`](Operations::few_rows_gated) with matrices in blocks of one format.
    pub(super) fn few_rows_blocks_gated(
        &self,
        x: FewRowsInput<'_>,
        rows: usize,
        [gate, up]: [(&BlockMatrix, Option<&Array>); 2],
        y: &Array,
        of: Gate,
    ) -> bool {
        let (kind, inner, outputs) = (self.activation_kind(), gate.0.inner, gate.0.outputs);
        if !self.reads_blocks(rows) || !self.is_few_rows_input(x, rows) || gate.0.format != up.0.format {
            return false;
        }
        let w = [gate, up].map(|(w, _)| w.expect(outputs, inner));
        let bias = [gate, up].map(|(_, bias)| bias.map_or(0, |bias| bias.expect(kind, outputs)));
        let (x, epsilon) = x.arguments(kind, rows, inner);
        let pointers = [&x[..], &w, &bias, &[y.expect(kind, rows * outputs)]].concat();
        let numbers = [count(rows), count(inner), count(outputs), gate.0.number(), U32(of as u32), epsilon];
        let grid = [outputs.div_ceil(OCTET) * rows.div_ceil(8), 1];
        let arguments: Vec<Argument> = pointers.into_iter().map(Ptr).chain(numbers).collect();
        // SAFETY: `few_rows_blocks_gated(const T*, const float* × 2, const u32* × 2, const T* × 2, T*, u32, int × 2,
        // u32, int, float)`, a block for each eight outputs of eight rows.
        unsafe { self.launch("few_rows_blocks_gated", grid, &arguments) };
        true
    }

    /// [`few_rows_appended`](Operations::few_rows_appended) with matrices in blocks, if the outputs are multiples of 16
    /// and half a head is a multiple of 8.
    pub(super) fn few_rows_blocks_appended(
        &self,
        x: FewRowsInput<'_>,
        matrices: [(&BlockMatrix, Option<&Array>); 3],
        q: &Array,
        outputs: [usize; 3],
        end: CacheEnd<'_>,
    ) -> bool {
        let (kind, rows, half) = (self.activation_kind(), end.batch.len(), end.half());
        let inner = matrices[0].0.inner;
        let whole = half.is_multiple_of(OCTET) && outputs.iter().all(|outputs| outputs.is_multiple_of(2 * OCTET));
        if rows > super::FEW_ROWS || !whole || !self.is_few_rows_input(x, rows) {
            return false;
        }
        assert!(half == 0 || outputs[..2].iter().all(|outputs| outputs % (2 * half) == 0), "whole heads");
        let of = |at: usize| (matrices[at], outputs[at]);
        let w = [0, 1, 2].map(of).map(|((w, _), outputs)| w.expect(outputs, inner));
        let bias = [0, 1, 2].map(of).map(|((_, bias), outputs)| bias.map_or(0, |bias| bias.expect(kind, outputs)));
        let (x, epsilon) = x.arguments(kind, rows, inner);
        let pointers = [&x[..], &w, &bias, &[q.expect(kind, rows * outputs[0])], &end.pointers(kind)].concat();
        let numbers = [&[rows, end.batch.room(), half, inner][..], &outputs].concat();
        let grid = [if rows == 0 { 0 } else { outputs.iter().sum::<usize>() / 16 }, 1];
        let arguments = pointers.into_iter().map(Ptr).chain(numbers.into_iter().map(count));
        let arguments = arguments.chain(matrices.map(|(w, _)| w.number())).chain([epsilon]);
        // SAFETY: `few_rows_blocks_appended(const T*, const float* × 2, const u32* × 3, const T* × 3, T* × 3,
        // const float* × 2, const u32*, u32 × 3, int × 4, u32 × 3, float)`, a block for each 16 outputs; positions are
        // within the room.
        unsafe { self.launch("few_rows_blocks_appended", grid, &arguments.collect::<Vec<_>>()) };
        true
    }
}
