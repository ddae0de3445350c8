//! Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467): each row divided by the root of the mean of its
//! squares. No mean is taken away, and there is no bias.

use super::sum_over;
use crate::float::Float;
use crate::parameters::Param;
use crate::tape::{Backward, BackwardContext, Tape, Var};
use crate::tensor::Tensor;
use qkv_simd::pass::Pass;

struct RmsBackward<T: Float> {
    x: Option<usize>,
    input: Tensor<T>,
    gain: Param,
    /// One over the root of each row.
    inverses: Tensor<T>,
}

/// Rows whose sums for the gain are one part, so that they have one order: a function of the width alone.
const ROWS: usize = 64;

impl<T: Float> Tape<'_, T> {
    /// `x / √(mean(x²) + ε) · gain`, row by row.
    ///
    /// # Panics
    /// Where the shapes do not fit.
    pub fn rms_norm(&mut self, x: &Var<T>, gain: Param, epsilon: f64) -> Var<T> {
        let (rows, width) = (x.value.rows(), x.value.width());
        let g = self.parameters.get(gain);
        assert_eq!(g.len(), width, "the width of `{}`", self.parameters.name(gain));
        let mut y = Tensor::unwritten(self.pool, x.shape());
        let mut inverses = Tensor::unwritten(self.pool, &[rows, 1]);
        let each = self.machine.rows_each(rows, width);
        let epsilon = T::of_f64(epsilon);
        let parts = x.value.data().chunks(each * width).zip(y.data_mut().chunks_mut(each * width));
        let parts = parts.zip(inverses.data_mut().chunks_mut(each)).collect();
        self.machine.each(parts, |_, ((x, y), inverses): ((&[T], &mut [T]), &mut [T])| {
            self.machine.run(Normalise { x, y, inverses, gain: g, epsilon });
        });
        let (slot, input) = (x.slot, x.value.clone());
        self.record(y, || RmsBackward { x: slot, input, gain, inverses })
    }
}

struct Normalise<'a, T> {
    x: &'a [T],
    y: &'a mut [T],
    inverses: &'a mut [T],
    gain: &'a [T],
    epsilon: T,
}

impl<T: Float> Pass for Normalise<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let width = self.gain.len();
        let count = T::of_f64(width as f64);
        let rows = self.x.chunks_exact(width).zip(self.y.chunks_exact_mut(width));
        for ((x, y), inverse) in rows.zip(self.inverses) {
            let square = sum_over!(T, x, x, |a, b| a * b) / count;
            *inverse = T::ONE / (square + self.epsilon).sqrt();
            for j in 0..width {
                y[j] = x[j] * *inverse * self.gain[j];
            }
        }
    }
}

struct NormaliseBackward<'a, T> {
    x: &'a [T],
    d_y: &'a [T],
    d_x: &'a mut [T],
    inverses: &'a [T],
    gain: &'a [T],
    d_gain: &'a mut [T],
}

impl<T: Float> Pass for NormaliseBackward<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let width = self.gain.len();
        let count = T::of_f64(width as f64);
        self.d_gain.fill(T::ZERO);
        let rows = self.x.chunks_exact(width).zip(self.d_y.chunks_exact(width)).zip(self.d_x.chunks_exact_mut(width));
        for (((x, d_y), d_x), &inverse) in rows.zip(self.inverses) {
            for j in 0..width {
                self.d_gain[j] += d_y[j] * x[j] * inverse;
                d_x[j] = d_y[j] * self.gain[j];
            }
            let tilt = sum_over!(T, d_x, x, |g, x| g * x) / count * inverse * inverse;
            for j in 0..width {
                d_x[j] = (d_x[j] - x[j] * tilt) * inverse;
            }
        }
    }
}

impl<T: Float> Backward<T> for RmsBackward<T> {
    fn backward(self: Box<Self>, upstream: Tensor<T>, context: &mut BackwardContext<'_, T>) {
        let (rows, width) = (self.input.rows(), self.input.width());
        let gain = context.parameters.get(self.gain);
        let mut d_x = Tensor::unwritten(context.pool, self.input.shape());
        let mut sums = Tensor::unwritten(context.pool, &[rows.div_ceil(ROWS), width]);
        let inputs = self.input.data().chunks(ROWS * width).zip(upstream.data().chunks(ROWS * width));
        let outputs = d_x.data_mut().chunks_mut(ROWS * width).zip(sums.data_mut().chunks_mut(width));
        let parts = inputs.zip(outputs).zip(self.inverses.data().chunks(ROWS)).collect();
        #[allow(clippy::type_complexity)]
        let body = |_, (((x, d_y), (d_x, d_gain)), inverses): (((&[T], &[T]), (&mut [T], &mut [T])), &[T])| {
            context.machine.run(NormaliseBackward { x, d_y, d_x, inverses, gain, d_gain });
        };
        context.machine.each(parts, body);
        for sums in sums.data().chunks_exact(width) {
            context.gradients.get_mut(self.gain).iter_mut().zip(sums).for_each(|(sum, &x)| *sum += x);
        }
        context.add(self.x, d_x);
    }
}
