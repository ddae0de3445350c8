//! Concatenation, slicing, stacking and scaling of sequences.

use crate::float::Float;
use crate::tape::{Backward, BackwardContext, Tape, Var};
use crate::tensor::Tensor;

/// Copies columns `from .. from + width` of rows of width `wide`.
fn columns<T: Float>(rows: &[T], wide: usize, from: usize, width: usize, out: &mut [T]) {
    for (row, out) in rows.chunks_exact(wide).zip(out.chunks_exact_mut(width)) {
        out.copy_from_slice(&row[from..from + width]);
    }
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
            let width = shape[shape.len() - 1];
            let mut part = Tensor::unwritten(context.pool, &shape);
            columns(upstream.data(), wide, from, width, part.data_mut());
            context.add(slot, part);
            from += width;
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
        let [_, length, width] = self.shape;
        let Some(d_x) = context.sum(self.x, &self.shape) else { return };
        for (sequence, g) in d_x.chunks_exact_mut(length * width).zip(upstream.data().chunks_exact(width)) {
            let sum = &mut sequence[self.step * width..][..width];
            sum.iter_mut().zip(g).for_each(|(sum, &g)| *sum += g);
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
            let mut part = Tensor::unwritten(context.pool, &[self.batch, 1, self.width]);
            columns(upstream.data(), wide, step * self.width, self.width, part.data_mut());
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
        scale(&mut upstream, &self.factors);
        context.add(self.x, upstream);
    }
}

/// Scales sequence `b` by `factors[b]`.
fn scale<T: Float>(x: &mut Tensor<T>, factors: &[T]) {
    let each = x.len() / factors.len().max(1);
    for (sequence, &factor) in x.data_mut().chunks_exact_mut(each.max(1)).zip(factors) {
        sequence.iter_mut().for_each(|x| *x *= factor);
    }
}

impl<T: Float> Tape<'_, T> {
    /// Concatenates along the last axis: `[.., C₁]`, `[.., C₂]`, … become `[.., C₁ + C₂ + …]`.
    ///
    /// # Panics
    /// Where they have different numbers of rows.
    pub fn concat(&mut self, parts: &[&Var<T>]) -> Var<T> {
        let wide: usize = parts.iter().map(|part| part.value.width()).sum();
        let mut shape = parts[0].shape().to_vec();
        *shape.last_mut().expect("a tensor has a width") = wide;
        let mut y = Tensor::unwritten(self.pool, &shape);
        let mut from = 0;
        for part in parts {
            let width = part.value.width();
            assert_eq!(part.value.rows(), parts[0].value.rows(), "tensors side by side have the same rows");
            for (row, x) in y.data_mut().chunks_exact_mut(wide).zip(part.value.data().chunks_exact(width)) {
                row[from..from + width].copy_from_slice(x);
            }
            from += width;
        }
        let slots: Vec<Option<usize>> = parts.iter().map(|part| part.slot).collect();
        let depends = self.depends(&slots, &[]);
        let parts = parts.iter().map(|part| (part.slot, part.shape().to_vec())).collect();
        self.record(y, depends, || ConcatBackward { parts })
    }

    /// Slices one step of each sequence: `[B, N, C]` becomes `[B, 1, C]`.
    ///
    /// # Panics
    /// Where there is no such step.
    pub fn step(&mut self, x: &Var<T>, step: usize) -> Var<T> {
        let &[batch, length, width] = x.shape() else { panic!("sequences have three axes, not {:?}", x.shape()) };
        assert!(step < length, "step {step} of {length}");
        let mut y = Tensor::unwritten(self.pool, &[batch, 1, width]);
        columns(x.value.data(), length * width, step * width, width, y.data_mut());
        let slot = x.slot;
        self.record(y, self.depends(&[slot], &[]), || StepBackward { x: slot, shape: [batch, length, width], step })
    }

    /// Stacks steps into sequences: `N` tensors `[B, 1, C]` become `[B, N, C]`.
    ///
    /// # Panics
    /// Where their shapes differ.
    pub fn stack(&mut self, steps: &[Var<T>]) -> Var<T> {
        let &[batch, 1, width] = steps[0].shape() else { panic!("a step has one token, not {:?}", steps[0].shape()) };
        let length = steps.len();
        let mut y = Tensor::unwritten(self.pool, &[batch, length, width]);
        for (at, step) in steps.iter().enumerate() {
            assert_eq!(step.shape(), steps[0].shape(), "steps of one shape");
            for (sequence, x) in
                y.data_mut().chunks_exact_mut(length * width).zip(step.value.data().chunks_exact(width))
            {
                sequence[at * width..][..width].copy_from_slice(x);
            }
        }
        let steps: Vec<Option<usize>> = steps.iter().map(|step| step.slot).collect();
        self.record(y, self.depends(&steps, &[]), || StackBackward { steps, batch, width })
    }

    /// Scales sequence `b` by the constant `factors[b]`.
    ///
    /// # Panics
    /// Where there are not as many factors as sequences.
    pub fn scale(&mut self, x: Var<T>, factors: &[T]) -> Var<T> {
        assert_eq!(x.shape()[0], factors.len(), "a factor for each sequence");
        let (slot, mut value) = (x.slot, x.value);
        scale(&mut value, factors);
        self.record(value, self.depends(&[slot], &[]), || ScaleBackward { x: slot, factors: factors.to_vec() })
    }
}
