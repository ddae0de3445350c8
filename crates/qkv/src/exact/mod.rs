//! The exact engine: attention in tiles with an online softmax, forward and backward, in memory linear in the sequence.
//!
//! | module | owns |
//! | --- | --- |
//! | [`rule`] | a mask, compiled: verdicts and bits for whole tiles |
//! | [`order`] | the orders of a sequence, and the keys of a tile in them |
//! | [`plan`] | which tiles are touched, in which order of the sequence |
//! | [`operand`] | where rows come from, and how keys and values are packed |
//! | [`query_blocks`] | the same for queries, in the backward pass |
//! | [`extent`] | the part of a tile that its rows see |
//! | [`products`], [`gather`] | the products of a tile, in f32 or from bf16; those by key |
//! | [`not_finite`] | what they cannot multiply |
//! | [`projection`] | what general, additive and cosine scores do to rows before and after |
//! | [`tile`] | the scores of one tile: raw, scaled, capped, biased, masked |
//! | [`forward`](mod@forward), [`backward`](mod@backward) | the two passes |
//! | [`gradient_tile`] | one tile of the backward pass |
//! | [`decode`](mod@decode) | a few queries against a long cache, read as it lies |
//! | [`select`](mod@select) | selections other than softmax, forward |
//! | [`row_terms`], [`parts`] | before the backward pass, one number a row; after it, gradients put together |
//! | [`bias_gradient`] | gradients of bias tensors and tables, added in a fixed order |
//!
//! What makes it deterministic, and has to hold in every change: a score is a pure function of its query and its key; key
//! blocks have a fixed size and start at key 0; a row is rescaled because of that row alone; nothing that fixes an order
//! depends on threads, batch or cache sizes.

mod backward;
mod bias_gradient;
mod decode;
mod extent;
mod forward;
mod gather;
mod gradient_tile;
mod not_finite;
mod operand;
mod order;
mod parts;
mod plan;
mod products;
mod projection;
mod query_blocks;
mod row_terms;
mod rule;
mod select;
mod tile;

pub(crate) use backward::backward;
pub(crate) use decode::decode;
pub(crate) use forward::forward;
pub(crate) use operand::{KeyBlocks, Operand, Room};
pub(crate) use order::TileKeys;
pub(crate) use plan::{Plan, tiles};
pub(crate) use projection::Compared;
pub(crate) use rule::{Rule, Verdict};
pub(crate) use select::{Weighing, select};
pub(crate) use tile::{Live, RowAt, TileOps};
