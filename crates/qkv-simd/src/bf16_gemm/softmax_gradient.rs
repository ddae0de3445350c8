//! Softmax gradient that rounds its results to bf16 in the same pass, as operands of the next products.
//!
//! The weights and the gradients of the scores are right operands of one product each, with two rows interleaved, and
//! the gradients are a left operand as well. Two rows are computed together, so all three are stored from registers,
//! and no f32 result is written.

// SAFETY, for the whole module: every function requires AVX-512 with bf16, and slices of the lengths that the parent
// module checks before it calls.
#![allow(unsafe_op_in_unsafe_fn, clippy::missing_safety_doc)]

use super::softmax::{keep_amx_awake, not_negligible, power_of_two, store_chunk};
use super::{BLOCK, DEPTH, GradientOperands, SIDE};
use crate::tile::{Exponential, RowGradient};
use half::bf16;
use std::arch::x86_64::*;

/// Turns up to [`DEPTH`] rows of scores and gradients of weights into operands. `AWAKE` keeps AMX from powering down
/// meanwhile.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
#[allow(clippy::too_many_arguments)]
pub(super) unsafe fn softmax_gradient<const AWAKE: bool>(
    scores: &[f32],
    grads: &mut [f32],
    row: usize,
    rows: usize,
    width: usize,
    how: Exponential<'_, f32>,
    of: RowGradient<'_, f32>,
    into: GradientOperands<'_>,
) {
    let first = into.chunk * BLOCK;
    let to = ChunkTargets {
        weights: into.weights.as_mut_ptr().add(first),
        grads: into.grads.as_mut_ptr().add(first),
        panel: into.chunks * BLOCK,
    };
    let (panels, tiles) = (width / SIDE, (scores.as_ptr(), grads.as_mut_ptr()));
    for pair in 0..DEPTH / 2 {
        if AWAKE && pair % 4 == 0 {
            keep_amx_awake();
        }
        let first = GradientRow::new(tiles, row, 2 * pair, rows, width, &how, &of);
        let second = GradientRow::new(tiles, row, 2 * pair + 1, rows, width, &how, &of);
        let all = |row: &GradientRow| row.span == (0, panels);
        if panels.is_multiple_of(2) && all(&first) && all(&second) {
            to.fill::<true>(pair, panels, &first, &second);
        } else {
            to.fill::<false>(pair, panels, &first, &second);
        }
    }
}

/// The addresses of a chunk of both right operands, and the distance between their panels.
struct ChunkTargets {
    weights: *mut bf16,
    grads: *mut bf16,
    panel: usize,
}

impl ChunkTargets {
    /// Computes two rows and stores them: a row of each block, and the gradients in place. `ALL` if both rows see all
    /// panels, in whole chunks.
    #[inline(always)]
    unsafe fn fill<const ALL: bool>(&self, pair: usize, panels: usize, first: &GradientRow, second: &GradientRow) {
        let at = pair * DEPTH;
        for chunk in 0..panels.div_ceil(2) {
            let (low, high) = (2 * chunk, 2 * chunk + 1);
            let (a0, b0) = (first.panel::<ALL>(low), second.panel::<ALL>(low));
            self.store_pair(at, low, a0, b0);
            let (a1, b1) = (first.panel::<ALL>(high), second.panel::<ALL>(high));
            if ALL || high < panels {
                self.store_pair(at, high, a1, b1);
            }
            if ALL || first.there {
                store_chunk(first.grads.cast::<bf16>().add(chunk * DEPTH), a0.1, a1.1);
            }
            if ALL || second.there {
                store_chunk(second.grads.cast::<bf16>().add(chunk * DEPTH), b0.1, b1.1);
            }
        }
    }

    /// Stores a row of each block of a panel, from the weights and gradients of two rows.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn store_pair(&self, at: usize, panel: usize, first: (__m512, __m512), second: (__m512, __m512)) {
        let to = panel * self.panel + at;
        _mm512_storeu_si512(self.weights.add(to).cast(), interleave(first.0, second.0));
        _mm512_storeu_si512(self.grads.add(to).cast(), interleave(first.1, second.1));
    }
}

/// A row of scores and gradients of weights, and the parameters of its softmax.
struct GradientRow {
    scores: *const f32,
    grads: *mut f32,
    there: bool,
    /// Scores outside these panels are absent.
    span: (usize, usize),
    scale: f32,
    lse: f32,
    after: f32,
    delta: f32,
}

impl GradientRow {
    /// Row `r` of a tile whose scores and gradients begin at `tiles`. A row beyond the last has no panels.
    #[inline(always)]
    unsafe fn new(
        tiles: (*const f32, *mut f32),
        row: usize,
        r: usize,
        rows: usize,
        width: usize,
        how: &Exponential<'_, f32>,
        of: &RowGradient<'_, f32>,
    ) -> GradientRow {
        let there = r < rows;
        let (at, (start, end)) = if there { (r, how.span(r, width)) } else { (0, (0, 0)) };
        let (lse, delta) = if there { (*of.lse.get_unchecked(at), *of.delta.get_unchecked(at)) } else { (0.0, 0.0) };
        // Normalizes NaN: rounding one with all bits set would give zero. A row that sees nothing has an lse of −∞, and
        // its scores are −∞ whatever is subtracted.
        let plain = |x: f32| if x.is_nan() { f32::NAN } else { x };
        let lse = if lse == f32::NEG_INFINITY { 0.0 } else { lse };
        GradientRow {
            scores: tiles.0.add(at * row),
            grads: tiles.1.add(at * row),
            there,
            span: (start / SIDE, end / SIDE),
            scale: how.scale * std::f32::consts::LOG2_E,
            lse: plain(lse) * std::f32::consts::LOG2_E,
            after: of.scale,
            delta: plain(delta),
        }
    }

    /// The weights of a panel and the gradients of its scores; zeros outside the row's span, unless `ALL`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn panel<const ALL: bool>(&self, panel: usize) -> (__m512, __m512) {
        if !ALL && !(self.span.0..self.span.1).contains(&panel) {
            return (_mm512_setzero_ps(), _mm512_setzero_ps());
        }
        let score = _mm512_loadu_ps(self.scores.add(panel * SIDE));
        let x = _mm512_fmsub_ps(score, _mm512_set1_ps(self.scale), _mm512_set1_ps(self.lse));
        let there = not_negligible(x);
        let weight = power_of_two(there, x);
        let grad = _mm512_loadu_ps(self.grads.add(panel * SIDE));
        // Exactly zero where the gradient equals delta.
        let grad = _mm512_mul_ps(_mm512_sub_ps(grad, _mm512_set1_ps(self.delta)), _mm512_set1_ps(self.after));
        (weight, _mm512_maskz_mul_ps(there, weight, grad))
    }
}

/// Interleaves two rows, rounded to nearest with ties away from zero.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn interleave(first: __m512, second: __m512) -> __m512i {
    let half = _mm512_set1_epi32(0x8000);
    let first = _mm512_add_epi32(_mm512_castps_si512(first), half);
    let second = _mm512_add_epi32(_mm512_castps_si512(second), half);
    _mm512_mask_blend_epi16(0xaaaa_aaaa, _mm512_srli_epi32::<16>(first), second)
}
