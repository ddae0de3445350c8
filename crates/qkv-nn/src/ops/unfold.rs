//! Windows over sequences, side by side in rows: a convolution is a linear map of them.

use crate::float::Float;
use crate::tape::{Backward, BackwardContext, Tape, Var};
use crate::tensor::Tensor;
use qkv_cuda::operations::Kind;

/// The windows of a convolution over a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Windows {
    /// Tokens of a window, `K`.
    pub kernel: usize,
    /// Tokens from one window to the next.
    pub stride: usize,
    /// Zero tokens before the first token and behind the last.
    pub padding: usize,
}

impl Windows {
    /// Number of windows over `length` tokens.
    pub fn count(self, length: usize) -> usize {
        (length + 2 * self.padding).checked_sub(self.kernel).map_or(0, |rest| rest / self.stride + 1)
    }

    /// The tokens that window `at` sees, and the place of the first of them in the window.
    fn tokens(self, at: usize, length: usize) -> (std::ops::Range<usize>, usize) {
        let start = at * self.stride;
        let first = start.saturating_sub(self.padding).min(length);
        let end = (start + self.kernel).saturating_sub(self.padding).clamp(first, length);
        (first..end, self.padding.saturating_sub(start))
    }

    /// The token at each place of each window of `batch` sequences; `None` for padding.
    fn places(self, batch: usize, length: usize) -> impl Iterator<Item = Option<u32>> + Clone {
        let place = move |(b, at, k): (usize, usize, usize)| {
            let token = (at * self.stride + k).checked_sub(self.padding).filter(|&token| token < length)?;
            Some((b * length + token) as u32)
        };
        let (count, kernel) = (self.count(length), self.kernel);
        let all = move |b| (0..count).flat_map(move |at| (0..kernel).map(move |k| (b, at, k)));
        (0..batch).flat_map(all).map(place)
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
            let Some(d_x) = context.sum_or_zeros(self.x, &self.shape, operations) else { return };
            let by = operations.row_sums(windows.places(self.shape[0], length));
            return operations.scatter(&upstream.array(operations), &by, &d_x, width, 1.0);
        }
        let count = windows.count(length);
        let Some(d_x) = context.sum(self.x, &self.shape) else { return };
        let each = (count * windows.kernel * width).max(1);
        let parts = d_x.chunks_mut((length * width).max(1)).zip(upstream.data().chunks(each)).collect();
        machine.each(parts, |_, (d_x, upstream): (&mut [T], &[T])| {
            for (at, row) in upstream.chunks_exact(windows.kernel * width).enumerate() {
                let (tokens, place) = windows.tokens(at, length);
                let sums = &mut d_x[tokens.start * width..tokens.end * width];
                sums.iter_mut().zip(&row[place * width..]).for_each(|(sum, &g)| *sum += g);
            }
        });
    }
}

impl<T: Float> Tape<'_, T> {
    /// The windows of `x [B, N, C]`, the tokens of each side by side: `[B, count, K·C]`.
    ///
    /// # Panics
    /// Where `x` has another number of axes, or a window is empty.
    pub fn unfold(&mut self, x: &Var<T>, windows: Windows) -> Var<T> {
        let &[batch, length, width] = x.shape() else { panic!("sequences have three axes, not {:?}", x.shape()) };
        assert!(windows.kernel > 0 && windows.stride > 0, "{windows:?}");
        let (count, row) = (windows.count(length), windows.kernel * width);
        let (slot, shape) = (x.slot, [batch, length, width]);
        if let Some(operations) = self.machine.cuda() {
            let y = Tensor::activations(operations, &[batch, count, row]);
            let places: Vec<u32> = windows.places(batch, length).map(|place| place.unwrap_or(u32::MAX)).collect();
            let places = operations.upload(Kind::U32, &places, "windows");
            operations.gather(&x.value.array(operations), &places, &y.array(operations), width);
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
