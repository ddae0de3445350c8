//! `qkv eval`: what it measures, and on what.

use crate::models::program::{Folder, json, model};

#[test]
fn a_model_is_measured_on_pairs() {
    let folder = Folder::new();
    folder.put("dev.tsv", b"abc\tabc\n12\t12\nzz9\tzz9\n");
    let typed = format!("eval --model {} dev.tsv --greedy", model());
    let out = folder.qkv(&format!("{typed} --output out.txt")).quietly();
    for said in [
        "BLEU|nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:qkv-",
        "chrF2|nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:qkv-",
        "exact match = ",
        "perplexity = ",
        "sentences/s (3 in ",
    ] {
        assert!(out.contains(said), "no {said:?} in: {out}");
    }
    let translated = folder.qkv_on(&format!("translate --model {} --greedy", model()), "abc\n12\nzz9\n").quietly();
    assert_eq!(folder.text("out.txt"), translated, "in the order of the file");
    let report = &json(&folder.qkv(&format!("{typed} --json")).quietly())[0];
    let (loss, perplexity) = (report["loss"].as_f64().unwrap(), report["perplexity"].as_f64().unwrap());
    assert!(loss > 0.0 && (loss.exp() / perplexity - 1.0).abs() < 1e-6);
    assert_eq!(report["sentences"], 3);
    assert!(report["sentences_per_second"].as_f64().unwrap() > 0.0);
}

#[test]
fn two_files_are_measured_without_a_model() {
    let folder = Folder::new();
    folder.put("out.txt", b"Long time no see.\nHow are you today?\n");
    folder.put("ref.txt", b"Long time, no see.\r\nHow are you today?");
    let out = folder.qkv("eval --hypotheses out.txt --references ref.txt").quietly();
    assert!(out.contains("= 66.50 100.0/87.5/66.7/50.0 (BP = 0.905 ratio = 0.909 hyp_len = 10 ref_len = 11)"), "{out}");
    assert!(out.contains("exact match = 50.00 % (1 of 2)") && !out.contains("perplexity"), "{out}");
    let report =
        &json(&folder.qkv("eval --hypotheses out.txt --references ref.txt --tokenize char --json").quietly())[0];
    assert!(report["bleu"]["signature"].as_str().unwrap().contains("tok:char"));
    assert_eq!((&report["exact"]["right"], report.get("loss")), (&1.into(), None));
}

#[test]
fn what_cannot_be_measured_is_refused() {
    let folder = Folder::new();
    folder.put("one.txt", b"a\n");
    folder.put("two.txt", b"a\nb\n");
    folder.qkv("eval --hypotheses one.txt --references two.txt").fails(&["1 outputs and 2 references"]);
    folder.put("dev.tsv", b"a\tb\nc\n");
    folder.qkv(&format!("eval --model {} dev.tsv", model())).fails(&["dev.tsv:2: the line has no tab"]);
    folder.put("long.tsv", format!("a\tb\na\t{}\n", "a".repeat(99)).as_bytes());
    folder.qkv(&format!("eval --model {} long.tsv", model())).fails(&["long.tsv:2: the target has 99 tokens"]);
    folder.qkv("eval").misused(&["requires DATA"]);
    folder.qkv("eval --hypotheses one.txt").misused(&["`--hypotheses` requires `--references`"]);
    folder.qkv("eval dev.tsv --hypotheses one.txt --references two.txt").misused(&["cannot be used with"]);
}
