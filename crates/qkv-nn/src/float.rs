//! The types a tape computes in: `f32` to train, `f64` to check gradients.

use qkv_simd::Isa;
use qkv_simd::matmul::{Operand, Packed, matmul_bf16};
use qkv_simd::pass::Smooth;
use qkv_simd::quantized::QuantizedMatrix;

/// `f32` or `f64`.
pub trait Float: qkv::Element<Acc = Self> + Smooth {
    /// `C = A · B` of numbers rounded to bf16, where this type and this CPU have that; `false`, and nothing done, elsewhere.
    fn product_of_pairs(
        _isa: Isa,
        _c: &mut [Self],
        _a: Operand<'_, Self>,
        _b: Operand<'_, Self>,
        _add: bool,
        _packed: &mut Packed,
        _threads: usize,
    ) -> bool {
        false
    }

    /// `y = W x` for some rows of a matrix of few bits, where this type has that; `false`, and nothing done, elsewhere.
    fn compact_product(
        _matrix: &QuantizedMatrix,
        _isa: Isa,
        _from: usize,
        _x: &[Self],
        _sums: &[f32],
        _y: &mut [Self],
    ) -> bool {
        false
    }

    /// The sums of blocks that such a product needs; `None` where this type has none.
    fn block_sums(_matrix: &QuantizedMatrix, _x: &[Self]) -> Option<Vec<f32>> {
        None
    }
}

impl Float for f32 {
    fn product_of_pairs(
        isa: Isa,
        c: &mut [f32],
        a: Operand<'_, f32>,
        b: Operand<'_, f32>,
        add: bool,
        packed: &mut Packed,
        threads: usize,
    ) -> bool {
        matmul_bf16(isa, c, a, b, add, packed, threads)
    }

    fn compact_product(
        matrix: &QuantizedMatrix,
        isa: Isa,
        from: usize,
        x: &[f32],
        sums: &[f32],
        y: &mut [f32],
    ) -> bool {
        matrix.times(isa, from, x, sums, y);
        true
    }

    fn block_sums(matrix: &QuantizedMatrix, x: &[f32]) -> Option<Vec<f32>> {
        Some(matrix.sums(x))
    }
}

impl Float for f64 {}
