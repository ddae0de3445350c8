//! Attention models that train and translate.
#![forbid(unsafe_code)]

mod error;
pub mod files;
pub mod text;

pub use error::{Error, Result};
