//! The online softmax over the rows of a tile, and its gradient.

use super::check;
use crate::isa::Isa;
use crate::kernel::{Kernel, dispatch};
use crate::lanes::{Lanes, MOST_LANES};
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

/// The panels of a row, `start .. end`, outside of which every score is absent and may hold anything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// The first panel.
    pub start: u16,
    /// The panel after the last.
    pub end: u16,
}

impl Span {
    /// All panels of rows of `width` numbers.
    pub fn all<A: Real>(width: usize) -> Span {
        Span { start: 0, end: (width / A::LANES) as u16 }
    }

    /// The smallest span that holds both.
    #[inline]
    pub fn join(self, other: Span) -> Span {
        match (self.start == self.end, other.start == other.end) {
            (true, _) => other,
            (_, true) => self,
            _ => Span { start: self.start.min(other.start), end: self.end.max(other.end) },
        }
    }
}

/// How scores become weights.
#[derive(Clone, Copy, Debug)]
pub struct Exponential<'a, A> {
    /// What scores are multiplied by first.
    pub scale: A,
    /// Where each row has scores; empty where all are everywhere.
    pub spans: &'a [Span],
    /// Right to the last bits, or to the 17 that weights in bf16 cannot tell from them.
    pub sharp: bool,
}

impl<A: Real> Exponential<'_, A> {
    /// The span of a row.
    #[inline(always)]
    pub(crate) fn span(&self, r: usize, width: usize) -> (usize, usize) {
        match self.spans.get(r) {
            None => (0, width),
            Some(span) => {
                let end = (span.end as usize * A::LANES).min(width);
                ((span.start as usize * A::LANES).min(end), end)
            }
        }
    }
}

struct Softmax<'a, A> {
    tile: &'a mut [A],
    row: usize,
    rows: usize,
    width: usize,
    how: Exponential<'a, A>,
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
    how: Exponential<'_, A>,
    running: Running<'_, A>,
) {
    check_softmax(tile, row, rows, width, &how, &running);
    dispatch(isa, Softmax { tile, row, rows, width, how, running });
}

/// Checks the slices of a softmax.
pub(crate) fn check_softmax<A: Real>(
    tile: &[A],
    row: usize,
    rows: usize,
    width: usize,
    how: &Exponential<'_, A>,
    running: &Running<'_, A>,
) {
    check(tile, row, rows, width);
    assert!(how.spans.is_empty() || how.spans.len() >= rows);
    let Running { max, sum, moment, factor } = running;
    assert!(
        max.len() >= rows && sum.len() >= rows && factor.len() >= rows && (moment.is_empty() || moment.len() >= rows)
    );
}

impl<A: Real> Kernel<A> for Softmax<'_, A> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes<Scalar = A>>(self) {
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            match (self.how.sharp, self.running.moment.is_empty()) {
                (true, true) => self.rows::<V, true, false>(),
                (true, false) => self.rows::<V, true, true>(),
                (false, true) => self.rows::<V, false, false>(),
                (false, false) => self.rows::<V, false, true>(),
            }
        }
    }
}

impl<A: Real> Softmax<'_, A> {
    /// As many rows at a time as there are lanes: first their maxima, then their weights, so that no row's exponentials wait
    /// for its own maximum.
    #[inline(always)]
    unsafe fn rows<V: Lanes<Scalar = A>, const SHARP: bool, const ENTROPY: bool>(self) {
        let Running { max, sum, moment, factor } = self.running;
        for first in (0..self.rows).step_by(A::LANES) {
            let rows = first..(first + A::LANES).min(self.rows);
            let count = rows.len();
            let [mut before, mut top, mut shrink, mut sum_before] = [[A::NEG_INFINITY; MOST_LANES]; 4];
            before[..count].copy_from_slice(&max[rows.clone()]);
            sum_before[..count].copy_from_slice(&sum[rows.clone()]);
            // SAFETY: the arrays are as long as there are lanes; rows are whole panels; the caller vouches for the rest.
            unsafe {
                let (zero, one, least) = (V::splat(A::ZERO), V::splat(A::ONE), V::splat(A::NEG_INFINITY));
                let mut each = [least; MOST_LANES];
                for r in rows.clone() {
                    let (start, end) = self.how.span(r, self.width);
                    each[r - first] = greatest::<V>(&self.tile[r * self.row..][start..end], self.how.scale);
                }
                // Rounding keeps the order, so the scale can wait for the largest, unless it turns the order round.
                let found = V::greatest_each(&each);
                let most = if self.how.scale < A::ZERO { found } else { found.mul(V::splat(self.how.scale)) };
                let old = V::load(before.as_ptr());
                old.where_less(most, most, old).store(top.as_mut_ptr());
                // A row of nothing but NaN and what is absent is NaN.
                let mut seldom = found.where_equal(least, one, most.where_equal(most, zero, one)).not_zero();
                seldom &= u32::MAX >> (u32::BITS - count as u32);
                while seldom != 0 {
                    let at = seldom.trailing_zeros() as usize;
                    seldom &= seldom - 1;
                    let (start, end) = self.how.span(first + at, self.width);
                    if self.how.scale.is_nan()
                        || self.tile[(first + at) * self.row..][start..end].iter().any(|s| s.is_nan())
                    {
                        top[at] = A::from_f64(f64::NAN);
                    }
                }
                // Nothing moves where the maximum stays, −∞ included.
                let new = V::load(top.as_ptr());
                old.where_equal(new, one, math::exp(old.sub(new))).store(shrink.as_mut_ptr());
                max[rows.clone()].copy_from_slice(&top[..count]);
                factor[rows.clone()].copy_from_slice(&shrink[..count]);
                let mut totals = [zero; MOST_LANES];
                for r in rows.clone() {
                    let whole = &mut self.tile[r * self.row..][..self.width];
                    let (start, end) = self.how.span(r, self.width);
                    if start > 0 || end < self.width {
                        whole[..start].fill(A::ZERO);
                        whole[end..].fill(A::ZERO);
                    }
                    let (scores, old, new, shrink) =
                        (&mut whole[start..end], before[r - first], top[r - first], shrink[r - first]);
                    if new == A::NEG_INFINITY {
                        scores.fill(A::ZERO);
                        continue;
                    }
                    // Two sums, by turns, so that one addition need not wait for the last.
                    let (mut sums, mut moments) = ([zero; 2], [zero; 2]);
                    let mut pairs = scores.chunks_exact_mut(2 * A::LANES);
                    for pair in &mut pairs {
                        let at = pair.as_mut_ptr();
                        weigh::<V, SHARP, ENTROPY>(at, self.how.scale, new, &mut sums[0], &mut moments[0]);
                        weigh::<V, SHARP, ENTROPY>(
                            at.add(A::LANES),
                            self.how.scale,
                            new,
                            &mut sums[1],
                            &mut moments[1],
                        );
                    }
                    if let [at, ..] = pairs.into_remainder() {
                        weigh::<V, SHARP, ENTROPY>(at, self.how.scale, new, &mut sums[0], &mut moments[0]);
                    }
                    if ENTROPY {
                        let moved = if old == new || old == A::NEG_INFINITY { A::ZERO } else { (old - new) * sum[r] };
                        let kept = if old == A::NEG_INFINITY { A::ZERO } else { shrink * (moment[r] + moved) };
                        moment[r] = kept + moments[0].add(moments[1]).sum();
                    }
                    totals[r - first] = sums[0].add(sums[1]);
                }
                let kept = V::load(sum_before.as_ptr()).mul(V::load(shrink.as_ptr()));
                kept.add(V::sum_each(&totals)).store(sum_before.as_mut_ptr());
                sum[rows].copy_from_slice(&sum_before[..count]);
            }
        }
    }
}

/// Turns a panel of scores into `exp(scale·score − top)`, and adds them up. −∞ becomes exactly 0.
///
/// # Safety
/// There is a panel at `at`, and the CPU has the instruction set of `V`.
#[inline(always)]
unsafe fn weigh<V: Lanes, const SHARP: bool, const ENTROPY: bool>(
    at: *mut V::Scalar,
    scale: V::Scalar,
    top: V::Scalar,
    sum: &mut V,
    moment: &mut V,
) {
    // SAFETY: the caller vouches for both.
    unsafe {
        let (score, scale, top, zero) = (V::load(at), V::splat(scale), V::splat(top), V::splat(V::Scalar::ZERO));
        // Rounded before it is subtracted, the largest becomes exactly 0; where weights are rounded to bf16 it may as well
        // become a little more or less.
        let x = if SHARP || ENTROPY { score.mul(scale).sub(top) } else { score.mul_add(scale, zero.sub(top)) };
        let weight = math::exp_below_one::<V, SHARP>(x);
        weight.store(at);
        *sum = sum.add(weight);
        if ENTROPY {
            *moment = moment.add(weight.where_equal(zero, zero, weight.mul(x)));
        }
    }
}

/// The largest scores lane by lane, times the scale if that turns their order round; what is NaN does not count.
///
/// # Safety
/// The CPU has the instruction set of `V`.
#[inline(always)]
unsafe fn greatest<V: Lanes>(scores: &[V::Scalar], scale: V::Scalar) -> V {
    // SAFETY: the slice is whole panels long; the caller vouches for the instruction set.
    unsafe {
        let (lanes, least) = (V::Scalar::LANES, V::splat(V::Scalar::NEG_INFINITY));
        let mut most = [least; 2];
        if scale < V::Scalar::ZERO {
            for panel in scores.chunks_exact(lanes) {
                most[0] = V::load(panel.as_ptr()).mul(V::splat(scale)).max(most[0]);
            }
            return most[0];
        }
        let mut pairs = scores.chunks_exact(2 * lanes);
        for pair in &mut pairs {
            most[0] = V::load(pair.as_ptr()).max(most[0]);
            most[1] = V::load(pair.as_ptr().add(lanes)).max(most[1]);
        }
        if let [at, ..] = pairs.remainder() {
            most[0] = V::load(at).max(most[0]);
        }
        most[0].max(most[1])
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
    /// What the gradients of the scores are multiplied by in the end.
    pub scale: A,
}

struct Gradient<'a, A> {
    scores: &'a mut [A],
    grads: &'a mut [A],
    row: usize,
    rows: usize,
    width: usize,
    how: Exponential<'a, A>,
    of: RowGradient<'a, A>,
}

/// In place, turns scores into weights `p = exp(scale·score − lse)` and gradients of the weights into gradients of the
/// scores `p · (grad − delta − entropy·(score − lse))`, times a last scale.
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
    how: Exponential<'_, A>,
    of: RowGradient<'_, A>,
) {
    check(scores, row, rows, width);
    check(grads, row, rows, width);
    assert!(how.spans.is_empty() || how.spans.len() >= rows);
    assert!(of.lse.len() >= rows && of.delta.len() >= rows && (of.entropy.is_empty() || of.entropy.len() >= rows));
    dispatch(isa, Gradient { scores, grads, row, rows, width, how, of });
}

impl<A: Real> Kernel<A> for Gradient<'_, A> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes<Scalar = A>>(self) {
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            match (self.how.sharp, self.of.entropy.is_empty()) {
                (true, true) => self.rows::<V, true, false>(),
                (true, false) => self.rows::<V, true, true>(),
                (false, true) => self.rows::<V, false, false>(),
                (false, false) => self.rows::<V, false, true>(),
            }
        }
    }
}

impl<A: Real> Gradient<'_, A> {
    #[inline(always)]
    unsafe fn rows<V: Lanes<Scalar = A>, const SHARP: bool, const ENTROPY: bool>(self) {
        for r in 0..self.rows {
            let (start, end) = self.how.span(r, self.width);
            let [scores, grads] = [&mut *self.scores, &mut *self.grads].map(|tile| {
                let row = &mut tile[r * self.row..][..self.width];
                row[..start].fill(A::ZERO);
                row[end..].fill(A::ZERO);
                &mut row[start..end]
            });
            // SAFETY: the slices are whole panels long; the caller vouches for the instruction set.
            unsafe {
                let (least, zero) = (V::splat(A::NEG_INFINITY), V::splat(A::ZERO));
                let (scale, after) = (V::splat(self.how.scale), V::splat(self.of.scale));
                let (lse, delta) = (V::splat(self.of.lse[r]), V::splat(self.of.delta[r]));
                let entropy = V::splat(if ENTROPY { -self.of.entropy[r] } else { A::ZERO });
                for (s, g) in scores.chunks_exact_mut(A::LANES).zip(grads.chunks_exact_mut(A::LANES)) {
                    let score = V::load(s.as_ptr());
                    let x = score.mul(scale).sub(lse);
                    let weight = score.where_equal(least, zero, math::exp_below_one::<V, SHARP>(x));
                    let mut grad = V::load(g.as_ptr()).sub(delta);
                    if ENTROPY {
                        grad = x.mul_add(entropy, grad);
                    }
                    weight.store(s.as_mut_ptr());
                    score.where_equal(least, zero, weight.mul(grad).mul(after)).store(g.as_mut_ptr());
                }
            }
        }
    }
}
