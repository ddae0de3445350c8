//! Group normalization (Wu and He 2018, arXiv:1803.08494): channels are divided into groups, each normalized over all
//! pixels of an image. Unlike with batch normalization, an image's result does not depend on the others in its batch.

use crate::float::Float;
use crate::loops::{GroupNorm, GroupNormGradient};
use crate::parameters::Param;
use crate::tape::{Backward, BackwardContext, Tape, Var};
use crate::tensor::Tensor;
use qkv_cuda::operations::Kind;

struct GroupNormBackward<T: Float> {
    x: Option<usize>,
    input: Tensor<T>,
    gain: Param,
    bias: Param,
    /// Mean and inverse standard deviation of each group of each image, `[B, G, 2]`.
    moments: Tensor<T>,
    groups: usize,
}

impl<T: Float> Tape<'_, T> {
    /// `(x − mean) / √(variance + ε) · gain + bias`, with mean and variance over all pixels of an image for each of
    /// `groups` groups of channels: `x [B, .., C]`, `gain [C]`, `bias [C]`.
    ///
    /// # Panics
    /// If the shapes do not match, or the groups do not divide the channels.
    pub fn group_norm(&mut self, x: &Var<T>, gain: Param, bias: Param, groups: usize, epsilon: f64) -> Var<T> {
        let (batch, channels) = (x.shape()[0], x.value.width());
        let shapes = (self.parameters.shape(gain), self.parameters.shape(bias));
        assert_eq!(shapes, (&[channels][..], &[channels][..]), "the width of `{}`", self.parameters.name(gain));
        assert!(groups > 0 && channels.is_multiple_of(groups), "{groups} groups of {channels} channels");
        if let Some(operations) = self.machine.cuda() {
            let y = Tensor::activations(operations, x.shape());
            let moments = operations.empty(Kind::F32, batch * groups * 2, "a norm");
            let [g, b] = [gain, bias].map(|param| self.parameters.array(param, operations));
            let sizes = [batch, x.value.len() / (batch * channels).max(1), channels, groups];
            let into = [&y.array(operations), &moments];
            operations.group_norm(&x.value.array(operations), into, [&g, &b], sizes, epsilon as f32);
            let moments = Tensor::on_device(operations, moments, &[batch, groups, 2]);
            let (slot, input) = (x.slot, x.value.clone());
            let depends = self.depends(&[slot], &[Some(gain), Some(bias)]);
            return self.record(y, depends, || GroupNormBackward { x: slot, input, gain, bias, moments, groups });
        }
        let (g, b) = (self.parameters.get(gain), self.parameters.get(bias));
        let mut y = Tensor::unwritten(self.pool, x.shape());
        let mut moments = Tensor::unwritten(self.pool, &[batch, groups, 2]);
        let (each, epsilon) = ((x.value.len() / batch.max(1)).max(1), T::of_f64(epsilon));
        let parts = x.value.data().chunks(each).zip(y.data_mut().chunks_mut(each));
        let parts = parts.zip(moments.data_mut().chunks_mut(groups * 2)).collect();
        self.machine.each(parts, |_, ((x, y), moments): ((&[T], &mut [T]), &mut [T])| {
            self.machine.run(GroupNorm { x, y, moments, gain: g, bias: b, epsilon });
        });
        let (slot, input) = (x.slot, x.value.clone());
        self.record(y, self.depends(&[slot], &[Some(gain), Some(bias)]), || GroupNormBackward {
            x: slot,
            input,
            gain,
            bias,
            moments,
            groups,
        })
    }
}

impl<T: Float> Backward<T> for GroupNormBackward<T> {
    fn parameters(&self) -> Option<Vec<Param>> {
        Some(vec![self.gain, self.bias])
    }

    fn backward(self: Box<Self>, upstream: Tensor<T>, context: &mut BackwardContext<'_, T>) {
        let (batch, channels) = (self.input.shape()[0], self.input.width());
        if let Some(operations) = context.machine.cuda() {
            let sums = [self.gain, self.bias].map(|param| context.gradients.array(param, operations));
            let gain = context.parameters.array(self.gain, operations);
            let shape = self.input.shape();
            let (d_x, add) = super::norm::input_gradient(self.x, shape, operations, context);
            let [x, d_y, moments] = [&self.input, &upstream, &self.moments].map(|x| x.array(operations));
            let (from, sums) = ([&x, &d_y, &moments, &gain], sums.each_ref().map(Option::as_ref));
            let sizes = [batch, self.input.len() / (batch * channels).max(1), channels, self.groups];
            return operations.group_norm_gradient(from, &d_x, add, sums, sizes);
        }
        let gain = context.parameters.get(self.gain);
        let mut d_x = Tensor::unwritten(context.pool, self.input.shape());
        let mut sums = Tensor::unwritten(context.pool, &[batch, 2 * channels]);
        let each = (self.input.len() / batch.max(1)).max(1);
        let inputs = self.input.data().chunks(each).zip(upstream.data().chunks(each));
        let outputs = d_x.data_mut().chunks_mut(each).zip(sums.data_mut().chunks_mut(2 * channels));
        let parts = inputs.zip(outputs).zip(self.moments.data().chunks(self.groups * 2)).collect();
        #[allow(clippy::type_complexity)]
        let body = |_, (((x, d_y), (d_x, sums)), moments): (((&[T], &[T]), (&mut [T], &mut [T])), &[T])| {
            context.machine.run(GroupNormGradient { x, d_y, d_x, moments, gain, sums });
        };
        context.machine.each(parts, body);
        for sums in sums.data().chunks_exact(2 * channels) {
            for (param, sums) in [(self.gain, &sums[..channels]), (self.bias, &sums[channels..])] {
                let to = context.gradients.sum(param).into_iter().flatten();
                to.zip(sums).for_each(|(sum, &x)| *sum += x);
            }
        }
        context.add(self.x, d_x);
    }
}
