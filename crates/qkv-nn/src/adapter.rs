//! Low-rank adapters (LoRA; Hu et al. 2021, arXiv:2106.09685): a frozen matrix `W [O, I]` acts as `W + scale · B A`
//! with trained `A [r, I]` and `B [O, r]`. [`Tape::linear`](crate::Tape::linear) adds the product of every adapted
//! matrix, so that no layer has to know of adapters. Which matrices get one, and files, are left to the models.

use crate::float::Float;
use crate::ops::dropout::{DropoutMask, apply_dropout};
use crate::parameters::{Init, Param, Parameters};
use crate::tape::{BackwardContext, Tape, Var};
use crate::tensor::Tensor;
use qkv_cuda::operations::{Factor, Operations};
use qkv_simd::matmul::Operand;

/// The adapter of a matrix.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adapter {
    /// `[r, I]`.
    pub a: Param,
    /// `[O, r]`.
    pub b: Param,
    /// Factor of the product: `alpha / r` in most settings.
    pub scale: f64,
    /// Dropout of the adapter's input.
    pub dropout: f64,
}

/// Ends of the names of an adapter's matrices, as PEFT has them.
const ENDS: [&str; 2] = [".lora_A.weight", ".lora_B.weight"];

impl<T: Float> Parameters<T> {
    /// Adds an adapter to a matrix and freezes the matrix. `A` is drawn uniformly within `±1/√I`, as PEFT draws it, and
    /// `B` is zero, so that the model computes what it did before.
    ///
    /// ```
    /// use qkv_nn::{Init, Parameters};
    /// let mut parameters = Parameters::<f32>::new();
    /// let w = parameters.add("q_proj.weight", &[3, 2], Init::Xavier, 1);
    /// let adapter = parameters.adapt(w, 1, 2.0, 0.0, 1);
    /// assert_eq!((parameters.name(adapter.b), parameters.shape(adapter.b)), ("q_proj.lora_B.weight", &[3, 1][..]));
    /// assert!(parameters.is_trained(adapter.a) && !parameters.is_trained(w));
    /// let before = parameters.get(w).to_vec();
    /// parameters.merge(w);
    /// assert_eq!((parameters.get(w), parameters.adapter(w)), (&before[..], None)); // B is still zero
    /// ```
    ///
    /// # Panics
    /// Where it is no matrix, or has an adapter.
    pub fn adapt(&mut self, param: Param, rank: usize, scale: f64, dropout: f64, seed: u64) -> Adapter {
        let &[out, inner] = self.shape(param) else { panic!("`{}` is no matrix", self.name(param)) };
        let stem = self.name(param).strip_suffix(".weight").unwrap_or(self.name(param)).to_owned();
        let init = Init::Uniform((inner.max(1) as f64).powf(-0.5));
        let a = self.add(&format!("{stem}{}", ENDS[0]), &[rank, inner], init, seed);
        let b = self.add(&format!("{stem}{}", ENDS[1]), &[out, rank], Init::Zeros, seed);
        let adapter = Adapter { a, b, scale, dropout };
        self.set_adapter(param, Some(adapter));
        self.freeze(param);
        adapter
    }

    /// Adds the product of a matrix's adapter to the matrix, which then has none. The adapter's own matrices stay among
    /// the parameters, unused and frozen.
    pub fn merge(&mut self, param: Param) {
        let Some(Adapter { a, b, scale, .. }) = self.adapter(param) else { return };
        let (left, right) = (self.get(b).to_vec(), self.get(a).to_vec());
        let (rank, inner) = (self.shape(a)[0], self.shape(a)[1]);
        for (row, left) in self.get_mut(param).chunks_exact_mut(inner.max(1)).zip(left.chunks_exact(rank.max(1))) {
            let mut sum = vec![0.0; inner];
            for (&x, right) in left.iter().zip(right.chunks_exact(inner.max(1))) {
                sum.iter_mut().zip(right).for_each(|(sum, y)| *sum += x.to_f64() * y.to_f64());
            }
            row.iter_mut().zip(&sum).for_each(|(to, sum)| *to = T::of_f64(to.to_f64() + scale * sum));
        }
        self.set_adapter(param, None);
        self.freeze(a);
        self.freeze(b);
    }

    /// The matrices that have adapters, in order.
    pub fn adapted(&self) -> Vec<Param> {
        self.all().filter(|&param| self.adapter(param).is_some()).collect()
    }

    /// Whether a parameter is a matrix of an adapter, by its name.
    pub fn is_of_adapter(&self, param: Param) -> bool {
        ENDS.iter().any(|end| self.name(param).ends_with(end))
    }
}

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
        let dropout = DropoutMask::new(self, adapter.dropout);
        let input = dropped(self.machine, &x.value, dropout);
        if let Some(operations) = self.machine.cuda() {
            let mut inner = Tensor::activations(operations, &[rows, rank]);
            let [a, b] = [adapter.a, adapter.b].map(|param| self.parameters.rounded_array(param, operations));
            let scaled = inner.array_mut(operations);
            operations.linear(&scaled, &input.array(operations), &a, None, [rows, rank, width]);
            operations.scale(&scaled, adapter.scale as f32);
            let y = y.array_mut(operations);
            operations.product(&y, Factor::new(&scaled), Factor::transposed(&b), [rows, out, rank], true);
            return AdapterCall { adapter, inner, dropout };
        }
        let mut inner = Tensor::unwritten(self.pool, &[rows, rank]); // (R, r)
        let a = Operand::rows(self.parameters.get(adapter.a), rank, width).transposed();
        self.machine.product(inner.data_mut(), Operand::rows(input.data(), rows, width), a, false);
        let scale = T::of_f64(adapter.scale);
        inner.data_mut().iter_mut().for_each(|x| *x *= scale);
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

    /// Adds to the gradients of both matrices, and to that of the input where it has one.
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
        d_inner.data_mut().iter_mut().for_each(|x| *x *= scale);
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
        crate::ops::add_assign(machine, d_x.data_mut(), through.data());
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

/// `x [R, I]` after dropout; itself without.
fn dropped<T: Float>(machine: &crate::machine::Machine, x: &Tensor<T>, dropout: Option<DropoutMask>) -> Tensor<T> {
    match dropout {
        Some(dropout) => apply_dropout(machine, x.clone(), dropout),
        None => x.clone(),
    }
}
