//! Conversion of rows: widening to the accumulator type, and rounding from it.

use crate::isa::Isa;
use crate::kernel::{Kernel, dispatch};
use crate::lanes::Lanes;
use crate::number::{Element, Real};
use crate::prefetch::prefetch_next_page;
use crate::span;

struct Widen<'a, T: Element> {
    from: &'a [T],
    from_row: usize,
    width: usize,
    to: &'a mut [T::Acc],
    to_row: usize,
}

/// Widens a row to the accumulator type and returns whether all of it is finite.
///
/// # Panics
/// If the rows differ in length.
pub(crate) fn widen<T: Element>(isa: Isa, from: &[T], to: &mut [T::Acc]) -> bool {
    assert_eq!(from.len(), to.len());
    widen_rows(isa, (from, from.len()), from.len(), (to, from.len()))
}

/// Widens as many rows of `width` elements with stride `from_row` as fit into `to`, pads each with zeros to `to_row`,
/// and returns whether all elements are finite.
///
/// # Panics
/// If there are fewer rows, or rows are shorter.
pub(crate) fn widen_rows<T: Element>(
    isa: Isa,
    (from, from_row): (&[T], usize),
    width: usize,
    (to, to_row): (&mut [T::Acc], usize),
) -> bool {
    let count = to.len().checked_div(to_row).unwrap_or(0);
    assert!(to_row >= width && from.len() >= span(count, from_row, width), "the rows are too short");
    dispatch(isa, Widen { from, from_row, width, to, to_row })
}

impl<T: Element> Kernel<T::Acc> for Widen<'_, T> {
    type Output = bool;

    #[inline(always)]
    unsafe fn run<V: Lanes<Scalar = T::Acc>>(self) -> bool {
        let (lanes, width) = (T::Acc::LANES, self.width);
        // SAFETY: rows of both sides hold what is loaded and stored, as `widen_rows` checked; the caller guarantees the
        // instruction set.
        unsafe {
            // Zero times a finite number is zero; times any other it is NaN.
            let zero = V::splat(T::Acc::ZERO);
            let mut finite = zero;
            for (r, to) in self.to.chunks_exact_mut(self.to_row.max(1)).enumerate() {
                let from = self.from.as_ptr().add(r * self.from_row);
                prefetch_next_page(from, width);
                for at in (0..width).step_by(lanes) {
                    let count = lanes.min(width - at);
                    let x = T::lanes::<V>(from.add(at), count);
                    finite = x.mul_add(zero, finite);
                    T::Acc::store_lanes(x, to.as_mut_ptr().add(at), count);
                }
                to[width..].fill(T::Acc::ZERO);
            }
            finite.sum() == T::Acc::ZERO
        }
    }
}

struct Narrow<'a, T: Element> {
    from: &'a [T::Acc],
    from_row: usize,
    count: usize,
    width: usize,
    to: *mut T,
    to_row: isize,
}

/// Rounds `count` rows of `width` accumulators with stride `from_row` into place.
///
/// # Safety
/// There is memory for rows of `width` elements from `to` on with stride `to_row`, which nothing else accesses at the
/// same time.
pub(crate) unsafe fn narrow<T: Element>(
    isa: Isa,
    (from, from_row): (&[T::Acc], usize),
    count: usize,
    width: usize,
    (to, to_row): (*mut T, isize),
) {
    dispatch(isa, Narrow { from, from_row, count, width, to, to_row })
}

impl<T: Element> Kernel<T::Acc> for Narrow<'_, T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes<Scalar = T::Acc>>(self) {
        let lanes = T::Acc::LANES;
        for r in 0..self.count {
            for (at, from) in self.from[r * self.from_row..][..self.width].chunks(lanes).enumerate() {
                // SAFETY: the chunk holds what is loaded; the caller of `narrow` guarantees the memory, and that of the
                // kernel the instruction set.
                unsafe {
                    let x = T::Acc::lanes::<V>(from.as_ptr(), from.len());
                    T::store_lanes(x, self.to.offset(r as isize * self.to_row).add(at * lanes), from.len());
                }
            }
        }
    }
}

struct NarrowScaled<'a, T: Element> {
    from: &'a [T::Acc],
    from_row: usize,
    factors: &'a [T::Acc],
    width: usize,
    to: *mut T,
    to_row: isize,
}

/// Multiplies each row of accumulators by its factor and rounds it into place: one row per factor.
///
/// # Safety
/// There is memory for rows of `width` elements from `to` on with stride `to_row`, which nothing else accesses at the
/// same time.
pub(crate) unsafe fn narrow_scaled<T: Element>(
    isa: Isa,
    (from, from_row): (&[T::Acc], usize),
    factors: &[T::Acc],
    width: usize,
    (to, to_row): (*mut T, isize),
) {
    dispatch(isa, NarrowScaled { from, from_row, factors, width, to, to_row })
}

impl<T: Element> Kernel<T::Acc> for NarrowScaled<'_, T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes<Scalar = T::Acc>>(self) {
        let lanes = T::Acc::LANES;
        for (r, &factor) in self.factors.iter().enumerate() {
            for (at, from) in self.from[r * self.from_row..][..self.width].chunks(lanes).enumerate() {
                // SAFETY: as in `Narrow`, for rows with stride `to_row`.
                unsafe {
                    let x = T::Acc::lanes::<V>(from.as_ptr(), from.len()).mul(V::splat(factor));
                    T::store_lanes(x, self.to.offset(r as isize * self.to_row).add(at * lanes), from.len());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    /// Round trips over numbers of every size, ties and limits included, in rows of odd lengths.
    fn rounds_as_one_by_one<T: Element>() {
        let limits = [0.0, -0.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 1e-40, 6e-8, 65519.0, 65520.0, 3.4e38];
        let ties = (0..400).map(|x| 1.0 + f64::from(x) / 1024.0);
        let sizes = (0..400).map(|x| (f64::from(x) - 200.0).exp2() * if x % 2 == 0 { 1.3 } else { -1.7 });
        let numbers: Vec<T::Acc> = limits.into_iter().chain(ties).chain(sizes).map(T::Acc::from_f64).collect();
        for isa in Isa::available() {
            for len in [1, 7, 8, 15, 16, 17, 33, numbers.len()] {
                let mut rounded = vec![T::default(); len];
                // SAFETY: the vector has as many elements.
                unsafe { narrow(isa, (&numbers, len), 1, len, (rounded.as_mut_ptr(), 0)) };
                let expected: Vec<T> = numbers[..len].iter().map(|&x| T::narrow(x)).collect();
                let mut wide = vec![T::Acc::ZERO; len];
                let finite = widen(isa, &rounded, &mut wide);
                assert_eq!(finite, expected.iter().all(|x| x.is_finite()), "{isa} {} {len}", T::NAME);
                for ((&found, &expected), &wide) in rounded.iter().zip(&expected).zip(&wide) {
                    let same = |a: f64, b: f64| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
                    assert!(same(found.to_f64(), expected.to_f64()), "{isa} {}: {found:?} {expected:?}", T::NAME);
                    assert!(same(found.to_f64(), wide.to_f64()), "{isa} {}: {found:?} {wide:?}", T::NAME);
                }
                // Two rows with a gap between them, padded.
                let (gap, pad) = (3, 5);
                let gapped = [&rounded[..], &vec![T::narrow(T::Acc::INFINITY); gap], &rounded[..]].concat();
                let mut padded = vec![T::Acc::ONE; 2 * (len + pad)];
                let all = widen_rows(isa, (&gapped, len + gap), len, (&mut padded, len + pad));
                assert_eq!(all, finite, "{isa} {} {len}", T::NAME);
                for row in padded.chunks_exact(len + pad) {
                    let same =
                        row[..len].iter().zip(&wide).all(|(a, b)| a == b || a.to_f64().is_nan() && b.to_f64().is_nan());
                    assert!(same && row[len..].iter().all(|&x| x == T::Acc::ZERO), "{isa} {} {len}", T::NAME);
                }
                // Two rows, the second of which is scaled.
                let two = [&numbers[..len], &numbers[..len]].concat();
                let (mut scaled, factors) = (vec![T::default(); 2 * len], [T::Acc::ONE, T::Acc::from_f64(0.7)]);
                // SAFETY: the vector has two rows.
                unsafe { narrow_scaled(isa, (&two, len), &factors, len, (scaled.as_mut_ptr(), len as isize)) };
                for (at, (found, &x)) in scaled.iter().zip(&two).enumerate() {
                    let expected = T::narrow(x * factors[at / len]).to_f64();
                    let found = found.to_f64();
                    let same = found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan();
                    assert!(same, "{isa} {}: {found:?} {expected:?}", T::NAME);
                }
            }
        }
    }

    #[test]
    fn every_type_is_rounded_and_widened_as_one_number_would_be() {
        rounds_as_one_by_one::<f32>();
        rounds_as_one_by_one::<f64>();
        rounds_as_one_by_one::<bf16>();
        rounds_as_one_by_one::<f16>();
    }
}
