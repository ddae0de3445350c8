//! What has Hopper's copy engine bring tensors: maps of them, and decoding by it.

use crate::driver::{Kernel, Stream, TensorMap};
use crate::error::{Error, Result};
use crate::hopper::takes;
use crate::job::Job;
use crate::memory::{Dtype, Strided};
use crate::plan::Plan;
use crate::tensors::Tensors;

impl Plan {
    /// Decoding by the copy engine: as many blocks as the card holds at once, each with piece after piece.
    pub(crate) fn decode_by_copies(
        &self,
        kernel: &Kernel,
        tensors: &Tensors,
        pieces: usize,
        job: &Job,
        stream: Stream,
    ) -> Result<()> {
        if !takes(&tensors.k) || !takes(&tensors.v) {
            return Err(Error::memory(
                "k, v",
                "have strides that the plan was not made for: the copy engine cannot take them",
            ));
        }
        let maps = [self.tensor_map(&tensors.k, 64)?, self.tensor_map(&tensors.v, 64)?];
        // As many blocks as the card holds at once.
        let on_each = (233_472 / (kernel.shared as usize + 1024)).clamp(1, 3);
        let blocks = pieces.min(on_each * self.driver.card().processors as usize) as u32;
        let given: [*const u8; 3] =
            [(&raw const *job).cast(), (&raw const maps[0]).cast(), (&raw const maps[1]).cast()];
        // SAFETY: these are the parameters of the kernel, and their pointers are what the callers of the passes promise.
        self.told(unsafe { self.driver.launch(kernel, [blocks, 1], stream, &given) })
    }

    /// A map for the copy engine over a tensor, so many rows at a time.
    pub(crate) fn tensor_map(&self, tensor: &Strided, rows: usize) -> Result<TensorMap> {
        let [b, h, n, d] = tensor.shape;
        let axes = [d, n, h, b].map(|axis| axis as u64);
        // An axis of one is never stepped along.
        let stride = |axis: usize| if tensor.shape[axis] <= 1 { 16 } else { tensor.strides[axis] as u64 * 2 };
        let strides = [stride(2), stride(1), stride(0)];
        self.driver.tensor_map(tensor.at, self.dtype == Dtype::Bf16, axes, strides, rows as u32)
    }
}
