//! Context parallelism: a tape that has some rows of each sequence. Everything but attention goes by rows; attention is
//! computed together with the tapes that have the others.

use crate::float::Float;
use qkv::{Attention, Gradients, Inputs, Output, Upstream};
use std::sync::Arc;

/// The tapes that share sequences, seen from one of them. All of them make the same calls in the same order.
pub trait ContextParallel<T: Float>: Send + Sync {
    /// The number of this tape among them.
    fn part(&self) -> usize;

    /// The places of this tape's rows in a sequence of `length`, in their order.
    fn places(&self, length: usize) -> Vec<usize>;

    /// Attention over sequences of `length`: `inputs` has this tape's rows of q, k and v, and so has the output.
    ///
    /// # Errors
    /// What `qkv` refuses; and where another tape is gone.
    fn forward(
        &self,
        length: usize,
        attention: &Attention,
        inputs: Inputs<'_, T>,
        threads: usize,
    ) -> qkv::Result<Output<T>>;

    /// Its gradients: this tape's rows of those of q, k and v, and this tape's share of those of parameters, which the
    /// tapes add up.
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

/// What a tape knows of the sequences it shares.
pub(crate) struct SharedContext<T: Float> {
    pub with: Arc<dyn ContextParallel<T>>,
    /// Rows of each whole sequence.
    pub length: usize,
}

impl<T: Float> Clone for SharedContext<T> {
    fn clone(&self) -> Self {
        SharedContext { with: self.with.clone(), length: self.length }
    }
}
