//! `--select` and what comes with it: the chosen keys, their probability, and the gradients through a choice.

use crate::run::program::{Folder, Input, Written, noise, qkv};
use qkv::reference::{Forward, Reference};
use qkv::{Attention, Inputs, Mask, Place, Tensor, Upstream};
use safetensors::Dtype;

fn folder() -> Folder {
    let [q, k, v] = qkv::<f32>();
    Input::of(&q, &k, &v).folder()
}

/// The seed that is typed, or the default.
fn seed_of(typed: &str) -> u64 {
    let mut words = typed.split(' ').skip_while(|word| *word != "--seed").skip(1);
    words.next().map_or(0, |seed| seed.parse().unwrap())
}

fn definition(attention: &Attention, seed: u64) -> Forward<f64> {
    let [q, k, v] = qkv::<f32>();
    Reference::<f64>::exact().forward(attention, Inputs::new(&q, &k, &v).seed(seed)).unwrap()
}

/// Checks that typed options match a description: everything that is written, on either engine.
fn holds(typed: &str, described: Attention) {
    let truth = definition(&described, seed_of(typed));
    for engine in ["exact", "reference"] {
        println!("{typed} --engine {engine}");
        let written = folder().run(&format!("{typed} --weights --engine {engine}"));
        written["out"].is(&[2, 4, 7, 8], truth.output.values.data(), 2e-5);
        let (name, of_rows) = match &truth.output.threshold {
            Some(threshold) => ("threshold", threshold),
            None => ("lse", &truth.output.lse),
        };
        written[name].is(&[2, 4, 7], of_rows.data(), 2e-5);
        written["weights"].is(&[2, 4, 7, 9], truth.weights.data(), 2e-5);
        assert_eq!(written.names().contains(&"chosen"), truth.output.chosen.is_some());
        assert_eq!(written.names().contains(&"log_prob"), truth.output.log_prob.is_some());
        if let Some(chosen) = &truth.output.chosen {
            let keys: Vec<f64> = chosen.data().iter().map(|&j| j as f64).collect();
            assert_eq!((written["chosen"].dtype, &written["chosen"].data), (Dtype::I64, &keys));
            assert_eq!(written["chosen"].shape, chosen.shape());
        }
        if let Some(log_prob) = &truth.output.log_prob {
            written["log_prob"].is(&[2, 4, 7], log_prob.data(), 2e-5);
        }
    }
}

#[test]
fn every_selection_is_the_librarys() {
    holds("--select soft", Attention::scaled_dot());
    holds("--select hard", Attention::scaled_dot().hard());
    holds("--select sample", Attention::scaled_dot().sample());
    holds("--select sample --seed 7", Attention::scaled_dot().sample());
    holds("--select sample --straight-through", Attention::scaled_dot().sample().straight_through());
    holds("--select top-k:3", Attention::scaled_dot().top_k(3));
    holds("--select sparsemax", Attention::scaled_dot().sparsemax());
}

#[test]
fn selections_go_with_scores_and_masks() {
    let masked = Attention::cosine().scale(5.0).mask(Mask::causal() & Mask::window(3, 0)).place(Place::End);
    let typed = "--score cosine --scale 5 --causal end --window 3,0";
    holds(&format!("{typed} --select hard"), masked.clone().hard());
    holds(&format!("{typed} --select top-k:2"), masked.clone().top_k(2));
    holds(&format!("{typed} --select sparsemax"), masked.sparsemax());
}

#[test]
fn a_seed_gives_the_same_choice_again_and_another_seed_another() {
    let folder = folder();
    let chosen = |typed: &str| folder.run(&format!("--select sample {typed}"))["chosen"].data.clone();
    assert_eq!(chosen(""), chosen("--seed 0"));
    assert_ne!(chosen("--seed 1"), chosen("--seed 2"));
}

#[test]
fn where_there_is_nothing_to_choose_minus_one_is_written() {
    let [q, k, v] = qkv::<f32>();
    let folder = Input::of(&q, &k, &v).numbers("key_lengths", &[2], &[0, 2]).folder();
    for engine in ["exact", "reference"] {
        let hard = folder.run(&format!("--select hard --engine {engine}"));
        assert_eq!(hard["chosen"].data[..28], [-1.0; 28]);
        assert_eq!(hard["log_prob"].data[..28], [0.0; 28]);
        let top = folder.run(&format!("--select top-k:3 --engine {engine}"));
        assert_eq!(top["chosen"].shape, [2, 4, 7, 3]);
        assert!(top["chosen"].data[84..].chunks(3).all(|keys| keys == [-1.0, 0.0, 1.0]));
    }
}

#[test]
fn more_keys_than_there_are_is_all_of_them() {
    let folder = folder();
    let soft = folder.run("");
    let all = folder.run(&format!("--select top-k:{}", u64::MAX));
    all["out"].is(&[2, 4, 7, 8], &soft["out"].data, 2e-6);
    assert_eq!(all["chosen"].shape, [2, 4, 7, 9]);
}

/// Checks the gradients of both engines, with these upstream gradients, against the definition's.
fn gradients_hold(typed: &str, described: Attention, names: &[&str]) -> Written {
    let [q, k, v] = qkv::<f32>();
    let [d_lse, d_log_prob] = [5, 6].map(|seed| noise::<f32, 3>([2, 4, 7], seed));
    let d_out: Tensor<f32, 4> = noise([2, 4, 7, 8], 4);
    let mut file = Input::of(&q, &k, &v).tensor("d_out", &d_out);
    let mut upstream = Upstream::new(&d_out);
    if names.contains(&"d_lse") {
        (file, upstream) = (file.tensor("d_lse", &d_lse), upstream.lse(d_lse.data()));
    }
    if names.contains(&"d_log_prob") {
        (file, upstream) = (file.tensor("d_log_prob", &d_log_prob), upstream.log_prob(d_log_prob.data()));
    }
    let definition = Reference::<f64>::exact();
    let inputs = Inputs::new(&q, &k, &v).seed(seed_of(typed));
    let forward = definition.forward(&described, inputs).unwrap();
    let truth = definition.backward(&described, inputs, &forward, upstream).unwrap();
    let folder = file.folder();
    let [exact, _] = ["exact", "reference"].map(|engine| {
        println!("{typed} {names:?} --engine {engine}");
        let written = folder.run(&format!("{typed} --engine {engine}"));
        written["d_q"].is(&truth.q.shape(), truth.q.data(), 5e-5);
        written["d_k"].is(&truth.k.shape(), truth.k.data(), 5e-5);
        written["d_v"].is(&truth.v.shape(), truth.v.data(), 5e-5);
        written
    });
    exact
}

#[test]
fn every_selection_has_its_gradients() {
    let plain = Attention::scaled_dot;
    gradients_hold("--select top-k:3", plain().top_k(3), &[]);
    gradients_hold("--select sparsemax", plain().sparsemax(), &[]);
    gradients_hold("--select hard --straight-through", plain().hard().straight_through(), &[]);
    gradients_hold("--select sample --seed 3 --straight-through", plain().sample().straight_through(), &[]);
}

#[test]
fn without_straight_through_and_log_prob_scores_learn_nothing_from_a_choice() {
    let written = gradients_hold("--select hard", Attention::scaled_dot().hard(), &[]);
    assert!(written["d_q"].data.iter().chain(&written["d_k"].data).all(|&d| d == 0.0));
    assert!(written["d_v"].data.iter().any(|&d| d != 0.0));
}

#[test]
fn the_log_probability_and_the_log_sum_exp_take_gradients() {
    let plain = Attention::scaled_dot;
    gradients_hold("", plain(), &["d_lse"]);
    gradients_hold("--select top-k:3", plain().top_k(3), &["d_lse"]);
    gradients_hold("--select hard", plain().hard(), &["d_log_prob"]);
    gradients_hold("--select sample --seed 9", plain().sample(), &["d_lse", "d_log_prob"]);
    let both = plain().sample().straight_through();
    gradients_hold("--select sample --seed 9 --straight-through", both, &["d_lse", "d_log_prob"]);
}

#[test]
fn choices_are_written_in_every_type() {
    for (dtype, sums) in [("f64", Dtype::F64), ("bf16", Dtype::F32), ("f16", Dtype::F32)] {
        let written = folder().run(&format!("--select sample --dtype {dtype}"));
        assert_eq!((written["chosen"].dtype, written["log_prob"].dtype), (Dtype::I64, sums));
    }
}

#[test]
fn upstream_gradients_that_have_no_place_are_refused() {
    let [q, k, v] = qkv::<f32>();
    let d_out = noise::<f32, 4>([2, 4, 7, 8], 4);
    let row = |name: &str| Input::of(&q, &k, &v).tensor(name, &noise::<f32, 3>([2, 4, 7], 5));
    row("d_lse").folder().fails("", &["`d_out` is missing: `d_lse` needs it"]);
    row("d_log_prob").folder().fails("--select hard", &["`d_out` is missing: `d_log_prob` needs it"]);
    let with = |name: &str| row(name).tensor("d_out", &d_out).folder();
    with("d_lse").fails("--select sparsemax", &["`d_lse` was given, but", "sparsemax"]);
    for typed in ["", "--select top-k:2", "--select sparsemax"] {
        with("d_log_prob").fails(typed, &["`d_log_prob` was given, but", "hint: `d_log_prob` is for `--select hard`"]);
    }
    let file = Input::of(&q, &k, &v).tensor("d_out", &d_out);
    for (name, shape) in [("d_lse", &[2, 7, 4][..]), ("d_log_prob", &[1, 4, 7])] {
        let wrong = file.clone().numbers(name, shape, &vec![0f32; shape.iter().product()]).folder();
        wrong.fails("--select hard", &[&format!("`{name}` has shape {shape:?}, expected [2, 4, 7], as `q` has")]);
    }
    file.clone().numbers("d_lse", &[56], &[0f32; 56]).folder().fails("", &["`d_lse` has shape [56], expected 3 axes"]);
    file.numbers("d_lse", &[2, 4, 7], &[0i32; 56]).folder().fails("", &["`d_lse` is of type I32"]);
}

#[test]
fn sinks_go_with_softmax_alone() {
    let [q, k, v] = qkv::<f32>();
    let folder = Input::of(&q, &k, &v).tensor("sinks", &noise::<f32, 1>([4], 5)).folder();
    folder.fails("--select hard", &["a sink cannot go with", "hint: leave out either the tensor `sinks`"]);
    folder.run("--select soft");
}
