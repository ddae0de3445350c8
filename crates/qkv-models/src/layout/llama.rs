//! Llama in the Hugging Face layout and in GGUF: rotary positions, RMS norm, SwiGLU, grouped-query attention.

use super::config::Fields;
use super::{Form, Layout, Mapped};
use crate::files::gguf::Gguf;
use crate::{Architecture, Error, GptConfig, ModelConfig, Result};
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
        && config.qkv_bias() == config.bias
}

/// The settings that all Llamas share.
fn llama() -> GptConfig {
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
    fields.only("hidden_act", json!("silu"))?;
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
    let bias = fields.flag("attention_bias", false)?;
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
    json!({
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": sizes.d_model,
        "intermediate_size": sizes.ffn_dim,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.key_heads(),
        "head_dim": sizes.head_width(),
        "hidden_act": "silu",
        "max_position_embeddings": sizes.max_positions,
        "rms_norm_eps": sizes.epsilon,
        "rope_theta": sizes.rotary_base,
        "attention_bias": sizes.bias,
        "mlp_bias": sizes.bias,
        "attention_dropout": sizes.attention_dropout,
        "tie_word_embeddings": sizes.tied,
        "pad_token_id": config.pad_token_id,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "torch_dtype": "float32",
    })
}

/// The parts of a layer by their names in Hugging Face's layout, in GGUF, and here.
const PARTS: [[&str; 3]; 9] = [
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
            if sizes.bias && !theirs.ends_with("layernorm") {
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

/// Configuration and layout of a GGUF file: a Llama, whose rows of queries and keys are permuted for adjacent rotary
/// pairs, or a Qwen2, whose rows are not and whose projections of queries, keys and values have biases.
pub(crate) fn of_gguf(file: &Gguf) -> Result<(ModelConfig, Layout)> {
    let wrong = |name: &str, what: String| Error::format(file.path(), format!("value `{name}`"), what);
    let name = "general.architecture";
    let kind = file.text(name)?;
    let qwen = match kind {
        "llama" => false,
        "qwen2" => true,
        _ => return Err(wrong(name, format!("it is `{kind}`, expected `llama` or `qwen2`"))),
    };
    let of = |name: &str| format!("{kind}.{name}");
    let scaling = of("rope.scaling.type");
    if file.values().contains_key(&scaling) && file.text(&scaling)? != "none" {
        return Err(wrong(&scaling, "scaled positions are not supported".into()));
    }
    let heads = file.whole(&of("attention.head_count"))?;
    let width = file.whole(&of("embedding_length"))?;
    let or = |name: String, other: usize| if file.values().contains_key(&name) { file.whole(&name) } else { Ok(other) };
    let head_width = or(of("attention.key_length"), width / heads.max(1))?;
    let turned = of("rope.dimension_count");
    if or(turned.clone(), head_width)? != head_width {
        return Err(wrong(&turned, "heads of which only a part turns are not supported".into()));
    }
    let base = of("rope.freq_base");
    let sizes = GptConfig {
        d_model: width,
        ffn_dim: file.whole(&of("feed_forward_length"))?,
        heads,
        key_heads: Some(or(of("attention.head_count_kv"), heads)?),
        head_width: Some(head_width).filter(|&found| found.saturating_mul(heads) != width),
        layers: file.whole(&of("block_count"))?,
        rotary_base: if file.values().contains_key(&base) { file.number(&base)? } else { 10_000.0 },
        max_positions: file.whole(&of("context_length"))?,
        epsilon: file.number(&of("attention.layer_norm_rms_epsilon"))?,
        tied: file.shape("output.weight").is_none(),
        qkv_bias: qwen.then_some(true),
        ..llama()
    };
    let vocab_size = file.texts("tokenizer.ggml.tokens")?.len();
    let token = |name: &str, other: u32| match file.values().contains_key(name) {
        true => file.whole(name).and_then(|id| u32::try_from(id).map_err(|_| wrong(name, format!("{id}")))),
        false => Ok(other),
    };
    let eos = token("tokenizer.ggml.eos_token_id", 0)?;
    let config = ModelConfig {
        model_type: "qkv".into(),
        vocab_size,
        pad_token_id: token("tokenizer.ggml.padding_token_id", eos)?,
        bos_token_id: token("tokenizer.ggml.bos_token_id", eos)?,
        eos_token_id: eos,
        architecture: Architecture::Gpt(sizes.clone()),
    };
    let mut tensors = vec![Mapped::plain("token_embd.weight", "tokens.weight")];
    for layer in 0..sizes.layers.min(1 << 10) {
        for [_, theirs, ours] in PARTS {
            let form = match theirs {
                "attn_q" if !qwen => Form::Paired(sizes.heads),
                "attn_k" if !qwen => Form::Paired(sizes.key_heads()),
                _ => Form::Plain,
            };
            let parts = vec![format!("layers.{layer}.{ours}.weight")];
            tensors.push(Mapped { name: format!("blk.{layer}.{theirs}.weight"), parts, form });
            if qwen && ["attn_q", "attn_k", "attn_v"].contains(&theirs) {
                let ours = format!("layers.{layer}.{ours}.bias");
                tensors.push(Mapped::plain(format!("blk.{layer}.{theirs}.bias"), ours));
            }
        }
    }
    tensors.push(Mapped::plain("output_norm.weight", "norm.weight"));
    if !sizes.tied {
        tensors.push(Mapped::plain("output.weight", "lm_head.weight"));
    }
    Ok((config, Layout { prefix: "", tensors, ignored: &[] }))
}
