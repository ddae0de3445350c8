//! Data and model of a recipe before the first step: the data tokenized, the model built.

use super::dataset::{ChatData, Dataset};
use super::trained_model::TrainedModel;
use super::tuning;
use crate::chat::Template;
use crate::files::input;
use crate::recipe::{Data, ModelSource, TokenizerSource};
use crate::start::Start;
use crate::text::tokenizer::Tokenizer;
use crate::{Error, Provenance, Recipe, Result};

/// Data and model of a recipe.
pub struct Plan {
    pub(super) data: Dataset,
    pub(super) model: TrainedModel,
    pub(super) provenance: Option<Provenance>,
}

impl std::fmt::Debug for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Plan({})", self.model.kind())
    }
}

/// Conversations, tokenized with the model's template.
fn chat_data(recipe: &Recipe, start: &Start, tokenizer: Option<Tokenizer>) -> Result<(Dataset, Option<Tokenizer>)> {
    let (Some(config), Some(tokenizer)) = (&start.config, tokenizer) else {
        return Err(Error::invalid(format!("a {} generates no text", start.architecture.name())));
    };
    let Some(template) = &start.template else {
        return Err(Error::invalid("the model has no chat template")
            .with_hint("name a file with one, in Jinja, as `data.template`"));
    };
    let data = ChatData::read(recipe, template, &tokenizer, config.specials())?;
    Ok((Dataset::Chat(data), Some(tokenizer)))
}

impl Plan {
    /// Reads the data and builds the model of a recipe, without creating a folder or training.
    ///
    /// # Errors
    /// If data or a model cannot be read, or they do not match.
    pub fn of(recipe: &Recipe) -> Result<Plan> {
        Plan::new(recipe, None)
    }

    /// With the tokenizer of the resumed run, if there is one.
    pub(super) fn new(recipe: &Recipe, tokenizer: Option<Tokenizer>) -> Result<Plan> {
        let mut start = recipe.model.pretrained().map(Start::open).transpose()?;
        let tokenizer = match (tokenizer, start.as_mut().and_then(|start| start.tokenizer.take())) {
            (Some(tokenizer), _) => Some(tokenizer),
            (None, Some(tokenizer)) => Some(match &recipe.tokenizer {
                TokenizerSource::Extended { special } => tokenizer.with_specials(special)?,
                _ => tokenizer,
            }),
            (None, None) => None,
        };
        let architecture = match (&recipe.model, &start) {
            (ModelSource::New(architecture), _) => architecture.clone(),
            (_, Some(start)) => start.architecture.clone(),
            _ => unreachable!("a model is new or starts from another"),
        };
        let (mut data, tokenizer) = match (&recipe.data, &mut start) {
            (Data::Chat { template, .. }, Some(start)) => {
                if let Some(path) = template {
                    let source = input::read_to_string(path, input::SETTINGS_MAX)?;
                    start.template = Some(Template::new(&source, path)?);
                }
                chat_data(recipe, start, tokenizer)?
            }
            _ => Dataset::new(recipe, &architecture, tokenizer)?,
        };
        let (mut model, provenance) = TrainedModel::new(recipe, &architecture, start, tokenizer, &data)?;
        match (&model, &mut data) {
            (TrainedModel::Encoder(encoder), Dataset::Masked(_)) if recipe.train.longest > encoder.model.max_len() => {
                let (block, max_len) = (recipe.train.longest, encoder.model.max_len());
                let what = format!("`train.longest` is {block}, the model takes {max_len} tokens");
                return Err(Error::invalid(what).with_hint("lower it"));
            }
            (TrainedModel::Encoder(encoder), data) => data.tokenize(encoder)?,
            (TrainedModel::Han(han), data) => data.tokenize_documents(han),
            (TrainedModel::Vit(vit), data) => data.resize_images(vit)?,
            (TrainedModel::Describer(describer), Dataset::Pictures(pictures)) => pictures.tokenize(describer),
            (TrainedModel::Detector(_), _) => {}
            (TrainedModel::Speaker(voice), Dataset::Speaker(data)) => data.measure(voice)?,
            (TrainedModel::Vqa(vqa), Dataset::Pictures(pictures)) => pictures.tokenize_questions(vqa),
            (model, data) => {
                let model = model.generative().expect("the other kinds were matched");
                match data {
                    Dataset::Text(_) | Dataset::Chat(_) if model.gpt().is_none() => {
                        return Err(Error::invalid(format!("a {} cannot learn from plain text", architecture.name()))
                            .with_hint("set `model.kind` to `gpt`, or train on pairs"));
                    }
                    Dataset::Text(text) if text.block > model.max_len() => {
                        let (block, max_len) = (text.block, model.max_len());
                        let what = format!("`train.longest` is {block}, the model takes {max_len} tokens");
                        return Err(Error::invalid(what).with_hint("lower it, or raise `model.max_positions`"));
                    }
                    data => data.limit(model.max_len()),
                }
            }
        }
        tuning::apply(recipe, &mut model, provenance.as_ref())?;
        // All data has its final form now: return the freed memory to the system.
        qkv_simd::free_memory::give_back();
        Ok(Plan { data, model, provenance })
    }

    /// The sizes of the data, in words.
    pub fn data(&self) -> String {
        self.data.summary(self.model.tokenizer().map_or(0, Tokenizer::len))
    }

    /// The kind of the model, as in a recipe.
    pub fn kind(&self) -> &'static str {
        self.model.kind()
    }

    /// Number of parameters, and of those that are trained.
    pub fn parameters(&self) -> [usize; 2] {
        [self.model.parameters().count(), self.model.parameters().trained_count()]
    }

    /// Where the weights of a fine-tuned model come from.
    pub fn provenance(&self) -> Option<&Provenance> {
        self.provenance.as_ref()
    }
}
