//! ReLU that is not fused into a linear layer: after a norm, or after a residual addition.

use crate::float::Float;
use crate::loops::{Relu, ReluGradient};
use crate::tape::{Backward, BackwardContext, Tape, Var};
use crate::tensor::Tensor;
use qkv_cuda::operations::Activation;

struct ReluBackward<T: Float> {
    x: Option<usize>,
    output: Tensor<T>,
}

impl<T: Float> Backward<T> for ReluBackward<T> {
    fn backward(self: Box<Self>, mut upstream: Tensor<T>, context: &mut BackwardContext<'_, T>) {
        let machine = context.machine;
        if let Some(operations) = machine.cuda() {
            let (array, output) = (upstream.array_mut(operations), self.output.array(operations));
            operations.activation_gradient(&array, Some(&output), [1, output.len()], Activation::Relu, None);
            return context.add(self.x, upstream);
        }
        let each = machine.rows_each(upstream.len(), 1);
        let parts = upstream.data_mut().chunks_mut(each).zip(self.output.data().chunks(each)).collect();
        machine.each(parts, |_, (gradient, output): (&mut [T], &[T])| {
            machine.run(ReluGradient { gradient, output });
        });
        context.add(self.x, upstream);
    }
}

impl<T: Float> Tape<'_, T> {
    /// `max(x, 0)`, in place if the memory of `x` is not shared.
    pub fn relu(&mut self, x: Var<T>) -> Var<T> {
        let (slot, mut value) = (x.slot, x.value);
        if let Some(operations) = self.machine.cuda() {
            let array = value.array_mut(operations);
            operations.activate(&array, &array, None, [1, array.len()], Activation::Relu, None);
            let output = value.clone();
            return self.record(value, self.depends(&[slot], &[]), || ReluBackward { x: slot, output });
        }
        let each = self.machine.rows_each(value.len(), 1);
        let parts = value.data_mut().chunks_mut(each).collect();
        self.machine.each(parts, |_, values: &mut [T]| {
            self.machine.run(Relu(values));
        });
        let output = value.clone();
        self.record(value, self.depends(&[slot], &[]), || ReluBackward { x: slot, output })
    }
}
