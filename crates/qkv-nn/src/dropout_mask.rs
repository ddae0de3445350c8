//! The mask of a dropout. It is drawn by Philox, and drawn again in the backward pass instead of being saved.

use crate::float::Float;
use crate::loops::ApplyDropout;
use crate::machine::Machine;
use crate::tensor::Tensor;
use qkv_cuda::operations::DropoutKey;
use qkv_simd::{Isa, philox};

/// Selects the elements of a tensor that are dropped, as a function of the stream, the row and the column.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DropoutMask {
    threshold: u32,
    stream: u64,
}

impl DropoutMask {
    /// Drops elements with probability `p`; `None`, without drawing a stream, if that is 0.
    pub fn new(p: f64, stream: impl FnOnce() -> u64) -> Option<DropoutMask> {
        let threshold = (p * 65536.0).round().clamp(0.0, 65535.0) as u32;
        (threshold > 0).then(|| DropoutMask { threshold, stream: stream() })
    }

    /// The factor of the elements that remain, `1 / (1 − p)`.
    pub fn scale<T: Float>(self) -> T {
        T::of_f64(65536.0 / (65536.0 - f64::from(self.threshold)))
    }

    /// The same mask for a device.
    pub fn key(self) -> DropoutKey {
        DropoutKey { stream: self.stream, threshold: self.threshold }
    }

    /// The mask of a row: set bits mark the elements that remain.
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

/// Applies the mask to a tensor, in place if its memory is not shared.
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
