//! A model's folder in the Hugging Face layout: the names of its files, and JSON read from and written to them.

use super::{atomic, input};
use crate::{Error, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::path::Path;

/// Architecture and sizes.
pub const CONFIG: &str = "config.json";
/// All tensors of a checkpoint that has one file.
pub const WEIGHTS: &str = "model.safetensors";
/// Which tensor is in which file of a checkpoint that has several.
pub const WEIGHTS_INDEX: &str = "model.safetensors.index.json";
/// The tokenizer.
pub const TOKENIZER: &str = "tokenizer.json";
/// Names of special tokens, and often the chat template.
pub const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
/// The chat template, if it has its own file.
pub const CHAT_TEMPLATE: &str = "chat_template.jinja";
/// Defaults for decoding.
pub const GENERATION_CONFIG: &str = "generation_config.json";
/// Size and normalization of images.
pub const PREPROCESSOR_CONFIG: &str = "preprocessor_config.json";

/// Reads a JSON file.
///
/// # Errors
/// Names the file and the line.
pub fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T> {
    parse_json(&input::read(path, input::SETTINGS_MAX)?, path)
}

/// Reads a JSON file, if it exists.
///
/// # Errors
/// As [`read_json`].
pub fn read_json_if_present<T: DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    if path.exists() { read_json(path).map(Some) } else { Ok(None) }
}

/// Parses JSON; `path` is for errors.
///
/// # Errors
/// Names the file and the line.
pub fn parse_json<T: DeserializeOwned>(bytes: &[u8], path: &Path) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|e| Error::line(path, e.line().max(1), e.to_string()))
}

/// Writes a JSON file atomically.
///
/// # Errors
/// If the file cannot be written.
pub fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value).expect("plain values") + "\n";
    atomic::write(path, text.as_bytes())
}
