//! What models read and write: text, sound, images and weights as numbers, and numbers as files. What loops over bytes,
//! samples and pixels is here and compiled for speed; models know tokens, spectrograms, pixels and tensors.
//!
//! | module | owns |
//! | --- | --- |
//! | [`text`] | tokenizers, corpora, sentences, batches by length |
//! | [`files`] | formats of weights, access to files, atomic writes |
//! | [`audio`] | sound decoded and resampled, spectrograms, sound from spectrograms |
//! | [`image`] | images decoded and resized |
//! | [`numbers`] | loops over all elements of a tensor |
//! | [`draws`] | random numbers as a function of a seed and a place |
#![forbid(unsafe_code)]

pub mod audio;
pub mod draws;
mod error;
pub mod files;
pub mod image;
pub mod numbers;
pub mod text;

pub use error::{Error, Result};
