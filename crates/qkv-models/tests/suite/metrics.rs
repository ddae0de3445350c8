//! The metrics agree with sacrebleu, number by number. `golden/make.py` made the values and documents the lines.

use qkv_models::metrics::{bleu::Bleu, chrf::Chrf, exact::Exact, words::Words};
use serde_json::Value;
use std::sync::LazyLock;

static CASES: LazyLock<Vec<Value>> = LazyLock::new(|| {
    let file: Value = serde_json::from_str(include_str!("../golden/metrics.json")).expect("the file is JSON");
    file["cases"].as_array().expect("a list of cases").clone()
});

const RULES: [Words; 5] = [Words::V13a, Words::Chinese, Words::International, Words::Characters, Words::Spaces];

fn lines(value: &Value) -> Vec<&str> {
    value.as_array().expect("a list").iter().map(|line| line.as_str().expect("text")).collect()
}

fn close(found: f64, golden: &Value, what: &str) {
    let golden = golden.as_f64().expect("a number");
    assert!((found - golden).abs() <= 1e-12 * golden.abs().max(1.0), "{what}: {found}, sacrebleu has {golden}");
}

#[test]
fn words_are_cut_as_sacrebleu_cuts_them() {
    for case in &*CASES {
        let text = [lines(&case["outputs"]), lines(&case["references"])].concat();
        for words in RULES {
            for (line, golden) in text.iter().zip(lines(&case["bleu"][words.name()]["words"])) {
                assert_eq!(words.cut(line), golden, "{} of {line:?}", words.name());
            }
        }
    }
}

#[test]
fn bleu_is_the_bleu_of_sacrebleu() {
    for case in &*CASES {
        for words in RULES {
            let golden = &case["bleu"][words.name()];
            let bleu = Bleu::of(&lines(&case["outputs"]), &lines(&case["references"]), words).expect("a score");
            let what = format!("{} with {}", case["name"], words.name());
            close(bleu.score, &golden["score"], &what);
            close(bleu.brevity, &golden["brevity"], &what);
            for (n, precision) in bleu.precisions.into_iter().enumerate() {
                close(precision, &golden["precisions"][n], &what);
            }
            let lengths =
                [&golden["length"], &golden["reference_length"]].map(|n| n.as_u64().expect("a count") as usize);
            assert_eq!([bleu.length, bleu.reference_length], lengths, "{what}");
            let signature = format!("{}|version:2.6.0", bleu.signature());
            assert_eq!(golden["signature"], signature);
        }
    }
}

#[test]
fn chrf_is_the_chrf_of_sacrebleu() {
    for case in &*CASES {
        let chrf = Chrf::of(&lines(&case["outputs"]), &lines(&case["references"])).expect("a score");
        close(chrf.score, &case["chrf"], &case["name"].to_string());
        assert_eq!(case["chrf_signature"], format!("{}|version:2.6.0", chrf.signature()));
    }
}

#[test]
fn corpora_of_different_lengths_are_refused() {
    let error = Bleu::of(&["a", "b"], &["a"], Words::V13a).expect_err("one is missing");
    assert_eq!(error.to_string(), "there are 2 outputs and 1 references");
    assert!(Chrf::of(&["a", "b"], &["a"]).is_err() && Exact::of::<&str, &str>(&[], &[]).is_err());
}
