//! The gradient of the softmax whose results are rounded to bf16 as they are made: what the tile unit takes next.
//!
//! Weights and gradients of scores are each the right operand of a product, two rows side by side, and the gradients a left
//! one as well. Two rows are made together, so all three come out of registers, and nothing in f32 is written back.

// SAFETY, for the whole module: every function asks its caller for AVX-512 with bf16, and for slices that hold what the
// parent module checks before it calls.
#![allow(unsafe_op_in_unsafe_fn, clippy::missing_safety_doc)]

use super::softmax::{counts, power_of_two, stay_awake, store};
use super::{BLOCK, Blocks, DEPTH, SIDE};
use crate::tile::{Exponential, RowGradient};
use half::bf16;
use std::arch::x86_64::*;

/// Up to [`DEPTH`] rows of scores and of gradients of weights become operands. `AWAKE` where the tile unit is in use and not to
/// fall asleep meanwhile.
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
    into: Blocks<'_>,
) {
    let first = into.chunk * BLOCK;
    let to = Two {
        weights: into.weights.as_mut_ptr().add(first),
        grads: into.grads.as_mut_ptr().add(first),
        panel: into.chunks * BLOCK,
    };
    let (panels, tiles) = (width / SIDE, (scores.as_ptr(), grads.as_mut_ptr()));
    for pair in 0..DEPTH / 2 {
        if AWAKE && pair % 4 == 0 {
            stay_awake();
        }
        let first = Line::new(tiles, row, 2 * pair, rows, width, &how, &of);
        let second = Line::new(tiles, row, 2 * pair + 1, rows, width, &how, &of);
        let all = |line: &Line| line.span == (0, panels);
        if panels.is_multiple_of(2) && all(&first) && all(&second) {
            to.fill::<true>(pair, panels, &first, &second);
        } else {
            to.fill::<false>(pair, panels, &first, &second);
        }
    }
}

/// Where the two right operands of a chunk begin, and the distance of their panels.
struct Two {
    weights: *mut bf16,
    grads: *mut bf16,
    panel: usize,
}

impl Two {
    /// Makes two rows and stores them: a row of each block, and the gradients as they lie. `ALL` where both have all panels, in whole
    /// chunks.
    #[inline(always)]
    unsafe fn fill<const ALL: bool>(&self, pair: usize, panels: usize, first: &Line, second: &Line) {
        let at = pair * DEPTH;
        for chunk in 0..panels.div_ceil(2) {
            let (low, high) = (2 * chunk, 2 * chunk + 1);
            let (a0, b0) = (first.make::<ALL>(low), second.make::<ALL>(low));
            self.store(at, low, a0, b0);
            let (a1, b1) = (first.make::<ALL>(high), second.make::<ALL>(high));
            if ALL || high < panels {
                self.store(at, high, a1, b1);
            }
            if ALL || first.there {
                store(first.grads.cast::<bf16>().add(chunk * DEPTH), a0.1, a1.1);
            }
            if ALL || second.there {
                store(second.grads.cast::<bf16>().add(chunk * DEPTH), b0.1, b1.1);
            }
        }
    }

    /// Stores a row of each block of a panel, from the weights and gradients of two rows.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn store(&self, at: usize, panel: usize, first: (__m512, __m512), second: (__m512, __m512)) {
        let to = panel * self.panel + at;
        _mm512_storeu_si512(self.weights.add(to).cast(), side_by_side(first.0, second.0));
        _mm512_storeu_si512(self.grads.add(to).cast(), side_by_side(first.1, second.1));
    }
}

/// A row, and what turns its scores and gradients of weights into weights and gradients of scores.
struct Line {
    scores: *const f32,
    grads: *mut f32,
    there: bool,
    /// The panels outside of which every score is absent.
    span: (usize, usize),
    scale: f32,
    lse: f32,
    after: f32,
    delta: f32,
}

impl Line {
    /// Row `r` of a tile, whose scores and gradients begin at `tiles`. One that is not there has no panels.
    #[inline(always)]
    unsafe fn new(
        tiles: (*const f32, *mut f32),
        row: usize,
        r: usize,
        rows: usize,
        width: usize,
        how: &Exponential<'_, f32>,
        of: &RowGradient<'_, f32>,
    ) -> Line {
        let there = r < rows;
        let (at, (start, end)) = if there { (r, how.span(r, width)) } else { (0, (0, 0)) };
        let (lse, delta) = if there { (*of.lse.get_unchecked(at), *of.delta.get_unchecked(at)) } else { (0.0, 0.0) };
        // Whatever a NaN carries: with all bits set, rounding would make a zero of it. A row that sees nothing has an lse of −∞, and
        // scores of −∞ less anything else.
        let plain = |x: f32| if x.is_nan() { f32::NAN } else { x };
        let lse = if lse == f32::NEG_INFINITY { 0.0 } else { lse };
        Line {
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

    /// The weights of a panel, and the gradients of its scores; zeros where the row has none, unless it has `ALL`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn make<const ALL: bool>(&self, panel: usize) -> (__m512, __m512) {
        if !ALL && !(self.span.0..self.span.1).contains(&panel) {
            return (_mm512_setzero_ps(), _mm512_setzero_ps());
        }
        let score = _mm512_loadu_ps(self.scores.add(panel * SIDE));
        let x = _mm512_fmsub_ps(score, _mm512_set1_ps(self.scale), _mm512_set1_ps(self.lse));
        let there = counts(x);
        let weight = power_of_two(there, x);
        let grad = _mm512_loadu_ps(self.grads.add(panel * SIDE));
        // Where they are equal, exactly zero.
        let grad = _mm512_mul_ps(_mm512_sub_ps(grad, _mm512_set1_ps(self.delta)), _mm512_set1_ps(self.after));
        (weight, _mm512_maskz_mul_ps(there, weight, grad))
    }
}

/// Two rows, rounded to the nearest, halves away from zero, pair by pair.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn side_by_side(first: __m512, second: __m512) -> __m512i {
    let half = _mm512_set1_epi32(0x8000);
    let first = _mm512_add_epi32(_mm512_castps_si512(first), half);
    let second = _mm512_add_epi32(_mm512_castps_si512(second), half);
    _mm512_mask_blend_epi16(0xaaaa_aaaa, _mm512_srli_epi32::<16>(first), second)
}
