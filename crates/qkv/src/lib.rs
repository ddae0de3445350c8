#![doc = include_str!("../README.md")]
#![deny(missing_docs)]
#![forbid(unsafe_code)]

mod attention;
mod bias;
mod decode;
mod error;
mod exact;
mod feature;
mod heads;
mod inputs;
mod mask;
mod place;
mod problem;
pub mod reference;
mod score;
mod scratch;
mod select;
mod tensor;
pub mod tuning;
mod weights;

pub use attention::{Attention, Gradients, Output, OutputMut, Tiles};
pub use bias::{Bias, alibi_slopes};
pub use decode::{Cache, Decode};
pub use error::{Error, Result};
pub use feature::{Features, LinearState};
pub use heads::Heads;
pub use inputs::{Inputs, Upstream};
pub use mask::{BigBird, Blocks, Mask, segments_of};
pub use place::Place;
pub use qkv_simd::{Element, Isa, Real, View, ViewError, ViewMut};
pub use score::{Scale, Score};
pub use scratch::Scratch;
pub use select::Dropout;
pub use tensor::Tensor;
pub use weights::{Pool, Weights};

/// The pages of the guide, whose code is run as tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/guide/linear-attention.md")]
mod guide_to_linear_attention {}
