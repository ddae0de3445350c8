//! Every file format: nearly valid bytes give an error or a value, never a panic, a memory bomb or a hang.

use crate::seeds;
use qkv_fuzz::bodies::{self, outcome};
use qkv_fuzz::{Shape, Target, fuzz, fuzz_large};
use qkv_models::train::Run;
use qkv_models::{Encoder, Generator, Inspection, Translator};
use std::path::Path;

#[test]
fn safetensors() {
    let words =
        &["F32", "BF16", "I8", "F8_E5M2", "BOOL", "F4", "__metadata__", "data_offsets", "shape", "dtype", "a.scale"];
    let target = Target { name: "safetensors", shape: Shape::Safetensors, seeds: seeds::safetensors(), words };
    fuzz(&target, bodies::safetensors);
}

/// The reader that `qkv run` and the explorer share: the header of a file, then every tensor, whole and in part.
#[test]
fn safetensors_from_a_file() {
    let words =
        &["F32", "I64", "BOOL", "U8", "F4", "__metadata__", "data_offsets", "shape", "dtype", "\"q\":", "\"k\":"];
    let target = Target { name: "safetensors-file", shape: Shape::Safetensors, seeds: seeds::safetensors(), words };
    fuzz(&target, bodies::safetensors_file);
}

#[test]
fn gguf() {
    let words = &["GGUF", "llama.", "general.alignment", "tokenizer.ggml.tokens", "blk.0.", "weight", "gpt2"];
    let target = Target { name: "gguf", shape: Shape::Binary, seeds: seeds::gguf(), words };
    fuzz(&target, bodies::gguf);
}

#[test]
fn tokenizer() {
    let words = &[
        "BPE",
        "WordPiece",
        "Unigram",
        "ByteLevel",
        "[UNK]",
        "</s>",
        "type",
        "pattern",
        "Regex",
        "(a*)*b",
        "Sequence",
    ];
    let target = Target { name: "tokenizer", shape: Shape::Json, seeds: seeds::tokenizers(), words };
    fuzz(&target, bodies::tokenizer);
}

#[test]
fn template() {
    let words = &[
        "{%",
        "%}",
        "{{",
        "}}",
        " for x in range(9) ",
        "endfor",
        "messages",
        "['role']",
        "|upper",
        "range(999999999)",
        "'a'*999999999",
    ];
    let target = Target { name: "template", shape: Shape::Text, seeds: seeds::templates(), words };
    fuzz(&target, bodies::template);
}

#[test]
fn recipe() {
    let words = &[
        "[data]",
        "[model]",
        "kind = ",
        "'gpt'",
        "mask = ",
        "{ longformer = ",
        "[train]",
        "attention",
        "=",
        "[[",
        "\"\"\"",
    ];
    let target = Target { name: "recipe", shape: Shape::Text, seeds: seeds::recipes(), words };
    fuzz(&target, |bytes| bodies::recipe(bytes, &seeds::recipe()));
}

/// A folder with a model, one of whose files is replaced.
fn folder_of(name: &'static str, folder: &Path, file: &str, shape: Shape, read: impl Fn(&Path) -> String) {
    let seed = std::fs::read(folder.join(file)).unwrap();
    let words = &[
        "model_type",
        "gpt2",
        "llama",
        "bert",
        "qkv",
        "qkv-encoder",
        "hidden_size",
        "num_hidden_layers",
        "id2label",
        "eos_token_id",
        "attention",
        "longformer",
        "linear",
        "weight_map",
        "../x.safetensors",
        "kind",
        "transformer",
    ];
    fuzz(&Target { name, shape, seeds: vec![seed], words }, |bytes| {
        std::fs::write(folder.join(file), bytes).unwrap();
        read(folder)
    });
}

#[test]
fn config_of_a_decoder() {
    let folder = seeds::decoder();
    let read = |folder: &Path| {
        outcome(Generator::open(folder)) + &outcome(Inspection::of(folder)) + &outcome(Translator::open(folder))
    };
    folder_of("config-decoder", folder.path(), "config.json", Shape::Json, read);
}

#[test]
fn config_of_an_encoder() {
    for (name, folder) in [("config-bert", seeds::encoder(false)), ("config-encoder", seeds::encoder(true))] {
        let read = |folder: &Path| outcome(Encoder::open(folder)) + &outcome(Inspection::of(folder));
        folder_of(name, folder.path(), "config.json", Shape::Json, read);
    }
}

#[test]
fn config_of_a_translator() {
    let folder = seeds::translator();
    folder_of("config-translator", folder.path(), "config.json", Shape::Json, |folder| {
        outcome(Translator::open(folder)) + &outcome(Inspection::of(folder))
    });
}

#[test]
fn settings_beside_a_model() {
    let folder = seeds::decoder();
    for file in ["generation_config.json", "tokenizer_config.json"] {
        let name = if file.starts_with('g') { "generation" } else { "tokenizer-settings" };
        let whole = std::fs::read(folder.path().join(file)).unwrap();
        folder_of(name, folder.path(), file, Shape::Json, |folder| outcome(Generator::open(folder)));
        std::fs::write(folder.path().join(file), whole).unwrap();
    }
    let folder = seeds::encoder(false);
    for file in ["1_Pooling/config.json", "modules.json", "sentence_bert_config.json"] {
        let whole = std::fs::read(folder.path().join(file)).unwrap();
        folder_of("pooling", folder.path(), file, Shape::Json, |folder| {
            let machine = qkv_nn::Machine::new(1);
            outcome(Encoder::open(folder).and_then(|encoder| encoder.embed(&["the fox"], &machine)))
        });
        std::fs::write(folder.path().join(file), whole).unwrap();
    }
}

#[test]
fn index_of_shards() {
    let folder = seeds::shards();
    let file = "model.safetensors.index.json";
    folder_of("index", folder.path(), file, Shape::Json, |folder| outcome(Generator::open(folder)));
}

#[test]
fn a_run_that_is_resumed() {
    let folder = seeds::run();
    let (place, kept) = ("checkpoints/00000004/state.json", folder.path().join("checkpoints/00000004/state.json"));
    let whole = std::fs::read(&kept).unwrap();
    folder_of("resume-state", folder.path(), place, Shape::Json, |folder| outcome(Run::resume(folder, 1)));
    std::fs::write(&kept, whole).unwrap();
    let moments = "checkpoints/00000004/moments.safetensors";
    folder_of("resume-moments", folder.path(), moments, Shape::Safetensors, |folder| outcome(Run::resume(folder, 1)));
}

#[test]
fn pairs_and_classes() {
    let seeds =
        ["pos\tgood film\nneg\tbad\n", "\u{feff}a\tb\r\n好\t久\r\n", "a\tb"].map(|text| text.as_bytes().to_vec());
    let target = Target {
        name: "pairs",
        shape: Shape::Text,
        seeds: seeds.to_vec(),
        words: &["\t", "\n", "\r\n", "\u{feff}", "\u{2028}"],
    };
    fuzz(&target, bodies::pairs);
}

#[test]
fn packed_pairs() {
    let words = &["\u{1f}\u{8b}", "\t", "\n"];
    let target = Target { name: "packed-pairs", shape: Shape::Binary, seeds: seeds::packed(), words };
    fuzz(&target, bodies::packed_pairs);
}

#[test]
fn idx_files() {
    let target =
        Target { name: "idx", shape: Shape::Binary, seeds: seeds::idx(), words: &["\0\0\u{8}\u{3}", "\0\0\0\u{2}"] };
    fuzz(&target, bodies::idx_files);
}

#[test]
fn the_seeds_of_images_and_packed_files_are_valid() {
    let images = seeds::png().into_iter().chain(seeds::jpeg()).chain(seeds::webp()).chain(seeds::bmp());
    for (at, bytes) in images.enumerate() {
        let found = bodies::png(&bytes);
        assert!(found.ends_with("right"), "{at}: {found}");
    }
    assert!(seeds::packed().iter().all(|bytes| bodies::pairs(bytes).starts_with("right")));
    assert!(bodies::idx_files(&seeds::idx()[0]).starts_with("right"));
    assert!(bodies::idx_files(&seeds::idx()[1]).ends_with("right"));
}

/// Memory of the largest accepted image and its decoder; both limits are documented.
const IMAGE: usize = 768 << 20;

#[test]
fn png_images() {
    let words = &["IHDR", "PLTE", "tRNS", "IDAT", "acTL", "fcTL", "fdAT", "IEND", "iCCP", "zTXt"];
    let target = Target { name: "png", shape: Shape::Png, seeds: seeds::png(), words };
    fuzz_large(&target, IMAGE, bodies::png);
}

#[test]
fn jpeg_images() {
    let words = &["JFIF", "Exif", "Adobe", "ICC_PROFILE"];
    let target = Target { name: "jpeg", shape: Shape::Binary, seeds: seeds::jpeg(), words };
    fuzz_large(&target, IMAGE, bodies::jpeg);
}

#[test]
fn images_with_boxes() {
    assert!(seeds::boxes().iter().all(|bytes| bodies::boxes(bytes) == "right"));
    let words = &["images", "annotations", "categories", "bbox", "image_id", "category_id", "-1", "1e999", "null"];
    let target = Target { name: "boxes", shape: Shape::Json, seeds: seeds::boxes(), words };
    fuzz(&target, bodies::boxes);
}

#[test]
fn images_with_texts() {
    assert!(seeds::captions().iter().all(|bytes| bodies::captions(bytes) == "right"));
    let words = &["a.bmp", "\t", "\n", "../", "/", "\r", "\0", "b.bmp"];
    let target = Target { name: "captions", shape: Shape::Text, seeds: seeds::captions(), words };
    fuzz(&target, bodies::captions);
}

#[test]
fn models_of_tensorflow() {
    assert!(seeds::tfjs().iter().all(|bytes| bodies::tfjs(bytes) == "right"));
    let words = &["weightsManifest", "paths", "weights", "shape", "dtype", "float32", "../", "[", "-1", "1e99"];
    let target = Target { name: "tfjs", shape: Shape::Json, seeds: seeds::tfjs(), words };
    fuzz(&target, bodies::tfjs);
}

#[test]
fn checkpoints_of_pytorch() {
    assert!(seeds::torch().iter().all(|bytes| bodies::torch(bytes) == "right, right"));
    let words =
        &["data.pkl", "data/0", "torch._utils", "_rebuild_tensor_v2", "FloatStorage", "PK\x01\x02", "os", "system"];
    let target = Target { name: "torch", shape: Shape::Binary, seeds: seeds::torch(), words };
    fuzz(&target, bodies::torch);
}

#[test]
fn settings_in_yaml() {
    assert!(seeds::yaml().iter().all(|bytes| bodies::yaml(bytes) == "right"));
    let words = &["- ", ": ", ":\n", "  ", "\t", "# ", "---", "'", "\"", "[", "&a", "~", "1e999", "true"];
    let target = Target { name: "yaml", shape: Shape::Text, seeds: seeds::yaml(), words };
    fuzz(&target, bodies::yaml);
}

#[test]
fn webp_images() {
    let words = &["RIFF", "WEBP", "VP8 ", "VP8L", "VP8X", "ALPH", "ANMF", "EXIF"];
    let target = Target { name: "webp", shape: Shape::Binary, seeds: seeds::webp(), words };
    fuzz_large(&target, IMAGE, bodies::webp);
}

#[test]
fn bmp_images() {
    let target = Target { name: "bmp", shape: Shape::Binary, seeds: seeds::bmp(), words: &["BM"] };
    fuzz_large(&target, IMAGE, bodies::bmp);
}

#[test]
fn sounds() {
    for (at, bytes) in seeds::sounds().into_iter().enumerate() {
        assert_eq!(bodies::sound(&bytes), "right", "{at}");
    }
    let words = &["RIFF", "WAVE", "fmt ", "data", "LIST", "fLaC", "OggS", "ID3", "Xing", "\u{1}vorbis", "\u{5}vorbis"];
    let target = Target { name: "sound", shape: Shape::Binary, seeds: seeds::sounds(), words };
    fuzz(&target, bodies::sound);
}

#[test]
fn checkpoints_of_speech() {
    assert_eq!(bodies::ctranslate2(&seeds::ctranslate2()[0]), ["right"; 7].join(", "));
    assert_eq!(bodies::ggml(&seeds::ggml()[0]), ["right"; 3].join(", "));
    let words = &["WhisperSpec", "a/weight", "_scale", "plain", "lmgg"];
    let target = Target { name: "ctranslate2", shape: Shape::Binary, seeds: seeds::ctranslate2(), words };
    fuzz(&target, bodies::ctranslate2);
    let target = Target { name: "ggml", shape: Shape::Binary, seeds: seeds::ggml(), words };
    fuzz(&target, bodies::ggml);
}

#[test]
fn columns() {
    let seeds = ["Ada\tB-person\nsleeps\tO\n\nOslo\tB-location\n", "-DOCSTART- -X- O\n\nAda NNP B-NP B-PER\n"];
    let seeds = seeds.map(|text| text.as_bytes().to_vec()).to_vec();
    let target =
        Target { name: "columns", shape: Shape::Text, seeds, words: &["\t", "\n\n", " ", "B-", "I-", "-DOCSTART-"] };
    fuzz(&target, bodies::columns);
}

#[test]
fn questions() {
    let words = &["data", "paragraphs", "context", "qas", "answers", "answer_start", "is_impossible", "text"];
    let target = Target { name: "questions", shape: Shape::Json, seeds: seeds::questions(), words };
    fuzz(&target, bodies::questions);
}

#[test]
fn conversations() {
    let one = r#"{"messages": [{"role": "user", "content": "Wo?"}, {"role": "assistant", "content": "Hier."}]}"#;
    let seeds = vec![one.as_bytes().to_vec(), format!("{one}\n\n{one}\n").into_bytes()];
    let words = &["messages", "role", "content", "assistant", "\n", "[]", "{}", "null"];
    fuzz(&Target { name: "conversations", shape: Shape::Text, seeds, words }, bodies::conversations);
}

/// Adapters in PEFT's format, over a valid model.
#[test]
fn adapters() {
    let (model, folder) = (seeds::decoder(), seeds::adapters());
    let read = |folder: &Path| outcome(Generator::open_with(model.path(), Some(folder)));
    assert_eq!(read(folder.path()), "right");
    let path = folder.path().join("adapter_config.json");
    let whole = std::fs::read(&path).unwrap();
    folder_of("adapter-config", folder.path(), "adapter_config.json", Shape::Json, read);
    std::fs::write(&path, whole).unwrap();
    folder_of("adapter-weights", folder.path(), "adapter_model.safetensors", Shape::Safetensors, read);
}

#[test]
fn recordings() {
    let words =
        &["q", "k", "v", "lse", "weights", "layers.0.q", "tokens", "attention", "recording", "F16", "I64", "shape"];
    let target = Target { name: "recordings", shape: Shape::Safetensors, seeds: seeds::recordings(), words };
    fuzz(&target, bodies::recordings);
}

#[test]
fn links() {
    let seeds = vec![b"0-0 1-2 2-1".to_vec(), b"".to_vec(), b"3-3".to_vec()];
    fuzz(&Target { name: "links", shape: Shape::Text, seeds, words: &["-", " ", "0-0", "p"] }, bodies::links);
}
