//! The model that commands use where none is named: the one that lay in `model/` when the program was built.

use crate::failure::Failure;
use qkv_models::Translator;
use std::path::Path;

/// Whether this build has a model.
pub(crate) const THERE: bool = cfg!(embedded_model);

/// What the embedded model is called where a folder would be named.
pub(crate) const NAME: &str = "embedded";

/// The model in a folder, or the embedded one.
pub(crate) fn translator(folder: Option<&Path>) -> Result<Translator, Failure> {
    match folder {
        Some(folder) if !folder.is_dir() => Err(Failure::new(format!("`{}` is no folder", folder.display()))
            .hint("a model is a folder with `config.json`, `tokenizer.json` and `model.safetensors`")),
        Some(folder) => Ok(Translator::open(folder)?),
        None => embedded(),
    }
}

#[cfg(embedded_model)]
fn embedded() -> Result<Translator, Failure> {
    Ok(Translator::from_bytes(
        Path::new(NAME),
        include_bytes!("../model/config.json"),
        include_bytes!("../model/tokenizer.json"),
        &include_bytes!("../model/model.safetensors")[..],
        Some(include_bytes!("../model/generation_config.json")),
    )?)
}

#[cfg(not(embedded_model))]
fn embedded() -> Result<Translator, Failure> {
    Err(Failure::new("no model is embedded in this build").hint("name one with `--model DIR`"))
}
