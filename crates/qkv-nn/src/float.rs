//! The element types of a tape: `f32` to train, `f64` to check gradients.

use crate::loops::{self, Loop};
use crate::stored_matrix::StoredMatrix;
use qkv_simd::Isa;
use qkv_simd::finish::Finish;
use qkv_simd::int8::{self, Int8Matrix, Int8Rows};
use qkv_simd::matmul::{PackBuffers, Product, matmul, matmul_bf16};
use qkv_simd::panels::{self, PackedMatrix};
use qkv_simd::pass::Smooth;
use qkv_simd::quantized::{self, Vectors};
use qkv_simd::team::Team;
use std::borrow::Cow;
use std::ops::Range;

/// `f32` or `f64`.
pub trait Float: qkv::Element<Acc = Self> + Smooth {
    /// Runs one of the crate's inner loops.
    #[doc(hidden)]
    fn run(isa: Isa, arguments: Loop<'_, Self>);

    /// Divides rows of `width` elements into groups of `columns` columns: for each group, its part of every row. A
    /// method, so that the loop over all rows is compiled once.
    #[doc(hidden)]
    fn columns(rows: &mut [Self], width: usize, columns: usize) -> Vec<Vec<&mut [Self]>>;

    /// Converts from the f32 of a device.
    #[doc(hidden)]
    fn from_floats(floats: Vec<f32>) -> Vec<Self> {
        floats.into_iter().map(|x| Self::of_f64(f64::from(x))).collect()
    }

    /// Converts to the f32 of a device.
    #[doc(hidden)]
    fn to_floats(elements: &[Self]) -> Cow<'_, [f32]> {
        elements.iter().map(|x| x.to_f64() as f32).collect()
    }

    /// The elements as mutable f32, if this type is f32.
    #[doc(hidden)]
    fn as_floats_mut(_elements: &mut [Self]) -> Option<&mut [f32]> {
        None
    }

    /// [`matmul`], compiled once.
    #[doc(hidden)]
    fn matmul(products: &mut [Product<'_, Self>], threads: usize);

    /// Whether this type has products in bf16.
    #[doc(hidden)]
    const HAS_BF16_PRODUCTS: bool = false;

    /// A product in bf16 arithmetic; returns `false` and leaves `C` untouched if this type or this CPU has none.
    fn matmul_bf16(_isa: Isa, _product: &mut Product<'_, Self>, _packed: &mut PackBuffers, _threads: usize) -> bool {
        false
    }

    /// `y [R, O] = x Wᵀ` for reduced-precision matrices that share the rows `x [R, width]`; returns `false` and leaves
    /// every `y` untouched if this type has no such product, or the matrices are of different kinds.
    fn stored_products(
        _isa: Isa,
        _team: &Team,
        _x: &[Self],
        _width: usize,
        _outputs: &mut [(StoredMatrix<'_>, &mut [Self])],
    ) -> bool {
        false
    }

    /// The same with matrices and rows in 8 bits, and with each output's finish applied; if `fine`, rows are split into
    /// two 8-bit parts.
    fn int8_products(
        _isa: Isa,
        _team: &Team,
        _x: &[Self],
        _width: usize,
        _fine: bool,
        _outputs: &mut [(&Int8Matrix, &mut [Self], Finish<'_, Self>)],
    ) -> bool {
        false
    }

    /// The same for packed matrices of this type, with each output's finish applied.
    fn packed_products(
        _isa: Isa,
        _team: &Team,
        _x: &[Self],
        _outputs: &mut [(&PackedMatrix<Self>, &mut [Self], Finish<'_, Self>)],
    ) -> bool {
        false
    }

    /// The same for one matrix and rows that are gathered on demand, into a buffer of [`block_len`](panels::block_len)
    /// elements.
    fn gathered_products(
        _isa: Isa,
        _team: &Team,
        _rows: usize,
        _gather: &(dyn Fn(Range<usize>, &mut [Self]) + Sync),
        _block: &mut [Self],
        _output: (&PackedMatrix<Self>, &mut [Self], Finish<'_, Self>),
    ) -> bool {
        false
    }
}

/// [`Float::columns`] of a type.
fn columns_of<T>(rows: &mut [T], width: usize, columns: usize) -> Vec<Vec<&mut [T]>> {
    let mut parts: Vec<Vec<&mut [T]>> =
        (0..width.div_ceil(columns)).map(|_| Vec::with_capacity(rows.len() / width)).collect();
    for row in rows.chunks_exact_mut(width) {
        row.chunks_mut(columns).zip(&mut parts).for_each(|(row, part)| part.push(row));
    }
    parts
}

impl Float for f32 {
    fn matmul(products: &mut [Product<'_, f32>], threads: usize) {
        matmul(products, threads);
    }

    fn columns(rows: &mut [f32], width: usize, columns: usize) -> Vec<Vec<&mut [f32]>> {
        columns_of(rows, width, columns)
    }

    fn run(isa: Isa, arguments: Loop<'_, f32>) {
        loops::run_f32(isa, arguments);
    }

    fn from_floats(floats: Vec<f32>) -> Vec<f32> {
        floats
    }

    fn to_floats(elements: &[f32]) -> Cow<'_, [f32]> {
        Cow::Borrowed(elements)
    }

    fn as_floats_mut(elements: &mut [f32]) -> Option<&mut [f32]> {
        Some(elements)
    }

    const HAS_BF16_PRODUCTS: bool = true;

    fn matmul_bf16(isa: Isa, product: &mut Product<'_, f32>, packed: &mut PackBuffers, threads: usize) -> bool {
        matmul_bf16(isa, product, packed, threads)
    }

    fn stored_products(
        isa: Isa,
        team: &Team,
        x: &[f32],
        width: usize,
        outputs: &mut [(StoredMatrix<'_>, &mut [f32])],
    ) -> bool {
        macro_rules! of_kind {
            ($kind:ident) => {
                outputs
                    .iter_mut()
                    .map(|(matrix, y)| match matrix {
                        StoredMatrix::$kind(matrix) => Some((*matrix, &mut **y)),
                        _ => None,
                    })
                    .collect::<Option<Vec<_>>>()
            };
        }
        if let Some(mut outputs) = of_kind!(Quantized) {
            quantized::products(isa, team, &Vectors::new(isa, x, width), &mut outputs);
        } else if let Some(outputs) = of_kind!(Bf16) {
            panels::products(isa, team, x, &mut unfinished(outputs));
        } else if let Some(outputs) = of_kind!(F16) {
            panels::products(isa, team, x, &mut unfinished(outputs));
        } else {
            return false;
        }
        true
    }

    fn int8_products(
        isa: Isa,
        team: &Team,
        x: &[f32],
        width: usize,
        fine: bool,
        outputs: &mut [(&Int8Matrix, &mut [f32], Finish<'_>)],
    ) -> bool {
        let rows = if fine { Int8Rows::fine(isa, x, width) } else { Int8Rows::new(isa, x, width) };
        int8::products(isa, team, &rows, outputs);
        true
    }

    fn packed_products(
        isa: Isa,
        team: &Team,
        x: &[f32],
        outputs: &mut [(&PackedMatrix<f32>, &mut [f32], Finish<'_>)],
    ) -> bool {
        panels::products(isa, team, x, outputs);
        true
    }

    fn gathered_products(
        isa: Isa,
        team: &Team,
        rows: usize,
        gather: &(dyn Fn(Range<usize>, &mut [f32]) + Sync),
        block: &mut [f32],
        output: (&PackedMatrix<f32>, &mut [f32], Finish<'_>),
    ) -> bool {
        panels::gathered_products(isa, team, rows, gather, block, output);
        true
    }
}

/// The outputs with an empty finish each.
fn unfinished<'a, T>(
    outputs: Vec<(&'a PackedMatrix<T>, &'a mut [f32])>,
) -> Vec<(&'a PackedMatrix<T>, &'a mut [f32], Finish<'a>)> {
    outputs.into_iter().map(|(matrix, y)| (matrix, y, Finish::default())).collect()
}

impl Float for f64 {
    fn matmul(products: &mut [Product<'_, f64>], threads: usize) {
        matmul(products, threads);
    }

    fn columns(rows: &mut [f64], width: usize, columns: usize) -> Vec<Vec<&mut [f64]>> {
        columns_of(rows, width, columns)
    }

    fn run(_: Isa, arguments: Loop<'_, f64>) {
        loops::run_f64(arguments);
    }
}
