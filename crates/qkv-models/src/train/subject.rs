//! What is trained: a model that makes text, or one that reads it.

use super::data::Step;
use crate::batch::Specials;
use crate::files::tensors::Storage;
use crate::labelled::Source;
use crate::model::Architecture;
use crate::text::tokenizer::Tokenizer;
use crate::translator::Translator;
use crate::{Encoder, EncoderConfig, Error, Model, ModelConfig, Recipe, Result};
use qkv_nn::{Loss, Parameters, Tape};
use std::path::Path;

/// What is trained.
// One of them exists in a run: a box would be in everyone's way.
#[allow(clippy::large_enum_variant)]
pub(super) enum Subject {
    Writer(Translator),
    Reader(Encoder),
}

impl Subject {
    /// A new one, drawn from the recipe's seed.
    pub fn new(recipe: &Recipe, tokenizer: Tokenizer, source: Option<&Source>) -> Result<Subject> {
        match (&recipe.model, source) {
            (Architecture::Encoder(config), Some(source)) => {
                let config = EncoderConfig { head: source.head(), labels: source.labels(), ..config.clone() };
                Ok(Subject::Reader(Encoder::new(&config, tokenizer, recipe.seed)?))
            }
            (model, Some(_)) => Err(Error::invalid(format!("a {} cannot learn to read labels", model.name()))
                .with_hint("set `model.kind` to `encoder`")),
            (Architecture::Encoder(_), None) => Err(Error::invalid("an encoder makes no text")
                .with_hint("it learns from `classes`, `tags` or `answers` in `[data]`")),
            (architecture, None) => {
                let config = ModelConfig::new(architecture.clone(), tokenizer.len(), Specials::of(&tokenizer));
                let (model, parameters) = Model::new(&config, recipe.seed)?;
                Ok(Subject::Writer(Translator { model, parameters, tokenizer, search: recipe.search.clone() }))
            }
        }
    }

    /// Its numbers.
    pub fn parameters(&self) -> &Parameters<f32> {
        match self {
            Subject::Writer(translator) => &translator.parameters,
            Subject::Reader(encoder) => &encoder.parameters,
        }
    }

    /// Its numbers, to be changed.
    pub fn parameters_mut(&mut self) -> &mut Parameters<f32> {
        match self {
            Subject::Writer(translator) => &mut translator.parameters,
            Subject::Reader(encoder) => &mut encoder.parameters,
        }
    }

    /// The same with other numbers.
    pub fn with(&self, parameters: Parameters<f32>) -> Subject {
        match self {
            Subject::Writer(Translator { model, tokenizer, search, .. }) => {
                let (model, tokenizer, search) = (model.clone(), tokenizer.clone(), search.clone());
                Subject::Writer(Translator { model, parameters, tokenizer, search })
            }
            Subject::Reader(Encoder { config, tokenizer, pooling, model, .. }) => {
                let (config, tokenizer, model) = (config.clone(), tokenizer.clone(), model.clone());
                Subject::Reader(Encoder { config, parameters, tokenizer, pooling: *pooling, model })
            }
        }
    }

    /// How text is cut.
    pub fn tokenizer(&self) -> &Tokenizer {
        match self {
            Subject::Writer(translator) => &translator.tokenizer,
            Subject::Reader(encoder) => &encoder.tokenizer,
        }
    }

    /// The special tokens.
    pub fn specials(&self) -> Specials {
        match self {
            Subject::Writer(translator) => translator.model.config().specials(),
            Subject::Reader(encoder) => Specials::of(&encoder.tokenizer),
        }
    }

    /// The loss of a batch; `scale` is what each label's gradient is multiplied by.
    pub fn loss(&self, tape: &mut Tape<'_, f32>, step: &Step, smoothing: f64, scale: f64) -> Result<Loss> {
        match (self, step) {
            (Subject::Writer(translator), Step::Text(batch)) => translator.model.loss(tape, batch, smoothing, scale),
            (Subject::Reader(encoder), Step::Examples(examples)) => encoder.loss(tape, examples, scale),
            _ => Err(Error::invalid("this data is for a model of another kind")),
        }
    }

    /// Writes its folder.
    pub fn save(&self, folder: &Path) -> Result<()> {
        match self {
            Subject::Writer(translator) => translator.save(folder, Storage::F32),
            Subject::Reader(encoder) => encoder.save(folder, Storage::F32),
        }
    }
}
