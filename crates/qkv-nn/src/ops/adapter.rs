//! The product of a low-rank adapter, added to that of its matrix by [`Tape::linear`].

use crate::adapter::Adapter;
use crate::dropout_mask::{DropoutMask, apply_dropout};
use crate::float::Float;
use crate::loops::Scale;
use crate::parameters::Param;
use crate::tape::{BackwardContext, Tape, Var};
use crate::tensor::Tensor;
use qkv_cuda::operations::{Factor, Operations};
use qkv_simd::matmul::Operand;

/// What the backward pass of an adapter needs.
pub(crate) struct AdapterCall<T: Float> {
    adapter: Adapter,
    /// `scale · dropout(x) Aᵀ`, `[R, r]`.
    inner: Tensor<T>,
    dropout: Option<DropoutMask>,
}

impl<T: Float> Tape<'_, T> {
    /// `y += scale · dropout(x) Aᵀ Bᵀ` for `x [R, I]` and `y [R, O]`.
    pub(crate) fn add_adapter(&mut self, y: &mut Tensor<T>, x: &Var<T>, adapter: Adapter) -> AdapterCall<T> {
        let (rows, width) = (x.value.rows(), x.value.width());
        let (rank, out) = (self.parameters.shape(adapter.a)[0], y.width());
        let dropout = self.dropout_mask(adapter.dropout);
        let input = dropped(self.machine, &x.value, dropout);
        if let Some(operations) = self.machine.cuda() {
            let mut inner = Tensor::activations(operations, &[rows, rank]);
            let [a, b] = [adapter.a, adapter.b].map(|param| self.parameters.rounded_array(param, operations));
            let scaled = inner.array_mut(operations);
            operations.linear(&scaled, &input.array(operations), (&a).into(), [None; 2], [rows, rank, width]);
            operations.scale(&scaled, adapter.scale as f32);
            let y = y.array_mut(operations);
            operations.product(&y, Factor::new(&scaled), Factor::transposed(&b), [rows, out, rank], true);
            return AdapterCall { adapter, inner, dropout };
        }
        let mut inner = Tensor::unwritten(self.pool, &[rows, rank]); // (R, r)
        let a = Operand::rows(self.parameters.get(adapter.a), rank, width).transposed();
        self.machine.product(inner.data_mut(), Operand::rows(input.data(), rows, width), a, false);
        let scale = T::of_f64(adapter.scale);
        self.machine.run(Scale(inner.data_mut(), scale));
        let b = Operand::rows(self.parameters.get(adapter.b), out, rank).transposed();
        self.machine.product(y.data_mut(), Operand::rows(inner.data(), rows, rank), b, true);
        AdapterCall { adapter, inner, dropout }
    }
}

impl<T: Float> AdapterCall<T> {
    /// Its matrices.
    pub fn parameters(&self) -> [Param; 2] {
        [self.adapter.a, self.adapter.b]
    }

    /// Adds to the gradients of both matrices, and to that of the input if there is one.
    pub fn backward(
        &self,
        input: &Tensor<T>,
        d_y: &Tensor<T>,
        d_x: Option<&mut Tensor<T>>,
        context: &mut BackwardContext<'_, T>,
    ) {
        let machine = context.machine;
        if let Some(operations) = machine.cuda() {
            return self.backward_on_cuda(operations, input, d_y, d_x, context);
        }
        let (rows, width, rank) = (input.rows(), input.width(), self.inner.width());
        let out = context.parameters.shape(self.adapter.b)[0];
        let upstream = Operand::rows(d_y.data(), rows, out);
        if let Some(sum) = context.gradients.sum(self.adapter.b) {
            machine.product(sum, upstream.transposed(), Operand::rows(self.inner.data(), rows, rank), true); // (O, r)
        }
        let mut d_inner = Tensor::unwritten(context.pool, &[rows, rank]);
        let b = Operand::rows(context.parameters.get(self.adapter.b), out, rank);
        machine.product(d_inner.data_mut(), upstream, b, false); // (R, r)
        let scale = T::of_f64(self.adapter.scale);
        machine.run(Scale(d_inner.data_mut(), scale));
        let d_inner = Operand::rows(d_inner.data(), rows, rank);
        if let Some(sum) = context.gradients.sum(self.adapter.a) {
            let input = dropped(machine, input, self.dropout);
            machine.product(sum, d_inner.transposed(), Operand::rows(input.data(), rows, width), true); // (r, I)
        }
        let Some(d_x) = d_x else { return };
        let a = Operand::rows(context.parameters.get(self.adapter.a), rank, width);
        if self.dropout.is_none() {
            return machine.product(d_x.data_mut(), d_inner, a, true); // (R, I)
        }
        let mut through = Tensor::unwritten(context.pool, input.shape());
        machine.product(through.data_mut(), d_inner, a, false);
        let through = dropped(machine, &through, self.dropout);
        machine.add_assign(d_x.data_mut(), through.data());
    }
}

impl<T: Float> AdapterCall<T> {
    fn backward_on_cuda(
        &self,
        operations: &Operations,
        input: &Tensor<T>,
        d_y: &Tensor<T>,
        d_x: Option<&mut Tensor<T>>,
        context: &mut BackwardContext<'_, T>,
    ) {
        let (rows, width, rank) = (input.rows(), input.width(), self.inner.width());
        let out = context.parameters.shape(self.adapter.b)[0];
        let [a, b] = [self.adapter.a, self.adapter.b].map(|param| context.parameters.rounded_array(param, operations));
        let (upstream, inner) = (d_y.array(operations), self.inner.array(operations));
        if let Some(sum) = context.gradients.array(self.adapter.b, operations) {
            let (left, right) = (Factor::transposed(&upstream), Factor::new(&inner));
            operations.product(&sum, left, right, [out, rank, rows], true); // (O, r)
        }
        let d_inner = operations.activations(rows * rank);
        operations.product(&d_inner, Factor::new(&upstream), Factor::new(&b), [rows, rank, out], false);
        operations.scale(&d_inner, self.adapter.scale as f32);
        if let Some(sum) = context.gradients.array(self.adapter.a, operations) {
            let input = dropped(context.machine, input, self.dropout).array(operations);
            let (left, right) = (Factor::transposed(&d_inner), Factor::new(&input));
            operations.product(&sum, left, right, [rank, width, rows], true); // (r, I)
        }
        let Some(d_x) = d_x else { return };
        let mut through = Tensor::<T>::activations(operations, input.shape());
        let array = through.array_mut(operations);
        operations.product(&array, Factor::new(&d_inner), Factor::new(&a), [rows, width, rank], false);
        let through = dropped(context.machine, &through, self.dropout);
        operations.add(&d_x.array_mut(operations), &through.array(operations));
    }
}

/// `x [R, I]` after dropout, or `x` itself without dropout.
fn dropped<T: Float>(machine: &crate::machine::Machine, x: &Tensor<T>, dropout: Option<DropoutMask>) -> Tensor<T> {
    match dropout {
        Some(dropout) => apply_dropout(machine, x.clone(), dropout),
        None => x.clone(),
    }
}
