//! Passes over a tile of scores that lies in the first-level cache: the online softmax, its gradient, scales, caps and
//! masks. A tile is rows of `width` numbers (whole panels) at distance `row`; what a row's pass does depends on that row
//! alone, so a row has the same bits whichever tile it is in.
//!
//! A score of −∞ means that the pair is absent: its weight is exactly 0 and its gradient too, whatever else is NaN.

use crate::isa::Isa;
use crate::kernel::{Kernel, dispatch};
use crate::lanes::Lanes;
use crate::math;
use crate::number::Real;

/// The running state of the online softmax, one entry a row.
#[derive(Debug)]
pub struct Running<'a, A> {
    /// The largest score so far.
    pub max: &'a mut [A],
    /// The sum of `exp(score − max)` so far.
    pub sum: &'a mut [A],
    /// The sum of `exp(score − max)·(score − max)` so far, for the entropy; empty where that is not asked for.
    pub moment: &'a mut [A],
    /// Out: what the row's accumulated values are to be multiplied by, since the maximum has moved.
    pub factor: &'a mut [A],
}

struct Softmax<'a, A> {
    tile: &'a mut [A],
    row: usize,
    rows: usize,
    width: usize,
    scale: A,
    running: Running<'a, A>,
}

/// Turns scores into `exp(scale·score − max)` in place and brings the running maximum and sum forward.
///
/// # Panics
/// Where a slice is too short for `rows`, or the width is not whole panels.
pub fn softmax<A: Real>(
    isa: Isa,
    tile: &mut [A],
    row: usize,
    rows: usize,
    width: usize,
    scale: A,
    running: Running<'_, A>,
) {
    check(tile, row, rows, width);
    let Running { max, sum, moment, factor } = &running;
    assert!(
        max.len() >= rows && sum.len() >= rows && factor.len() >= rows && (moment.is_empty() || moment.len() >= rows)
    );
    dispatch(isa, Softmax { tile, row, rows, width, scale, running });
}

fn check<A: Real>(tile: &[A], row: usize, rows: usize, width: usize) {
    assert!(width.is_multiple_of(A::LANES) && row >= width, "a tile is whole panels wide");
    assert!(rows == 0 || tile.len() >= (rows - 1) * row + width, "the tile is too short");
}

impl<A: Real> Kernel<A> for Softmax<'_, A> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes<Scalar = A>>(self) {
        let Running { max, sum, moment, factor } = self.running;
        for r in 0..self.rows {
            let scores = &mut self.tile[r * self.row..][..self.width];
            // SAFETY: the slice is whole panels long; the caller vouches for the instruction set.
            unsafe {
                let scale = V::splat(self.scale);
                let mut most = V::splat(A::NEG_INFINITY);
                for panel in scores.chunks_exact(A::LANES) {
                    most = V::load(panel.as_ptr()).mul(scale).max(most);
                }
                let mut most = most.greatest();
                if most == A::NEG_INFINITY && scores.iter().any(|&s| s.is_nan()) {
                    most = A::from_f64(f64::NAN);
                }
                let (old, new) = (max[r], if most > max[r] || most.is_nan() { most } else { max[r] });
                max[r] = new;
                if new == A::NEG_INFINITY {
                    scores.fill(A::ZERO);
                    factor[r] = A::ONE;
                    continue;
                }
                let shrink = if old == new { A::ONE } else { math::exp_one::<V>(old - new) };
                factor[r] = shrink;
                // Two sums, by turns, so that one addition need not wait for the last. −∞ stays −∞ and becomes exactly 0.
                let (shift, zero) = (V::splat(new), V::splat(A::ZERO));
                let (mut sums, mut moments) = ([zero; 2], [zero; 2]);
                for pair in scores.chunks_mut(2 * A::LANES) {
                    for (turn, panel) in pair.chunks_exact_mut(A::LANES).enumerate() {
                        let x = V::load(panel.as_ptr()).mul(scale).sub(shift);
                        let weight = math::exp_below_one(x);
                        weight.store(panel.as_mut_ptr());
                        let (sum, of_entropy) = match turn {
                            0 => (&mut sums[0], &mut moments[0]),
                            _ => (&mut sums[1], &mut moments[1]),
                        };
                        *sum = sum.add(weight);
                        if !moment.is_empty() {
                            *of_entropy = of_entropy.add(weight.where_equal(zero, zero, weight.mul(x)));
                        }
                    }
                }
                if !moment.is_empty() {
                    let moved = if old == new || old == A::NEG_INFINITY { A::ZERO } else { (old - new) * sum[r] };
                    let kept = if old == A::NEG_INFINITY { A::ZERO } else { shrink * (moment[r] + moved) };
                    moment[r] = kept + moments[0].add(moments[1]).sum();
                }
                sum[r] = sum[r] * shrink + sums[0].add(sums[1]).sum();
            }
        }
    }
}

/// What the gradient of the softmax needs to know of each row.
#[derive(Clone, Copy, Debug)]
pub struct RowGradient<'a, A> {
    /// The log of the sum of exponentials.
    pub lse: &'a [A],
    /// What is subtracted from the gradient of each weight.
    pub delta: &'a [A],
    /// The gradient of the row's entropy; empty where there is none.
    pub entropy: &'a [A],
}

struct Gradient<'a, A> {
    scores: &'a mut [A],
    grads: &'a mut [A],
    row: usize,
    rows: usize,
    width: usize,
    scale: A,
    of: RowGradient<'a, A>,
}

/// In place, turns scores into weights `p = exp(scale·score − lse)` and gradients of the weights into gradients of the
/// scores `p · (grad − delta − entropy·(score − lse))`.
///
/// # Panics
/// Where a slice is too short for `rows`, or the width is not whole panels.
#[allow(clippy::too_many_arguments)]
pub fn softmax_gradient<A: Real>(
    isa: Isa,
    scores: &mut [A],
    grads: &mut [A],
    row: usize,
    rows: usize,
    width: usize,
    scale: A,
    of: RowGradient<'_, A>,
) {
    check(scores, row, rows, width);
    check(grads, row, rows, width);
    assert!(of.lse.len() >= rows && of.delta.len() >= rows && (of.entropy.is_empty() || of.entropy.len() >= rows));
    dispatch(isa, Gradient { scores, grads, row, rows, width, scale, of });
}

impl<A: Real> Kernel<A> for Gradient<'_, A> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes<Scalar = A>>(self) {
        for r in 0..self.rows {
            let scores = &mut self.scores[r * self.row..][..self.width];
            let grads = &mut self.grads[r * self.row..][..self.width];
            // SAFETY: the slices are whole panels long; the caller vouches for the instruction set.
            unsafe {
                let (least, zero, scale) = (V::splat(A::NEG_INFINITY), V::splat(A::ZERO), V::splat(self.scale));
                let (lse, delta) = (V::splat(self.of.lse[r]), V::splat(self.of.delta[r]));
                let entropy = self.of.entropy.get(r).map(|&e| V::splat(-e));
                for (s, g) in scores.chunks_exact_mut(A::LANES).zip(grads.chunks_exact_mut(A::LANES)) {
                    let score = V::load(s.as_ptr()).mul(scale);
                    let x = score.sub(lse);
                    let weight = score.where_equal(least, zero, math::exp_below_one(x));
                    let mut grad = V::load(g.as_ptr()).sub(delta);
                    if let Some(entropy) = entropy {
                        grad = x.mul_add(entropy, grad);
                    }
                    weight.store(s.as_mut_ptr());
                    score.where_equal(least, zero, weight.mul(grad)).store(g.as_mut_ptr());
                }
            }
        }
    }
}

struct SparsemaxGradient<'a, A> {
    scores: &'a mut [A],
    grads: &'a mut [A],
    scale: A,
    threshold: A,
    delta: A,
}

/// In place, turns a row of scores into sparsemax weights `max(scale·score − threshold, 0)` and gradients of the weights into
/// gradients of the scores: `grad − delta` where the weight is not 0.
///
/// # Panics
/// Where the rows are not whole panels of one length.
pub fn sparsemax_gradient<A: Real>(isa: Isa, scores: &mut [A], grads: &mut [A], scale: A, threshold: A, delta: A) {
    check(scores, scores.len(), 1, scores.len());
    assert_eq!(scores.len(), grads.len());
    dispatch(isa, SparsemaxGradient { scores, grads, scale, threshold, delta });
}

impl<A: Real> Kernel<A> for SparsemaxGradient<'_, A> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes<Scalar = A>>(self) {
        for (s, g) in self.scores.chunks_exact_mut(A::LANES).zip(self.grads.chunks_exact_mut(A::LANES)) {
            // SAFETY: the chunks are whole panels; the caller vouches for the instruction set.
            unsafe {
                let zero = V::splat(A::ZERO);
                let above = V::load(s.as_ptr()).mul(V::splat(self.scale)).sub(V::splat(self.threshold));
                let grad = V::load(g.as_ptr()).sub(V::splat(self.delta));
                zero.where_less(above, above, zero).store(s.as_mut_ptr());
                zero.where_less(above, grad, zero).store(g.as_mut_ptr());
            }
        }
    }
}

struct Weights<'a, A> {
    scores: &'a mut [A],
    scale: A,
    lse: A,
}

/// Turns a row of scores into weights `exp(scale·score − lse)`, in place.
///
/// # Panics
/// Where the row is not whole panels.
pub fn weights<A: Real>(isa: Isa, scores: &mut [A], scale: A, lse: A) {
    check(scores, scores.len(), 1, scores.len());
    dispatch(isa, Weights { scores, scale, lse });
}

impl<A: Real> Kernel<A> for Weights<'_, A> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes<Scalar = A>>(self) {
        for panel in self.scores.chunks_exact_mut(A::LANES) {
            // SAFETY: the chunk is a whole panel; the caller vouches for the instruction set.
            unsafe {
                let s = V::load(panel.as_ptr()).mul(V::splat(self.scale));
                let weight = math::exp(s.sub(V::splat(self.lse)));
                s.where_equal(V::splat(A::NEG_INFINITY), V::splat(A::ZERO), weight).store(panel.as_mut_ptr());
            }
        }
    }
}

struct Cap<'a, A> {
    scores: &'a mut [A],
    slopes: Option<&'a mut [A]>,
    cap: A,
}

/// Soft-caps scores in place, `cap · tanh(score / cap)`, and writes the slope `1 − tanh²` where room is given.
///
/// # Panics
/// Where the row is not whole panels, or the slopes are shorter.
pub fn soft_cap<A: Real>(isa: Isa, scores: &mut [A], slopes: Option<&mut [A]>, cap: A) {
    check(scores, scores.len(), 1, scores.len());
    assert!(slopes.as_ref().is_none_or(|s| s.len() >= scores.len()));
    dispatch(isa, Cap { scores, slopes, cap });
}

impl<A: Real> Kernel<A> for Cap<'_, A> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes<Scalar = A>>(mut self) {
        for (p, panel) in self.scores.chunks_exact_mut(A::LANES).enumerate() {
            // SAFETY: the chunk is a whole panel and the slopes are as long; the caller vouches for the instruction set.
            unsafe {
                let cap = V::splat(self.cap);
                let t = math::tanh(V::load(panel.as_ptr()).div(cap));
                t.mul(cap).store(panel.as_mut_ptr());
                if let Some(slopes) = &mut self.slopes {
                    let one = V::splat(A::ONE);
                    one.sub(t.mul(t)).store(slopes[p * A::LANES..].as_mut_ptr());
                }
            }
        }
    }
}

struct KeepBits<'a, A> {
    row: &'a mut [A],
    bits: &'a [u64],
    kept: A,
    otherwise: A,
}

/// Where bit `j` is set, `row[j] · kept`; elsewhere `otherwise`.
///
/// # Panics
/// Where the row is not whole panels, or there are fewer bits than numbers.
pub fn keep_bits<A: Real>(isa: Isa, row: &mut [A], bits: &[u64], kept: A, otherwise: A) {
    check(row, row.len(), 1, row.len());
    assert!(bits.len() * 64 >= row.len(), "too few bits");
    dispatch(isa, KeepBits { row, bits, kept, otherwise });
}

impl<A: Real> Kernel<A> for KeepBits<'_, A> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes<Scalar = A>>(self) {
        for (p, panel) in self.row.chunks_exact_mut(A::LANES).enumerate() {
            let at = p * A::LANES;
            let bits = (self.bits[at / 64] >> (at % 64)) as u32;
            // SAFETY: the chunk is a whole panel; the caller vouches for the instruction set.
            unsafe {
                let x = V::load(panel.as_ptr()).mul(V::splat(self.kept));
                x.keep(bits, V::splat(self.otherwise)).store(panel.as_mut_ptr());
            }
        }
    }
}

/// What [`row_op`] does to a row, number by number.
#[derive(Clone, Copy, Debug)]
pub enum RowOp<'a, A> {
    /// Multiply by a number.
    Scale(A),
    /// Multiply by another row.
    Multiply(&'a [A]),
    /// Add another row.
    Add(&'a [A]),
}

struct Elementwise<'a, A> {
    row: &'a mut [A],
    op: RowOp<'a, A>,
}

/// Changes a row number by number.
///
/// # Panics
/// Where the row is not whole panels, or the other row is shorter.
pub fn row_op<A: Real>(isa: Isa, row: &mut [A], op: RowOp<'_, A>) {
    check(row, row.len(), 1, row.len());
    if let RowOp::Multiply(other) | RowOp::Add(other) = op {
        assert!(other.len() >= row.len(), "the other row is shorter");
    }
    dispatch(isa, Elementwise { row, op });
}

impl<A: Real> Kernel<A> for Elementwise<'_, A> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes<Scalar = A>>(self) {
        for (p, panel) in self.row.chunks_exact_mut(A::LANES).enumerate() {
            // SAFETY: the chunk is a whole panel and the other row is as long; the caller vouches for the instruction set.
            unsafe {
                let x = V::load(panel.as_ptr());
                let y = match self.op {
                    RowOp::Scale(factor) => x.mul(V::splat(factor)),
                    RowOp::Multiply(other) => x.mul(V::load(other[p * A::LANES..].as_ptr())),
                    RowOp::Add(other) => x.add(V::load(other[p * A::LANES..].as_ptr())),
                };
                y.store(panel.as_mut_ptr());
            }
        }
    }
}

struct Dot<'a, A> {
    a: &'a [A],
    b: &'a [A],
}

/// The sum of products of two rows: the very chain of multiply-adds that [`product`](crate::product()) makes, so that where
/// the two sums are equal in exact arithmetic term by term, they are equal to the last bit.
///
/// # Panics
/// Where they are not of one length.
pub fn dot<A: Real>(isa: Isa, a: &[A], b: &[A]) -> A {
    assert_eq!(a.len(), b.len());
    dispatch(isa, Dot { a, b })
}

impl<A: Real> Kernel<A> for Dot<'_, A> {
    type Output = A;

    #[inline(always)]
    unsafe fn run<V: Lanes<Scalar = A>>(self) -> A {
        // SAFETY: the caller vouches for the instruction set; nothing is loaded but by index.
        unsafe {
            let mut sum = V::splat(A::ZERO);
            for (&a, &b) in self.a.iter().zip(self.b) {
                sum = V::splat(a).mul_add(V::splat(b), sum);
            }
            sum.greatest()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The largest error of `weights` with lse 0, that is of the exponential, in units in the last place.
    #[test]
    fn the_exponential_is_right_to_the_last_bits() {
        for isa in Isa::available() {
            let mut worst = 0.0f64;
            let mut x = -87.0f32;
            while x < 88.0 {
                let mut row: [f32; 16] = std::array::from_fn(|l| x + l as f32 * 1e-4);
                let inputs = row;
                weights(isa, &mut row, 1.0, 0.0);
                for (x, y) in inputs.into_iter().zip(row) {
                    let truth = (x as f64).exp();
                    let unit = (truth as f32).abs().max(f32::MIN_POSITIVE) as f64 * f32::EPSILON as f64;
                    worst = worst.max((y as f64 - truth).abs() / unit);
                }
                x += 1.6e-3;
            }
            assert!(worst < 1.5, "{isa}: {worst} ulp in f32");
            let mut worst = 0.0f64;
            for step in 0..200_000 {
                let mut row: [f64; 8] = std::array::from_fn(|l| -700.0 + step as f64 * 7e-3 + l as f64 * 1e-4);
                let inputs = row;
                weights(isa, &mut row, 1.0, 0.0);
                for (x, y) in inputs.into_iter().zip(row) {
                    worst = worst.max((y - x.exp()).abs() / (x.exp() * f64::EPSILON));
                }
            }
            assert!(worst < 2.0, "{isa}: {worst} ulp in f64");
        }
    }

    #[test]
    fn the_exponential_of_the_limits_is_the_limit() {
        for isa in Isa::available() {
            let mut row = [0.0f32; 16];
            row[..5].copy_from_slice(&[f32::NEG_INFINITY, f32::NAN, -200.0, 0.0, 200.0]);
            weights(isa, &mut row, 1.0, 0.0);
            assert_eq!(row[0], 0.0);
            assert!(row[1].is_nan());
            assert_eq!(row[2..5], [0.0, 1.0, f32::INFINITY]);
        }
    }

    #[test]
    fn tanh_is_right_to_the_last_bits_near_zero_and_far_away() {
        for isa in Isa::available() {
            let mut worst = 0.0f64;
            for step in 0..200_000 {
                let mut row: [f32; 16] = std::array::from_fn(|l| {
                    let size = 1e-6f32 * 1.0001f32.powi(step) * (1.0 + l as f32 * 5e-6);
                    if l % 2 == 0 { size } else { -size }
                });
                let inputs = row;
                soft_cap(isa, &mut row, None, 1.0);
                for (x, y) in inputs.into_iter().zip(row) {
                    let truth = (x as f64).tanh();
                    let unit = (truth as f32).abs() as f64 * f32::EPSILON as f64;
                    worst = worst.max((y as f64 - truth).abs() / unit);
                }
            }
            assert!(worst < 3.0, "{isa}: {worst} ulp");
            let mut row = [f32::NAN; 16];
            row[1] = f32::INFINITY;
            row[2] = f32::NEG_INFINITY;
            soft_cap(isa, &mut row, None, 1.0);
            assert!(row[0].is_nan());
            assert_eq!(row[1..3], [1.0, -1.0]);
        }
    }
}
