//! The types that attention is computed in, and the engines, compiled here once for each type: callers of a generic
//! method use these instances instead of compiling them again.

use crate::decode::Decode;
use crate::error::Result;
use crate::exact;
use crate::feature;
use crate::gradients::GradientsMut;
use crate::inputs::Upstream;
use crate::output::{Output, OutputMut, OutputRef};
use crate::problem::Problem;
use crate::score::Score;
use crate::scratch::{OF_PROCESS, Scratch};
use crate::select::Select;
use crate::weights::{PooledRows, Task, Weights, WeightsRequest};
use half::{bf16, f16};

/// A type that attention is computed in: `f32`, `f64`, `bf16` or `f16`. Sums are accumulated in `f32`, or in `f64` for
/// `f64`.
#[allow(private_bounds)]
pub trait Element: qkv_simd::Element + Engines {}

/// The computations on a problem, each by the engine of its score and selection.
pub(crate) trait Engines: qkv_simd::Element {
    /// The scratch of calls that bring none: if every call allocated its memory and touched it for the first time, that
    /// would take most of the time of short calls on many threads.
    fn scratch() -> &'static Scratch<Self::Acc>;

    /// Writes the output of a softmax.
    fn forward(problem: &Problem<'_, Self>, into: OutputMut<'_, Self>, scratch: &Scratch<Self::Acc>, threads: usize);

    /// The same for a few queries at the end of many keys.
    fn decode(
        problem: &Problem<'_, Self>,
        into: OutputMut<'_, Self>,
        how: Decode,
        scratch: &Scratch<Self::Acc>,
        threads: usize,
    );

    /// Writes the output of another selection.
    fn select(
        problem: &Problem<'_, Self>,
        out: &mut Output<Self>,
        scratch: &Scratch<Self::Acc>,
        threads: usize,
    ) -> Result<()>;

    /// Writes the gradients of all given inputs.
    fn backward(
        problem: &Problem<'_, Self>,
        out: OutputRef<'_, Self>,
        upstream: &Upstream<'_, Self>,
        into: GradientsMut<'_, Self>,
        scratch: &Scratch<Self::Acc>,
        threads: usize,
    );

    /// Runs tasks over recomputed weights.
    fn weigh(weights: &Weights<'_, Self>, asked: WeightsRequest<'_>, task: &Task<'_, Self::Acc>);

    /// Pools recomputed weights to cells.
    fn pool(weights: &Weights<'_, Self>, asked: WeightsRequest<'_>, pooled: PooledRows<'_, Self::Acc>);
}

macro_rules! element {
    ($($t:ident: $scratch:tt;)*) => {$(
        impl Element for $t {}

        impl Engines for $t {
            fn scratch() -> &'static Scratch<Self::Acc> {
                &OF_PROCESS.$scratch
            }

            fn forward(
                problem: &Problem<'_, $t>,
                into: OutputMut<'_, $t>,
                scratch: &Scratch<<$t as qkv_simd::Element>::Acc>,
                threads: usize,
            ) {
                match problem.attention.score {
                    Score::Linear(_) => feature::forward(problem, into, scratch, threads),
                    _ => exact::forward(problem, into, scratch, threads),
                }
            }

            fn decode(
                problem: &Problem<'_, $t>,
                into: OutputMut<'_, $t>,
                how: Decode,
                scratch: &Scratch<<$t as qkv_simd::Element>::Acc>,
                threads: usize,
            ) {
                match problem.attention.score {
                    Score::Linear(_) => feature::forward(problem, into, scratch, threads),
                    _ => exact::decode(problem, into, how, scratch, threads),
                }
            }

            fn select(
                problem: &Problem<'_, $t>,
                out: &mut Output<$t>,
                scratch: &Scratch<<$t as qkv_simd::Element>::Acc>,
                threads: usize,
            ) -> Result<()> {
                debug_assert_ne!(problem.attention.select, Select::Soft);
                exact::select(problem, out, scratch, threads)
            }

            fn backward(
                problem: &Problem<'_, $t>,
                out: OutputRef<'_, $t>,
                upstream: &Upstream<'_, $t>,
                into: GradientsMut<'_, $t>,
                scratch: &Scratch<<$t as qkv_simd::Element>::Acc>,
                threads: usize,
            ) {
                match problem.attention.score {
                    Score::Linear(_) => feature::backward(problem, out, upstream, into, scratch, threads),
                    _ => exact::backward(problem, out, upstream, into, scratch, threads),
                }
            }

            fn weigh(
                weights: &Weights<'_, $t>,
                asked: WeightsRequest<'_>,
                task: &Task<'_, Self::Acc>,
            ) {
                weights.run(asked, task);
            }

            fn pool(
                weights: &Weights<'_, $t>,
                asked: WeightsRequest<'_>,
                pooled: PooledRows<'_, Self::Acc>,
            ) {
                weights.run_pooled(asked, pooled);
            }
        }
    )*};
}

element! { f32: 0; f64: 1; bf16: 0; f16: 0; }
