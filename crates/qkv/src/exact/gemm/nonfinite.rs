//! Non-finite elements and scores that overflow, which packed products cannot handle. Ordinary tiles never get here.

use super::{Arithmetic, PackedRows, TileGemm};
use crate::tuning::{KEYS, QUERIES};
use half::bf16;
use qkv_simd::bf16_gemm::{SIDE, as_bf16};
use qkv_simd::bf16x3_gemm::{self, Bf16x3Gemm};
use qkv_simd::{Element, Real, padded};
use std::ops::Range;

/// Replaces non-finite elements by zero.
pub(super) fn zero_nonfinite<T: Element>(stage: &mut [T]) {
    stage.iter_mut().filter(|x| !x.widen().is_finite()).for_each(|x| *x = T::narrow(T::Acc::ZERO));
}

/// Recomputes the non-finite scores of a bf16x3 product, rows of [`KEYS`], one by one in f64. ∞ cannot be split, and
/// the terms of very large numbers, which have either sign, may sum to ∞ − ∞. Scores with a NaN operand stay as they
/// are.
pub(super) fn recompute_nonfinite(
    left: &[bf16],
    right: bf16x3_gemm::SplitB<'_>,
    width: usize,
    rows: usize,
    panels: Range<usize>,
    scores: &mut [f32],
) {
    let columns = panels.start * SIDE..panels.end * SIDE;
    let packed_a_row = |r: usize| &left[r * bf16x3_gemm::packed_a_len(width)..];
    let of_row = |r: usize| (0..width).map(move |k| Bf16x3Gemm::reconstruct_a(packed_a_row(r), width, k));
    let of_column = |j: usize| (0..width).map(move |k| Bf16x3Gemm::reconstruct_b(right, k, j));
    let (mut bad_rows, mut bad_columns) = ([false; QUERIES], [false; KEYS]);
    for (r, bad) in bad_rows[..rows].iter_mut().enumerate() {
        let scores = &scores[r * KEYS..][columns.clone()];
        // All scores of a row with NaN are NaN.
        let has_nan = || scores.iter().all(|x| x.is_nan()) && of_row(r).any(f32::is_nan);
        *bad = !scores.iter().all(|x| x.is_finite()) && !has_nan();
        if *bad {
            bad_columns[columns.clone()].iter_mut().zip(scores).for_each(|(bad, x)| *bad |= !x.is_finite());
        }
    }
    for j in columns.filter(|&j| bad_columns[j]).filter(|&j| !of_column(j).any(f32::is_nan)) {
        for r in (0..rows).filter(|&r| bad_rows[r]) {
            let score = &mut scores[r * KEYS + j];
            if !score.is_finite() {
                *score = of_row(r).zip(of_column(j)).map(|(x, y)| f64::from(x) * f64::from(y)).sum::<f64>() as f32;
            }
        }
    }
}

impl<A: Real> TileGemm<'_, A> {
    /// Adds the non-finite elements that [`pack_b`](TileGemm::pack_b) left out, where their weight is not zero.
    pub(super) fn add_nonfinite<T: Element<Acc = A>>(
        &mut self,
        weights: &[A],
        rows: usize,
        of: &PackedRows<'_, T>,
        out: &mut [A],
    ) {
        let row = padded::<A>(of.from.width());
        for at in 0..of.keys.len {
            if of.from.load_row(of.b, of.h, of.keys.index(at), &mut self.stage[..row]) {
                continue;
            }
            for r in 0..rows {
                let weights = as_bf16(&weights[r * KEYS..]);
                let split = self.arithmetic == Arithmetic::Bf16x3;
                let weight = if split { Bf16x3Gemm::leading_term(weights, at) } else { weights[at] };
                let weight = A::of_f64(weight.to_f64());
                if weight != A::ZERO {
                    for (out, &x) in out[r * row..].iter_mut().zip(&self.stage[..row]).filter(|(_, x)| !x.is_finite()) {
                        *out += weight * x;
                    }
                }
            }
        }
    }
}
