//! `--features`: linear attention, on its own engine, with the masks that it supports.

use crate::run::program::{Folder, Input, noise, qkv};
use qkv::reference::Reference;
use qkv::{Attention, Features, Inputs, Mask, Place, Score, Tensor, Upstream};
use safetensors::Dtype;

const MAPS: [(&str, Features); 3] = [
    ("--features elu", Features::Elu),
    ("--features relu", Features::Relu),
    ("--features favor:24 --seed 5", Features::Favor { count: 24, seed: 5 }),
];

/// Checks that typed options match a description: output, weights and gradients, on either engine.
fn holds(file: Input, inputs: Inputs<'_, f32>, typed: &str, described: Attention) {
    let d_out: Tensor<f32, 4> = noise([2, 4, 7, 8], 4);
    let d_lse: Tensor<f32, 3> = noise([2, 4, 7], 5);
    let definition = Reference::<f64>::exact();
    let truth = definition.forward(&described, inputs).unwrap();
    let upstream = Upstream::new(&d_out).lse(d_lse.data());
    let gradients = definition.backward(&described, inputs, &truth, upstream).unwrap();
    let folder = file.tensor("d_out", &d_out).tensor("d_lse", &d_lse).folder();
    for engine in ["auto", "exact", "reference"] {
        println!("{typed} --engine {engine}");
        let written = folder.run(&format!("{typed} --weights --engine {engine}"));
        assert_eq!(written.names(), ["d_k", "d_q", "d_v", "lse", "out", "weights"]);
        written["out"].is(&[2, 4, 7, 8], truth.output.values.data(), 2e-5);
        written["lse"].is(&[2, 4, 7], truth.output.lse.data(), 2e-5);
        written["weights"].is(&[2, 4, 7, 9], truth.weights.data(), 2e-5);
        written["d_q"].is(&[2, 4, 7, 8], gradients.q.data(), 1e-4);
        written["d_k"].is(&[2, 2, 9, 8], gradients.k.data(), 1e-4);
        written["d_v"].is(&[2, 2, 9, 8], gradients.v.data(), 1e-4);
    }
}

#[test]
fn every_map_is_the_librarys_with_every_mask_that_goes_with_it() {
    let [q, k, v] = qkv::<f32>();
    let (file, inputs) = (|| Input::of(&q, &k, &v), Inputs::new(&q, &k, &v));
    for (typed, features) in MAPS {
        let linear = || Attention::linear(features);
        holds(file(), inputs, typed, linear());
        holds(file(), inputs, &format!("{typed} --causal start"), linear().mask(Mask::causal()));
        let end = linear().mask(Mask::causal()).place(Place::End);
        holds(file(), inputs, &format!("{typed} --causal end"), end);

        let padded = file().numbers("key_lengths", &[2], &[4, 9]);
        holds(padded, inputs.lengths(&[4, 9]), typed, linear().mask(Mask::lengths()));
        let of_query: Vec<i32> = (0..14).map(|at| at % 7 / 3).collect();
        let of_key: Vec<i32> = (0..18).map(|at| at % 9 / 4).collect();
        let packed = file().numbers("segments_q", &[2, 7], &of_query).numbers("segments_k", &[2, 9], &of_key);
        holds(packed, inputs.segments(&of_query, &of_key), typed, linear().mask(Mask::segments()));
    }
}

#[test]
fn a_scale_goes_with_random_features_alone() {
    let [q, k, v] = qkv::<f32>();
    let favor = Attention::linear(Features::Favor { count: 24, seed: 0 }).scale(0.2);
    holds(Input::of(&q, &k, &v), Inputs::new(&q, &k, &v), "--features favor:24 --scale 0.2", favor);
    for map in ["elu", "relu"] {
        let told = format!("`--scale` cannot be used with `--features {map}`");
        Folder::new().qkv(&format!("run --features {map} --scale 2")).misused(&[&told]);
    }
    let folder = Input::of(&q, &k, &v).folder();
    folder.fails("--features favor:24 --scale -1", &["`scale` is -1", "above 0"]);
}

#[test]
fn a_seed_draws_the_same_features_again_and_another_seed_others() {
    let [q, k, v] = qkv::<f32>();
    let folder = Input::of(&q, &k, &v).folder();
    let run = |typed: &str| folder.run(&format!("--features favor:24 {typed}"));
    assert_eq!(run(""), run("--seed 0"));
    assert_ne!(run("--seed 1"), run("--seed 2"));
    assert_ne!(run(""), folder.run("--features favor:25"));
}

#[test]
fn the_report_says_which_engine_ran() {
    let x = noise::<f32, 4>([1, 1, 7, 8], 1);
    let folder = Input::of(&x, &x, &x).folder();
    for (typed, engine) in [
        ("--features elu", "feature"),
        ("--features favor:8 --engine exact", "feature"),
        ("--features relu --engine reference", "reference"),
        ("--select sparsemax", "exact"),
        ("--pattern lsh:2,1,0 --engine reference", "reference"),
    ] {
        let run = format!("run --input in.safetensors {typed}");
        let report = folder.qkv(&format!("{run} --json")).well();
        let report: serde_json::Value = serde_json::from_str(&report).unwrap();
        assert_eq!(report["engine"], engine, "{typed}");
        let described: Attention = serde_json::from_value(report["attention"].clone()).unwrap();
        assert_eq!(matches!(described.score, Score::Linear(_)), typed.contains("--features"));
        let told = folder.qkv(&run).well();
        assert!(told.starts_with(&format!("engine   {engine}, f32")), "{told}");
        assert_eq!(told.contains("tiles "), engine != "feature", "{told}");
    }
}

#[test]
fn choices_that_linear_attention_has_no_use_for_are_misuse() {
    for typed in [
        "--score dot",
        "--temperature 2",
        "--softcap 3",
        "--alibi",
        "--window 2,1",
        "--pattern strided:3",
        "--pattern lsh:4,1,0",
        "--local predictive:2",
        "--select soft",
        "--select hard",
        "--dropout 0.1",
    ] {
        let choice = typed.split(' ').next().unwrap();
        for line in [format!("run --features elu {typed}"), format!("run {typed} --features favor:8")] {
            Folder::new().qkv(&line).misused(&[&format!("`--features` cannot be used with `{choice}`")]);
        }
    }
}

#[test]
fn maps_without_meaning_are_misuse() {
    let misused = |typed: &str, words: &[&str]| Folder::new().qkv(&format!("run {typed}")).misused(words);
    misused("--features gelu", &["--features", "expected `elu`, `relu` or `favor:COUNT`"]);
    misused("--features favor", &["--features", "expected"]);
    misused("--features favor:0", &["--features", "COUNT must be a whole number of at least 1"]);
    misused("--features elu --seed 3", &["`--seed` requires", "`--features favor:COUNT`"]);
}

#[test]
fn tensors_that_linear_attention_has_no_use_for_are_refused() {
    let [q, k, v] = qkv::<f32>();
    let with = |name: &str, shape: &[usize]| {
        let numbers = vec![0.5f32; shape.iter().product()];
        Input::of(&q, &k, &v).numbers(name, shape, &numbers).folder()
    };
    for (name, shape, hint) in [
        ("bias", &[7, 9][..], "`bias` or `table`"),
        ("table", &[1, 5], "`bias` or `table`"),
        ("scale", &[1], "`scale`"),
        ("sinks", &[4], "`sinks`"),
    ] {
        let hint = format!("hint: leave out either `--features` or the tensor {hint}");
        with(name, shape).fails("--features elu", &["linear attention cannot go with", &hint]);
    }
    with("center", &[2, 4, 7]).fails("--features elu", &["`center` was given, but"]);
    with("w", &[8, 8]).fails("--features elu", &["`w` was given, but"]);
    let masked = Input::of(&q, &k, &v).numbers("mask", &[9], &[1u8; 9]).folder();
    masked.fails("--features elu", &["linear attention cannot go with a mask of bits", "the tensor `mask`"]);
}

#[test]
fn linear_attention_is_computed_in_every_type() {
    let [q, k, v] = qkv::<f64>();
    let folder = Input::of(&q, &k, &v).folder();
    let truth = Reference::<f64>::exact();
    let truth = truth.forward(&Attention::linear(Features::Elu), Inputs::new(&q, &k, &v)).unwrap();
    for (name, dtype, tolerance) in [("f64", Dtype::F64, 1e-13), ("bf16", Dtype::BF16, 0.05), ("f16", Dtype::F16, 0.01)]
    {
        let written = folder.run(&format!("--features elu --dtype {name}"));
        assert_eq!(written["out"].dtype, dtype);
        written["out"].is(&[2, 4, 7, 8], truth.output.values.data(), tolerance);
    }
}

#[test]
fn more_features_than_any_memory_are_refused_without_a_file_too() {
    let [q, k, v] = qkv::<f32>();
    let folder = Input::of(&q, &k, &v).folder();
    for engine in ["exact", "reference"] {
        let typed = format!("--features favor:{} --engine {engine}", u64::MAX);
        Folder::new().qkv(&format!("run {typed}")).fails(&["GiB of memory"]);
        folder.fails(&typed, &["GiB of memory"]);
        folder.fails(&format!("--features favor:65537 --engine {engine}"), &["`favor` is 65537, expected 1 to 65536"]);
    }
    // There are no rows, so the tensors take no bytes; a state of features × values would take terabytes.
    let wide = [1, 1, 0, 1 << 21];
    let claim = |file: Input, name: &str| file.raw(name, Dtype::F32, &wide, Vec::new());
    let file = claim(claim(claim(Input::new(), "q"), "k"), "v");
    file.folder().fails("--features elu", &["GiB of memory"]);
}

#[test]
fn the_example_is_drawn_with_linear_attention_too() {
    let out = Folder::new().qkv("run --features relu --causal start").well();
    assert!(out.contains("she   1.00      ·      ·") && out.contains("engine   feature"), "{out}");
}
