//! Lanes as four 128-bit registers of aarch64, whose baseline has NEON.

use super::Lanes;
use half::{bf16, f16};
use std::arch::aarch64::*;
use std::arch::asm;

/// Sixteen `f32` in four registers.
#[derive(Clone, Copy)]
pub struct F32x16(pub(crate) [float32x4_t; 4]);

/// Eight `f64` in four registers.
#[derive(Clone, Copy)]
pub struct F64x8([float64x2_t; 4]);

/// The first `count` of sixteen 16-bit elements, four in each register; zeros in the others.
#[inline(always)]
unsafe fn load_u16(from: *const u16, count: usize) -> [uint16x4_t; 4] {
    if count >= 16 {
        return std::array::from_fn(|at| vld1_u16(from.add(4 * at)));
    }
    let mut some = [0u16; 16];
    std::ptr::copy_nonoverlapping(from, some.as_mut_ptr(), count);
    std::array::from_fn(|at| vld1_u16(some.as_ptr().add(4 * at)))
}

/// Stores the first `count` of sixteen 16-bit elements.
#[inline(always)]
unsafe fn store_u16(of: [uint16x4_t; 4], to: *mut u16, count: usize) {
    if count >= 16 {
        of.into_iter().enumerate().for_each(|(at, four)| vst1_u16(to.add(4 * at), four));
        return;
    }
    let mut all = [0u16; 16];
    of.into_iter().enumerate().for_each(|(at, four)| vst1_u16(all.as_mut_ptr().add(4 * at), four));
    std::ptr::copy_nonoverlapping(all.as_ptr(), to, count);
}

/// Four `f16`, widened. The type that the intrinsic takes is not stable; the instruction is in every aarch64.
#[inline(always)]
unsafe fn widen(four: uint16x4_t) -> float32x4_t {
    let wide: float32x4_t;
    asm!("fcvtl {wide:v}.4s, {four:v}.4h", wide = out(vreg) wide, four = in(vreg) four,
        options(pure, nomem, nostack, preserves_flags));
    wide
}

/// Four `f32`, rounded to `f16`.
#[inline(always)]
unsafe fn narrow(four: float32x4_t) -> uint16x4_t {
    let narrow: uint16x4_t;
    asm!("fcvtn {narrow:v}.4h, {four:v}.4s", narrow = out(vreg) narrow, four = in(vreg) four,
        options(pure, nomem, nostack, preserves_flags));
    narrow
}

/// Four `f32`, rounded to `bf16`: to nearest even, NaN to a quiet NaN of its sign.
#[inline(always)]
unsafe fn narrow_bf16(four: float32x4_t) -> uint16x4_t {
    let bits = vreinterpretq_u32_f32(four);
    let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
    let rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    let quiet = vorrq_u32(bits, vdupq_n_u32(0x0040_0000));
    vshrn_n_u32::<16>(vbslq_u32(vceqq_f32(four, four), rounded, quiet))
}

impl F32x16 {
    #[inline(always)]
    unsafe fn zip(self, b: Self, f: impl Fn(float32x4_t, float32x4_t) -> float32x4_t) -> Self {
        F32x16(std::array::from_fn(|at| f(self.0[at], b.0[at])))
    }
}

impl Lanes for F32x16 {
    type Scalar = f32;
    // 24 accumulators, four registers of B and one broadcast: 29 of 32.
    const TILE_ROWS: usize = 6;
    const TILE_PANELS: usize = 1;
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        F32x16([vdupq_n_f32(x); 4])
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        F32x16(std::array::from_fn(|at| vld1q_f32(from.add(4 * at))))
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        self.0.into_iter().enumerate().for_each(|(at, part)| vst1q_f32(to.add(4 * at), part))
    }
    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        self.zip(b, |x, y| vaddq_f32(x, y))
    }
    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        self.zip(b, |x, y| vsubq_f32(x, y))
    }
    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        self.zip(b, |x, y| vmulq_f32(x, y))
    }
    #[inline(always)]
    unsafe fn div(self, b: Self) -> Self {
        self.zip(b, |x, y| vdivq_f32(x, y))
    }
    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        F32x16(std::array::from_fn(|at| vfmaq_f32(c.0[at], self.0[at], b.0[at])))
    }
    #[inline(always)]
    unsafe fn max(self, b: Self) -> Self {
        // The instruction for the maximum prefers NaN.
        self.zip(b, |x, y| vbslq_f32(vcgtq_f32(x, y), x, y))
    }
    #[inline(always)]
    unsafe fn where_less(self, limit: Self, then: Self, otherwise: Self) -> Self {
        let pick = |at: usize| vbslq_f32(vcltq_f32(self.0[at], limit.0[at]), then.0[at], otherwise.0[at]);
        F32x16(std::array::from_fn(pick))
    }
    #[inline(always)]
    unsafe fn where_equal(self, value: Self, then: Self, otherwise: Self) -> Self {
        let pick = |at: usize| vbslq_f32(vceqq_f32(self.0[at], value.0[at]), then.0[at], otherwise.0[at]);
        F32x16(std::array::from_fn(pick))
    }
    #[inline(always)]
    unsafe fn keep(self, bits: u32, otherwise: Self) -> Self {
        let lane = vld1q_u32([1, 2, 4, 8].as_ptr());
        let pick = |at: usize| {
            let set = vtstq_u32(vdupq_n_u32(bits >> (4 * at)), lane);
            vbslq_f32(set, self.0[at], otherwise.0[at])
        };
        F32x16(std::array::from_fn(pick))
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16, count: usize) -> Self {
        F32x16(load_u16(from.cast(), count).map(|four| vreinterpretq_f32_u32(vshll_n_u16::<16>(four))))
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const f16, count: usize) -> Self {
        F32x16(load_u16(from.cast(), count).map(|four| widen(four)))
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut bf16, count: usize) {
        store_u16(self.0.map(|four| narrow_bf16(four)), to.cast(), count)
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut f16, count: usize) {
        store_u16(self.0.map(|four| narrow(four)), to.cast(), count)
    }
    #[inline(always)]
    unsafe fn power_of_two(self) -> Self {
        let one = vdupq_n_s32(0x3f80_0000);
        let power = |x| vaddq_s32(vshlq_n_s32::<23>(vreinterpretq_s32_f32(x)), one);
        F32x16(self.0.map(|x| vreinterpretq_f32_s32(power(x))))
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        let [a, b, c, d] = self.0;
        let four = vaddq_f32(vaddq_f32(a, c), vaddq_f32(b, d));
        let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
        vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two)
    }
    #[inline(always)]
    unsafe fn max_lane(self) -> f32 {
        let larger = |x, y| vbslq_f32(vcgtq_f32(x, y), x, y);
        let [a, b, c, d] = self.0;
        let mut four = [0.0; 4];
        vst1q_f32(four.as_mut_ptr(), larger(larger(a, b), larger(c, d)));
        four.into_iter().fold(f32::NEG_INFINITY, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    unsafe fn not_zero(self) -> u32 {
        let lane = vld1q_u32([1, 2, 4, 8].as_ptr());
        let bits = |x| vaddvq_u32(vbicq_u32(lane, vceqzq_f32(x)));
        let [a, b, c, d] = self.0;
        bits(a) | bits(b) << 4 | bits(c) << 8 | bits(d) << 12
    }
}

impl F64x8 {
    #[inline(always)]
    unsafe fn zip(self, b: Self, f: impl Fn(float64x2_t, float64x2_t) -> float64x2_t) -> Self {
        F64x8(std::array::from_fn(|at| f(self.0[at], b.0[at])))
    }
}

impl Lanes for F64x8 {
    type Scalar = f64;
    // 24 accumulators, four registers of B and one broadcast: 29 of 32.
    const TILE_ROWS: usize = 6;
    const TILE_PANELS: usize = 1;
    #[inline(always)]
    unsafe fn splat(x: f64) -> Self {
        F64x8([vdupq_n_f64(x); 4])
    }
    #[inline(always)]
    unsafe fn load(from: *const f64) -> Self {
        F64x8(std::array::from_fn(|at| vld1q_f64(from.add(2 * at))))
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f64) {
        self.0.into_iter().enumerate().for_each(|(at, part)| vst1q_f64(to.add(2 * at), part))
    }
    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        self.zip(b, |x, y| vaddq_f64(x, y))
    }
    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        self.zip(b, |x, y| vsubq_f64(x, y))
    }
    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        self.zip(b, |x, y| vmulq_f64(x, y))
    }
    #[inline(always)]
    unsafe fn div(self, b: Self) -> Self {
        self.zip(b, |x, y| vdivq_f64(x, y))
    }
    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        F64x8(std::array::from_fn(|at| vfmaq_f64(c.0[at], self.0[at], b.0[at])))
    }
    #[inline(always)]
    unsafe fn max(self, b: Self) -> Self {
        // The instruction for the maximum prefers NaN.
        self.zip(b, |x, y| vbslq_f64(vcgtq_f64(x, y), x, y))
    }
    #[inline(always)]
    unsafe fn where_less(self, limit: Self, then: Self, otherwise: Self) -> Self {
        let pick = |at: usize| vbslq_f64(vcltq_f64(self.0[at], limit.0[at]), then.0[at], otherwise.0[at]);
        F64x8(std::array::from_fn(pick))
    }
    #[inline(always)]
    unsafe fn where_equal(self, value: Self, then: Self, otherwise: Self) -> Self {
        let pick = |at: usize| vbslq_f64(vceqq_f64(self.0[at], value.0[at]), then.0[at], otherwise.0[at]);
        F64x8(std::array::from_fn(pick))
    }
    #[inline(always)]
    unsafe fn keep(self, bits: u32, otherwise: Self) -> Self {
        let lane = vld1q_u64([1, 2].as_ptr());
        let pick = |at: usize| {
            let set = vtstq_u64(vdupq_n_u64(u64::from(bits) >> (2 * at)), lane);
            vbslq_f64(set, self.0[at], otherwise.0[at])
        };
        F64x8(std::array::from_fn(pick))
    }
    #[inline(always)]
    unsafe fn power_of_two(self) -> Self {
        let one = vdupq_n_s64(0x3ff0_0000_0000_0000);
        let power = |x| vaddq_s64(vshlq_n_s64::<52>(vreinterpretq_s64_f64(x)), one);
        F64x8(self.0.map(|x| vreinterpretq_f64_s64(power(x))))
    }
    #[inline(always)]
    unsafe fn sum(self) -> f64 {
        let [a, b, c, d] = self.0;
        let two = vaddq_f64(vaddq_f64(a, c), vaddq_f64(b, d));
        vgetq_lane_f64::<0>(two) + vgetq_lane_f64::<1>(two)
    }
    #[inline(always)]
    unsafe fn max_lane(self) -> f64 {
        let larger = |x, y| vbslq_f64(vcgtq_f64(x, y), x, y);
        let [a, b, c, d] = self.0;
        let two = larger(larger(a, b), larger(c, d));
        let (x, y) = (vgetq_lane_f64::<0>(two), vgetq_lane_f64::<1>(two));
        if x > y { x } else { y }
    }
    #[inline(always)]
    unsafe fn not_zero(self) -> u32 {
        let lane = vld1q_u64([1, 2].as_ptr());
        let bits = |x| vaddvq_u64(vbicq_u64(lane, vceqzq_f64(x))) as u32;
        let [a, b, c, d] = self.0;
        bits(a) | bits(b) << 2 | bits(c) << 4 | bits(d) << 6
    }
}
