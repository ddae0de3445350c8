//! Lanes as two 256-bit registers.

use super::Lanes;
use super::horizontal;
use half::{bf16, f16};
use std::arch::x86_64::*;

/// Sixteen `f32` in two registers.
#[derive(Clone, Copy)]
pub struct F32x16(pub(crate) __m256, pub(crate) __m256);

/// Eight `f64` in two registers.
#[derive(Clone, Copy)]
pub struct F64x8(__m256d, __m256d);

/// All ones in lane `l` where bit `l` is set.
#[inline(always)]
unsafe fn mask_of_8(bits: u32) -> __m256 {
    let lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    let set = _mm256_and_si256(_mm256_set1_epi32(bits as i32), lane);
    _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, lane))
}

/// All ones in lane `l` where bit `l` is set.
#[inline(always)]
unsafe fn mask_of_4(bits: u32) -> __m256d {
    let lane = _mm256_setr_epi64x(1, 2, 4, 8);
    let set = _mm256_and_si256(_mm256_set1_epi64x(bits as i64), lane);
    _mm256_castsi256_pd(_mm256_cmpeq_epi64(set, lane))
}

/// The first `count` of sixteen 16-bit elements, eight in each register; zeros in the others.
#[inline(always)]
unsafe fn load_u16(from: *const i16, count: usize) -> [__m128i; 2] {
    if count >= 16 {
        return [_mm_loadu_si128(from.cast()), _mm_loadu_si128(from.add(8).cast())];
    }
    let mut some = [0i16; 16];
    std::ptr::copy_nonoverlapping(from, some.as_mut_ptr(), count);
    [_mm_loadu_si128(some.as_ptr().cast()), _mm_loadu_si128(some.as_ptr().add(8).cast())]
}

impl Lanes for F32x16 {
    type Scalar = f32;
    // 12 accumulators, two halves of B and one broadcast: 15 of 16 registers.
    const TILE_ROWS: usize = 6;
    const TILE_PANELS: usize = 1;
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        F32x16(_mm256_set1_ps(x), _mm256_set1_ps(x))
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        F32x16(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8)))
    }
    #[inline(always)]
    unsafe fn load_first(from: *const f32, count: usize) -> Self {
        let bits = (1u32 << count) - 1;
        let masks = [bits, bits >> 8].map(|bits| _mm256_castps_si256(mask_of_8(bits)));
        F32x16(_mm256_maskload_ps(from, masks[0]), _mm256_maskload_ps(from.wrapping_add(8), masks[1]))
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16, count: usize) -> Self {
        let wide = |x| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(x)));
        let [low, high] = load_u16(from.cast(), count);
        F32x16(wide(low), wide(high))
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const f16, count: usize) -> Self {
        let [low, high] = load_u16(from.cast(), count);
        F32x16(_mm256_cvtph_ps(low), _mm256_cvtph_ps(high))
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        _mm256_storeu_ps(to, self.0);
        _mm256_storeu_ps(to.add(8), self.1);
    }
    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        F32x16(_mm256_add_ps(self.0, b.0), _mm256_add_ps(self.1, b.1))
    }
    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        F32x16(_mm256_sub_ps(self.0, b.0), _mm256_sub_ps(self.1, b.1))
    }
    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        F32x16(_mm256_mul_ps(self.0, b.0), _mm256_mul_ps(self.1, b.1))
    }
    #[inline(always)]
    unsafe fn div(self, b: Self) -> Self {
        F32x16(_mm256_div_ps(self.0, b.0), _mm256_div_ps(self.1, b.1))
    }
    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        F32x16(_mm256_fmadd_ps(self.0, b.0, c.0), _mm256_fmadd_ps(self.1, b.1, c.1))
    }
    #[inline(always)]
    unsafe fn max(self, b: Self) -> Self {
        F32x16(_mm256_max_ps(self.0, b.0), _mm256_max_ps(self.1, b.1))
    }
    #[inline(always)]
    unsafe fn where_less(self, limit: Self, then: Self, otherwise: Self) -> Self {
        let low = _mm256_cmp_ps::<_CMP_LT_OQ>(self.0, limit.0);
        let high = _mm256_cmp_ps::<_CMP_LT_OQ>(self.1, limit.1);
        F32x16(_mm256_blendv_ps(otherwise.0, then.0, low), _mm256_blendv_ps(otherwise.1, then.1, high))
    }
    #[inline(always)]
    unsafe fn where_equal(self, value: Self, then: Self, otherwise: Self) -> Self {
        let low = _mm256_cmp_ps::<_CMP_EQ_OQ>(self.0, value.0);
        let high = _mm256_cmp_ps::<_CMP_EQ_OQ>(self.1, value.1);
        F32x16(_mm256_blendv_ps(otherwise.0, then.0, low), _mm256_blendv_ps(otherwise.1, then.1, high))
    }
    #[inline(always)]
    unsafe fn keep(self, bits: u32, otherwise: Self) -> Self {
        F32x16(
            _mm256_blendv_ps(otherwise.0, self.0, mask_of_8(bits)),
            _mm256_blendv_ps(otherwise.1, self.1, mask_of_8(bits >> 8)),
        )
    }
    #[inline(always)]
    unsafe fn power_of_two(self) -> Self {
        let one = _mm256_set1_epi32(0x3f80_0000);
        let low = _mm256_slli_epi32::<23>(_mm256_castps_si256(self.0));
        let high = _mm256_slli_epi32::<23>(_mm256_castps_si256(self.1));
        F32x16(_mm256_castsi256_ps(_mm256_add_epi32(low, one)), _mm256_castsi256_ps(_mm256_add_epi32(high, one)))
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        horizontal::sum_of_8(_mm256_add_ps(self.0, self.1))
    }
    #[inline(always)]
    unsafe fn sums(of: [Self; 4]) -> [f32; 4] {
        let [a, b, c, d] = of.map(|x| _mm256_add_ps(x.0, x.1));
        let half = |x, y| {
            _mm256_add_ps(_mm256_permute2f128_ps::<0b10_00_00>(x, y), _mm256_permute2f128_ps::<0b11_00_01>(x, y))
        };
        let (ab, cd) = (half(a, b), half(c, d));
        let low = _mm256_shuffle_ps::<0b01_00_01_00>(ab, cd);
        let two = _mm256_add_ps(low, _mm256_shuffle_ps::<0b11_10_11_10>(ab, cd));
        let one = _mm256_add_ps(two, _mm256_permute_ps::<0b10_11_00_01>(two));
        // a a c c, b b d d.
        let (ac, bd) = (_mm256_castps256_ps128(one), _mm256_extractf128_ps::<1>(one));
        let mut sums = [0.0; 4];
        _mm_storeu_ps(sums.as_mut_ptr(), _mm_movelh_ps(_mm_unpacklo_ps(ac, bd), _mm_unpackhi_ps(ac, bd)));
        sums
    }
    #[inline(always)]
    unsafe fn not_zero(self) -> u32 {
        let bits = |x| _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_NEQ_UQ>(x, _mm256_setzero_ps())) as u32;
        bits(self.0) | bits(self.1) << 8
    }
    #[inline(always)]
    unsafe fn max_lane(self) -> f32 {
        let eight = _mm256_max_ps(self.0, self.1);
        let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
        let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
    }
}

impl Lanes for F64x8 {
    type Scalar = f64;
    const TILE_ROWS: usize = 6;
    const TILE_PANELS: usize = 1;
    #[inline(always)]
    unsafe fn splat(x: f64) -> Self {
        F64x8(_mm256_set1_pd(x), _mm256_set1_pd(x))
    }
    #[inline(always)]
    unsafe fn load(from: *const f64) -> Self {
        F64x8(_mm256_loadu_pd(from), _mm256_loadu_pd(from.add(4)))
    }
    #[inline(always)]
    unsafe fn load_first(from: *const f64, count: usize) -> Self {
        let bits = (1u32 << count) - 1;
        let masks = [bits, bits >> 4].map(|bits| _mm256_castpd_si256(mask_of_4(bits)));
        F64x8(_mm256_maskload_pd(from, masks[0]), _mm256_maskload_pd(from.wrapping_add(4), masks[1]))
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f64) {
        _mm256_storeu_pd(to, self.0);
        _mm256_storeu_pd(to.add(4), self.1);
    }
    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        F64x8(_mm256_add_pd(self.0, b.0), _mm256_add_pd(self.1, b.1))
    }
    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        F64x8(_mm256_sub_pd(self.0, b.0), _mm256_sub_pd(self.1, b.1))
    }
    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        F64x8(_mm256_mul_pd(self.0, b.0), _mm256_mul_pd(self.1, b.1))
    }
    #[inline(always)]
    unsafe fn div(self, b: Self) -> Self {
        F64x8(_mm256_div_pd(self.0, b.0), _mm256_div_pd(self.1, b.1))
    }
    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        F64x8(_mm256_fmadd_pd(self.0, b.0, c.0), _mm256_fmadd_pd(self.1, b.1, c.1))
    }
    #[inline(always)]
    unsafe fn max(self, b: Self) -> Self {
        F64x8(_mm256_max_pd(self.0, b.0), _mm256_max_pd(self.1, b.1))
    }
    #[inline(always)]
    unsafe fn where_less(self, limit: Self, then: Self, otherwise: Self) -> Self {
        let low = _mm256_cmp_pd::<_CMP_LT_OQ>(self.0, limit.0);
        let high = _mm256_cmp_pd::<_CMP_LT_OQ>(self.1, limit.1);
        F64x8(_mm256_blendv_pd(otherwise.0, then.0, low), _mm256_blendv_pd(otherwise.1, then.1, high))
    }
    #[inline(always)]
    unsafe fn where_equal(self, value: Self, then: Self, otherwise: Self) -> Self {
        let low = _mm256_cmp_pd::<_CMP_EQ_OQ>(self.0, value.0);
        let high = _mm256_cmp_pd::<_CMP_EQ_OQ>(self.1, value.1);
        F64x8(_mm256_blendv_pd(otherwise.0, then.0, low), _mm256_blendv_pd(otherwise.1, then.1, high))
    }
    #[inline(always)]
    unsafe fn keep(self, bits: u32, otherwise: Self) -> Self {
        F64x8(
            _mm256_blendv_pd(otherwise.0, self.0, mask_of_4(bits)),
            _mm256_blendv_pd(otherwise.1, self.1, mask_of_4(bits >> 4)),
        )
    }
    #[inline(always)]
    unsafe fn power_of_two(self) -> Self {
        let one = _mm256_set1_epi64x(0x3ff0_0000_0000_0000);
        let low = _mm256_slli_epi64::<52>(_mm256_castpd_si256(self.0));
        let high = _mm256_slli_epi64::<52>(_mm256_castpd_si256(self.1));
        F64x8(_mm256_castsi256_pd(_mm256_add_epi64(low, one)), _mm256_castsi256_pd(_mm256_add_epi64(high, one)))
    }
    #[inline(always)]
    unsafe fn sum(self) -> f64 {
        horizontal::sum_of_4(_mm256_add_pd(self.0, self.1))
    }
    #[inline(always)]
    unsafe fn not_zero(self) -> u32 {
        let bits = |x| _mm256_movemask_pd(_mm256_cmp_pd::<_CMP_NEQ_UQ>(x, _mm256_setzero_pd())) as u32;
        bits(self.0) | bits(self.1) << 4
    }
    #[inline(always)]
    unsafe fn max_lane(self) -> f64 {
        let four = _mm256_max_pd(self.0, self.1);
        let two = _mm_max_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd::<1>(four));
        _mm_cvtsd_f64(_mm_max_sd(two, _mm_unpackhi_pd(two, two)))
    }
}
