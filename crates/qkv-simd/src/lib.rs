//! The foundation of [`qkv`](https://docs.rs/qkv): number types, strided views, micro-kernels for each instruction set,
//! and the shared memory of a parallel, deterministic engine.
//!
//! All unsafe CPU code of the project is in this crate, behind safe functions that check the lengths of their slices,
//! in release builds too. Attention itself is in `qkv`: nothing here knows about queries or masks; it sees tiles of
//! numbers.
//!
//! | module | owns |
//! | --- | --- |
//! | [`number`] | element types (f32, f64, bf16, f16) and their accumulator types |
//! | [`view`] | `[batch, heads, length, width]` over borrowed memory, with any strides |
//! | [`isa`] | the instruction set in use, detected once or forced by `QKV_ISA` |
//! | [`product`](mod@product) | the native matrix product `C += A · B` over packed panels |
//! | [`bf16_gemm`] | bf16 products accumulated in f32, with AMX or AVX-512 |
//! | [`bf16x3_gemm`] | f32 products with AMX, each f32 split into three bf16 terms |
//! | [`gemv`] | products of a few rows with many rows read in place, for decoding |
//! | [`quantized`] | matrices of 4 to 8 bits times a few vectors |
//! | [`blocks`] | the block types of GGUF files, dequantized or unpacked to codes |
//! | [`int8`] | products of 8-bit matrices and 8-bit rows, for inference |
//! | [`panels`] | matrices packed once for many products, for inference |
//! | [`logits`] | passes over a row of logits, for decoding searches |
//! | [`team`] | threads for many short pieces of work, one after another |
//! | [`tile`] | passes over a tile of scores: softmax, its gradient, masks, biases, scales |
//! | [`features`] | passes over rows of features, for linear attention |
//! | [`pairwise`] | scores that are not dot products: additive and squared distance |
//! | [`philox`] | the counter-based random bits of dropout and sampling |
//! | [`pass`] | elementwise loops compiled for each instruction set, for the layers of a model |
//! | `matmul` | products of whole matrices (feature `matmul`), for the layers of a model |
//! | [`finish`] | what is done to a product while it is in registers: bias, activation, residual |
//! | [`resample`] | the inner loops of resampling images and sound |
//! | [`huge_pages`] | huge pages for large buffers |
//! | [`kept_memory`], [`free_memory`] | reuse of the memory of dropped results; memory returned to the system |
//! | [`counting`] | a counting allocator |
//! | [`peak`] | measured peaks of this machine |
//! | [`shared`] | tasks in order, blocks filled once, regions entered in turn, rows written once |
//!
//! Every kernel is written once, over [`lanes::Lanes`], and compiled for each instruction set. A sum over the width has
//! the same order in all of them, so a score is a pure function of its query and its key.
//!
//! # Miri
//!
//! Under Miri only the portable lanes run, and huge pages and prefetching are compiled out. These tests cover the
//! views, the shared memory, the team and the portable lanes within a minute:
//!
//! ```text
//! MIRIFLAGS="-Zmiri-ignore-leaks -Zmiri-tree-borrows" \
//!     cargo +nightly miri test -p qkv-simd --lib -- view:: shared:: team:: features:: philox:: miri::
//! ```
//!
//! `cargo xtask miri` also runs those that need no rayon pool under Stacked Borrows.
//!
//! Miri cannot run the intrinsics of the AVX2 and AVX-512 lanes or the inline assembly of AMX; the tests of other
//! modules run on the portable lanes, but take hours there.

#![warn(missing_docs)]

mod aligned;
#[cfg(target_arch = "x86_64")]
mod amx;
pub mod bf16_gemm;
pub mod bf16x3_gemm;
pub mod blocks;
pub mod counting;
pub mod features;
pub mod finish;
pub mod free_memory;
pub mod gemv;
pub mod huge_pages;
pub mod int8;
pub mod isa;
pub mod kept_memory;
mod kernel;
#[doc(hidden)]
pub mod lanes;
pub mod logits;
mod math;
#[cfg(feature = "matmul")]
pub mod matmul;
#[cfg(test)]
mod miri;
pub mod number;
pub mod pairwise;
pub mod panels;
pub mod pass;
pub mod peak;
pub mod philox;
mod prefetch;
pub mod product;
pub mod quantized;
pub mod resample;
mod rows;
pub mod shared;
pub mod team;
pub mod tile;
pub mod view;

pub use isa::Isa;
pub use number::{Element, Real};
pub use product::{Matrix, Panels, Target, Update, product, product_skipping_zeros};
pub use view::{Unwritten, View, ViewError, ViewMut};

/// `width` rounded up to whole panels of `A`: the length of a row of a padded tile.
pub const fn padded<A: Real>(width: usize) -> usize {
    width.div_ceil(A::LANES).saturating_mul(A::LANES)
}

/// The length of `rows` rows of `width` elements with stride `row`, from the first element to past the last. Every
/// length that guards unchecked memory access is computed with saturating operations like this: a size that overflows
/// is longer than any slice.
pub(crate) const fn span(rows: usize, row: usize, width: usize) -> usize {
    if rows == 0 { 0 } else { (rows - 1).saturating_mul(row).saturating_add(width) }
}
