//! What the program prints: JSON for programs, lines for people, an example for newcomers; help and a page from one
//! table.

use crate::run::program::{Folder, Input, noise, qkv};
use qkv::{Attention, Bias, Inputs, Mask, Place};
use serde_json::{Value, json};
use std::io::Read;
use std::process::Stdio;

fn file() -> Input {
    let [q, k, v] = qkv::<f32>();
    Input::of(&q, &k, &v).numbers("key_lengths", &[2], &[9u8, 4])
}

fn parsed(out: &str) -> Value {
    assert_eq!(out.lines().count(), 1);
    serde_json::from_str(out).unwrap()
}

#[test]
fn the_json_report_says_what_was_computed_and_how() {
    let folder = file().tensor("d_out", &noise::<f32, 4>([2, 4, 7, 8], 4)).folder();
    let typed = "run --input in.safetensors --output out.safetensors --json --causal end --alibi --threads 3";
    let report = parsed(&folder.qkv(typed).well());
    assert_eq!(report["input"], "in.safetensors");
    assert_eq!(report["output"], "out.safetensors");
    assert_eq!(report["dtype"], "f32");
    assert_eq!(report["engine"], "exact");
    assert_eq!(report["isa"], qkv::Isa::best().name());
    assert_eq!(report["threads"], 3);
    assert_eq!(report["shapes"]["q"], json!([2, 4, 7, 8]));
    assert_eq!(report["shapes"]["key_lengths"], json!([2]));
    assert_eq!(report["shapes"]["lse"], json!([2, 4, 7]));
    assert_eq!(report["shapes"]["d_v"], json!([2, 2, 9, 8]));
    assert!(report["milliseconds"]["forward"].as_f64().unwrap() > 0.0);
    assert!(report["milliseconds"]["backward"].as_f64().unwrap() > 0.0);
    if cfg!(target_os = "linux") {
        assert!(report["peak_memory_bytes"].as_u64().unwrap() > 1 << 20);
    }
}

#[test]
fn the_reported_description_is_one_that_the_library_reads_back() {
    let out = file().folder().qkv("run --input in.safetensors --json --causal end --window 3,0 --alibi").well();
    let described: Attention = serde_json::from_value(parsed(&out)["attention"].clone()).unwrap();
    let mask = Mask::causal() & Mask::window(3, 0) & Mask::lengths();
    assert_eq!(described, Attention::scaled_dot().mask(mask).bias(Bias::alibi()).place(Place::End));
}

#[test]
fn tiles_are_those_of_the_library() {
    let x = noise::<f32, 4>([1, 2, 600, 4], 1);
    let folder = Input::of(&x, &x, &x).folder();
    let report = parsed(&folder.qkv("run --input in.safetensors --json --window 64,0").well());
    let tiles = Attention::scaled_dot().mask(Mask::window(64, 0)).tiles(Inputs::new(&x, &x, &x)).unwrap();
    assert_eq!(report["tiles"], serde_json::to_value(tiles).unwrap());
    assert!(tiles.empty > 0 && tiles.partial > 0);
    assert_eq!(report["output"], Value::Null);
    assert_eq!(report["milliseconds"]["backward"], Value::Null);
}

#[test]
fn a_person_gets_a_few_lines() {
    let folder = file().folder();
    let out = folder.qkv("run --input in.safetensors --output out.safetensors --engine reference").well();
    for words in ["engine   reference, f32", "q [2, 4, 7, 8]", "tiles ", " ms forward", "written  out.safetensors"] {
        assert!(out.contains(words), "no {words:?} in: {out}");
    }
    assert!(out.lines().count() < 12);
    let out = folder.qkv("run --input in.safetensors").well();
    assert!(out.contains("nothing; `--output FILE`"), "{out}");
}

#[test]
fn without_a_file_an_example_is_drawn() {
    let folder = Folder::new();
    let out = folder.qkv("run").well();
    for words in ["river", "cash", "money", "near river", "q [2, 1, 6, 4]"] {
        assert!(out.contains(words), "no {words:?} in: {out}");
    }
    assert!(folder.names().is_empty());
    let causal = folder.qkv("run --causal start").well();
    assert!(causal.contains("she   1.00      ·      ·"), "{causal}");
}

#[test]
fn the_examples_tensors_can_be_kept() {
    let folder = Folder::new();
    let report = parsed(&folder.qkv("run --json --output out.safetensors --weights --dtype f64").well());
    assert_eq!((&report["input"], &report["dtype"]), (&Value::Null, &json!("f64")));
    let written = folder.read("out.safetensors");
    assert_eq!(written.names(), ["lse", "out", "weights"]);
    assert_eq!(written["weights"].shape, [2, 1, 6, 6]);
    folder.qkv("run --score general").fails(&["`w` is missing", "hint: the built-in example has"]);
}

#[test]
fn help_tells_every_choice_and_every_tensor() {
    let choices = [
        "--input",
        "--output",
        "--weights",
        "--score",
        "--scale",
        "--temperature",
        "--softcap",
        "--alibi",
        "--features",
        "--causal",
        "--window",
        "--pattern",
        "--local",
        "--place",
        "--select",
        "--straight-through",
        "--dropout",
        "--seed",
        "--engine",
        "--dtype",
        "--threads",
        "--json",
    ];
    let help = Folder::new().qkv("run --help").well();
    let short = Folder::new().qkv("run -h").well();
    let page = qkv_cli::page();
    for choice in choices {
        for text in [&help, &short, &page] {
            assert!(text.contains(choice), "no {choice} in: {text}");
        }
    }
    for value in [
        "strided:S",
        "fixed:S,C",
        "longformer:W,G",
        "bigbird:B,W,G,R,SEED",
        "start|end|OFFSET",
        "top-k:K",
        "favor:COUNT",
        "lsh:BUCKETS,ROUNDS,SEED",
        "predictive:D",
        "bf16",
    ] {
        assert!(help.contains(value) && short.contains(value), "{value}");
    }
    for tensor in [
        "d_out",
        "d_lse",
        "d_log_prob",
        "chosen",
        "log_prob",
        "center",
        "key_lengths",
        "segments_q",
        "v_score",
        "sinks",
        "table",
    ] {
        assert!(help.contains(tensor) && page.contains(tensor), "{tensor}");
    }
    assert!(Folder::new().qkv("--help").well().contains("run"));
    assert!(Folder::new().qkv("--version").well().starts_with("qkv "));
}

#[test]
fn the_page_of_the_guide_is_current() {
    let committed = include_str!("../../../../../docs/run.md");
    assert!(committed == qkv_cli::page(), "run `cargo run -p qkv-cli -- page > docs/run.md`");
    assert_eq!(Folder::new().qkv("page").well(), committed);
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    for typed in ["run", "run --json", "run --help", "page"] {
        let mut child = Folder::new().command(typed).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let mut said = String::new();
        child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        let code = child.wait().unwrap().code();
        assert_eq!((code, &said[..]), (Some(0), ""), "{typed}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_device_is_written_to_and_not_replaced() {
    let folder = file().folder();
    folder.qkv("run --input in.safetensors --output /dev/null").well();
    let device = std::os::unix::fs::FileTypeExt::is_char_device;
    assert!(device(&std::fs::metadata("/dev/null").unwrap().file_type()));
    folder.qkv("run --input in.safetensors --output /dev/full").fails(&["`/dev/full`: cannot be written"]);
}
