//! Matrices as files store them, in fewer bits than `f32` (quantized blocks, bf16 and f16), and as a device stores
//! them.

use half::{bf16, f16};
use qkv_cuda::operations::{Array, BlockMatrix, MatrixRef};
use qkv_simd::Isa;
use qkv_simd::panels::PackedMatrix;
use qkv_simd::quantized::QuantizedMatrix;

/// A matrix in 16 bits, packed for products with a few rows.
#[derive(Debug)]
pub enum HalfMatrix {
    /// In bf16.
    Bf16(PackedMatrix<bf16>),
    /// In f16.
    F16(PackedMatrix<f16>),
}

/// A matrix as a file stores it, in fewer bits than `f32`.
#[derive(Clone, Copy, Debug)]
pub enum StoredMatrix<'p> {
    /// In quantized blocks.
    Quantized(&'p QuantizedMatrix),
    /// In bf16.
    Bf16(&'p PackedMatrix<bf16>),
    /// In f16.
    F16(&'p PackedMatrix<f16>),
}

impl StoredMatrix<'_> {
    /// The bytes that a product reads.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            StoredMatrix::Quantized(matrix) => matrix.bytes(),
            StoredMatrix::Bf16(matrix) => matrix.bytes(),
            StoredMatrix::F16(matrix) => matrix.bytes(),
        }
    }

    /// Elements per row.
    pub(crate) fn width(&self) -> usize {
        match self {
            StoredMatrix::Quantized(matrix) => matrix.width(),
            StoredMatrix::Bf16(matrix) => matrix.width(),
            StoredMatrix::F16(matrix) => matrix.width(),
        }
    }

    /// Writes whole rows from `first` on, widened.
    pub(crate) fn widen(&self, isa: Isa, first: usize, out: &mut [f32]) {
        match self {
            StoredMatrix::Quantized(matrix) => matrix.widen(first, out),
            StoredMatrix::Bf16(matrix) => matrix.unpack(isa, first, out),
            StoredMatrix::F16(matrix) => matrix.unpack(isa, first, out),
        }
    }
}

/// A matrix in the memory of a device, as products read it.
#[derive(Clone, Debug)]
pub(crate) enum DeviceMatrix {
    /// Its elements, as activations.
    Elements(Array),
    /// Its quantized blocks.
    Blocks(BlockMatrix),
}

impl DeviceMatrix {
    /// The matrix as an operand of a product.
    pub(crate) fn as_ref(&self) -> MatrixRef<'_> {
        match self {
            DeviceMatrix::Elements(array) => MatrixRef::Elements(array),
            DeviceMatrix::Blocks(blocks) => MatrixRef::Blocks(blocks),
        }
    }
}
