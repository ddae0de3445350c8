//! Passes over rows of features, for linear attention: feature maps and their slopes, the decay of weights within a
//! chunk, and sums of states.
//!
//! A tile is rows of whole panels with stride `row`, as in [`tile`](crate::tile), and a pass treats each row
//! independently. Elements of the last panel beyond the number of features are set to 0.

use crate::isa::Isa;
use crate::kernel::{Kernel, dispatch};
use crate::lanes::Lanes;
use crate::math;
use crate::number::Real;
use crate::{padded, span};

/// An elementwise feature map that is never negative.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Positive {
    /// `elu(x) + 1`: `x + 1` above 0, `eˣ` below.
    EluPlusOne,
    /// `max(x, 0)`.
    Relu,
}

fn check<A: Real>(tile: &[A], row: usize, rows: usize, width: usize) {
    let padded = padded::<A>(width);
    assert!(row >= padded, "a row is whole panels");
    assert!(tile.len() >= span(rows, row, padded), "the tile is too short");
}

/// The bits of the lanes of panel `p` that are below `width`.
#[inline(always)]
fn lanes_below<A: Real>(width: usize, p: usize) -> u32 {
    let left = width.saturating_sub(p * A::LANES).min(A::LANES);
    (1u32 << left) - 1
}

struct Apply<'a, A> {
    tile: &'a mut [A],
    row: usize,
    rows: usize,
    width: usize,
    map: Positive,
}

/// Maps rows of `width` elements in place.
///
/// ```
/// use qkv_simd::features::{apply, Positive};
/// let mut row = [0.0f32; 16];
/// row[..3].copy_from_slice(&[2.0, 0.0, -1.0]);
/// apply(qkv_simd::Isa::best(), &mut row, 16, 1, 3, Positive::EluPlusOne);
/// assert_eq!(row[..2], [3.0, 1.0]);
/// assert!((row[2] - (-1.0f32).exp()).abs() < 1e-7);
/// assert_eq!(row[3..], [0.0; 13]);
/// ```
///
/// # Panics
/// If the tile is too short.
pub fn apply<A: Real>(isa: Isa, tile: &mut [A], row: usize, rows: usize, width: usize, map: Positive) {
    check(tile, row, rows, width);
    dispatch(isa, Apply { tile, row, rows, width, map });
}

impl<A: Real> Kernel<A> for Apply<'_, A> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes<Scalar = A>>(self) {
        for r in 0..self.rows {
            let panels = self.tile[r * self.row..].chunks_exact_mut(A::LANES);
            for (p, panel) in panels.take(self.width.div_ceil(A::LANES)).enumerate() {
                // SAFETY: the chunk is a whole panel; the caller guarantees the instruction set.
                unsafe {
                    let (zero, one) = (V::splat(A::ZERO), V::splat(A::ONE));
                    let x = V::load(panel.as_ptr());
                    let y = match self.map {
                        Positive::EluPlusOne => x.where_less(zero, math::exp(x), x.add(one)),
                        Positive::Relu => x.where_less(zero, zero, x), // NaN stays
                    };
                    y.keep(lanes_below::<A>(self.width, p), zero).store(panel.as_mut_ptr());
                }
            }
        }
    }
}

struct Slope<'a, A> {
    grads: &'a mut [A],
    features: &'a [A],
    map: Positive,
}

/// Multiplies gradients of features by the slope of the map, computed from the features: for elu + 1 it is the feature
/// itself up to 1, then 1; for ReLU it is 0 at 0.
///
/// # Panics
/// If the two are not whole panels of one length.
pub fn slope<A: Real>(isa: Isa, grads: &mut [A], features: &[A], map: Positive) {
    assert!(grads.len().is_multiple_of(A::LANES) && grads.len() == features.len());
    dispatch(isa, Slope { grads, features, map });
}

impl<A: Real> Kernel<A> for Slope<'_, A> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes<Scalar = A>>(self) {
        for (grads, features) in self.grads.chunks_exact_mut(A::LANES).zip(self.features.chunks_exact(A::LANES)) {
            // SAFETY: the chunks are whole panels; the caller guarantees the instruction set.
            unsafe {
                let (zero, one) = (V::splat(A::ZERO), V::splat(A::ONE));
                let (grad, feature) = (V::load(grads.as_ptr()), V::load(features.as_ptr()));
                let grad = match self.map {
                    Positive::EluPlusOne => grad.mul(feature.where_less(one, feature, one)),
                    Positive::Relu => feature.where_equal(zero, zero, grad),
                };
                grad.store(grads.as_mut_ptr());
            }
        }
    }
}

struct Exponentials<'a, A> {
    tile: &'a mut [A],
    row: usize,
    rows: usize,
    width: usize,
    logs: &'a mut [A],
}

/// Turns rows of exponents into `exp(x − max)` in place, with the maximum of the row, and adds the maximum to the row's
/// entry of `logs`: the row represents `exp(log)` times its contents.
///
/// # Panics
/// If a slice is too short for `rows`.
pub fn exponentials<A: Real>(isa: Isa, tile: &mut [A], row: usize, rows: usize, width: usize, logs: &mut [A]) {
    check(tile, row, rows, width);
    assert!(logs.len() >= rows, "a log for each row");
    dispatch(isa, Exponentials { tile, row, rows, width, logs });
}

impl<A: Real> Kernel<A> for Exponentials<'_, A> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes<Scalar = A>>(self) {
        let panels = self.width.div_ceil(A::LANES);
        for r in 0..self.rows {
            let row = &mut self.tile[r * self.row..][..panels * A::LANES];
            // SAFETY: the row is whole panels; the caller guarantees the instruction set.
            unsafe {
                let least = V::splat(A::NEG_INFINITY);
                let mut most = least;
                for (p, panel) in row.chunks_exact(A::LANES).enumerate() {
                    let x = V::load(panel.as_ptr()).keep(lanes_below::<A>(self.width, p), least);
                    most = x.max(most);
                }
                let most = most.max_lane();
                self.logs[r] += most;
                let (shift, zero) = (V::splat(most), V::splat(A::ZERO));
                for (p, panel) in row.chunks_exact_mut(A::LANES).enumerate() {
                    let y = math::exp(V::load(panel.as_ptr()).sub(shift));
                    y.keep(lanes_below::<A>(self.width, p), zero).store(panel.as_mut_ptr());
                }
            }
        }
    }
}

/// The decay of a tile of weights.
#[derive(Clone, Copy, Debug)]
pub struct Decay<'a, A> {
    /// The number of visible columns of each row, from the first; the others become 0 whatever they hold.
    pub seen: &'a [usize],
    /// A log per row.
    pub rows: &'a [A],
    /// A log per column; empty if they are all 0.
    pub columns: &'a [A],
}

struct Decayed<'a, A> {
    tile: &'a mut [A],
    row: usize,
    count: usize,
    width: usize,
    of: Decay<'a, A>,
}

/// Multiplies entry `(i, j)` of a tile by `exp(rows[i] + columns[j])` where `j < seen[i]`, and sets it to 0 elsewhere.
/// The factor is kept finite: the entry it multiplies is as small as the factor is large.
///
/// # Panics
/// If a slice is too short for `count` rows of `width`, which is whole panels.
pub fn decay<A: Real>(isa: Isa, tile: &mut [A], row: usize, count: usize, width: usize, of: Decay<'_, A>) {
    assert!(width.is_multiple_of(A::LANES), "a tile is whole panels wide");
    check(tile, row, count, width);
    assert!(of.seen.len() >= count && of.rows.len() >= count && (of.columns.is_empty() || of.columns.len() >= width));
    dispatch(isa, Decayed { tile, row, count, width, of });
}

impl<A: Real> Kernel<A> for Decayed<'_, A> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes<Scalar = A>>(self) {
        for r in 0..self.count {
            let row = &mut self.tile[r * self.row..][..self.width];
            // SAFETY: the row is whole panels and the columns are as long; the caller guarantees the instruction set.
            unsafe {
                let (zero, log) = (V::splat(A::ZERO), V::splat(self.of.rows[r]));
                let limit = V::splat(highest::<A>());
                let bounded = |x: V| limit.where_less(x, limit, x);
                let same = math::exp(bounded(log));
                for (p, panel) in row.chunks_exact_mut(A::LANES).enumerate() {
                    let bits = lanes_below::<A>(self.of.seen[r], p);
                    if bits == 0 {
                        zero.store(panel.as_mut_ptr());
                        continue;
                    }
                    let factor = match self.of.columns.get(p * A::LANES..) {
                        Some(columns) if !self.of.columns.is_empty() => {
                            math::exp(bounded(V::load(columns.as_ptr()).add(log)))
                        }
                        _ => same,
                    };
                    V::load(panel.as_ptr()).mul(factor).keep(bits, zero).store(panel.as_mut_ptr());
                }
            }
        }
    }
}

/// The largest log of a factor: a little below overflow of the exponential, so that sums of a few thousand terms stay
/// finite.
pub fn highest<A: Real>() -> A {
    A::HIGHEST - A::from_f64(8.0)
}

struct Blend<'a, A> {
    out: &'a mut [A],
    a: (&'a [A], A),
    b: (&'a [A], A),
}

/// `out = a.0 · a.1 + b.0 · b.1`, elementwise.
///
/// # Panics
/// If the three are not whole panels of one length.
pub fn blend<A: Real>(isa: Isa, out: &mut [A], a: (&[A], A), b: (&[A], A)) {
    assert!(out.len().is_multiple_of(A::LANES) && out.len() == a.0.len() && out.len() == b.0.len());
    dispatch(isa, Blend { out, a, b });
}

impl<A: Real> Kernel<A> for Blend<'_, A> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes<Scalar = A>>(self) {
        let inputs = self.a.0.chunks_exact(A::LANES).zip(self.b.0.chunks_exact(A::LANES));
        for (out, (a, b)) in self.out.chunks_exact_mut(A::LANES).zip(inputs) {
            // SAFETY: the chunks are whole panels; the caller guarantees the instruction set.
            unsafe {
                let scaled = V::load(b.as_ptr()).mul(V::splat(self.b.1));
                V::load(a.as_ptr()).mul_add(V::splat(self.a.1), scaled).store(out.as_mut_ptr());
            }
        }
    }
}

struct RowDots<'a, A> {
    a: (&'a [A], usize),
    b: (&'a [A], usize),
    width: usize,
    out: &'a mut [A],
}

/// Dot products of corresponding rows of two tiles, each given with its row stride (0: one row for all), over `width`,
/// which is whole panels. One result per entry of `out`.
///
/// # Panics
/// If a tile is too short.
pub fn row_dots<A: Real>(isa: Isa, a: (&[A], usize), b: (&[A], usize), width: usize, out: &mut [A]) {
    assert!(width.is_multiple_of(A::LANES), "rows are whole panels");
    let long = |of: (&[A], usize)| of.0.len() >= span(out.len(), of.1, width);
    assert!(long(a) && long(b), "a tile is too short");
    dispatch(isa, RowDots { a, b, width, out });
}

impl<A: Real> Kernel<A> for RowDots<'_, A> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes<Scalar = A>>(self) {
        for (r, out) in self.out.iter_mut().enumerate() {
            let (a, b) = (&self.a.0[r * self.a.1..][..self.width], &self.b.0[r * self.b.1..][..self.width]);
            // SAFETY: the rows are whole panels; the caller guarantees the instruction set.
            unsafe {
                let mut sum = V::splat(A::ZERO);
                for (a, b) in a.chunks_exact(A::LANES).zip(b.chunks_exact(A::LANES)) {
                    sum = V::load(a.as_ptr()).mul_add(V::load(b.as_ptr()), sum);
                }
                *out = sum.sum();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_are_what_they_say_on_every_instruction_set() {
        for isa in Isa::available() {
            let numbers: Vec<f64> = (0..32).map(|x| (x as f64 - 11.0) * 0.7).collect();
            let mut elu = numbers.clone();
            apply(isa, &mut elu, 16, 2, 13, Positive::EluPlusOne);
            let mut relu = numbers.clone();
            apply(isa, &mut relu, 16, 2, 13, Positive::Relu);
            for (at, &x) in numbers.iter().enumerate() {
                let there = at % 16 < 13;
                let truth = if x > 0.0 { x + 1.0 } else { x.exp() };
                assert!((elu[at] - if there { truth } else { 0.0 }).abs() < 1e-14, "{isa}");
                assert_eq!(relu[at], if there { x.max(0.0) } else { 0.0 });
            }
            let mut nan = [f32::NAN; 16];
            apply(isa, &mut nan, 16, 1, 16, Positive::Relu);
            assert!(nan.iter().all(|x| x.is_nan()));
        }
    }

    #[test]
    fn exponentials_leave_their_maximum_in_the_log() {
        for isa in Isa::available() {
            let mut rows = [0.0f32; 32];
            rows[..3].copy_from_slice(&[-500.0, -499.0, -502.0]);
            rows[16..19].copy_from_slice(&[500.0, 499.0, 300.0]);
            let mut logs = [1.0, 2.0];
            exponentials(isa, &mut rows, 16, 2, 3, &mut logs);
            assert_eq!(logs, [-498.0, 502.0]);
            assert_eq!((rows[1], rows[16], rows[18]), (1.0, 1.0, 0.0));
            assert_eq!(rows[3..16], [0.0; 13]);
        }
    }

    #[test]
    fn what_is_not_seen_becomes_zero_even_if_it_is_nan() {
        for isa in Isa::available() {
            let mut tile = [f32::NAN; 32];
            tile[0] = 3.0;
            let columns: Vec<f32> = (0..16).map(|j| j as f32 * 1e3).collect();
            decay(isa, &mut tile, 16, 2, 16, Decay { seen: &[1, 0], rows: &[0.0, 0.0], columns: &columns });
            assert_eq!(tile[0], 3.0);
            assert!(tile[1..].iter().all(|&x| x == 0.0));
            let mut one = [1e-30f32; 16];
            decay(isa, &mut one, 16, 1, 16, Decay { seen: &[16], rows: &[1e4], columns: &[] });
            assert!(one[0].is_finite());
        }
    }
}
