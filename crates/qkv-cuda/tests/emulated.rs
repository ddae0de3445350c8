//! The general kernels held to the definition without a card: the same sources, compiled as C++ and run with a fibre for
//! each thread. A few cases of each group; `QKV_EVERY_CASE=1` runs all of them.

mod engine;

use engine::{OnCard, TYPES, holds};
use qkv_conformance::grid;
use qkv_cuda::Cuda;

/// Runs a group, or says why not.
fn group(cases: Vec<qkv_conformance::case::Case>, each: usize, decoding: bool) {
    match Cuda::emulated() {
        Ok(cuda) => {
            let each = if std::env::var_os("QKV_EVERY_CASE").is_some() { 1 } else { each };
            holds(&OnCard { cuda, decoding }, cases, each, TYPES);
        }
        Err(error) => eprintln!("skipped: {error}"),
    }
}

#[test]
fn odd_shapes_hold() {
    group(grid::shapes(), 3, false);
}

#[test]
fn heads_are_shared_as_defined() {
    group(grid::heads(), 2, false);
}

#[test]
fn scales_caps_and_biases_hold() {
    group(grid::on_top(), 5, false);
}

#[test]
fn every_mask_holds_at_every_place() {
    group(grid::masks(), 9, false);
}

#[test]
fn scattered_masks_hold() {
    group(grid::gathered(), 7, false);
}

#[test]
fn dropout_and_sinks_hold() {
    group(grid::selection(), 2, false);
}

#[test]
fn hash_buckets_hold() {
    group(grid::hashed(), 5, false);
}

#[test]
fn decoding_one_token_of_whole_widths_holds() {
    group(engine::one_token(), 3, true);
}

#[test]
fn decoding_holds() {
    group(grid::decoding(), 4, true);
}
