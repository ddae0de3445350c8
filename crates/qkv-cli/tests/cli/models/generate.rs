//! `qkv generate`, `qkv inspect`, `qkv convert` and `qkv embed`: what goes in and what comes out, on models made here.

use crate::models::program::{Folder, json};
use qkv_models::files::tensors::{Storage, TensorFile};
use qkv_models::text::tokenizer::{Kind, Tokenizer};
use qkv_models::{Encoder, EncoderConfig};
use std::fs;
use std::path::Path;
use std::sync::LazyLock;

const RECIPE: &str = "name = 'song'
[data]
text = 'song.txt'
dev = 'song.txt'
[tokenizer]
kind = 'characters'
[model]
kind = 'gpt'
d_model = 32
ffn_dim = 64
heads = 2
layers = 1
max_positions = 24
[train]
steps = 120
tokens = 192
longest = 24
lr = 5e-3
warmup = 10
smoothing = 0.0
average = 0.0
metric = 'loss'
validate = 60
";

const SONG: &str = "row, row, row your boat\ngently down the stream\n";

/// Trains a model that knows a song by heart. Returns its folder as an argument.
fn model() -> &'static str {
    static MODEL: LazyLock<String> = LazyLock::new(|| {
        let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join("song");
        let _ = fs::remove_dir_all(&place);
        let folder = Folder::new();
        folder.put("song.txt", SONG.repeat(20).as_bytes());
        folder.put("song.toml", RECIPE.as_bytes());
        let out = folder.typed(&["train", "song.toml", "--out", place.to_str().unwrap(), "--quiet"], "").quietly();
        assert!(out.contains("best     loss ") && out.contains("try      qkv generate --model"), "{out}");
        place.to_str().unwrap().to_owned()
    });
    &MODEL
}

#[test]
fn a_model_that_knows_a_song_goes_on_with_it() {
    let folder = Folder::new();
    let typed = ["generate", "--model", model(), "--greedy", "--max-tokens", "40", "--quiet"];
    let out = folder.typed(&[&typed[..], &["row, row, row "]].concat(), "").quietly();
    assert!(out.starts_with("your boat\ngently"), "{out}");
    assert_eq!(out, folder.typed(&typed, "row, row, row ").quietly(), "from stdin");
    folder.put("prompt.txt", b"row, row, row \n");
    assert_eq!(out, folder.typed(&[&typed[..], &["--input", "prompt.txt"]].concat(), "").quietly(), "from a file");
    assert_eq!(out, folder.typed(&[&typed[..], &["--no-cache", "row, row, row "]].concat(), "").quietly(), "no cache");
    assert_eq!(out, folder.typed(&[&typed[..], &["--threads", "1", "row, row, row "]].concat(), "").quietly());
    let stopped = folder.typed(&[&typed[..], &["--stop", "boat", "row, row, row "]].concat(), "").quietly();
    assert_eq!(stopped, "your \n");
    let echoed = folder.typed(&[&typed[..], &["--echo", "--stop", "boat", "row, row, row "]].concat(), "").quietly();
    assert_eq!(echoed, "row, row, row your \n");
}

#[test]
fn a_seed_draws_the_same_and_speed_is_told_on_stderr() {
    let folder = Folder::new();
    let drawn = |seed: &str| {
        let words = ["generate", "--model", model(), "--temperature", "3", "--top-k", "9", "--top-p", "0.99"];
        let ran =
            folder.typed(&[&words[..], &["--min-p", "0.001", "--seed", seed, "--max-tokens", "50", "ro"]].concat(), "");
        assert!(ran.err.contains("tokens/s]"), "{}", ran.err);
        ran.well()
    };
    assert_eq!(drawn("1"), drawn("1"));
    assert_ne!(drawn("1"), drawn("2"));
    let told = folder.typed(&["generate", "--model", model(), "--greedy", "--json", "row, row, row "], "").quietly();
    let told = &json(&told)[0];
    assert!(told["text"].as_str().unwrap().starts_with("your boat"), "{told}");
    assert_eq!((told["prompt_tokens"].as_u64(), told["ended"].as_str()), (Some(14), Some("length")));
    let words =
        ["generate", "--model", model(), "--greedy", "--json", "--no-repeat", "3", "--repetition-penalty", "1.1"];
    let said = folder.typed(&[&words[..], &["row"]].concat(), "").quietly();
    let tokens = json(&said)[0]["tokens"].as_array().unwrap().clone();
    let mut seen = std::collections::HashSet::new();
    assert!(tokens.windows(3).all(|three| seen.insert(format!("{three:?}"))), "{said}");
}

#[test]
fn what_generate_cannot_do_is_refused() {
    let folder = Folder::new();
    folder.qkv("generate hello").misused(&["--model <PATH>"]);
    folder.qkv("generate --model none hello").fails(&["`none` does not exist", "hint: a model is a folder"]);
    folder.qkv(&format!("generate --model {} --chat hello", model())).fails(&["the model has no chat template"]);
    folder.qkv(&format!("generate --model {} --system a hello", model())).misused(&["`--system` requires `--chat`"]);
    folder
        .qkv(&format!("generate --model {} --greedy --top-k 3 a", model()))
        .misused(&["cannot be used with `--greedy`"]);
    folder.typed(&["generate", "--model", model()], b"\xff\xfe").fails(&["stdin", "not UTF-8"]);
    folder.qkv(&format!("generate --model {} row", crate::models::program::model())).fails(&["which translates"]);
    folder.put("m.gguf", b"GGUF");
    folder.qkv("generate --model m.gguf a").fails(&["`m.gguf`: header"]);
}

#[test]
fn a_checkpoint_is_listed_converted_and_the_same() {
    let folder = Folder::new();
    let out = folder.qkv(&format!("inspect {}", model())).quietly();
    for said in ["model    gpt: 1 layers, width 32", "transformer.h.0.attn.c_attn.weight", "[32, 96]", "F32", "fits "] {
        assert!(out.contains(said), "no {said:?} in: {out}");
    }
    let told = &json(&folder.qkv(&format!("inspect --json {}", model())).quietly())[0];
    assert_eq!(told["parameters"], told["numbers"]);
    folder.qkv(&format!("convert {} --out half --storage f16", model())).quietly();
    assert!(folder.qkv("inspect half").quietly().contains("F16"));
    folder.qkv(&format!("convert {} --out half", model())).fails(&["`half` already exists"]);
    let scores = |model: &str, file: &str| {
        folder.typed(&["generate", "--model", model, "--scores", file, "row, row"], "").quietly();
        TensorFile::open(folder.path().join(file)).unwrap().read("scores").unwrap()
    };
    let (whole, half) = (scores(model(), "a.safetensors"), scores("half", "b.safetensors"));
    assert!(whole.iter().zip(&half).all(|(a, b)| (a - b).abs() < 0.1) && whole != half);
    let translator = crate::models::program::model();
    folder.qkv(&format!("convert {translator} --out small --storage int8")).quietly();
    let size = |folder: &Path| folder.join("model.safetensors").metadata().unwrap().len();
    assert!(size(&folder.path().join("small")) < size(Path::new(translator)) / 2);
    let said = |model: &str| folder.qkv(&format!("translate --model {model} 好")).quietly();
    assert_eq!(said(translator), said("small"));
    folder.qkv("inspect nothing").fails(&["nothing"]);
    folder.put("empty/readme", b"");
    folder.qkv("inspect empty").fails(&["`empty` holds no checkpoint"]);
    let listed = folder.qkv("inspect half/model.safetensors").quietly();
    assert!(listed.contains("transformer.wte.weight") && !listed.contains("fits"), "{listed}");
}

#[test]
fn a_decoder_alone_learns_to_translate_too() {
    let folder = Folder::with_recipe();
    let gpt = "--set model={kind=\"gpt\",d_model=32,ffn_dim=64,heads=2,layers=1,max_positions=80}";
    let words = ["train", "tiny.toml", gpt.split_at(6).0, gpt.split_at(6).1, "--out", "m", "--quiet"];
    let words: Vec<&str> = words.iter().map(|word| word.trim()).collect();
    folder.typed(&words, "").quietly();
    let out = folder.qkv_on("translate --model m", "abc\n\n12\n").quietly();
    assert_eq!(out.lines().count(), 3);
    let uncached = folder.qkv_on("translate --model m --no-cache", "abc\n\n12\n").quietly();
    assert_eq!(out, uncached);
}

#[test]
fn sentences_become_vectors() {
    let folder = Folder::new();
    let tokenizer = Tokenizer::train(["a cat sleeps; prices rose"], Kind::Characters).unwrap();
    let config = EncoderConfig { d_model: 16, ffn_dim: 24, heads: 2, layers: 1, ..EncoderConfig::default() };
    Encoder::new(&config, tokenizer, 5).unwrap().save(folder.path().join("m"), Storage::F32).unwrap();
    let out = folder.qkv_on("embed --model m", "a cat\nprices\n").quietly();
    let told = json(&out);
    assert_eq!((told.len(), told[0]["embedding"].as_array().unwrap().len()), (2, 16));
    folder.qkv_on("embed --model m --output v.safetensors", "a cat\nprices\n").quietly();
    let file = TensorFile::open(folder.path().join("v.safetensors")).unwrap();
    assert_eq!(file.shape("embeddings"), Some(&[2, 16][..]));
    let near = folder.typed(&["embed", "--model", "m", "--similarity", "a cat", "prices", "a cat"], "").quietly();
    assert!(near.starts_with("1.0000\ta cat\n") && near.lines().count() == 2, "{near}");
    folder.qkv("embed a").misused(&["--model <DIR>"]);
    assert!(folder.qkv("inspect m").quietly().contains("bert: 1 layers"));
    folder.qkv("generate --model m a").fails(&["a `bert` makes no text"]);
    let config = folder.text("m/config.json");
    folder.put("m/config.json", config.replace("\"hidden_size\": 16", "\"hidden_size\": 24").as_bytes());
    folder.qkv("embed --model m a").fails(&["m/model.safetensors", "expected [16, 24]"]);
}
