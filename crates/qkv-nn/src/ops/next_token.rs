//! The likeliest token of each sequence, where a device counts their positions.

use crate::float::Float;
use crate::tape::{Tape, Var};
use qkv_cuda::operations::{Array, DecodeBatch};

impl<T: Float> Tape<'_, T> {
    /// Takes the likeliest token of each sequence, by its logits `[B, 1, V]`, as the one that it reads next, one
    /// position further. Returns the logits in device memory.
    ///
    /// # Panics
    /// Where the tape computes on the CPU.
    pub fn take_likeliest(&mut self, logits: &Var<T>, batch: &DecodeBatch) -> Array {
        let operations = self.machine.cuda().expect("a device that counts");
        let logits = logits.value.array(operations);
        operations.next_token(&logits, batch);
        logits
    }
}
