//! Windows over sequences, unfolded into rows: a convolution is a linear map of these rows.

use crate::float::Float;
use crate::loops::AddAssign;
use crate::tape::{Backward, BackwardContext, Tape, Var};
use crate::tensor::Tensor;
use qkv_cuda::operations::ImageWindows;

/// The windows of a convolution over a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Windows {
    /// Tokens per window, `K`.
    pub kernel: usize,
    /// Tokens from one window to the next.
    pub stride: usize,
    /// Zero tokens before the first token and after the last.
    pub padding: usize,
}

impl Windows {
    /// Number of windows over `length` tokens.
    pub fn count(self, length: usize) -> usize {
        (length + 2 * self.padding).checked_sub(self.kernel).map_or(0, |rest| rest / self.stride + 1)
    }

    /// The tokens covered by window `at`, and the place of the first of them in the window.
    fn tokens(self, at: usize, length: usize) -> (std::ops::Range<usize>, usize) {
        let start = at * self.stride;
        let first = start.saturating_sub(self.padding).min(length);
        let end = (start + self.kernel).saturating_sub(self.padding).clamp(first, length);
        (first..end, self.padding.saturating_sub(start))
    }

    /// The windows over sequences of `length` tokens for a device: images of one row.
    fn on_device(self, length: usize) -> ImageWindows {
        let row = |first: usize, second: usize| [first as u32, second as u32];
        ImageWindows {
            kernel: row(1, self.kernel),
            stride: row(1, self.stride),
            before: row(0, self.padding),
            windows: row(1, self.count(length)),
            size: row(1, length),
        }
    }
}

struct UnfoldBackward {
    x: Option<usize>,
    shape: [usize; 3],
    windows: Windows,
}

impl<T: Float> Backward<T> for UnfoldBackward {
    fn backward(self: Box<Self>, upstream: Tensor<T>, context: &mut BackwardContext<'_, T>) {
        let [_, length, width] = self.shape;
        let (windows, machine) = (self.windows, context.machine);
        if let Some(operations) = machine.cuda() {
            let Some((d_x, add)) = context.sum_array(self.x, &self.shape, operations) else { return };
            let (d_y, windows) = (upstream.array(operations), windows.on_device(length));
            return operations.unfold2d_gradient(&d_y, &d_x, add, windows, [self.shape[0], width]);
        }
        let count = windows.count(length);
        let Some(d_x) = context.sum(self.x, &self.shape) else { return };
        let each = (count * windows.kernel * width).max(1);
        let parts = d_x.chunks_mut((length * width).max(1)).zip(upstream.data().chunks(each)).collect();
        machine.each(parts, |_, (d_x, upstream): (&mut [T], &[T])| {
            for (at, row) in upstream.chunks_exact(windows.kernel * width).enumerate() {
                let (tokens, place) = windows.tokens(at, length);
                let sums = &mut d_x[tokens.start * width..tokens.end * width];
                machine.run(AddAssign(sums, &row[place * width..]));
            }
        });
    }
}

impl<T: Float> Tape<'_, T> {
    /// The windows of `x [B, N, C]`, with the tokens of each window side by side: `[B, count, K·C]`.
    ///
    /// # Panics
    /// If `x` has another number of axes, or a window is empty.
    pub fn unfold(&mut self, x: &Var<T>, windows: Windows) -> Var<T> {
        let &[batch, length, width] = x.shape() else { panic!("sequences have three axes, not {:?}", x.shape()) };
        assert!(windows.kernel > 0 && windows.stride > 0, "{windows:?}");
        let (count, row) = (windows.count(length), windows.kernel * width);
        let (slot, shape) = (x.slot, [batch, length, width]);
        if let Some(operations) = self.machine.cuda() {
            let y = Tensor::activations(operations, &[batch, count, row]);
            let arrays = [&x.value, &y].map(|tensor| tensor.array(operations));
            operations.unfold2d(&arrays[0], &arrays[1], windows.on_device(length), [batch, width]);
            return self.record(y, self.depends(&[slot], &[]), || UnfoldBackward { x: slot, shape, windows });
        }
        let mut y = Tensor::zeros(self.pool, &[batch, count, row]);
        let rows = self.machine.rows_each(count, row);
        let sequences = x.value.data().chunks((length * width).max(1));
        let parts = y.data_mut().chunks_mut((count * row).max(1)).zip(sequences);
        let parts = parts
            .flat_map(|(y, x)| y.chunks_mut((rows * row).max(1)).enumerate().map(move |(part, y)| (part * rows, y, x)));
        self.machine.each(parts.collect(), |_, (first, y, x): (usize, &mut [T], &[T])| {
            for (at, y) in y.chunks_exact_mut(row).enumerate() {
                let (tokens, place) = windows.tokens(first + at, length);
                let x = &x[tokens.start * width..tokens.end * width];
                y[place * width..][..x.len()].copy_from_slice(x);
            }
        });
        self.record(y, self.depends(&[slot], &[]), || UnfoldBackward { x: slot, shape, windows })
    }
}
