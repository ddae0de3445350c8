//! The model of a run: one that generates text, an encoder, a HAN or a vision model.

use super::dataset::{Dataset, TrainBatch};
use crate::architecture::Architecture;
use crate::batch::SpecialTokens;
use crate::encoder::Head;
use crate::files::tensors::Storage;
use crate::labelled::LabelledTexts;
use crate::text::tokenizer::Tokenizer;
use crate::translator::Translator;
use crate::{Encoder, EncoderConfig, Error, Han, HanConfig, Model, ModelConfig, Recipe, Result, Vit, VitConfig};
use qkv_nn::{Loss, Parameters, Tape};
use std::path::Path;

/// The model of a run.
// One exists per run; a box would only be in the way.
#[allow(clippy::large_enum_variant)]
pub(super) enum TrainedModel {
    Text(Translator),
    Encoder(Encoder),
    Han(Han),
    Vit(Vit),
}

impl TrainedModel {
    /// A new model with parameters drawn from the recipe's seed.
    pub fn new(recipe: &Recipe, tokenizer: Option<Tokenizer>, data: &Dataset) -> Result<TrainedModel> {
        let kind = recipe.model.name();
        let Some(tokenizer) = tokenizer else { return TrainedModel::of_images(recipe, data) };
        match (&recipe.model, data.source()) {
            (Architecture::Encoder(config), Some(source)) => {
                let (head, labels) = (source.head(), source.labels());
                // Only classification reads the first row.
                let pooler = config.pooler && head == Head::Classes;
                let config = EncoderConfig { head, labels, pooler, ..config.clone() };
                Ok(TrainedModel::Encoder(Encoder::new(&config, tokenizer, recipe.seed)?))
            }
            (Architecture::Han(config), Some(source @ LabelledTexts::Classes(_))) => {
                let config = HanConfig { labels: source.labels(), ..config.clone() };
                Ok(TrainedModel::Han(Han::new(&config, tokenizer, recipe.seed)?))
            }
            (Architecture::Encoder(_), None) => Err(Error::invalid("an encoder makes no text")
                .with_hint("it learns from `classes`, `tags` or `answers` in `[data]`")),
            (Architecture::Han(_), _) => Err(Error::invalid("a `han` learns the classes of documents alone")
                .with_hint("it learns from `classes` in `[data]`")),
            (Architecture::Vit(_), _) => Err(Error::invalid("a `vit` sees, and learns from no text")
                .with_hint("it learns from `images` and `labels` in `[data]`")),
            (_, Some(_)) => Err(Error::invalid(format!("a {kind} cannot learn to read labels"))
                .with_hint("set `model.kind` to `encoder`, or for documents with classes to `han`")),
            (architecture, None) => {
                let config = ModelConfig::new(architecture.clone(), tokenizer.len(), SpecialTokens::of(&tokenizer));
                let (model, parameters) = Model::new(&config, recipe.seed)?;
                Ok(TrainedModel::Text(Translator { model, parameters, tokenizer, search: recipe.search.clone() }))
            }
        }
    }

    fn of_images(recipe: &Recipe, data: &Dataset) -> Result<TrainedModel> {
        let (Architecture::Vit(config), Some(images)) = (&recipe.model, data.images()) else {
            return Err(Error::invalid(format!("a {} sees no images", recipe.model.name()))
                .with_hint("set `model.kind` to `vit`"));
        };
        let side = images.side().ok_or_else(|| {
            Error::invalid("the images are no squares of one size").with_hint("cut them before they are learned from")
        })?;
        let given = |found: usize, there: usize| if found == 0 { there } else { found };
        let (image_size, channels) = (given(config.image_size, side), given(config.channels, 1));
        let config = VitConfig { image_size, channels, labels: images.names.clone(), ..config.clone() };
        Ok(TrainedModel::Vit(Vit::new(&config, recipe.seed)?))
    }

    /// Its parameters.
    pub fn parameters(&self) -> &Parameters<f32> {
        match self {
            TrainedModel::Text(translator) => &translator.parameters,
            TrainedModel::Encoder(encoder) => &encoder.parameters,
            TrainedModel::Han(han) => &han.parameters,
            TrainedModel::Vit(vit) => &vit.parameters,
        }
    }

    /// Its parameters, mutable.
    pub fn parameters_mut(&mut self) -> &mut Parameters<f32> {
        match self {
            TrainedModel::Text(translator) => &mut translator.parameters,
            TrainedModel::Encoder(encoder) => &mut encoder.parameters,
            TrainedModel::Han(han) => &mut han.parameters,
            TrainedModel::Vit(vit) => &mut vit.parameters,
        }
    }

    /// The same model with other parameters.
    pub fn with(&self, parameters: Parameters<f32>) -> TrainedModel {
        match self {
            TrainedModel::Text(Translator { model, tokenizer, search, .. }) => {
                let (model, tokenizer, search) = (model.clone(), tokenizer.clone(), search.clone());
                TrainedModel::Text(Translator { model, parameters, tokenizer, search })
            }
            TrainedModel::Encoder(Encoder { config, tokenizer, pooling, model, .. }) => {
                let (config, tokenizer, model) = (config.clone(), tokenizer.clone(), model.clone());
                TrainedModel::Encoder(Encoder { config, parameters, tokenizer, pooling: *pooling, model })
            }
            TrainedModel::Han(Han { config, tokenizer, model, .. }) => {
                let (config, tokenizer, model) = (config.clone(), tokenizer.clone(), model.clone());
                TrainedModel::Han(Han { config, parameters, tokenizer, model })
            }
            TrainedModel::Vit(Vit { config, model, .. }) => {
                TrainedModel::Vit(Vit { config: config.clone(), parameters, model: model.clone() })
            }
        }
    }

    /// Its tokenizer, unless it reads images.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        match self {
            TrainedModel::Text(translator) => Some(&translator.tokenizer),
            TrainedModel::Encoder(encoder) => Some(&encoder.tokenizer),
            TrainedModel::Han(han) => Some(&han.tokenizer),
            TrainedModel::Vit(_) => None,
        }
    }

    /// The loss of a batch; the gradient of each label is multiplied by `scale`.
    pub fn loss(&self, tape: &mut Tape<'_, f32>, batch: &TrainBatch, smoothing: f64, scale: f64) -> Result<Loss> {
        match (self, batch) {
            (TrainedModel::Text(translator), TrainBatch::Text(batch)) => {
                translator.model.loss(tape, batch, smoothing, scale)
            }
            (TrainedModel::Encoder(encoder), TrainBatch::Examples(examples)) => encoder.loss(tape, examples, scale),
            (TrainedModel::Han(han), TrainBatch::Documents(documents)) => han.loss(tape, documents, smoothing, scale),
            (TrainedModel::Vit(vit), TrainBatch::Images(images, classes)) => {
                vit.loss(tape, (images, classes), smoothing, scale)
            }
            _ => Err(Error::invalid("this data is for a model of another kind")),
        }
    }

    /// Writes the model's folder.
    pub fn save(&self, folder: &Path) -> Result<()> {
        match self {
            TrainedModel::Text(translator) => translator.save(folder, Storage::F32),
            TrainedModel::Encoder(encoder) => encoder.save(folder, Storage::F32),
            TrainedModel::Han(han) => han.save(folder, Storage::F32),
            TrainedModel::Vit(vit) => vit.save(folder, Storage::F32),
        }
    }
}
