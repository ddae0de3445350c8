//! Extreme shapes: empty work succeeds, and impossible work is refused before memory is allocated.

use crate::run::program::{Input, noise};
use safetensors::Dtype;

/// A file of q `[b, h, n, d]` and k, v `[b, h, m, d]`, with an upstream gradient.
fn file([b, h, n, m, d]: [usize; 5]) -> Input {
    let (q, k) = (noise::<f32, 4>([b, h, n, d], 1), noise([b, h, m, d], 2));
    Input::of(&q, &k, &k).tensor("d_out", &q)
}

#[test]
fn tensors_without_elements_work() {
    for sizes in [[0, 2, 3, 4, 5], [1, 0, 3, 4, 5], [1, 2, 0, 4, 5], [1, 2, 3, 0, 5], [1, 2, 3, 4, 0], [0; 5]] {
        let [b, h, n, m, d] = sizes;
        for engine in ["exact", "reference"] {
            for select in
                ["soft", "hard", "sample --straight-through", "top-k:2", "sparsemax", "soft --pattern lsh:4,2,0"]
            {
                let choices = format!("--causal end --alibi --weights --engine {engine} --select {select}");
                let written = file(sizes).folder().run(&choices);
                assert_eq!(written["out"].shape, [b, h, n, d]);
                assert_eq!(written["weights"].shape, [b, h, n, m]);
                assert_eq!(written["d_k"].shape, [b, h, m, d]);
            }
            for features in ["elu", "relu", "favor:5"] {
                let written = file(sizes).folder().run(&format!("--features {features} --weights --engine {engine}"));
                assert_eq!(written["out"].shape, [b, h, n, d]);
                assert_eq!(written["weights"].shape, [b, h, n, m]);
                assert_eq!(written["d_k"].shape, [b, h, m, d]);
            }
        }
    }
}

#[test]
fn a_query_that_sees_nothing_gets_zero() {
    let written = file([1, 1, 3, 0, 2]).folder().run("");
    assert_eq!(written["out"].data, [0.0; 6]);
    assert_eq!(written["lse"].data, [f64::NEG_INFINITY; 3]);
    let written = file([1, 1, 3, 4, 2]).numbers("key_lengths", &[1], &[0]).folder().run("");
    assert_eq!(written["out"].data, [0.0; 6]);
}

/// Three empty tensors of these shapes: a few bytes that may claim anything.
fn claim(q: [usize; 4], k: [usize; 4], v: [usize; 4]) -> Input {
    let empty = |file: Input, name, shape: [usize; 4]| file.raw(name, Dtype::F32, &shape, Vec::new());
    empty(empty(empty(Input::new(), "q", q), "k", k), "v", v)
}

#[test]
fn a_few_bytes_that_claim_more_than_any_memory_are_refused() {
    let huge = 1 << 44;
    for file in [
        claim([1, 1, huge, 0], [1, 1, 1, 0], [1, 1, 1, 0]),
        claim([1, 1, 1, 0], [1, 1, huge, 0], [1, 1, huge, 0]),
        claim([huge, 1, 0, 1], [huge, 1, 0, 1], [huge, 1, 0, 1]),
        claim([1, huge, 0, 1], [1, huge, 0, 1], [1, huge, 0, 1]),
        claim([1, 1, 0, huge], [1, 1, 0, huge], [1, 1, 0, 1]),
        claim([huge, 0, huge, 1], [huge, 0, huge, 1], [huge, 0, huge, 1]),
    ] {
        file.folder().fails("", &["`in.safetensors`", "`q` of shape", "GiB of memory"]);
    }
}

#[test]
fn a_projection_to_a_width_that_nobody_stored_is_refused() {
    // q has no width and k has no rows, so neither takes a byte; the projected queries would take terabytes.
    let file = claim([1, 1, 1 << 20, 0], [1, 1, 0, 1 << 30], [1, 1, 0, 1]);
    let file = file.raw("w", Dtype::F32, &[0, 1 << 30], Vec::new());
    file.folder().fails("--score general", &["GiB of memory"]);
}

#[test]
fn a_matrix_of_weights_that_does_not_fit_is_refused_with_a_hint() {
    let file = claim([1, 1, 1 << 22, 0], [1, 1, 1 << 22, 0], [1, 1, 1 << 22, 0]);
    file.folder().fails("--weights", &["GiB of memory", "hint: `--engine exact` without `--weights`"]);
    file.folder().fails("--engine reference", &["GiB of memory", "hint: "]);
}

#[test]
fn other_tensors_that_claim_absurd_shapes_are_refused() {
    let absurd = |name: &str, shape: &[usize]| file([1, 1, 2, 2, 2]).raw(name, Dtype::F32, shape, Vec::new());
    absurd("bias", &[0, 1 << 40, 1 << 40, 1])
        .folder()
        .fails("", &["`in.safetensors`", "`bias` has shape", "too large"]);
    absurd("bias", &[1 << 40, 0]).folder().fails("", &["`bias` has shape", "broadcasts"]);
    absurd("sinks", &[0]).folder().fails("", &["`sinks` has shape [0], expected [1]"]);
    absurd("w", &[0, 1 << 60]).folder().fails("--score general", &["`w` has shape"]);
    absurd("table", &[0, (1 << 60) + 1]).folder().fails("", &["`table` has shape"]);
}
