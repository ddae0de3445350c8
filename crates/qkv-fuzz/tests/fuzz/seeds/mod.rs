//! Valid files, made by the library itself if it writes the format, and by hand if it only reads it.

#[path = "../../../../qkv-models/tests/suite/archive.rs"]
mod archive;
mod gguf;

pub use gguf::gguf;

use qkv::{Attention, Features, Mask, Tensor};
use qkv_fuzz::png_chunk;
use qkv_models::files::tensors::{NamedTensor, Storage, TensorFile, to_bytes, write};
use qkv_models::text::tokenizer::{Kind, Tokenizer};
use qkv_models::train::{Run, Watcher};
use qkv_models::{
    Architecture, Encoder, EncoderConfig, Generator, GptConfig, Model, ModelConfig, Recipe, Search, SpecialTokens,
    TransformerConfig, Translator,
};
use std::sync::atomic::AtomicBool;
use tempfile::TempDir;

const TEXT: &str = "the quick brown fox jumps over the lazy dog\n";
const TEMPLATE: &str = "{% for m in messages %}{{ '<s>' + m['role'] + m.content | trim }}{% endfor %}{% if add_generation_prompt %}{{ bos_token }}{% endif %}";

fn characters() -> Tokenizer {
    Tokenizer::train([TEXT], Kind::Characters).unwrap()
}

pub fn safetensors() -> Vec<Vec<u8>> {
    let tensors = [
        NamedTensor { name: "a", shape: &[2, 3], values: &[1.0, -2.0, 0.5, 3.0, 0.0, 7.0] },
        NamedTensor { name: "b.bias", shape: &[3], values: &[1.0, 2.0, 3.0] },
        NamedTensor { name: "empty", shape: &[0, 4], values: &[] },
    ];
    [Storage::F32, Storage::F16, Storage::Bf16, Storage::Rows8]
        .map(|storage| to_bytes(&tensors, storage).unwrap())
        .to_vec()
}

pub fn tokenizers() -> Vec<Vec<u8>> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    let saved = |tokenizer: &Tokenizer| {
        tokenizer.save(&path).unwrap();
        std::fs::read(&path).unwrap()
    };
    let pieces = Tokenizer::train([TEXT, "好久不见"], Kind::Bpe { size: 300 }).unwrap();
    let words = r###"{"version":"1.0","added_tokens":[{"id":0,"content":"[PAD]","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true},{"id":2,"content":"[CLS]","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true},{"id":3,"content":"[SEP]","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}],"normalizer":{"type":"BertNormalizer","clean_text":true,"handle_chinese_chars":true,"strip_accents":null,"lowercase":true},"pre_tokenizer":{"type":"BertPreTokenizer"},"post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"[CLS]","type_id":0}},{"Sequence":{"id":"A","type_id":0}},{"SpecialToken":{"id":"[SEP]","type_id":0}}],"pair":[{"Sequence":{"id":"A","type_id":0}},{"Sequence":{"id":"B","type_id":1}}],"special_tokens":{"[CLS]":{"id":"[CLS]","ids":[2],"tokens":["[CLS]"]},"[SEP]":{"id":"[SEP]","ids":[3],"tokens":["[SEP]"]}}},"decoder":{"type":"WordPiece","prefix":"##","cleanup":true},"model":{"type":"WordPiece","unk_token":"[UNK]","continuing_subword_prefix":"##","max_input_chars_per_word":100,"vocab":{"[PAD]":0,"[UNK]":1,"[CLS]":2,"[SEP]":3,"the":4,"fox":5,"##es":6,"12":7}}}"###;
    let unigram = r#"{"added_tokens":[],"pre_tokenizer":{"type":"Metaspace","replacement":"▁","prepend_scheme":"always","split":true},"model":{"type":"Unigram","unk_id":0,"vocab":[["<unk>",0.0],["</s>",-1.0],["▁the",-2.5],["fox",-3.0]],"byte_fallback":false}}"#;
    vec![saved(&characters()), saved(&pieces), words.as_bytes().to_vec(), unigram.as_bytes().to_vec()]
}

pub fn templates() -> Vec<Vec<u8>> {
    let second = "{% set x = namespace(n=0) %}{% for m in messages[1:] %}{% set x.n = x.n + 1 %}{% if m.role == 'user' %}{{ m.content|length }}{% else %}{{ raise_exception('no') }}{% endif %}{% endfor %}{% macro f(a, b=2) %}{{ a * b }}{% endmacro %}{{ f(3) }}";
    vec![TEMPLATE.into(), second.into()]
}

/// A complete recipe.
pub fn recipe() -> String {
    "name = 'tiny'\n[data]\ntask = 'copy'\npairs = 30\ndev_pairs = 4\n[tokenizer]\nkind = 'characters'\n[model]\nkind = 'transformer'\nd_model = 16\nffn_dim = 16\nheads = 2\nencoder_layers = 1\ndecoder_layers = 1\n[train]\nsteps = 4\ntokens = 64\nvalidate = 4\nsave = 4\n".into()
}

pub fn recipes() -> Vec<Vec<u8>> {
    let encoder = "name = 'long'\n[data]\nneedles = 64\ntexts = 10\ndev_texts = 2\n[model]\nkind = 'encoder'\nattention = { mask = { longformer = { window = 8, globals = [0] } } }\n[train]\nmetric = 'exact'\nadam = { beta2 = 0.99 }\n";
    let gpt = "name = 'g'\nseed = 3\n[data]\ntext = 'a.txt'\ndev = 'b.txt'\n[tokenizer]\nfile = 't.json'\n[model]\nkind = 'gpt'\nattention = { score = { linear = 'elu' } }\n[train]\nmetric = 'loss'\n[search.sample]\ntop_k = 5\n";
    [recipe(), encoder.into(), gpt.into(), "train.lr=3e-4\nmodel.kind=gpt".into()].map(String::into_bytes).to_vec()
}

pub fn yaml() -> Vec<Vec<u8>> {
    let nested = "---\nname: 'a: b' # told\nsizes:\n- 2\n- 3.5\nmore:\n  deep:\n    - x\n  flag: True\nnone:\n";
    [nested, "heads: 8\n", ""].map(|text| text.as_bytes().to_vec()).to_vec()
}

/// Zlib data without compression.
fn zlib(data: &[u8]) -> Vec<u8> {
    let (a, b) =
        data.iter().fold((1u32, 0u32), |(a, b), &x| ((a + u32::from(x)) % 65_521, (a + u32::from(x) + b) % 65_521));
    let length = data.len() as u16;
    [&[0x78, 1, 1][..], &length.to_le_bytes(), &(!length).to_le_bytes(), data, &(b << 16 | a).to_be_bytes()].concat()
}

/// Pairs as a `.gz` file, stored, and plain.
pub fn packed() -> Vec<Vec<u8>> {
    let text = b"a\tb\n";
    let stored = [&[1, 4, 0, 251, 255][..], text].concat();
    let head = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3];
    let whole = [&head[..], &stored, &0x1a11_94ceu32.to_le_bytes(), &4u32.to_le_bytes()].concat();
    vec![whole, text.to_vec()]
}

/// Two images of three by two points, and their classes.
pub fn idx() -> Vec<Vec<u8>> {
    let images =
        [&[0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 3][..], &[0, 50, 100, 150, 200, 250], &[9; 6]].concat();
    vec![images, vec![0, 0, 8, 1, 0, 0, 0, 2, 7, 3]]
}

/// A PNG of a given size, bit depth and color type, with extra chunks between the header and the end, and its rows.
fn drawn(size: [u32; 2], [depth, colour, interlaced]: [u8; 3], between: &[Vec<u8>], rows: &[u8]) -> Vec<u8> {
    let head = [&size[0].to_be_bytes()[..], &size[1].to_be_bytes(), &[depth, colour, 0, 0, interlaced]].concat();
    let (head, data, end) = (png_chunk(b"IHDR", &head), png_chunk(b"IDAT", &zlib(rows)), png_chunk(b"IEND", &[]));
    [&b"\x89PNG\r\n\x1a\n"[..], &head, &between.concat(), &data, &end].concat()
}

/// Gray, color with transparency in 16 bits, a palette of four colors, and one bit in seven passes.
pub fn png() -> Vec<Vec<u8>> {
    let palette = [png_chunk(b"PLTE", &[255, 0, 0, 0, 255, 0, 0, 0, 255, 9, 9, 9]), png_chunk(b"tRNS", &[255, 128, 0])];
    let wide: Vec<u8> = (0..2).flat_map(|row| std::iter::once(row).chain((0..16).map(|x| x * 15))).collect();
    vec![
        drawn([3, 2], [8, 0, 0], &[], &[0, 10, 20, 30, 1, 5, 5, 5]),
        drawn([2, 2], [16, 6, 0], &[], &wide),
        drawn([4, 1], [2, 3, 0], &palette, &[0, 0b0001_1011]),
        drawn([2, 2], [1, 0, 1], &[], &[0, 128, 0, 128, 0, 192]),
    ]
}

/// Gray, color, progressive, and CMYK.
pub fn jpeg() -> Vec<Vec<u8>> {
    let files: [&[u8]; 4] = [
        include_bytes!("../../../../qkv-formats/tests/images/grey.jpg"),
        include_bytes!("../../../../qkv-formats/tests/images/colour.jpg"),
        include_bytes!("../../../../qkv-formats/tests/images/progressive.jpg"),
        include_bytes!("../../../../qkv-formats/tests/images/cmyk.jpg"),
    ];
    files.map(<[u8]>::to_vec).to_vec()
}

/// Two images, one box.
pub fn boxes() -> Vec<Vec<u8>> {
    let file = br#"{"images":[{"id":1,"file_name":"a.jpg","width":40,"height":30},
        {"id":2,"file_name":"b.jpg","width":4,"height":3}],
        "annotations":[{"image_id":1,"category_id":7,"bbox":[1,2,3.5,4],"iscrowd":0}],
        "categories":[{"id":7,"name":"cell"}]}"#;
    vec![file.to_vec()]
}

/// An image with two texts, and with one of several columns.
pub fn captions() -> Vec<Vec<u8>> {
    vec![b"a.bmp\ta red circle\na.bmp\ta circle\n".to_vec(), b"\na.bmp\twhat\tis it\r\n".to_vec()]
}

/// A manifest with a matrix and a number in one file, and an empty manifest.
pub fn tfjs() -> Vec<Vec<u8>> {
    let model = br#"{"modelTopology":{},"weightsManifest":[{"paths":["a.bin"],"weights":[
        {"name":"a/kernel","shape":[3,1],"dtype":"float32"},{"name":"a/bias","shape":[],"dtype":"float32"}]}]}"#;
    vec![model.to_vec(), br#"{"weightsManifest":[]}"#.to_vec()]
}

/// Two tensors of four numbers, one of them in a dictionary within the dictionary, and transposed.
pub fn torch() -> Vec<Vec<u8>> {
    let text = |text: &str| [b"X", &(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat();
    let tensor = |shape: &[u8], strides: &[u8]| {
        let tuple = |of: &[u8]| [b"(".to_vec(), of.iter().flat_map(|&n| [b'K', n]).collect(), b"t".to_vec()].concat();
        let storage = [text("storage"), b"ctorch\nFloatStorage\n".to_vec(), text("0"), text("cpu"), b"K\x04".to_vec()];
        let arguments = [b"((".to_vec(), storage.concat(), b"tQK\0".to_vec(), tuple(shape), tuple(strides)].concat();
        let rest = b"\x89ccollections\nOrderedDict\n)Rt".to_vec();
        [b"ctorch._utils\n_rebuild_tensor_v2\n".to_vec(), arguments, rest, b"R".to_vec()].concat()
    };
    let inner = [b"}(".to_vec(), text("b"), tensor(&[2, 2], &[1, 2]), b"u".to_vec()].concat();
    let pickle = [b"\x80\x02}(".to_vec(), text("a"), tensor(&[4], &[1]), text("model"), inner, b"u.".to_vec()].concat();
    vec![archive::zip(&[("a/data.pkl".into(), pickle), ("a/data/0".into(), vec![0; 16])])]
}

/// A lossy and a lossless image.
pub fn webp() -> Vec<Vec<u8>> {
    let files: [&[u8]; 2] = [
        include_bytes!("../../../../qkv-formats/tests/images/lossy.webp"),
        include_bytes!("../../../../qkv-formats/tests/images/lossless.webp"),
    ];
    files.map(<[u8]>::to_vec).to_vec()
}

/// An image in 24 bits, and one in 8 bits with a palette of two colors.
pub fn bmp() -> Vec<Vec<u8>> {
    let file = |bits: u32, colours: &[u8], rows: &[u8]| {
        let start = 54 + colours.len() as u32;
        let size = start + rows.len() as u32;
        let header =
            [size, 0, start, 40, 2, 2, bits << 16 | 1, 0, rows.len() as u32, 0, 0, colours.len() as u32 / 4, 0];
        [&b"BM"[..], &header.map(u32::to_le_bytes).concat(), colours, rows].concat()
    };
    vec![file(24, &[], &[7; 16]), file(8, &[1, 2, 3, 0, 9, 9, 9, 0], &[0, 1, 0, 0, 1, 0, 0, 0])]
}

fn writer(architecture: Architecture) -> Translator {
    let tokenizer = characters();
    let config = ModelConfig::new(architecture, tokenizer.len(), SpecialTokens::of(&tokenizer));
    let (model, parameters) = Model::new(&config, 3).unwrap();
    Translator { model, parameters, tokenizer, search: Search::default() }
}

/// A folder with a GPT-2 with a chat template.
pub fn decoder() -> TempDir {
    let (folder, again) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let sizes = GptConfig { d_model: 16, ffn_dim: 16, heads: 2, layers: 1, max_positions: 16, ..Default::default() };
    writer(Architecture::Gpt(sizes)).save(folder.path(), Storage::F32).unwrap();
    // Once more through a generator, which writes all files.
    Generator::open(folder.path()).unwrap().save(again.path(), Storage::F32).unwrap();
    let path = again.path().join("tokenizer_config.json");
    let mut settings: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    settings["chat_template"] = TEMPLATE.into();
    std::fs::write(path, settings.to_string()).unwrap();
    again
}

/// A folder of adapters for [`decoder`].
pub fn adapters() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let settings = serde_json::json!({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "bias": "none", "lora_dropout": 0.1,
        "target_modules": ["c_attn"], "alpha_pattern": { "mlp.c_fc": 3 }, "use_rslora": false, "use_dora": false,
    });
    std::fs::write(folder.path().join("adapter_config.json"), settings.to_string()).unwrap();
    let values = vec![0.25; 96];
    let module = |end: &str| format!("base_model.model.transformer.h.0.attn.c_attn.{end}.weight");
    let (a, b) = (module("lora_A"), module("lora_B"));
    let named = [
        NamedTensor { name: &a, shape: &[2, 16], values: &values[..32] },
        NamedTensor { name: &b, shape: &[48, 2], values: &values },
    ];
    write(folder.path().join("adapter_model.safetensors"), &named, Storage::F32).unwrap();
    folder
}

pub fn translator() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let sizes = TransformerConfig {
        d_model: 16,
        ffn_dim: 16,
        heads: 2,
        encoder_layers: 1,
        decoder_layers: 1,
        max_positions: 16,
        ..Default::default()
    };
    writer(Architecture::Transformer(sizes)).save(folder.path(), Storage::F32).unwrap();
    folder
}

/// A folder with a BERT or, if `own`, with an encoder that is not one.
pub fn encoder(own: bool) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let attention = if own { Attention::scaled_dot().mask(Mask::longformer(4, [0])) } else { Attention::scaled_dot() };
    let sizes = EncoderConfig {
        d_model: 16,
        ffn_dim: 16,
        heads: 2,
        layers: 1,
        max_positions: 16,
        attention,
        ..Default::default()
    };
    Encoder::new(&sizes, characters(), 5).unwrap().save(folder.path(), Storage::F32).unwrap();
    folder
}

/// A decoder in two files with an index.
pub fn shards() -> TempDir {
    let folder = decoder();
    let path = folder.path().join("model.safetensors");
    let file = TensorFile::open(&path).unwrap();
    let mut map = serde_json::Map::new();
    for part in 0..2 {
        let name = format!("model-0000{}-of-00002.safetensors", part + 1);
        let names: Vec<&str> =
            file.names().enumerate().filter(|(at, _)| at % 2 == part).map(|(_, name)| name).collect();
        let values: Vec<Vec<f32>> = names.iter().map(|name| file.read(name).unwrap()).collect();
        let named: Vec<NamedTensor> = (names.iter().zip(&values))
            .map(|(name, values)| NamedTensor { name, shape: file.shape(name).unwrap(), values })
            .collect();
        write(folder.path().join(&name), &named, Storage::F32).unwrap();
        names.iter().for_each(|tensor| drop(map.insert(tensor.to_string(), name.clone().into())));
    }
    std::fs::remove_file(path).unwrap();
    let index = serde_json::json!({ "metadata": {}, "weight_map": map });
    std::fs::write(folder.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    folder
}

struct Quiet;

impl Watcher for Quiet {}

/// A run that has completed its four steps.
pub fn run() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let recipe = Recipe::parse(&recipe(), "tiny.toml".as_ref(), &[]).unwrap();
    Run::new(&recipe, folder.path(), 1).unwrap().train(&mut Quiet, &AtomicBool::new(false)).unwrap();
    folder
}

pub fn questions() -> Vec<Vec<u8>> {
    let one = r#"{"version":"1.1","data":[{"title":"t","paragraphs":[{"context":"Ådas cat is in Oslo","qas":[{"id":"1","question":"Where?","answers":[{"text":"Oslo","answer_start":15}]},{"id":"2","question":"Who?","is_impossible":true,"answers":[]}]}]}]}"#;
    vec![one.into()]
}

pub fn recordings() -> Vec<Vec<u8>> {
    let folder = tempfile::tempdir().unwrap();
    let [q, k, v] = [1, 2, 3].map(|seed| Tensor::<f32, 4>::randn([1, 2, 5, 4], seed));
    let named = |name, tensor: &Tensor<f32, 4>| (name, tensor.data().to_vec());
    let all = [named("q", &q), named("k", &k), named("v", &v)];
    let four: Vec<NamedTensor> =
        all.iter().map(|(name, values)| NamedTensor { name, shape: &[1, 2, 5, 4], values }).collect();
    let plain = to_bytes(&four, Storage::F32).unwrap();
    let weights =
        to_bytes(&[NamedTensor { name: "weights", shape: &[2, 2], values: &[0.5, 0.5, 1.0, 0.0] }], Storage::F32)
            .unwrap();
    // Our own format, with two attentions.
    let path = folder.path().join("a.safetensors");
    std::fs::write(&path, &plain).unwrap();
    let mut seeds = vec![plain, weights];
    for attention in [Attention::scaled_dot().mask(Mask::causal()), Attention::linear(Features::Elu)] {
        let asked = qkv_explore::file::OpenOptions { attention: Some(attention), ..Default::default() };
        let Ok(recording) = qkv_explore::file::open(&path, &asked) else { continue };
        let to = folder.path().join("b.safetensors");
        qkv_explore::file::save(&recording, &to).unwrap();
        seeds.push(std::fs::read(to).unwrap());
    }
    assert!(seeds.len() > 2);
    seeds
}

/// Sounds in every supported format, with the tone of the tests.
pub fn sounds() -> Vec<Vec<u8>> {
    let tone: Vec<f32> = (0..400).map(|at| (at as f32 * 0.2).sin()).collect();
    vec![
        qkv_models::audio::wav::to_bytes(&tone, 16_000),
        qkv_models::audio::wav::to_bytes(&tone, 11_025),
        include_bytes!("../../../../qkv-formats/tests/sounds/tone.flac").to_vec(),
        include_bytes!("../../../../qkv-formats/tests/sounds/tone.mp3").to_vec(),
        include_bytes!("../../../../qkv-formats/tests/sounds/tone.ogg").to_vec(),
    ]
}

/// CTranslate2 files: numbers of every type, rows with scales, another name.
pub fn ctranslate2() -> Vec<Vec<u8>> {
    let name = |text: &str| [&(text.len() as u16 + 1).to_le_bytes()[..], text.as_bytes(), &[0]].concat();
    let tensor = |text: &str, shape: &[u32], kind: u8, data: &[u8]| {
        let axes: Vec<u8> = shape.iter().flat_map(|axis| axis.to_le_bytes()).collect();
        let len = (data.len() as u32).to_le_bytes();
        [name(text), vec![shape.len() as u8], axes, vec![kind], len.to_vec(), data.to_vec()].concat()
    };
    let head = [6u32.to_le_bytes().to_vec(), name("WhisperSpec"), 3u32.to_le_bytes().to_vec()].concat();
    let tensors = [
        tensor("a/weight", &[2, 2], 1, &[1, 255, 3, 4]),
        tensor("a/weight_scale", &[2], 0, &[0, 0, 0, 64, 0, 0, 128, 63]),
        tensor("heads", &[], 2, &[8, 0]),
        tensor("b", &[3], 4, &[0, 60, 0, 0, 0, 188]),
        tensor("c", &[1], 5, &[128, 63]),
        tensor("d", &[1], 3, &[1, 0, 0, 0]),
    ];
    let count = (tensors.len() as u32).to_le_bytes().to_vec();
    let aliases = [1u32.to_le_bytes().to_vec(), name("other"), name("b")].concat();
    vec![[head, count, tensors.concat(), aliases].concat()]
}

/// ggml files: sizes, filters, a vocabulary, plain and quantized tensors.
pub fn ggml() -> Vec<Vec<u8>> {
    let words = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
    let tensor = |name: &str, shape: &[u32], kind: u32, data: &[u8]| {
        let head = words(&[shape.len() as u32, name.len() as u32, kind]);
        [head, words(shape), name.as_bytes().to_vec(), data.to_vec()].concat()
    };
    let head = words(&[qkv_models::files::ggml::MAGIC, 9, 4, 2, 1, 1, 4, 2, 1, 1, 2, 1]);
    let filters = [words(&[2, 1]), vec![0, 0, 128, 63, 0, 0, 0, 0]].concat();
    let vocabulary = [words(&[2, 1]), b"a".to_vec(), words(&[2]), b" b".to_vec()].concat();
    let tensors = [
        tensor("plain", &[2, 1], 0, &[0; 8]),
        tensor("half", &[2], 1, &[0, 60, 0, 60]),
        tensor("blocks", &[32], 8, &[7; 34]),
    ];
    vec![[head, filters, vocabulary, tensors.concat()].concat()]
}
