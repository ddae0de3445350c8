//! The gated activation of a feed-forward layer (SwiGLU, Shazeer 2020, arXiv:2002.05202): `silu(gate) · up`, with
//! `silu(x) = x / (1 + e⁻ˣ)`.

use crate::float::Float;
use crate::loops::{SwiGlu, SwiGluGradient};
use crate::tape::{Backward, BackwardContext, Tape, Var};
use crate::tensor::Tensor;

struct SwiGluBackward<T: Float> {
    slots: [Option<usize>; 2],
    gate: Tensor<T>,
    up: Tensor<T>,
}

impl<T: Float> Tape<'_, T> {
    /// `silu(gate) · up`, element by element.
    ///
    /// # Panics
    /// Where the shapes differ.
    pub fn swiglu(&mut self, gate: &Var<T>, up: &Var<T>) -> Var<T> {
        assert_eq!(gate.shape(), up.shape(), "a product of two shapes");
        let slots = [gate.slot, up.slot];
        let depends = self.depends(&slots, &[]);
        if let Some(operations) = self.machine.cuda() {
            let y = Tensor::activations(operations, gate.shape());
            let [gate, up] = [gate, up].map(|var| var.value.clone());
            operations.swiglu(&gate.array(operations), &up.array(operations), &y.array(operations));
            return self.record(y, depends, || SwiGluBackward { slots, gate, up });
        }
        let mut y = Tensor::unwritten(self.pool, gate.shape());
        let each = self.machine.rows_each(y.len(), 1);
        let inputs = gate.value.data().chunks(each).zip(up.value.data().chunks(each));
        let parts = y.data_mut().chunks_mut(each).zip(inputs).collect();
        self.machine.each(parts, |_, (y, (gate, up)): (&mut [T], (&[T], &[T]))| {
            self.machine.run(SwiGlu { y, gate, up });
        });
        let [gate, up] = [gate, up].map(|var| var.value.clone());
        self.record(y, depends, || SwiGluBackward { slots, gate, up })
    }
}

impl<T: Float> Backward<T> for SwiGluBackward<T> {
    fn backward(self: Box<Self>, mut upstream: Tensor<T>, context: &mut BackwardContext<'_, T>) {
        if let Some(operations) = context.machine.cuda() {
            let d_gate = Tensor::activations(operations, self.gate.shape());
            let [gate, up] = [&self.gate, &self.up].map(|x| x.array(operations));
            operations.swiglu_gradient(&upstream.array_mut(operations), &d_gate.array(operations), &gate, &up);
            context.add(self.slots[0], d_gate);
            return context.add(self.slots[1], upstream.reshaped(self.up.shape()));
        }
        let mut d_gate = Tensor::unwritten(context.pool, self.gate.shape());
        let each = context.machine.rows_each(d_gate.len(), 1);
        let outs = upstream.data_mut().chunks_mut(each).zip(d_gate.data_mut().chunks_mut(each));
        let parts = outs.zip(self.gate.data().chunks(each).zip(self.up.data().chunks(each))).collect();
        #[allow(clippy::type_complexity)]
        let body = |_, ((gradient, d_gate), (gate, up)): ((&mut [T], &mut [T]), (&[T], &[T]))| {
            context.machine.run(SwiGluGradient { gradient, d_gate, gate, up });
        };
        context.machine.each(parts, body);
        context.add(self.slots[0], d_gate);
        context.add(self.slots[1], upstream.reshaped(self.up.shape()));
    }
}
