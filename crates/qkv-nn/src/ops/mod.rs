//! The operations. Each is a method of [`Tape`](crate::Tape), the forward pass, and a struct that implements the
//! backward pass.

mod adapter;
pub(crate) mod attention;
pub(crate) mod boxes;
mod context;
mod conv2d;
pub(crate) mod distance;
pub(crate) mod dropout;
pub(crate) mod embedding;
mod gated;
mod gather;
pub(crate) mod group_norm;
pub(crate) mod gru;
pub(crate) mod guide;
pub(crate) mod linear;
pub(crate) mod loss;
mod mean;
mod next_token;
pub(crate) mod norm;
mod packed;
pub(crate) mod reinforce;
mod relu;
pub(crate) mod rotary;
mod shape;
mod span;
pub(crate) mod unfold;
pub(crate) mod windows2d;
