//! `qkv train` and `qkv classify` with hierarchical attention: trained here in seconds, on documents whose class
//! depends on one word.

use crate::models::program::{Folder, json};

const RECIPE: &str = "name = 'tiny'
[data]
classes = 'train'
dev = 'dev'
[tokenizer]
kind = 'words'
size = 60
[model]
kind = 'han'
d_model = 16
hidden = 8
attention_width = 8
words = 12
sentences = 5
dropout = 0.0
[train]
steps = 80
tokens = 256
lr = 1e-2
warmup = 10
smoothing = 0.0
word_dropout = 0.05
average = 0.0
metric = 'exact'
validate = 40
save = 20
";

/// Documents of three sentences; one word of the second says which class it is.
pub fn documents() -> String {
    let line = |at: usize| {
        let (label, word) = [("good", "lovely"), ("bad", "dreadful")][at % 2];
        let fill = ["the plot is long", "we saw it at night", "it has two parts"];
        format!("{label}\t{} . <s> it was {word} to see <s> {} !\n", fill[at % 3], fill[(at + 1) % 3])
    };
    (0..48).map(line).collect()
}

/// A folder with a model `m` that knows good from bad.
pub fn trained() -> (Folder, String) {
    let folder = Folder::new();
    folder.put("r.toml", RECIPE.as_bytes());
    folder.put("train", documents().as_bytes());
    folder.put("dev", documents().as_bytes());
    let ran = folder.qkv("train r.toml --out m --log-format plain --threads 2");
    let log = ran.err.clone();
    assert!(ran.well().contains("best     accuracy 100.00 % on the dev set"), "{log}");
    (folder, log)
}

#[test]
fn documents_are_learnt_and_told_with_their_sentences_and_words() {
    let (folder, log) = trained();
    assert!(log.contains("48 texts with 2 labels") && log.contains("model    han"), "{log}");
    let texts = "We saw it at night. It was lovely to see! It has two parts.\nit was dreadful\n\nzyzzyva\n";
    let out = folder.qkv_on("classify --model m", texts).quietly();
    let labels: Vec<&str> = out.lines().map(|line| line.split('\t').next().unwrap()).collect();
    assert_eq!((labels.len(), &labels[..2]), (4, &["good", "bad"][..]), "{out}");

    let told = json(&folder.qkv_on("classify --model m --weights --json", texts).quietly());
    let sentences = told[0]["sentences"].as_array().unwrap();
    assert_eq!(sentences.len(), 3);
    let weight = |value: &serde_json::Value| value["weight"].as_f64().unwrap();
    let sum: f64 = sentences.iter().map(weight).sum();
    assert!((sum - 1.0).abs() < 1e-4, "{sum}");
    // The recurrent unit is bidirectional, so the deciding word's neighbors know of it, too: only the sentence is sure
    // to stand out.
    assert!(weight(&sentences[1]) > weight(&sentences[0]).max(weight(&sentences[2])), "{}", told[0]);
    let words = sentences[1]["words"].as_array().unwrap();
    let sum: f64 = words.iter().map(weight).sum();
    assert!((sum - 1.0).abs() < 1e-4 && words[2]["text"] == "lovely", "{}", told[0]);
    assert_eq!(told[2]["sentences"].as_array().unwrap().len(), 0);
    assert_eq!(told[3]["sentences"][0]["words"][0]["text"], "zyzzyva");

    let drawn = folder.qkv_on("classify --model m --weights", "it has two parts . <s> it was dreadful").quietly();
    assert!(drawn.starts_with("bad\t") && drawn.contains("it was dreadful\n"), "{drawn}");
    assert!(drawn.contains('█'), "{drawn}");
}

#[test]
fn a_run_that_was_stopped_ends_the_same_with_words_that_are_dropped() {
    let folder = Folder::new();
    folder.put("r.toml", RECIPE.as_bytes());
    folder.put("train", documents().as_bytes());
    folder.put("dev", documents().as_bytes());
    folder.qkv("train r.toml --out parts --quiet --threads 2 --set train.steps=20").quietly();
    folder.qkv("train --resume parts --quiet --threads 1 --set train.steps=40").quietly();
    folder.qkv("train r.toml --out whole --quiet --threads 1 --set train.steps=40").quietly();
    let weights = "checkpoints/00000040/weights.safetensors";
    assert!(folder.bytes(&format!("parts/{weights}")) == folder.bytes(&format!("whole/{weights}")), "{weights}");
    assert!(
        folder.qkv("inspect whole").quietly().contains("model    han: width 16, states of 8, 5 sentences of 12 words")
    );
}

#[test]
fn what_does_not_go_together_is_refused() {
    let folder = Folder::new();
    folder.put("r.toml", RECIPE.as_bytes());
    folder.put("train", b"Ada\tB-person\n");
    folder.put("dev", b"Ada\tB-person\n");
    folder.qkv("train r.toml --out a --set model.words=0").fails(&["`words` is 0"]);
    folder.qkv("train r.toml --out b --set train.word_dropout=1").fails(&["`train.word_dropout` is 1"]);
    folder.qkv("train r.toml --out c --set tokenizer.size=3").fails(&["no room beside special tokens"]);
    let tags = RECIPE.replace("classes = ", "tags = ").replace("'exact'", "'f1'");
    folder.put("t.toml", tags.as_bytes());
    folder.qkv("train t.toml --out d").fails(&["learns the classes of documents alone", "hint: "]);
    folder.qkv("classify --model m --image a.png --input b").misused(&["cannot be used with"]);
}
