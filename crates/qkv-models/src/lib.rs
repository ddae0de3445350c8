//! Attention models that train and translate.
#![forbid(unsafe_code)]

mod batch;
pub mod draws;
mod error;
pub mod files;
pub mod metrics;
mod model;
mod observed;
mod recipe;
mod recurrent;
mod schedule;
mod search;
pub mod tasks;
pub mod text;
pub mod train;
mod transformer;
mod translator;

pub use batch::{Batch, Rows, Specials};
pub use error::{Error, Result};
pub use model::{Architecture, Group, Model, ModelConfig, State};
pub use observed::{Alignment, Attended, Observed};
pub use recipe::{Data, Metric, Pieces, Recipe, Training};
pub use recurrent::{Recurrent, RecurrentConfig, RecurrentState};
pub use schedule::Schedule;
pub use search::{Found, Sampling, Search};
pub use transformer::{Transformer, TransformerConfig, TransformerState};
pub use translator::{Translation, Translator};
