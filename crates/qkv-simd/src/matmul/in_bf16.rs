//! Products of f32 matrices that are rounded to bf16 while they are packed.

use super::parts::Columns;
use super::{Operand, PackBuffers, Product, RightOperand};
use crate::bf16_gemm::{BLOCK, Bf16Gemm, DEPTH, F32Rows, PackedA, PackedB, SIDE, padded_depth};
use crate::isa::Isa;
use crate::product::Target;
use crate::shared::for_each_task;
use half::bf16;
use std::ops::Range;

/// Rows of `C` in one task. They and the panels beside them stay in the second-level cache.
const ROWS: usize = 8 * SIDE;

/// Panels of `B` in one task.
const PANELS: usize = 8;

/// Blocks of the longer side that are multiplied with all blocks of the other side before the next ones.
const TOGETHER: usize = 16;

/// Chunks of the depth that are multiplied at a time: 1,024 elements, or 256 KiB of either operand in one task.
const CHUNKS: usize = 32;

/// Bytes of `B` that are packed at a time, unless a block of panels is longer: the logits of a large vocabulary would
/// otherwise need a copy of the whole token table.
const RIGHT_BYTES: usize = if cfg!(test) { 64 << 10 } else { 8 << 20 };

/// Whether an instruction set has [`matmul_bf16`].
pub fn has_bf16_products(isa: Isa) -> bool {
    Bf16Gemm::available(isa)
}

/// [`matmul`](super::matmul) with operands rounded to bf16, accumulated in f32. Returns `false`, and does nothing, if
/// this CPU has no bf16 products.
///
/// # Panics
/// If the shapes do not fit.
pub fn matmul_bf16(isa: Isa, product: &mut Product<'_, f32>, packed: &mut PackBuffers, threads: usize) -> bool {
    if !Bf16Gemm::available(isa) {
        return false;
    }
    let (m, n, k) = product.shape();
    let Product { c, a, b, add } = product;
    let add = *add;
    if m == 0 || n == 0 {
        return true;
    }
    if k == 0 {
        if !add {
            c.fill(0.0);
        }
        return true;
    }
    let threads = if m * n * k > 1 << 20 { threads } else { 1 };
    let (pitch, chunks, panels) = (left_pitch(k), padded_depth(k) / DEPTH, n.div_ceil(SIDE));
    // Fewer panels per task if there would be too few tasks.
    let (down, enough) = (m.div_ceil(ROWS), 3 * threads);
    let each = [PANELS, PANELS / 2].into_iter().find(|each| down * panels.div_ceil(*each) >= enough).unwrap_or(2);
    let (across, size) = (panels.div_ceil(each), each.min(panels) * chunks * BLOCK);
    let held = (RIGHT_BYTES / (size * size_of::<bf16>())).max(1);
    let PackBuffers { left, right: right_buffer } = packed;
    let left = left.blocks(down, ROWS.min(m.div_ceil(SIDE) * SIDE) * pitch);
    let c = Columns::new(c, n);
    for start in (0..across).step_by(held) {
        let order = TaskOrder { down, across: held.min(across - start) };
        let right = right_buffer.blocks(order.across, size);
        for_each_task(threads, order.down * order.across, Vec::new, |tile: &mut Vec<f32>, task| {
            let (row_block, panel_block) = order.of(task);
            let (row, first) = (row_block * ROWS, (start + panel_block) * each);
            let (rows, panels) = (ROWS.min(m - row), each.min(panels - first));
            let columns = first * SIDE..((first + panels) * SIDE).min(n);
            let gemm = Bf16Gemm::new(isa).expect("just checked to be available");
            let (right, _) = right.get(panel_block, |out| pack_b(&gemm, b, columns.clone(), out));
            let (left, _) = left.get(row_block, |out| pack_a(&gemm, a, row..row + rows, out));
            let left = PackedA { data: left, row: pitch };
            let right = PackedB { data: right, chunks, non_temporal: false };
            let (width, kept) = (panels * SIDE, columns.len());
            let whole = rows % SIDE == 0 && kept == width;
            if !whole {
                // Through a tile of whole panels.
                tile.resize(ROWS * width, 0.0);
                for (r, tile) in tile.chunks_exact_mut(width).take(if add { rows } else { 0 }).enumerate() {
                    // SAFETY: these rows and columns belong to this task alone.
                    tile[..kept].copy_from_slice(unsafe { c.part(row + r, &columns) });
                }
            }
            for from in (0..chunks).step_by(CHUNKS) {
                let (depth, add) = (from..(from + CHUNKS).min(chunks), add || from > 0);
                if whole {
                    // SAFETY: as above.
                    unsafe {
                        gemm.product_raw(c.target(row..row + rows, &columns, add), left, right, rows, 0..panels, depth)
                    };
                } else {
                    let to = if add { Target::accumulate(tile, width) } else { Target::overwrite(tile, width) };
                    gemm.product(to, left, right, rows, 0..panels, depth);
                }
            }
            for (r, tile) in tile.chunks_exact(width).take(if whole { 0 } else { rows }).enumerate() {
                // SAFETY: as above.
                unsafe { c.part(row + r, &columns) }.copy_from_slice(&tile[..kept]);
            }
        });
    }
    true
}

/// The order in which blocks of rows and of panels are multiplied: along the longer side, [`TOGETHER`] blocks of it
/// with all blocks of the other side, then the next ones. Threads that start together pack different blocks, and only a
/// few blocks at a time are read repeatedly.
struct TaskOrder {
    down: usize,
    across: usize,
}

impl TaskOrder {
    /// The block of rows and the block of panels of a task.
    fn of(&self, task: usize) -> (usize, usize) {
        let (long, short) = (self.down.max(self.across), self.down.min(self.across));
        let first = task / (short * TOGETHER) * TOGETHER;
        let (within, width) = (task - first * short, TOGETHER.min(long - first));
        let (along, beside) = (first + within % width, within / width);
        if self.down > self.across { (along, beside) } else { (beside, along) }
    }
}

/// Packs rows of A, with zeros up to whole tiles.
fn pack_a(gemm: &Bf16Gemm, a: &Operand<'_, f32>, rows: Range<usize>, out: &mut [bf16]) -> bool {
    let pitch = left_pitch(a.columns);
    if a.transposed {
        gemm.pack_a_f32_transposed(F32Rows::new(&a.data[rows.start..], a.pitch, a.columns, rows.len()), out, pitch);
        return true;
    }
    for (at, out) in rows.clone().step_by(SIDE).zip(out.chunks_exact_mut(SIDE * pitch)) {
        let count = SIDE.min(rows.end - at);
        gemm.pack_a_f32(F32Rows::new(&a.data[at * a.pitch..], a.pitch, count, a.columns), out, pitch);
    }
    true
}

/// Packs columns of B, of which the first starts a panel, with zeros up to whole panels.
fn pack_b(gemm: &Bf16Gemm, b: &RightOperand<'_, f32>, columns: Range<usize>, out: &mut [bf16]) -> bool {
    let b = match b {
        RightOperand::Packed(matrix) => {
            gemm.pack_b_columns(matrix, columns, out);
            return true;
        }
        RightOperand::PackedTransposed(matrix) => {
            gemm.pack_b_panels(matrix, columns.start / SIDE..columns.end.div_ceil(SIDE), out);
            return true;
        }
        RightOperand::Rows(rows) => rows,
    };
    if !b.transposed {
        gemm.pack_b_f32(F32Rows::new(&b.data[columns.start..], b.pitch, b.rows, columns.len()), out);
        return true;
    }
    for (at, out) in columns.clone().step_by(SIDE).zip(out.chunks_exact_mut(padded_depth(b.rows) * SIDE)) {
        let count = SIDE.min(columns.end - at);
        gemm.pack_b_f32_transposed(F32Rows::new(&b.data[at * b.pitch..], b.pitch, count, b.rows), out);
    }
    true
}

/// The distance between packed rows of A. An odd number of cache lines, so that the rows of a tile are in different
/// sets of the first-level cache.
fn left_pitch(depth: usize) -> usize {
    ((padded_depth(depth) / DEPTH) | 1) * DEPTH
}
