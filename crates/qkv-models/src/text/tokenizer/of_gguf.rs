//! The tokenizer of a GGUF file, as the `tokenizer.json` it was made from.

use crate::files::gguf::{Gguf, MetadataValue};
use crate::{Error, Result};
use serde_json::{Map, json};

/// Type of control tokens.
const CONTROL: f64 = 3.0;
/// Type of user-defined tokens.
const ADDED: f64 = 4.0;

/// The `tokenizer.json` of a byte-level BPE, the tokenizer of the GPTs.
pub(super) fn json(file: &Gguf) -> Result<String> {
    let wrong = |name: &str, what: String| Error::format(file.path(), format!("value `{name}`"), what);
    let name = "tokenizer.ggml.model";
    let kind = file.text(name)?;
    if kind != "gpt2" {
        return Err(wrong(name, format!("it is `{kind}`, expected `gpt2`")));
    }
    let name = "tokenizer.ggml.pre";
    let bytes = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    let cutting = match if file.values().contains_key(name) { file.text(name)? } else { "default" } {
        "default" | "gpt-2" => bytes.clone(),
        "smollm" => json!({ "type": "Sequence",
            "pretokenizers": [{ "type": "Digits", "individual_digits": true }, bytes] }),
        other => return Err(wrong(name, format!("text cut as `{other}` is not supported"))),
    };
    let name = "tokenizer.ggml.tokens";
    let tokens = file.texts(name)?;
    let mut vocabulary = Map::new();
    for (id, token) in tokens.iter().enumerate() {
        if vocabulary.insert(token.clone(), json!(id)).is_some() {
            return Err(wrong(name, format!("`{token}` is there twice")));
        }
    }
    let kinds = match file.values().get("tokenizer.ggml.token_type") {
        Some(MetadataValue::Numbers(kinds)) if kinds.len() == tokens.len() => &kinds[..],
        None => &[],
        Some(_) => return Err(wrong("tokenizer.ggml.token_type", "expected a number for each token".into())),
    };
    let added: Vec<_> = (tokens.iter().zip(kinds).enumerate())
        .filter(|(_, (_, kind))| [CONTROL, ADDED].contains(kind))
        .map(|(id, (token, &kind))| {
            json!({ "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": kind == CONTROL })
        })
        .collect();
    let merges = file.texts("tokenizer.ggml.merges")?;
    let model = json!({ "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocabulary, "merges": merges });
    Ok(json!({ "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": cutting, "post_processor": null, "decoder": bytes, "model": model })
    .to_string())
}
