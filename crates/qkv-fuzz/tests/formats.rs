//! Every format that is read from files: bytes that nearly are one give an error or a value, never a panic, a bomb or a hang.

mod seeds;

use qkv_fuzz::{Shape, Target, fuzz, fuzz_large};
use qkv_models::chat::{Message, Template};
use qkv_models::files::gguf::Gguf;
use qkv_models::files::safetensors::Reader;
use qkv_models::files::tensors::TensorFile;
use qkv_models::image::{Image, idx};
use qkv_models::text::corpus::Corpus;
use qkv_models::text::tokenizer::Tokenizer;
use qkv_models::train::Run;
use qkv_models::{Encoder, Generator, Inspection, Recipe, Result, Translator, labelled};
use std::path::Path;

/// What came of it, in words.
fn told<T>(found: Result<T>) -> String {
    found.map_or_else(|error| format!("{error} {}", error.hint().unwrap_or_default()), |_| "right".into())
}

/// Bytes as a file, read by `read`.
fn as_file<T>(folder: &Path, name: &str, bytes: &[u8], read: impl FnOnce(&Path) -> Result<T>) -> String {
    let path = folder.join(name);
    std::fs::write(&path, bytes).unwrap();
    told(read(&path))
}

#[test]
fn safetensors() {
    let words =
        &["F32", "BF16", "I8", "F8_E5M2", "BOOL", "F4", "__metadata__", "data_offsets", "shape", "dtype", "a.scale"];
    let target = Target { name: "safetensors", shape: Shape::Safetensors, seeds: seeds::safetensors(), words };
    fuzz(&target, |bytes| match TensorFile::from_bytes(bytes.to_vec(), "a.safetensors") {
        Err(error) => error.to_string(),
        Ok(file) => file.names().map(|name| told(file.read(name))).collect::<Vec<_>>().join(", "),
    });
}

/// The reader that `qkv run` and the explorer share: a header from a file, then every tensor, whole and in part.
#[test]
fn safetensors_from_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let words =
        &["F32", "I64", "BOOL", "U8", "F4", "__metadata__", "data_offsets", "shape", "dtype", "\"q\":", "\"k\":"];
    let target = Target { name: "safetensors-file", shape: Shape::Safetensors, seeds: seeds::safetensors(), words };
    fuzz(&target, |bytes| {
        let path = folder.path().join("a.safetensors");
        std::fs::write(&path, bytes).unwrap();
        let mut file = match Reader::open(&path) {
            Ok(file) => file,
            Err(error) => return error.to_string(),
        };
        let names: Vec<String> = file.names().map(str::to_owned).collect();
        for name in &names {
            let info = file.info(name).expect("it is listed").clone();
            let whole = file.read(name).expect("its bytes are in the file");
            assert_eq!(whole.len() as u64, info.byte_len());
            let half = info.byte_len() / 2;
            assert_eq!(file.read_range(name, half..info.byte_len()).unwrap(), whole[half as usize..]);
            assert!(file.read_range(name, 0..info.byte_len() + 1).is_err());
        }
        format!("right {:?}", names.len().min(4))
    });
}

#[test]
fn gguf() {
    let folder = tempfile::tempdir().unwrap();
    let words = &["GGUF", "llama.", "general.alignment", "tokenizer.ggml.tokens", "blk.0.", "weight", "gpt2"];
    let target = Target { name: "gguf", shape: Shape::Binary, seeds: seeds::gguf(), words };
    fuzz(&target, |bytes| match Gguf::from_bytes(bytes.to_vec(), "a.gguf") {
        Err(error) => error.to_string(),
        Ok(file) => {
            file.names().for_each(|name| drop(file.read(name)));
            let tokenizer = told(Tokenizer::of_gguf(&file));
            tokenizer + &as_file(folder.path(), "a.gguf", bytes, |path| Generator::open(path))
        }
    });
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
    fuzz(&target, |bytes| match Tokenizer::from_bytes(bytes, "tokenizer.json") {
        Err(error) => error.to_string(),
        Ok(tokenizer) => {
            let ids = tokenizer.encode("the Fox\u{301} 好 </s> 12");
            let (framed, _) = tokenizer.encode_framed("one", Some("two"));
            format!("right {} {}", tokenizer.decode(&ids).is_empty(), framed.len())
        }
    });
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
    fuzz(&target, |bytes| {
        let messages = [Message::new("user", "What is it?"), Message::new("assistant", "A dog.")];
        let source = String::from_utf8_lossy(bytes);
        told(Template::new(&source, "t").and_then(|template| template.render(&messages, "<s>", "</s>")))
    });
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
    fuzz(&target, |bytes| {
        let text = String::from_utf8_lossy(bytes);
        let (change, rest) = text.split_once('\n').unwrap_or((&text, ""));
        let changed = Recipe::parse(&seeds::recipe(), "r.toml".as_ref(), &[change.to_owned(), rest.to_owned()]);
        match Recipe::parse(&text, "r.toml".as_ref(), &[]) {
            Err(error) => error.to_string() + &told(changed),
            Ok(recipe) => {
                let again = Recipe::parse(&recipe.to_toml(), "r.toml".as_ref(), &[]).expect("it wrote this itself");
                assert!(recipe == again || recipe.to_toml().contains("nan"), "{text}");
                format!("right {}", recipe.model.name())
            }
        }
    });
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
    let read =
        |folder: &Path| told(Generator::open(folder)) + &told(Inspection::of(folder)) + &told(Translator::open(folder));
    folder_of("config-decoder", folder.path(), "config.json", Shape::Json, read);
}

#[test]
fn config_of_an_encoder() {
    for (name, folder) in [("config-bert", seeds::encoder(false)), ("config-encoder", seeds::encoder(true))] {
        let read = |folder: &Path| told(Encoder::open(folder)) + &told(Inspection::of(folder));
        folder_of(name, folder.path(), "config.json", Shape::Json, read);
    }
}

#[test]
fn config_of_a_translator() {
    let folder = seeds::translator();
    folder_of("config-translator", folder.path(), "config.json", Shape::Json, |folder| {
        told(Translator::open(folder)) + &told(Inspection::of(folder))
    });
}

#[test]
fn settings_beside_a_model() {
    let folder = seeds::decoder();
    for file in ["generation_config.json", "tokenizer_config.json"] {
        let name = if file.starts_with('g') { "generation" } else { "tokenizer-settings" };
        let whole = std::fs::read(folder.path().join(file)).unwrap();
        folder_of(name, folder.path(), file, Shape::Json, |folder| told(Generator::open(folder)));
        std::fs::write(folder.path().join(file), whole).unwrap();
    }
    let folder = seeds::encoder(false);
    for file in ["1_Pooling/config.json", "modules.json", "sentence_bert_config.json"] {
        let whole = std::fs::read(folder.path().join(file)).unwrap();
        folder_of("pooling", folder.path(), file, Shape::Json, |folder| {
            let machine = qkv_nn::Machine::new(1);
            told(Encoder::open(folder).and_then(|encoder| encoder.embed(&["the fox"], &machine)))
        });
        std::fs::write(folder.path().join(file), whole).unwrap();
    }
}

#[test]
fn index_of_shards() {
    let folder = seeds::shards();
    let file = "model.safetensors.index.json";
    folder_of("index", folder.path(), file, Shape::Json, |folder| told(Generator::open(folder)));
}

#[test]
fn a_run_that_is_resumed() {
    let folder = seeds::run();
    let (place, kept) = ("checkpoints/00000004/state.json", folder.path().join("checkpoints/00000004/state.json"));
    let whole = std::fs::read(&kept).unwrap();
    folder_of("resume-state", folder.path(), place, Shape::Json, |folder| told(Run::resume(folder, 1)));
    std::fs::write(&kept, whole).unwrap();
    let moments = "checkpoints/00000004/moments.safetensors";
    folder_of("resume-moments", folder.path(), moments, Shape::Safetensors, |folder| told(Run::resume(folder, 1)));
}

#[test]
fn pairs_and_classes() {
    let folder = tempfile::tempdir().unwrap();
    let seeds =
        ["pos\tgood film\nneg\tbad\n", "\u{feff}a\tb\r\n好\t久\r\n", "a\tb"].map(|text| text.as_bytes().to_vec());
    let target = Target {
        name: "pairs",
        shape: Shape::Text,
        seeds: seeds.to_vec(),
        words: &["\t", "\n", "\r\n", "\u{feff}", "\u{2028}"],
    };
    fuzz(&target, |bytes| {
        as_file(folder.path(), "a.tsv", bytes, |path| Corpus::read(path))
            + &as_file(folder.path(), "a.tsv", bytes, labelled::classes)
    });
}

#[test]
fn packed_pairs() {
    let folder = tempfile::tempdir().unwrap();
    let words = &["\u{1f}\u{8b}", "\t", "\n"];
    let target = Target { name: "packed-pairs", shape: Shape::Binary, seeds: seeds::packed(), words };
    fuzz(&target, |bytes| as_file(folder.path(), "a.tsv.gz", bytes, |path| Corpus::read(path)));
}

#[test]
fn idx_files() {
    let folder = tempfile::tempdir().unwrap();
    let target =
        Target { name: "idx", shape: Shape::Binary, seeds: seeds::idx(), words: &["\0\0\u{8}\u{3}", "\0\0\0\u{2}"] };
    fuzz(&target, |bytes| {
        as_file(folder.path(), "a.idx", bytes, |path| idx::images(path))
            + &as_file(folder.path(), "a.idx", bytes, |path| idx::labels(path))
    });
}

#[test]
fn what_images_and_packed_files_are_drawn_from_is_right() {
    let folder = tempfile::tempdir().unwrap();
    for (at, bytes) in seeds::png().into_iter().chain(seeds::jpeg()).enumerate() {
        let found = Image::from_bytes(&bytes, "a.png");
        assert!(found.is_ok(), "{at}: {}", told(found));
    }
    let read = |bytes: &[u8]| as_file(folder.path(), "a.tsv", bytes, |path| Corpus::read(path));
    assert!(seeds::packed().iter().all(|bytes| read(bytes) == "right"));
    assert_eq!(as_file(folder.path(), "a.idx", &seeds::idx()[0], |path| idx::images(path)), "right");
    assert_eq!(as_file(folder.path(), "a.idx", &seeds::idx()[1], |path| idx::labels(path)), "right");
}

/// What an image of the most points takes, and what decodes it: both are bounds that are documented.
const IMAGE: usize = 768 << 20;

#[test]
fn png_images() {
    let words = &["IHDR", "PLTE", "tRNS", "IDAT", "acTL", "fcTL", "fdAT", "IEND", "iCCP", "zTXt"];
    let target = Target { name: "png", shape: Shape::Png, seeds: seeds::png(), words };
    fuzz_large(&target, IMAGE, |bytes| seen(Image::from_bytes(bytes, "a.png")));
}

#[test]
fn jpeg_images() {
    let words = &["JFIF", "Exif", "Adobe", "ICC_PROFILE"];
    let target = Target { name: "jpeg", shape: Shape::Binary, seeds: seeds::jpeg(), words };
    fuzz_large(&target, IMAGE, |bytes| seen(Image::from_bytes(bytes, "a.jpg")));
}

/// What came of an image, with its kind; one that was taken holds what it says, and can be looked at.
fn seen(found: Result<Image>) -> String {
    let told = match &found {
        Ok(image) => format!("{} channels", ["no", "one", "two", "three"][image.channels()]),
        Err(_) => String::new(),
    };
    if let Ok(image) = &found {
        assert_eq!(image.points().len(), image.width() * image.height() * image.channels());
        assert_eq!(image.in_channels(1).channels(), 1);
    }
    let told = told + &self::told(found);
    assert!(!told.contains("cannot be decoded"), "a decoder panicked, and was caught");
    told
}

#[test]
fn columns() {
    let folder = tempfile::tempdir().unwrap();
    let seeds = ["Ada\tB-person\nsleeps\tO\n\nOslo\tB-location\n", "-DOCSTART- -X- O\n\nAda NNP B-NP B-PER\n"];
    let seeds = seeds.map(|text| text.as_bytes().to_vec()).to_vec();
    let target =
        Target { name: "columns", shape: Shape::Text, seeds, words: &["\t", "\n\n", " ", "B-", "I-", "-DOCSTART-"] };
    fuzz(&target, |bytes| as_file(folder.path(), "a.conll", bytes, labelled::tags));
}

#[test]
fn questions() {
    let folder = tempfile::tempdir().unwrap();
    let words = &["data", "paragraphs", "context", "qas", "answers", "answer_start", "is_impossible", "text"];
    let target = Target { name: "questions", shape: Shape::Json, seeds: seeds::questions(), words };
    fuzz(&target, |bytes| as_file(folder.path(), "a.json", bytes, labelled::answers));
}

#[test]
fn recordings() {
    let folder = tempfile::tempdir().unwrap();
    let words =
        &["q", "k", "v", "lse", "weights", "layers.0.q", "tokens", "attention", "recording", "F16", "I64", "shape"];
    let target = Target { name: "recordings", shape: Shape::Safetensors, seeds: seeds::recordings(), words };
    fuzz(&target, |bytes| {
        let path = folder.path().join("a.safetensors");
        std::fs::write(&path, bytes).unwrap();
        let recording = match qkv_explore::file::open(&path, &qkv_explore::file::OpenOptions::default()) {
            Ok(recording) => recording,
            Err(error) => return error.to_string(),
        };
        let looked = recording.layers.iter().map(|layer| {
            let [n, m] = layer.size();
            told(layer.rectangle(0, 0..n.min(8), 0..m.min(8)))
                + &told(layer.pooled(layer.heads() - 1, [4, 4], qkv::Pool::Mean))
                + &told(layer.rows_at(0, &[0]))
        });
        looked.collect::<Vec<_>>().join(", ")
    });
}

#[test]
fn links() {
    let seeds = vec![b"0-0 1-2 2-1".to_vec(), b"".to_vec(), b"3-3".to_vec()];
    fuzz(&Target { name: "links", shape: Shape::Text, seeds, words: &["-", " ", "0-0", "p"] }, |bytes| {
        told(qkv_explore::pharaoh(&String::from_utf8_lossy(bytes)).map(drop))
    });
}
