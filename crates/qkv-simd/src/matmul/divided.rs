//! Products in f32 or f64 with the kernels of the `gemm` crate. Each is divided into parts of its result, and the parts
//! of all products that are computed together are tasks of one job: no thread waits for another before the end, which
//! the threads of `gemm` do for every part of the depth.

use super::{Operand, Product, RightOperand};
use crate::number::Real;
use crate::shared::for_each_share;
use gemm_common::Parallelism;
use std::any::Any;
use std::ops::Range;

/// Products below this many multiplications are one task: waking another thread costs more than it saves.
const UNDIVIDED: usize = 1 << 18;

/// Parts have multiples of so many rows and columns, except at the end.
const UNIT: [usize; 2] = [8, 16];

/// What packing one element of `B`, or of a transposed `A`, costs, in multiplications; any other `A` is only read.
const PACKING: usize = 24;
const READING: usize = 8;

/// If a result has at most this many rows and columns, `gemm` divides the depth by 512, otherwise by the size of the
/// caches. Parts never have that few of both, so that their sums have the order of the whole.
const SMALL: usize = 64;

/// The number of elements of a result up to which `gemm` has other kernels.
const TINY: usize = 256;

/// Computes products whose results do not depend on one another, in f32 or f64. The bits do not depend on the number of
/// threads.
///
/// ```
/// use qkv_simd::matmul::{Operand, Product, matmul};
/// let (a, b, mut c) = ([1.0f32, 2.0], [10.0f32, 20.0], [0.0]);
/// let (a, b) = (Operand::rows(&a, 1, 2), Operand::rows(&b, 1, 2).transposed());
/// matmul(&mut [Product { c: &mut c, a, b: b.into(), add: false }], 1);
/// assert_eq!(c, [50.0]);
/// ```
///
/// # Panics
/// If the shapes of a product do not fit, or its right operand is packed.
pub fn matmul<T: Real>(products: &mut [Product<'_, T>], threads: usize) {
    let parts: Vec<Parts<'_, T>> = products.iter_mut().map(|product| Parts::new(product, threads)).collect();
    let tasks = parts.iter().map(|parts| parts.grid.tasks()).sum();
    for_each_share(threads, tasks, |mut task| {
        for parts in &parts {
            if task < parts.grid.tasks() {
                // SAFETY: every part of every product is one task.
                return unsafe { parts.compute(task) };
            }
            task -= parts.grid.tasks();
        }
    });
}

/// A product in parts.
struct Parts<'a, T> {
    c: *mut T,
    a: Operand<'a, T>,
    b: Operand<'a, T>,
    add: bool,
    grid: Grid,
}

// SAFETY: the caller of `compute` guarantees that no part is computed twice at a time.
unsafe impl<T: Send + Sync> Sync for Parts<'_, T> {}

impl<'a, T: Real> Parts<'a, T> {
    fn new(product: &'a mut Product<'_, T>, threads: usize) -> Self {
        let (m, n, k) = product.shape();
        let RightOperand::Rows(b) = product.b else { panic!("only products in bf16 have packed operands") };
        let threads = if m.saturating_mul(n).saturating_mul(k) > UNDIVIDED { threads } else { 1 };
        let operands = [if product.a.transposed { PACKING } else { READING }, PACKING];
        let grid = Grid::new([m, n], operands, threads);
        Parts { c: product.c.as_mut_ptr(), a: product.a, b, add: product.add, grid }
    }

    /// Computes one part.
    ///
    /// # Safety
    /// No other thread computes the same part at the same time.
    unsafe fn compute(&self, part: usize) {
        let ([rows, columns], k, n) = (self.grid.part(part), self.a.columns, self.b.columns);
        let ((a_row, a_column), (b_row, b_column)) = (self.a.strides(), self.b.strides());
        let alpha = if self.add { T::ONE } else { T::ZERO };
        // The kernels write columns and `C` has rows: Cᵀ = Bᵀ · Aᵀ is the same memory with the strides swapped.
        // SAFETY: `shape` verified that operands and result fit, operands are checked on construction, and the part is
        // inside the result and belongs to this call alone. Where an operand is empty, nothing is read.
        unsafe {
            gemm_kernel::<T>()(
                columns.len(),
                rows.len(),
                k,
                self.c.wrapping_add(rows.start * n + columns.start),
                n as isize,
                1,
                self.add,
                self.b.data.as_ptr().wrapping_offset(columns.start as isize * b_column),
                b_row,
                b_column,
                self.a.data.as_ptr().wrapping_offset(rows.start as isize * a_row),
                a_row,
                a_column,
                alpha,
                T::ONE,
                false,
                false,
                false,
                Parallelism::None,
            );
        }
    }
}

/// A result divided into parts of about the same size.
#[derive(Debug, PartialEq)]
struct Grid {
    /// Rows and columns of the whole.
    size: [usize; 2],
    /// Number of parts below each other and beside each other.
    parts: [usize; 2],
}

impl Grid {
    /// At most a part for each thread, such that the largest takes the shortest time.
    fn new(size: [usize; 2], operands: [usize; 2], threads: usize) -> Grid {
        let whole = Grid { size, parts: [1, 1] };
        if threads < 2 || size[0].min(size[1]) < 2 {
            return whole;
        }
        let sides = (1..=threads).flat_map(|down| (1..=threads / down).map(move |across| [down, across]));
        let grids = sides.map(|parts| Grid { size, parts }).filter(Grid::has_the_bits_of_the_whole);
        grids.min_by_key(|grid| grid.cost(operands)).unwrap_or(whole)
    }

    /// The time of the largest part, in multiplications per unit of the depth; `operands` is what one element of a row
    /// of `A` and of a column of `B` costs by itself.
    fn cost(&self, operands: [usize; 2]) -> usize {
        let [rows, columns] = [0, 1].map(|side| self.units(side).div_ceil(self.parts[side]) * UNIT[side]);
        rows * columns + operands[0] * rows + operands[1] * columns
    }

    /// Whether the smallest part is computed as the whole is: see [`SMALL`] and [`TINY`]. For a single row or column,
    /// `gemm` has yet other kernels.
    fn has_the_bits_of_the_whole(&self) -> bool {
        let [rows, columns] = [0, 1].map(|side| {
            let last = self.size[side].saturating_sub(self.edge(side, self.parts[side] - 1));
            last.min(self.units(side) / self.parts[side] * UNIT[side])
        });
        rows.min(columns) > 1 && rows.max(columns) > SMALL && rows * columns > TINY
    }

    /// Number of units on a side.
    fn units(&self, side: usize) -> usize {
        self.size[side].div_ceil(UNIT[side])
    }

    /// Number of parts; none of an empty result.
    fn tasks(&self) -> usize {
        if self.size.contains(&0) { 0 } else { self.parts[0] * self.parts[1] }
    }

    /// Rows and columns of a part.
    fn part(&self, part: usize) -> [Range<usize>; 2] {
        let at = [part / self.parts[1], part % self.parts[1]];
        [0, 1].map(|side| self.edge(side, at[side])..self.edge(side, at[side] + 1))
    }

    /// Where the rows or columns of part number `at` of its side begin.
    fn edge(&self, side: usize, at: usize) -> usize {
        (self.units(side) * at / self.parts[side] * UNIT[side]).min(self.size[side])
    }
}

/// A kernel of the `gemm` crate. Its arguments: the shape; `C` with its column and row strides, and whether it is read;
/// the two operands with theirs; α and β; which operands are conjugated; the number of threads.
type GemmKernel<T> = unsafe fn(
    usize,
    usize,
    usize,
    *mut T,
    isize,
    isize,
    bool,
    *const T,
    isize,
    isize,
    *const T,
    isize,
    isize,
    T,
    T,
    bool,
    bool,
    bool,
    Parallelism,
);

/// The kernel of an accumulator type, which is `f32` or `f64`.
fn gemm_kernel<T: Real>() -> GemmKernel<T> {
    let f32: GemmKernel<f32> = gemm_f32::gemm::f32::get_gemm_fn();
    let f64: GemmKernel<f64> = gemm_f64::gemm::f64::get_gemm_fn();
    let kernels: [&dyn Any; 2] = [&f32, &f64];
    *kernels.iter().find_map(|kernel| kernel.downcast_ref()).expect("an accumulator is f32 or f64")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers<T: Real>(count: usize, seed: usize) -> Vec<T> {
        (0..count).map(|x| T::of_f64(((x * 37 + seed * 101) % 127) as f64 / 97.0 - 0.6)).collect()
    }

    #[test]
    fn the_bits_of_products_do_not_depend_on_the_number_of_threads() {
        /// Two products of different shapes, computed together. Their sums are inexact, so that their order shows.
        fn hold<T: Real>() {
            let shapes =
                [[100, 100, 700], [64, 64, 1100], [130, 48, 900], [300, 17, 640], [2, 900, 1030], [257, 391, 530]];
            for (at, [m, n, k]) in shapes.into_iter().enumerate() {
                let (a, b, narrow) = (numbers::<T>(m * k, 1), numbers(k * n, 2), numbers(k * 70, 3));
                let (c, other) = (numbers::<T>(m * n, 4), numbers(m * 70, 5));
                for transposed in [[false, false], [false, true], [true, false], [true, true]] {
                    let a = if transposed[0] { Operand::rows(&a, k, m).transposed() } else { Operand::rows(&a, m, k) };
                    let b = if transposed[1] { Operand::rows(&b, n, k).transposed() } else { Operand::rows(&b, k, n) };
                    let (narrow, add) = (Operand::rows(&narrow, k, 70), at % 2 == 0);
                    let products = |threads: usize| {
                        let (mut c, mut other) = (c.clone(), other.clone());
                        let both = &mut [
                            Product { c: &mut c, a, b: b.into(), add },
                            Product { c: &mut other, a, b: narrow.into(), add: !add },
                        ];
                        matmul(both, threads);
                        [c, other]
                    };
                    let one = products(1);
                    for threads in [2, 3, 7, 16, 64] {
                        assert!(products(threads) == one, "{m} {n} {k} {transposed:?}, {threads} threads");
                    }
                }
            }
        }
        hold::<f32>();
        hold::<f64>();
    }

    #[test]
    fn parts_cover_a_result_once_and_are_one_for_each_thread_where_it_is_large() {
        for size in [[2048, 1024], [256, 256], [8000, 256], [1, 5000], [5000, 1], [100, 100], [0, 7]] {
            for threads in [1, 2, 3, 16, 50] {
                let grid = Grid::new(size, [PACKING, PACKING], threads);
                let mut seen = vec![0u8; size[0] * size[1]];
                for part in 0..grid.tasks() {
                    let [rows, columns] = grid.part(part);
                    rows.for_each(|row| columns.clone().for_each(|column| seen[row * size[1] + column] += 1));
                }
                assert!(seen.iter().all(|&times| times == 1), "{grid:?}");
                assert!(grid.tasks() <= threads);
                assert!(size != [2048, 1024] || threads == 50 || grid.tasks() == threads, "{grid:?}");
            }
        }
    }
}
