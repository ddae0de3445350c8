//! A GPU as an engine of the conformance suite.

use half::{bf16, f16};
use qkv::{Attention, Element, Gradients, Inputs, Output, Result, Score, Select, Tensor, Upstream};
use qkv::{Bias, Mask, Place};
use qkv_conformance::case::{Extras, Sizes};
use qkv_conformance::{Engine, case::Case, check::check};
use qkv_cuda::{Cuda, Error};
use std::sync::atomic::{AtomicUsize, Ordering};

/// A device, called with host tensors.
#[derive(Clone, Debug)]
pub struct DeviceEngine {
    pub cuda: Cuda,
    /// Calls `decode`: queries are at the end of the keys.
    pub decoding: bool,
}

fn into_qkv<T>(result: qkv_cuda::Result<T>) -> Result<T> {
    result.map_err(|error| match error {
        Error::Refused(error) => error,
        error => qkv::Error::Value { name: "the device", found: error.to_string(), expected: "a result".into() },
    })
}

impl Engine for DeviceEngine {
    fn forward<T: Element>(&self, attention: &Attention, inputs: Inputs<'_, T>) -> Result<Output<T>> {
        into_qkv(if self.decoding { self.cuda.decode(attention, inputs) } else { self.cuda.forward(attention, inputs) })
    }

    fn backward<T: Element>(
        &self,
        attention: &Attention,
        inputs: Inputs<'_, T>,
        out: &Output<T>,
        upstream: Upstream<'_, T>,
    ) -> Result<Gradients<T>> {
        into_qkv(self.cuda.backward(attention, inputs, out, upstream))
    }

    fn weights<T: Element>(
        &self,
        attention: &Attention,
        inputs: Inputs<'_, T>,
        out: &Output<T>,
        b: usize,
        h: usize,
    ) -> Result<Tensor<T::Acc, 2>> {
        into_qkv(self.cuda.weights(attention, inputs, out, [b, h], 0..out.lse.shape()[2]))
    }

    /// The Hopper kernels do.
    fn sums_in_fixed_point<T: Element>(&self) -> bool {
        self.cuda.device().capability == (9, 0) && T::NAME != "f32"
    }
}

/// Whether the crate supports this case. It rejects the others with an error that names the CPU.
pub fn is_supported(case: &Case) -> bool {
    matches!(case.attention.score, Score::Dot | Score::ScaledDot)
        && case.attention.select == Select::Soft
        && case.attention.local.is_none()
        && case.sizes.d.max(case.sizes.dv) <= 256
}

/// The element types of the crate.
pub const TYPES: &str = "f32,bf16,f16";

/// Checks a device against the definition on every `each`-th case, in the types that `QKV_TYPES` names, or else in
/// `types`.
pub fn holds(engine: &DeviceEngine, cases: Vec<Case>, each: usize, types: &str) {
    let types = std::env::var("QKV_TYPES").unwrap_or(types.into());
    let cases: Vec<Case> = cases.into_iter().filter(is_supported).step_by(each.max(1)).collect();
    assert!(!cases.is_empty(), "no case of this group is supported");
    let in_type = |name: &str, case: &Case| match name {
        "f32" => check::<f32>(engine, case),
        "bf16" => check::<bf16>(engine, case),
        "f16" => check::<f16>(engine, case),
        other => panic!("QKV_TYPES names {other:?}, which no kernel has"),
    };
    // Most of the time is compilation: use all cores.
    let all: Vec<(&Case, &str)> =
        cases.iter().flat_map(|case| types.split(',').map(move |name| (case, name))).collect();
    let workers = std::thread::available_parallelism().map_or(1, |cores| cores.get().min(all.len()));
    let next = AtomicUsize::new(0);
    let work = || {
        let mut failures = Vec::new();
        while let Some((case, name)) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
            failures.extend(in_type(name, case));
        }
        failures
    };
    let failures: Vec<String> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|worker| worker.join().expect("a case panicked")).collect()
    });
    assert!(failures.is_empty(), "{} results out of bounds:\n{}", failures.len(), failures.join("\n"));
}

/// One query, for the widths of the decoding kernels, plain and with every feature.
pub fn one_token() -> Vec<Case> {
    let scaled = || Attention::scaled_dot().place(Place::End);
    let plain = Extras::default;
    let mut cases = Vec::new();
    for (d, m, hq, hk) in [(64, 700, 8, 2), (128, 1030, 4, 4), (64, 5, 20, 1), (256, 530, 3, 1), (128, 512, 32, 2)] {
        let sizes = Sizes::new(1, m, d).heads(2, hq, hk);
        cases.push(Case::new(format!("one token {m}×{d} of {hq}/{hk}"), scaled(), sizes, plain()));
        let (name, lengths) =
            (format!("one token {m}×{d} of {hq}/{hk} with lengths"), Extras { lengths: true, ..plain() });
        cases.push(Case::new(name, scaled(), sizes, lengths));
        let all = scaled().softcap(3.0).bias(Bias::alibi()).dropout(0.3).mask(Mask::causal() & Mask::window(600, 0));
        let extras = Extras { sinks: true, lengths: true, table: Some((9, true)), all_upstream: true, ..plain() };
        cases.push(Case::new(format!("one token {m}×{d} of {hq}/{hk} with the rest"), all, sizes, extras));
    }
    cases
}
