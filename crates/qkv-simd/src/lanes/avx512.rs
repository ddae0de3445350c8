//! Lanes as one 512-bit register.

use super::{Lanes, MAX_LANES};
use half::{bf16, f16};
use std::arch::x86_64::*;

/// Sixteen `f32` in one register.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct F32x16(pub(crate) __m512);

/// Eight `f64` in one register.
#[derive(Clone, Copy)]
pub struct F64x8(__m512d);

/// The transpose of sixteen rows of sixteen 32-bit elements. Needs AVX-512.
#[inline(always)]
pub(crate) unsafe fn transpose(r: [__m512i; 16]) -> [__m512i; 16] {
    // Within each quarter pairs of rows, then groups of four; then the quarters are exchanged.
    let mut pairs = r;
    for i in (0..16).step_by(2) {
        pairs[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    let mut fours = pairs;
    for i in (0..16).step_by(4) {
        fours[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
        fours[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
        fours[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
        fours[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
    }
    let mut out = fours;
    for i in 0..4 {
        let [a, b, c, d] = [fours[i], fours[i + 4], fours[i + 8], fours[i + 12]];
        let low = [_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0x88>(c, d)];
        let high = [_mm512_shuffle_i32x4::<0xdd>(a, b), _mm512_shuffle_i32x4::<0xdd>(c, d)];
        out[i] = _mm512_shuffle_i32x4::<0x88>(low[0], low[1]);
        out[i + 4] = _mm512_shuffle_i32x4::<0x88>(high[0], high[1]);
        out[i + 8] = _mm512_shuffle_i32x4::<0xdd>(low[0], low[1]);
        out[i + 12] = _mm512_shuffle_i32x4::<0xdd>(high[0], high[1]);
    }
    out
}

/// Lane `l` of the result is row `l` reduced to one number: its largest lane, or the sum of all lanes as a tree.
macro_rules! of_each {
    ($rows:expr, $op:ident) => {{
        let rows: &[__m512; 16] = $rows;
        // Halves of two rows side by side, then quarters of four: a quarter of the register per row.
        let mut fours = [_mm512_setzero_ps(); 4];
        for (four, rows) in fours.iter_mut().zip(rows.chunks_exact(4)) {
            let ab = $op(
                _mm512_shuffle_f32x4::<0b01_00_01_00>(rows[0], rows[1]),
                _mm512_shuffle_f32x4::<0b11_10_11_10>(rows[0], rows[1]),
            );
            let cd = $op(
                _mm512_shuffle_f32x4::<0b01_00_01_00>(rows[2], rows[3]),
                _mm512_shuffle_f32x4::<0b11_10_11_10>(rows[2], rows[3]),
            );
            *four = $op(_mm512_shuffle_f32x4::<0b10_00_10_00>(ab, cd), _mm512_shuffle_f32x4::<0b11_01_11_01>(ab, cd));
        }
        // Then within the quarters, where row 4j + i ends up as element j of quarter i.
        let [a, b, c, d] = fours;
        let ab = $op(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        let cd = $op(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
        let all = $op(_mm512_shuffle_ps::<0b01_00_01_00>(ab, cd), _mm512_shuffle_ps::<0b11_10_11_10>(ab, cd));
        let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        _mm512_permutexvar_ps(order, all)
    }};
}

/// The sums of sixteen rows, one per lane.
#[inline(always)]
pub(crate) unsafe fn sum_each(rows: &[__m512; 16]) -> __m512 {
    of_each!(rows, _mm512_add_ps)
}

/// The largest lanes of sixteen rows, one per lane.
#[inline(always)]
pub(crate) unsafe fn max_each(rows: &[__m512; 16]) -> __m512 {
    of_each!(rows, _mm512_max_ps)
}

/// The first `count` of sixteen 16-bit elements, zeros in the others. Needs AVX-512 BW and VL.
#[inline(always)]
unsafe fn load_u16(from: *const i16, count: usize) -> __m256i {
    if count >= 16 { _mm256_loadu_si256(from.cast()) } else { _mm256_maskz_loadu_epi16((1 << count) - 1, from) }
}

/// Stores the first `count` of sixteen 16-bit elements. Needs AVX-512 BW and VL.
#[inline(always)]
unsafe fn store_u16(to: *mut i16, halves: __m256i, count: usize) {
    if count >= 16 {
        _mm256_storeu_si256(to.cast(), halves)
    } else {
        _mm256_mask_storeu_epi16(to, (1 << count) - 1, halves)
    }
}

impl Lanes for F32x16 {
    type Scalar = f32;
    // 24 accumulators, four panels of B and one broadcast: 29 of 32 registers.
    const TILE_ROWS: usize = 6;
    const TILE_PANELS: usize = 4;
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        F32x16(_mm512_set1_ps(x))
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        F32x16(_mm512_loadu_ps(from))
    }
    #[inline(always)]
    unsafe fn load_first(from: *const f32, count: usize) -> Self {
        F32x16(_mm512_maskz_loadu_ps((1 << count) - 1, from))
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16, count: usize) -> Self {
        // Moves each to the upper half of its lane with one instruction; widening and shifting would take two.
        let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        let halves = _mm512_castsi256_si512(load_u16(from.cast(), count));
        let high = _mm512_maskz_permutexvar_epi16(0xaaaa_aaaa, _mm512_slli_epi32::<16>(lanes), halves);
        F32x16(_mm512_castsi512_ps(high))
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const f16, count: usize) -> Self {
        F32x16(_mm512_cvtph_ps(load_u16(from.cast(), count)))
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        _mm512_storeu_ps(to, self.0)
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut bf16, count: usize) {
        // Adds half of the last kept bit less one, and that bit itself: ties go to even. A NaN only has to stay NaN.
        let bits = _mm512_castps_si512(self.0);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self.0, self.0);
        let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
        let kept = _mm512_srli_epi32::<16>(_mm512_mask_mov_epi32(rounded, nan, quiet));
        store_u16(to.cast(), _mm512_cvtepi32_epi16(kept), count);
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut f16, count: usize) {
        let halves = _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0);
        store_u16(to.cast(), halves, count);
    }
    #[inline(always)]
    unsafe fn store_first(self, to: *mut f32, count: usize) {
        _mm512_mask_storeu_ps(to, (1 << count) - 1, self.0)
    }
    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        F32x16(_mm512_add_ps(self.0, b.0))
    }
    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        F32x16(_mm512_sub_ps(self.0, b.0))
    }
    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        F32x16(_mm512_mul_ps(self.0, b.0))
    }
    #[inline(always)]
    unsafe fn div(self, b: Self) -> Self {
        F32x16(_mm512_div_ps(self.0, b.0))
    }
    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        F32x16(_mm512_fmadd_ps(self.0, b.0, c.0))
    }
    #[inline(always)]
    unsafe fn max(self, b: Self) -> Self {
        F32x16(_mm512_max_ps(self.0, b.0))
    }
    #[inline(always)]
    unsafe fn where_less(self, limit: Self, then: Self, otherwise: Self) -> Self {
        let mask = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, limit.0);
        F32x16(_mm512_mask_blend_ps(mask, otherwise.0, then.0))
    }
    #[inline(always)]
    unsafe fn where_equal(self, value: Self, then: Self, otherwise: Self) -> Self {
        let mask = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(self.0, value.0);
        F32x16(_mm512_mask_blend_ps(mask, otherwise.0, then.0))
    }
    #[inline(always)]
    unsafe fn keep(self, bits: u32, otherwise: Self) -> Self {
        F32x16(_mm512_mask_blend_ps(bits as u16, otherwise.0, self.0))
    }
    #[inline(always)]
    unsafe fn power_of_two(self) -> Self {
        let shifted = _mm512_slli_epi32::<23>(_mm512_castps_si512(self.0));
        F32x16(_mm512_castsi512_ps(_mm512_add_epi32(shifted, _mm512_set1_epi32(0x3f80_0000))))
    }
    #[inline(always)]
    unsafe fn times_power_from(self, lowest: f32, x: Self, k: Self, _shifted: Self) -> Self {
        let there = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x.0, _mm512_set1_ps(lowest));
        F32x16(_mm512_maskz_scalef_ps(there, self.0, k.0))
    }
    #[inline(always)]
    unsafe fn transpose(from: *const f32, row: usize, to: *mut f32, to_row: usize) {
        let mut rows = [_mm512_setzero_si512(); 16];
        for (r, lanes) in rows.iter_mut().enumerate() {
            *lanes = _mm512_loadu_si512(from.add(r * row).cast());
        }
        for (x, lanes) in transpose(rows).into_iter().enumerate() {
            _mm512_storeu_si512(to.add(x * to_row).cast(), lanes);
        }
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        let low = _mm512_castps512_ps256(self.0);
        let high = _mm512_extractf32x8_ps::<1>(self.0);
        super::horizontal::sum_of_8(_mm256_add_ps(low, high))
    }
    #[inline(always)]
    unsafe fn sums([a, b, c, d]: [Self; 4]) -> [f32; 4] {
        // Halves of a and b, of c and d; then quarters of all four, a block each; then within the blocks.
        let half = |x: Self, y: Self| {
            let low = _mm512_shuffle_f32x4::<0b01_00_01_00>(x.0, y.0);
            _mm512_add_ps(low, _mm512_shuffle_f32x4::<0b11_10_11_10>(x.0, y.0))
        };
        let (ab, cd) = (half(a, b), half(c, d));
        let low = _mm512_shuffle_f32x4::<0b10_00_10_00>(ab, cd);
        let four = _mm512_add_ps(low, _mm512_shuffle_f32x4::<0b11_01_11_01>(ab, cd));
        let two = _mm512_add_ps(four, _mm512_permute_ps::<0b01_00_11_10>(four));
        let one = _mm512_add_ps(two, _mm512_permute_ps::<0b10_11_00_01>(two));
        let mut sums = [0.0; 4];
        _mm_storeu_ps(sums.as_mut_ptr(), _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, one)));
        sums
    }
    #[inline(always)]
    unsafe fn sum_each(rows: &[Self; MAX_LANES]) -> Self {
        Self(sum_each(&*rows.as_ptr().cast())) // `repr(transparent)`: the same layout
    }
    #[inline(always)]
    unsafe fn max_each(rows: &[Self; MAX_LANES]) -> Self {
        Self(max_each(&*rows.as_ptr().cast())) // `repr(transparent)`: the same layout
    }
    #[inline(always)]
    unsafe fn max_lane(self) -> f32 {
        _mm512_reduce_max_ps(self.0)
    }
    #[inline(always)]
    unsafe fn not_zero(self) -> u32 {
        u32::from(_mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(self.0, _mm512_setzero_ps()))
    }
}

impl Lanes for F64x8 {
    type Scalar = f64;
    const TILE_ROWS: usize = 6;
    const TILE_PANELS: usize = 4;
    #[inline(always)]
    unsafe fn splat(x: f64) -> Self {
        F64x8(_mm512_set1_pd(x))
    }
    #[inline(always)]
    unsafe fn load(from: *const f64) -> Self {
        F64x8(_mm512_loadu_pd(from))
    }
    #[inline(always)]
    unsafe fn load_first(from: *const f64, count: usize) -> Self {
        F64x8(_mm512_maskz_loadu_pd((1 << count) - 1, from))
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f64) {
        _mm512_storeu_pd(to, self.0)
    }
    #[inline(always)]
    unsafe fn store_first(self, to: *mut f64, count: usize) {
        _mm512_mask_storeu_pd(to, (1 << count) - 1, self.0)
    }
    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        F64x8(_mm512_add_pd(self.0, b.0))
    }
    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        F64x8(_mm512_sub_pd(self.0, b.0))
    }
    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        F64x8(_mm512_mul_pd(self.0, b.0))
    }
    #[inline(always)]
    unsafe fn div(self, b: Self) -> Self {
        F64x8(_mm512_div_pd(self.0, b.0))
    }
    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        F64x8(_mm512_fmadd_pd(self.0, b.0, c.0))
    }
    #[inline(always)]
    unsafe fn max(self, b: Self) -> Self {
        F64x8(_mm512_max_pd(self.0, b.0))
    }
    #[inline(always)]
    unsafe fn where_less(self, limit: Self, then: Self, otherwise: Self) -> Self {
        let mask = _mm512_cmp_pd_mask::<_CMP_LT_OQ>(self.0, limit.0);
        F64x8(_mm512_mask_blend_pd(mask, otherwise.0, then.0))
    }
    #[inline(always)]
    unsafe fn where_equal(self, value: Self, then: Self, otherwise: Self) -> Self {
        let mask = _mm512_cmp_pd_mask::<_CMP_EQ_OQ>(self.0, value.0);
        F64x8(_mm512_mask_blend_pd(mask, otherwise.0, then.0))
    }
    #[inline(always)]
    unsafe fn keep(self, bits: u32, otherwise: Self) -> Self {
        F64x8(_mm512_mask_blend_pd(bits as u8, otherwise.0, self.0))
    }
    #[inline(always)]
    unsafe fn power_of_two(self) -> Self {
        let shifted = _mm512_slli_epi64::<52>(_mm512_castpd_si512(self.0));
        F64x8(_mm512_castsi512_pd(_mm512_add_epi64(shifted, _mm512_set1_epi64(0x3ff0_0000_0000_0000))))
    }
    #[inline(always)]
    unsafe fn times_power_from(self, lowest: f64, x: Self, k: Self, _shifted: Self) -> Self {
        let there = _mm512_cmp_pd_mask::<_CMP_NLT_UQ>(x.0, _mm512_set1_pd(lowest));
        F64x8(_mm512_maskz_scalef_pd(there, self.0, k.0))
    }
    #[inline(always)]
    unsafe fn sum(self) -> f64 {
        let low = _mm512_castpd512_pd256(self.0);
        let high = _mm512_extractf64x4_pd::<1>(self.0);
        super::horizontal::sum_of_4(_mm256_add_pd(low, high))
    }
    #[inline(always)]
    unsafe fn max_lane(self) -> f64 {
        _mm512_reduce_max_pd(self.0)
    }
    #[inline(always)]
    unsafe fn not_zero(self) -> u32 {
        u32::from(_mm512_cmp_pd_mask::<_CMP_NEQ_UQ>(self.0, _mm512_setzero_pd()))
    }
}
