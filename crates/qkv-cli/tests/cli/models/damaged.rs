//! Folders that are not models, by mistake or malice: refused with exit code 1 and the name of the file.

use crate::models::program::{Folder, model};
use std::fs;
use std::path::Path;

/// A copy of the model with one of its files changed.
fn broken(file: &str, change: impl Fn(Vec<u8>) -> Vec<u8>) -> Folder {
    let folder = Folder::new();
    for name in ["config.json", "tokenizer.json", "model.safetensors", "generation_config.json"] {
        let bytes = fs::read(Path::new(model()).join(name)).unwrap();
        folder.put(&format!("m/{name}"), &if name == file { change(bytes) } else { bytes });
    }
    folder
}

fn refused(file: &str, change: impl Fn(Vec<u8>) -> Vec<u8>) {
    broken(file, change).qkv("translate --model m abc").fails(&[&format!("m/{file}")]);
}

fn replaced(from: &'static str, to: &'static str) -> impl Fn(Vec<u8>) -> Vec<u8> {
    move |bytes| {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        assert!(text.contains(from), "no {from} in {text}");
        text.replace(from, to).into_bytes()
    }
}

#[test]
fn a_model_that_is_whole_translates() {
    broken("none", |bytes| bytes).qkv("translate --model m abc").quietly();
}

#[test]
fn tensors_that_are_cut_off_or_lie_are_refused() {
    refused("model.safetensors", |bytes| bytes[..bytes.len() / 2].to_vec());
    refused("model.safetensors", |bytes| bytes[..7].to_vec());
    refused("model.safetensors", |_| Vec::new());
    refused("model.safetensors", |mut bytes| {
        bytes[..8].copy_from_slice(&u64::MAX.to_le_bytes());
        bytes
    });
    refused("model.safetensors", |mut bytes| {
        // Changes the first shape; the header keeps its length.
        let at = bytes.windows(9).position(|window| window == b"\"shape\":[").unwrap() + 9;
        bytes[at] = if bytes[at] == b'9' { b'8' } else { b'9' };
        bytes
    });
}

#[test]
fn json_that_is_broken_is_refused() {
    for file in ["config.json", "tokenizer.json", "generation_config.json"] {
        refused(file, |bytes| bytes[..bytes.len() / 2].to_vec());
        refused(file, |_| b"\"\"".to_vec());
        refused(file, |_| b"\xff\xfe".to_vec());
    }
}

#[test]
fn sizes_that_do_not_fit_are_refused_before_memory_is_asked_for() {
    let refused = |from, to, said: &str| {
        let folder = broken("config.json", replaced(from, to));
        folder.qkv("translate --model m abc").fails(&[said]);
    };
    refused(
        "\"d_model\": 32",
        "\"d_model\": 48",
        "`m/model.safetensors`: tensor `shared.weight`: its shape is [40, 32]",
    );
    refused("\"d_model\": 32", "\"d_model\": 999999999999", "m/config.json");
    refused("\"d_model\": 32", "\"d_model\": 60000", "m/config.json");
    refused("\"d_model\": 32", "\"d_model\": -1", "m/config.json:");
    refused("\"encoder_layers\": 1", "\"encoder_layers\": 1000", "m/config.json");
    refused("\"encoder_layers\": 1", "\"encoder_layers\": 2", "m/model.safetensors");
    refused("\"vocab_size\": ", "\"vocab_size\": 9", "m/config.json");
    refused("\"heads\": 2", "\"heads\": 0", "m/config.json");
    refused("\"heads\": 2", "\"heads\": 5", "m/config.json");
    refused("\"max_positions\": 40", "\"max_positions\": 0", "m/config.json");
    let folder = broken("generation_config.json", replaced("\"beam\": 5", "\"beam\": 100000"));
    folder.qkv("translate --model m abc").fails(&["`m/generation_config.json`", "`beam` is 100000"]);
}

#[test]
fn a_folder_without_a_model_is_refused() {
    let folder = Folder::new();
    folder.qkv("translate --model none abc").fails(&["`none` is not a folder", "hint: a model is a folder with"]);
    folder.put("empty/readme", b"");
    folder.qkv("translate --model empty abc").fails(&["empty/config.json"]);
    folder.qkv("eval --model empty dev.tsv").fails(&["empty/config.json"]);
}

#[test]
fn without_a_model_of_its_own_the_program_asks_for_one() {
    let health: serde_json::Value = serde_json::from_str(&Folder::new().qkv("doctor --json").quietly()).unwrap();
    if health["embedded_model"] == false {
        Folder::new()
            .qkv("translate abc")
            .fails(&["no model is embedded in this build", "hint: name one with `--model DIR`"]);
    } else {
        assert!(Folder::new().typed(&["translate", "好久不见"], "").quietly().trim().len() > 2);
    }
}
