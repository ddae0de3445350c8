//! `qkv run --ranks`: several processes write the same bytes as one.

use crate::models::ranks::has_mpi;
use crate::run::program::{Input, noise};
use qkv::Tensor;

#[test]
fn a_call_over_ranks_writes_the_bytes_of_one_process() {
    if !has_mpi() {
        return;
    }
    let [q, d_out] = [1, 2].map(|seed| noise::<f32, 4>([2, 4, 301, 16], seed));
    let [k, v] = [3, 4].map(|seed| noise::<f32, 4>([2, 2, 301, 16], seed));
    let sinks: Tensor<f32, 1> = noise([4], 5);
    let folder = Input::of(&q, &k, &v).tensor("d_out", &d_out).tensor("sinks", &sinks).folder();
    let run = |choices: &str, output: &str| {
        folder.qkv(&format!("run --input in.safetensors --output {output} --causal start {choices}")).well()
    };
    run("--weights", "one");
    let said = run("--weights --ranks 2", "heads");
    assert!(said.contains("ranks    2, by heads · "), "{said}");
    // Two key heads do not suffice for three ranks.
    let said = run("--weights --ranks 3 --json", "gathered");
    assert!(said.contains(r#""ranks":{"count":3,"way":"gathered","sent_bytes":"#), "{said}");
    let (one, heads, gathered) = (folder.read("one"), folder.read("heads"), folder.read("gathered"));
    for name in ["out", "lse", "weights", "d_q", "d_k", "d_v"] {
        assert_eq!(heads[name], one[name], "{name} by heads");
        assert_eq!(gathered[name], one[name], "{name} with gathered keys");
    }
    let said = run("--ranks 3 --rank-way ring", "ring");
    assert!(said.contains("ranks    3, by ring · "), "{said}");
    let ring = folder.read("ring");
    assert_eq!(ring["out"].shape, one["out"].shape);
    assert_ne!(ring["out"], one["out"], "a ring adds in another order");
    run("--ranks 3 --rank-way ring", "again");
    for name in ["out", "lse", "d_q", "d_k", "d_v", "d_sinks"] {
        assert_eq!(folder.read("again")[name], ring[name], "{name}: another run differs");
    }
}

#[test]
fn what_ranks_cannot_do_is_refused() {
    if !has_mpi() {
        return;
    }
    let x = noise::<f32, 4>([1, 2, 9, 4], 1);
    let folder = Input::of(&x, &x, &x).folder();
    for (choices, what) in [
        ("--ranks 3 --rank-way heads", "2 key heads cannot be divided over 3 ranks"),
        ("--ranks 2 --rank-way ring --dropout 0.1 --seed 1", "a ring does not know dropout and sampling"),
        ("--ranks 2 --engine reference", "`reference` runs in one process, not on 2 ranks"),
    ] {
        let ran = folder.qkv(&format!("run --input in.safetensors --output out.safetensors {choices}"));
        assert_ne!(ran.code, Some(0));
        assert!(ran.err.contains("error: rank ") && ran.err.contains(what), "{choices}: {}", ran.err);
        assert_eq!(folder.names(), ["in.safetensors"], "a failure writes nothing");
    }
}

#[test]
fn a_benchmark_counts_the_bytes_of_the_formula() {
    if !has_mpi() {
        return;
    }
    let shape = "bench --ranks 2 --shape 1,4,4,512,512,16 --causal --seconds 0.01 --json";
    let lines = Input::new().folder().qkv(shape).well();
    let found: Vec<(String, u64)> = lines
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
        .map(|line| (line["way"].as_str().unwrap().to_owned(), line["sent_bytes"].as_u64().unwrap()))
        .collect();
    // Bytes of one rank's rows of a tensor, all heads, and of their log-sum-exp.
    let (rows, lse) = (256 * 4 * 16 * 4, 256 * 4 * 4);
    let expected = [
        // Half of q, k, v, out and its log-sum-exp; then of these and the upstream gradient, and of d_q, d_k and d_v.
        ("heads", (4 * rows + lse) / 2 + (5 * rows + lse + 3 * rows) / 2),
        // k and v; then q, k, v, out, the upstream gradient and the log-sum-exp.
        ("gathered", 2 * rows + 5 * rows + lse),
        // k and v to the next rank; then again, and both gradients all the way around.
        ("ring", 2 * rows + 2 * rows + 2 * 2 * rows),
    ];
    assert_eq!(found, expected.map(|(way, bytes)| (way.to_owned(), bytes)));
}
