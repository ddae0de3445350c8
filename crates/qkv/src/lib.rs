#![doc = include_str!("../README.md")]
#![deny(missing_docs)]
#![forbid(unsafe_code)]

mod attention;
mod bias;
mod compiled;
mod decode;
mod element;
pub mod engine;
mod error;
mod exact;
mod feature;
mod features;
mod gradients;
pub mod guide;
mod heads;
mod inputs;
mod lsh;
mod mask;
#[doc(hidden)]
pub mod materialized;
mod output;
mod owned_inputs;
mod paged;
mod place;
mod problem;
pub mod reference;
mod score;
mod scratch;
mod sdpa;
mod select;
mod source;
mod tensor;
pub mod tuning;
mod weights;

pub use attention::{Attention, Tiles};
pub use bias::{Bias, alibi_slopes};
pub use decode::{Cache, Decode};
pub use element::Element;
pub use error::{Error, Result};
pub use feature::LinearState;
pub use features::Features;
pub use gradients::{Gradients, GradientsMut};
pub use half;
pub use heads::Heads;
pub use inputs::{Inputs, Upstream};
pub use lsh::Lsh;
pub use mask::{BigBird, Blocks, Mask, MaskData, segments_of};
pub use output::{Output, OutputMut, OutputRef};
pub use owned_inputs::OwnedInputs;
pub use paged::{PagedBatch, PagedCache, SequenceId};
pub use place::Place;
pub use qkv_simd::{Isa, Real, View, ViewError, ViewMut};
pub use score::{Scale, Score};
pub use scratch::Scratch;
pub use sdpa::{sdpa, sdpa_causal};
pub use select::{Choice, Dropout, Select};
pub use source::{Pages, Source};
pub use tensor::Tensor;
pub use weights::{Pool, Weights};

/// Runs the code of the READMEs as tests. The pages of the guide are modules, so their code is tested as well.
#[cfg(doctest)]
mod readmes {
    #[doc = include_str!("../../../README.md")]
    struct Readme;

    #[doc = include_str!("../../../README.zh-CN.md")]
    struct ReadmeInChinese;
}
