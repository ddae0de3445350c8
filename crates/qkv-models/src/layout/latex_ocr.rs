//! The layout of `latex-ocr-junia`, which reads formulas: `model_config.json`, `tokenizer.json` with the id of each
//! character, and a PyTorch checkpoint, `best.pt`. A plain ViT and a plain Transformer decoder, both with a norm after
//! the embeddings.

use super::config::Fields;
use super::{Form, Layout, Mapped};
use crate::batch::SpecialTokens;
use crate::conv_stem::Stem;
use crate::describe::DescribeConfig;
use crate::files::folder::{TOKENIZER, read_json};
use crate::files::torch::TorchFile;
use crate::files::weights::Weights;
use crate::image::Fit;
use crate::text::tokenizer::Tokenizer;
use crate::{Architecture, Error, ImageEncoderConfig, ModelConfig, Result};
use qkv_nn::Parameters;
use qkv_nn::layers::PositionKind;
use serde_json::{Value, json};
use std::path::Path;

/// Sizes of the model.
const SIZES: &str = "model_config.json";
/// The checkpoint, and the dictionaries in it that may hold the weights.
const CHECKPOINT: &str = "best.pt";
const DICTIONARIES: [&str; 4] = ["model", "model_state_dict", "state_dict", "model_state"];
/// A tensor that every model has.
const KNOWN: &str = "patch_embed.proj.weight";
/// `ε` of its norms.
const EPSILON: f64 = 1e-6;
/// Its token embedding; ours is multiplied by the square root of the width.
const EMBEDDING: &str = "decoder.embed_tokens.weight";

/// Whether a folder has this layout.
pub(crate) fn is_in(folder: &Path) -> bool {
    folder.join(SIZES).exists() && folder.join(CHECKPOINT).exists()
}

/// The configuration of a folder.
pub(crate) fn config(folder: &Path) -> Result<ModelConfig> {
    let path = folder.join(SIZES);
    let json: Value = read_json(&path)?;
    let fields = Fields { json: &json, path: &path };
    let layers = |side: &str| fields.needed(&[&format!("num_{side}_layers")]);
    let image = ImageEncoderConfig {
        height: fields.needed(&["image_height"])?,
        width: fields.needed(&["image_width"])?,
        channels: 1,
        fit: Fit::Letterbox,
        stem: Stem::Patches,
        patch_size: fields.needed(&["patch_size"])?,
        layers: layers("encoder")?,
        mean: vec![0.0],
        deviation: vec![1.0],
        ..ImageEncoderConfig::default()
    };
    let sizes = DescribeConfig {
        image,
        d_model: fields.needed(&["d_model"])?,
        ffn_dim: fields.needed(&["mlp_dim"])?,
        heads: fields.needed(&["num_heads"])?,
        decoder_layers: layers("decoder")?,
        max_positions: fields.needed(&["max_length"])?,
        dropout: fields.number("dropout", 0.1)?,
        positions: PositionKind::Learned,
        tied: false,
        epsilon: EPSILON,
        embedding_norm: true,
        output_bias: true,
        ..DescribeConfig::default()
    };
    let specials = SpecialTokens::of(&tokenizer(folder)?);
    Ok(ModelConfig::new(Architecture::Describe(sizes), fields.needed(&["vocab_size"])?, specials))
}

/// Its characters as one of our tokenizers: pieces without merges.
pub(crate) fn tokenizer(folder: &Path) -> Result<Tokenizer> {
    let path = folder.join(TOKENIZER);
    let json: Value = read_json(&path)?;
    let wrong = |what: &str| Error::format(&path, "field `token_to_id`", what);
    let tokens = json.get("token_to_id").and_then(Value::as_object).ok_or_else(|| wrong("it is missing"))?;
    let special = |name: &str| json.pointer(&format!("/specials/{name}")).and_then(Value::as_str);
    let mut added = Vec::new();
    for name in ["pad", "bos", "eos", "unk"] {
        let text = special(name).ok_or_else(|| wrong("its special tokens have no names"))?;
        let id = tokens.get(text).ok_or_else(|| wrong("a special token has no number"))?;
        added.push(json!({
            "id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            "special": true,
        }));
    }
    added.sort_by_key(|token| token["id"].as_u64());
    let ours = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": null, "post_processor": null, "decoder": { "type": "Fuse" },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": special("unk"), "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": tokens, "merges": [],
        },
    });
    Ok(Tokenizer::from_bytes(ours.to_string().as_bytes(), &path)?)
}

/// The weights of a folder; anything else in the checkpoint, such as the optimizer's state, is not read.
pub(crate) fn weights(folder: &Path) -> Result<Weights> {
    let file = TorchFile::open(folder.join(CHECKPOINT))?;
    let within = DICTIONARIES.into_iter().find(|name| file.shape(&format!("{name}.{KNOWN}")).is_some());
    Ok(Weights::Torch(match within {
        Some(name) => file.under(name),
        None => file,
    }))
}

/// The table of tensors.
pub(crate) fn layout(config: &DescribeConfig) -> Layout {
    let DescribeConfig { d_model, ref image, .. } = *config;
    let axes = |name: &str, part: &str, axes| Mapped { form: Form::Axes(axes), ..Mapped::plain(name, part) };
    let mut tensors = vec![
        axes(KNOWN, "image.patches.weight", [d_model, image.channels, image.patch_size, image.patch_size]),
        axes("patch_embed.pos_emb", "image.positions.weight", [0, 1, image.places(), d_model]),
        Mapped::plain("patch_embed.proj.bias", "image.patches.bias"),
        Mapped::plain("decoder_embed.token_emb.weight", EMBEDDING),
        Mapped::plain("decoder_embed.pos_emb.weight", "decoder.embed_tokens.positions.weight"),
    ];
    let mut both = |theirs: String, ours: String| {
        for kind in ["weight", "bias"] {
            tensors.push(Mapped::plain(format!("{theirs}.{kind}"), format!("{ours}.{kind}")));
        }
    };
    both("patch_embed.norm".into(), "image.embedding_norm".into());
    both("encoder_norm".into(), "image.norm".into());
    both("decoder_embed.norm".into(), "decoder.layernorm_embedding".into());
    both("decoder_norm".into(), "decoder.layer_norm".into());
    both("lm_head".into(), "lm_head".into());
    let encoder =
        [("norm1", "self_attn_layer_norm"), ("norm2", "final_layer_norm"), ("mlp.0", "fc1"), ("mlp.3", "fc2")];
    let decoder = [
        ("self_norm", "self_attn_layer_norm"),
        ("cross_norm", "encoder_attn_layer_norm"),
        ("ffn_norm", "final_layer_norm"),
        ("ffn.0", "fc1"),
        ("ffn.3", "fc2"),
    ];
    let sides = [
        ("encoder_blocks", "image.layers", image.layers, &encoder[..], &[("attn", "self_attn")][..]),
        (
            "decoder_blocks",
            "decoder.layers",
            config.decoder_layers,
            &decoder[..],
            &[("self_attn", "self_attn"), ("cross_attn", "encoder_attn")][..],
        ),
    ];
    for (theirs, ours, layers, maps, _) in sides {
        for layer in 0..layers {
            for (their, our) in maps {
                both(format!("{theirs}.{layer}.{their}"), format!("{ours}.{layer}.{our}"));
            }
        }
    }
    for (theirs, ours, layers, _, attentions) in sides {
        for layer in 0..layers {
            for (their, our) in attentions {
                let (theirs, ours) = (format!("{theirs}.{layer}.{their}"), format!("{ours}.{layer}.{our}"));
                for kind in ["weight", "bias"] {
                    let parts = ["q", "k", "v"].map(|part| format!("{ours}.{part}_proj.{kind}")).to_vec();
                    tensors.push(Mapped { name: format!("{theirs}.in_proj_{kind}"), parts, form: Form::Plain });
                    tensors.push(Mapped::plain(format!("{theirs}.out_proj.{kind}"), format!("{ours}.out_proj.{kind}")));
                }
            }
        }
    }
    Layout { prefix: "", tensors, ignored: &[] }
}

/// Divides the embedding by the factor that ours is multiplied by.
pub(crate) fn unscale(parameters: &mut Parameters<f32>, d_model: usize) {
    if let Some(embedding) = parameters.find(EMBEDDING) {
        let scale = 1.0 / (d_model as f32).sqrt();
        parameters.get_mut(embedding).iter_mut().for_each(|x| *x *= scale);
    }
}
