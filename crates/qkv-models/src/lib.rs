//! Attention models that train and translate.
#![forbid(unsafe_code)]

mod batch;
mod error;
pub mod files;
mod model;
mod recurrent;
mod search;
pub mod text;
mod transformer;

pub use batch::{Batch, Rows, Specials};
pub use error::{Error, Result};
pub use model::{Architecture, Model, ModelConfig, State};
pub use recurrent::{Recurrent, RecurrentConfig, RecurrentState};
pub use search::{Found, Sampling, Search};
pub use transformer::{Transformer, TransformerConfig, TransformerState};
