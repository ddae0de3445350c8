//! The kind of the model in a folder, by its `config.json`.

use crate::Result;
use crate::files::folder::{CONFIG, read_json};
use crate::files::tfjs;
use crate::layout::formulas::FormulaReader;
use crate::layout::{bert, vit};
use std::path::Path;

/// The kind of the model in a folder, as in a recipe; `resnet` for the layout of TensorFlow.js; its `model_type` if
/// that is unknown.
///
/// # Errors
/// Names the file that is missing or not JSON.
pub fn kind(folder: &Path) -> Result<String> {
    if !folder.join(CONFIG).exists() && folder.join(tfjs::MODEL).exists() {
        return Ok("resnet".into());
    }
    if FormulaReader::of(folder).is_some() {
        return Ok("describe".into());
    }
    let json: serde_json::Value = read_json(&folder.join(CONFIG))?;
    let ours = json.pointer("/architecture/kind").or_else(|| json.get("model_type"));
    Ok(match ours.and_then(|kind| kind.as_str()).unwrap_or_default() {
        "bert" | bert::OWN => "encoder".into(),
        vit::WITH_STEM => "vit".into(),
        "gpt2" | "llama" | "qwen2" | "gemma3_text" => "gpt".into(),
        kind => kind.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_decoder_of_text_is_a_gpt_and_what_is_unknown_keeps_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let named = |name: &str| {
            std::fs::write(folder.path().join(CONFIG), format!(r#"{{ "model_type": "{name}" }}"#)).unwrap();
            kind(folder.path()).unwrap()
        };
        for decoder in ["gpt2", "llama", "qwen2", "gemma3_text"] {
            assert_eq!(named(decoder), "gpt");
        }
        assert_eq!((named("bert"), named("t5")), ("encoder".into(), "t5".into()));
    }
}
