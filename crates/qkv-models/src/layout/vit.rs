//! ViT in the Hugging Face layout, with a classification head, and its image preprocessing. A model with a
//! convolutional stem, which Hugging Face does not have, is written in the same way under its own name.

use super::bert::labels;
use super::config::Fields;
use super::{Form, Layout, Mapped};
use crate::Result;
use crate::conv_stem::Stem;
use crate::vit::VitConfig;
use qkv_nn::layers::FeedKind;
use serde_json::{Value, json};
use std::path::Path;

/// ViT's names of activations.
const ACTIVATIONS: [(&str, FeedKind); 4] = [
    ("gelu", FeedKind::Gelu),
    ("gelu_new", FeedKind::GeluTanh),
    ("gelu_pytorch_tanh", FeedKind::GeluTanh),
    ("relu", FeedKind::Relu),
];
/// The `model_type` of a model with a convolutional stem: a compact convolutional Transformer.
pub(crate) const WITH_STEM: &str = "cct";
/// Scale of pixel values.
const TO_ONE: f64 = 1.0 / 255.0;

/// The configuration, from `config.json` and `preprocessor_config.json`.
pub(crate) fn config(json: &Value, path: &Path, prepared: &Value, other: &Path) -> Result<VitConfig> {
    let fields = Fields { json, path };
    let stem = match json.get("model_type").and_then(Value::as_str) {
        Some(WITH_STEM) => Stem::Conv,
        _ => {
            fields.only("model_type", json!("vit"))?;
            Stem::Patches
        }
    };
    fields.only("qkv_bias", json!(true))?;
    let word = fields.word("hidden_act", "gelu")?;
    let activation = ACTIVATIONS.iter().find(|(name, _)| *name == word).map(|(_, kind)| *kind);
    let activation = activation.ok_or_else(|| fields.wrong("hidden_act", format!("`{word}` is not known")))?;
    let channels = fields.whole(&["num_channels"])?.unwrap_or(3);
    if !matches!(channels, 1 | 3) {
        return Err(fields.wrong("num_channels", format!("it is {channels}, expected 1 or 3")));
    }
    let preparation = Fields { json: prepared, path: other };
    let factor = preparation.number("rescale_factor", TO_ONE)?;
    if (factor - TO_ONE).abs() > 1e-6 || !preparation.flag("do_rescale", true)? {
        return Err(preparation.wrong("rescale_factor", "images that are not brought to between 0 and 1 are not taken"));
    }
    let normal = preparation.flag("do_normalize", true)?;
    let numbers = |name: &str, without: f64| -> Result<Vec<f64>> {
        if !normal {
            return Ok(vec![without; channels]);
        }
        let Some(found) = prepared.get(name) else { return Ok(vec![0.5; channels]) };
        let list = found.as_array().map(|list| list.iter().map(Value::as_f64).collect::<Option<Vec<f64>>>());
        let list = list.flatten().filter(|list| list.len() == channels);
        list.ok_or_else(|| preparation.wrong(name, format!("it is {found}, expected {channels} numbers")))
    };
    let (mean, deviation) = (numbers("image_mean", 0.0)?, numbers("image_std", 1.0)?);
    let named = json.get("id2label").and_then(Value::as_object).map_or_else(Vec::new, labels);
    let count = fields.whole(&["num_labels"])?.unwrap_or(2).min(1 << 20);
    let labels = if named.is_empty() { (0..count).map(|at| format!("LABEL_{at}")).collect() } else { named };
    Ok(VitConfig {
        image_size: fields.needed(&["image_size"])?,
        patch_size: fields.needed(&["patch_size"])?,
        stem,
        stem_channels: fields.whole(&["stem_channels"])?.unwrap_or(VitConfig::default().stem_channels),
        stem_blocks: stem_blocks(&fields)?,
        channels,
        d_model: fields.needed(&["hidden_size"])?,
        ffn_dim: fields.needed(&["intermediate_size"])?,
        heads: fields.needed(&["num_attention_heads"])?,
        layers: fields.needed(&["num_hidden_layers"])?,
        activation,
        epsilon: fields.number("layer_norm_eps", 1e-12)?,
        dropout: fields.number("hidden_dropout_prob", 0.0)?,
        attention_dropout: fields.number("attention_probs_dropout_prob", 0.0)?,
        mean,
        deviation,
        labels,
    })
}

/// The residual blocks of a stem.
fn stem_blocks(fields: &Fields<'_>) -> Result<Vec<usize>> {
    let Some(found) = fields.json.get("stem_blocks") else { return Ok(Vec::new()) };
    let list = found.as_array().map(|list| list.iter().map(|x| x.as_u64().map(|x| x as usize)).collect());
    list.flatten().ok_or_else(|| fields.wrong("stem_blocks", format!("it is {found}, expected a list of numbers")))
}

/// The `config.json` of a model.
pub(crate) fn json(config: &VitConfig) -> Value {
    let word = ACTIVATIONS.iter().find(|(_, kind)| *kind == config.activation).map(|(name, _)| *name);
    let named = || config.labels.iter().enumerate();
    let by_number: serde_json::Map<_, _> = named().map(|(at, label)| (at.to_string(), json!(label))).collect();
    let by_name: serde_json::Map<_, _> = named().map(|(at, label)| (label.clone(), json!(at))).collect();
    let mut json = json!({
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "num_channels": config.channels,
        "hidden_size": config.d_model,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "hidden_act": word,
        "layer_norm_eps": config.epsilon,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "qkv_bias": true,
        "id2label": by_number,
        "label2id": by_name,
        "torch_dtype": "float32",
    });
    if config.stem == Stem::Conv {
        json["model_type"] = json!(WITH_STEM);
        json["architectures"] = json!([]);
        json["stem_channels"] = json!(config.stem_channels);
        json["stem_blocks"] = json!(config.stem_blocks);
    }
    json
}

/// The `preprocessor_config.json` of a model.
pub(crate) fn preparation(config: &VitConfig) -> Value {
    json!({
        "image_processor_type": "ViTImageProcessor",
        "do_resize": true,
        "size": { "height": config.image_size, "width": config.image_size },
        "resample": 2,
        "do_rescale": true,
        "rescale_factor": TO_ONE,
        "do_normalize": true,
        "image_mean": config.mean,
        "image_std": config.deviation,
    })
}

/// The table of tensors.
pub(crate) fn layout(config: &VitConfig) -> Layout {
    let VitConfig { patch_size, channels, d_model, .. } = *config;
    let shaped = |name: &str, part: &str, axes| Mapped {
        form: Form::Axes(axes),
        ..Mapped::plain(format!("embeddings.{name}"), part)
    };
    let mut tensors = vec![
        shaped("cls_token", "class_token", [0, 1, 1, d_model]),
        shaped("position_embeddings", "positions.weight", [0, 1, config.grid() * config.grid() + 1, d_model]),
        match config.stem {
            Stem::Patches => shaped(
                "patch_embeddings.projection.weight",
                "patches.weight",
                [d_model, channels, patch_size, patch_size],
            ),
            Stem::Conv | Stem::ResNet => {
                Mapped::plain("embeddings.patch_embeddings.projection.weight", "patches.weight")
            }
        },
        Mapped::plain("embeddings.patch_embeddings.projection.bias", "patches.bias"),
    ];
    let own = match config.stem {
        Stem::Conv => config.conv_stem().names(),
        Stem::Patches | Stem::ResNet => Vec::new(),
    };
    tensors.extend(own.into_iter().map(|name| Mapped::plain(format!("embeddings.{name}"), name)));
    let mut both = |theirs: &str, ours: &str| {
        for kind in ["weight", "bias"] {
            tensors.push(Mapped::plain(format!("{theirs}.{kind}"), format!("{ours}.{kind}")));
        }
    };
    for layer in 0..config.layers {
        for (theirs, ours) in [
            ("layernorm_before", "self_attn_layer_norm"),
            ("attention.attention.query", "self_attn.q_proj"),
            ("attention.attention.key", "self_attn.k_proj"),
            ("attention.attention.value", "self_attn.v_proj"),
            ("attention.output.dense", "self_attn.out_proj"),
            ("layernorm_after", "final_layer_norm"),
            ("intermediate.dense", "fc1"),
            ("output.dense", "fc2"),
        ] {
            both(&format!("encoder.layer.{layer}.{theirs}"), &format!("layers.{layer}.{ours}"));
        }
    }
    both("layernorm", "norm");
    both("classifier", "head");
    Layout { prefix: "vit.", tensors, ignored: &["^vit.pooler.", "^pooler."] }
}
