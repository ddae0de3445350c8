//! Attention models that train, translate, go on with text and read it.
#![forbid(unsafe_code)]

mod batch;
pub mod chat;
mod checkpoint;
pub mod draws;
mod encoder;
mod error;
pub mod files;
mod generator;
mod gpt;
mod inspection;
pub mod labelled;
mod layout;
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
pub use encoder::{Answer, Encoder, EncoderConfig, Head, Pooling};
pub use error::{Error, Result};
pub use generator::{Ended, Generated, Generation, Generator};
pub use gpt::{Gpt, GptConfig, GptState};
pub use inspection::{Inspection, Listed};
pub use layout::Dialect;
pub use model::{Architecture, Group, Model, ModelConfig, State};
pub use observed::{Alignment, Attended, Observed};
pub use recipe::{Data, Metric, Pieces, Recipe, Training};
pub use recurrent::{Recurrent, RecurrentConfig, RecurrentState};
pub use schedule::Schedule;
pub use search::{Found, Sampling, Search};
pub use transformer::{Transformer, TransformerConfig, TransformerState};
pub use translator::{Translation, Translator};
