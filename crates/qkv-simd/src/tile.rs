//! Passes over a tile of scores in the first-level cache: online softmax and its gradient, scales, caps, biases and
//! masks. A tile is rows of `width` elements (whole panels) with stride `row`. A pass treats each row independently, so
//! a row has the same bits in any tile.
//!
//! A score of −∞ marks an absent pair: its weight and its gradient are exactly 0, even if other values are NaN.

use crate::isa::Isa;
use crate::kernel::{Kernel, dispatch};
use crate::lanes::{Lanes, MAX_LANES};
use crate::math;
use crate::number::Real;
use crate::{padded, span};

mod softmax;

pub(crate) use softmax::check_softmax;
pub use softmax::{Exponential, RowGradient, Running, Span, softmax, softmax_gradient};

/// Checks that a tile holds its rows.
pub(crate) fn check<A: Real>(tile: &[A], row: usize, rows: usize, width: usize) {
    assert!(width.is_multiple_of(A::LANES) && row >= width, "a tile is whole panels wide");
    assert!(tile.len() >= span(rows, row, width), "the tile is too short");
}

struct SparsemaxGradient<'a, A> {
    scores: &'a mut [A],
    grads: &'a mut [A],
    scale: A,
    threshold: A,
    delta: A,
}

/// In place: turns a row of scores into sparsemax weights `max(scale·score − threshold, 0)`, and gradients of the
/// weights into gradients of the scores, `grad − delta` where the weight is not 0.
///
/// # Panics
/// If the rows are not whole panels of one length.
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
            // SAFETY: the chunks are whole panels; the caller guarantees the instruction set.
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
    lse: A,
}

/// Turns a row of scores into weights `exp(score − lse)`, in place.
///
/// # Panics
/// If the row is not whole panels.
pub fn weights<A: Real>(isa: Isa, scores: &mut [A], lse: A) {
    check(scores, scores.len(), 1, scores.len());
    dispatch(isa, Weights { scores, lse });
}

impl<A: Real> Kernel<A> for Weights<'_, A> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes<Scalar = A>>(self) {
        for panel in self.scores.chunks_exact_mut(A::LANES) {
            // SAFETY: the chunk is a whole panel; the caller guarantees the instruction set.
            unsafe {
                let s = V::load(panel.as_ptr());
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

/// Soft-caps scores in place, `cap · tanh(score / cap)`, and writes the slopes `1 − tanh²` into `slopes`, if given.
///
/// # Panics
/// If the row is not whole panels, or the slopes are shorter.
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
            // SAFETY: the chunk is a whole panel and the slopes are as long; the caller guarantees the instruction set.
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
    first: usize,
    bits: &'a [u64],
    kept: A,
    otherwise: A,
}

/// Multiplies `row[j]` by `kept` where bit `first + j` is set, and replaces it by `otherwise` elsewhere.
///
/// # Panics
/// If the row or `first` is not whole panels, or there are fewer bits than elements.
pub fn keep_bits<A: Real>(isa: Isa, row: &mut [A], first: usize, bits: &[u64], kept: A, otherwise: A) {
    check(row, row.len(), 1, row.len());
    assert!(first.is_multiple_of(A::LANES) && bits.len() * 64 >= first.saturating_add(row.len()), "too few bits");
    dispatch(isa, KeepBits { row, first, bits, kept, otherwise });
}

impl<A: Real> Kernel<A> for KeepBits<'_, A> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes<Scalar = A>>(self) {
        for (p, panel) in self.row.chunks_exact_mut(A::LANES).enumerate() {
            let at = self.first + p * A::LANES;
            let bits = (self.bits[at / 64] >> (at % 64)) as u32;
            // SAFETY: the chunk is a whole panel; the caller guarantees the instruction set.
            unsafe {
                let x = V::load(panel.as_ptr()).mul(V::splat(self.kept));
                x.keep(bits, V::splat(self.otherwise)).store(panel.as_mut_ptr());
            }
        }
    }
}

struct ApplyMask<'a, A, const WORDS: usize> {
    tile: &'a mut [A],
    row: usize,
    bits: &'a [[u64; WORDS]],
    spans: &'a [Span],
}

/// Sets the scores whose bit is clear to −∞, within the panels of each row's span.
///
/// # Panics
/// If a row is not whole panels or shorter than its span, or there are fewer rows, spans or bits than needed.
pub fn apply_mask<A: Real, const WORDS: usize>(
    isa: Isa,
    tile: &mut [A],
    row: usize,
    bits: &[[u64; WORDS]],
    spans: &[Span],
) {
    check(tile, row, bits.len(), row);
    let most = (row.min(WORDS * 64) / A::LANES) as u16;
    assert!(spans.len() >= bits.len() && spans.iter().all(|span| span.end <= most), "spans beyond their rows");
    dispatch(isa, ApplyMask { tile, row, bits, spans });
}

impl<A: Real, const WORDS: usize> Kernel<A> for ApplyMask<'_, A, WORDS> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes<Scalar = A>>(self) {
        let all = u64::MAX >> (64 - A::LANES);
        for (r, (bits, span)) in self.bits.iter().zip(self.spans).enumerate() {
            let (start, end) = (span.start as usize * A::LANES, span.end as usize * A::LANES);
            for (word, &bits) in bits.iter().enumerate().take(end.div_ceil(64)).skip(start / 64) {
                let (from, to) = (start.saturating_sub(word * 64), (end - word * 64).min(64));
                let mut absent = !bits & u64::MAX << from & u64::MAX >> (64 - to);
                while absent != 0 {
                    let panel = absent.trailing_zeros() as usize / A::LANES * A::LANES;
                    absent &= !(all << panel);
                    // SAFETY: the panel lies inside its row, as `apply_mask` checked; the caller guarantees the
                    // instruction set.
                    unsafe {
                        let at = self.tile.as_mut_ptr().add(r * self.row + word * 64 + panel);
                        V::load(at).keep((bits >> panel) as u32, V::splat(A::NEG_INFINITY)).store(at);
                    }
                }
            }
        }
    }
}

struct Alibi<'a, A> {
    row: &'a mut [A],
    slope: A,
    from: A,
}

/// Subtracts the ALiBi penalty `slope · |from − j|` from element `j` of a row.
///
/// # Panics
/// If the row is not whole panels.
pub fn add_alibi<A: Real>(isa: Isa, row: &mut [A], slope: A, from: A) {
    check(row, row.len(), 1, row.len());
    dispatch(isa, Alibi { row, slope, from });
}

impl<A: Real> Kernel<A> for Alibi<'_, A> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes<Scalar = A>>(self) {
        let mut numbers = [A::ZERO; MAX_LANES];
        numbers.iter_mut().enumerate().for_each(|(l, x)| *x = A::from_f64(l as f64));
        // SAFETY: the array and each chunk hold whole panels; the caller guarantees the instruction set.
        unsafe {
            let (slope, zero) = (V::splat(self.slope), V::splat(A::ZERO));
            let mut apart = V::splat(self.from).sub(V::load(numbers.as_ptr()));
            for panel in self.row.chunks_exact_mut(A::LANES) {
                let distance = apart.where_less(zero, zero.sub(apart), apart);
                V::load(panel.as_ptr()).sub(slope.mul(distance)).store(panel.as_mut_ptr());
                apart = apart.sub(V::splat(A::from_f64(A::LANES as f64)));
            }
        }
    }
}

struct ScaleRows<'a, A> {
    tile: &'a mut [A],
    row: usize,
    factors: &'a [A],
}

/// Multiplies each row of a tile by its factor. Rows with a factor of 1 are skipped.
///
/// # Panics
/// If a row is not whole panels, or there are fewer rows than factors.
pub fn scale_rows<A: Real>(isa: Isa, tile: &mut [A], row: usize, factors: &[A]) {
    check(tile, row, factors.len(), row);
    dispatch(isa, ScaleRows { tile, row, factors });
}

impl<A: Real> Kernel<A> for ScaleRows<'_, A> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes<Scalar = A>>(self) {
        // Few rows change, and unpredictably: a bitmap finds them without a branch per row.
        for (first, factors) in self.factors.chunks(32).enumerate().map(|(at, factors)| (at * 32, factors)) {
            let mut changed = factors.iter().rev().fold(0u32, |bits, &factor| bits << 1 | u32::from(factor != A::ONE));
            while changed != 0 {
                let r = first + changed.trailing_zeros() as usize;
                changed &= changed - 1;
                let factor = self.factors[r];
                for panel in self.tile[r * self.row..][..self.row].chunks_exact_mut(A::LANES) {
                    // SAFETY: the chunk is a whole panel; the caller guarantees the instruction set.
                    unsafe { V::load(panel.as_ptr()).mul(V::splat(factor)).store(panel.as_mut_ptr()) };
                }
            }
        }
    }
}

/// What [`row_op`] does to each element of a row.
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

/// Applies an operation to each element of a row.
///
/// # Panics
/// If the row is not whole panels, or the other row is shorter.
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
            // SAFETY: the chunk is a whole panel and the other row is as long; the caller guarantees the instruction
            // set.
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

struct PackPanels<'a, A> {
    rows: &'a [A],
    row: usize,
    count: usize,
    width: usize,
    out: &'a mut [A],
}

/// Packs rows into panels: `LANES` rows interleaved, element by element of the width, with zeros for missing rows of
/// the last panel. The row stride is whole panels, and there is memory for whole panels of rows.
///
/// # Panics
/// If a slice is too short, or the row stride is not whole panels.
pub fn pack_panels<A: Real>(isa: Isa, rows: &[A], row: usize, count: usize, width: usize, out: &mut [A]) {
    let padded = padded::<A>(count);
    let long = row >= width && rows.len() >= padded.saturating_mul(row);
    assert!(row.is_multiple_of(A::LANES) && long, "the rows are too short");
    assert!(out.len() >= padded.saturating_mul(width), "no room for the panels");
    dispatch(isa, PackPanels { rows, row, count, width, out });
}

impl<A: Real> Kernel<A> for PackPanels<'_, A> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes<Scalar = A>>(self) {
        let (lanes, width) = (A::LANES, self.width);
        for panel in 0..self.count.div_ceil(lanes) {
            let from = &self.rows[panel * lanes * self.row..][..lanes * self.row];
            let out = &mut self.out[panel * lanes * width..][..lanes * width];
            let mut chunks = out.chunks_exact_mut(lanes * lanes);
            for (x, out) in (&mut chunks).enumerate() {
                // SAFETY: `lanes` rows of `row` elements each hold the lanes from `x` on, and `out` holds as many rows
                // of lanes; the caller guarantees the instruction set.
                unsafe { V::transpose(from[x * lanes..].as_ptr(), self.row, out.as_mut_ptr(), lanes) };
            }
            let done = width / lanes * lanes;
            for (x, out) in chunks.into_remainder().chunks_exact_mut(lanes).enumerate() {
                for (r, out) in out.iter_mut().enumerate() {
                    *out = from[r * self.row + done + x];
                }
            }
            let there = self.count - panel * lanes;
            if there < lanes {
                out.chunks_exact_mut(lanes).for_each(|out| out[there..].fill(A::ZERO));
            }
        }
    }
}

struct Transpose<'a, A> {
    from: &'a [A],
    from_row: usize,
    rows: usize,
    panels: usize,
    to: &'a mut [A],
    to_row: usize,
}

/// Transposes `rows` rows that are `panels` panels wide, with a row stride for each side. The number of rows is whole
/// panels too.
///
/// # Panics
/// If a slice is too short, or the rows are not whole panels.
pub fn transpose<A: Real>(
    isa: Isa,
    from: &[A],
    from_row: usize,
    rows: usize,
    panels: usize,
    to: &mut [A],
    to_row: usize,
) {
    let width = panels.saturating_mul(A::LANES);
    check(from, from_row, rows, width);
    check(to, to_row, width, rows);
    dispatch(isa, Transpose { from, from_row, rows, panels, to, to_row });
}

impl<A: Real> Kernel<A> for Transpose<'_, A> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes<Scalar = A>>(self) {
        let lanes = A::LANES;
        for r in (0..self.rows).step_by(lanes) {
            for panel in 0..self.panels {
                let from = self.from[r * self.from_row + panel * lanes..].as_ptr();
                let to = self.to[panel * lanes * self.to_row + r..].as_mut_ptr();
                // SAFETY: both squares of lanes lie inside, as `transpose` checked; the caller guarantees the
                // instruction set.
                unsafe { V::transpose(from, self.from_row, to, self.to_row) };
            }
        }
    }
}

struct CorrespondingDots<'a, A> {
    a: &'a [A],
    b: &'a [A],
    row: usize,
    out: &'a mut [A],
}

/// Dot products of corresponding rows of two tiles, which are dense and whole panels wide. The chain of multiply-adds
/// is that of [`product`](crate::product()), so sums that are equal term by term have equal bits.
///
/// # Panics
/// If there are fewer rows than results, or a row is not whole panels.
pub fn dots<A: Real>(isa: Isa, a: &[A], b: &[A], row: usize, out: &mut [A]) {
    let len = out.len().saturating_mul(row);
    assert!(a.len() >= len && b.len() >= len, "the rows are too short");
    assert!(row.is_multiple_of(A::LANES), "rows of whole panels");
    dispatch(isa, CorrespondingDots { a, b, row, out });
}

impl<A: Real> Kernel<A> for CorrespondingDots<'_, A> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes<Scalar = A>>(self) {
        let (lanes, row) = (A::LANES, self.row);
        // One lane per pair of rows and one step per element: squares of both sides are transposed on the fly.
        let mut squares = [[A::ZERO; MAX_LANES * MAX_LANES]; 2];
        for (first, out) in self.out.chunks_mut(lanes).enumerate().map(|(at, out)| (at * lanes, out)) {
            // SAFETY: if there are as many rows as lanes, the squares lie inside them, as `dots` checked, and the
            // buffers hold a square of lanes each; the caller guarantees the instruction set.
            unsafe {
                let mut sums = V::splat(A::ZERO);
                for x in (0..row).step_by(lanes) {
                    for (from, square) in [self.a, self.b].into_iter().zip(&mut squares) {
                        let from = &from[first * row + x..];
                        if out.len() == lanes {
                            V::transpose(from.as_ptr(), row, square.as_mut_ptr(), lanes);
                        } else {
                            for (r, k) in (0..out.len()).flat_map(|r| (0..lanes).map(move |k| (r, k))) {
                                square[k * lanes + r] = from[r * row + k];
                            }
                        }
                    }
                    for (a, b) in squares[0].chunks_exact(lanes).zip(squares[1].chunks_exact(lanes)).take(lanes) {
                        sums = V::load(a.as_ptr()).mul_add(V::load(b.as_ptr()), sums);
                    }
                }
                A::store_lanes(sums, out.as_mut_ptr(), out.len());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::product::{Matrix, Panels, Target, product};

    #[test]
    fn dots_are_the_sums_that_a_product_makes_to_the_last_bit() {
        for isa in Isa::available() {
            for count in [0, 1, 15, 16, 33] {
                let row = 3 * f32::LANES;
                let number = |x: usize| ((x * 2_654_435_761) % 1009) as f32 / 317.0 - 1.6;
                let a: Vec<f32> = (0..count * row).map(number).collect();
                let b: Vec<f32> = (0..count * row).map(|x| number(x + 5)).collect();
                let mut found = vec![0.0; count];
                dots(isa, &a, &b, row, &mut found);
                for (r, found) in found.into_iter().enumerate() {
                    let mut column = vec![0.0; row * f32::LANES];
                    column.iter_mut().step_by(f32::LANES).zip(&b[r * row..]).for_each(|(to, &x)| *to = x);
                    let mut sums = [0.0; f32::LANES];
                    let (left, right) = (Matrix::rows(&a[r * row..], row), Panels::packed(&column, row));
                    product(isa, Target::overwrite(&mut sums, f32::LANES), left, right, 1, 1, row);
                    assert_eq!(found, sums[0], "{isa} {count}");
                }
            }
        }
    }

    #[test]
    fn what_has_no_bit_is_hidden_within_its_span_alone() {
        for isa in Isa::available() {
            let (row, lanes) = (128, f32::LANES as u16);
            let spans: Vec<Span> = [(0, 0), (0, 128), (48, 128), (64, 80), (16, 96)]
                .map(|(start, end)| Span { start: start / lanes, end: end / lanes })
                .to_vec();
            let bits: Vec<[u64; 2]> =
                (0..5u64).map(|r| [0x0123_4567_89ab_cdef << r | 0xffff << (8 * r), !(0xffff << (7 * r))]).collect();
            let mut tile = vec![1.5f32; 5 * row];
            apply_mask(isa, &mut tile, row, &bits, &spans);
            for (at, &x) in tile.iter().enumerate() {
                let (r, j) = (at / row, at % row);
                let inside = (spans[r].start * lanes..spans[r].end * lanes).contains(&(j as u16));
                let hidden = inside && bits[r][j / 64] >> (j % 64) & 1 == 0;
                assert_eq!(x, if hidden { f32::NEG_INFINITY } else { 1.5 }, "{isa} row {r} key {j}");
            }
        }
    }

    /// The larger of two errors; NaN is the largest.
    fn larger(worst: f64, error: f64) -> f64 {
        if error > worst || error.is_nan() { error } else { worst }
    }

    #[test]
    fn the_exponential_is_right_to_the_last_bits() {
        let available = Isa::available();
        let mut worst = 0.0f64;
        let mut x = -87.0f32;
        while x < 88.0 {
            let inputs: [f32; 16] = std::array::from_fn(|l| x + l as f32 * 1e-4);
            let truths = inputs.map(|x| (x as f64).exp());
            for &isa in &available {
                let mut row = inputs;
                weights(isa, &mut row, 0.0);
                for (truth, y) in truths.into_iter().zip(row) {
                    let unit = (truth as f32).abs().max(f32::MIN_POSITIVE) as f64 * f32::EPSILON as f64;
                    worst = larger(worst, (y as f64 - truth).abs() / unit);
                }
                assert!(worst < 1.5, "{isa}: {worst} ulp in f32 near {x}");
            }
            x += 1.6e-3;
        }
        let mut worst = 0.0f64;
        for step in 0..200_000 {
            let inputs: [f64; 8] = std::array::from_fn(|l| -700.0 + step as f64 * 7e-3 + l as f64 * 1e-4);
            let truths = inputs.map(f64::exp);
            for &isa in &available {
                let mut row = inputs;
                weights(isa, &mut row, 0.0);
                for (truth, y) in truths.into_iter().zip(row) {
                    worst = larger(worst, (y - truth).abs() / (truth * f64::EPSILON));
                }
                assert!(worst < 2.0, "{isa}: {worst} ulp in f64 near {}", inputs[0]);
            }
        }
    }

    /// Runs scores from 0, the largest, down to `low` through the softmax. Returns for each instruction set the largest
    /// error of a weight, in units in the last place, and the smallest weight that is not 0.
    fn softened<A: Real>(low: f64, steps: usize) -> Vec<(Isa, f64, f64)> {
        let mut found: Vec<_> = Isa::available().into_iter().map(|isa| (isa, 0.0, 1.0f64)).collect();
        for step in 0..steps {
            let mut inputs = [A::NEG_INFINITY; 16];
            inputs[0] = A::ZERO;
            for (l, x) in inputs.iter_mut().enumerate().take(A::LANES - 1).skip(1) {
                *x = A::from_f64(low * (step as f64 + l as f64 / A::LANES as f64) / steps as f64);
            }
            let truths = inputs.map(|x| x.to_f64().exp());
            for (isa, worst, least) in &mut found {
                let mut row = inputs;
                let [mut max, mut sum, mut factor] = [[A::NEG_INFINITY], [A::ZERO], [A::ONE]];
                let running = Running { max: &mut max, sum: &mut sum, entropy_acc: &mut [], factor: &mut factor };
                let how = Exponential { scale: A::ONE, spans: &[], accurate_exp: true };
                softmax(*isa, &mut row[..A::LANES], A::LANES, 1, A::LANES, how, running);
                assert_eq!([row[0], row[A::LANES - 1]], [A::ONE, A::ZERO], "{isa}: the largest, and an absent one");
                for (truth, y) in truths.into_iter().zip(row.map(A::to_f64)).take(A::LANES - 1) {
                    if y != 0.0 {
                        let unit = truth * A::EPSILON;
                        (*worst, *least) = (larger(*worst, (y - truth).abs() / unit), least.min(y));
                    }
                }
            }
        }
        found
    }

    #[test]
    fn weights_are_right_to_the_last_bits_and_never_near_what_is_subnormal() {
        for (isa, worst, least) in softened::<f32>(-200.0, 100_000) {
            assert!(worst < 1.5, "{isa}: {worst} ulp in f32");
            assert!(least > 2f64.powi(-101) && least < 2f64.powi(-99), "{isa}: {least}");
        }
        for (isa, worst, least) in softened::<f64>(-1000.0, 100_000) {
            assert!(worst < 2.0, "{isa}: {worst} ulp in f64");
            assert!(least > 2f64.powi(-901) && least < 2f64.powi(-899), "{isa}: {least}");
        }
    }

    #[test]
    fn the_exponential_of_the_limits_is_the_limit() {
        for isa in Isa::available() {
            let mut row = [0.0f32; 16];
            row[..5].copy_from_slice(&[f32::NEG_INFINITY, f32::NAN, -200.0, 0.0, 200.0]);
            weights(isa, &mut row, 0.0);
            assert_eq!(row[0], 0.0);
            assert!(row[1].is_nan());
            assert_eq!(row[2..5], [0.0, 1.0, f32::INFINITY]);
        }
    }

    #[test]
    fn tanh_is_right_to_the_last_bits_near_zero_and_far_away() {
        let available = Isa::available();
        let mut worst = 0.0f64;
        for step in 0..200_000 {
            let inputs: [f32; 16] = std::array::from_fn(|l| {
                let size = 1e-6f32 * 1.0001f32.powi(step) * (1.0 + l as f32 * 5e-6);
                if l % 2 == 0 { size } else { -size }
            });
            let truths = inputs.map(|x| (x as f64).tanh());
            for &isa in &available {
                let mut row = inputs;
                soft_cap(isa, &mut row, None, 1.0);
                for (truth, y) in truths.into_iter().zip(row) {
                    let unit = (truth as f32).abs() as f64 * f32::EPSILON as f64;
                    worst = larger(worst, (y as f64 - truth).abs() / unit);
                }
                assert!(worst < 3.0, "{isa}: {worst} ulp near {}", inputs[0]);
            }
        }
        for isa in Isa::available() {
            let mut row = [f32::NAN; 16];
            row[1] = f32::INFINITY;
            row[2] = f32::NEG_INFINITY;
            soft_cap(isa, &mut row, None, 1.0);
            assert!(row[0].is_nan());
            assert_eq!(row[1..3], [1.0, -1.0]);
        }
    }
}
