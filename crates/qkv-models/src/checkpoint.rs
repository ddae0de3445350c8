//! A model with its numbers and its tokenizer, wherever it comes from: a folder in the Hugging Face layout, ours or that of a
//! GPT-2 or a Llama, in one file or in several, or a GGUF file.

use crate::chat::{self, Template};
use crate::files::atomic;
use crate::files::gguf::{Gguf, Value};
use crate::files::weights::Weights;
use crate::layout::{Dialect, Layout, llama};
use crate::text::tokenizer::Tokenizer;
use crate::{Error, Model, ModelConfig, Result};
use qkv_nn::Parameters;
use std::path::Path;

/// The files of a model's folder.
pub(crate) const CONFIG: &str = "config.json";
pub(crate) const TOKENIZER: &str = "tokenizer.json";
pub(crate) const GENERATION: &str = "generation_config.json";

/// Settings of the tokenizer that others look for.
const TOKENIZER_SETTINGS: &str = "tokenizer_config.json";

/// Writes the tokenizer, and beside it that it is to be used as it stands: by the name of the model alone others would take one
/// of their own.
pub(crate) fn write_tokenizer(tokenizer: &Tokenizer, template: Option<&Template>, folder: &Path) -> Result<()> {
    tokenizer.save(folder.join(TOKENIZER))?;
    let name = |id: u32| tokenizer.name(id);
    let mut settings = serde_json::json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": name(tokenizer.bos()),
        "eos_token": name(tokenizer.eos()),
        "pad_token": name(tokenizer.pad()),
        "clean_up_tokenization_spaces": false,
    });
    if let Some(unknown) = tokenizer.unk().and_then(name) {
        settings["unk_token"] = unknown.into();
    }
    if let Some(template) = template {
        settings["chat_template"] = template.source().into();
    }
    let text = serde_json::to_string_pretty(&settings).expect("plain values") + "\n";
    atomic::write(folder.join(TOKENIZER_SETTINGS), text.as_bytes())
}

/// A model that was read.
#[derive(Debug)]
pub(crate) struct Checkpoint {
    pub model: Model,
    pub parameters: Parameters<f32>,
    pub tokenizer: Tokenizer,
    pub template: Option<Template>,
    /// What `generation_config.json` says.
    pub generation: Option<serde_json::Value>,
}

/// A model that was found and not read yet: what it should be, and what there is.
pub(crate) struct Found {
    pub config: ModelConfig,
    pub dialect: Dialect,
    pub weights: Weights,
    /// The table of names, where it is known before the model is built.
    layout: Option<Layout>,
}

/// Whether a path is a GGUF file.
pub(crate) fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|end| end.eq_ignore_ascii_case("gguf"))
}

/// The bytes of a file of a folder.
pub(crate) fn bytes(folder: &Path, name: &str) -> Result<Vec<u8>> {
    let path = folder.join(name);
    std::fs::read(&path).map_err(|e| Error::file("read", &path, e))
}

impl Found {
    /// Looks at a folder or a GGUF file.
    pub fn at(path: &Path) -> Result<Found> {
        if is_gguf(path) {
            let file = Gguf::open(path)?;
            let (config, layout) = llama::of_gguf(&file)?;
            return Ok(Found { config, dialect: Dialect::Llama, weights: Weights::Gguf(file), layout: Some(layout) });
        }
        let (config, dialect) = Dialect::read(&bytes(path, CONFIG)?, &path.join(CONFIG))?;
        Ok(Found { config, dialect, weights: Weights::of_folder(path)?, layout: None })
    }

    /// The model, all zero, and the table by which it is filled.
    pub fn build(&self, path: &Path) -> Result<(Model, Parameters<f32>, Layout)> {
        // What is wrong with a number is said with the file that it stands in.
        let place = if is_gguf(path) { path.to_owned() } else { path.join(CONFIG) };
        let wrong = |error: Error| match error {
            Error::Invalid { .. } | Error::Attention(_) => Error::format(&place, "settings", error.to_string()),
            error => error,
        };
        // The file is there: a model that claims to be larger than it is refused before memory is asked for.
        self.config.check_size(self.weights.numbers()).map_err(wrong)?;
        let (model, parameters) = Model::blank(&self.config).map_err(wrong)?;
        let layout = self.layout.clone().or_else(|| self.dialect.layout(&self.config));
        let layout = layout.unwrap_or_else(|| Layout::own(&parameters));
        Ok((model, parameters, layout))
    }
}

impl Checkpoint {
    /// From a folder or a GGUF file.
    pub fn open(path: &Path) -> Result<Checkpoint> {
        let found = Found::at(path)?;
        let (model, mut parameters, layout) = found.build(path)?;
        let tokenizer = match &found.weights {
            Weights::Gguf(file) => Tokenizer::of_gguf(file)?,
            _ => Tokenizer::open(path.join(TOKENIZER))?,
        };
        if tokenizer.len() > found.config.vocab_size {
            let (most, size) = (tokenizer.len(), found.config.vocab_size);
            let what = format!("the tokenizer has {most} tokens, the model {size}");
            return Err(Error::format(path, "vocabulary", what));
        }
        layout.fill(&mut parameters, &found.weights)?;
        let (template, generation) = match &found.weights {
            Weights::Gguf(file) => match file.values().get("tokenizer.chat_template") {
                Some(Value::Text(source)) => (Some(Template::new(source, path)?), None),
                _ => (None, None),
            },
            _ => {
                let file = path.join(GENERATION);
                let wrong = |e: serde_json::Error| Error::line(&file, e.line().max(1), e.to_string());
                let generation = match file.exists() {
                    true => Some(serde_json::from_slice(&bytes(path, GENERATION)?).map_err(wrong)?),
                    false => None,
                };
                (chat::of_folder(path)?, generation)
            }
        };
        Ok(Checkpoint { model, parameters, tokenizer, template, generation })
    }
}
