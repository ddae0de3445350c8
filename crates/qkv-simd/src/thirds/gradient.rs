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
        let to = Two { weights: weights_to.add(pair * DEPTH), grads: grads_to.add(pair * DEPTH), between };
        match &lines {
            [Some(first), Some(second)] if panels.is_multiple_of(2) && first.sees(panels) && second.sees(panels) => {
                to.fill::<true>(panels, Some(first), Some(second))
            }
            [first, second] => to.fill::<false>(panels, first.as_ref(), second.as_ref()),
        }
    }
}

/// Where a row of both right operands begins, and the distance of their panels.
struct Two {
    weights: *mut bf16,
    grads: *mut bf16,
    between: usize,
}

impl Two {
    /// Makes two rows and stores them. `ALL` where both are there and have all panels, in whole chunks.
    #[inline(always)]
    unsafe fn fill<const ALL: bool>(&self, panels: usize, first: Option<&Line>, second: Option<&Line>) {
        for chunk in 0..panels.div_ceil(2) {
            let mut grads = [[[_mm512_setzero_si512(); THIRDS]; 2]; 2];
            for at in 0..2 {
                let panel = 2 * chunk + at;
                if !ALL && panel == panels {
                    continue;
                }
                let (a, b) = (made::<ALL>(first, panel), made::<ALL>(second, panel));
                store_right(self.weights.add(panel * self.between), beside(a.weights, b.weights));
                store_right(self.grads.add(panel * self.between), beside(a.grads, b.grads));
                (grads[0][at], grads[1][at]) = (a.grads, b.grads);
            }
            for (line, [low, high]) in [first, second].into_iter().zip(grads) {
                if let Some(line) = line {
                    let to = line.grads.add(chunk * DEPTH).cast();
                    store_left(to, line.low.add(chunk * DEPTH), beside(low, high));
                }
            }
        }
    }
}

/// What a row has in a panel; nothing where it sees none of it, unless it has `ALL`.
#[inline(always)]
unsafe fn made<const ALL: bool>(line: Option<&Line>, panel: usize) -> Made {
    match line {
        Some(line) if ALL || (line.span.0..line.span.1).contains(&panel) => line.make(panel),
        _ => Made::nothing(),
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
    /// Whether it sees all of so many panels.
    fn sees(&self, panels: usize) -> bool {
        self.span == (0, panels)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq")]
    unsafe fn make(&self, panel: usize) -> Made {
        let score = F32x16(_mm512_loadu_ps(self.scores.add(panel * SIDE)));
        let grad = F32x16(_mm512_loadu_ps(self.grads.add(panel * SIDE)));
        let (weight, grad) = self.slope.make::<true, false>(score, grad);
        Made { weights: apart(weight.0), grads: apart(grad.0) }
    }
}
