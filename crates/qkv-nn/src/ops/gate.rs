//! The gate of a feed-forward part (Shazeer 2020, arXiv:2002.05202): `silu(gate) · up`, with `silu(x) = x / (1 + e⁻ˣ)`.

use crate::float::Float;
use crate::tape::{Backward, BackwardContext, Tape, Var};
use crate::tensor::Tensor;
use qkv_simd::pass::Pass;

struct GateBackward<T: Float> {
    slots: [Option<usize>; 2],
    gate: Tensor<T>,
    up: Tensor<T>,
}

impl<T: Float> Tape<'_, T> {
    /// `silu(gate) · up`, number by number.
    ///
    /// # Panics
    /// Where the shapes differ.
    pub fn gate(&mut self, gate: &Var<T>, up: &Var<T>) -> Var<T> {
        assert_eq!(gate.shape(), up.shape(), "a product of two shapes");
        let mut y = Tensor::unwritten(self.pool, gate.shape());
        let each = self.machine.rows_each(y.len(), 1);
        let inputs = gate.value.data().chunks(each).zip(up.value.data().chunks(each));
        let parts = y.data_mut().chunks_mut(each).zip(inputs).collect();
        self.machine.each(parts, |_, (y, (gate, up)): (&mut [T], (&[T], &[T]))| {
            self.machine.run(Forward { y, gate, up });
        });
        let slots = [gate.slot, up.slot];
        let [gate, up] = [gate, up].map(|var| var.value.clone());
        self.record(y, || GateBackward { slots, gate, up })
    }
}

struct Forward<'a, T> {
    y: &'a mut [T],
    gate: &'a [T],
    up: &'a [T],
}

impl<T: Float> Pass for Forward<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for ((y, &gate), &up) in self.y.iter_mut().zip(self.gate).zip(self.up) {
            *y = gate * gate.sigmoid() * up;
        }
    }
}

/// Turns the gradient of what came out into that of `up`, in place, and writes that of the gate.
struct Slope<'a, T> {
    gradient: &'a mut [T],
    d_gate: &'a mut [T],
    gate: &'a [T],
    up: &'a [T],
}

impl<T: Float> Pass for Slope<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let outs = self.gradient.iter_mut().zip(self.d_gate);
        for (((g, d_gate), &gate), &up) in outs.zip(self.gate).zip(self.up) {
            let open = gate.sigmoid();
            *d_gate = *g * up * open * (T::ONE + gate * (T::ONE - open));
            *g = *g * gate * open;
        }
    }
}

impl<T: Float> Backward<T> for GateBackward<T> {
    fn backward(self: Box<Self>, mut upstream: Tensor<T>, context: &mut BackwardContext<'_, T>) {
        let mut d_gate = Tensor::unwritten(context.pool, self.gate.shape());
        let each = context.machine.rows_each(d_gate.len(), 1);
        let outs = upstream.data_mut().chunks_mut(each).zip(d_gate.data_mut().chunks_mut(each));
        let parts = outs.zip(self.gate.data().chunks(each).zip(self.up.data().chunks(each))).collect();
        #[allow(clippy::type_complexity)]
        let body = |_, ((gradient, d_gate), (gate, up)): ((&mut [T], &mut [T]), (&[T], &[T]))| {
            context.machine.run(Slope { gradient, d_gate, gate, up });
        };
        context.machine.each(parts, body);
        context.add(self.slots[0], d_gate);
        context.add(self.slots[1], upstream.reshaped(self.up.shape()));
    }
}
