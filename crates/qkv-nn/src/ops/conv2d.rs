//! Convolutions over images, computed as a linear map of windows. In inference with packed matrices, windows are
//! gathered on the fly during the product, and bias, activation and residual are fused into its epilogue; otherwise
//! these are separate operations.

use super::windows2d::{Windows2d, image_shape};
use crate::float::Float;
use crate::loops::Activation;
use crate::parameters::Param;
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;
use qkv_simd::finish::Finish;
use qkv_simd::panels::block_len;
use std::ops::Range;

impl<T: Float> Tape<'_, T> {
    /// `activation(conv(x) + b)` with `x [B, H, W, I]`, `W [O, K·L·I]` and `b [O]`: `[B, rows, columns, O]`.
    ///
    /// # Panics
    /// If the shapes do not match, or a window is empty.
    pub fn convolution(
        &mut self,
        x: &Var<T>,
        windows: Windows2d,
        (w, b): (Param, Option<Param>),
        activation: Activation,
    ) -> Var<T> {
        // 1×1 windows with stride 1 are the image itself.
        if windows == Windows2d::square(1, 1, 0) {
            return self.linear(x, w, b, activation, 0.0);
        }
        let finish = self.finish(w, b, activation, 0.0);
        if let Some(y) = finish.and_then(|finish| self.gathered(x, windows, w, finish)) {
            return self.constant(y);
        }
        let windows = self.unfold2d(x, windows);
        self.linear(&windows, w, b, activation, 0.0)
    }

    /// The end of a residual block: `max(conv(x) + b + residual, 0)`, with a residual `[B, rows, columns, O]`.
    ///
    /// # Panics
    /// As [`convolution`](Tape::convolution).
    pub fn convolution_residual(
        &mut self,
        x: &Var<T>,
        windows: Windows2d,
        (w, b): (Param, Option<Param>),
        residual: &Var<T>,
    ) -> Var<T> {
        if let Some(finish) = self.finish(w, b, Activation::None, 0.0) {
            let finish = Finish { residual: Some(residual.value.data()), relu_of_sum: true, ..finish };
            if let Some(y) = self.gathered(x, windows, w, finish) {
                assert_eq!(residual.shape(), y.shape(), "the residual of `{}`", self.parameters.name(w));
                return self.constant(y);
            }
        }
        let y = self.convolution(x, windows, (w, b), Activation::None);
        let sum = self.add(residual, y);
        self.relu(sum)
    }

    /// The product with a packed matrix in inference, with its finish applied; `None` if products are not in full
    /// precision, or the matrix is not packed.
    fn gathered(&self, x: &Var<T>, windows: Windows2d, w: Param, finish: Finish<'_, T>) -> Option<Tensor<T>> {
        if !self.machine.is_exact() || self.machine.is_int8() {
            return None;
        }
        let matrix = self.parameters.packed(w)?;
        let [batch, height, width, channels] = image_shape(x);
        let [rows, columns] = windows.count([height, width]);
        let inner = windows.kernel[0] * windows.kernel[1] * channels;
        assert_eq!(inner, matrix.width(), "the windows and the width of `{}`", self.parameters.name(w));
        let (machine, data, all) = (self.machine, x.value.data(), batch * rows * columns);
        let mut y = Tensor::unwritten(self.pool, &[batch, rows, columns, matrix.rows()]);
        let output = (matrix, y.data_mut(), finish);
        let done = if windows == Windows2d::square(1, 1, 0) {
            T::packed_products(machine.isa(), machine.team(), data, &mut [output])
        } else {
            let mut block = Tensor::unwritten(self.pool, &[block_len(all, inner)]);
            let gather = |range: Range<usize>, to: &mut [T]| {
                windows.gather(data, [height, width, channels], range.start, to);
            };
            T::gathered_products(machine.isa(), machine.team(), all, &gather, block.data_mut(), output)
        };
        done.then_some(y)
    }
}
