//! The general kernels held to the definition without a card: the same sources, compiled as C++ and run with a fibre for
//! each thread. A few cases of each group, most in f32; `QKV_EVERY_CASE=1` runs all of them in every type, for minutes.

use crate::engine::{self, DeviceEngine, TYPES, holds};
use qkv_conformance::case::Case;
use qkv_conformance::grid;
use qkv_cuda::Cuda;
use std::io::Write;

/// Runs one in so many of a group, or says why not.
fn group(cases: Vec<Case>, each: usize, types: &str, decoding: bool) {
    match Cuda::emulated() {
        Ok(cuda) => {
            let every = std::env::var_os("QKV_EVERY_CASE").is_some();
            let (each, types) = if every { (1, TYPES) } else { (each, types) };
            holds(&DeviceEngine { cuda, decoding }, cases, each, types);
        }
        // Past the harness, which keeps back what a passing test prints.
        Err(error) => drop(writeln!(std::io::stderr(), "skipped: {error}")),
    }
}

#[test]
fn odd_shapes_hold() {
    group(grid::shapes(), 3, "f32", false);
}

#[test]
fn heads_are_shared_as_defined() {
    group(grid::heads(), 3, "f32,bf16", false);
}

#[test]
fn scales_caps_and_biases_hold() {
    group(grid::on_top(), 8, "f32", false);
}

#[test]
fn every_mask_holds_at_every_place() {
    group(grid::masks(), 11, "f32", false);
}

#[test]
fn scattered_masks_hold() {
    group(grid::gathered(), 11, "f32", false);
}

#[test]
fn dropout_and_sinks_hold() {
    group(grid::selection(), 2, "f32", false);
}

#[test]
fn hash_buckets_hold() {
    group(grid::hashed().into_iter().take(2).collect(), 1, "f32", false);
}

#[test]
fn decoding_one_token_of_whole_widths_holds() {
    group(engine::one_token().into_iter().take(2).collect(), 1, "bf16", true);
}

#[test]
fn decoding_holds() {
    group(grid::decoding(), 15, "f32", true);
}
