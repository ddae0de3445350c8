//! Wrong usage of the command line: exit code 2, and a message that names the option.

use crate::run::program::{Folder, Input, qkv};

fn misused(typed: &str, words: &[&str]) {
    Folder::new().qkv(&format!("run {typed}")).misused(words);
}

#[test]
fn what_is_not_a_choice_is_misuse() {
    misused("--socre dot", &["--socre", "--score"]);
    misused("in.safetensors", &["in.safetensors"]);
    misused("--input", &["--input <FILE>"]);
    misused("--score dot --score cosine", &["--score"]);
    Folder::new().qkv("walk").misused(&["walk"]);
    assert_eq!(Folder::new().qkv("").code, Some(2));
}

#[test]
fn a_word_that_is_none_of_the_words_is_misuse() {
    misused("--score luong", &["--score", "dot, scaled-dot, general, additive, cosine, distance"]);
    misused("--causal middle", &["--causal", "start, end"]);
    misused("--engine fast", &["--engine", "auto, reference, exact"]);
    misused("--dtype f8", &["--dtype", "f32, f64, bf16, f16"]);
    misused("--place middle", &["--place", "expected `start`, `end` or a whole number"]);
}

#[test]
fn a_number_without_meaning_is_misuse() {
    for bad in ["nan", "inf", "-inf", "1e999", "x", ""] {
        misused(&format!("--scale={bad}"), &["--scale <X>"]);
    }
    for bad in ["0", "-1", "nan", "inf"] {
        misused(&format!("--temperature {bad}"), &["--temperature <T>", "a finite number above 0"]);
        misused(&format!("--softcap {bad}"), &["--softcap <C>", "a finite number above 0"]);
    }
    for bad in ["1", "-0.1", "nan", "2"] {
        misused(&format!("--dropout {bad}"), &["--dropout <P>", "a probability, at least 0 and less than 1"]);
    }
    for bad in ["0", "-1", "1.5", "1025", "99999999999999999999"] {
        misused(&format!("--threads {bad}"), &["--threads <N>"]);
    }
    misused("--dropout 0.1 --seed -1", &["--seed <SEED>"]);
}

#[test]
fn windows_and_patterns_without_meaning_are_misuse() {
    misused("--window 3", &["--window <LEFT,RIGHT>", "two whole numbers"]);
    misused("--window=-1,0", &["--window"]);
    misused("--pattern strided:0", &["--pattern", "at least 1"]);
    misused("--pattern fixed:4,5", &["--pattern", "C must be at least 1 and at most S"]);
    misused("--pattern bigbird:0,1,1,1,1", &["--pattern", "at least 1 token"]);
    misused("--pattern dilated:3", &["--pattern", "`strided:S`, `fixed:S,C`"]);
    misused("--pattern lsh:3,1,0", &["--pattern", "an even number of at least 2"]);
    misused("--pattern lsh:4,0,0", &["--pattern", "at least 1 round"]);
    misused("--pattern lsh:4,1", &["--pattern", "`lsh:BUCKETS,ROUNDS,SEED`"]);
    misused("--local predictive:0", &["--local", "D must be a whole number of at least 1"]);
    misused("--local monotonic", &["--local", "expected `predictive:D`"]);
}

#[test]
fn choices_that_contradict_each_other_are_misuse() {
    misused("--causal end --place start", &["`--causal end` cannot be used with `--place start`"]);
    misused("--causal end --place 3", &["`--causal end` cannot be used with `--place 3`"]);
    misused("--causal start --place end", &["`--causal start` cannot be used with `--place end`"]);
}

#[test]
fn what_goes_with_softmax_alone_is_misuse_with_another_selection() {
    for (typed, told) in [("hard", "hard"), ("sample", "sample"), ("top-k:2", "top-k:K"), ("sparsemax", "sparsemax")] {
        let told = format!("`--dropout` cannot be used with `--select {told}`");
        misused(&format!("--select {typed} --dropout 0.1"), &[&told]);
        let told = told.replace("dropout", "local");
        misused(&format!("--select {typed} --local predictive:2"), &[&told]);
    }
    Folder::new().qkv("run --select soft --dropout 0.1").well();
}

#[test]
fn selections_without_meaning_are_misuse() {
    misused("--select argmax", &["--select", "`soft`, `hard`, `sample`, `top-k:K` or `sparsemax`"]);
    misused("--select top-k:0", &["--select", "K must be a whole number of at least 1"]);
    misused("--select top-k", &["--select", "expected `soft`"]);
}

#[test]
fn choices_that_need_another_say_which() {
    misused("--seed 3", &["`--seed` requires `--dropout`, `--select sample` or `--features favor:COUNT`"]);
    misused("--seed 3 --select hard", &["`--seed` requires"]);
    misused("--straight-through", &["`--straight-through` requires `--select hard` or `--select sample`"]);
    misused("--straight-through --select soft", &["`--straight-through` requires"]);
    misused("--straight-through --select top-k:2", &["`--straight-through` requires"]);
    misused("--weights", &["`--weights` requires `--output`"]);
}

#[test]
fn more_global_positions_than_there_are_positions_is_a_failure_not_a_bomb() {
    let [q, k, v] = qkv::<f32>();
    let folder = Input::of(&q, &k, &v).folder();
    folder.run("--pattern longformer:2,9");
    folder.qkv("run --input in.safetensors --pattern longformer:2,10").fails(&["10 global positions", "at most 9"]);
    let endless = "run --input in.safetensors --pattern longformer:2,18446744073709551615";
    folder.qkv(endless).fails(&["at most 9"]);
}

#[test]
fn numbers_as_large_as_can_be_typed_are_harmless() {
    let [q, k, v] = qkv::<f32>();
    let folder = Input::of(&q, &k, &v).folder();
    let most = u64::MAX;
    let plain = folder.run("");
    assert_eq!(folder.run(&format!("--window {most},{most}")), plain);
    assert_eq!(folder.run(&format!("--pattern strided:{most}")), plain);
    assert_eq!(folder.run(&format!("--pattern longformer:{most},0")), plain);
    assert_eq!(folder.run(&format!("--pattern bigbird:{most},{most},{most},{most},{most}")), plain);
    folder.qkv(&format!("run --input in.safetensors --causal start --place {}", i64::MAX)).fails(&["`place` is"]);
    folder.qkv(&format!("run --input in.safetensors --causal start --place {}", i64::MIN)).fails(&["`place` is"]);
}
