//! The operations: each a method of [`Tape`](crate::Tape), its forward pass, and a struct that knows the way back.

pub(crate) mod attention;
mod dropout;
pub(crate) mod embedding;
mod gate;
mod gather;
mod gru;
pub(crate) mod linear;
pub(crate) mod loss;
mod mean;
mod norm;
mod packed;
mod rms_norm;
pub(crate) mod rotary;
mod shape;
mod span;

use crate::float::Float;
use crate::machine::Machine;
use qkv_simd::pass::Pass;

/// `sum += more`, side by side on the threads.
pub(crate) fn add_assign<T: Float>(machine: &Machine, sum: &mut [T], more: &[T]) {
    assert_eq!(sum.len(), more.len());
    let each = machine.rows_each(sum.len(), 1);
    let parts = sum.chunks_mut(each).zip(more.chunks(each)).collect();
    machine.each(parts, |_, (sum, more): (&mut [T], &[T])| machine.run(Add(sum, more)));
}

struct Add<'a, T>(&'a mut [T], &'a [T]);

impl<T: Float> Pass for Add<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (sum, &x) in self.0.iter_mut().zip(self.1) {
            *sum += x;
        }
    }
}

/// Numbers that are summed side by side, so that a sum becomes vectors and still has one order.
const SIDE: usize = 16;

/// `Σ f(x, y)` over two rows of the same length.
macro_rules! sum_over {
    ($T:ty, $x:expr, $y:expr, |$a:ident, $b:ident| $term:expr) => {{
        let mut sums = [<$T as qkv_simd::Real>::ZERO; $crate::ops::SIDE];
        let (xs, ys) = ($x.chunks_exact($crate::ops::SIDE), $y.chunks_exact($crate::ops::SIDE));
        let mut rest = <$T as qkv_simd::Real>::ZERO;
        for (&$a, &$b) in xs.remainder().iter().zip(ys.remainder()) {
            rest += $term;
        }
        for (x, y) in xs.zip(ys) {
            for l in 0..$crate::ops::SIDE {
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
