//! The engines of this CPU against the definition: every case of the suite.

use qkv::Decode;
use qkv_conformance::case::Case;
use qkv_conformance::{Decoding, Exact, grid, hold};

fn holds(cases: Vec<Case>) {
    hold(&Exact, cases);
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
    hold(&Decoding(Decode::Fast), grid::decoding());
    hold(&Decoding(Decode::Exact), grid::decoding());
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
