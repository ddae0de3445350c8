//! The exact engine: attention in tiles with an online softmax, forward and backward, in memory linear in the sequence.
//!
//! | module | owns |
//! | --- | --- |
//! | [`plan`] | which tiles are visited and in which order: the compiled mask, orders of a sequence, pieces |
//! | [`pack`] | the sources of rows; keys, values and queries packed block by block, on first use |
//! | [`gemm`] | the matrix products of a tile, in native, bf16 or bf16x3 arithmetic |
//! | [`scores`] | the scores of a tile: projected, scaled, capped, biased, masked |
//! | [`forward`](mod@forward) | the forward pass: online softmax and `P · V` |
//! | [`backward`](mod@backward) | the backward pass: `dQ`, `dK`, `dV` and the gradients of biases, scales, centers |
//! | [`decode`](mod@decode) | a few queries against a long cache, read in place |
//! | [`select`](mod@select) | selections other than softmax, forward |
//!
//! Determinism rests on four rules that every change must keep: a score is a pure function of its query and its key;
//! key tiles have a fixed size and start at key 0; whether a row is rescaled depends only on that row; and nothing that
//! fixes an order of summation depends on threads, batch size or cache sizes.

mod backward;
mod decode;
mod forward;
mod gemm;
mod pack;
mod plan;
mod scores;
mod select;

pub(crate) use backward::backward;
pub(crate) use decode::decode;
pub(crate) use forward::forward;
pub(crate) use pack::{KeyBlocks, KeyBuffers, Operand};

pub(crate) use plan::{Plan, tiles};
pub(crate) use scores::projection::ScoreOperands;
pub(crate) use scores::{TileMask, TileOps};
pub(crate) use select::{FinalWeights, select};
