//! The gradient of the softmax whose results are taken apart as they are made: what the tile unit takes next.
//!
//! Weights and gradients of scores are each the right operand of a product, rows that are 16 apart side by side, and the gradients a left
//! one as well, panels side by side. Two rows are made together, two panels at a time, so all three come out of registers.

// SAFETY, for the whole module: every function asks its caller for AVX-512, and for slices that hold what the parent module checks
// before it calls.
#![allow(unsafe_op_in_unsafe_fn, clippy::missing_safety_doc)]

use super::x86::{apart, beside, store_left, store_right};
use super::{BLOCK, Blocks, DEPTH, SIDE, THIRDS};
use crate::lanes::avx512::F32x16;
use crate::tile::{Exponential, RowGradient, Slope};
use half::bf16;
use std::arch::x86_64::*;

/// Up to [`DEPTH`] rows of scores and of gradients of weights become operands.
#[target_feature(enable = "avx512f,avx512bw,avx512dq")]
#[allow(clippy::too_many_arguments)]
pub(super) unsafe fn gradient(
    scores: &[f32],
    grads: &mut [f32],
    row: usize,
    rows: usize,
    width: usize,
    how: Exponential<'_, f32>,
    of: RowGradient<'_, f32>,
    into: Blocks<'_>,
    (low, low_row): (&mut [bf16], usize),
) {
    let (panels, between) = (width / SIDE, into.chunks * THIRDS * BLOCK);
    let weights_to = into.weights.as_mut_ptr().add(into.chunk * THIRDS * BLOCK);
    let grads_to = into.grads.as_mut_ptr().add(into.chunk * THIRDS * BLOCK);
    for pair in 0..SIDE {
        // The second of the two may not be there.
        let mut lines = [const { None }; 2];
        for (line, r) in lines.iter_mut().zip([pair, pair + SIDE]) {
            if r < rows {
                let (start, end) = if of.lse[r] == f32::NEG_INFINITY { (0, 0) } else { how.span(r, width) };
                *line = Some(Line {
                    scores: scores.as_ptr().add(r * row),
                    grads: grads.as_mut_ptr().add(r * row),
                    low: low.as_mut_ptr().add(r * low_row),
                    span: (start / SIDE, end / SIDE),
                    slope: Slope::new(&how, &of, r),
                });
            }
        }
        let all =
            panels.is_multiple_of(2) && lines.iter().all(|line| line.as_ref().is_some_and(|l| l.span == (0, panels)));
        for chunk in 0..panels.div_ceil(2) {
            let mut made = [[Made::nothing(); 2]; 2];
            for (line, made) in lines.iter().zip(&mut made) {
                let Some(line) = line else { continue };
                for (at, made) in made.iter_mut().enumerate() {
                    let panel = 2 * chunk + at;
                    if all || (line.span.0..line.span.1).contains(&panel) {
                        *made = line.make(panel);
                    }
                }
                let [low, high] = *made;
                let to = line.grads.add(chunk * DEPTH).cast();
                store_left(to, line.low.add(chunk * DEPTH), beside(low.grads, high.grads));
            }
            let [first, second] = made;
            for at in 0..if all { 2 } else { 2.min(panels - 2 * chunk) } {
                let to = (2 * chunk + at) * between + pair * DEPTH;
                store_right(weights_to.add(to), beside(first[at].weights, second[at].weights));
                store_right(grads_to.add(to), beside(first[at].grads, second[at].grads));
            }
        }
    }
}

/// What was made of a panel, taken apart.
#[derive(Clone, Copy)]
struct Made {
    weights: [__m512i; THIRDS],
    grads: [__m512i; THIRDS],
}

impl Made {
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn nothing() -> Self {
        let zeros = [_mm512_setzero_si512(); THIRDS];
        Made { weights: zeros, grads: zeros }
    }
}

/// A row.
struct Line {
    scores: *const f32,
    grads: *mut f32,
    low: *mut bf16,
    /// The panels outside of which every score is absent.
    span: (usize, usize),
    slope: Slope<F32x16>,
}

impl Line {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq")]
    unsafe fn make(&self, panel: usize) -> Made {
        let score = F32x16(_mm512_loadu_ps(self.scores.add(panel * SIDE)));
        let grad = F32x16(_mm512_loadu_ps(self.grads.add(panel * SIDE)));
        let (weight, grad) = self.slope.make::<true, false>(score, grad);
        Made { weights: apart(weight.0), grads: apart(grad.0) }
    }
}
