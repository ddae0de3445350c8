//! The conformance suite: the same cases and the same bounds for every engine and every device.
//!
//! [`grid`] lists the cases; [`check`](check::check) runs one through an [`Engine`] in one element type and holds every
//! result, output, log-sum-exp, entropy, weights and each gradient, to the definition in `f64`.
//!
//! The bound is promise 1: the error against the `f64` definition is at most twice that of the plain formula in the same
//! precision, plus a few ε of the largest true value.

pub mod case;
pub mod check;
pub mod grid;

use qkv::{Attention, Decode, Element, Gradients, Inputs, Output, Result, Tensor, Upstream};

/// What is held to the definition.
pub trait Engine {
    /// The forward pass.
    fn forward<T: Element>(&self, attention: &Attention, inputs: Inputs<'_, T>) -> Result<Output<T>>;

    /// The backward pass.
    fn backward<T: Element>(
        &self,
        attention: &Attention,
        inputs: Inputs<'_, T>,
        out: &Output<T>,
        upstream: Upstream<'_, T>,
    ) -> Result<Gradients<T>>;

    /// All weights of one head, `[N, M]`.
    fn weights<T: Element>(
        &self,
        attention: &Attention,
        inputs: Inputs<'_, T>,
        out: &Output<T>,
        b: usize,
        h: usize,
    ) -> Result<Tensor<T::Acc, 2>>;
}

/// The exact engine on this CPU.
#[derive(Clone, Copy, Debug, Default)]
pub struct Exact;

impl Engine for Exact {
    fn forward<T: Element>(&self, attention: &Attention, inputs: Inputs<'_, T>) -> Result<Output<T>> {
        attention.forward(inputs)
    }

    fn backward<T: Element>(
        &self,
        attention: &Attention,
        inputs: Inputs<'_, T>,
        out: &Output<T>,
        upstream: Upstream<'_, T>,
    ) -> Result<Gradients<T>> {
        attention.backward(inputs, out, upstream)
    }

    fn weights<T: Element>(
        &self,
        attention: &Attention,
        inputs: Inputs<'_, T>,
        out: &Output<T>,
        b: usize,
        h: usize,
    ) -> Result<Tensor<T::Acc, 2>> {
        let n = out.lse.shape()[2];
        attention.weights(inputs, out)?.rows(b, h, 0..n)
    }
}

/// The exact engine, decoding: the queries stand at the end of the keys, or where they are given.
#[derive(Clone, Copy, Debug)]
pub struct Decoding(pub Decode);

impl Engine for Decoding {
    fn forward<T: Element>(&self, attention: &Attention, inputs: Inputs<'_, T>) -> Result<Output<T>> {
        attention.decode(inputs, self.0)
    }

    fn backward<T: Element>(
        &self,
        attention: &Attention,
        inputs: Inputs<'_, T>,
        out: &Output<T>,
        upstream: Upstream<'_, T>,
    ) -> Result<Gradients<T>> {
        Exact.backward(attention, inputs, out, upstream)
    }

    fn weights<T: Element>(
        &self,
        attention: &Attention,
        inputs: Inputs<'_, T>,
        out: &Output<T>,
        b: usize,
        h: usize,
    ) -> Result<Tensor<T::Acc, 2>> {
        Exact.weights(attention, inputs, out, b, h)
    }
}
