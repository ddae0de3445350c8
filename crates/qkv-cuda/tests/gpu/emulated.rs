//! The general kernels without a GPU: the same sources, compiled as C++ with a fiber per thread, against the
//! definition. Every mask runs in every type, at sizes of two query tiles and three key tiles; in the narrow types,
//! only the cases that `QKV_SAMPLE` draws. Of the other groups, some cases run in one or two types. `QKV_EVERY_CASE=1`
//! runs all cases in all types at full size, which takes minutes.

use crate::engine::{self, DeviceEngine, TYPES, holds};
use qkv_conformance::case::Case;
use qkv_conformance::grid;
use qkv_conformance::sample::Sample;
use qkv_cuda::Cuda;
use std::io::Write;

fn every_case() -> bool {
    std::env::var_os("QKV_EVERY_CASE").is_some()
}

/// Runs every `each`-th case of a group in these types.
fn group(cases: Vec<Case>, each: usize, types: &str, decoding: bool) {
    match Cuda::emulated() {
        Ok(cuda) => {
            let (each, types) = if every_case() { (1, TYPES) } else { (each, types) };
            holds(&DeviceEngine { cuda, decoding }, cases, each, types);
        }
        // Bypasses the harness, which captures the output of passing tests.
        Err(error) => drop(writeln!(std::io::stderr(), "skipped: {error}")),
    }
}

/// The cases of the suite with fewer queries and keys, enough for more than one tile of each.
fn smaller(mut cases: Vec<Case>) -> Vec<Case> {
    if !every_case() {
        for case in &mut cases {
            (case.sizes.n, case.sizes.m) = (case.sizes.n.min(70), case.sizes.m.min(140));
        }
    }
    cases
}

/// The cases that a sample keeps: all of them, unless the run requests a part.
fn drawn(cases: Vec<Case>) -> Vec<Case> {
    let sample = if every_case() { Sample::ALL } else { Sample::from_env() };
    sample.draw(cases, |case| &case.name)
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
fn every_mask_holds_at_every_place_in_f32() {
    group(smaller(grid::masks()), 1, "f32", false);
}

#[test]
fn every_mask_holds_at_every_place_in_bf16() {
    group(drawn(smaller(grid::masks())), 1, "bf16", false);
}

#[test]
fn every_mask_holds_at_every_place_in_f16() {
    group(drawn(smaller(grid::masks())), 1, "f16", false);
}

/// Sequences that one block computes whole, with lengths below, at and above a tile of 16 and a head of keys for each
/// query head, since gradients of shared keys are left to other kernels.
fn short(mut cases: Vec<Case>) -> Vec<Case> {
    for (at, case) in cases.iter_mut().enumerate() {
        (case.sizes.n, case.sizes.m) = [(16, 16), (5, 23), (33, 7), (17, 64), (64, 40)][at % 5];
        if at % 4 != 0 {
            case.sizes.hk = case.sizes.hq;
        }
    }
    cases
}

#[test]
fn every_mask_holds_for_short_sequences() {
    group(drawn(short(grid::masks())), 1, "bf16,f16", false);
}

#[test]
fn dropout_holds_for_short_sequences() {
    let mut cases = short(grid::masks());
    for case in &mut cases {
        case.attention = case.attention.clone().dropout(0.3);
    }
    group(drawn(cases), 3, "bf16,f16", false);
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
