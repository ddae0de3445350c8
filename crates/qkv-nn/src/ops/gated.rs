//! Gates: `f(gate) · up`, with `f` SiLU, GELU or the sigmoid. They are the inner activation of a feed-forward layer
//! (SwiGLU and GEGLU, Shazeer 2020, arXiv:2002.05202), or gate the output of an attention (attention on attention,
//! Huang et al. 2019, arXiv:1908.06954).

use crate::float::Float;
use crate::loops::{Gate, Gated, GatedGradient};
use crate::tape::{Backward, BackwardContext, Tape, Var};
use crate::tensor::Tensor;

impl Gate {
    pub(super) fn on_device(self) -> qkv_cuda::operations::Gate {
        match self {
            Gate::Silu => qkv_cuda::operations::Gate::Silu,
            Gate::Gelu => qkv_cuda::operations::Gate::Gelu,
            Gate::GeluTanh => qkv_cuda::operations::Gate::GeluTanh,
            Gate::Sigmoid => qkv_cuda::operations::Gate::Sigmoid,
        }
    }
}

struct GatedBackward<T: Float> {
    slots: [Option<usize>; 2],
    gate: Tensor<T>,
    up: Tensor<T>,
    of: Gate,
}

impl<T: Float> Tape<'_, T> {
    /// `f(gate) · up`, element by element.
    ///
    /// # Panics
    /// If the shapes differ.
    pub fn gated(&mut self, gate: &Var<T>, up: &Var<T>, of: Gate) -> Var<T> {
        assert_eq!(gate.shape(), up.shape(), "a product of two shapes");
        let slots = [gate.slot, up.slot];
        let depends = self.depends(&slots, &[]);
        if let Some(operations) = self.machine.cuda() {
            let y = Tensor::activations(operations, gate.shape());
            let [gate, up] = [gate, up].map(|var| var.value.clone());
            let arrays = [&gate, &up, &y].map(|x| x.array(operations));
            operations.gated(arrays.each_ref(), of.on_device());
            return self.record(y, depends, || GatedBackward { slots, gate, up, of });
        }
        let mut y = Tensor::unwritten(self.pool, gate.shape());
        let each = self.machine.rows_each(y.len(), 1);
        let inputs = gate.value.data().chunks(each).zip(up.value.data().chunks(each));
        let parts = y.data_mut().chunks_mut(each).zip(inputs).collect();
        self.machine.each(parts, |_, (y, (gate, up)): (&mut [T], (&[T], &[T]))| {
            self.machine.run(Gated { y, gate, up, of });
        });
        let [gate, up] = [gate, up].map(|var| var.value.clone());
        self.record(y, depends, || GatedBackward { slots, gate, up, of })
    }
}

impl<T: Float> Backward<T> for GatedBackward<T> {
    fn backward(self: Box<Self>, mut upstream: Tensor<T>, context: &mut BackwardContext<'_, T>) {
        if let Some(operations) = context.machine.cuda() {
            let d_gate = Tensor::activations(operations, self.gate.shape());
            let [gate, up] = [&self.gate, &self.up].map(|x| x.array(operations));
            let gradients = [&upstream.array_mut(operations), &d_gate.array(operations)];
            operations.gated_gradient(gradients, [&gate, &up], self.of.on_device());
            context.add(self.slots[0], d_gate);
            return context.add(self.slots[1], upstream.reshaped(self.up.shape()));
        }
        let mut d_gate = Tensor::unwritten(context.pool, self.gate.shape());
        let each = context.machine.rows_each(d_gate.len(), 1);
        let outs = upstream.data_mut().chunks_mut(each).zip(d_gate.data_mut().chunks_mut(each));
        let parts = outs.zip(self.gate.data().chunks(each).zip(self.up.data().chunks(each))).collect();
        #[allow(clippy::type_complexity)]
        let body = |_, ((gradient, d_gate), (gate, up)): ((&mut [T], &mut [T]), (&[T], &[T]))| {
            context.machine.run(GatedGradient { gradient, d_gate, gate, up, of: self.of });
        };
        context.machine.each(parts, body);
        context.add(self.slots[0], d_gate);
        context.add(self.slots[1], upstream.reshaped(self.up.shape()));
    }
}
