//! Layer normalization (Ba et al. 2016, arXiv:1607.06450) and RMS normalization (Zhang and Sennrich 2019,
//! arXiv:1910.07467).

use crate::float::Float;
use crate::loops::{AddColumns, LayerNorm, LayerNormGradient, RmsNorm, RmsNormGradient};
use crate::machine::summed_rows;
use crate::parameters::Param;
use crate::tape::{Backward, BackwardContext, Tape, Var};
use crate::tensor::Tensor;
use qkv_cuda::operations::{Array, Kind, Operations};

struct LayerNormBackward<T: Float> {
    x: Option<usize>,
    input: Tensor<T>,
    gain: Param,
    bias: Param,
    /// Mean and inverse standard deviation of each row, `[R, 2]`.
    moments: Tensor<T>,
}

impl<T: Float> Tape<'_, T> {
    /// `(x − mean) / √(variance + ε) · gain + bias`, row by row.
    ///
    /// # Panics
    /// If the shapes do not match.
    pub fn layer_norm(&mut self, x: &Var<T>, gain: Param, bias: Param, epsilon: f64) -> Var<T> {
        let (rows, width) = (x.value.rows(), x.value.width());
        let shapes = (self.parameters.shape(gain), self.parameters.shape(bias));
        assert_eq!(shapes, (&[width][..], &[width][..]), "the width of `{}`", self.parameters.name(gain));
        if let Some(operations) = self.machine.cuda() {
            let [g, b] = [gain, bias].map(|param| self.parameters.array(param, operations));
            if let Some(y) = self.normalized_later(operations, x, &g, Some(&b), epsilon) {
                return y;
            }
            let y = Tensor::activations(operations, x.shape());
            let moments = operations.empty(Kind::F32, 2 * rows, "a norm");
            let input = x.value.array(operations);
            let into = [&y.array(operations), &moments];
            operations.layer_norm(&input, into, [&g, &b], [rows, width], epsilon as f32);
            let moments = Tensor::on_device(operations, moments, &[rows, 2]);
            let (slot, input) = (x.slot, x.value.clone());
            let depends = self.depends(&[slot], &[Some(gain), Some(bias)]);
            return self.record(y, depends, || LayerNormBackward { x: slot, input, gain, bias, moments });
        }
        let (g, b) = (self.parameters.get(gain), self.parameters.get(bias));
        let mut y = Tensor::unwritten(self.pool, x.shape());
        let mut moments = Tensor::unwritten(self.pool, &[rows, 2]);
        let each = self.machine.rows_each(rows, width);
        let epsilon = T::of_f64(epsilon);
        let parts = x.value.data().chunks(each * width).zip(y.data_mut().chunks_mut(each * width));
        let parts = parts.zip(moments.data_mut().chunks_mut(each * 2)).collect();
        self.machine.each(parts, |_, ((x, y), moments): ((&[T], &mut [T]), &mut [T])| {
            self.machine.run(LayerNorm { x, y, moments, gain: g, bias: b, epsilon });
        });
        let (slot, input) = (x.slot, x.value.clone());
        self.record(y, self.depends(&[slot], &[Some(gain), Some(bias)]), || LayerNormBackward {
            x: slot,
            input,
            gain,
            bias,
            moments,
        })
    }
}

impl<T: Float> Tape<'_, T> {
    /// A norm of few rows in inference on a device: the product that follows computes the norm itself.
    fn normalized_later(
        &self,
        operations: &Operations,
        x: &Var<T>,
        gain: &Array,
        bias: Option<&Array>,
        epsilon: f64,
    ) -> Option<Var<T>> {
        let later = || x.value.normalized_later(operations, gain.clone(), bias.cloned(), epsilon);
        if self.is_inference() { later().map(|y| self.constant(y)) } else { None }
    }
}

impl<T: Float> Backward<T> for LayerNormBackward<T> {
    fn parameters(&self) -> Option<Vec<Param>> {
        Some(vec![self.gain, self.bias])
    }

    fn backward(self: Box<Self>, upstream: Tensor<T>, context: &mut BackwardContext<'_, T>) {
        let (rows, width) = (self.input.rows(), self.input.width());
        if let Some(operations) = context.machine.cuda() {
            let sums = [self.gain, self.bias].map(|param| context.gradients.array(param, operations));
            let gain = context.parameters.array(self.gain, operations);
            let (d_x, add) = input_gradient(self.x, self.input.shape(), operations, context);
            let [x, d_y, moments] = [&self.input, &upstream, &self.moments].map(|x| x.array(operations));
            let sums = sums.each_ref().map(Option::as_ref);
            return operations.layer_norm_gradient([&x, &d_y, &moments, &gain], &d_x, add, sums, [rows, width]);
        }
        let gain = context.parameters.get(self.gain);
        let mut d_x = Tensor::unwritten(context.pool, self.input.shape());
        let each = summed_rows(width);
        let mut sums = Tensor::unwritten(context.pool, &[rows.div_ceil(each), 2 * width]);
        let inputs = self.input.data().chunks(each * width).zip(upstream.data().chunks(each * width));
        let outputs = d_x.data_mut().chunks_mut(each * width).zip(sums.data_mut().chunks_mut(2 * width));
        let parts = inputs.zip(outputs).zip(self.moments.data().chunks(each * 2)).collect();
        #[allow(clippy::type_complexity)]
        let body = |_, (((x, d_y), (d_x, sums)), moments): (((&[T], &[T]), (&mut [T], &mut [T])), &[T])| {
            context.machine.run(LayerNormGradient { x, d_y, d_x, moments, gain, sums });
        };
        context.machine.each(parts, body);
        for (param, from) in [(self.gain, 0), (self.bias, width)] {
            if let Some(out) = context.gradients.sum(param) {
                context.machine.run(AddColumns { rows: sums.data(), width: 2 * width, from, out });
            }
        }
        context.add(self.x, d_x);
    }
}

/// The array for the gradient of the input, and whether the gradient is added to the array's content. For a constant,
/// the array is scratch memory.
pub(super) fn input_gradient<T: Float>(
    slot: Option<usize>,
    shape: &[usize],
    operations: &Operations,
    context: &mut BackwardContext<'_, T>,
) -> (Array, bool) {
    let found = context.sum_array(slot, shape, operations);
    found.unwrap_or_else(|| (operations.activations(shape.iter().product()), false))
}

struct RmsNormBackward<T: Float> {
    x: Option<usize>,
    input: Tensor<T>,
    gain: Param,
    /// Inverse root mean square of each row, `[R, 1]`.
    inverses: Tensor<T>,
}

impl<T: Float> Tape<'_, T> {
    /// `x / √(mean(x²) + ε) · gain`, row by row.
    ///
    /// # Panics
    /// If the shapes do not match.
    pub fn rms_norm(&mut self, x: &Var<T>, gain: Param, epsilon: f64) -> Var<T> {
        let (rows, width) = (x.value.rows(), x.value.width());
        assert_eq!(self.parameters.shape(gain), [width], "the width of `{}`", self.parameters.name(gain));
        if let Some(operations) = self.machine.cuda() {
            let g = self.parameters.array(gain, operations);
            if let Some(y) = self.normalized_later(operations, x, &g, None, epsilon) {
                return y;
            }
            let y = Tensor::activations(operations, x.shape());
            let inverses = operations.empty(Kind::F32, rows, "a norm");
            let input = x.value.array(operations);
            operations.rms_norm(&input, [&y.array(operations), &inverses], &g, [rows, width], epsilon as f32);
            let inverses = Tensor::on_device(operations, inverses, &[rows, 1]);
            let (slot, input) = (x.slot, x.value.clone());
            let depends = self.depends(&[slot], &[Some(gain)]);
            return self.record(y, depends, || RmsNormBackward { x: slot, input, gain, inverses });
        }
        let g = self.parameters.get(gain);
        let mut y = Tensor::unwritten(self.pool, x.shape());
        let mut inverses = Tensor::unwritten(self.pool, &[rows, 1]);
        let each = self.machine.rows_each(rows, width);
        let epsilon = T::of_f64(epsilon);
        let parts = x.value.data().chunks(each * width).zip(y.data_mut().chunks_mut(each * width));
        let parts = parts.zip(inverses.data_mut().chunks_mut(each)).collect();
        self.machine.each(parts, |_, ((x, y), inverses): ((&[T], &mut [T]), &mut [T])| {
            self.machine.run(RmsNorm { x, y, inverses, gain: g, epsilon });
        });
        let (slot, input) = (x.slot, x.value.clone());
        self.record(y, self.depends(&[slot], &[Some(gain)]), || RmsNormBackward { x: slot, input, gain, inverses })
    }
}

impl<T: Float> Backward<T> for RmsNormBackward<T> {
    fn parameters(&self) -> Option<Vec<Param>> {
        Some(vec![self.gain])
    }

    fn backward(self: Box<Self>, upstream: Tensor<T>, context: &mut BackwardContext<'_, T>) {
        let (rows, width) = (self.input.rows(), self.input.width());
        if let Some(operations) = context.machine.cuda() {
            let sum = context.gradients.array(self.gain, operations);
            let gain = context.parameters.array(self.gain, operations);
            let (d_x, add) = input_gradient(self.x, self.input.shape(), operations, context);
            let [x, d_y, inverses] = [&self.input, &upstream, &self.inverses].map(|x| x.array(operations));
            let from = [&x, &d_y, &inverses, &gain];
            return operations.rms_norm_gradient(from, &d_x, add, sum.as_ref(), [rows, width]);
        }
        let gain = context.parameters.get(self.gain);
        let mut d_x = Tensor::unwritten(context.pool, self.input.shape());
        let each = summed_rows(width);
        let mut sums = Tensor::unwritten(context.pool, &[rows.div_ceil(each), width]);
        let inputs = self.input.data().chunks(each * width).zip(upstream.data().chunks(each * width));
        let outputs = d_x.data_mut().chunks_mut(each * width).zip(sums.data_mut().chunks_mut(width));
        let parts = inputs.zip(outputs).zip(self.inverses.data().chunks(each)).collect();
        #[allow(clippy::type_complexity)]
        let body = |_, (((x, d_y), (d_x, d_gain)), inverses): (((&[T], &[T]), (&mut [T], &mut [T])), &[T])| {
            context.machine.run(RmsNormGradient { x, d_y, d_x, inverses, gain, d_gain });
        };
        context.machine.each(parts, body);
        if let Some(out) = context.gradients.sum(self.gain) {
            context.machine.run(AddColumns { rows: sums.data(), width, from: 0, out });
        }
        context.add(self.x, d_x);
    }
}
