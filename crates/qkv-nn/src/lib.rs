//! A small tape over a closed list of fused operations, and the layers of attention models.
//!
//! It is not a framework: no general broadcasting, no einsum. An operation exists because a shipped model uses it; each has
//! one forward, one backward and one gradient check. What backward needs is kept, and nothing else; memory is used again from
//! step to step ([`Pool`]). On one machine the same seed gives the same bits, whatever the number of threads.
//!
//! | module | owns |
//! | --- | --- |
//! | [`Tensor`], [`Pool`] | numbers with a shape, and the memory they come from |
//! | [`Parameters`], [`Gradients`] | what is trained, by name |
//! | [`Tape`] | what was computed, and the way back; its methods are the operations |
//! | [`layers`] | attention, recurrence, feed-forward, norms, embeddings: parameters with a way to use them |
//! | [`AdamW`] | the step that training takes |
//!
//! Letters, here and in the layers: `B` sequences of `N` tokens, `M` tokens of the other side, `C` the width of the model,
//! `H` heads, `D` the width of a head, `V` the size of the vocabulary, `R` rows, all axes but the last together.
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

mod adamw;
mod captured;
mod device;
mod float;
pub mod layers;
mod machine;
mod ops;
mod parameters;
mod pool;
mod tape;
mod tensor;

pub use adamw::{AdamW, Moments};
pub use captured::Captured;
pub use device::Device;
pub use float::Float;
pub use machine::{Machine, Precision};
pub use ops::attention::{AttendOptions, Heads, ScoreParameters};
pub use ops::embedding::Positions;
pub use ops::linear::Activation;
pub use ops::loss::{Loss, Target};
pub use ops::rotary::Angles;
pub use parameters::{Gradients, Init, Param, Parameters};
pub use pool::Pool;
pub use tape::{Tape, Var};
pub use tensor::Tensor;
