//! Loops over elements, one by one.

use qkv_simd::pass::{Pass, Smooth};

/// Every element becomes a value.
pub struct Fill<'a, T>(pub(crate) &'a mut [T], pub(crate) T);

impl<T: Smooth> Pass for Fill<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for x in self.0 {
            *x = self.1;
        }
    }
}

/// `self.0 *= self.1`.
pub struct Scale<'a, T>(pub(crate) &'a mut [T], pub(crate) T);

impl<T: Smooth> Pass for Scale<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for x in self.0 {
            *x *= self.1;
        }
    }
}

/// `y = x · scale`, or `x · scale + more`.
pub struct Scaled<'a, T> {
    pub(crate) y: &'a mut [T],
    pub(crate) x: &'a [T],
    pub(crate) scale: T,
    pub(crate) more: Option<&'a [T]>,
}

impl<T: Smooth> Pass for Scaled<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Scaled { y, x, scale, more } = self;
        match more {
            Some(more) => y.iter_mut().zip(x).zip(more).for_each(|((y, &x), &more)| *y = x * scale + more),
            None => y.iter_mut().zip(x).for_each(|(y, &x)| *y = x * scale),
        }
    }
}

/// `sum += x · scale`.
pub struct AddScaled<'a, T> {
    pub(crate) sum: &'a mut [T],
    pub(crate) x: &'a [T],
    pub(crate) scale: T,
}

impl<T: Smooth> Pass for AddScaled<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (sum, &x) in self.sum.iter_mut().zip(self.x) {
            *sum += x * self.scale;
        }
    }
}

/// `sum[place] += x` for each element and its place.
///
/// # Panics
/// If a place is out of bounds.
pub struct AddAt<'a, T> {
    pub(crate) sum: &'a mut [T],
    pub(crate) x: &'a [T],
    pub(crate) places: &'a [u32],
}

impl<T: Smooth> Pass for AddAt<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (&x, &place) in self.x.iter().zip(self.places) {
            self.sum[place as usize] += x;
        }
    }
}

/// The larger of `best` and `x`, and its place: that of `x` is its index counted from `first`.
pub struct MaxPlaces<'a, T> {
    pub(crate) best: &'a mut [T],
    pub(crate) places: &'a mut [u32],
    pub(crate) x: &'a [T],
    pub(crate) first: u32,
}

impl<T: Smooth> Pass for MaxPlaces<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let elements = self.best.iter_mut().zip(self.places).zip(self.x);
        for (at, ((best, place), &x)) in (self.first..).zip(elements) {
            let more = x > *best;
            *best = if more { x } else { *best };
            *place = if more { at } else { *place };
        }
    }
}

/// The sum of squares, in f64, in order.
pub struct SquareSum<'a, T> {
    pub(crate) x: &'a [T],
    pub(crate) sum: &'a mut f64,
}

impl<T: Smooth> Pass for SquareSum<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        *self.sum = self.x.iter().map(|x| x.to_f64() * x.to_f64()).sum();
    }
}

/// `max(x, 0)`.
pub struct Relu<'a, T>(pub(crate) &'a mut [T]);

impl<T: Smooth> Pass for Relu<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for x in self.0 {
            *x = if *x > T::ZERO { *x } else { T::ZERO };
        }
    }
}

/// Gradients become zero where the output is not positive.
pub struct ReluGradient<'a, T> {
    pub(crate) gradient: &'a mut [T],
    pub(crate) output: &'a [T],
}

impl<T: Smooth> Pass for ReluGradient<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (g, &y) in self.gradient.iter_mut().zip(self.output) {
            *g = if y > T::ZERO { *g } else { T::ZERO };
        }
    }
}

/// `row += scale · Σ left[r] · right[r]`, a row of a product of low rank; sums in f64.
pub struct AddLowRank<'a, T> {
    pub(crate) row: &'a mut [T],
    pub(crate) left: &'a [T],
    pub(crate) right: &'a [T],
    pub(crate) scale: f64,
}

impl<T: Smooth> Pass for AddLowRank<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let AddLowRank { row, left, right, scale } = self;
        let mut sums = vec![0.0; row.len()];
        for (x, right) in left.iter().zip(right.chunks_exact(row.len().max(1))) {
            let x = x.to_f64();
            sums.iter_mut().zip(right).for_each(|(sum, y)| *sum += x * y.to_f64());
        }
        for (to, sum) in row.iter_mut().zip(sums) {
            *to = T::of_f64(to.to_f64() + scale * sum);
        }
    }
}
