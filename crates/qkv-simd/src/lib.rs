//! The ground that [`qkv`](https://docs.rs/qkv) stands on: numbers, strided views, micro-kernels by instruction set, and
//! the few pieces of shared memory that a parallel, deterministic engine needs.
//!
//! All unsafe CPU code of the project is in this crate, behind safe functions that check their slices first. What
//! attention *is* stays in `qkv`; nothing here knows of queries, masks or softmax beyond "a tile of numbers".
//!
//! | module | owns |
//! | --- | --- |
//! | [`number`] | the element types (f32, f64, bf16, f16) and the types sums are made in |
//! | [`view`] | `[batch, heads, length, width]` over borrowed memory, any strides |
//! | [`isa`] | which instruction set runs, found once, forced by `QKV_ISA` |
//! | [`product`](mod@product) | the one matrix product: `C += A · B` over panels |
//! | [`bf16_gemm`] | products of bf16 with sums in f32, on the tile unit or by pair products |
//! | [`bf16x3_gemm`] | products of f32 on the unit of bf16, from three numbers of 8 bits for each of 24 |
//! | [`gemv`] | products with rows as they lie, read once: what decoding needs |
//! | [`quantized`] | matrices of few bits a number, times a vector |
//! | [`tile`] | passes over a tile of scores: softmax, its gradient, masks, scales |
//! | [`features`] | passes over rows of features: the maps of linear attention, their slopes, states |
//! | [`pairwise`] | scores that are no product: additive and squared distance |
//! | [`philox`] | the counter-based random bits of dropout |
//! | [`pass`] | plain loops over rows, compiled for the instruction set: what layers do besides products |
//! | `matmul` | products of whole matrices (feature `matmul`), for the layers of a model |
//! | [`huge_pages`] | large pages for large memory |
//! | [`counting`] | an allocator that counts |
//! | [`peak`] | what this machine can do at most, measured |
//! | [`shared`] | tasks in order, blocks filled once, regions entered in turn, rows written once |
//!
//! Every kernel is written once, over [`lanes::Lanes`], and compiled for each instruction set. A sum over the width has
//! one order in all of them, so a score is a pure function of its query and its key.

#![warn(missing_docs)]

#[cfg(target_arch = "x86_64")]
mod amx;
pub mod bf16_gemm;
pub mod bf16x3_gemm;
pub mod counting;
pub mod features;
pub mod gemv;
pub mod huge_pages;
pub mod isa;
mod kernel;
#[doc(hidden)]
pub mod lanes;
mod math;
#[cfg(feature = "matmul")]
pub mod matmul;
pub mod number;
pub mod pairwise;
pub mod pass;
pub mod peak;
pub mod philox;
mod prefetch;
pub mod product;
pub mod quantized;
mod rows;
pub mod shared;
pub mod tile;
pub mod view;

pub use isa::Isa;
pub use number::{Element, Real};
pub use product::{Matrix, Panels, Target, Update, product, product_skipping_zeros};
pub use view::{Unwritten, View, ViewError, ViewMut};

/// `width` rounded up to whole panels of `A`: what a row of a padded tile holds.
pub const fn padded<A: Real>(width: usize) -> usize {
    width.div_ceil(A::LANES).saturating_mul(A::LANES)
}

/// The numbers from the first to behind the last of `rows` rows of `width`, `row` apart. Lengths that are checked before memory is touched
/// without a check are made like this, by operations that saturate: what is too large to count is longer than any slice.
pub(crate) const fn span(rows: usize, row: usize, width: usize) -> usize {
    if rows == 0 { 0 } else { (rows - 1).saturating_mul(row).saturating_add(width) }
}
