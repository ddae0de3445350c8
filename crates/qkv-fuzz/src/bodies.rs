//! The bodies of the targets whose input is a single file. Each parses hostile bytes, uses the result, and returns the
//! outcome as text. They are shared by the tests of this crate and the `cargo-fuzz` targets in `fuzz/`.

use qkv_explore::file::{self, OpenOptions};
use qkv_models::audio::{MelFilters, Recording, Spectrogram};
use qkv_models::chat::{self, Message, Template};
use qkv_models::files::ctranslate2::CTranslate2;
use qkv_models::files::ggml::Ggml;
use qkv_models::files::gguf::Gguf;
use qkv_models::files::safetensors::Reader;
use qkv_models::files::tensors::TensorFile;
use qkv_models::files::tfjs::TfjsModel;
use qkv_models::files::torch::TorchFile;
use qkv_models::files::yaml;
use qkv_models::image::{Image, idx};
use qkv_models::text::corpus::Corpus;
use qkv_models::text::tokenizer::Tokenizer;
use qkv_models::{Generator, Recipe, labelled};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The error and its hint, or `right`.
pub fn outcome<T, E: Into<qkv_models::Error>>(found: Result<T, E>) -> String {
    let told = |error: qkv_models::Error| format!("{error} {}", error.hint().unwrap_or_default());
    found.map_or_else(|error| told(error.into()), |_| "right".into())
}

/// Writes the input to a temporary file with this name.
fn file_of(name: &str, bytes: &[u8]) -> PathBuf {
    static FOLDER: OnceLock<tempfile::TempDir> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| tempfile::tempdir().expect("a folder for temporary files"));
    let path = folder.path().join(name);
    std::fs::write(&path, bytes).expect("a temporary file");
    path
}

fn read<T, E: Into<qkv_models::Error>>(name: &str, bytes: &[u8], read: impl FnOnce(&Path) -> Result<T, E>) -> String {
    outcome(read(&file_of(name, bytes)))
}

/// Weights in memory, every tensor read.
pub fn safetensors(bytes: &[u8]) -> String {
    match TensorFile::from_bytes(bytes.to_vec(), "a.safetensors") {
        Err(error) => error.to_string(),
        Ok(file) => file.names().map(|name| outcome(file.read(name))).collect::<Vec<_>>().join(", "),
    }
}

/// The reader of `qkv run` and the explorer: the header of a file, then every tensor, whole and in part.
pub fn safetensors_file(bytes: &[u8]) -> String {
    let mut file = match Reader::open(&file_of("reader.safetensors", bytes)) {
        Ok(file) => file,
        Err(error) => return error.to_string(),
    };
    let names: Vec<String> = file.names().map(str::to_owned).collect();
    for name in &names {
        let info = file.info(name).expect("it is listed").clone();
        let whole = file.read(name).expect("its bytes are in the file");
        assert_eq!(whole.len() as u64, info.byte_len());
        let half = info.byte_len() / 2;
        assert_eq!(file.read_range(name, half..info.byte_len()).expect("within it"), whole[half as usize..]);
        assert!(file.read_range(name, 0..info.byte_len() + 1).is_err());
    }
    format!("right {:?}", names.len().min(4))
}

/// A GGUF file: tensors, tokenizer, and the model.
pub fn gguf(bytes: &[u8]) -> String {
    match Gguf::from_bytes(bytes.to_vec(), "a.gguf") {
        Err(error) => error.to_string(),
        Ok(file) => {
            file.names().for_each(|name| drop(file.read(name)));
            outcome(Tokenizer::of_gguf(&file)) + &read("a.gguf", bytes, |path| Generator::open(path))
        }
    }
}

/// A `tokenizer.json`, and texts encoded and decoded with it.
pub fn tokenizer(bytes: &[u8]) -> String {
    match Tokenizer::from_bytes(bytes, "tokenizer.json") {
        Err(error) => error.to_string(),
        Ok(tokenizer) => {
            let ids = tokenizer.encode("the Fox\u{301} 好 </s> 12");
            let (framed, _) = tokenizer.encode_framed("one", Some("two"));
            format!("right {} {}", tokenizer.decode(&ids).is_empty(), framed.len())
        }
    }
}

/// A chat template, rendered.
pub fn template(bytes: &[u8]) -> String {
    let messages = [Message::new("user", "What is it?"), Message::new("assistant", "A dog.")];
    let source = String::from_utf8_lossy(bytes);
    outcome(Template::new(&source, "t").and_then(|template| template.render(&messages, "<s>", "</s>")))
}

/// A recipe, and its text as changes to `base`, a valid recipe.
pub fn recipe(bytes: &[u8], base: &str) -> String {
    let text = String::from_utf8_lossy(bytes);
    let (change, rest) = text.split_once('\n').unwrap_or((&text, ""));
    let changed = Recipe::parse(base, "r.toml".as_ref(), &[change.to_owned(), rest.to_owned()]);
    match Recipe::parse(&text, "r.toml".as_ref(), &[]) {
        Err(error) => error.to_string() + &outcome(changed),
        Ok(recipe) => {
            let again = Recipe::parse(&recipe.to_toml(), "r.toml".as_ref(), &[]).expect("it wrote this itself");
            assert!(recipe == again || recipe.to_toml().contains("nan"), "{text}");
            format!("right {}", recipe.model.name())
        }
    }
}

/// Pairs and labeled texts, one per line.
pub fn pairs(bytes: &[u8]) -> String {
    read("a.tsv", bytes, |path| Corpus::read(path)) + &read("a.tsv", bytes, labelled::classes)
}

/// Pairs in a compressed file.
pub fn packed_pairs(bytes: &[u8]) -> String {
    read("a.tsv.gz", bytes, |path| Corpus::read(path))
}

/// Images and labels in IDX files.
pub fn idx_files(bytes: &[u8]) -> String {
    read("a.idx", bytes, |path| idx::images(path)) + &read("a.idx", bytes, |path| idx::labels(path))
}

/// A PNG image.
pub fn png(bytes: &[u8]) -> String {
    image(Image::from_bytes(bytes, "a.png"))
}

/// A JPEG image.
pub fn jpeg(bytes: &[u8]) -> String {
    image(Image::from_bytes(bytes, "a.jpg"))
}

/// Images with boxes in COCO's JSON.
pub fn boxes(bytes: &[u8]) -> String {
    read("a.json", bytes, |path| -> qkv_models::Result<_> {
        let found = labelled::boxes(path)?;
        let classes = found.0.iter().flat_map(|image| &image.boxes).map(|(class, _)| *class);
        assert!(classes.max().is_none_or(|most| most < found.1.len()), "a class beyond the names there are");
        Ok(found)
    })
}

/// A list of images with texts, beside an image.
pub fn captions(bytes: &[u8]) -> String {
    let pixels = [[1, 2, 3, 1, 2, 3, 0, 0], [4, 5, 6, 4, 5, 6, 0, 0]].concat();
    let header = [70u32, 0, 54, 40, 2, 2, 24 << 16 | 1, 0, 16, 0, 0, 0, 0].map(u32::to_le_bytes).concat();
    file_of("a.bmp", &[&b"BM"[..], &header, &pixels].concat());
    read("captions.tsv", bytes, |path| -> qkv_models::Result<_> {
        let labelled::Captions { images, lines } = labelled::captions(path)?;
        assert!(lines.iter().all(|(image, text)| *image < images.len() && !text.is_empty()), "a line without an image");
        Ok(lines)
    })
}

/// The `model.json` of TensorFlow.js, beside a file of four numbers.
pub fn tfjs(bytes: &[u8]) -> String {
    file_of("a.bin", &[0; 16]);
    let path = file_of("model.json", bytes);
    outcome(TfjsModel::open(path.parent().expect("a folder")))
}

/// A checkpoint of PyTorch, every tensor read.
pub fn torch(bytes: &[u8]) -> String {
    match TorchFile::from_bytes(bytes.to_vec(), "a.pt") {
        Err(error) => error.to_string(),
        Ok(file) => {
            let read = |name: &str| -> qkv_formats::Result<_> {
                let values = file.read(name)?;
                assert_eq!(Some(values.len()), file.shape(name).map(|shape| shape.iter().product()));
                Ok(values)
            };
            file.names().map(|name| outcome(read(name))).collect::<Vec<_>>().join(", ")
        }
    }
}

/// The YAML of settings.
pub fn yaml(bytes: &[u8]) -> String {
    let Ok(text) = std::str::from_utf8(bytes) else { return "not UTF-8".into() };
    match yaml::parse(text) {
        Err((line, what)) => {
            assert!((1..=text.lines().count()).contains(&line), "line {line}");
            what
        }
        Ok(found) => {
            assert!(found.is_object());
            "right".into()
        }
    }
}

/// A WebP image.
pub fn webp(bytes: &[u8]) -> String {
    image(Image::from_bytes(bytes, "a.webp"))
}

/// A BMP image.
pub fn bmp(bytes: &[u8]) -> String {
    image(Image::from_bytes(bytes, "a.bmp"))
}

/// Checks the size of an image that was accepted.
fn image(found: qkv_formats::Result<Image>) -> String {
    let kind = match &found {
        Ok(image) => format!("{} channels", ["no", "one", "two", "three"][image.channels()]),
        Err(_) => String::new(),
    };
    if let Ok(image) = &found {
        assert_eq!(image.points().len(), image.width() * image.height() * image.channels());
        assert_eq!(image.in_channels(1).channels(), 1);
    }
    let outcome = kind + &outcome(found);
    assert!(!outcome.contains("cannot be decoded"), "a decoder panicked, and was caught");
    outcome
}

/// Tagged words in columns.
pub fn columns(bytes: &[u8]) -> String {
    read("a.conll", bytes, labelled::tags)
}

/// Questions with answers.
pub fn questions(bytes: &[u8]) -> String {
    read("a.json", bytes, labelled::answers)
}

/// Conversations, one per line.
pub fn conversations(bytes: &[u8]) -> String {
    read("a.jsonl", bytes, chat::conversations)
}

/// A recording, with weights of every layer.
pub fn recordings(bytes: &[u8]) -> String {
    let recording = match file::open(file_of("recording.safetensors", bytes), &OpenOptions::default()) {
        Ok(recording) => recording,
        Err(error) => return error.to_string(),
    };
    let layers = recording.layers.iter().map(|layer| {
        let [n, m] = layer.size();
        outcome(layer.rows_at(0, &[0]))
            + &outcome(layer.rectangle(0, 0..n.min(8), 0..m.min(8)))
            + &outcome(layer.pooled(layer.heads() - 1, [4, 4], qkv::Pool::Mean))
    });
    layers.collect::<Vec<_>>().join(", ")
}

/// A word alignment in Pharaoh format.
pub fn links(bytes: &[u8]) -> String {
    outcome(qkv_explore::pharaoh(&String::from_utf8_lossy(bytes)).map(drop))
}

/// A recording, all of it, and its spectrogram.
pub fn sound(bytes: &[u8]) -> String {
    let (recording, filters) = (Recording::from_bytes(bytes.to_vec(), "a.wav"), MelFilters::slaney(8));
    let found = Spectrogram::new(&recording, &filters).and_then(|mut all| all.window(0, all.frames().min(99), 100));
    if let Ok(window) = &found {
        assert!(window.len() == 800 && window.iter().all(|x| x.is_finite()));
    }
    // Sound decoders overflow on some headers; in builds with overflow checks, the panic becomes an error.
    outcome(found)
}

/// A `model.bin` of CTranslate2, every tensor read.
pub fn ctranslate2(bytes: &[u8]) -> String {
    match CTranslate2::from_bytes(bytes.to_vec(), "model.bin") {
        Err(error) => error.to_string(),
        Ok(file) => file.names().map(|name| outcome(file.read(name))).collect::<Vec<_>>().join(", "),
    }
}

/// A ggml file of Whisper, every tensor read.
pub fn ggml(bytes: &[u8]) -> String {
    match Ggml::from_bytes(bytes.to_vec(), "ggml.bin") {
        Err(error) => error.to_string(),
        Ok(file) => file.names().map(|name| outcome(file.read(name))).collect::<Vec<_>>().join(", "),
    }
}
