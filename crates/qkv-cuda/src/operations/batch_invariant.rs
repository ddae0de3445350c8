//! Products of [batch-invariant](Operations::batch_invariant) inference: eight rows at a time, summed in the order of
//! the kernels for few rows, so that the bits of a row do not depend on how many rows there are.

use super::launch::{Argument, count};
use super::layers::ProductSum;
use super::{Array, Factor, Operations};
use Argument::Ptr;

/// Outputs of a block of `many_rows`: eight warps of four.
const BLOCK_OUTPUTS: usize = 32;
/// Rows of a block.
const BLOCK_ROWS: usize = 8;

impl Operations {
    /// `C = x · Wᵀ`, plus what is added to it. Returns `false`, and does nothing, for a product of another form, as in
    /// a backward pass, or if a matrix is not in the type of activations.
    pub(super) fn rows_product(
        &self,
        (c, c_stride): (&Array, usize),
        x: Factor<'_>,
        w: Factor<'_>,
        [rows, outputs, inner]: [usize; 3],
        ProductSum { added, bias, before }: ProductSum<'_>,
    ) -> bool {
        let kind = self.activation_kind();
        let is_forward = !x.transposed && w.transposed && w.stride.is_none_or(|stride| stride == inner);
        if !is_forward || before.is_some() || [c, x.array, w.array].iter().any(|array| array.kind() != kind) {
            return false;
        }
        let x_stride = x.stride.unwrap_or(inner);
        let len = |stride: usize, width: usize| (rows - 1) * stride + width;
        let sum_len = len(c_stride, outputs);
        let pointers = [
            x.array.expect(kind, len(x_stride, inner)),
            w.array.expect(kind, outputs * inner),
            bias.map_or(0, |bias| bias.expect(kind, outputs)),
            c.expect(kind, sum_len),
            added.map_or(0, |added| added.expect(kind, sum_len)),
        ];
        let numbers = [rows, inner, outputs, x_stride, c_stride].map(count);
        let is_aligned = [inner, x_stride].iter().all(|width| width.is_multiple_of(8))
            && pointers[..2].iter().all(|ptr| ptr.is_multiple_of(16));
        let (name, blocks) = match is_aligned {
            true => ("many_rows", outputs.div_ceil(BLOCK_OUTPUTS) * rows.div_ceil(BLOCK_ROWS)),
            false => ("unaligned_rows", self.blocks(rows * outputs)),
        };
        // SAFETY: `many_rows(const T* × 3, T*, const T*, u32, int × 2, u32 × 2)`, and likewise `unaligned_rows`.
        unsafe { self.launch(name, [blocks, 1], &[&pointers.map(Ptr)[..], &numbers].concat()) };
        true
    }
}
