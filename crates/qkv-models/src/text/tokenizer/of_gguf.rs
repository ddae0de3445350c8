//! The tokenizer of a GGUF file, as the `tokenizer.json` it was made from.

use crate::files::gguf::{Gguf, MetadataValue};
use crate::{Error, Result};
use serde_json::{Map, json};

/// Type of control tokens.
const CONTROL: f64 = 3.0;
/// Type of user-defined tokens.
const ADDED: f64 = 4.0;

/// How Qwen2 cuts text: contractions, words, single digits, punctuation, line ends, spaces.
const QWEN2: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

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
    let cut = if file.values().contains_key(name) { file.text(name)? } else { "default" };
    let qwen = cut == "qwen2";
    let cutting = match cut {
        "default" | "gpt-2" => bytes.clone(),
        "smollm" => json!({ "type": "Sequence",
            "pretokenizers": [{ "type": "Digits", "individual_digits": true }, bytes] }),
        "qwen2" => json!({ "type": "Sequence", "pretokenizers": [
            { "type": "Split", "pattern": { "Regex": QWEN2 }, "behavior": "Isolated", "invert": false },
            { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false }] }),
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
    let normalizer = if qwen { json!({ "type": "NFC" }) } else { json!(null) };
    let merges = file.texts("tokenizer.ggml.merges")?;
    let model = json!({ "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocabulary, "merges": merges });
    Ok(json!({ "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": normalizer,
        "pre_tokenizer": cutting, "post_processor": null, "decoder": bytes, "model": model })
    .to_string())
}
