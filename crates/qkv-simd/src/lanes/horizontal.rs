//! Adds the lanes of one AVX register, as a tree: the order that every instruction set shares.

use std::arch::x86_64::*;

/// The sum of eight lanes as a tree. Needs AVX.
#[inline(always)]
pub(super) unsafe fn sum_of_8(x: __m256) -> f32 {
    let four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
}

/// The sum of four lanes as a tree. Needs AVX.
#[inline(always)]
pub(super) unsafe fn sum_of_4(x: __m256d) -> f64 {
    let two = _mm_add_pd(_mm256_castpd256_pd128(x), _mm256_extractf128_pd::<1>(x));
    _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)))
}
