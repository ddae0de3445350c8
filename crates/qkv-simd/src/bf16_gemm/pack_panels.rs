//! Right operands taken from the panels of an already [packed](PackedMatrix) matrix, without rounding or widening.

use super::{BLOCK, Bf16Gemm, DEPTH, SIDE, padded_depth};
#[cfg(target_arch = "x86_64")]
use crate::lanes::avx512::transpose;
use crate::panels::PackedMatrix;
use half::bf16;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;
use std::ops::Range;

impl Bf16Gemm {
    /// Packs whole panels of columns of `B = Wᵀ`, which are rows of `W [O, I]`.
    ///
    /// # Panics
    /// If a panel is outside the matrix, or there is too little memory.
    pub(crate) fn pack_b_panels(&self, matrix: &PackedMatrix<bf16>, panels: Range<usize>, out: &mut [bf16]) {
        let each = padded_depth(matrix.width()) * SIDE;
        assert!(out.len() >= panels.len() * each, "too little memory");
        for (panel, out) in panels.zip(out.chunks_exact_mut(each)) {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the length was checked; `self` exists only where the CPU has the instructions.
            unsafe {
                panel_pairs(matrix.panel(panel), out);
            }
            #[cfg(not(target_arch = "x86_64"))]
            match self.unit {}
        }
    }

    /// Packs columns of `B = W`, of which the first starts a panel of `B`.
    ///
    /// # Panics
    /// If a column is outside the matrix, or there is too little memory.
    pub(crate) fn pack_b_columns(&self, matrix: &PackedMatrix<bf16>, columns: Range<usize>, out: &mut [bf16]) {
        let each = padded_depth(matrix.rows()) * SIDE;
        assert!(columns.end <= matrix.width() && out.len() >= columns.len().div_ceil(SIDE) * each, "too little memory");
        for (column, out) in columns.clone().step_by(SIDE).zip(out.chunks_exact_mut(each)) {
            let count = SIDE.min(columns.end - column);
            for (chunk, out) in out.chunks_exact_mut(BLOCK).enumerate() {
                let panels = [2 * chunk, 2 * chunk + 1]
                    .map(|panel| (panel * SIDE < matrix.rows()).then(|| &matrix.panel(panel)[column * SIDE..]));
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above; a panel has sixteen rows in each of these columns.
                unsafe {
                    column_pairs(panels, count, out);
                }
                #[cfg(not(target_arch = "x86_64"))]
                match self.unit {}
            }
        }
    }
}

/// Interleaves the pairs of rows of a panel `[I, 16]`, with zeros up to whole blocks.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn panel_pairs(panel: &[bf16], out: &mut [bf16]) {
    // Elements 0 and 16, 1 and 17 and so on become neighbors.
    let mut order = [0u16; DEPTH];
    order.iter_mut().enumerate().for_each(|(at, x)| *x = (at / 2 + at % 2 * SIDE) as u16);
    for (at, to) in out.chunks_exact_mut(2 * SIDE).enumerate() {
        let left = panel.len().saturating_sub(at * 2 * SIDE).min(2 * SIDE);
        let there = if left == 0 { 0 } else { u32::MAX >> (32 - left) };
        // SAFETY: a mask hides what is beyond the panel; the caller guarantees the instruction set.
        unsafe {
            let order = _mm512_loadu_si512(order.as_ptr().cast());
            let rows = _mm512_maskz_loadu_epi16(there, panel.as_ptr().wrapping_add(at * 2 * SIDE).cast());
            _mm512_storeu_si512(to.as_mut_ptr().cast(), _mm512_permutexvar_epi16(order, rows));
        }
    }
}

/// A block of sixteen columns, of which `count` exist: 32 elements of each, half from either panel.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn column_pairs(panels: [Option<&[bf16]>; 2], count: usize, out: &mut [bf16]) {
    // SAFETY: the caller guarantees the instruction set and sixteen elements of each column.
    unsafe {
        let mut columns = [_mm512_setzero_si512(); SIDE];
        for (at, column) in columns.iter_mut().enumerate().take(count) {
            let half = |panel: Option<&[bf16]>| match panel {
                Some(panel) => _mm256_loadu_si256(panel.as_ptr().add(at * SIDE).cast()),
                None => _mm256_setzero_si256(),
            };
            *column = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(half(panels[0])), half(panels[1]));
        }
        for (at, pairs) in transpose(columns).into_iter().enumerate() {
            _mm512_storeu_si512(out.as_mut_ptr().add(at * DEPTH).cast(), pairs);
        }
    }
}
