//! What a model attended to: captured, measured, drawn.
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
pub mod shades;
mod words;

pub use agreement::{Agreement, Links, pharaoh};
pub use layer::{Computed, Layer, Seen};
pub use observer::Observer;
pub use pair::{Explained, Parts, Term, Value, explain};
pub use recording::{Candidate, Form, Group, Recording, Side, Step, Token};
pub use rollout::rollout;
pub use words::{Cut, Matrix};
