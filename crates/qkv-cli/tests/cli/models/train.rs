//! `qkv train`: what it says, what it leaves, and what it refuses.

use crate::models::program::{Folder, RECIPE, json};

#[test]
fn a_recipe_becomes_a_folder_with_a_model() {
    let folder = Folder::with_recipe();
    let ran = folder.qkv("train tiny.toml --threads 1 --seed 7");
    for said in
        ["seed 7, 1 thread", ", cpu", "400 training pairs", "8 to measure on", "transformer", "runs/tiny, 40 steps"]
    {
        assert!(ran.err.contains(said), "no {said:?} in: {}", ran.err);
    }
    for said in [
        "step 10/40 · epoch",
        "loss",
        "lr",
        "gradient",
        "tokens/s",
        "left",
        "dev at step 20",
        "BLEU",
        "chrF",
        "exact match",
        " → ",
    ] {
        assert!(ran.err.contains(said), "no {said:?} in: {}", ran.err);
    }
    let out = ran.well();
    assert!(
        out.starts_with("best     loss ")
            && out.contains("model    runs/tiny\ntry      qkv translate --model runs/tiny '"),
        "{out}"
    );
    for file in
        ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json", "recipe.toml", "metrics.jsonl"]
    {
        assert!(folder.has(&format!("runs/tiny/{file}")), "no {file}");
    }
    assert!(folder.text("runs/tiny/recipe.toml").contains("seed = 7"));
    assert_eq!(json(&folder.text("runs/tiny/metrics.jsonl")).len(), 4 + 2);
}

#[test]
fn progress_is_json_where_that_is_asked_and_nothing_where_nothing_is() {
    let folder = Folder::with_recipe();
    let short = "train tiny.toml --set train.steps=10 --set train.validate=5 --set train.log=5";
    let ran = folder.qkv(&format!("{short} --out a --log-format json --json"));
    let events: Vec<String> = json(&ran.err).iter().map(|line| line["event"].as_str().unwrap().into()).collect();
    assert_eq!(events, ["begin", "step", "validation", "step", "validation", "saved", "end"]);
    let validation = &json(&ran.err)[2];
    for name in ["step", "loss", "perplexity", "bleu", "chrf", "exact", "samples", "better"] {
        assert!(!validation[name].is_null(), "no {name} in {validation}");
    }
    let end = &json(&ran.well())[0];
    assert_eq!((&end["step"], &end["metric"], &end["outcome"]), (&10.into(), &"loss".into(), &"finished".into()));
    assert!(end["example"]["alignment"]["weights"].is_array());
    let out = folder.qkv(&format!("{short} --out b --quiet")).quietly();
    assert!(out.contains("model    b\n"), "{out}");
    assert_eq!(
        folder.bytes("a/model.safetensors"),
        folder.bytes("b/model.safetensors"),
        "the same seed, the same bits"
    );
}

#[test]
fn threads_change_no_bit() {
    let folder = Folder::with_recipe();
    for threads in [1, 2, 3] {
        folder
            .qkv(&format!("train tiny.toml --set train.steps=6 --quiet --out {threads} --threads {threads}"))
            .quietly();
        assert_eq!(folder.bytes("1/model.safetensors"), folder.bytes(&format!("{threads}/model.safetensors")));
    }
}

#[test]
fn a_run_is_never_overwritten_silently() {
    let folder = Folder::with_recipe();
    folder.put("runs/tiny/precious", b"");
    folder.qkv("train tiny.toml").fails(&["`runs/tiny`", "hint: "]);
    folder.put("other/precious", b"");
    folder.qkv("train tiny.toml --out other").fails(&["`other`"]);
    folder.qkv("train other").fails(&["`other` is a folder", "hint: `qkv train --resume other`"]);
}

#[test]
fn a_recipe_that_is_wrong_is_refused_with_its_line() {
    let folder = Folder::new();
    folder.qkv("train none.toml").fails(&["cannot open `none.toml`", "hint: check the path"]);
    folder.put("a.toml", RECIPE.replace("steps = 40", "stpes = 40").as_bytes());
    folder.qkv("train a.toml").fails(&["a.toml:17", "stpes"]);
    folder.put("b.toml", b"name = 'b'\n[data\n");
    folder.qkv("train b.toml").fails(&["b.toml:2"]);
    folder.put("c.toml", RECIPE.as_bytes());
    folder.qkv("train c.toml --set train.lr=-1").fails(&["`train.lr` is -1, expected above 0"]);
    folder.qkv("train c.toml --set lr").fails(&["`lr` is no change", "hint: write it as `train.lr=3e-4`"]);
    folder.qkv("train c.toml --set model.heads=5").fails(&["heads"]);
    assert!(!folder.has("runs/tiny/model.safetensors"));
}

#[test]
fn a_corpus_that_is_wrong_is_refused_with_file_and_line() {
    let folder = Folder::new();
    let data = RECIPE.replace("task = 'copy'\npairs = 400\ndev_pairs = 8", "train = 'train.tsv'\ndev = 'dev.tsv'");
    folder.put("a.toml", data.as_bytes());
    folder.put("dev.tsv", b"a\tb\n");
    folder.qkv("train a.toml").fails(&["cannot open `train.tsv`"]);
    folder.put("train.tsv", b"a\tb\nno tab\n");
    folder
        .qkv("train a.toml")
        .fails(&["train.tsv:2: the line has no tab", "hint: each line is a source, a tab and a target"]);
    folder.put("train.tsv", b"a\tb\nc\xff\td\n");
    folder.qkv("train a.toml").fails(&["train.tsv:2: byte 2 of the line is not UTF-8"]);
    assert!(!folder.has("runs"), "nothing is left of a run that could not begin");
    folder.put("train.tsv", "好\tgood\n不好\tnot good\n".repeat(50).as_bytes());
    folder.put("dev.tsv", "好\tgood\n".as_bytes());
    folder.qkv("train a.toml --set train.steps=4").well();
}

#[test]
fn a_loss_that_is_no_number_stops_the_run_and_names_the_step() {
    let folder = Folder::with_recipe();
    let ran = folder.qkv("train tiny.toml --quiet --set train.lr=1e30 --set train.warmup=1 --set train.clip=0");
    ran.fails(&["at step ", "epoch 0, batch ", "hint: lower `train.lr`"]);
}

#[test]
fn misuse_is_told_as_misuse() {
    let folder = Folder::with_recipe();
    folder.qkv("train").misused(&["<RECIPE>"]);
    folder.qkv("train tiny.toml --log-format pretty").misused(&["--log-format", "auto, bar, plain, json"]);
    folder.qkv("train tiny.toml --quiet --log-format json").misused(&["`--quiet` cannot be used with `--log-format`"]);
    folder.qkv("train tiny.toml --resume --seed 3").misused(&["`--seed` cannot be used with `--resume`"]);
}

/// A recipe for pairs whose English has merges that can be left out.
const PAIRS: &str = "\
name = 'pairs'
[data]
train = 'pairs.tsv'
dev = 'pairs.tsv'
[tokenizer]
kind = 'bpe'
size = 340
[model]
kind = 'transformer'
d_model = 16
ffn_dim = 32
heads = 2
encoder_layers = 1
decoder_layers = 1
[train]
steps = 30
tokens = 400
bpe_dropout = 0.3
word_dropout = 0.1
save = 10
validate = 30
validate_sentences = 3
";

#[test]
fn merges_and_words_that_are_left_out_are_the_same_after_a_pause() {
    let folder = Folder::new();
    folder.put("r.toml", PAIRS.as_bytes());
    let pair = |at: usize| format!("好久不见 {at}\tlong time, no see, the longest of the long times {at}\n");
    folder.put("pairs.tsv", (0..60).map(pair).collect::<String>().as_bytes());
    folder.qkv("train r.toml --out parts --quiet --threads 2 --set train.steps=17").quietly();
    folder.qkv("train --resume parts --quiet --threads 1 --set train.steps=30").quietly();
    folder.qkv("train r.toml --out whole --quiet --threads 1").quietly();
    let file = "checkpoints/00000030/weights.safetensors";
    assert!(folder.bytes(&format!("parts/{file}")) == folder.bytes(&format!("whole/{file}")));
    for without in ["bpe", "word"] {
        folder.qkv(&format!("train r.toml --out {without} --quiet --set train.{without}_dropout=0")).quietly();
        assert!(folder.bytes(&format!("{without}/{file}")) != folder.bytes(&format!("whole/{file}")), "{without}");
    }
    folder
        .qkv("train r.toml --out c --set tokenizer.kind=\"words\"")
        .fails(&["leaves out merges, and the tokenizer has none", "set `tokenizer.kind` to `bpe`"]);
    folder.qkv("train r.toml --out d --set train.bpe_dropout=1").fails(&["`train.bpe_dropout` is 1"]);
}
