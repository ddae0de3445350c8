//! Reverse-mode autodiff over a closed list of fused operations, and the layers of attention models.
//!
//! It is not a framework: no general broadcasting, no einsum. An operation exists because a shipped model uses it; each
//! has one forward pass, one backward pass and one gradient check. Only what the backward pass needs is saved, and
//! memory is reused from step to step ([`Pool`]). On one machine the same seed gives the same bits for any number of
//! threads.
//!
//! | module | owns |
//! | --- | --- |
//! | [`Tensor`], [`Pool`] | elements with a shape, and the memory pool they come from |
//! | [`Parameters`], [`Gradients`] | trained parameters by name, and their gradients |
//! | [`Tape`] | recorded operations and the backward pass; its methods are the operations |
//! | [`layers`] | attention, recurrence, feed-forward, norms, embeddings |
//! | [`Captured`] | attentions recorded for inspection |
//! | [`Adapter`] | low-rank adapters of frozen matrices (LoRA) |
//! | [`AdamW`] | the optimizer |
//!
//! Letters in shapes: `B` sequences of `N` tokens (`M` in the memory of cross-attention), `C` width of the model, `H`
//! heads (`Hq` query, `Hk` key/value) of width `D`, `V` size of the vocabulary, `R` rows (all axes but the last
//! together).
//!
//! ```
//! use qkv_nn::{Activation, Gradients, Init, Machine, Parameters, Pool, Tape, Tensor};
//! let mut parameters = Parameters::<f32>::new();
//! let w = parameters.add("w", &[3, 2], Init::Xavier, 1);
//! let b = parameters.add("b", &[3], Init::Zeros, 1);
//!
//! let (pool, machine) = (Pool::new(), Machine::new(2));
//! let mut gradients = Gradients::of(&parameters);
//! let mut tape = Tape::training(&parameters, &mut gradients, &pool, &machine, 7);
//! let x = tape.constant(Tensor::new(vec![1.0, 2.0, 3.0, 4.0], &[2, 2]));
//! let y = tape.linear(&x, w, Some(b), Activation::Tanh, 0.0);
//! tape.seed(&y, Tensor::new(vec![1.0; 6], &[2, 3])); // the gradient of the sum
//! tape.backward();
//! assert!(gradients.get(b).iter().all(|&g| g > 0.0 && g <= 2.0));
//! ```
#![forbid(unsafe_code)]

mod activation_source;
mod adamw;
mod adapter;
mod captured;
mod context;
mod device;
mod dropout_mask;
mod elements;
mod float;
mod heads;
pub mod layers;
mod loops;
mod machine;
mod moving_average;
mod ops;
mod parameters;
mod pending;
mod pool;
mod recompute;
mod rewards;
mod saved_call;
mod stored_matrix;
mod tape;
mod tensor;

pub use adamw::{AdamW, Moments, MomentsPart};
pub use adapter::Adapter;
pub use captured::Captured;
pub use context::ContextParallel;
pub use device::Device;
pub use elements::Elements;
pub use float::Float;
pub use heads::Heads;
pub use loops::{Activation, Gate};
pub use machine::{Machine, Precision, Usage};
pub use moving_average::moving_average;
pub use ops::attention::AttendOptions;
pub use ops::boxes::{BoxTarget, edges, generalized_iou};
pub use ops::distance::Expected;
pub use ops::embedding::Positions;
pub use ops::guide::Guide;
pub use ops::loss::{Loss, PendingLoss, Target};
pub use ops::rotary::Angles;
pub use ops::unfold::Windows;
pub use ops::windows2d::Windows2d;
pub use parameters::{Gradients, Init, Param, Parameters};
pub use pending::Pending;
pub use pool::Pool;
pub use rewards::Reinforce;
pub use saved_call::ScoreParameters;
pub use stored_matrix::{HalfMatrix, StoredMatrix};
pub use tape::{PendingPenalty, Tape, Var};
pub use tensor::Tensor;

/// The example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
