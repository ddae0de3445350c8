//! The trained model that a run starts from: a folder or file, opened and described, its tensors not yet read.
//! [`Provenance`](crate::Provenance) lists the tensors that a run uses.

use crate::architecture::Architecture;
use crate::chat::Template;
use crate::checkpoint::{ModelFiles, TextSettings, is_gguf};
use crate::files::folder::{self, CONFIG, PREPROCESSOR_CONFIG, TOKENIZER, read_json};
use crate::files::weights::Weights;
use crate::kind::kind;
use crate::layout::{Layout, vit};
use crate::recipe::Pretrained;
use crate::text::tokenizer::Tokenizer;
use crate::{Error, ModelConfig, Result, encoder};
use serde_json::Value;
use std::path::Path;

/// A trained model, opened.
pub(crate) struct Start {
    /// Its kind and sizes, with the recipe's dropout.
    pub architecture: Architecture,
    /// The configuration of a model that generates text.
    pub config: Option<ModelConfig>,
    /// Its tokenizer, if it reads or writes text.
    pub tokenizer: Option<Tokenizer>,
    /// Its chat template.
    pub template: Option<Template>,
    /// Its `generation_config.json`.
    pub generation: Option<Value>,
    /// Its tensors.
    pub weights: Weights,
    /// Names of its tensors, if the file determines them.
    pub layout: Option<Layout>,
}

impl Start {
    /// Opens the model that a recipe names.
    ///
    /// # Errors
    /// Names the file and the wrong field.
    pub fn open(pretrained: &Pretrained) -> Result<Start> {
        let path = &pretrained.from;
        if !path.exists() {
            return Err(Error::invalid(format!("`model.from` is `{}`, which does not exist", path.display()))
                .with_hint("it names a folder with `config.json` and `model.safetensors`, or a `.gguf` file"));
        }
        let mut start = match (is_gguf(path), path.is_dir()) {
            (true, _) => Start::generative(path)?,
            (_, true) => match kind(path)?.as_str() {
                "encoder" => Start::encoder(path)?,
                "vit" => Start::vision(path)?,
                "detect" => Start::own_without_text(path)?,
                "han" | "describe" | "vqa" | "voice" => Start::own(path)?,
                _ => Start::generative(path)?,
            },
            _ => {
                return Err(Error::invalid(format!("`model.from` is `{}`, which is no model", path.display()))
                    .with_hint("a model is a folder with `config.json`, or a `.gguf` file"));
            }
        };
        start.override_with(pretrained);
        Ok(start)
    }

    fn new(architecture: Architecture, weights: Weights, tokenizer: Option<Tokenizer>) -> Start {
        let (config, template, generation, layout) = (None, None, None, None);
        Start { architecture, config, tokenizer, template, generation, weights, layout }
    }

    fn encoder(path: &Path) -> Result<Start> {
        let settings = path.join(CONFIG);
        let weights = Weights::of_folder(path)?;
        let config = encoder::settings(&read_json(&settings)?, &settings, &weights)?;
        check_size(config.least(), &weights, &settings)?;
        let tokenizer = Tokenizer::open(path.join(TOKENIZER))?;
        Ok(Start::new(Architecture::Encoder(config), weights, Some(tokenizer)))
    }

    fn vision(path: &Path) -> Result<Start> {
        let (settings, preprocessor) = (path.join(CONFIG), path.join(PREPROCESSOR_CONFIG));
        let prepared = folder::read_json_if_present::<Value>(&preprocessor)?.unwrap_or_default();
        let config = vit::config(&read_json(&settings)?, &settings, &prepared, &preprocessor)?;
        let weights = Weights::of_folder(path)?;
        check_size(config.least(), &weights, &settings)?;
        Ok(Start::new(Architecture::Vit(config), weights, None))
    }

    /// A model in qkv's own format, fully described by its configuration, with a tokenizer.
    fn own(path: &Path) -> Result<Start> {
        let settings = path.join(CONFIG);
        let whole: ModelConfig = read_json(&settings)?;
        let weights = Weights::of_folder(path)?;
        whole.check_size(weights.numbers()).map_err(|e| e.in_file(&settings))?;
        let tokenizer = Tokenizer::open(path.join(TOKENIZER))?;
        Ok(Start::new(whole.architecture, weights, Some(tokenizer)))
    }

    /// The same for a model without text.
    fn own_without_text(path: &Path) -> Result<Start> {
        let settings = path.join(CONFIG);
        let whole: ModelConfig = read_json(&settings)?;
        let weights = Weights::of_folder(path)?;
        whole.check_size(weights.numbers()).map_err(|e| e.in_file(&settings))?;
        Ok(Start::new(whole.architecture, weights, None))
    }

    fn generative(path: &Path) -> Result<Start> {
        let files = ModelFiles::open(path)?;
        let settings = if is_gguf(path) { path.to_owned() } else { path.join(CONFIG) };
        files.config.check_size(files.weights.numbers()).map_err(|e| e.in_file(&settings))?;
        let layout = files.known_layout();
        let ModelFiles { config, weights, .. } = files;
        let TextSettings { tokenizer, template, generation } = TextSettings::of(path, &weights)?;
        let architecture = config.architecture.clone();
        let start = Start::new(architecture, weights, Some(tokenizer));
        Ok(Start { config: Some(config), template, generation, layout, ..start })
    }

    /// Applies the recipe's dropout.
    fn override_with(&mut self, pretrained: &Pretrained) {
        let (dropout, attention) = (pretrained.dropout, pretrained.attention_dropout);
        let set = |to: &mut f64, value: Option<f64>| *to = value.unwrap_or(*to);
        match &mut self.architecture {
            Architecture::Transformer(c) => {
                set(&mut c.dropout, dropout);
                set(&mut c.attention_dropout, attention);
            }
            Architecture::Gpt(c) => {
                set(&mut c.dropout, dropout);
                set(&mut c.attention_dropout, attention);
            }
            Architecture::Encoder(c) => {
                set(&mut c.dropout, dropout);
                set(&mut c.attention_dropout, attention);
                c.attention.dropout = None;
            }
            Architecture::Vit(c) => {
                set(&mut c.dropout, dropout);
                set(&mut c.attention_dropout, attention);
            }
            Architecture::Detect(c) => {
                set(&mut c.dropout, dropout);
                set(&mut c.attention_dropout, attention);
            }
            Architecture::Speaker(c) => {
                set(&mut c.dropout, dropout);
                set(&mut c.attention_dropout, attention);
            }
            Architecture::Vqa(c) => {
                set(&mut c.dropout, dropout);
                set(&mut c.attention_dropout, attention);
            }
            Architecture::Describe(c) => {
                set(&mut c.dropout, dropout);
                set(&mut c.attention_dropout, attention);
            }
            Architecture::Recurrent(c) => set(&mut c.dropout, dropout),
            Architecture::Han(c) => set(&mut c.dropout, dropout),
        }
        if let Some(config) = &mut self.config {
            config.architecture = self.architecture.clone();
        }
    }
}

/// Rejects a model that claims to be larger than its file, before memory is allocated for it.
fn check_size(least: usize, weights: &Weights, settings: &Path) -> Result<()> {
    let there = weights.numbers();
    // A head of another task may be missing, never a layer.
    if least > there {
        let what = format!("the configuration asks for {least} numbers or more, the file has {there}");
        return Err(Error::format(settings, "settings", what));
    }
    Ok(())
}
