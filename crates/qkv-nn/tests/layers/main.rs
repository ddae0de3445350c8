//! The tests of the crate in one binary: each file checks one property.

mod batch_invariant;
mod blocks;
mod caches;
mod captures;
mod devices;
mod few_rows;
mod golden;
mod gradients;
mod images;
mod logits;
mod packed;
mod reinforce;
mod speech;
mod threads;
mod tuning;
