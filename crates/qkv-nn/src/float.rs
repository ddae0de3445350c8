//! The types a tape computes in: `f32` to train, `f64` to check gradients.

use qkv_simd::Isa;
use qkv_simd::matmul::{Operand, Packed, matmul_of_pairs};
use qkv_simd::pass::Smooth;

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
        matmul_of_pairs(isa, c, a, b, add, packed, threads)
    }
}

impl Float for f64 {}
