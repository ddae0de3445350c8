//! The inner loops of the operations, compiled once, here, for every instruction set.
//!
//! A generic loop is compiled by whoever instantiates it: models, the program and every test binary would each compile
//! all of them again, at their own optimization level. So every loop is listed in this file and reached through one
//! method of [`Float`](crate::Float), whose two implementations are not generic.

use crate::adamw::AdamWUpdate;
use crate::machine::AddColumns;
use crate::ops::AddAssign;
use crate::ops::dropout::ApplyDropout;
use crate::ops::group_norm::{GroupNorm, GroupNormGradient};
use crate::ops::gru::{GruCell, GruCellGradient};
use crate::ops::linear::{Activate, ActivationGradient};
use crate::ops::loss::CrossEntropyRow;
use crate::ops::norm::{LayerNorm, LayerNormGradient, RmsNorm, RmsNormGradient};
use crate::ops::rotary::Rotate;
use crate::ops::swiglu::{SwiGlu, SwiGluGradient};
use crate::parameters::MovingAverage;
use qkv_simd::Isa;
use qkv_simd::pass::{self, Pass};

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

        /// In f32: for the instruction set of this CPU.
        pub fn run_f32(isa: Isa, arguments: Loop<'_, f32>) {
            match arguments {
                $(Loop::$Name(arguments) => pass::run(isa, arguments),)*
            }
        }

        /// In f64, where gradients are checked: for the portable instruction set alone.
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
    AddColumns,
    ApplyDropout,
    CrossEntropyRow,
    GroupNorm,
    GroupNormGradient,
    GruCell,
    GruCellGradient,
    LayerNorm,
    LayerNormGradient,
    MovingAverage,
    RmsNorm,
    RmsNormGradient,
    Rotate,
    SwiGlu,
    SwiGluGradient,
];
