//! The operations: each a method of [`Tape`](crate::Tape), which is its forward pass, and a struct that implements its
//! backward pass.

pub(crate) mod attention;
pub(crate) mod boxes;
pub(crate) mod distance;
pub(crate) mod dropout;
pub(crate) mod embedding;
mod gather;
pub(crate) mod group_norm;
pub(crate) mod gru;
pub(crate) mod guide;
pub(crate) mod linear;
pub(crate) mod loss;
mod mean;
pub(crate) mod norm;
mod packed;
mod relu;
pub(crate) mod rotary;
mod shape;
mod span;
pub(crate) mod swiglu;
pub(crate) mod unfold;
pub(crate) mod windows2d;

use crate::float::Float;
use crate::machine::Machine;
use qkv_simd::pass::Pass;

/// `sum += more`, in parallel.
pub(crate) fn add_assign<T: Float>(machine: &Machine, sum: &mut [T], more: &[T]) {
    assert_eq!(sum.len(), more.len());
    let each = machine.rows_each(sum.len(), 1);
    let parts = sum.chunks_mut(each).zip(more.chunks(each)).collect();
    machine.each(parts, |_, (sum, more): (&mut [T], &[T])| machine.run(AddAssign(sum, more)));
}

/// `self.0 += self.1`.
pub struct AddAssign<'a, T>(&'a mut [T], &'a [T]);

impl<T: Float> Pass for AddAssign<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (sum, &x) in self.0.iter_mut().zip(self.1) {
            *sum += x;
        }
    }
}

/// Accumulators of a sum: enough to vectorize it, in an order that does not depend on the instruction set.
const LANES: usize = 16;

/// `Σ f(x, y)` over two rows of the same length.
macro_rules! sum_over {
    ($T:ty, $x:expr, $y:expr, |$a:ident, $b:ident| $term:expr) => {{
        let mut sums = [<$T as qkv_simd::Real>::ZERO; $crate::ops::LANES];
        let (xs, ys) = ($x.chunks_exact($crate::ops::LANES), $y.chunks_exact($crate::ops::LANES));
        let mut rest = <$T as qkv_simd::Real>::ZERO;
        for (&$a, &$b) in xs.remainder().iter().zip(ys.remainder()) {
            rest += $term;
        }
        for (x, y) in xs.zip(ys) {
            for l in 0..$crate::ops::LANES {
                let ($a, $b) = (x[l], y[l]);
                sums[l] += $term;
            }
        }
        let mut total = rest;
        for sum in sums {
            total += sum;
        }
        total
    }};
}
pub(crate) use sum_over;
