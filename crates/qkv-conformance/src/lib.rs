//! The conformance suite: the same cases and the same bounds for every engine and every device.
//!
//! [`grid`] lists the cases. [`check`](check::check) runs one through an [`Engine`] in one element type and compares
//! every result (output, log-sum-exp, entropy, weights and each gradient) with the definition in `f64`. [`bound`]
//! derives how far each element may be off. [`sample`] draws from the cases, types and instruction sets.
//! `tests/mutations.rs` shows that the bounds bite: engines with deliberate defects fail in every type.

pub mod bound;
pub mod case;
pub mod check;
pub mod grid;
pub mod sample;

use case::Case;
use qkv::half::{bf16, f16};
use qkv::{Attention, Decode, Element, Gradients, Inputs, Output, Result, Tensor, Upstream};

/// Panics if an engine breaks the bound in any of these cases, and lists every result that does.
///
/// Runs the types that `QKV_TYPES` lists (`f32,f64,bf16,f16` by default) and the cases that [`sample`] draws.
pub fn hold(engine: &impl Engine, cases: Vec<Case>) {
    let types = std::env::var("QKV_TYPES").unwrap_or("f32,f64,bf16,f16".into());
    let in_type = |name: &str, case: &Case| match name {
        "f32" => check::check::<f32>(engine, case),
        "f64" => check::check::<f64>(engine, case),
        "bf16" => check::check::<bf16>(engine, case),
        "f16" => check::check::<f16>(engine, case),
        other => panic!("QKV_TYPES lists {other:?}, which is not an element type"),
    };
    let cases = sample::Sample::from_env().draw(cases, |case| &case.name);
    let broken: Vec<String> = cases
        .iter()
        .flat_map(|case| types.split(',').flat_map(|name| in_type(name, case)).collect::<Vec<_>>())
        .collect();
    assert!(broken.is_empty(), "{} results out of bounds:\n{}", broken.len(), broken.join("\n"));
}

/// An implementation that is compared with the definition.
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

    /// Whether gradients of queries of this type are summed in [fixed point](bound::add_fixed_point).
    fn sums_in_fixed_point<T: Element>(&self) -> bool {
        false
    }
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
        let n = out.values.shape()[2];
        attention.weights(inputs, out)?.rows(b, h, 0..n)
    }
}

/// The exact engine, decoding: queries are at the end of the keys, or at given positions.
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
