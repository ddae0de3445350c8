//! A panel of numbers in registers: 16 `f32` or 8 `f64`, for every instruction set. Kernels are written over [`Lanes`]
//! and never name an intrinsic.
//!
//! The number of lanes is the same everywhere, and so is the order of every sum. Only the fused multiply-add, which the
//! portable lanes do not have, makes their bits differ from the others.

// SAFETY, for the whole module: every method of `Lanes` requires the instruction set of its intrinsics; `load` and
// `store` also require `LANES` valid elements, and the loads and stores of a count that many.
#![allow(unsafe_op_in_unsafe_fn, clippy::missing_safety_doc)]

#[cfg(target_arch = "x86_64")]
pub mod avx2;
#[cfg(target_arch = "x86_64")]
pub mod avx512;
#[cfg(target_arch = "x86_64")]
mod horizontal;
#[cfg(target_arch = "aarch64")]
pub mod neon;
pub mod portable;

use crate::number::{Element, Real};
use half::{bf16, f16};

/// The largest number of lanes of any type.
pub(crate) const MAX_LANES: usize = 16;

/// A panel of numbers in registers.
///
/// # Safety
/// Every method may be called only where the CPU has the instruction set of the implementing type.
pub trait Lanes: Copy {
    /// The type of a lane.
    type Scalar: Real;
    /// Rows of a register tile of the matrix product, chosen for the number of registers.
    const TILE_ROWS: usize;
    /// Panels of a register tile: 1, 2 or 4.
    const TILE_PANELS: usize;

    /// `x` in every lane.
    unsafe fn splat(x: Self::Scalar) -> Self;
    /// Loads from unaligned memory.
    unsafe fn load(from: *const Self::Scalar) -> Self;
    /// Loads the first `count` lanes and zeroes the others. Nothing else is read.
    #[inline(always)]
    unsafe fn load_first(from: *const Self::Scalar, count: usize) -> Self {
        one_by_one(from, count)
    }
    /// [`load_first`](Lanes::load_first) from `bf16`, widened without loss.
    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16, count: usize) -> Self {
        one_by_one(from, count)
    }
    /// [`load_first`](Lanes::load_first) from `f16`, widened without loss.
    #[inline(always)]
    unsafe fn load_f16(from: *const f16, count: usize) -> Self {
        one_by_one(from, count)
    }
    /// Stores to unaligned memory.
    unsafe fn store(self, to: *mut Self::Scalar);
    /// Stores the first `count` lanes, rounded to nearest even. Nothing else is written.
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut bf16, count: usize) {
        store_one_by_one(self, to, count)
    }
    /// [`store_bf16`](Lanes::store_bf16) to `f16`.
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut f16, count: usize) {
        store_one_by_one(self, to, count)
    }
    /// Stores the first `count` lanes as they are.
    #[inline(always)]
    unsafe fn store_first(self, to: *mut Self::Scalar, count: usize) {
        store_one_by_one(self, to, count)
    }
    /// `self + b`.
    unsafe fn add(self, b: Self) -> Self;
    /// `self − b`.
    unsafe fn sub(self, b: Self) -> Self;
    /// `self · b`.
    unsafe fn mul(self, b: Self) -> Self;
    /// `self / b`.
    unsafe fn div(self, b: Self) -> Self;
    /// `self · b + c`, rounded once if the instruction set has a fused multiply-add.
    unsafe fn mul_add(self, b: Self, c: Self) -> Self;
    /// `self > b ? self : b`; `b` if `self` is NaN.
    unsafe fn max(self, b: Self) -> Self;
    /// `then` where `self < limit`, otherwise (NaN included) `otherwise`.
    unsafe fn where_less(self, limit: Self, then: Self, otherwise: Self) -> Self;
    /// `then` where `self == value`, otherwise (NaN included) `otherwise`.
    unsafe fn where_equal(self, value: Self, then: Self, otherwise: Self) -> Self;
    /// Lane `l` of `self` where bit `l` is set, otherwise of `otherwise`.
    unsafe fn keep(self, bits: u32, otherwise: Self) -> Self;
    /// `2^k` for `self = MAGIC + k` with an integer `k`, the result of the exponential's range reduction.
    unsafe fn power_of_two(self) -> Self;
    /// `self · 2^k`, with `k` given as a number and as `MAGIC + k`; 0 where `x < lowest`. NaN stays NaN.
    #[inline(always)]
    unsafe fn times_power_from(self, lowest: Self::Scalar, x: Self, _k: Self, shifted: Self) -> Self {
        let zero = Self::splat(Self::Scalar::ZERO);
        x.where_less(Self::splat(lowest), zero, self.mul(shifted.power_of_two()))
    }
    /// The sum of the lanes as a tree: halves are added, then their halves.
    unsafe fn sum(self) -> Self::Scalar;
    /// Four sums, each the tree of [`sum`](Lanes::sum).
    #[inline(always)]
    unsafe fn sums(of: [Self; 4]) -> [Self::Scalar; 4] {
        of.map(|lanes| lanes.sum())
    }
    /// The largest lane.
    unsafe fn max_lane(self) -> Self::Scalar;
    /// Lane `l` is the [`sum`](Lanes::sum) of row `l`, for as many rows as there are lanes.
    #[inline(always)]
    unsafe fn sum_each(rows: &[Self; MAX_LANES]) -> Self {
        Self::load(rows.map(|row| row.sum()).as_ptr())
    }
    /// Lane `l` is the [`max_lane`](Lanes::max_lane) of row `l`.
    #[inline(always)]
    unsafe fn max_each(rows: &[Self; MAX_LANES]) -> Self {
        Self::load(rows.map(|row| row.max_lane()).as_ptr())
    }
    /// Transposes a square of lanes, with a row stride for each side.
    #[inline(always)]
    unsafe fn transpose(from: *const Self::Scalar, row: usize, to: *mut Self::Scalar, to_row: usize) {
        let lanes = Self::Scalar::LANES;
        for r in 0..lanes {
            for x in 0..lanes {
                *to.add(x * to_row + r) = *from.add(r * row + x);
            }
        }
    }
    /// Bit `l` is set if lane `l` is not zero; NaN counts as not zero.
    unsafe fn not_zero(self) -> u32;
}

/// Widens lanes one by one, for element types without an instruction.
#[inline(always)]
unsafe fn one_by_one<V: Lanes, T: Element>(from: *const T, count: usize) -> V {
    let mut lanes = [V::Scalar::ZERO; MAX_LANES];
    for (l, lane) in lanes.iter_mut().enumerate().take(count) {
        *lane = V::Scalar::from_f64(from.add(l).read_unaligned().to_f64());
    }
    V::load(lanes.as_ptr())
}

/// Rounds lanes one by one, for element types without an instruction.
#[inline(always)]
unsafe fn store_one_by_one<V: Lanes, T: Element>(lanes: V, to: *mut T, count: usize) {
    let mut all = [V::Scalar::ZERO; MAX_LANES];
    lanes.store(all.as_mut_ptr());
    for (l, lane) in all.into_iter().enumerate().take(count) {
        *to.add(l) = T::of_f64(lane.to_f64());
    }
}
