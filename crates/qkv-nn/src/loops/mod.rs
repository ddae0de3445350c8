//! The inner loops of the operations, compiled once, here, for every instruction set.
//!
//! A generic loop is compiled in every crate that instantiates it: models, the program and every test binary would each
//! recompile all of them, at their own optimization level. So every loop is listed in this file and called through one
//! method of [`Float`](crate::Float), whose two implementations are not generic.

mod activation;
mod cross_entropy;
mod distance;
mod dropout;
mod elementwise;
mod gated;
mod group_norm;
mod gru;
mod heads;
mod norm;
mod optimizer;
mod rotary;
mod sums;

pub use activation::Activation;
pub(crate) use activation::{Activate, ActivationGradient};
pub(crate) use cross_entropy::{CrossEntropyRow, RowLoss};
pub(crate) use distance::Distance;
pub(crate) use dropout::ApplyDropout;
pub(crate) use elementwise::{
    AddAt, AddLowRank, AddScaled, Fill, MaxPlaces, Relu, ReluGradient, Scale, Scaled, SquareSum,
};
pub use gated::Gate;
pub(crate) use gated::{Gated, GatedGradient};
pub(crate) use group_norm::{GroupNorm, GroupNormGradient};
pub(crate) use gru::{GruCell, GruCellGradient};
pub(crate) use heads::MergeHeads;
pub(crate) use norm::{LayerNorm, LayerNormGradient, RmsNorm, RmsNormGradient};
pub(crate) use optimizer::{AdamWUpdate, MovingAverage, StepFactors};
use qkv_simd::Isa;
use qkv_simd::pass::{self, Pass};
pub(crate) use rotary::Rotate;
pub(crate) use sums::{AddAssign, AddColumns, MaxAssign};

/// Accumulators of a sum: enough to vectorize it, with an order that does not depend on the instruction set.
const LANES: usize = 16;

/// `Σ f(x, y)` over two rows of the same length.
macro_rules! sum_over {
    ($T:ty, $x:expr, $y:expr, |$a:ident, $b:ident| $term:expr) => {{
        let mut sums = [<$T as qkv_simd::Real>::ZERO; $crate::loops::LANES];
        let (xs, ys) = ($x.chunks_exact($crate::loops::LANES), $y.chunks_exact($crate::loops::LANES));
        let mut rest = <$T as qkv_simd::Real>::ZERO;
        for (&$a, &$b) in xs.remainder().iter().zip(ys.remainder()) {
            rest += $term;
        }
        for (x, y) in xs.zip(ys) {
            for l in 0..$crate::loops::LANES {
                let ($a, $b) = (x[l], y[l]);
                sums[l] += $term;
            }
        }
        let mut total = rest;
        for sum in sums {
            total += sum;
        }
        total
    }};
}
use sum_over;

macro_rules! loops {
    ($($Name:ident),* $(,)?) => {
        /// One of the loops, with its arguments.
        pub enum Loop<'a, T> {
            $(#[allow(missing_docs)] $Name($Name<'a, T>),)*
        }

        $(impl<'a, T> From<$Name<'a, T>> for Loop<'a, T> {
            fn from(arguments: $Name<'a, T>) -> Self {
                Loop::$Name(arguments)
            }
        })*

        /// Runs a loop in f32, compiled for the instruction set.
        pub fn run_f32(isa: Isa, arguments: Loop<'_, f32>) {
            match arguments {
                $(Loop::$Name(arguments) => pass::run(isa, arguments),)*
            }
        }

        /// Runs a loop in f64, which is for gradient checks, with portable instructions only.
        pub fn run_f64(arguments: Loop<'_, f64>) {
            match arguments {
                $(Loop::$Name(arguments) => arguments.run(),)*
            }
        }
    };
}

loops![
    Activate,
    ActivationGradient,
    AdamWUpdate,
    AddAssign,
    AddAt,
    AddColumns,
    AddLowRank,
    AddScaled,
    ApplyDropout,
    CrossEntropyRow,
    Distance,
    Fill,
    GroupNorm,
    GroupNormGradient,
    GruCell,
    GruCellGradient,
    LayerNorm,
    LayerNormGradient,
    MaxAssign,
    MaxPlaces,
    MergeHeads,
    MovingAverage,
    Relu,
    ReluGradient,
    RmsNorm,
    RmsNormGradient,
    Rotate,
    Scale,
    Scaled,
    SquareSum,
    Gated,
    GatedGradient,
];
