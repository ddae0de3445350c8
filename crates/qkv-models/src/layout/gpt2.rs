//! GPT-2 in the Hugging Face layout: one projection for queries, keys and values, and all matrices transposed.

use super::config::Fields;
use super::{Form, Layout, Mapped};
use crate::{Architecture, GptConfig, ModelConfig, Result};
use qkv::Attention;
use qkv_nn::layers::{FeedKind, NormKind, PositionKind};
use serde_json::{Value, json};
use std::path::Path;

/// GPT-2's names of activations.
const ACTIVATIONS: [(&str, FeedKind); 4] = [
    ("gelu_new", FeedKind::GeluTanh),
    ("gelu_pytorch_tanh", FeedKind::GeluTanh),
    ("gelu", FeedKind::Gelu),
    ("relu", FeedKind::Relu),
];

/// Whether GPT-2's configuration describes a model completely.
pub(crate) fn fits(config: &GptConfig) -> bool {
    config.positions == PositionKind::Learned
        && config.norm == NormKind::Layer
        && config.activation.gate().is_none()
        && config.bias
        && config.qkv_bias()
        && config.key_heads() == config.heads
        && config.head_width.is_none()
        && config.attention == Attention::scaled_dot()
        && config.is_plain()
}

pub(crate) fn config(json: &Value, path: &Path) -> Result<ModelConfig> {
    let fields = Fields { json, path };
    fields.only("scale_attn_weights", json!(true))?;
    fields.only("scale_attn_by_inverse_layer_idx", json!(false))?;
    let width = fields.needed(&["n_embd"])?;
    let word = fields.word("activation_function", "gelu_new")?;
    let activation = ACTIVATIONS.iter().find(|(name, _)| *name == word).map(|(_, kind)| *kind);
    let activation = activation.ok_or_else(|| fields.wrong("activation_function", format!("`{word}` is not known")))?;
    let sizes = GptConfig {
        d_model: width,
        ffn_dim: fields.whole(&["n_inner"])?.unwrap_or(width.saturating_mul(4)),
        heads: fields.needed(&["n_head"])?,
        layers: fields.needed(&["n_layer"])?,
        max_positions: fields.needed(&["n_positions", "n_ctx"])?,
        epsilon: fields.number("layer_norm_epsilon", 1e-5)?,
        activation,
        tied: fields.flag("tie_word_embeddings", true)?,
        dropout: fields.number("resid_pdrop", 0.1)?,
        attention_dropout: fields.number("attn_pdrop", 0.1)?,
        ..GptConfig::default()
    };
    let eos = fields.token("eos_token_id")?.unwrap_or(50256);
    Ok(ModelConfig {
        model_type: "qkv".into(),
        vocab_size: fields.needed(&["vocab_size"])?,
        pad_token_id: fields.token("pad_token_id")?.unwrap_or(eos),
        bos_token_id: fields.token("bos_token_id")?.unwrap_or(eos),
        eos_token_id: eos,
        architecture: Architecture::Gpt(sizes),
    })
}

pub(crate) fn json(config: &ModelConfig, sizes: &GptConfig) -> Value {
    let word = ACTIVATIONS.iter().find(|(_, kind)| *kind == sizes.activation).map(|(name, _)| *name);
    json!({
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": config.vocab_size,
        "n_positions": sizes.max_positions,
        "n_embd": sizes.d_model,
        "n_layer": sizes.layers,
        "n_head": sizes.heads,
        "n_inner": sizes.ffn_dim,
        "activation_function": word,
        "layer_norm_epsilon": sizes.epsilon,
        "resid_pdrop": sizes.dropout,
        "embd_pdrop": sizes.dropout,
        "attn_pdrop": sizes.attention_dropout,
        "tie_word_embeddings": sizes.tied,
        "pad_token_id": config.pad_token_id,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "torch_dtype": "float32",
    })
}

pub(crate) fn layout(sizes: &GptConfig) -> Layout {
    let mut tensors =
        vec![Mapped::plain("wte.weight", "tokens.weight"), Mapped::plain("wpe.weight", "tokens.positions.weight")];
    for layer in 0..sizes.layers {
        let (theirs, ours) = (format!("h.{layer}"), format!("layers.{layer}"));
        for kind in ["weight", "bias"] {
            let mut norm = |their: &str, our: &str| {
                tensors.push(Mapped::plain(format!("{theirs}.{their}.{kind}"), format!("{ours}.{our}.{kind}")));
            };
            norm("ln_1", "self_attn_layer_norm");
            norm("ln_2", "final_layer_norm");
            let mut map = |their: &str, parts: &[&str]| {
                let form = if kind == "weight" { Form::Transposed } else { Form::Plain };
                let parts = parts.iter().map(|part| format!("{ours}.{part}.{kind}")).collect();
                tensors.push(Mapped { name: format!("{theirs}.{their}.{kind}"), parts, form });
            };
            map("attn.c_attn", &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]);
            map("attn.c_proj", &["self_attn.out_proj"]);
            map("mlp.c_fc", &["fc1"]);
            map("mlp.c_proj", &["fc2"]);
        }
    }
    tensors.push(Mapped::plain("ln_f.weight", "norm.weight"));
    tensors.push(Mapped::plain("ln_f.bias", "norm.bias"));
    if !sizes.tied {
        tensors.push(Mapped::plain("lm_head.weight", "lm_head.weight"));
    }
    let ignored: &[&str] = match sizes.tied {
        true => &[".attn.bias", ".attn.masked_bias", "lm_head.weight"],
        false => &[".attn.bias", ".attn.masked_bias"],
    };
    Layout { prefix: "transformer.", tensors, ignored }
}
