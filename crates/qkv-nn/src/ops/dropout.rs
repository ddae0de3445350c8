//! Dropout (Srivastava et al. 2014), alone and fused with a residual addition.

use crate::dropout_mask::{DropoutMask, apply_dropout};
use crate::float::Float;
use crate::tape::{Backward, BackwardContext, Tape, Var};
use crate::tensor::Tensor;

struct DropoutBackward {
    x: Option<usize>,
    dropout: DropoutMask,
}

impl<T: Float> Backward<T> for DropoutBackward {
    fn backward(self: Box<Self>, upstream: Tensor<T>, context: &mut BackwardContext<'_, T>) {
        context.add(self.x, apply_dropout(context.machine, upstream, self.dropout));
    }
}

struct ResidualBackward {
    x: Option<usize>,
    y: Option<usize>,
    dropout: Option<DropoutMask>,
}

impl<T: Float> Backward<T> for ResidualBackward {
    fn backward(self: Box<Self>, upstream: Tensor<T>, context: &mut BackwardContext<'_, T>) {
        let y = upstream.clone();
        context.add(self.x, upstream);
        context
            .add(self.y, if let Some(dropout) = self.dropout { apply_dropout(context.machine, y, dropout) } else { y });
    }
}

impl<T: Float> Tape<'_, T> {
    /// The mask of a new dropout; `None` if nothing is dropped.
    pub(super) fn dropout_mask(&mut self, p: f64) -> Option<DropoutMask> {
        if self.has_noise() { DropoutMask::new(p, || self.stream() ^ self.salt()) } else { None }
    }

    /// On a tape with noise, zeroes each element with probability `p` and scales the others by `1 / (1 − p)`.
    pub fn dropout(&mut self, x: Var<T>, p: f64) -> Var<T> {
        let Some(dropout) = self.dropout_mask(p) else { return x };
        let slot = x.slot;
        let value = apply_dropout(self.machine, x.value, dropout);
        self.record(value, self.depends(&[slot], &[]), || DropoutBackward { x: slot, dropout })
    }

    /// `x + dropout(y)`.
    ///
    /// # Panics
    /// If the shapes differ.
    pub fn residual(&mut self, x: &Var<T>, y: Var<T>, p: f64) -> Var<T> {
        assert_eq!(x.shape(), y.shape(), "a sum of two shapes");
        let dropout = self.dropout_mask(p);
        let backward = ResidualBackward { x: x.slot, y: y.slot, dropout };
        let mut value = y.value;
        if let Some(operations) = self.machine.cuda() {
            let sizes = [value.rows(), value.width()];
            let dropout = dropout.map(DropoutMask::key);
            let array = value.array_mut(operations);
            operations.residual(&array, Some(&x.value.array(operations)), sizes, dropout.as_ref());
            return self.record(value, self.depends(&[backward.x, backward.y], &[]), || backward);
        }
        if let Some(dropout) = dropout {
            value = apply_dropout(self.machine, value, dropout);
        }
        self.machine.add_assign(value.data_mut(), x.value.data());
        self.record(value, self.depends(&[backward.x, backward.y], &[]), || backward)
    }

    /// `x + y`.
    ///
    /// # Panics
    /// If the shapes differ.
    pub fn add(&mut self, x: &Var<T>, y: Var<T>) -> Var<T> {
        self.residual(x, y, 0.0)
    }
}
