//! A panel's worth of numbers in registers: 16 `f32` or 8 `f64`, whatever the instruction set. Kernels are written over
//! [`Lanes`] and never name an intrinsic.
//!
//! The number of lanes is the same everywhere, so the order of every sum is too; only the fused multiply-add, which the
//! portable lanes do not have, makes their bits differ from the others'.

// SAFETY, for the whole module: every method of `Lanes` asks its caller for the instruction set that its intrinsics
// need; `load` and `store` also ask for `LANES` valid elements, the loads of a count for that many. Nothing else is unsafe about them.
#![allow(unsafe_op_in_unsafe_fn, clippy::missing_safety_doc)]

#[cfg(target_arch = "x86_64")]
pub mod avx2;
#[cfg(target_arch = "x86_64")]
pub mod avx512;
pub mod portable;

use crate::number::{Element, Real};
use half::{bf16, f16};

/// As many lanes as any type has.
pub(crate) const MOST_LANES: usize = 16;

/// A panel's worth of numbers in registers.
///
/// # Safety
/// Every method may be called only where the CPU has the instruction set of the implementing type.
pub trait Lanes: Copy {
    /// What a lane holds.
    type Scalar: Real;
    /// Rows of a register tile of the matrix product that this instruction set has registers for.
    const TILE_ROWS: usize;
    /// Panels of a register tile likewise: 1, 2 or 4.
    const TILE_PANELS: usize;

    /// `x` in every lane.
    unsafe fn splat(x: Self::Scalar) -> Self;
    /// From memory, unaligned.
    unsafe fn load(from: *const Self::Scalar) -> Self;
    /// The first `count` lanes from memory, zeros in the others. Nothing else is read.
    #[inline(always)]
    unsafe fn load_first(from: *const Self::Scalar, count: usize) -> Self {
        one_by_one(from, count)
    }
    /// Likewise from `bf16`, of which every lane holds one without loss.
    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16, count: usize) -> Self {
        one_by_one(from, count)
    }
    /// Likewise from `f16`.
    #[inline(always)]
    unsafe fn load_f16(from: *const f16, count: usize) -> Self {
        one_by_one(from, count)
    }
    /// To memory, unaligned.
    unsafe fn store(self, to: *mut Self::Scalar);
    /// The first `count` lanes to memory, rounded to nearest even. Nothing else is written.
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut bf16, count: usize) {
        store_one_by_one(self, to, count)
    }
    /// Likewise to `f16`.
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut f16, count: usize) {
        store_one_by_one(self, to, count)
    }
    /// Likewise as they are.
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
    /// `self · b + c`, rounded once where the instruction set can.
    unsafe fn mul_add(self, b: Self, c: Self) -> Self;
    /// `self > b ? self : b`; where `self` is NaN, `b`.
    unsafe fn max(self, b: Self) -> Self;
    /// Where `self < limit`: `then`, elsewhere (NaN too) `otherwise`.
    unsafe fn where_less(self, limit: Self, then: Self, otherwise: Self) -> Self;
    /// Where `self == value`: `then`, elsewhere (NaN too) `otherwise`.
    unsafe fn where_equal(self, value: Self, then: Self, otherwise: Self) -> Self;
    /// Lane `l` of `self` where bit `l` is set, elsewhere of `otherwise`.
    unsafe fn keep(self, bits: u32, otherwise: Self) -> Self;
    /// For `self = MAGIC + k` with a whole `k`, as the range reduction of the exponential leaves it: `2^k`.
    unsafe fn power_of_two(self) -> Self;
    /// `self · 2^k`, given `k` both by itself and as such a `MAGIC + k`; 0 where `x < lowest`. NaN stays NaN.
    #[inline(always)]
    unsafe fn times_power_from(self, lowest: Self::Scalar, x: Self, _k: Self, shifted: Self) -> Self {
        let zero = Self::splat(Self::Scalar::ZERO);
        x.where_less(Self::splat(lowest), zero, self.mul(shifted.power_of_two()))
    }
    /// The sum of the lanes, as a tree: halves added, then their halves.
    unsafe fn sum(self) -> Self::Scalar;
    /// The sums of four, each the tree that [`sum`](Lanes::sum) makes.
    #[inline(always)]
    unsafe fn sums(of: [Self; 4]) -> [Self::Scalar; 4] {
        of.map(|lanes| lanes.sum())
    }
    /// The largest lane.
    unsafe fn greatest(self) -> Self::Scalar;
    /// Lane `l` is the [`sum`](Lanes::sum) of row `l`, of as many rows as there are lanes.
    #[inline(always)]
    unsafe fn sum_each(rows: &[Self; MOST_LANES]) -> Self {
        Self::load(rows.map(|row| row.sum()).as_ptr())
    }
    /// Lane `l` is the [`greatest`](Lanes::greatest) of row `l`, likewise.
    #[inline(always)]
    unsafe fn greatest_each(rows: &[Self; MOST_LANES]) -> Self {
        Self::load(rows.map(|row| row.greatest()).as_ptr())
    }
    /// Transposes as many rows of lanes as there are lanes, each side with its own distance between rows.
    #[inline(always)]
    unsafe fn transpose(from: *const Self::Scalar, row: usize, to: *mut Self::Scalar, to_row: usize) {
        let lanes = Self::Scalar::LANES;
        for r in 0..lanes {
            for x in 0..lanes {
                *to.add(x * to_row + r) = *from.add(r * row + x);
            }
        }
    }
    /// Bit `l` is set where lane `l` is not zero; a NaN is not.
    unsafe fn not_zero(self) -> u32;
}

/// Lanes widened one after the other: for what an instruction set has no instruction for.
#[inline(always)]
unsafe fn one_by_one<V: Lanes, T: Element>(from: *const T, count: usize) -> V {
    let mut lanes = [V::Scalar::ZERO; MOST_LANES];
    for (l, lane) in lanes.iter_mut().enumerate().take(count) {
        *lane = V::Scalar::from_f64((*from.add(l)).to_f64());
    }
    V::load(lanes.as_ptr())
}

/// Lanes rounded one after the other, likewise.
#[inline(always)]
unsafe fn store_one_by_one<V: Lanes, T: Element>(lanes: V, to: *mut T, count: usize) {
    let mut all = [V::Scalar::ZERO; MOST_LANES];
    lanes.store(all.as_mut_ptr());
    for (l, lane) in all.into_iter().enumerate().take(count) {
        *to.add(l) = T::of_f64(lane.to_f64());
    }
}
