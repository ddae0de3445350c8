//! Integer vectors of the quantized products: sixteen rows side by side, 32 bits each. All arithmetic is exact, so
//! every instruction set computes the same bits.

// SAFETY, for the whole module: every method requires the instruction set of its intrinsics, and a load requires the
// bytes that it names.
#![allow(unsafe_op_in_unsafe_fn, clippy::missing_safety_doc)]

use crate::lanes::Lanes;
#[cfg(target_arch = "aarch64")]
use crate::lanes::neon;
use crate::lanes::portable;
#[cfg(target_arch = "x86_64")]
use crate::lanes::{avx2, avx512};
#[cfg(target_arch = "aarch64")]
use std::arch::aarch64::*;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// Sixteen rows: one 32-bit sum each, or two 16-bit numbers each.
///
/// # Safety
/// Every method may be called only where the CPU has the instruction set of the implementing type.
pub(super) trait Words: Copy {
    /// The same rows as `f32`.
    type Lanes: Lanes<Scalar = f32>;

    /// `x` in every row.
    unsafe fn splat(x: i32) -> Self;
    /// 64 bytes.
    unsafe fn load(from: *const u8) -> Self;
    /// 32 signed bytes, each widened to 16 bits.
    unsafe fn load_i8(from: *const u8) -> Self;
    /// `(self >> n) & mask` of every 16-bit number.
    unsafe fn bits(self, n: u32, mask: i16) -> Self;
    /// `self | (high shifted by n, to the left if positive) & mask` of every 16-bit number.
    unsafe fn with_high(self, high: Self, n: i32, mask: i16) -> Self;
    /// `self + w₀·x₀ + w₁·x₁` in every row, for its two numbers and a pair that all rows share.
    unsafe fn add_products(self, w: Self, x: *const [i16; 2]) -> Self;
    /// The sums converted to `f32`, rounded to nearest even.
    unsafe fn to_f32(self) -> Self::Lanes;
    /// Sixteen unsigned bytes, converted to `f32`.
    unsafe fn load_u8_as_f32(from: *const u8) -> Self::Lanes;
    /// Sixteen signed bytes, converted to `f32`.
    unsafe fn load_i8_as_f32(from: *const u8) -> Self::Lanes;
}

/// Plain arrays: any architecture.
#[derive(Clone, Copy)]
pub(super) struct PortableWords([u32; 16]);

#[inline(always)]
fn halves(word: u32) -> [i16; 2] {
    [word as i16, (word >> 16) as i16]
}

#[inline(always)]
fn word([low, high]: [i16; 2]) -> u32 {
    u32::from(low as u16) | u32::from(high as u16) << 16
}

impl Words for PortableWords {
    type Lanes = portable::F32x16;

    #[inline(always)]
    unsafe fn splat(x: i32) -> Self {
        PortableWords([x as u32; 16])
    }
    #[inline(always)]
    unsafe fn load(from: *const u8) -> Self {
        let bytes = from.cast::<[[u8; 4]; 16]>().read_unaligned();
        PortableWords(bytes.map(u32::from_le_bytes))
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> Self {
        let bytes = from.cast::<[[i8; 2]; 16]>().read_unaligned();
        PortableWords(bytes.map(|pair| word(pair.map(i16::from))))
    }
    #[inline(always)]
    unsafe fn bits(self, n: u32, mask: i16) -> Self {
        PortableWords(self.0.map(|x| word(halves(x).map(|half| ((half as u16) >> n) as i16 & mask))))
    }
    #[inline(always)]
    unsafe fn with_high(self, high: Self, n: i32, mask: i16) -> Self {
        let moved = |half: i16| if n >= 0 { (half as u16) << n } else { (half as u16) >> -n };
        PortableWords(std::array::from_fn(|l| {
            self.0[l] | word(halves(high.0[l]).map(|half| moved(half) as i16 & mask))
        }))
    }
    #[inline(always)]
    unsafe fn add_products(self, w: Self, x: *const [i16; 2]) -> Self {
        let x = (*x).map(i32::from);
        PortableWords(std::array::from_fn(|l| {
            let [w0, w1] = halves(w.0[l]).map(i32::from);
            (self.0[l] as i32 + w0 * x[0] + w1 * x[1]) as u32
        }))
    }
    #[inline(always)]
    unsafe fn to_f32(self) -> Self::Lanes {
        Lanes::load(self.0.map(|x| x as i32 as f32).as_ptr())
    }
    #[inline(always)]
    unsafe fn load_u8_as_f32(from: *const u8) -> Self::Lanes {
        Lanes::load(from.cast::<[u8; 16]>().read_unaligned().map(f32::from).as_ptr())
    }
    #[inline(always)]
    unsafe fn load_i8_as_f32(from: *const u8) -> Self::Lanes {
        Lanes::load(from.cast::<[i8; 16]>().read_unaligned().map(f32::from).as_ptr())
    }
}

/// Four 128-bit registers of four rows each.
#[cfg(target_arch = "aarch64")]
#[derive(Clone, Copy)]
pub(super) struct NeonWords([int16x8_t; 4]);

#[cfg(target_arch = "aarch64")]
impl Words for NeonWords {
    type Lanes = neon::F32x16;

    #[inline(always)]
    unsafe fn splat(x: i32) -> Self {
        NeonWords([vreinterpretq_s16_s32(vdupq_n_s32(x)); 4])
    }
    #[inline(always)]
    unsafe fn load(from: *const u8) -> Self {
        NeonWords(std::array::from_fn(|at| vreinterpretq_s16_u8(vld1q_u8(from.add(16 * at)))))
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> Self {
        NeonWords(std::array::from_fn(|at| vmovl_s8(vld1_s8(from.cast::<i8>().add(8 * at)))))
    }
    #[inline(always)]
    unsafe fn bits(self, n: u32, mask: i16) -> Self {
        NeonWords(self.0.map(|x| moved(x, -(n as i32), mask)))
    }
    #[inline(always)]
    unsafe fn with_high(self, high: Self, n: i32, mask: i16) -> Self {
        NeonWords(std::array::from_fn(|at| vorrq_s16(self.0[at], moved(high.0[at], n, mask))))
    }
    #[inline(always)]
    unsafe fn add_products(self, w: Self, x: *const [i16; 2]) -> Self {
        let x = vreinterpretq_s16_s32(vdupq_n_s32(x.cast::<i32>().read_unaligned()));
        NeonWords(std::array::from_fn(|at| {
            let low = vmull_s16(vget_low_s16(w.0[at]), vget_low_s16(x));
            let products = vpaddq_s32(low, vmull_high_s16(w.0[at], x));
            vreinterpretq_s16_s32(vaddq_s32(vreinterpretq_s32_s16(self.0[at]), products))
        }))
    }
    #[inline(always)]
    unsafe fn to_f32(self) -> Self::Lanes {
        neon::F32x16(self.0.map(|x| vcvtq_f32_s32(vreinterpretq_s32_s16(x))))
    }
    #[inline(always)]
    unsafe fn load_u8_as_f32(from: *const u8) -> Self::Lanes {
        let halves = [0, 8].map(|at| vmovl_u8(vld1_u8(from.add(at))));
        let wide = |at: usize| match at % 2 {
            0 => vmovl_u16(vget_low_u16(halves[at / 2])),
            _ => vmovl_high_u16(halves[at / 2]),
        };
        neon::F32x16(std::array::from_fn(|at| vcvtq_f32_u32(wide(at))))
    }
    #[inline(always)]
    unsafe fn load_i8_as_f32(from: *const u8) -> Self::Lanes {
        let halves = [0, 8].map(|at| vmovl_s8(vld1_s8(from.cast::<i8>().add(at))));
        let wide = |at: usize| match at % 2 {
            0 => vmovl_s16(vget_low_s16(halves[at / 2])),
            _ => vmovl_high_s16(halves[at / 2]),
        };
        neon::F32x16(std::array::from_fn(|at| vcvtq_f32_s32(wide(at))))
    }
}

/// `(x shifted by n, to the left if positive) & mask` of every 16-bit number.
#[cfg(target_arch = "aarch64")]
#[inline(always)]
unsafe fn moved(x: int16x8_t, n: i32, mask: i16) -> int16x8_t {
    let moved = vshlq_u16(vreinterpretq_u16_s16(x), vdupq_n_s16(n as i16));
    vandq_s16(vreinterpretq_s16_u16(moved), vdupq_n_s16(mask))
}

/// `$shift::<n>`, where `n` is a constant once loops are unrolled.
#[cfg(target_arch = "x86_64")]
macro_rules! shifted {
    ($shift:ident, $x:expr, $n:expr) => {
        match $n {
            0 => $x,
            2 => $shift::<2>($x),
            3 => $shift::<3>($x),
            4 => $shift::<4>($x),
            6 => $shift::<6>($x),
            8 => $shift::<8>($x),
            10 => $shift::<10>($x),
            12 => $shift::<12>($x),
            1 => $shift::<1>($x),
            5 => $shift::<5>($x),
            7 => $shift::<7>($x),
            9 => $shift::<9>($x),
            11 => $shift::<11>($x),
            _ => unreachable!("shifts are of 0 to 12 bits"),
        }
    };
}

/// Two 256-bit registers: rows 0 to 7 and 8 to 15.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(super) struct Avx2Words([__m256i; 2]);

#[cfg(target_arch = "x86_64")]
impl Words for Avx2Words {
    type Lanes = avx2::F32x16;

    #[inline(always)]
    unsafe fn splat(x: i32) -> Self {
        Avx2Words([_mm256_set1_epi32(x); 2])
    }
    #[inline(always)]
    unsafe fn load(from: *const u8) -> Self {
        Avx2Words([_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(32).cast())])
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> Self {
        let half = |from: *const u8| _mm256_cvtepi8_epi16(_mm_loadu_si128(from.cast()));
        Avx2Words([half(from), half(from.add(16))])
    }
    #[inline(always)]
    unsafe fn bits(self, n: u32, mask: i16) -> Self {
        let [a, b] = self.0;
        let mask = _mm256_set1_epi16(mask);
        Avx2Words([
            _mm256_and_si256(shifted!(_mm256_srli_epi16, a, n), mask),
            _mm256_and_si256(shifted!(_mm256_srli_epi16, b, n), mask),
        ])
    }
    #[inline(always)]
    unsafe fn with_high(self, high: Self, n: i32, mask: i16) -> Self {
        let ([a, b], mask) = (high.0, _mm256_set1_epi16(mask));
        let moved = if n >= 0 {
            [shifted!(_mm256_slli_epi16, a, n), shifted!(_mm256_slli_epi16, b, n)]
        } else {
            [shifted!(_mm256_srli_epi16, a, -n), shifted!(_mm256_srli_epi16, b, -n)]
        };
        Avx2Words([
            _mm256_or_si256(self.0[0], _mm256_and_si256(moved[0], mask)),
            _mm256_or_si256(self.0[1], _mm256_and_si256(moved[1], mask)),
        ])
    }
    #[inline(always)]
    unsafe fn add_products(self, w: Self, x: *const [i16; 2]) -> Self {
        let x = _mm256_set1_epi32(x.cast::<i32>().read_unaligned());
        Avx2Words([
            _mm256_add_epi32(self.0[0], _mm256_madd_epi16(w.0[0], x)),
            _mm256_add_epi32(self.0[1], _mm256_madd_epi16(w.0[1], x)),
        ])
    }
    #[inline(always)]
    unsafe fn to_f32(self) -> Self::Lanes {
        avx2::F32x16(_mm256_cvtepi32_ps(self.0[0]), _mm256_cvtepi32_ps(self.0[1]))
    }
    #[inline(always)]
    unsafe fn load_u8_as_f32(from: *const u8) -> Self::Lanes {
        let half = |from: *const u8| _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast())));
        avx2::F32x16(half(from), half(from.add(8)))
    }
    #[inline(always)]
    unsafe fn load_i8_as_f32(from: *const u8) -> Self::Lanes {
        let half = |from: *const u8| _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast())));
        avx2::F32x16(half(from), half(from.add(8)))
    }
}

/// One 512-bit register, with the products of `VPMADDWD`, or those of `VPDPWSSD` if the CPU has VNNI.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(super) struct Avx512Words<const VNNI: bool>(__m512i);

/// `sum + w · x` with the VNNI instruction, which adds the two products without saturation, like `VPMADDWD`.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vnni")]
#[inline]
unsafe fn dot_words(sum: __m512i, w: __m512i, x: __m512i) -> __m512i {
    _mm512_dpwssd_epi32(sum, w, x)
}

#[cfg(target_arch = "x86_64")]
impl<const VNNI: bool> Words for Avx512Words<VNNI> {
    type Lanes = avx512::F32x16;

    #[inline(always)]
    unsafe fn splat(x: i32) -> Self {
        Avx512Words(_mm512_set1_epi32(x))
    }
    #[inline(always)]
    unsafe fn load(from: *const u8) -> Self {
        Avx512Words(_mm512_loadu_si512(from.cast()))
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> Self {
        Avx512Words(_mm512_cvtepi8_epi16(_mm256_loadu_si256(from.cast())))
    }
    #[inline(always)]
    unsafe fn bits(self, n: u32, mask: i16) -> Self {
        Avx512Words(_mm512_and_si512(shifted!(_mm512_srli_epi16, self.0, n), _mm512_set1_epi16(mask)))
    }
    #[inline(always)]
    unsafe fn with_high(self, high: Self, n: i32, mask: i16) -> Self {
        let moved =
            if n >= 0 { shifted!(_mm512_slli_epi16, high.0, n) } else { shifted!(_mm512_srli_epi16, high.0, -n) };
        // self | moved & mask
        Avx512Words(_mm512_ternarylogic_epi32::<0xf8>(self.0, moved, _mm512_set1_epi16(mask)))
    }
    #[inline(always)]
    unsafe fn add_products(self, w: Self, x: *const [i16; 2]) -> Self {
        let x = _mm512_set1_epi32(x.cast::<i32>().read_unaligned());
        Avx512Words(match VNNI {
            true => dot_words(self.0, w.0, x),
            false => _mm512_add_epi32(self.0, _mm512_madd_epi16(w.0, x)),
        })
    }
    #[inline(always)]
    unsafe fn to_f32(self) -> Self::Lanes {
        avx512::F32x16(_mm512_cvtepi32_ps(self.0))
    }
    #[inline(always)]
    unsafe fn load_u8_as_f32(from: *const u8) -> Self::Lanes {
        avx512::F32x16(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()))))
    }
    #[inline(always)]
    unsafe fn load_i8_as_f32(from: *const u8) -> Self::Lanes {
        avx512::F32x16(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))))
    }
}
