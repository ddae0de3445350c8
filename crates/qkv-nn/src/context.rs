//! Context parallelism: a tape that holds some rows of each sequence. Everything but attention works row by row;
//! attention is computed jointly with the tapes that hold the other rows.

use crate::float::Float;
use qkv::{Attention, Gradients, Inputs, Output, Upstream};
use std::sync::Arc;

/// A group of tapes that share sequences, seen from one of them. All of them make the same calls in the same order.
pub trait ContextParallel<T: Float>: Send + Sync {
    /// The index of this tape in the group.
    fn part(&self) -> usize;

    /// The positions of this tape's rows in a sequence of `length`, in order.
    fn places(&self, length: usize) -> Vec<usize>;

    /// Attention over sequences of `length`: `inputs` holds this tape's rows of q, k and v, and the output its rows of
    /// the result.
    ///
    /// # Errors
    /// If `qkv` rejects the call, or another tape is gone.
    fn forward(
        &self,
        length: usize,
        attention: &Attention,
        inputs: Inputs<'_, T>,
        threads: usize,
    ) -> qkv::Result<Output<T>>;

    /// Gradients of [`forward`](ContextParallel::forward): this tape's rows of the gradients of q, k and v, and its
    /// share of the parameters' gradients, which the tapes sum.
    ///
    /// # Errors
    /// As [`forward`](ContextParallel::forward).
    fn backward(
        &self,
        length: usize,
        attention: &Attention,
        inputs: Inputs<'_, T>,
        out: &Output<T>,
        upstream: Upstream<'_, T>,
        threads: usize,
    ) -> qkv::Result<Gradients<T>>;
}

/// The sequences that a tape shares with others.
pub(crate) struct SharedContext<T: Float> {
    pub with: Arc<dyn ContextParallel<T>>,
    /// Rows of each complete sequence.
    pub length: usize,
}

impl<T: Float> Clone for SharedContext<T> {
    fn clone(&self) -> Self {
        SharedContext { with: self.with.clone(), length: self.length }
    }
}
