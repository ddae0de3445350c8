//! Llama in the Hugging Face layout: rotary positions, RMS norm, SwiGLU, grouped-query attention; and Qwen2, which has
//! biases in the projections of queries, keys and values.

use super::config::Fields;
use super::{Layout, Mapped};
use crate::{Architecture, GptConfig, ModelConfig, Result};
use qkv::Attention;
use qkv_nn::layers::{FeedKind, NormKind, PositionKind};
use serde_json::{Value, json};
use std::path::Path;

/// Whether Llama's configuration describes a model completely.
pub(crate) fn fits(config: &GptConfig) -> bool {
    config.positions == PositionKind::Rotary
        && config.norm == NormKind::Rms
        && config.activation == FeedKind::SwiGlu
        && config.attention == Attention::scaled_dot()
        && config.is_plain()
        && config.qkv_bias() == config.bias
}

/// Whether Qwen2's configuration does.
pub(crate) fn fits_qwen2(config: &GptConfig) -> bool {
    !config.bias && config.qkv_bias() && fits(&GptConfig { qkv_bias: None, ..config.clone() })
}

/// The settings that all Llamas share.
pub(super) fn llama() -> GptConfig {
    GptConfig {
        positions: PositionKind::Rotary,
        norm: NormKind::Rms,
        activation: FeedKind::SwiGlu,
        bias: false,
        ..GptConfig::default()
    }
}

pub(crate) fn config(json: &Value, path: &Path) -> Result<ModelConfig> {
    let fields = Fields { json, path };
    let qwen2 = fields.word("model_type", "llama")? == "qwen2";
    fields.only("hidden_act", json!("silu"))?;
    fields.only("use_sliding_window", json!(false))?;
    // Newer files store the base with the kind of scaling.
    let mut base = fields.number("rope_theta", 10_000.0)?;
    for name in ["rope_scaling", "rope_parameters"] {
        let Some(json) = json.get(name).filter(|value| !value.is_null()) else { continue };
        let scaling = Fields { json, path };
        let kind = scaling.word("rope_type", "default").and_then(|kind| match kind {
            "default" => scaling.word("type", "default"),
            kind => Ok(kind),
        })?;
        if kind != "default" {
            return Err(fields.wrong(name, format!("positions scaled as `{kind}` are not supported")));
        }
        base = scaling.number("rope_theta", base)?;
    }
    let bias = !qwen2 && fields.flag("attention_bias", false)?;
    if bias != fields.flag("mlp_bias", false)? {
        return Err(fields.wrong("attention_bias", "biases in some maps and not in others are not supported"));
    }
    let (width, heads) = (fields.needed(&["hidden_size"])?, fields.needed(&["num_attention_heads"])?);
    let head_width = fields.whole(&["head_dim"])?.filter(|&found| found.saturating_mul(heads) != width);
    let sizes = GptConfig {
        d_model: width,
        ffn_dim: fields.needed(&["intermediate_size"])?,
        heads,
        key_heads: fields.whole(&["num_key_value_heads"])?,
        head_width,
        layers: fields.needed(&["num_hidden_layers"])?,
        rotary_base: base,
        max_positions: fields.whole(&["max_position_embeddings"])?.unwrap_or(2048),
        epsilon: fields.number("rms_norm_eps", 1e-6)?,
        bias,
        qkv_bias: qwen2.then_some(true),
        tied: fields.flag("tie_word_embeddings", false)?,
        attention_dropout: fields.number("attention_dropout", 0.0)?,
        ..llama()
    };
    let eos = fields.token("eos_token_id")?.unwrap_or(2);
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
    let qwen2 = fits_qwen2(sizes);
    let own = json!({
        "model_type": if qwen2 { "qwen2" } else { "llama" },
        "architectures": [if qwen2 { "Qwen2ForCausalLM" } else { "LlamaForCausalLM" }],
        "hidden_act": "silu",
        "mlp_bias": sizes.bias,
    });
    json_of_decoder(config, sizes, own)
}

/// The `config.json` of a decoder with rotary positions and RMS norms: the fields that all of them have, and its `own`.
pub(super) fn json_of_decoder(config: &ModelConfig, sizes: &GptConfig, own: Value) -> Value {
    let mut json = json!({
        "vocab_size": config.vocab_size,
        "hidden_size": sizes.d_model,
        "intermediate_size": sizes.ffn_dim,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.key_heads(),
        "head_dim": sizes.head_width(),
        "max_position_embeddings": sizes.max_positions,
        "rms_norm_eps": sizes.epsilon,
        "rope_theta": sizes.rotary_base,
        "attention_bias": sizes.bias,
        "attention_dropout": sizes.attention_dropout,
        "tie_word_embeddings": sizes.tied,
        "pad_token_id": config.pad_token_id,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "torch_dtype": "float32",
    });
    if let (Some(all), Value::Object(own)) = (json.as_object_mut(), own) {
        all.extend(own);
    }
    json
}

/// The parts of a layer by their names in Hugging Face's layout, in GGUF, and here.
pub(super) const PARTS: [[&str; 3]; 9] = [
    ["self_attn.q_proj", "attn_q", "self_attn.q_proj"],
    ["self_attn.k_proj", "attn_k", "self_attn.k_proj"],
    ["self_attn.v_proj", "attn_v", "self_attn.v_proj"],
    ["self_attn.o_proj", "attn_output", "self_attn.out_proj"],
    ["input_layernorm", "attn_norm", "self_attn_layer_norm"],
    ["post_attention_layernorm", "ffn_norm", "final_layer_norm"],
    ["mlp.gate_proj", "ffn_gate", "gate"],
    ["mlp.up_proj", "ffn_up", "fc1"],
    ["mlp.down_proj", "ffn_down", "fc2"],
];

pub(crate) fn layout(sizes: &GptConfig) -> Layout {
    let mut tensors = vec![Mapped::plain("embed_tokens.weight", "tokens.weight")];
    for layer in 0..sizes.layers {
        for [theirs, _, ours] in PARTS {
            let mut add = |kind: &str| {
                let name = format!("layers.{layer}.{theirs}.{kind}");
                tensors.push(Mapped::plain(name, format!("layers.{layer}.{ours}.{kind}")));
            };
            add("weight");
            let is_projection = ["q_proj", "k_proj", "v_proj"].iter().any(|name| theirs.ends_with(name));
            let bias = if is_projection { sizes.qkv_bias() } else { sizes.bias };
            if bias && !theirs.ends_with("layernorm") {
                add("bias");
            }
        }
    }
    tensors.push(Mapped::plain("norm.weight", "norm.weight"));
    if !sizes.tied {
        tensors.push(Mapped::plain("lm_head.weight", "lm_head.weight"));
    }
    let ignored: &[&str] = match sizes.tied {
        true => &["rotary_emb.inv_freq", "lm_head.weight"],
        false => &["rotary_emb.inv_freq"],
    };
    Layout { prefix: "model.", tensors, ignored }
}
