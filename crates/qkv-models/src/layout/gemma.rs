//! Gemma 3 (Gemma Team 2025, arXiv:2503.19786), its text-only models, in the Hugging Face layout: norms on both sides
//! of each sublayer and on the heads of queries and keys, GEGLU, scaled embeddings, and layers that attend within a
//! window.

use super::config::Fields;
use super::{Form, Layout, Mapped, llama};
use crate::{Architecture, GptConfig, LocalLayers, ModelConfig, Result};
use qkv::{Attention, Scale};
use qkv_nn::layers::{FeedKind, NormKind, PositionKind};
use serde_json::{Value, json};
use std::path::Path;

/// The activation, by its name in a `config.json`.
const ACTIVATION: &str = "gelu_pytorch_tanh";
/// Kinds of layers, by their names there.
const LOCAL: &str = "sliding_attention";
const GLOBAL: &str = "full_attention";

/// The settings that all of them share.
pub(super) fn gemma() -> GptConfig {
    GptConfig {
        positions: PositionKind::Rotary,
        norm: NormKind::Rms,
        sandwich_norm: true,
        head_norm: true,
        activation: FeedKind::GeGluTanh,
        bias: false,
        scaled_embedding: true,
        rotary_base: 1e6,
        ..GptConfig::default()
    }
}

/// Whether Gemma's configuration describes a model completely.
pub(crate) fn fits(config: &GptConfig) -> bool {
    config.positions == PositionKind::Rotary
        && config.norm == NormKind::Rms
        && config.sandwich_norm
        && config.head_norm
        && config.activation == FeedKind::GeGluTanh
        && !config.bias
        && !config.qkv_bias()
        && config.scaled_embedding
        && config.local.is_some()
        && query_scalar(config).is_some()
}

/// The attention of heads of `width` whose queries are divided by the square root of `scalar`.
pub(super) fn attention(scalar: f64, width: usize) -> Attention {
    let mut attention = Attention::scaled_dot();
    if scalar != width as f64 {
        attention.scale = Scale::Fixed(scalar.sqrt().recip());
    }
    attention
}

/// The whole number whose square root queries are divided by; `None` if the attention is of another kind.
fn query_scalar(config: &GptConfig) -> Option<u64> {
    let scalar = match config.attention.scale {
        Scale::Own => config.head_width() as u64,
        Scale::Fixed(scale) => (scale * scale).recip().round() as u64,
        Scale::Learned => return None,
    };
    if attention(scalar as f64, config.head_width()).scale != config.attention.scale {
        return None;
    }
    let mut plain = config.attention.clone();
    plain.scale = Scale::Own;
    (plain == Attention::scaled_dot()).then_some(scalar)
}

/// Bases of rotary positions in global and in local layers. Newer files list them by kind of layer.
fn bases(fields: Fields<'_>) -> Result<[f64; 2]> {
    let mut bases = [fields.number("rope_theta", 1e6)?, fields.number("rope_local_base_freq", 1e4)?];
    let refuse = |of: Fields<'_>, name: &str| match of.word("rope_type", "default")? {
        "default" => Ok(()),
        kind => Err(fields.wrong(name, format!("positions scaled as `{kind}` are not supported"))),
    };
    if let Some(json) = fields.json.get("rope_scaling").filter(|value| !value.is_null()) {
        refuse(Fields { json, ..fields }, "rope_scaling")?;
    }
    let Some(by_kind) = fields.json.get("rope_parameters").filter(|value| !value.is_null()) else { return Ok(bases) };
    for (kind, base) in [GLOBAL, LOCAL].into_iter().zip(&mut bases) {
        let Some(json) = by_kind.get(kind) else { continue };
        let of = Fields { json, ..fields };
        refuse(of, "rope_parameters")?;
        *base = of.number("rope_theta", *base)?;
    }
    Ok(bases)
}

/// How many layers there are from one global layer to the next.
fn period(fields: Fields<'_>, layers: usize) -> Result<usize> {
    let named = ["sliding_window_pattern", "_sliding_window_pattern"];
    let period = fields.whole(&named)?.unwrap_or(6);
    let Some(kinds) = fields.json.get("layer_types").and_then(Value::as_array) else { return Ok(period) };
    let is_global = |kind: &Value| kind == GLOBAL;
    let period = kinds.iter().position(is_global).map_or(layers + 1, |at| at + 1);
    let known = kinds.len() == layers && kinds.iter().all(|kind| kind == LOCAL || kind == GLOBAL);
    match known && kinds.iter().enumerate().all(|(at, kind)| is_global(kind) == (at + 1).is_multiple_of(period)) {
        true => Ok(period),
        false => Err(fields.wrong("layer_types", "expected one of every so many layers to be a `full_attention`")),
    }
}

pub(crate) fn config(json: &Value, path: &Path) -> Result<ModelConfig> {
    let fields = Fields { json, path };
    fields.only("hidden_activation", json!(ACTIVATION))?;
    fields.only("attention_bias", json!(false))?;
    fields.only("use_bidirectional_attention", json!(false))?;
    for name in ["attn_logit_softcapping", "final_logit_softcapping"] {
        fields.only(name, Value::Null)?;
    }
    let (width, heads) = (fields.needed(&["hidden_size"])?, fields.needed(&["num_attention_heads"])?);
    let head_width = fields.whole(&["head_dim"])?.unwrap_or(256);
    let layers = fields.needed(&["num_hidden_layers"])?;
    let window = fields.whole(&["sliding_window"])?.unwrap_or(4096);
    let period = period(fields, layers.min(1 << 10))?;
    if window == 0 || period == 0 {
        return Err(fields.wrong("sliding_window", format!("a window of {window} tokens in {period} layers")));
    }
    let [rotary_base, local_base] = bases(fields)?;
    let scalar = fields.number("query_pre_attn_scalar", 256.0)?;
    if !(scalar > 0.0 && scalar.is_finite()) {
        return Err(fields.wrong("query_pre_attn_scalar", format!("it is {scalar}, expected more than 0")));
    }
    let sizes = GptConfig {
        d_model: width,
        ffn_dim: fields.needed(&["intermediate_size"])?,
        heads,
        key_heads: fields.whole(&["num_key_value_heads"])?,
        head_width: Some(head_width).filter(|&found| found.saturating_mul(heads) != width),
        layers,
        rotary_base,
        max_positions: fields.whole(&["max_position_embeddings"])?.unwrap_or(1 << 17),
        epsilon: fields.number("rms_norm_eps", 1e-6)?,
        tied: fields.flag("tie_word_embeddings", true)?,
        attention_dropout: fields.number("attention_dropout", 0.0)?,
        attention: attention(scalar, head_width),
        local: Some(LocalLayers { window, period, rotary_base: local_base }),
        ..gemma()
    };
    let eos = fields.token("eos_token_id")?.unwrap_or(1);
    Ok(ModelConfig {
        model_type: "qkv".into(),
        vocab_size: fields.needed(&["vocab_size"])?,
        pad_token_id: fields.token("pad_token_id")?.unwrap_or(0),
        bos_token_id: fields.token("bos_token_id")?.unwrap_or(2),
        eos_token_id: eos,
        architecture: Architecture::Gpt(sizes),
    })
}

pub(crate) fn json(config: &ModelConfig, sizes: &GptConfig) -> Value {
    let local = sizes.local.unwrap_or_default();
    let kinds: Vec<&str> = (0..sizes.layers).map(|layer| if local.has(layer) { LOCAL } else { GLOBAL }).collect();
    let turned = |base: f64| json!({ "rope_type": "default", "rope_theta": base });
    let own = json!({
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "query_pre_attn_scalar": query_scalar(sizes),
        "hidden_activation": ACTIVATION,
        "rope_local_base_freq": local.rotary_base,
        "rope_parameters": { GLOBAL: turned(sizes.rotary_base), LOCAL: turned(local.rotary_base) },
        "sliding_window": local.window,
        "sliding_window_pattern": local.period,
        "layer_types": kinds,
    });
    llama::json_of_decoder(config, sizes, own)
}

/// The parts of a layer by their names in Hugging Face's layout, in GGUF, and here.
pub(super) const PARTS: [[&str; 3]; 13] = [
    ["self_attn.q_proj", "attn_q", "self_attn.q_proj"],
    ["self_attn.k_proj", "attn_k", "self_attn.k_proj"],
    ["self_attn.v_proj", "attn_v", "self_attn.v_proj"],
    ["self_attn.o_proj", "attn_output", "self_attn.out_proj"],
    ["self_attn.q_norm", "attn_q_norm", "self_attn.q_norm"],
    ["self_attn.k_norm", "attn_k_norm", "self_attn.k_norm"],
    ["input_layernorm", "attn_norm", "self_attn_layer_norm"],
    ["post_attention_layernorm", "post_attention_norm", "post_self_attn_layer_norm"],
    ["pre_feedforward_layernorm", "ffn_norm", "final_layer_norm"],
    ["post_feedforward_layernorm", "post_ffw_norm", "post_final_layer_norm"],
    ["mlp.gate_proj", "ffn_gate", "gate"],
    ["mlp.up_proj", "ffn_up", "fc1"],
    ["mlp.down_proj", "ffn_down", "fc2"],
];

/// Gains are stored minus 1 in this layout; GGUF stores them as they are.
pub(crate) fn layout(sizes: &GptConfig) -> Layout {
    let gain = |name: String, part: String| Mapped { name, parts: vec![part], form: Form::LessOne };
    let mut tensors = vec![Mapped::plain("embed_tokens.weight", "tokens.weight")];
    for layer in 0..sizes.layers {
        for [theirs, _, ours] in PARTS {
            let (name, part) = (format!("layers.{layer}.{theirs}.weight"), format!("layers.{layer}.{ours}.weight"));
            let is_gain = theirs.ends_with("norm");
            tensors.push(if is_gain { gain(name, part) } else { Mapped::plain(name, part) });
        }
    }
    tensors.push(gain("norm.weight".into(), "norm.weight".into()));
    if !sizes.tied {
        tensors.push(Mapped::plain("lm_head.weight", "lm_head.weight"));
    }
    let ignored: &[&str] = if sizes.tied { &["lm_head.weight"] } else { &[] };
    Layout { prefix: "model.", tensors, ignored }
}
