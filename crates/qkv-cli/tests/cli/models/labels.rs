//! `qkv classify`, `qkv tag` and `qkv answer`: trained here in a second, on data that anyone could read.

use crate::models::program::{Folder, json};

/// A recipe for an encoder so small that it trains at once.
fn recipe(data: &str, metric: &str) -> String {
    format!(
        "name = 'tiny'\n[data]\n{data} = 'train'\ndev = 'dev'\n[tokenizer]\nkind = 'bpe'\nsize = 320\n[model]\nkind = 'encoder'\n\
         d_model = 32\nffn_dim = 64\nheads = 2\nlayers = 1\nmax_positions = 40\ndropout = 0.0\nattention_dropout = 0.0\n[train]\n\
         steps = 150\ntokens = 256\nlr = 5e-3\nwarmup = 10\nsmoothing = 0.0\naverage = 0.0\nmetric = '{metric}'\nvalidate = 75\n\
         save = 50\n"
    )
}

fn trained(data: &str, metric: &str, text: &str) -> (Folder, String) {
    let folder = Folder::new();
    folder.put("r.toml", recipe(data, metric).as_bytes());
    folder.put("train", text.as_bytes());
    folder.put("dev", text.as_bytes());
    let ran = folder.qkv("train r.toml --out m --log-format plain --threads 2");
    let log = ran.err.clone();
    ran.well();
    (folder, log)
}

#[test]
fn a_class_is_learnt_and_told() {
    let lines: String = (0..40)
        .map(|at| {
            let (label, word) = [("good", "lovely"), ("bad", "dreadful")][at % 2];
            format!("{label}\tthe film number {at} was {word} to see\n")
        })
        .collect();
    let (folder, log) = trained("classes", "exact", &lines);
    assert!(log.contains("40 texts with 2 labels") && log.contains("accuracy 100.00 %"), "{log}");
    let out = folder.qkv_on("classify --model m", "it was lovely\nit was dreadful\n").quietly();
    let labels: Vec<&str> = out.lines().map(|line| line.split('\t').next().unwrap()).collect();
    assert_eq!(labels, ["good", "bad"]);
    let told = json(&folder.qkv_on("classify --model m --json", "it was lovely\n").quietly());
    assert!(told[0]["probabilities"]["good"].as_f64().unwrap() > 0.5, "{told:?}");
    folder.qkv("tag --model m hello").fails(&["trained for classes, not for tags"]);
    folder.qkv("classify hello").misused(&["--model <DIR>"]);
    // A resumed run ends the same.
    folder.qkv("train r.toml --out parts --quiet --threads 1 --set train.steps=60").quietly();
    folder.qkv("train --resume parts --quiet --threads 1 --set train.steps=150").quietly();
    folder.qkv("train r.toml --out whole --quiet --threads 1").quietly();
    let weights = "checkpoints/00000150/weights.safetensors";
    assert!(folder.bytes(&format!("parts/{weights}")) == folder.bytes(&format!("whole/{weights}")), "{weights}");
    assert!(folder.qkv("inspect m").quietly().contains("classifier.weight"));
}

#[test]
fn a_tag_is_learnt_for_each_word() {
    let names = ["Ada", "Oslo", "Alan", "Rome"];
    let sentences: String = (0..40)
        .map(|at| {
            let (person, place) = (names[at % 2 * 2], names[at / 2 % 2 * 2 + 1]);
            format!("{person}\tB-person\nLovelace\tI-person\nflew\tO\nto\tO\n{place}\tB-place\n\n")
        })
        .collect();
    let (folder, log) = trained("tags", "f1", &sentences);
    assert!(log.contains("entity F1 100.00"), "{log}");
    let out = folder.typed(&["tag", "--model", "m", "Ada Lovelace flew to Rome"], "").quietly();
    assert_eq!(out, "Ada\tB-person\nLovelace\tI-person\nflew\tO\nto\tO\nRome\tB-place\n\n");
    let told = json(&folder.typed(&["tag", "--model", "m", "--json", "to Oslo"], "").quietly());
    assert_eq!(told[0]["tags"].as_array().unwrap().len(), 2);
    assert_eq!(folder.qkv_on("tag --model m", "\n").quietly(), "\n", "no word has no tag");
}

#[test]
fn an_answer_is_found_in_its_text() {
    let questions: Vec<String> = (0..24)
        .map(|at| {
            let place = ["Oslo", "Rome", "Bern", "Kyiv"][at % 4];
            let context = format!("In year {at} Ada flew to {place} in the rain");
            let start = context.find(place).unwrap();
            format!(
                r#"{{"context":"{context}","qas":[{{"id":"{at}","question":"Where did Ada fly?","answers":[{{"text":"{place}","answer_start":{start}}}]}}]}}"#
            )
        })
        .collect();
    let file = format!(r#"{{"version":"1.1","data":[{{"title":"t","paragraphs":[{}]}}]}}"#, questions.join(","));
    let (folder, log) = trained("answers", "f1", &file);
    assert!(log.contains("exact match 100.00 %"), "{log}");
    let asked = ["answer", "--model", "m", "Where did Ada fly?"];
    let context = "In year 3 Ada flew to Rome in the rain";
    let out = folder.typed(&[&asked[..], &["--context", context]].concat(), "").quietly();
    assert_eq!(out, "Rome\n");
    folder.put("text", context.as_bytes());
    assert_eq!(out, folder.typed(&[&asked[..], &["--input", "text"]].concat(), "").quietly());
    let line = format!("Where did Ada fly?\t{context}\n");
    let told = json(&folder.typed(&["answer", "--model", "m", "--json"], line).quietly());
    assert_eq!((told[0]["answer"].as_str(), told[0]["start"].as_u64()), (Some("Rome"), Some(22)));
    // A text too long for the model is read in windows.
    let long = format!("{} {context}", "Nothing happened that day.".repeat(30));
    assert_eq!(folder.typed(&[&asked[..], &["--context", &long]].concat(), "").quietly().lines().count(), 1);
    folder.typed(&asked, "").misused(&["requires `--context TEXT`, `--input FILE` or `--image FILE`"]);
}

#[test]
fn data_that_is_wrong_is_refused_with_its_place() {
    let folder = Folder::new();
    folder.put("r.toml", recipe("tags", "f1").as_bytes());
    folder.put("train", b"Ada\tB-person\nLovelace\n");
    folder.put("dev", b"a\tO\n");
    folder.qkv("train r.toml --out a").fails(&["train:2: the line has one column"]);
    folder.put("train", b"");
    folder.qkv("train r.toml --out a").fails(&["nothing to learn from"]);
    folder.put("train", b"Ada\tB-person\n");
    folder.qkv("train r.toml --out b --set model.kind=gpt").fails(&["a gpt cannot learn to read labels"]);
    folder
        .qkv("train r.toml --out a --set train.metric=bleu")
        .fails(&["`train.metric` is bleu", "hint: set it to `f1`"]);
    folder.put("r.toml", recipe("answers", "f1").as_bytes());
    folder.put("train", br#"{"data": 3}"#);
    folder.qkv("train r.toml --out a").fails(&["train:1: "]);
    folder.put("r.toml", recipe("classes", "exact").as_bytes());
    folder.put("train", b"no tab here\n");
    folder.qkv("train r.toml --out a").fails(&["train:1: the line has no tab"]);
}
