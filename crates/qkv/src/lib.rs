#![doc = include_str!("../README.md")]
#![deny(missing_docs)]
#![forbid(unsafe_code)]

mod attention;
mod bias;
mod decode;
mod element;
pub mod engine;
mod error;
mod exact;
mod feature;
mod heads;
mod inputs;
mod lsh;
mod mask;
mod owned;
mod paged;
mod place;
mod problem;
pub mod reference;
mod score;
mod scratch;
mod select;
mod source;
mod tensor;
pub mod tuning;
mod weights;

pub use attention::{Attention, Gradients, Output, OutputMut, Tiles};
pub use bias::{Bias, alibi_slopes};
pub use decode::{Cache, Decode};
pub use element::Element;
pub use error::{Error, Result};
pub use feature::{Features, LinearState};
pub use heads::Heads;
pub use inputs::{Inputs, Upstream};
pub use lsh::Lsh;
pub use mask::{BigBird, Blocks, Mask, segments_of};
pub use owned::Owned;
pub use paged::{PagedBatch, PagedCache, SequenceId};
pub use place::Place;
pub use qkv_simd::{Element as Number, Isa, Real, View, ViewError, ViewMut};
pub use score::{Scale, Score};
pub use scratch::Scratch;
pub use select::{Choice, Dropout, Select};
pub use source::{Pages, Source};
pub use tensor::Tensor;
pub use weights::{Pool, Weights};

/// The code of the pages in `docs/`, run as tests.
#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../../../docs/coming-from-pytorch.md")]
    struct ComingFromPyTorch;

    #[doc = include_str!("../../../docs/guide/what-attention-does.md")]
    struct WhatAttentionDoes;

    #[doc = include_str!("../../../docs/guide/choosing.md")]
    struct Choosing;

    #[doc = include_str!("../../../docs/guide/linear-attention.md")]
    struct LinearAttention;
}
