//! Reading Whisper checkpoints. Parameters have the names of the Hugging Face layout; the tables here map them to
//! tensors of CTranslate2 and ggml files. Convolutions are `[O, I, K]` in files and `[O, K·I]` in memory.

use super::vocabulary::Vocabulary;
use super::{Whisper, WhisperConfig};
use crate::files::ctranslate2::CTranslate2;
use crate::files::folder::{self, CONFIG, GENERATION_CONFIG, TOKENIZER, WEIGHTS, WEIGHTS_INDEX};
use crate::files::ggml::{Ggml, MAGIC};
use crate::files::input;
use crate::files::weights::Weights;
use crate::layout::config::Fields;
use crate::text::tokenizer::Tokenizer;
use crate::{Error, Result};
use qkv_formats::numbers::transposed;
use qkv_nn::Parameters;
use qkv_nn::layers::Builder;
use serde_json::{Value, json};
use std::io::Read;
use std::path::Path;

/// The weights of a CTranslate2 folder.
const MODEL_BIN: &str = "model.bin";

/// The contents of a checkpoint.
pub(super) struct Checkpoint {
    pub model: Whisper,
    pub parameters: Parameters<f32>,
    pub vocabulary: Vocabulary,
    pub alignment_heads: Vec<(usize, usize)>,
}

/// A file with tensors.
enum Tensors {
    HuggingFace(Weights),
    CTranslate2(CTranslate2),
    Ggml(Ggml),
}

/// Whether a path is a CTranslate2 folder, a folder with a Whisper model in the Hugging Face layout, or a ggml file.
pub(super) fn is_whisper(path: &Path) -> bool {
    if path.is_dir() {
        let config: Option<Value> = folder::read_json_if_present(&path.join(CONFIG)).ok().flatten();
        return path.join(MODEL_BIN).exists() || config.is_some_and(|config| config["model_type"] == "whisper");
    }
    let mut start = [0; 4];
    let read = input::open(path).is_ok_and(|mut file| file.read_exact(&mut start).is_ok());
    read && u32::from_le_bytes(start) == MAGIC
}

/// Reads a CTranslate2 or Hugging Face folder, or a ggml file.
pub(super) fn read(path: &Path) -> Result<Checkpoint> {
    if !path.is_dir() {
        return of_ggml(Ggml::open(path)?);
    }
    if path.join(MODEL_BIN).exists() {
        return of_ctranslate2(path);
    }
    if !path.join(WEIGHTS).exists() && !path.join(WEIGHTS_INDEX).exists() {
        let what = format!("`{}` has neither `{MODEL_BIN}` nor `{WEIGHTS}`", path.display());
        let hint = "name a folder of CTranslate2 or Hugging Face, or a ggml file";
        return Err(Error::invalid(what).with_hint(hint));
    }
    of_hugging_face(path)
}

fn of_hugging_face(path: &Path) -> Result<Checkpoint> {
    let config: Value = folder::read_json(&path.join(CONFIG))?;
    let config_path = path.join(CONFIG);
    let fields = Fields { json: &config, path: &config_path };
    fields.only("model_type", json!("whisper"))?;
    fields.only("activation_function", json!("gelu"))?;
    fields.only("scale_embedding", json!(false))?;
    let sizes = WhisperConfig {
        bands: fields.needed(&["num_mel_bins"])?,
        audio_positions: fields.needed(&["max_source_positions"])?,
        text_positions: fields.needed(&["max_target_positions"])?,
        d_model: fields.needed(&["d_model"])?,
        encoder_heads: fields.needed(&["encoder_attention_heads"])?,
        decoder_heads: fields.needed(&["decoder_attention_heads"])?,
        encoder_layers: fields.needed(&["encoder_layers"])?,
        decoder_layers: fields.needed(&["decoder_layers"])?,
        encoder_ffn: fields.needed(&["encoder_ffn_dim"])?,
        decoder_ffn: fields.needed(&["decoder_ffn_dim"])?,
        vocabulary: fields.needed(&["vocab_size"])?,
    };
    let vocabulary = tokenizer_of(path, sizes.vocabulary)?;
    let generation: Option<Value> = folder::read_json_if_present(&path.join(GENERATION_CONFIG))?;
    let heads = heads_of(generation.as_ref(), &sizes);
    let weights = Weights::of_folder(path)?;
    let numbers = weights.numbers();
    build(Tensors::HuggingFace(weights), numbers, sizes, vocabulary, heads, &config_path)
}

fn of_ctranslate2(path: &Path) -> Result<Checkpoint> {
    let file = CTranslate2::open(path.join(MODEL_BIN))?;
    let file_path = file.path().to_owned();
    let wrong = |part: &str, what: String| Error::format(&file_path, part, what);
    if file.spec() != "WhisperSpec" {
        return Err(wrong("header", format!("it is a `{}`, expected `WhisperSpec`", file.spec())));
    }
    let axis = |name: &str, at: usize| {
        let axis = file.shape(name).and_then(|shape| shape.get(at)).copied();
        axis.ok_or_else(|| wrong(&format!("tensor `{name}`"), "it is missing".into()))
    };
    let number = |name: &str| {
        let value = file.read(name)?.first().copied().unwrap_or(0.0);
        if value >= 1.0 {
            Ok(value as usize)
        } else {
            Err(wrong(&format!("tensor `{name}`"), format!("it is {value}")))
        }
    };
    let layers = |side: &str| {
        let exists = |layer: &usize| file.shape(&format!("{side}/layer_{layer}/ffn/linear_0/weight")).is_some();
        (0..).take_while(exists).count()
    };
    let sizes = WhisperConfig {
        bands: axis("encoder/conv1/weight", 1)?,
        audio_positions: axis("encoder/position_encodings/encodings", 0)?,
        text_positions: axis("decoder/position_encodings/encodings", 0)?,
        d_model: axis("decoder/embeddings/weight", 1)?,
        encoder_heads: number("encoder/num_heads")?,
        decoder_heads: number("decoder/num_heads")?,
        encoder_layers: layers("encoder"),
        decoder_layers: layers("decoder"),
        encoder_ffn: axis("encoder/layer_0/ffn/linear_0/weight", 0)?,
        decoder_ffn: axis("decoder/layer_0/ffn/linear_0/weight", 0)?,
        vocabulary: axis("decoder/embeddings/weight", 0)?,
    };
    let vocabulary = tokenizer_of(path, sizes.vocabulary)?;
    let config: Option<Value> = folder::read_json_if_present(&path.join(CONFIG))?;
    let heads = heads_of(config.as_ref(), &sizes);
    let numbers = file.names().filter_map(|name| file.shape(name)).map(|shape| shape.iter().product::<usize>()).sum();
    build(Tensors::CTranslate2(file), numbers, sizes, vocabulary, heads, &file_path)
}

fn of_ggml(file: Ggml) -> Result<Checkpoint> {
    let (sizes, path) = (file.sizes(), file.path().to_owned());
    let inner = |side: &str| {
        let name = format!("{side}.blocks.0.mlp.0.weight");
        let inner = file.shape(&name).and_then(|shape| shape.first()).copied();
        inner.ok_or_else(|| Error::format(&path, format!("tensor `{name}`"), "it is missing"))
    };
    if sizes.audio_width != sizes.text_width {
        return Err(Error::format(&path, "header", "encoder and decoder have different widths"));
    }
    let sizes = WhisperConfig {
        bands: sizes.bands,
        audio_positions: sizes.audio_positions,
        text_positions: sizes.text_positions,
        d_model: sizes.audio_width,
        encoder_heads: sizes.audio_heads,
        decoder_heads: sizes.text_heads,
        encoder_layers: sizes.audio_layers,
        decoder_layers: sizes.text_layers,
        encoder_ffn: inner("encoder")?,
        decoder_ffn: inner("decoder")?,
        vocabulary: sizes.vocabulary,
    };
    let vocabulary = Vocabulary::of_pieces(file.tokens().to_vec(), sizes.vocabulary, &path)?;
    let heads = heads_of(None, &sizes);
    let numbers = file.names().filter_map(|name| file.shape(name)).map(|shape| shape.iter().product::<usize>()).sum();
    build(Tensors::Ggml(file), numbers, sizes, vocabulary, heads, &path)
}

fn tokenizer_of(folder: &Path, len: usize) -> Result<Vocabulary> {
    let path = folder.join(TOKENIZER);
    Vocabulary::of_tokenizer(&Tokenizer::open(&path)?, len, &path)
}

/// The heads that follow the sound: those listed in the file, those known for published models, or all of the upper
/// half of the layers.
fn heads_of(config: Option<&Value>, sizes: &WhisperConfig) -> Vec<(usize, usize)> {
    let pair = |pair: &Value| {
        let at = |place: usize| pair.get(place).and_then(Value::as_u64).and_then(|x| usize::try_from(x).ok());
        Some((at(0)?, at(1)?)).filter(|&(layer, head)| layer < sizes.decoder_layers && head < sizes.decoder_heads)
    };
    let listed = config.and_then(|config| config.get("alignment_heads")).and_then(Value::as_array);
    let listed: Option<Vec<_>> = listed.and_then(|list| list.iter().map(pair).collect());
    if let Some(listed) = listed.filter(|listed| !listed.is_empty()) {
        return listed;
    }
    match (sizes.decoder_layers, sizes.d_model, sizes.vocabulary) {
        (4, 384, 51_865) => vec![(2, 2), (3, 0), (3, 2), (3, 3), (3, 4), (3, 5)],
        (4, 384, 51_864) => vec![(1, 0), (2, 0), (2, 5), (3, 0), (3, 1), (3, 2), (3, 3), (3, 4)],
        (6, 512, 51_865) => vec![(3, 1), (4, 2), (4, 3), (4, 7), (5, 1), (5, 2), (5, 4), (5, 6)],
        (6, 512, 51_864) => vec![(3, 3), (4, 7), (5, 1), (5, 5), (5, 7)],
        (layers, ..) => {
            (layers / 2..layers).flat_map(|layer| (0..sizes.decoder_heads).map(move |head| (layer, head))).collect()
        }
    }
}

/// Builds the model and fills it.
fn build(
    tensors: Tensors,
    numbers: usize,
    sizes: WhisperConfig,
    vocabulary: Vocabulary,
    alignment_heads: Vec<(usize, usize)>,
    path: &Path,
) -> Result<Checkpoint> {
    let wrong = |what: String| Error::format(path, "sizes", what);
    let each = [sizes.bands, sizes.audio_positions, sizes.text_positions, sizes.d_model, sizes.decoder_layers];
    if each.contains(&0) || sizes.text_positions < 16 {
        return Err(wrong(format!("{sizes:?} is no model")));
    }
    // No memory is allocated for sizes that exceed what the file contains.
    if sizes.least_numbers() > numbers as f64 {
        return Err(wrong(format!("{numbers} numbers are too few for {sizes:?}")));
    }
    let mut parameters = Parameters::new();
    let model = Whisper::new(&mut Builder::blank(&mut parameters), &sizes).map_err(|error| error.in_file(path))?;
    let all: Vec<_> = parameters.all().collect();
    for param in all {
        let name = parameters.name(param).to_owned();
        let shape = parameters.shape(param).to_vec();
        if let Some(values) = tensors.read(&name, &shape, sizes.d_model)? {
            parameters.get_mut(param).copy_from_slice(&values);
        }
    }
    Ok(Checkpoint { model, parameters, vocabulary, alignment_heads })
}

impl Tensors {
    /// The values of a parameter of this shape; `None` for the biases of keys, which are zero if the file has none.
    fn read(&self, name: &str, shape: &[usize], width: usize) -> Result<Option<Vec<f32>>> {
        let is_conv = name.contains(".conv") && shape.len() == 2;
        let file_shape = if is_conv { vec![shape[0], shape[1] / 3, 3] } else { shape.to_vec() };
        let values = match self {
            Tensors::HuggingFace(weights) => {
                let theirs = name.replace("embed_tokens.positions", "embed_positions");
                let prefixed = format!("model.{theirs}");
                let theirs = if weights.has(&prefixed) { prefixed } else { theirs };
                if name.ends_with("k_proj.bias") && !weights.has(&theirs) {
                    return Ok(None);
                }
                weights.read_shaped(&theirs, &file_shape)?
            }
            Tensors::CTranslate2(file) => {
                let (theirs, rows) = ctranslate2_name(name, width);
                let wrong = |what: String| Error::format(file.path(), format!("tensor `{theirs}`"), what);
                let found = file.shape(&theirs).ok_or_else(|| wrong("it is missing".into()))?;
                let first = rows.clone().map_or(file_shape[0], |rows| rows.end);
                let fits = found.len() == file_shape.len() && found[0] >= first && found[1..] == file_shape[1..];
                if !fits || rows.is_none() && found[0] != first {
                    return Err(wrong(format!("its shape is {found:?}, expected {file_shape:?}")));
                }
                let mut values = file.read(&theirs)?;
                if let Some(rows) = rows {
                    let each = file_shape[1..].iter().product::<usize>();
                    values = values[rows.start * each..rows.end * each].to_vec();
                }
                values
            }
            Tensors::Ggml(file) => {
                let Some(theirs) = ggml_name(name) else { return Ok(None) };
                let wrong = |what: String| Error::format(file.path(), format!("tensor `{theirs}`"), what);
                let found = file.shape(&theirs).ok_or_else(|| wrong("it is missing".into()))?;
                // Biases of convolutions are stored as columns.
                if found.iter().filter(|&&axis| axis != 1).ne(file_shape.iter().filter(|&&axis| axis != 1)) {
                    return Err(wrong(format!("its shape is {found:?}, expected {file_shape:?}")));
                }
                file.read(&theirs)?
            }
        };
        // Convolutions `[O, I, K]` become `[O, K, I]`.
        Ok(Some(if is_conv { transposed(&values, file_shape[1], 3) } else { values }))
    }
}

/// The CTranslate2 tensor that contains a parameter, and its rows there if several are stacked.
fn ctranslate2_name(name: &str, width: usize) -> (String, Option<std::ops::Range<usize>>) {
    let part = |at: usize| Some(at * width..(at + 1) * width);
    let name = name.replace("embed_tokens.positions.weight", "position_encodings/encodings");
    let name = name.replace("embed_positions.weight", "position_encodings/encodings");
    let name = name.replace("embed_tokens", "embeddings").replace('.', "/").replace("layers/", "layer_");
    let (base, kind) = name.rsplit_once('/').unwrap_or(("", &name));
    let norm = if kind == "weight" { "gamma" } else { "beta" };
    let ends: [(&str, &str, Option<std::ops::Range<usize>>); 14] = [
        ("self_attn/q_proj", "self_attention/linear_0", part(0)),
        ("self_attn/k_proj", "self_attention/linear_0", part(1)),
        ("self_attn/v_proj", "self_attention/linear_0", part(2)),
        ("self_attn/out_proj", "self_attention/linear_1", None),
        ("encoder_attn/q_proj", "attention/linear_0", None),
        ("encoder_attn/k_proj", "attention/linear_1", part(0)),
        ("encoder_attn/v_proj", "attention/linear_1", part(1)),
        ("encoder_attn/out_proj", "attention/linear_2", None),
        ("fc1", "ffn/linear_0", None),
        ("fc2", "ffn/linear_1", None),
        ("self_attn_layer_norm", "self_attention/layer_norm", None),
        ("encoder_attn_layer_norm", "attention/layer_norm", None),
        ("final_layer_norm", "ffn/layer_norm", None),
        ("layer_norm", "layer_norm", None),
    ];
    for (ours, theirs, rows) in ends {
        if let Some(start) = base.strip_suffix(ours).filter(|start| start.ends_with('/')) {
            let kind = if ours.ends_with("norm") { norm } else { kind };
            return (format!("{start}{theirs}/{kind}"), rows);
        }
    }
    (name, None)
}

/// The tensor of a ggml file that contains a parameter, as named in the published checkpoints. Keys have no bias.
fn ggml_name(name: &str) -> Option<String> {
    let whole = match name {
        "encoder.embed_positions.weight" => "encoder.positional_embedding",
        "decoder.embed_tokens.positions.weight" => "decoder.positional_embedding",
        "decoder.embed_tokens.weight" => "decoder.token_embedding.weight",
        "encoder.layer_norm.weight" => "encoder.ln_post.weight",
        "encoder.layer_norm.bias" => "encoder.ln_post.bias",
        "decoder.layer_norm.weight" => "decoder.ln.weight",
        "decoder.layer_norm.bias" => "decoder.ln.bias",
        _ if name.ends_with("k_proj.bias") => return None,
        _ => "",
    };
    if !whole.is_empty() {
        return Some(whole.to_owned());
    }
    let pairs = [
        (".layers.", ".blocks."),
        ("encoder_attn_layer_norm", "cross_attn_ln"),
        ("self_attn_layer_norm", "attn_ln"),
        ("final_layer_norm", "mlp_ln"),
        ("encoder_attn.", "cross_attn."),
        ("self_attn.", "attn."),
        ("q_proj", "query"),
        ("k_proj", "key"),
        ("v_proj", "value"),
        ("out_proj", "out"),
        ("fc1", "mlp.0"),
        ("fc2", "mlp.2"),
    ];
    Some(pairs.iter().fold(name.to_owned(), |name, (ours, theirs)| name.replace(ours, theirs)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_parameter_has_its_place() {
        let cases = [
            ("encoder.conv1.weight", "encoder/conv1/weight", "encoder.conv1.weight"),
            (
                "decoder.layers.3.encoder_attn.v_proj.bias",
                "decoder/layer_3/attention/linear_1/bias",
                "decoder.blocks.3.cross_attn.value.bias",
            ),
            (
                "encoder.layers.0.self_attn.out_proj.weight",
                "encoder/layer_0/self_attention/linear_1/weight",
                "encoder.blocks.0.attn.out.weight",
            ),
            ("decoder.layers.1.fc2.weight", "decoder/layer_1/ffn/linear_1/weight", "decoder.blocks.1.mlp.2.weight"),
            (
                "decoder.layers.1.encoder_attn_layer_norm.bias",
                "decoder/layer_1/attention/layer_norm/beta",
                "decoder.blocks.1.cross_attn_ln.bias",
            ),
            ("decoder.layer_norm.weight", "decoder/layer_norm/gamma", "decoder.ln.weight"),
            ("decoder.embed_tokens.weight", "decoder/embeddings/weight", "decoder.token_embedding.weight"),
            (
                "decoder.embed_tokens.positions.weight",
                "decoder/position_encodings/encodings",
                "decoder.positional_embedding",
            ),
            ("encoder.embed_positions.weight", "encoder/position_encodings/encodings", "encoder.positional_embedding"),
        ];
        for (ours, ctranslate2, ggml) in cases {
            assert_eq!(ctranslate2_name(ours, 8).0, ctranslate2);
            assert_eq!(ggml_name(ours).as_deref(), Some(ggml));
        }
        assert_eq!(ctranslate2_name("encoder.layers.0.self_attn.k_proj.bias", 8).1, Some(8..16));
        assert_eq!(ggml_name("encoder.layers.0.self_attn.k_proj.bias"), None);
        assert_eq!(transposed(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 2, 3), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
    }
}
