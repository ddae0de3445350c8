//! The engines of this CPU against the definition: every case of the suite.

use half::{bf16, f16};
use qkv::Decode;
use qkv_conformance::{Decoding, Engine, Exact, case::Case, check::check, grid};

/// Every case in every element type, or in those that the environment variable `QKV_TYPES` names.
fn holds(cases: Vec<Case>) {
    holds_by(&Exact, cases);
}

fn holds_by(engine: &impl Engine, cases: Vec<Case>) {
    let types = std::env::var("QKV_TYPES").unwrap_or("f32,f64,bf16,f16".into());
    let in_type = |name: &str, case: &Case| match name {
        "f32" => check::<f32>(engine, case),
        "f64" => check::<f64>(engine, case),
        "bf16" => check::<bf16>(engine, case),
        "f16" => check::<f16>(engine, case),
        other => panic!("QKV_TYPES names {other:?}, which is no type of this library"),
    };
    let broken: Vec<String> = cases
        .iter()
        .flat_map(|case| types.split(',').flat_map(|name| in_type(name, case)).collect::<Vec<_>>())
        .collect();
    assert!(broken.is_empty(), "{} results out of bounds:\n{}", broken.len(), broken.join("\n"));
}

#[test]
fn every_score_holds_on_odd_shapes() {
    holds(grid::shapes());
}

#[test]
fn heads_are_shared_as_defined() {
    holds(grid::heads());
}

#[test]
fn scales_caps_and_biases_hold_on_every_score() {
    holds(grid::on_top());
}

#[test]
fn every_mask_holds_at_every_place() {
    holds(grid::masks());
}

#[test]
fn masks_that_bring_their_own_order_hold() {
    holds(grid::gathered());
}

#[test]
fn long_sequences_hold() {
    holds(grid::long());
}

#[test]
fn dropout_and_sinks_hold() {
    holds(grid::selection());
}

#[test]
fn hard_top_k_and_sparsemax_hold() {
    holds(grid::choices());
}

#[test]
fn decoding_holds_fast_and_exact() {
    holds_by(&Decoding(Decode::Fast), grid::decoding());
    holds_by(&Decoding(Decode::Exact), grid::decoding());
}

#[test]
fn predictive_local_attention_holds() {
    holds(grid::local());
}

#[test]
fn hash_buckets_hold() {
    holds(grid::hashed());
}

#[test]
fn linear_attention_holds_with_every_map_and_mask() {
    holds(grid::linear());
}
