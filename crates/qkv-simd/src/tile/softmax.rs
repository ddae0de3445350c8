//! Online softmax over the rows of a tile, and its gradient.

use super::check;
use crate::isa::Isa;
use crate::kernel::{Kernel, dispatch};
use crate::lanes::{Lanes, MAX_LANES};
use crate::math;
use crate::number::{Element, Real};
use std::ops::Range;

/// The running state of the online softmax, one entry per row.
#[derive(Debug)]
pub struct Running<'a, A> {
    /// The largest score so far.
    pub max: &'a mut [A],
    /// The sum of `exp(score − max)` so far.
    pub sum: &'a mut [A],
    /// The sum of `exp(score − max)·(score − max)` so far, for the entropy; empty if it is not needed.
    pub entropy_acc: &'a mut [A],
    /// Output: the factors that rescale the rows' accumulated values, because the maximum changed.
    pub factor: &'a mut [A],
}

/// The panels `start .. end` of a row. Scores outside them are absent, and their memory may hold anything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// The first panel.
    pub start: u16,
    /// The panel after the last.
    pub end: u16,
}

impl Span {
    /// All panels of rows of `width` elements.
    pub fn all<A: Real>(width: usize) -> Span {
        Span { start: 0, end: (width / A::LANES) as u16 }
    }

    /// The smallest span that contains both.
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
    /// Multiplies the scores first.
    pub scale: A,
    /// The span of each row; empty if every row has all panels.
    pub spans: &'a [Span],
    /// Whether the exponential is accurate to the last bits, or to 17 bits, enough for weights that are rounded to
    /// bf16.
    pub accurate_exp: bool,
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

/// Turns scores into `exp(scale·score − max)` in place, and updates the running maximum and sum.
///
/// # Panics
/// If a slice is too short for `rows`, or the width is not whole panels.
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
    let Running { max, sum, entropy_acc, factor } = running;
    assert!(
        max.len() >= rows
            && sum.len() >= rows
            && factor.len() >= rows
            && (entropy_acc.is_empty() || entropy_acc.len() >= rows)
    );
}

impl<A: Real> Kernel<A> for Softmax<'_, A> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes<Scalar = A>>(self) {
        // SAFETY: the caller guarantees the instruction set.
        unsafe {
            match (self.how.accurate_exp, self.running.entropy_acc.is_empty()) {
                (true, true) => self.rows::<V, true, false>(),
                (true, false) => self.rows::<V, true, true>(),
                (false, true) => self.rows::<V, false, false>(),
                (false, false) => self.rows::<V, false, true>(),
            }
        }
    }
}

/// Panels of a full row, for which the passes are unrolled.
const MOSTLY: usize = 8;

impl<A: Real> Softmax<'_, A> {
    /// The maxima of all rows first, then their weights, so that no exponential waits for its row's maximum. Processes
    /// as many rows at a time as there are lanes.
    #[inline(always)]
    unsafe fn rows<V: Lanes<Scalar = A>, const ACCURATE: bool, const ENTROPY: bool>(mut self) {
        let (count, lanes) = (self.rows, A::LANES);
        // SAFETY: the caller guarantees the instruction set.
        unsafe {
            for first in (0..count).step_by(lanes) {
                self.update_max::<V, ENTROPY>(first..(first + lanes).min(count));
            }
            for first in (0..count).step_by(lanes) {
                self.weights::<V, ACCURATE, ENTROPY>(first..(first + lanes).min(count));
            }
        }
    }

    /// Updates the maxima of some rows, and rescales their sums and entropy accumulators.
    #[inline(always)]
    unsafe fn update_max<V: Lanes<Scalar = A>, const ENTROPY: bool>(&mut self, rows: Range<usize>) {
        let (first, count) = (rows.start, rows.len());
        let max = self.running.max[rows.clone()].as_mut_ptr();
        let sum = self.running.sum[rows.clone()].as_mut_ptr();
        let factor = self.running.factor[rows.clone()].as_mut_ptr();
        // SAFETY: as many lanes are loaded and stored as there are rows, which are whole panels; the caller guarantees
        // the instruction set.
        unsafe {
            let (zero, one, least) = (V::splat(A::ZERO), V::splat(A::ONE), V::splat(A::NEG_INFINITY));
            let mut each = [least; MAX_LANES];
            for r in rows.clone() {
                let (start, end) = self.how.span(r, self.width);
                each[r - first] = max_lane::<V>(&self.tile[r * self.row..][start..end], self.how.scale);
            }
            // Rounding is monotonic, so only the largest score needs to be scaled, unless the scale reverses the order.
            let found = V::max_each(&each);
            let most = if self.how.scale < A::ZERO { found } else { found.mul(V::splat(self.how.scale)) };
            let old = A::lanes::<V>(max, count);
            let mut new = old.where_less(most, most, old);
            // A row with only NaN and absent scores is NaN.
            let mut seldom = found.where_equal(least, one, most.where_equal(most, zero, one)).not_zero();
            seldom &= u32::MAX >> (u32::BITS - count as u32);
            while seldom != 0 {
                let at = seldom.trailing_zeros() as usize;
                seldom &= seldom - 1;
                let (start, end) = self.how.span(first + at, self.width);
                let scores = &self.tile[(first + at) * self.row..][start..end];
                if self.how.scale.is_nan() || scores.iter().any(|s| s.is_nan()) {
                    new = V::splat(A::from_f64(f64::NAN)).keep(1 << at, new);
                }
            }
            // No rescaling where the maximum stays the same, −∞ included.
            let shrink = old.where_equal(new, one, math::exp(old.sub(new)));
            if ENTROPY {
                let apart = old.where_equal(new, zero, old.sub(new));
                let entropy_acc = self.running.entropy_acc[rows].as_mut_ptr();
                let moved = apart.mul_add(A::lanes::<V>(sum, count), A::lanes::<V>(entropy_acc, count)).mul(shrink);
                A::store_lanes(old.where_equal(least, zero, moved), entropy_acc, count);
            }
            A::store_lanes(A::lanes::<V>(sum, count).mul(shrink), sum, count);
            A::store_lanes(new, max, count);
            A::store_lanes(shrink, factor, count);
        }
    }

    /// Turns the scores of some rows into weights, and adds them to their sums and entropy accumulators.
    #[inline(always)]
    unsafe fn weights<V: Lanes<Scalar = A>, const ACCURATE: bool, const ENTROPY: bool>(&mut self, rows: Range<usize>) {
        // SAFETY: as in `update_max`.
        unsafe {
            let mut totals = [V::splat(A::ZERO); MAX_LANES];
            let mut entropy_accs = totals;
            for r in rows.clone() {
                let whole = &mut self.tile[r * self.row..][..self.width];
                let (start, end) = self.how.span(r, self.width);
                if start > 0 || end < self.width {
                    whole[..start].fill(A::ZERO);
                    whole[end..].fill(A::ZERO);
                }
                let (scores, top, at) = (&mut whole[start..end], self.running.max[r], r - rows.start);
                if top == A::NEG_INFINITY {
                    scores.fill(A::ZERO);
                    continue;
                }
                let (total, entropy_acc) = weights_of_row::<V, ACCURATE, ENTROPY>(scores, self.how.scale, top);
                totals[at] = total;
                if ENTROPY {
                    entropy_accs[at] = entropy_acc;
                }
            }
            add_each(&mut self.running.sum[rows.clone()], &totals);
            if ENTROPY {
                add_each(&mut self.running.entropy_acc[rows], &entropy_accs);
            }
        }
    }
}

/// Adds the sum of each row.
///
/// # Safety
/// The CPU has the instruction set of `V`.
#[inline(always)]
unsafe fn add_each<V: Lanes>(to: &mut [V::Scalar], rows: &[V; MAX_LANES]) {
    // SAFETY: at most as many lanes as there are; the caller guarantees the instruction set.
    unsafe {
        let sum = V::Scalar::lanes::<V>(to.as_ptr(), to.len()).add(V::sum_each(rows));
        V::Scalar::store_lanes(sum, to.as_mut_ptr(), to.len());
    }
}

/// Turns a row of scores into `exp(scale·score − top)`, with exactly 0 for −∞. Returns their sum and entropy term, lane
/// by lane.
///
/// # Safety
/// The CPU has the instruction set of `V`.
#[inline(always)]
unsafe fn weights_of_row<V: Lanes, const ACCURATE: bool, const ENTROPY: bool>(
    scores: &mut [V::Scalar],
    scale: V::Scalar,
    top: V::Scalar,
) -> (V, V) {
    let panels = scores.len() / V::Scalar::LANES;
    // SAFETY: the slice is whole panels long; the caller guarantees the instruction set.
    unsafe {
        let zero = V::splat(V::Scalar::ZERO);
        let mut of = RowSums { scale: V::splat(scale), top: V::splat(top), sums: [zero; 2], entropy_accs: [zero; 2] };
        if panels == MOSTLY {
            for panel in 0..MOSTLY {
                of.panel::<ACCURATE, ENTROPY>(scores.as_mut_ptr(), panel);
            }
        } else {
            for panel in 0..panels {
                of.panel::<ACCURATE, ENTROPY>(scores.as_mut_ptr(), panel);
            }
        }
        (of.sums[0].add(of.sums[1]), of.entropy_accs[0].add(of.entropy_accs[1]))
    }
}

/// A row while its scores become weights. Even and odd panels are summed separately, to shorten the dependency chain.
struct RowSums<V> {
    scale: V,
    top: V,
    sums: [V; 2],
    entropy_accs: [V; 2],
}

impl<V: Lanes> RowSums<V> {
    /// # Safety
    /// The panel exists, and the CPU has the instruction set of `V`.
    #[inline(always)]
    unsafe fn panel<const ACCURATE: bool, const ENTROPY: bool>(&mut self, row: *mut V::Scalar, panel: usize) {
        // SAFETY: the caller guarantees both.
        unsafe {
            let (at, zero) = (row.add(panel * V::Scalar::LANES), V::splat(V::Scalar::ZERO));
            let score = V::load(at);
            // Rounding before subtracting makes the largest exactly 0. Weights that are rounded to bf16 do not need
            // that.
            let x = if ACCURATE || ENTROPY {
                score.mul(self.scale).sub(self.top)
            } else {
                score.mul_add(self.scale, zero.sub(self.top))
            };
            let weight = math::weight::<V, ACCURATE>(x);
            weight.store(at);
            self.sums[panel % 2] = self.sums[panel % 2].add(weight);
            if ENTROPY {
                let entropy_acc = weight.where_equal(zero, zero, weight.mul(x));
                self.entropy_accs[panel % 2] = self.entropy_accs[panel % 2].add(entropy_acc);
            }
        }
    }
}

/// The largest scores lane by lane, ignoring NaN; times the scale if that reverses their order.
///
/// # Safety
/// The CPU has the instruction set of `V`.
#[inline(always)]
unsafe fn max_lane<V: Lanes>(scores: &[V::Scalar], scale: V::Scalar) -> V {
    let panels = scores.len() / V::Scalar::LANES;
    // SAFETY: the slice is whole panels long; the caller guarantees the instruction set.
    unsafe {
        let mut most = [V::splat(V::Scalar::NEG_INFINITY); 2];
        let at = scores.as_ptr();
        if scale < V::Scalar::ZERO {
            for panel in 0..panels {
                most[0] = V::load(at.add(panel * V::Scalar::LANES)).mul(V::splat(scale)).max(most[0]);
            }
        } else if panels == MOSTLY {
            for panel in 0..MOSTLY {
                most[panel % 2] = V::load(at.add(panel * V::Scalar::LANES)).max(most[panel % 2]);
            }
        } else {
            for panel in 0..panels {
                most[panel % 2] = V::load(at.add(panel * V::Scalar::LANES)).max(most[panel % 2]);
            }
        }
        most[0].max(most[1])
    }
}

/// The statistics of each row that the softmax gradient needs.
#[derive(Clone, Copy, Debug)]
pub struct RowGradient<'a, A> {
    /// The log-sum-exp.
    pub lse: &'a [A],
    /// Subtracted from the gradient of each weight.
    pub delta: &'a [A],
    /// The gradient of the row's entropy; empty if there is none.
    pub entropy: &'a [A],
    /// Multiplies the gradients of the scores last.
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

/// In place: turns scores into weights `p = exp(scale·score − lse)`, and gradients of the weights into gradients of the
/// scores `p · (grad − delta − entropy·(score − lse))`, times a final scale.
///
/// # Panics
/// If a slice is too short for `rows`, or the width is not whole panels.
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
        // SAFETY: the caller guarantees the instruction set.
        unsafe {
            match (self.how.accurate_exp, self.of.entropy.is_empty()) {
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
    unsafe fn rows<V: Lanes<Scalar = A>, const ACCURATE: bool, const ENTROPY: bool>(self) {
        for r in 0..self.rows {
            let (mut start, mut end) = self.how.span(r, self.width);
            let scores = &mut self.scores[r * self.row..][..self.width];
            let grads = &mut self.grads[r * self.row..][..self.width];
            if self.of.lse[r] == A::NEG_INFINITY {
                (start, end) = (0, 0); // a row that sees nothing
            }
            if start > 0 || end < self.width {
                scores[..start].fill(A::ZERO);
                scores[end..].fill(A::ZERO);
                grads[..start].fill(A::ZERO);
                grads[end..].fill(A::ZERO);
            }
            let panels = (end - start) / A::LANES;
            let (scores, grads) = (scores[start..end].as_mut_ptr(), grads[start..end].as_mut_ptr());
            // SAFETY: the slices are whole panels long; the caller guarantees the instruction set.
            unsafe {
                let of = RowSlope {
                    scale: V::splat(self.how.scale),
                    lse: V::splat(self.of.lse[r]),
                    delta: V::splat(self.of.delta[r]),
                    entropy: V::splat(if ENTROPY { -self.of.entropy[r] } else { A::ZERO }),
                    after: V::splat(self.of.scale),
                };
                if panels == MOSTLY {
                    for panel in 0..MOSTLY {
                        of.panel::<ACCURATE, ENTROPY>(scores, grads, panel);
                    }
                } else {
                    for panel in 0..panels {
                        of.panel::<ACCURATE, ENTROPY>(scores, grads, panel);
                    }
                }
            }
        }
    }
}

/// The parameters of a row's softmax gradient.
struct RowSlope<V> {
    scale: V,
    lse: V,
    delta: V,
    entropy: V,
    after: V,
}

impl<V: Lanes> RowSlope<V> {
    /// # Safety
    /// The panel exists in both, and the CPU has the instruction set of `V`.
    #[inline(always)]
    unsafe fn panel<const ACCURATE: bool, const ENTROPY: bool>(
        &self,
        scores: *mut V::Scalar,
        grads: *mut V::Scalar,
        panel: usize,
    ) {
        // SAFETY: the caller guarantees both.
        unsafe {
            let (scores, grads) = (scores.add(panel * V::Scalar::LANES), grads.add(panel * V::Scalar::LANES));
            let x = V::load(scores).mul(self.scale).sub(self.lse);
            let weight = math::weight::<V, ACCURATE>(x);
            let mut grad = V::load(grads).sub(self.delta);
            if ENTROPY {
                grad = x.mul_add(self.entropy, grad);
            }
            weight.store(scores);
            // A weight of zero marks an absent pair, whatever its gradient.
            let zero = V::splat(V::Scalar::ZERO);
            weight.where_equal(zero, zero, weight.mul(grad).mul(self.after)).store(grads);
        }
    }
}
