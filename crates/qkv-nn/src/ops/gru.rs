//! The gated recurrent unit (Cho et al. 2014, arXiv:1406.1078), in PyTorch's form: the reset gate is applied after the
//! recurrent product.
//!
//! ```text
//! r = σ(x_r + W_r h + b_r)                z = σ(x_z + W_z h + b_z)
//! n = tanh(x_n + r ∘ (W_n h + b_n))       h' = (1 − z) ∘ n + z ∘ h
//! ```
//!
//! The input's parts, `x_r x_z x_n`, are precomputed by one linear map of the whole sequence. A sequence that has ended
//! keeps its state and outputs zeros.

use crate::float::Float;
use crate::loops::{AddAssign, Fill, GruCell, GruCellGradient};
use crate::machine::{Machine, summed_rows};
use crate::parameters::Param;
use crate::tape::{Backward, BackwardContext, Tape, Var};
use crate::tensor::Tensor;
use qkv_cuda::operations::{Array, Factor, Kind, Operations};
use qkv_simd::matmul::Operand;
use std::sync::Arc;

struct GruBackward<T: Float> {
    x: Option<usize>,
    h: Option<usize>,
    w: Param,
    b: Param,
    lengths: Option<Arc<[usize]>>,
    reverse: bool,
    /// The state before each step, in the order of the steps `[N, B, C]`.
    states: Tensor<T>,
    /// `r`, `z`, `n` and `W_n h + b_n` of each step, `[N, B, 4C]`.
    gates: Tensor<T>,
}

impl<T: Float> Tape<'_, T> {
    /// Runs over `x [B, N, 3C]` from the state `h [B, 1, C]`, with `W [3C, C]` and `b [3C]`, and returns the state
    /// after each step, `[B, N, C]`.
    ///
    /// # Panics
    /// If the shapes do not match.
    pub fn gru(
        &mut self,
        x: &Var<T>,
        h: &Var<T>,
        w: Param,
        b: Param,
        lengths: Option<&[usize]>,
        reverse: bool,
    ) -> Var<T> {
        let &[batch, steps, wide] = x.shape() else { panic!("sequences have three axes, not {:?}", x.shape()) };
        let width = wide / 3;
        assert_eq!(h.shape(), [batch, 1, width], "the state of a gated unit");
        assert_eq!(self.parameters.shape(w), [3 * width, width], "`{}`", self.parameters.name(w));
        if let Some(operations) = self.machine.cuda() {
            return self.gru_on_cuda(operations, x, h, w, b, lengths, reverse);
        }
        let (weight, bias) = (self.parameters.get(w), self.parameters.get(b));
        let mut states = Tensor::unwritten(self.pool, &[steps + 1, batch, width]);
        let mut gates = Tensor::unwritten(self.pool, &[steps, batch, 4 * width]);
        let mut y = Tensor::unwritten(self.pool, &[batch, steps, width]);
        let mut recurrent = Tensor::unwritten(self.pool, &[batch, wide]);
        states.data_mut()[..batch * width].copy_from_slice(h.value.data());
        for step in 0..steps {
            let at = if reverse { steps - 1 - step } else { step };
            let (before, after) = states.data_mut()[step * batch * width..].split_at_mut(batch * width);
            let weight = Operand::rows(weight, wide, width).transposed();
            self.machine.product(recurrent.data_mut(), Operand::rows(before, batch, width), weight, false);
            let gates = &mut gates.data_mut()[step * batch * 4 * width..][..batch * 4 * width];
            for (b, gates) in gates.chunks_exact_mut(4 * width).enumerate() {
                let (before, after) = (&before[b * width..][..width], &mut after[b * width..][..width]);
                let out = &mut y.data_mut()[(b * steps + at) * width..][..width];
                if lengths.is_some_and(|lengths| at >= lengths[b]) {
                    after.copy_from_slice(before);
                    self.machine.run(Fill(out, T::ZERO));
                    continue;
                }
                let x = &x.value.data()[(b * steps + at) * wide..][..wide];
                let recurrent = &recurrent.data()[b * wide..][..wide];
                self.machine.run(GruCell { x, recurrent, bias, before, gates, after });
                out.copy_from_slice(after);
            }
        }
        let (slot, from) = (x.slot, h.slot);
        let lengths = lengths.map(Into::into);
        let depends = self.depends(&[slot, from], &[Some(w), Some(b)]);
        self.record(y, depends, || GruBackward { x: slot, h: from, w, b, lengths, reverse, states, gates })
    }

    #[allow(clippy::too_many_arguments)] // The arguments of `gru`.
    fn gru_on_cuda(
        &mut self,
        operations: &Operations,
        x: &Var<T>,
        h: &Var<T>,
        w: Param,
        b: Param,
        lengths: Option<&[usize]>,
        reverse: bool,
    ) -> Var<T> {
        let &[batch, steps, wide] = x.shape() else { unreachable!("`gru` checked the axes") };
        let width = wide / 3;
        let weight = self.parameters.rounded_array(w, operations);
        let bias = self.parameters.array(b, operations);
        let counts = on_device(operations, lengths);
        let states = Tensor::activations(operations, &[steps + 1, batch, width]);
        let gates = Tensor::activations(operations, &[steps, batch, 4 * width]);
        let y = Tensor::activations(operations, &[batch, steps, width]);
        let (input, out) = (x.value.array(operations), y.array(operations));
        let (all_states, all_gates) = (states.array(operations), gates.array(operations));
        operations.copy(&all_states.slice(0..batch * width), &h.value.array(operations));
        let recurrent = operations.activations(batch * wide);
        for step in 0..steps {
            let at = if reverse { steps - 1 - step } else { step };
            let [before, after] =
                [step, step + 1].map(|step| all_states.slice(step * batch * width..(step + 1) * batch * width));
            let gates = all_gates.slice(step * batch * 4 * width..(step + 1) * batch * 4 * width);
            operations.linear(&recurrent, &before, (&weight).into(), [None; 2], [batch, wide, width]);
            let sizes = [batch, steps, at, width];
            operations.gru_cell([&input, &recurrent, &before], &bias, [&gates, &after, &out], counts.as_ref(), sizes);
        }
        let (slot, from) = (x.slot, h.slot);
        let lengths = lengths.map(Into::into);
        let depends = self.depends(&[slot, from], &[Some(w), Some(b)]);
        self.record(y, depends, || GruBackward { x: slot, h: from, w, b, lengths, reverse, states, gates })
    }
}

/// Uploads the lengths of sequences.
fn on_device(operations: &Operations, lengths: Option<&[usize]>) -> Option<Array> {
    let lengths: Vec<u32> = lengths?.iter().map(|&length| length as u32).collect();
    Some(operations.upload(Kind::U32, &lengths, "lengths"))
}

impl<T: Float> GruBackward<T> {
    fn backward_on_cuda(self, operations: &Operations, upstream: &Tensor<T>, context: &mut BackwardContext<'_, T>) {
        let &[steps, batch, four] = self.gates.shape() else { unreachable!("the forward pass saved [N, B, 4C]") };
        let (width, wide) = (four / 4, four / 4 * 3);
        let d_x = Tensor::activations(operations, &[batch, steps, wide]);
        let d_h = Tensor::activations(operations, &[batch, 1, width]);
        operations.clear(&d_h.array(operations));
        let d_recurrent = operations.activations(steps * batch * wide);
        let weight = context.parameters.rounded_array(self.w, operations);
        let counts = on_device(operations, self.lengths.as_deref());
        let (above, states, gates) =
            (upstream.array(operations), self.states.array(operations), self.gates.array(operations));
        let (into_x, into_h) = (d_x.array(operations), d_h.array(operations));
        for step in (0..steps).rev() {
            let at = if self.reverse { steps - 1 - step } else { step };
            let before = states.slice(step * batch * width..(step + 1) * batch * width);
            let gates = gates.slice(step * batch * four..(step + 1) * batch * four);
            let d_recurrent = d_recurrent.slice(step * batch * wide..(step + 1) * batch * wide);
            let (from, into) = ([&before, &gates], [&into_x, &d_recurrent]);
            operations.gru_cell_gradient(&above, &into_h, from, into, counts.as_ref(), [batch, steps, at, width]);
            let (left, right) = (Factor::new(&d_recurrent), Factor::new(&weight));
            operations.product(&into_h, left, right, [batch, width, wide], true);
        }
        // All steps at once: (3C, N·B) · (N·B, C).
        let rows = steps * batch;
        if let Some(sum) = context.gradients.array(self.b, operations) {
            operations.add_column_sums(&d_recurrent, &sum, [rows, wide]);
        }
        if let Some(sum) = context.gradients.array(self.w, operations) {
            let (left, right) = (Factor::transposed(&d_recurrent), Factor::new(&states));
            operations.product(&sum, left, right, [wide, width, rows], true);
        }
        context.add(self.x, d_x);
        context.add(self.h, d_h);
    }
}

impl<T: Float> Backward<T> for GruBackward<T> {
    fn parameters(&self) -> Option<Vec<Param>> {
        Some(vec![self.w, self.b])
    }

    fn backward(self: Box<Self>, upstream: Tensor<T>, context: &mut BackwardContext<'_, T>) {
        let machine: &Machine = context.machine;
        if let Some(operations) = machine.cuda() {
            return self.backward_on_cuda(operations, &upstream, context);
        }
        let &[steps, batch, four] = self.gates.shape() else { unreachable!("the forward pass saved [N, B, 4C]") };
        let (width, wide) = (four / 4, four / 4 * 3);
        let mut d_x = Tensor::unwritten(context.pool, &[batch, steps, wide]);
        let mut d_h = Tensor::zeros(context.pool, &[batch, 1, width]);
        let mut d_after = Tensor::unwritten(context.pool, &[batch, width]);
        let mut d_recurrent = Tensor::unwritten(context.pool, &[steps, batch, wide]);
        for step in (0..steps).rev() {
            let at = if self.reverse { steps - 1 - step } else { step };
            let before = &self.states.data()[step * batch * width..][..batch * width];
            let gates = &self.gates.data()[step * batch * four..][..batch * four];
            let d_recurrent = &mut d_recurrent.data_mut()[step * batch * wide..][..batch * wide];
            d_after.data_mut().copy_from_slice(d_h.data());
            for b in 0..batch {
                let d_x = &mut d_x.data_mut()[(b * steps + at) * wide..][..wide];
                let d_recurrent = &mut d_recurrent[b * wide..][..wide];
                if self.lengths.as_ref().is_some_and(|lengths| at >= lengths[b]) {
                    machine.run(Fill(d_x, T::ZERO));
                    machine.run(Fill(d_recurrent, T::ZERO));
                    continue; // the state passed through unchanged
                }
                let d_after = &mut d_after.data_mut()[b * width..][..width];
                let above = &upstream.data()[(b * steps + at) * width..][..width];
                machine.run(AddAssign(d_after, above));
                machine.run(GruCellGradient {
                    d_after,
                    before: &before[b * width..][..width],
                    gates: &gates[b * four..][..four],
                    d_x,
                    d_recurrent,
                    d_before: &mut d_h.data_mut()[b * width..][..width],
                });
            }
            let weight = Operand::rows(context.parameters.get(self.w), wide, width);
            machine.product(d_h.data_mut(), Operand::rows(d_recurrent, batch, wide), weight, true);
        }
        // All steps at once: (3C, N·B) · (N·B, C).
        let rows = steps * batch;
        if let Some(sum) = context.gradients.sum(self.b) {
            let blocks = d_recurrent.data().chunks(summed_rows(wide) * wide.max(1)).collect();
            machine.add_columns(context.pool, blocks, Some(sum), |rows| rows);
        }
        if let Some(sum) = context.gradients.sum(self.w) {
            let d_recurrent = Operand::rows(d_recurrent.data(), rows, wide);
            let states = Operand::rows(&self.states.data()[..rows * width], rows, width);
            machine.product(sum, d_recurrent.transposed(), states, true);
        }
        context.add(self.x, d_x);
        context.add(self.h, d_h);
    }
}
