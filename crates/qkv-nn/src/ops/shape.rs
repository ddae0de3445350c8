//! Concatenation, slicing, stacking and scaling of sequences.

use crate::float::Float;
use crate::loops::{AddAssign, Scale};
use crate::machine::Machine;
use crate::pool::Pool;
use crate::tape::{Backward, BackwardContext, Tape, Var};
use crate::tensor::Tensor;
use qkv_cuda::operations::Kind;

/// Columns `from .. from + width` of rows of width `wide`, copied into a tensor.
fn columns<T: Float>(
    (pool, machine): (&Pool<T>, &Machine),
    rows: &Tensor<T>,
    wide: usize,
    from: usize,
    shape: &[usize],
) -> Tensor<T> {
    let width = shape.iter().product::<usize>() / (rows.len() / wide.max(1)).max(1);
    if let Some(operations) = machine.cuda() {
        let part = Tensor::activations(operations, shape);
        let sizes = [rows.len() / wide.max(1), width];
        operations.copy_columns(
            (&rows.array(operations), wide, from),
            (&part.array(operations), width, 0),
            sizes,
            false,
        );
        return part;
    }
    let mut part = Tensor::unwritten(pool, shape);
    for (row, out) in rows.data().chunks_exact(wide.max(1)).zip(part.data_mut().chunks_exact_mut(width.max(1))) {
        out.copy_from_slice(&row[from..from + width]);
    }
    part
}

/// Concatenates rows side by side: each part is written into its columns.
fn concat_columns<T: Float>(
    (pool, machine): (&Pool<T>, &Machine),
    parts: &[&Tensor<T>],
    rows: usize,
    shape: &[usize],
) -> Tensor<T> {
    let wide = shape.iter().product::<usize>() / rows.max(1);
    let mut from = 0;
    if let Some(operations) = machine.cuda() {
        let y = Tensor::activations(operations, shape);
        for part in parts {
            let width = part.len() / rows.max(1);
            let into = (&y.array(operations), wide, from);
            operations.copy_columns((&part.array(operations), width, 0), into, [rows, width], false);
            from += width;
        }
        return y;
    }
    let mut y = Tensor::unwritten(pool, shape);
    for part in parts {
        let width = part.len() / rows.max(1);
        for (row, x) in y.data_mut().chunks_exact_mut(wide.max(1)).zip(part.data().chunks_exact(width.max(1))) {
            row[from..from + width].copy_from_slice(x);
        }
        from += width;
    }
    y
}

struct ConcatBackward {
    /// Slot and shape of each tensor.
    parts: Vec<(Option<usize>, Vec<usize>)>,
}

impl<T: Float> Backward<T> for ConcatBackward {
    fn backward(self: Box<Self>, upstream: Tensor<T>, context: &mut BackwardContext<'_, T>) {
        let wide = self.parts.iter().map(|(_, shape)| shape[shape.len() - 1]).sum();
        let mut from = 0;
        for (slot, shape) in self.parts {
            let part = columns((context.pool, context.machine), &upstream, wide, from, &shape);
            context.add(slot, part);
            from += shape[shape.len() - 1];
        }
    }
}

struct StepBackward {
    x: Option<usize>,
    shape: [usize; 3],
    step: usize,
}

impl<T: Float> Backward<T> for StepBackward {
    fn backward(self: Box<Self>, upstream: Tensor<T>, context: &mut BackwardContext<'_, T>) {
        let [batch, length, width] = self.shape;
        if let Some(operations) = context.machine.cuda() {
            let Some(d_x) = context.sum_or_zeros(self.x, &self.shape, operations) else { return };
            let into = (&d_x, length * width, self.step * width);
            return operations.copy_columns((&upstream.array(operations), width, 0), into, [batch, width], true);
        }
        let machine = context.machine;
        let Some(d_x) = context.sum(self.x, &self.shape) else { return };
        for (sequence, g) in d_x.chunks_exact_mut(length * width).zip(upstream.data().chunks_exact(width)) {
            let sum = &mut sequence[self.step * width..][..width];
            machine.run(AddAssign(sum, g));
        }
    }
}

struct StackBackward {
    steps: Vec<Option<usize>>,
    batch: usize,
    width: usize,
}

impl<T: Float> Backward<T> for StackBackward {
    fn backward(self: Box<Self>, upstream: Tensor<T>, context: &mut BackwardContext<'_, T>) {
        let wide = self.steps.len() * self.width;
        for (step, slot) in self.steps.into_iter().enumerate() {
            let (at, shape) = (step * self.width, [self.batch, 1, self.width]);
            let part = columns((context.pool, context.machine), &upstream, wide, at, &shape);
            context.add(slot, part);
        }
    }
}

struct ScaleBackward<T> {
    x: Option<usize>,
    factors: Vec<T>,
}

impl<T: Float> Backward<T> for ScaleBackward<T> {
    fn backward(self: Box<Self>, mut upstream: Tensor<T>, context: &mut BackwardContext<'_, T>) {
        scale(context.machine, &mut upstream, &self.factors);
        context.add(self.x, upstream);
    }
}

/// Scales sequence `b` by `factors[b]`.
fn scale<T: Float>(machine: &Machine, x: &mut Tensor<T>, factors: &[T]) {
    if let Some(operations) = machine.cuda() {
        let factors = operations.upload(Kind::F32, &T::to_floats(factors), "factors");
        return operations.scale_sequences(&x.array_mut(operations), &factors);
    }
    let each = x.len() / factors.len().max(1);
    for (sequence, &factor) in x.data_mut().chunks_exact_mut(each.max(1)).zip(factors) {
        machine.run(Scale(sequence, factor));
    }
}

impl<T: Float> Tape<'_, T> {
    /// Concatenates along the last axis: `[.., C₁]`, `[.., C₂]`, … become `[.., C₁ + C₂ + …]`.
    ///
    /// # Panics
    /// If the tensors have different numbers of rows.
    pub fn concat(&mut self, parts: &[&Var<T>]) -> Var<T> {
        let wide: usize = parts.iter().map(|part| part.value.width()).sum();
        let mut shape = parts[0].shape().to_vec();
        *shape.last_mut().expect("a tensor has a width") = wide;
        let rows = parts[0].value.rows();
        assert!(parts.iter().all(|part| part.value.rows() == rows), "tensors side by side have the same rows");
        let values: Vec<&Tensor<T>> = parts.iter().map(|part| &part.value).collect();
        let y = concat_columns((self.pool, self.machine), &values, rows, &shape);
        let slots: Vec<Option<usize>> = parts.iter().map(|part| part.slot).collect();
        let depends = self.depends(&slots, &[]);
        let parts = parts.iter().map(|part| (part.slot, part.shape().to_vec())).collect();
        self.record(y, depends, || ConcatBackward { parts })
    }

    /// Slices one step of each sequence: `[B, N, C]` becomes `[B, 1, C]`.
    ///
    /// # Panics
    /// If the step does not exist.
    pub fn step(&mut self, x: &Var<T>, step: usize) -> Var<T> {
        let &[batch, length, width] = x.shape() else { panic!("sequences have three axes, not {:?}", x.shape()) };
        assert!(step < length, "step {step} of {length}");
        let at = (self.pool, self.machine);
        let y = columns(at, &x.value, length * width, step * width, &[batch, 1, width]);
        let slot = x.slot;
        self.record(y, self.depends(&[slot], &[]), || StepBackward { x: slot, shape: [batch, length, width], step })
    }

    /// Stacks steps into sequences: `N` tensors `[B, 1, C]` become `[B, N, C]`.
    ///
    /// # Panics
    /// If their shapes differ.
    pub fn stack(&mut self, steps: &[Var<T>]) -> Var<T> {
        let &[batch, 1, width] = steps[0].shape() else { panic!("a step has one token, not {:?}", steps[0].shape()) };
        let length = steps.len();
        assert!(steps.iter().all(|step| step.shape() == steps[0].shape()), "steps of one shape");
        let values: Vec<&Tensor<T>> = steps.iter().map(|step| &step.value).collect();
        let y = concat_columns((self.pool, self.machine), &values, batch, &[batch, length, width]);
        let steps: Vec<Option<usize>> = steps.iter().map(|step| step.slot).collect();
        self.record(y, self.depends(&steps, &[]), || StackBackward { steps, batch, width })
    }

    /// Scales sequence `b` by the constant `factors[b]`.
    ///
    /// # Panics
    /// If the number of factors is not that of the sequences.
    pub fn scale(&mut self, x: Var<T>, factors: &[T]) -> Var<T> {
        assert_eq!(x.shape()[0], factors.len(), "a factor for each sequence");
        let (slot, mut value) = (x.slot, x.value);
        scale(self.machine, &mut value, factors);
        self.record(value, self.depends(&[slot], &[]), || ScaleBackward { x: slot, factors: factors.to_vec() })
    }
}
