//! Attention models that train and translate.
#![forbid(unsafe_code)]

pub mod draws;
mod error;
pub mod files;
pub mod metrics;
pub mod tasks;
pub mod text;

pub use error::{Error, Result};
