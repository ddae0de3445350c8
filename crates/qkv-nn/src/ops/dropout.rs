//! Dropout (Srivastava et al. 2014), alone and fused with a residual sum. The mask is drawn by Philox, and again in the
//! backward pass instead of being saved.

use crate::float::Float;
use crate::machine::Machine;
use crate::tape::{Backward, BackwardContext, Tape, Var};
use crate::tensor::Tensor;
use qkv_cuda::operations::DropoutKey;
use qkv_simd::pass::Pass;
use qkv_simd::{Isa, philox};

/// Which elements of a tensor are dropped: a function of the stream, the row and the column.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DropoutMask {
    threshold: u32,
    stream: u64,
}

impl DropoutMask {
    /// A new mask; `None` where nothing is dropped.
    pub fn new<T: Float>(tape: &mut Tape<'_, T>, p: f64) -> Option<DropoutMask> {
        let threshold = (p * 65536.0).round().clamp(0.0, 65535.0) as u32;
        (tape.has_noise() && threshold > 0).then(|| DropoutMask { threshold, stream: tape.stream() })
    }

    /// The factor of the elements that remain, `1 / (1 − p)`.
    pub fn scale<T: Float>(self) -> T {
        T::of_f64(65536.0 / (65536.0 - f64::from(self.threshold)))
    }

    /// The same mask for a device.
    pub fn key(self) -> DropoutKey {
        DropoutKey { stream: self.stream, threshold: self.threshold }
    }

    /// The mask of a row: bits are set where elements remain.
    #[inline]
    pub fn bits(self, isa: Isa, row: usize, words: &mut [u64]) {
        philox::keep(isa, self.stream, [0, row >> 32, row], 0, self.threshold, words);
    }

    /// Applies the mask to `rows` in place; the first is row `from` of its tensor.
    fn apply<T: Float>(self, machine: &Machine, rows: &mut [T], width: usize, from: usize) {
        let mut words = vec![0; width.div_ceil(64)];
        for (r, row) in rows.chunks_exact_mut(width).enumerate() {
            self.bits(machine.isa(), from + r, &mut words);
            machine.run(ApplyDropout { row, words: &words, scale: self.scale() });
        }
    }
}

/// Elements whose bit is set times `scale`, zero elsewhere.
pub struct ApplyDropout<'a, T> {
    row: &'a mut [T],
    words: &'a [u64],
    scale: T,
}

impl<T: Float> Pass for ApplyDropout<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (part, &word) in self.row.chunks_mut(64).zip(self.words) {
            for (j, x) in part.iter_mut().enumerate() {
                let scale = if word >> j & 1 == 1 { self.scale } else { T::ZERO };
                *x = if scale == T::ZERO { T::ZERO } else { *x * scale };
            }
        }
    }
}

/// Applies the mask to a tensor, in place where its memory is not shared.
pub(crate) fn apply_dropout<T: Float>(machine: &Machine, mut tensor: Tensor<T>, dropout: DropoutMask) -> Tensor<T> {
    let (rows, width) = (tensor.rows(), tensor.width());
    if let Some(operations) = machine.cuda() {
        let array = tensor.array_mut(operations);
        operations.residual(&array, None, [rows, width], Some(&dropout.key()));
        return tensor;
    }
    let each = machine.rows_each(rows, width);
    let parts = tensor.data_mut().chunks_mut(each * width.max(1)).collect();
    machine.each(parts, |at, part: &mut [T]| dropout.apply(machine, part, width, at * each));
    tensor
}

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
    /// Zeroes each element with probability `p` and scales the others by `1 / (1 − p)`, in training.
    pub fn dropout(&mut self, x: Var<T>, p: f64) -> Var<T> {
        let Some(dropout) = DropoutMask::new(self, p) else { return x };
        let slot = x.slot;
        let value = apply_dropout(self.machine, x.value, dropout);
        self.record(value, self.depends(&[slot], &[]), || DropoutBackward { x: slot, dropout })
    }

    /// `x + dropout(y)`.
    ///
    /// # Panics
    /// Where the shapes differ.
    pub fn residual(&mut self, x: &Var<T>, y: Var<T>, p: f64) -> Var<T> {
        assert_eq!(x.shape(), y.shape(), "a sum of two shapes");
        let dropout = DropoutMask::new(self, p);
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
        super::add_assign(self.machine, value.data_mut(), x.value.data());
        self.record(value, self.depends(&[backward.x, backward.y], &[]), || backward)
    }

    /// `x + y`.
    ///
    /// # Panics
    /// Where the shapes differ.
    pub fn add(&mut self, x: &Var<T>, y: Var<T>) -> Var<T> {
        self.residual(x, y, 0.0)
    }
}
