//! Blocks to values: rows are widened for products that need the values themselves.

use super::kernel::{code_bytes, header_bytes, scale_bytes};
use super::{BLOCK, GROUP, QuantizedMatrix, SUPER_BLOCKS, ScaleKind, bytes};
use crate::isa::Isa;
use crate::pass::{self, Pass};
use half::f16;

impl QuantizedMatrix {
    /// Widens the rows from `row` on, as many as `out` holds.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn widen(&self, row: usize, out: &mut [f32]) {
        let rows = out.len() / self.width;
        assert!(row + rows <= self.rows, "row {} of {}", row + rows, self.rows);
        pass::run(Isa::best(), WidenRows { matrix: self, row, out });
    }
}

/// A block of 32 elements of a row, taken apart, for devices that pack it in a layout of their own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Block {
    /// The codes minus the zero point of the format.
    pub codes: [i8; BLOCK],
    /// The scale, of the block or of its super-block.
    pub scale: f16,
    /// The minimum of the block or of its super-block, or 0.
    pub least: f16,
    /// In super-blocks, the factors of the scale and of the minimum for the block, or the signed factors of the scale
    /// for its two halves.
    pub parts: [u8; 2],
}

struct WidenRows<'a> {
    matrix: &'a QuantizedMatrix,
    row: usize,
    out: &'a mut [f32],
}

impl Pass for WidenRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let matrix = self.matrix;
        for (r, out) in self.out.chunks_exact_mut(matrix.width).enumerate() {
            let row = self.row + r;
            for (block, out) in out.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
                // One instance for each number of bits, so that the loops over a block vectorize.
                *out = match matrix.format.bits() {
                    4 => matrix.codes::<4>(row, block),
                    5 => matrix.codes::<5>(row, block),
                    6 => matrix.codes::<6>(row, block),
                    _ => matrix.codes::<8>(row, block),
                };
                matrix.scale_block(row, block, out);
            }
        }
    }
}

impl QuantizedMatrix {
    /// The codes of a block minus their zero point, in the layout of `pack_codes`: with fewer than 8 bits, a line has
    /// eight codes of a row in a 32-bit word, with two neighbors 16 bits apart.
    #[inline(always)]
    fn codes<const BITS: u32>(&self, row: usize, block: usize) -> [f32; BLOCK] {
        let (group, r, blocks) = (row / GROUP, row % GROUP, self.width / BLOCK);
        let codes = &bytes(&self.codes)[(group * blocks + block) * code_bytes(BITS)..][..code_bytes(BITS)];
        let word = |at: usize| u32::from_le_bytes([codes[at], codes[at + 1], codes[at + 2], codes[at + 3]]);
        let zero = self.format.zero();
        let mut out = [0.0; BLOCK];
        if BITS == 8 {
            for (pair, out) in out.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                let at = pair * 2 * GROUP + 2 * r;
                *out = [codes[at], codes[at + 1]].map(|code| f32::from(code as i8));
            }
            return out;
        }
        for (line, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let low = word(line * 64 + 4 * r);
            // Planes of the upper bits: one or two for each code.
            let high = match BITS {
                5 => word(256 + 4 * r) >> (4 * line),
                6 => word(256 + line / 2 * 64 + 4 * r) >> (line % 2 * 8),
                _ => 0,
            };
            for (at, out) in out.iter_mut().enumerate() {
                let (pair, side) = (at as u32 / 2, at as u32 % 2 * 16);
                let low = low >> (side + 4 * pair) & 15;
                let high = match BITS {
                    5 => high >> (side + pair) & 1,
                    6 => high >> (side + 2 * pair) & 3,
                    _ => 0,
                };
                *out = ((low | high << 4) as i32 - zero) as f32;
            }
        }
        out
    }

    /// The offsets of the scales of a block of sixteen rows: those of its super-block, then its own.
    #[inline(always)]
    fn scales_at(&self, group: usize, block: usize) -> [usize; 2] {
        let (blocks, kind) = (self.width / BLOCK, self.format.kind());
        let supers = block / SUPER_BLOCKS + 1;
        let group_bytes = blocks * scale_bytes(kind) + blocks / SUPER_BLOCKS * header_bytes(kind);
        let headers = if header_bytes(kind) == 0 { 0 } else { supers * header_bytes(kind) };
        let from = group * group_bytes + headers + block * scale_bytes(kind);
        // Those of a super-block precede those of its first block.
        let header = (from - block % SUPER_BLOCKS * scale_bytes(kind)).saturating_sub(header_bytes(kind));
        [header, from]
    }

    /// A block of 32 elements of a row, taken apart.
    ///
    /// # Panics
    /// If there is no such block.
    pub fn block(&self, row: usize, block: usize) -> Block {
        assert!(row < self.rows && block < self.width / BLOCK, "block {block} of row {row}");
        let (r, kind, [header, from]) = (row % GROUP, self.format.kind(), self.scales_at(row / GROUP, block));
        let number = |at: usize| f16::from_le_bytes([self.scales[at], self.scales[at + 1]]);
        let codes = match self.format.bits() {
            4 => self.codes::<4>(row, block),
            5 => self.codes::<5>(row, block),
            6 => self.codes::<6>(row, block),
            _ => self.codes::<8>(row, block),
        };
        let [scale, least] = match kind {
            ScaleKind::Plain => [number(from + 2 * r), f16::ZERO],
            ScaleKind::Least => [number(from + 2 * r), number(from + 2 * GROUP + 2 * r)],
            ScaleKind::SuperLeast => [number(header + 2 * r), number(header + 2 * GROUP + 2 * r)],
            ScaleKind::SuperHalves => [number(header + 2 * r), f16::ZERO],
        };
        let parts = match kind {
            ScaleKind::Plain | ScaleKind::Least => [0, 0],
            ScaleKind::SuperLeast | ScaleKind::SuperHalves => [0, GROUP].map(|at| self.scales[from + at + r]),
        };
        Block { codes: codes.map(|code| code as i8), scale, least, parts }
    }

    /// Applies the scale and the minimum to the codes of a block, in the layout of `pack_scales`.
    #[inline(always)]
    fn scale_block(&self, row: usize, block: usize, out: &mut [f32; BLOCK]) {
        let (r, kind, [header, from]) = (row % GROUP, self.format.kind(), self.scales_at(row / GROUP, block));
        let number = |at: usize| f16::from_le_bytes([self.scales[at], self.scales[at + 1]]).to_f32();
        match kind {
            ScaleKind::Plain => {
                let scale = number(from + 2 * r);
                out.iter_mut().for_each(|x| *x *= scale);
            }
            ScaleKind::Least => {
                let (scale, least) = (number(from + 2 * r), number(from + 2 * GROUP + 2 * r));
                out.iter_mut().for_each(|x| *x = *x * scale + least);
            }
            ScaleKind::SuperLeast => {
                let [part, below] = [0, GROUP].map(|at| f32::from(self.scales[from + at + r]));
                let (scale, least) = (number(header + 2 * r) * part, number(header + 2 * GROUP + 2 * r) * below);
                out.iter_mut().for_each(|x| *x = *x * scale - least);
            }
            ScaleKind::SuperHalves => {
                for (half, out) in out.chunks_exact_mut(BLOCK / 2).enumerate() {
                    let scale = number(header + 2 * r) * f32::from(self.scales[from + half * GROUP + r] as i8);
                    out.iter_mut().for_each(|x| *x *= scale);
                }
            }
        }
    }
}
