//! Operands packed from f32, for products of whole matrices. `VCVTNE2PS2BF16` rounds to nearest even and flushes
//! subnormal numbers to zero, as the products do.

// SAFETY, for the whole module: every function requires AVX512-BF16, and slices of the lengths that the parent module
// checks before it calls.
#![allow(unsafe_op_in_unsafe_fn, clippy::missing_safety_doc)]

use super::{BLOCK, DEPTH, F32Rows, SIDE};
use crate::lanes::avx512::transpose;
use half::bf16;
use std::arch::x86_64::*;

impl F32Rows<'_> {
    /// Up to sixteen elements of a row, with zeros beyond its end and beyond the last row.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn load(&self, row: usize, at: usize) -> __m512 {
        if row >= self.count || at >= self.width {
            return _mm512_setzero_ps();
        }
        let from = self.data.as_ptr().add(row * self.pitch + at);
        match self.width - at {
            SIDE.. => _mm512_loadu_ps(from),
            rest => _mm512_maskz_loadu_ps((1 << rest) - 1, from),
        }
    }

    /// A chunk of a row.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn chunk(&self, row: usize, chunk: usize) -> __m512i {
        rounded(self.load(row, chunk * DEPTH), self.load(row, chunk * DEPTH + SIDE))
    }

    /// One chunk of the depth for the sixteen columns of a panel, with pairs of rows interleaved.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn pairs(&self, chunk: usize, panel: usize) -> [__m512i; SIDE] {
        // Elements 0 and 16, 1 and 17 and so on become neighbors.
        let mut order = [0u16; DEPTH];
        order.iter_mut().enumerate().for_each(|(at, x)| *x = (at / 2 + at % 2 * SIDE) as u16);
        let order = _mm512_loadu_si512(order.as_ptr().cast());
        let mut pairs = [_mm512_setzero_si512(); SIDE];
        for (at, pair) in pairs.iter_mut().enumerate() {
            let (row, column) = (chunk * DEPTH + 2 * at, panel * SIDE);
            *pair = _mm512_permutexvar_epi16(order, rounded(self.load(row, column), self.load(row + 1, column)));
        }
        pairs
    }
}

/// Two vectors, rounded to bf16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn rounded(first: __m512, second: __m512) -> __m512i {
    std::mem::transmute(_mm512_cvtne2ps_pbh(second, first))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn store_block(block: [__m512i; SIDE], to: *mut bf16, apart: usize) {
    for (at, x) in block.into_iter().enumerate() {
        _mm512_storeu_si512(to.add(at * apart).cast(), x);
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn a(rows: F32Rows<'_>, out: &mut [bf16], pitch: usize) {
    for row in 0..SIDE {
        for chunk in 0..rows.width.div_ceil(DEPTH) {
            let to = out.as_mut_ptr().add(row * pitch + chunk * DEPTH);
            _mm512_storeu_si512(to.cast(), rows.chunk(row, chunk));
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn a_transposed(rows: F32Rows<'_>, out: &mut [bf16], pitch: usize) {
    // Panels in the inner loop, as in `b`.
    for chunk in 0..rows.count.div_ceil(DEPTH) {
        for panel in 0..rows.width.div_ceil(SIDE) {
            let to = out.as_mut_ptr().add(panel * SIDE * pitch + chunk * DEPTH);
            store_block(transpose(rows.pairs(chunk, panel)), to, pitch);
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn b(rows: F32Rows<'_>, out: &mut [bf16]) {
    let chunks = rows.count.div_ceil(DEPTH);
    // Panels in the inner loop, since their rows are adjacent in memory.
    for chunk in 0..chunks {
        for panel in 0..rows.width.div_ceil(SIDE) {
            store_block(rows.pairs(chunk, panel), out.as_mut_ptr().add((panel * chunks + chunk) * BLOCK), DEPTH);
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn b_transposed(rows: F32Rows<'_>, out: &mut [bf16]) {
    for chunk in 0..rows.width.div_ceil(DEPTH) {
        let mut columns = [_mm512_setzero_si512(); SIDE];
        for (row, column) in columns.iter_mut().enumerate() {
            *column = rows.chunk(row, chunk);
        }
        store_block(transpose(columns), out.as_mut_ptr().add(chunk * BLOCK), DEPTH);
    }
}
