//! The embedded model: the contents of `model/` at build time. Commands use it if `--model` is left out.

use crate::failure::Failure;
use qkv_models::Translator;
use std::path::Path;

/// Whether this build has one.
pub(crate) const AVAILABLE: bool = cfg!(embedded_model);

/// Its name, shown in place of a folder.
pub(crate) const NAME: &str = "embedded";

/// The hint for a path that is not a model.
pub(crate) const MODEL_FOLDER: &str =
    "a model is a folder with `config.json`, `tokenizer.json` and `model.safetensors`, or a `.gguf` file";

/// The translator in a folder, or the embedded one.
pub(crate) fn translator(folder: Option<&Path>) -> Result<Translator, Failure> {
    match folder {
        Some(folder) if !folder.is_dir() => {
            Err(Failure::new(format!("`{}` is not a folder", folder.display())).hint(MODEL_FOLDER))
        }
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
