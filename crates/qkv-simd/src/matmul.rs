//! Products of whole matrices, for the layers of a model: in f32 or f64 with the kernels of the `gemm` crate, or
//! rounded to bf16 and accumulated in f32 with [`bf16_gemm`](crate::bf16_gemm). The bits do not depend on the number of
//! threads.

mod divided;
mod in_bf16;
mod parts;

use crate::panels::PackedMatrix;
use crate::span;
pub use divided::matmul;
use half::bf16;
pub use in_bf16::{has_bf16_products, matmul_bf16};
use parts::PackBuffer;

/// Buffers for packed operands, kept so that their memory is reused.
#[derive(Debug, Default)]
pub struct PackBuffers {
    left: PackBuffer<bf16>,
    right: PackBuffer<bf16>,
}

/// A matrix in memory: rows one after the other, or the transpose of such rows.
#[derive(Clone, Copy, Debug)]
pub struct Operand<'a, T> {
    data: &'a [T],
    /// The distance between stored rows.
    pitch: usize,
    rows: usize,
    columns: usize,
    transposed: bool,
}

impl<'a, T> Operand<'a, T> {
    /// Dense rows of `columns` elements.
    ///
    /// # Panics
    /// If the slice is too short.
    pub fn rows(data: &'a [T], rows: usize, columns: usize) -> Self {
        Operand::pitched(data, rows, columns, columns)
    }

    /// Rows of `columns` elements with stride `pitch`.
    ///
    /// # Panics
    /// If the slice is too short, or rows overlap.
    pub fn pitched(data: &'a [T], rows: usize, columns: usize, pitch: usize) -> Self {
        assert!(
            pitch >= columns && data.len() >= span(rows, pitch, columns),
            "{rows} × {columns} at {pitch} of {} elements",
            data.len()
        );
        Operand { data, pitch, rows, columns, transposed: false }
    }

    /// The transpose.
    pub fn transposed(self) -> Self {
        Operand { rows: self.columns, columns: self.rows, transposed: !self.transposed, ..self }
    }

    /// The row stride and the column stride.
    fn strides(&self) -> (isize, isize) {
        let pitch = self.pitch as isize;
        if self.transposed { (1, pitch) } else { (pitch, 1) }
    }
}

/// The right operand of a product, which may already be packed for [`matmul_bf16`].
#[derive(Clone, Copy, Debug)]
pub enum RightOperand<'a, T> {
    /// As it is in memory; [`matmul_bf16`] rounds it.
    Rows(Operand<'a, T>),
    /// A matrix `W` that is already packed.
    Packed(&'a PackedMatrix<bf16>),
    /// The transpose of such a matrix, which is what it is packed for.
    PackedTransposed(&'a PackedMatrix<bf16>),
}

impl<'a, T> From<Operand<'a, T>> for RightOperand<'a, T> {
    fn from(rows: Operand<'a, T>) -> Self {
        RightOperand::Rows(rows)
    }
}

impl<T> RightOperand<'_, T> {
    /// Rows and columns.
    fn shape(&self) -> [usize; 2] {
        match self {
            RightOperand::Rows(rows) => [rows.rows, rows.columns],
            RightOperand::Packed(matrix) => [matrix.rows(), matrix.width()],
            RightOperand::PackedTransposed(matrix) => [matrix.width(), matrix.rows()],
        }
    }
}

/// The product `C = A · B` or, with `add`, `C += A · B`.
#[derive(Debug)]
pub struct Product<'a, T> {
    /// The result, dense rows.
    pub c: &'a mut [T],
    /// The left operand.
    pub a: Operand<'a, T>,
    /// The right operand.
    pub b: RightOperand<'a, T>,
    /// Whether the product is added to what `C` holds.
    pub add: bool,
}

impl<T> Product<'_, T> {
    /// Rows and columns of `C`, and the depth.
    ///
    /// # Panics
    /// If the shapes do not fit.
    fn shape(&self) -> (usize, usize, usize) {
        let (a, [rows, columns]) = (&self.a, self.b.shape());
        assert_eq!(a.columns, rows, "A is {} × {}, B {rows} × {columns}", a.rows, a.columns);
        assert_eq!(self.c.len(), a.rows.saturating_mul(columns), "C is not {} × {columns}", a.rows);
        (a.rows, columns, a.columns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;

    fn numbers(count: usize, seed: usize) -> Vec<f32> {
        (0..count).map(|x| ((x * 37 + seed * 101) % 127) as f32 / 32.0 - 2.0).collect()
    }

    fn transposed(matrix: &[f32], rows: usize, columns: usize) -> Vec<f32> {
        (0..columns).flat_map(|j| (0..rows).map(move |i| matrix[i * columns + j])).collect()
    }

    #[test]
    fn products_are_correct_for_any_shape_transposition_and_number_of_threads() {
        let small =
            [(1, 1, 1), (3, 5, 7), (16, 16, 32), (33, 70, 65), (130, 48, 100), (300, 200, 64), (5, 0, 3), (4, 4, 0)];
        // Deep enough for several parts of the depth, and long enough for several groups of tasks, either way.
        let large = [
            (40, 32, 1100),
            (20, 2200, 33),
            (2200, 20, 33),
            (101, 161, 600),
            (263, 701, 40),
            (2, 300, 700),
            (150, 70, 1030),
        ];
        for (m, n, k) in small.into_iter().chain(large) {
            let (a, b, before) = (numbers(m * k, 1), numbers(k * n, 2), numbers(m * n, 3));
            let (columns_of_a, columns_of_b) = (transposed(&a, m, k), transposed(&b, k, n));
            let dot = |at: usize| -> f32 {
                let (row, column) = (&a[at / n * k..][..k], &columns_of_b[at % n * k..][..k]);
                row.iter().zip(column).map(|(x, y)| x * y).sum()
            };
            let products: Vec<f32> = (0..m * n).map(dot).collect();
            for transposed in 0..4 {
                let a = match transposed & 1 {
                    0 => Operand::rows(&a, m, k),
                    _ => Operand::rows(&columns_of_a, k, m).transposed(),
                };
                let b = match transposed & 2 {
                    0 => Operand::rows(&b, k, n),
                    _ => Operand::rows(&columns_of_b, n, k).transposed(),
                };
                for add in [false, true] {
                    let right = |c: &[f32], what: &str| {
                        for (at, &found) in c.iter().enumerate() {
                            let x = products[at] + if add { before[at] } else { 0.0 };
                            assert!(
                                (found - x).abs() <= 1e-4 * (k as f32 + 1.0),
                                "{what} {m} {n} {k} {transposed} {add}: {found} {x}"
                            );
                        }
                    };
                    let mut c = before.clone();
                    matmul(&mut [Product { c: &mut c, a, b: b.into(), add }], 1);
                    right(&c, "gemm");
                    let in_bf16 = |isa: Isa, c: &mut [f32], b: RightOperand<'_, f32>, threads| {
                        matmul_bf16(isa, &mut Product { c, a, b, add }, &mut PackBuffers::default(), threads)
                    };
                    for isa in Isa::available() {
                        let mut c = before.clone();
                        // These elements are exact in bf16, so the bound is the same.
                        if in_bf16(isa, &mut c, b.into(), 1) {
                            right(&c, isa.name());
                            let mut other = before.clone();
                            in_bf16(isa, &mut other, b.into(), 3);
                            assert_eq!(c, other, "threads change nothing");
                            if b.pitch == 0 {
                                continue;
                            }
                            // The stored rows of B, packed as a matrix.
                            let stored: Vec<bf16> = b.data.iter().map(|&x| bf16::from_f32(x)).collect();
                            let matrix = PackedMatrix::new(&stored, b.pitch);
                            let packed = match b.transposed {
                                true => RightOperand::PackedTransposed(&matrix),
                                false => RightOperand::Packed(&matrix),
                            };
                            let mut other = before.clone();
                            in_bf16(isa, &mut other, packed, 3);
                            assert_eq!(c, other, "packed already: the same bits");
                        }
                    }
                }
            }
        }
    }
}
