//! Matrices packed once for many products with few or many rows: the layers of a model at inference. Sixteen columns of
//! the result are a panel, stored in the order in which products read it.
//!
//! Every element of a result is one chain of multiply-adds over the width in ascending order. Its bits depend neither
//! on the other rows nor on the threads, so a sequence has the same result alone and in a batch.

use crate::finish::Finish;
use crate::huge_pages::advise_huge_pages;
use crate::isa::Isa;
use crate::kernel::{Kernel, dispatch};
use crate::lanes::Lanes;
use crate::number::Element;
use crate::prefetch::{prefetch, prefetch_second};
use crate::team::Team;
use half::{bf16, f16};
use std::any::Any;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Columns of a panel.
const LANES: usize = 16;
/// Bytes of a cache line.
const LINE: usize = 64;
/// Panels multiplied at a time, by one task.
const PANELS: usize = 4;
/// Bytes of the rows of one task: a loaded panel serves as many rows as fit beside it in the second-level cache.
const ROW_BYTES: usize = 384 << 10;
/// Bytes of rows gathered at a time: few enough for the second-level cache, and enough to make up for panels that come
/// from further away.
const BLOCK_BYTES: usize = 1 << 20;
/// Elements of the width multiplied at a time: that part of a tile's rows stays in the first-level cache and that of
/// its panels in the second, and sums are reloaded from memory for the next part.
const DEPTH: usize = 512;
/// Rows of the tallest register tile: with four panels, 24 sums, four columns and one element of a row take 29 of 32
/// registers, and ten loads feed 24 multiply-adds. (14 rows by two panels need 16 loads for 28, which is as fast alone
/// and a fifth slower beside a busy sibling thread.)
const TALL: usize = 6;
/// How far ahead a panel is prefetched, in bytes. Each panel multiplied at a time is a separate stream.
const AHEAD: usize = 1024;

/// A matrix `W [O, I]` packed for `x · Wᵀ`.
///
/// ```
/// use qkv_simd::panels::{PackedMatrix, products};
/// use qkv_simd::{Isa, finish::Finish, team::Team};
/// let matrix = PackedMatrix::new(&[1.0f32, 2.0, 3.0, 4.0], 2);
/// let mut y = [0.0; 2];
/// products(Isa::best(), &Team::new(1), &[10.0, 1.0], &mut [(&matrix, &mut y, Finish::default())]);
/// assert_eq!(y, [12.0, 34.0]);
/// ```
#[derive(Clone, Debug)]
pub struct PackedMatrix<T> {
    rows: usize,
    width: usize,
    /// `[⌈O/16⌉, I, 16]`, with zeros for missing rows, from `start` on.
    memory: Vec<T>,
    /// The first element, at the start of a cache line: a panel is read by whole lines.
    start: usize,
}

/// Packs rows of a type.
type Packing<T> = fn(&[T], usize) -> PackedMatrix<T>;

/// Packing for each type. These functions are not generic, so they are compiled here and not in the crates that call
/// [`PackedMatrix::new`], which may be unoptimized.
macro_rules! packing {
    ($($name:ident $T:ty),*) => {
        $(fn $name(elements: &[$T], width: usize) -> PackedMatrix<$T> {
            PackedMatrix::packed(elements, width)
        })*
    };
}

packing!(packed_f32 f32, packed_f64 f64, packed_bf16 bf16, packed_f16 f16);

impl<T: PartialEq> PartialEq for PackedMatrix<T> {
    fn eq(&self, other: &Self) -> bool {
        [self.rows, self.width] == [other.rows, other.width] && self.panels() == other.panels()
    }
}

impl<T> PackedMatrix<T> {
    /// The elements, panel by panel.
    fn panels(&self) -> &[T] {
        &self.memory[self.start..][..self.rows.div_ceil(LANES) * LANES * self.width]
    }

    /// The elements of a panel: sixteen rows, column by column.
    #[cfg(feature = "matmul")]
    pub(crate) fn panel(&self, at: usize) -> &[T] {
        &self.panels()[at * LANES * self.width..][..LANES * self.width]
    }
}

impl<T: Element> PackedMatrix<T> {
    /// Packs rows of `width` elements.
    ///
    /// # Panics
    /// If the elements are not whole rows.
    pub fn new(elements: &[T], width: usize) -> Self {
        let of_types: [&dyn Any; 4] = [
            &(packed_f32 as Packing<f32>),
            &(packed_f64 as Packing<f64>),
            &(packed_bf16 as Packing<bf16>),
            &(packed_f16 as Packing<f16>),
        ];
        let packing = of_types.iter().find_map(|packing| packing.downcast_ref::<Packing<T>>());
        packing.expect("an element is of one of four types")(elements, width)
    }

    fn packed(elements: &[T], width: usize) -> Self {
        assert!(width > 0 && elements.len().is_multiple_of(width), "whole rows of {width} elements");
        let rows = elements.len() / width;
        let mut memory = vec![T::default(); rows.div_ceil(LANES) * LANES * width + LINE / size_of::<T>()];
        advise_huge_pages(&mut memory);
        let start = memory.as_ptr().align_offset(LINE).min(LINE / size_of::<T>());
        for (panel, from) in memory[start..].chunks_exact_mut(LANES * width).zip(elements.chunks(LANES * width)) {
            // One part of the width at a time, which stays in the first-level cache until all rows are in it.
            for (at, panel) in panel.chunks_mut(DEPTH * LANES).enumerate() {
                for (r, row) in from.chunks_exact(width).enumerate() {
                    let part = &row[at * DEPTH..][..panel.len() / LANES];
                    part.iter().enumerate().for_each(|(k, &x)| panel[k * LANES + r] = x);
                }
            }
        }
        PackedMatrix { rows, width, memory, start }
    }

    /// The number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The number of columns.
    pub fn width(&self) -> usize {
        self.width
    }

    /// The bytes that a product reads.
    pub fn bytes(&self) -> usize {
        size_of_val(self.panels())
    }
}

impl<T: Element<Acc = f32>> PackedMatrix<T> {
    /// Writes the rows from `first` on, widened, to `out`.
    ///
    /// # Panics
    /// If `out` does not hold whole rows, or holds more than there are.
    pub fn unpack(&self, isa: Isa, first: usize, out: &mut [f32]) {
        let fits = out.len().is_multiple_of(self.width) && first + out.len() / self.width <= self.rows;
        assert!(fits, "rows from {first} on, of {}", self.rows);
        dispatch(isa, Unpack { matrix: self, first, out });
    }
}

/// Writes rows of a packed matrix.
struct Unpack<'a, T> {
    matrix: &'a PackedMatrix<T>,
    first: usize,
    out: &'a mut [f32],
}

impl<T: Element<Acc = f32>> Kernel<f32> for Unpack<'_, T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes<Scalar = f32>>(self) {
        let (width, last) = (self.matrix.width, self.first + self.out.len() / self.matrix.width);
        let mut square = [[0.0f32; LANES]; LANES];
        for panel in self.first / LANES..last.div_ceil(LANES) {
            let elements = &self.matrix.panels()[panel * LANES * width..][..LANES * width];
            let rows = self.first.max(panel * LANES)..last.min((panel + 1) * LANES);
            for (at, columns) in elements.chunks(LANES * LANES).enumerate() {
                for (to, column) in square.iter_mut().zip(columns.chunks_exact(LANES)) {
                    // SAFETY: a whole chunk; the caller guarantees the instruction set.
                    unsafe { T::lanes::<V>(column.as_ptr(), LANES).store(to.as_mut_ptr()) };
                }
                for row in rows.clone() {
                    let to = &mut self.out[(row - self.first) * width + at * LANES..][..columns.len() / LANES];
                    to.iter_mut().zip(&square).for_each(|(to, column)| *to = column[row % LANES]);
                }
            }
        }
    }
}

/// The outputs that tasks write to.
struct Outputs(Vec<*mut f32>);

// SAFETY: each task writes its own rows and panels, which no other task accesses.
unsafe impl Sync for Outputs {}

impl Outputs {
    fn pointer(&self, at: usize) -> *mut f32 {
        self.0[at]
    }
}

/// `y [R, O] = x · Wᵀ`, [finished](Finish), for several matrices that share the rows `x [R, I]`, as one piece of work
/// for the team.
///
/// # Panics
/// If a matrix has a different width, or an output, a bias or a residual has the wrong length.
pub fn products<T: Element<Acc = f32>>(
    isa: Isa,
    team: &Team,
    x: &[f32],
    outputs: &mut [(&PackedMatrix<T>, &mut [f32], Finish<'_>)],
) {
    let Some(width) = outputs.first().map(|(matrix, ..)| matrix.width) else { return };
    assert!(x.len().is_multiple_of(width), "whole rows of {width} elements");
    let rows = x.len() / width;
    let pointers = Outputs(outputs.iter_mut().map(|(_, y, _)| y.as_mut_ptr()).collect());
    let matrices: Vec<(&PackedMatrix<T>, Finish<'_>)> =
        outputs.iter().map(|(matrix, _, how)| (*matrix, *how)).collect();
    let mut ends = Vec::with_capacity(matrices.len());
    let mut total = 0;
    for (matrix, y, finish) in outputs.iter() {
        let fits = y.len() == rows * matrix.rows && finish.fits(rows, matrix.rows);
        assert!(matrix.width == width && fits, "the product does not fit");
        total += matrix.rows.div_ceil(PANELS * LANES);
        ends.push(total);
    }
    let each = row_block(width);
    // A thread's next task is probably the one `threads` tasks later.
    let ahead = team.threads() * PANELS;
    team.run(total * rows.div_ceil(each), |task| {
        let (block, column) = (task / total, task % total);
        let at = ends.partition_point(|&end| end <= column);
        let (matrix, finish) = matrices[at];
        let panel = (column - if at == 0 { 0 } else { ends[at - 1] }) * PANELS;
        let rows = block * each..rows.min((block + 1) * each);
        let panels = panel..(panel + PANELS).min(matrix.rows.div_ceil(LANES));
        let (out, stride) = (pointers.pointer(at), matrix.rows);
        dispatch(isa, Columns { matrix, finish, x, rows, panels, out, stride, ahead });
    });
}

/// Some columns of [`products`] of one matrix: `y [R, columns] = x · Wᵀ + b`. The first column starts a panel, and the
/// last one ends a panel or the matrix.
///
/// # Panics
/// If the matrix has a different width or no such columns, or the output or the bias has the wrong length.
pub fn product_of_columns<T: Element<Acc = f32>>(
    isa: Isa,
    team: &Team,
    x: &[f32],
    (matrix, bias): (&PackedMatrix<T>, Option<&[f32]>),
    columns: Range<usize>,
    y: &mut [f32],
) {
    let (width, count) = (matrix.width, columns.len());
    let rows = x.len() / width;
    let whole =
        columns.start.is_multiple_of(LANES) && (columns.end == matrix.rows || columns.end.is_multiple_of(LANES));
    let fits = x.len() == rows * width && y.len() == rows * count && bias.is_none_or(|bias| bias.len() == matrix.rows);
    assert!(whole && columns.end <= matrix.rows && fits, "the product does not fit");
    let finish = Finish { bias, ..Finish::default() };
    let (first, last) = (columns.start / LANES, columns.end.div_ceil(LANES));
    let (each, groups) = (row_block(width), (last - first).div_ceil(PANELS));
    let ahead = team.threads() * PANELS;
    // The kernel counts columns from the start of the matrix.
    let pointers = Outputs(vec![y.as_mut_ptr().wrapping_sub(columns.start)]);
    team.run(groups * rows.div_ceil(each), |task| {
        let (block, panel) = (task / groups, first + task % groups * PANELS);
        let rows = block * each..rows.min((block + 1) * each);
        let (panels, out) = (panel..(panel + PANELS).min(last), pointers.pointer(0));
        dispatch(isa, Columns { matrix, finish, x, rows, panels, out, stride: count, ahead });
    });
}

/// Rows of one task.
fn row_block(width: usize) -> usize {
    (ROW_BYTES / (4 * width) / TALL).max(1) * TALL
}

/// [`products`] of rows that are gathered a block at a time and multiplied while they are in the cache: the windows of
/// images. `gather` writes a range of rows; `block` is a buffer of [`block_len`] elements.
///
/// # Panics
/// As [`products`], or if the block is too short.
pub fn gathered_products<T: Element<Acc = f32>>(
    isa: Isa,
    team: &Team,
    rows: usize,
    gather: &(dyn Fn(Range<usize>, &mut [f32]) + Sync),
    block: &mut [f32],
    (matrix, y, finish): (&PackedMatrix<T>, &mut [f32], Finish<'_>),
) {
    let (width, across) = (matrix.width, matrix.rows);
    assert!(y.len() == rows * across && finish.fits(rows, across), "the product does not fit");
    let each = block_rows(width);
    for start in (0..rows).step_by(each) {
        let count = each.min(rows - start);
        // One piece per thread; its lock is never contended.
        let piece = count.div_ceil(team.threads());
        let pieces: Vec<_> = block[..count * width].chunks_mut(piece * width).map(Mutex::new).collect();
        team.run(pieces.len(), |at| {
            let first = start + at * piece;
            let mut to = pieces[at].lock().unwrap_or_else(PoisonError::into_inner);
            gather(first..(first + piece).min(start + count), &mut to);
        });
        drop(pieces);
        let part = start * across..(start + count) * across;
        let finish = Finish { residual: finish.residual.map(|all| &all[part.clone()]), ..finish };
        products(isa, team, &block[..count * width], &mut [(matrix, &mut y[part], finish)]);
    }
}

/// Rows of this width that are gathered at a time.
fn block_rows(width: usize) -> usize {
    (BLOCK_BYTES / (4 * width) / TALL).max(1) * TALL
}

/// Elements of the buffer for [`gathered_products`] of `rows` rows.
pub fn block_len(rows: usize, width: usize) -> usize {
    rows.min(block_rows(width)) * width
}

/// Some rows of the result in some panels.
struct Columns<'a, T> {
    matrix: &'a PackedMatrix<T>,
    finish: Finish<'a>,
    x: &'a [f32],
    rows: Range<usize>,
    panels: Range<usize>,
    /// Where column 0 of row 0 is.
    out: *mut f32,
    /// The distance between rows of the result.
    stride: usize,
    /// How many panels ahead this thread's next task probably is.
    ahead: usize,
}

impl<T: Element<Acc = f32>> Kernel<f32> for Columns<'_, T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes<Scalar = f32>>(self) {
        // SAFETY: `products` checked every length; the caller guarantees the instruction set.
        unsafe {
            let mut panel = self.panels.start;
            while panel < self.panels.end {
                if V::TILE_PANELS >= 4 && self.panels.end - panel >= 4 {
                    self.column::<V, 4>(panel);
                    panel += 4;
                } else {
                    self.column::<V, 1>(panel);
                    panel += 1;
                }
            }
        }
    }
}

impl<T: Element<Acc = f32>> Columns<'_, T> {
    /// All rows in some panels, a part of the width at a time.
    #[inline(always)]
    unsafe fn column<V: Lanes<Scalar = f32>, const PANELS: usize>(&self, panel: usize) {
        let width = self.matrix.width;
        for start in (0..width).step_by(DEPTH) {
            let depth = start..(start + DEPTH).min(width);
            let mut row = self.rows.start;
            while row < self.rows.end {
                // SAFETY: as in `run`.
                unsafe {
                    row += match self.rows.end - row {
                        TALL.. if V::TILE_ROWS >= TALL => self.tile::<V, TALL, PANELS>(row, panel, depth.clone()),
                        4.. if V::TILE_ROWS >= TALL => self.tile::<V, 4, PANELS>(row, panel, depth.clone()),
                        2.. => self.tile::<V, 2, PANELS>(row, panel, depth.clone()),
                        _ => self.tile::<V, 1, PANELS>(row, panel, depth.clone()),
                    };
                }
            }
        }
    }

    /// One register tile over a part of the width, whose sums continue those of the previous part. Returns its rows.
    #[allow(clippy::needless_range_loop)]
    #[inline(always)]
    unsafe fn tile<V: Lanes<Scalar = f32>, const ROWS: usize, const PANELS: usize>(
        &self,
        row: usize,
        panel: usize,
        depth: Range<usize>,
    ) -> usize {
        let (width, across) = (self.matrix.width, self.matrix.rows);
        // SAFETY: as in `run`.
        unsafe {
            let mut x = self.x.as_ptr().add(row * width + depth.start);
            let mut w = self.matrix.panels().as_ptr().add((panel * width + depth.start) * LANES);
            let mut sums = [[V::splat(0.0); PANELS]; ROWS];
            // Each of the first tiles of rows prefetches a panel of the next task.
            let later = panel + self.ahead + (row - self.rows.start) / TALL;
            let is_there = row - self.rows.start < PANELS * TALL && later < self.matrix.rows.div_ceil(LANES);
            let (mut next, step) = match is_there {
                true => (w.wrapping_add((later - panel) * width * LANES), LANES),
                false => (w, 0),
            };
            // The sums go through memory before and after the loop, in loops small enough to be unrolled: otherwise
            // they would be kept in memory inside it, too. That memory is not cleared: every lane is stored before it
            // is loaded.
            let mut lanes = [[[MaybeUninit::<f32>::uninit(); LANES]; PANELS]; ROWS];
            if depth.start > 0 {
                for (r, lanes) in lanes.iter_mut().enumerate() {
                    for (p, lanes) in lanes.iter_mut().enumerate() {
                        let first = (panel + p) * LANES;
                        let from = self.out.wrapping_add((row + r) * self.stride + first);
                        f32::lanes::<V>(from, LANES.min(across - first)).store(lanes.as_mut_ptr().cast());
                    }
                }
                for r in 0..ROWS {
                    for p in 0..PANELS {
                        sums[r][p] = V::load(lanes[r][p].as_ptr().cast());
                    }
                }
            }
            for _ in depth.clone() {
                let mut columns = [V::splat(0.0); PANELS];
                for (p, column) in columns.iter_mut().enumerate() {
                    let from = w.add(p * width * LANES);
                    if ROWS == 1 {
                        prefetch(from.wrapping_byte_add(AHEAD));
                    }
                    *column = T::lanes::<V>(from, LANES);
                }
                if ROWS == TALL {
                    prefetch_second(next);
                    next = next.wrapping_add(step);
                }
                for r in 0..ROWS {
                    let x = V::splat(*x.add(r * width));
                    for p in 0..PANELS {
                        sums[r][p] = x.mul_add(columns[p], sums[r][p]);
                    }
                }
                x = x.add(1);
                w = w.add(LANES);
            }
            for r in 0..ROWS {
                for p in 0..PANELS {
                    sums[r][p].store(lanes[r][p].as_mut_ptr().cast());
                }
            }
            for (r, lanes) in lanes.iter().enumerate() {
                for (p, lanes) in lanes.iter().enumerate() {
                    let (sum, first) = (V::load(lanes.as_ptr().cast()), (panel + p) * LANES);
                    let (out, left) =
                        (self.out.wrapping_add((row + r) * self.stride + first), LANES.min(across - first));
                    let y = match depth.end == width {
                        true => self.finish.apply(sum, [row + r, across], [first, left]),
                        false => sum,
                    };
                    if left == LANES { y.store(out) } else { y.store_first(out, left) }
                }
            }
        }
        ROWS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise<T: Element>(count: usize, salt: usize) -> Vec<T> {
        (0..count).map(|at| T::of_f64(((at + salt) * 2_654_435_761 % 513) as f64 / 256.0 - 1.0)).collect()
    }

    fn products_are_sums<T: Element<Acc = f32>>() {
        for (out, width) in [(1, 1), (16, 7), (40, 64), (129, 33), (33, 600)] {
            let weights = noise::<T>(out * width, 3);
            let matrix = PackedMatrix::new(&weights, width);
            for rows in [1, 2, 5, 13, 100] {
                let x = noise::<f32>(rows * width, 5);
                let truth = |at: usize| -> f64 {
                    let (x, weights) = (&x[at / out * width..][..width], &weights[at % out * width..][..width]);
                    x.iter().zip(weights).map(|(&x, &weight)| f64::from(x) * weight.to_f64()).sum()
                };
                let truths: Vec<f64> = (0..rows * out).map(truth).collect();
                for isa in Isa::available() {
                    let run = |team: &Team, x: &[f32]| {
                        let mut y = vec![f32::NAN; x.len() / width * out];
                        products(isa, team, x, &mut [(&matrix, &mut y, Finish::default())]);
                        y
                    };
                    let y = run(&Team::new(1), &x);
                    assert_eq!(y, run(&Team::new(3), &x), "{isa} {}: the team changes nothing", T::NAME);
                    for r in [0, rows / 2, rows - 1] {
                        let alone = run(&Team::new(1), &x[r * width..][..width]);
                        assert_eq!(y[r * out..][..out], alone, "{isa} {}: a row's bits are its own", T::NAME);
                    }
                    for (&found, truth) in y.iter().zip(&truths) {
                        assert!((f64::from(found) - truth).abs() <= 1e-6 * (1.0 + width as f64), "{isa} {}", T::NAME);
                    }
                }
            }
        }
    }

    fn rows_come_back<T: Element<Acc = f32>>() {
        for (rows, width) in [(1, 1), (16, 7), (40, 64), (129, 33)] {
            let elements = noise::<T>(rows * width, 3);
            let widened: Vec<f32> = elements.iter().map(|x| x.widen()).collect();
            let matrix = PackedMatrix::new(&elements, width);
            for isa in Isa::available() {
                for (first, last) in [(0, rows), (rows / 2, rows), (rows / 3, rows / 3 + 1), (rows, rows)] {
                    let mut out = vec![f32::NAN; (last - first) * width];
                    matrix.unpack(isa, first, &mut out);
                    assert_eq!(out, widened[first * width..last * width], "{isa} {} {rows} {width}", T::NAME);
                }
            }
        }
    }

    #[test]
    fn a_packed_matrix_gives_back_its_rows() {
        rows_come_back::<f32>();
        rows_come_back::<bf16>();
        rows_come_back::<f16>();
    }

    #[test]
    fn products_are_sums_over_the_width_whatever_is_beside_them() {
        products_are_sums::<f32>();
        products_are_sums::<bf16>();
        products_are_sums::<f16>();
    }

    #[test]
    fn a_finished_product_has_the_bits_of_separate_passes() {
        let (rows, out, width) = (13, 70, 20);
        let matrix = PackedMatrix::new(&noise::<f32>(out * width, 3), width);
        let [x, bias, residual] = [rows * width, out, rows * out].map(|count| noise::<f32>(count, count));
        for isa in Isa::available() {
            let run = |finish| {
                let mut y = vec![0.0; rows * out];
                products(isa, &Team::new(1), &x, &mut [(&matrix, &mut y, finish)]);
                y
            };
            let plain = run(Finish::default());
            let expected = plain.iter().enumerate().map(|(at, y)| {
                let sum = y + bias[at % out];
                (if sum > 0.0 { sum } else { 0.0 }) + residual[at]
            });
            let all = Finish { bias: Some(&bias), relu: true, residual: Some(&residual), relu_of_sum: false };
            assert!(run(all).into_iter().eq(expected.clone()), "{isa}");
            let expected = expected.map(|sum| if sum > 0.0 { sum } else { 0.0 });
            assert!(run(Finish { relu_of_sum: true, ..all }).into_iter().eq(expected), "{isa}");
        }
    }

    #[test]
    fn rows_that_are_gathered_have_the_bits_of_rows_that_are_there() {
        // More rows than a block has, and not a whole number of blocks.
        let (out, width) = (21, 1 << 14);
        let rows = 2 * block_rows(width) + 5;
        let matrix = PackedMatrix::new(&noise::<f32>(out * width, 3), width);
        let [x, bias, residual] = [rows * width, out, rows * out].map(|count| noise::<f32>(count, count));
        let finish = Finish { bias: Some(&bias), relu: false, residual: Some(&residual), relu_of_sum: true };
        let mut expected = vec![0.0; rows * out];
        products(Isa::best(), &Team::new(1), &x, &mut [(&matrix, &mut expected, finish)]);
        for threads in [1, 3] {
            let gather = |range: Range<usize>, to: &mut [f32]| {
                to.copy_from_slice(&x[range.start * width..range.end * width]);
            };
            let (mut block, mut y) = (vec![f32::NAN; block_len(rows, width)], vec![f32::NAN; rows * out]);
            let output = (&matrix, &mut y[..], finish);
            gathered_products(Isa::best(), &Team::new(threads), rows, &gather, &mut block, output);
            assert_eq!(y, expected, "{threads}");
        }
    }

    #[test]
    fn several_matrices_share_the_rows() {
        let matrices: Vec<PackedMatrix<f32>> =
            [3, 70, 16].map(|out| PackedMatrix::new(&noise(out * 20, out), 20)).into();
        let (x, team) = (noise::<f32>(5 * 20, 1), Team::new(2));
        let mut outputs: Vec<Vec<f32>> = matrices.iter().map(|matrix| vec![0.0; 5 * matrix.rows]).collect();
        let pairs = matrices.iter().zip(&mut outputs);
        let mut pairs: Vec<_> = pairs.map(|(matrix, y)| (matrix, &mut y[..], Finish::default())).collect();
        products(Isa::best(), &team, &x, &mut pairs);
        for (matrix, y) in matrices.iter().zip(&outputs) {
            let mut alone = vec![0.0; y.len()];
            products(Isa::best(), &team, &x, &mut [(matrix, &mut alone, Finish::default())]);
            assert_eq!(*y, alone);
        }
    }
}
