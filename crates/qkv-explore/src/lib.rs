//! Attention of a model: captured, measured, drawn, served.
//!
//! [`capture`] runs a model and records its attention calls into a [`Recording`]; [`file`](mod@file) reads and writes
//! recordings. [`measures`] computes statistics of heads, [`draw`] renders weights for terminals and files, and
//! [`server`] serves the explorer page.
#![forbid(unsafe_code)]

mod agreement;
mod aligned;
pub mod capture;
pub mod draw;
pub mod file;
mod layer;
pub mod measures;
mod observer;
mod pair;
mod recording;
mod rollout;
pub mod server;
pub mod token_weights;
mod words;

pub use agreement::{Agreement, Links, pharaoh};
pub use layer::{AttentionCall, Layer, WeightSource};
pub use observer::Observer;
pub use pair::{PairExplanation, Parts, Term, TermValue, explain};
pub use recording::{Candidate, Form, Group, HeardWord, Recording, Side, Step, Token};
pub use rollout::rollout;
pub use words::{Matrix, MatrixOptions};
