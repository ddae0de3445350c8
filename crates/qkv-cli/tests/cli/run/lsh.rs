//! `--pattern lsh`: the program hashes queries and keys itself, and attention sees the buckets.

use crate::run::program::{Folder, Input, noise, qkv};
use qkv::reference::Reference;
use qkv::{Attention, Inputs, Lsh, Mask, Tensor, Upstream};

/// Checks that typed options match what the library computes from its own buckets, with the rest of the description.
fn holds(typed: &str, lsh: Lsh, described: Attention) {
    let [q, k, v] = qkv::<f32>();
    let d_out: Tensor<f32, 4> = noise([2, 4, 7, 8], 4);
    let (of_query, of_key) = (lsh.hash(&q).unwrap(), lsh.hash(&k).unwrap());
    let inputs = Inputs::new(&q, &k, &v).buckets(&of_query, &of_key);
    let described = described.mask(Mask::lsh(lsh));
    let definition = Reference::<f64>::exact();
    let truth = definition.forward(&described, inputs).unwrap();
    let gradients = definition.backward(&described, inputs, &truth, Upstream::new(&d_out)).unwrap();
    let folder = Input::of(&q, &k, &v).tensor("d_out", &d_out).folder();
    for engine in ["exact", "reference"] {
        println!("{typed} --engine {engine}");
        let written = folder.run(&format!("{typed} --weights --engine {engine}"));
        written["out"].is(&[2, 4, 7, 8], truth.output.values.data(), 2e-5);
        written["weights"].is(&[2, 4, 7, 9], truth.weights.data(), 2e-5);
        written["d_q"].is(&[2, 4, 7, 8], gradients.q.data(), 5e-5);
        written["d_k"].is(&[2, 2, 9, 8], gradients.k.data(), 5e-5);
        written["d_v"].is(&[2, 2, 9, 8], gradients.v.data(), 5e-5);
    }
}

#[test]
fn queries_see_keys_of_their_own_bucket() {
    let lsh = |buckets, rounds, seed| Lsh { buckets, rounds, seed };
    holds("--pattern lsh:4,1,0", lsh(4, 1, 0), Attention::scaled_dot());
    holds("--pattern lsh:6,3,7", lsh(6, 3, 7), Attention::scaled_dot());
    let causal = Attention::scaled_dot().mask(Mask::causal());
    holds("--pattern lsh:2,2,1 --causal start", lsh(2, 2, 1), causal);
    holds("--pattern lsh:2,1,1 --select hard", lsh(2, 1, 1), Attention::scaled_dot().hard());
}

#[test]
fn another_seed_hashes_otherwise() {
    let [q, k, v] = qkv::<f32>();
    let folder = Input::of(&q, &k, &v).folder();
    assert_ne!(folder.run("--pattern lsh:4,1,0"), folder.run("--pattern lsh:4,1,1"));
    assert_eq!(folder.run("--pattern lsh:4,1,1"), folder.run("--pattern lsh:4,1,1"));
}

#[test]
fn a_sequence_of_many_buckets_leaves_tiles_empty() {
    let x = noise::<f32, 4>([1, 1, 4096, 8], 1);
    let folder = Input::of(&x, &x, &x).folder();
    let report = folder.qkv("run --input in.safetensors --pattern lsh:64,1,0 --json").well();
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    let tiles = |kind: &str| report["tiles"][kind].as_u64().unwrap();
    assert!(tiles("empty") > 4 * (tiles("partial") + tiles("full")), "{report}");
}

#[test]
fn queries_and_keys_of_different_widths_cannot_be_rotated_alike() {
    let (q, k, v) = (noise::<f32, 4>([1, 2, 3, 4], 1), noise([1, 2, 5, 6], 2), noise([1, 2, 5, 2], 3));
    let file = Input::of(&q, &k, &v).tensor("w", &noise::<f32, 2>([4, 6], 4));
    file.folder().run("--score general");
    let words = ["`--pattern lsh` rotates", "`q` has a width of 4 and `k` of 6"];
    file.folder().fails("--score general --pattern lsh:4,1,0", &words);
}

#[test]
fn more_rotations_than_any_memory_are_refused_without_a_file_too() {
    for pattern in [format!("lsh:2,{},0", u64::MAX), format!("lsh:2,{},0", 1u64 << 44)] {
        let words = ["GiB of memory", "hint: use fewer buckets or fewer rounds"];
        Folder::new().qkv(&format!("run --pattern {pattern}")).fails(&words);
        let [q, k, v] = qkv::<f32>();
        Input::of(&q, &k, &v).folder().fails(&format!("--pattern {pattern}"), &words);
    }
    Folder::new().qkv("run --pattern lsh:4,2,0").well();
}
