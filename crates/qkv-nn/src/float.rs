//! The element types of a tape: `f32` to train, `f64` to check gradients.

use crate::loops::{self, Loop};
use qkv_simd::Isa;
use qkv_simd::matmul::{Operand, PackBuffers, matmul_bf16};
use qkv_simd::pass::Smooth;
use qkv_simd::quantized::QuantizedMatrix;

/// `f32` or `f64`.
pub trait Float: qkv::Element<Acc = Self> + Smooth {
    /// Runs one of the crate's inner loops.
    #[doc(hidden)]
    fn run(isa: Isa, arguments: Loop<'_, Self>);

    /// `C = A · B` in bf16 arithmetic; `false`, and `C` untouched, where this type or this CPU has none.
    fn matmul_bf16(
        _isa: Isa,
        _c: &mut [Self],
        _a: Operand<'_, Self>,
        _b: Operand<'_, Self>,
        _add: bool,
        _packed: &mut PackBuffers,
        _threads: usize,
    ) -> bool {
        false
    }

    /// `y = W x` for a range of rows of a quantized matrix, from row `first` on; `false`, and `y` untouched, where this
    /// type has no such product.
    fn quantized_product(
        _matrix: &QuantizedMatrix,
        _isa: Isa,
        _first: usize,
        _x: &[Self],
        _sums: &[f32],
        _y: &mut [Self],
    ) -> bool {
        false
    }

    /// The block sums of `x` that a quantized product needs; `None` where this type has no such product.
    fn block_sums(_matrix: &QuantizedMatrix, _x: &[Self]) -> Option<Vec<f32>> {
        None
    }
}

impl Float for f32 {
    fn run(isa: Isa, arguments: Loop<'_, f32>) {
        loops::run_f32(isa, arguments);
    }

    fn matmul_bf16(
        isa: Isa,
        c: &mut [f32],
        a: Operand<'_, f32>,
        b: Operand<'_, f32>,
        add: bool,
        packed: &mut PackBuffers,
        threads: usize,
    ) -> bool {
        matmul_bf16(isa, c, a, b, add, packed, threads)
    }

    fn quantized_product(
        matrix: &QuantizedMatrix,
        isa: Isa,
        first: usize,
        x: &[f32],
        sums: &[f32],
        y: &mut [f32],
    ) -> bool {
        matrix.times(isa, first, x, sums, y);
        true
    }

    fn block_sums(matrix: &QuantizedMatrix, x: &[f32]) -> Option<Vec<f32>> {
        Some(matrix.sums(x))
    }
}

impl Float for f64 {
    fn run(_: Isa, arguments: Loop<'_, f64>) {
        loops::run_f64(arguments);
    }
}
