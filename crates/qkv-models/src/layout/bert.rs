//! BERT in the Hugging Face layout, alone and with a head for classes, tags or answers.

use super::config::Fields;
use super::{Layout, Mapped};
use crate::Result;
use crate::encoder::{EncoderConfig, Head};
use crate::files::weights::Weights;
use qkv::Attention;
use qkv_nn::layers::FeedKind;
use serde_json::{Map, Value, json};
use std::path::Path;

/// The `model_type` of encoders that are not BERT, such as those with another attention. Their configuration is ours,
/// under `encoder`, and their tensors have our names: under `bert`, other programs would compute something else.
pub(crate) const OWN: &str = "qkv-encoder";

/// BERT's names of activations.
const ACTIVATIONS: [(&str, FeedKind); 4] = [
    ("gelu", FeedKind::Gelu),
    ("gelu_new", FeedKind::GeluTanh),
    ("gelu_pytorch_tanh", FeedKind::GeluTanh),
    ("relu", FeedKind::Relu),
];
/// Class names by head.
const HEADS: [(&str, Head); 5] = [
    ("BertModel", Head::None),
    ("BertForSequenceClassification", Head::Classes),
    ("BertForTokenClassification", Head::Tags),
    ("BertForQuestionAnswering", Head::Span),
    ("BertForMaskedLM", Head::Masked),
];

/// Whether BERT's configuration describes an encoder completely.
pub(crate) fn fits(config: &EncoderConfig) -> bool {
    let mut attention = config.attention.clone();
    attention.dropout = None;
    // `BertForSequenceClassification` always has a pooler: if it is missing, `transformers` would initialize one.
    let pooled = config.pooler || config.head != Head::Classes;
    pooled && attention == Attention::scaled_dot() && ACTIVATIONS.iter().any(|(_, kind)| *kind == config.activation)
}

pub(crate) fn config(json: &Value, path: &Path, weights: &Weights) -> Result<EncoderConfig> {
    let fields = Fields { json, path };
    fields.only("model_type", json!("bert"))?;
    fields.only("position_embedding_type", json!("absolute"))?;
    fields.only("is_decoder", json!(false))?;
    let word = fields.word("hidden_act", "gelu")?;
    let activation = ACTIVATIONS.iter().find(|(name, _)| *name == word).map(|(_, kind)| *kind);
    let activation = activation.ok_or_else(|| fields.wrong("hidden_act", format!("`{word}` is not known")))?;
    let name = json.get("architectures").and_then(|list| list.get(0)).and_then(Value::as_str);
    let head = HEADS.iter().find(|(known, _)| Some(*known) == name).map_or(Head::None, |(_, head)| *head);
    // Many encoders name the class that they were pretrained as, but leave its head out.
    let bare = head == Head::Masked && !weights.has("cls.predictions.transform.dense.weight");
    let head = if bare { Head::None } else { head };
    let labels = json.get("id2label").and_then(Value::as_object).map_or_else(Vec::new, labels);
    Ok(EncoderConfig {
        vocab_size: fields.needed(&["vocab_size"])?,
        d_model: fields.needed(&["hidden_size"])?,
        ffn_dim: fields.needed(&["intermediate_size"])?,
        heads: fields.needed(&["num_attention_heads"])?,
        layers: fields.needed(&["num_hidden_layers"])?,
        max_positions: fields.needed(&["max_position_embeddings"])?,
        segments: fields.whole(&["type_vocab_size"])?.unwrap_or(2),
        activation,
        epsilon: fields.number("layer_norm_eps", 1e-12)?,
        dropout: fields.number("hidden_dropout_prob", 0.1)?,
        attention_dropout: fields.number("attention_probs_dropout_prob", 0.1)?,
        pad_token_id: fields.token("pad_token_id")?.unwrap_or(0),
        pooler: ["pooler.dense.weight", "bert.pooler.dense.weight"].iter().any(|name| weights.has(name)),
        labels: if matches!(head, Head::Classes | Head::Tags) { labels } else { Vec::new() },
        head,
        ..EncoderConfig::default()
    })
}

/// Labels by index; missing ones are named by their index.
pub(super) fn labels(names: &Map<String, Value>) -> Vec<String> {
    (0..names.len())
        .map(|at| names.get(&at.to_string()).and_then(Value::as_str).map_or(format!("LABEL_{at}"), str::to_owned))
        .collect()
}

pub(crate) fn json(config: &EncoderConfig) -> Value {
    let find = |head| HEADS.iter().find(|(_, known)| *known == head).map(|(name, _)| *name);
    let word = ACTIVATIONS.iter().find(|(_, kind)| *kind == config.activation).map(|(name, _)| *name);
    let mut told = json!({
        "model_type": "bert",
        "architectures": [find(config.head)],
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "max_position_embeddings": config.max_positions,
        "type_vocab_size": config.segments,
        "hidden_act": word,
        "layer_norm_eps": config.epsilon,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "pad_token_id": config.pad_token_id,
        "torch_dtype": "float32",
    });
    if !config.labels.is_empty() {
        let named = config.labels.iter().enumerate();
        told["id2label"] = named.clone().map(|(at, name)| (at.to_string(), json!(name))).collect::<Map<_, _>>().into();
        told["label2id"] = named.map(|(at, name)| (name.clone(), json!(at))).collect::<Map<_, _>>().into();
    }
    told
}

pub(crate) fn layout(config: &EncoderConfig) -> Layout {
    let mut tensors = vec![
        Mapped::plain("embeddings.word_embeddings.weight", "tokens.weight"),
        Mapped::plain("embeddings.position_embeddings.weight", "tokens.positions.weight"),
        Mapped::plain("embeddings.token_type_embeddings.weight", "segments.weight"),
    ];
    let mut both = |theirs: &str, ours: &str| {
        for kind in ["weight", "bias"] {
            tensors.push(Mapped::plain(format!("{theirs}.{kind}"), format!("{ours}.{kind}")));
        }
    };
    both("embeddings.LayerNorm", "embed_norm");
    for layer in 0..config.layers {
        for (theirs, ours) in [
            ("attention.self.query", "self_attn.q_proj"),
            ("attention.self.key", "self_attn.k_proj"),
            ("attention.self.value", "self_attn.v_proj"),
            ("attention.output.dense", "self_attn.out_proj"),
            ("attention.output.LayerNorm", "self_attn_layer_norm"),
            ("intermediate.dense", "fc1"),
            ("output.dense", "fc2"),
            ("output.LayerNorm", "final_layer_norm"),
        ] {
            both(&format!("encoder.layer.{layer}.{theirs}"), &format!("layers.{layer}.{ours}"));
        }
    }
    if config.pooler {
        both("pooler.dense", "pooler");
    }
    match config.head {
        Head::None => {}
        Head::Classes | Head::Tags => both("classifier", "head"),
        Head::Span => both("qa_outputs", "head"),
        Head::Masked => {
            both("cls.predictions.transform.dense", "masked.transform");
            both("cls.predictions.transform.LayerNorm", "masked.norm");
            tensors.push(Mapped::plain("cls.predictions.bias", "masked.bias"));
        }
    }
    // The bare model has no prefix; with a head, the model has one and the head none.
    let prefix = if config.head == Head::None { "" } else { "bert." };
    Layout { prefix, tensors, ignored: &["embeddings.position_ids", "^cls."] }
}
