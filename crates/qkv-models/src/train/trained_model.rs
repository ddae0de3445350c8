//! The model that a run trains, of any kind: how it is made, its loss, and how it is saved.

use super::dataset::{Dataset, TrainBatch};
use super::picture_data::PictureBatch;
use crate::adapters;
use crate::architecture::Architecture;
use crate::batch::SpecialTokens;
use crate::checkpoint::{Checkpoint, write_tokenizer};
use crate::encoder::Head;
use crate::files::folder::{CONFIG, write_json};
use crate::files::tensors::Storage;
use crate::labelled::LabelledTexts;
use crate::layout::{Dialect, Layout};
use crate::provenance::Provenance;
use crate::start::Start;
use crate::text::tokenizer::Tokenizer;
use crate::translator::Translator;
use crate::voice::SpokenText;
use crate::{
    Describer, DetectConfig, Detector, Encoder, EncoderConfig, Error, Generator, Han, HanConfig, Model, ModelConfig,
    Recipe, Result, Speaker, Vit, VitConfig, Vqa, VqaConfig,
};
use qkv_nn::{Parameters, PendingLoss, Tape};
use std::path::Path;

/// The model of a run.
// One exists per run; a box would only be in the way.
#[allow(clippy::large_enum_variant)]
pub(super) enum TrainedModel {
    Text(Translator),
    Generator(Generator),
    Encoder(Encoder),
    Han(Han),
    Vit(Vit),
    Describer(Describer),
    Vqa(Vqa),
    Detector(Detector),
    Speaker(Speaker),
}

impl TrainedModel {
    /// A new model with parameters initialized from the recipe's seed, or with those of `start` and their provenance.
    pub fn new(
        recipe: &Recipe,
        model: &Architecture,
        start: Option<Start>,
        tokenizer: Option<Tokenizer>,
        data: &Dataset,
    ) -> Result<(TrainedModel, Option<Provenance>)> {
        let kind = model.name();
        let Some(tokenizer) = tokenizer else { return TrainedModel::of_images(recipe, model, start, data) };
        if let Dataset::Pictures(pictures) = data {
            return TrainedModel::of_pictures(recipe, model, start, tokenizer, pictures.answers());
        }
        if let (Architecture::Speaker(config), Dataset::Speaker(_)) = (model, data) {
            let Some(start) = start else {
                return Ok((TrainedModel::Speaker(Speaker::new(config, tokenizer, recipe.seed)?), None));
            };
            let (voice, found) = Speaker::from_start(config, tokenizer, &start, recipe.seed)?;
            return Ok((TrainedModel::Speaker(voice), Some(found)));
        }
        match (model, data.source()) {
            (Architecture::Encoder(config), Some(source)) => {
                let (head, labels) = (source.head(), source.labels());
                // Only classification uses a pooler. BERT's class for it always has one.
                let pooler = match recipe.model.pretrained() {
                    Some(from) => from.pooler.unwrap_or(config.pooler || crate::layout::bert::fits(config)),
                    None => config.pooler,
                };
                let config = EncoderConfig { head, labels, pooler: pooler && head == Head::Classes, ..config.clone() };
                let Some(start) = start else {
                    return Ok((TrainedModel::Encoder(Encoder::new(&config, tokenizer, recipe.seed)?), None));
                };
                let vocab_size = config.vocab_size.max(tokenizer.len());
                let config = EncoderConfig { vocab_size, ..config };
                let (encoder, found) = Encoder::from_start(config, tokenizer, &start, recipe.seed)?;
                Ok((TrainedModel::Encoder(encoder), Some(found)))
            }
            (Architecture::Han(config), Some(source @ LabelledTexts::Classes(_))) => {
                let config = HanConfig { labels: source.labels(), ..config.clone() };
                let Some(start) = start else {
                    return Ok((TrainedModel::Han(Han::new(&config, tokenizer, recipe.seed)?), None));
                };
                let (han, found) = Han::from_start(&config, tokenizer, &start, recipe.seed)?;
                Ok((TrainedModel::Han(han), Some(found)))
            }
            (Architecture::Encoder(config), None) if matches!(data, Dataset::Masked(_)) => {
                let vocab_size = config.vocab_size.max(tokenizer.len());
                let (head, labels) = (Head::Masked, Vec::new());
                let config = EncoderConfig { head, labels, pooler: false, vocab_size, ..config.clone() };
                let Some(start) = start else {
                    return Ok((TrainedModel::Encoder(Encoder::new(&config, tokenizer, recipe.seed)?), None));
                };
                let (encoder, found) = Encoder::from_start(config, tokenizer, &start, recipe.seed)?;
                Ok((TrainedModel::Encoder(encoder), Some(found)))
            }
            (_, None) if matches!(data, Dataset::Masked(_)) => {
                Err(Error::invalid(format!("a {kind} does not predict masked tokens"))
                    .with_hint("`train.objective = \"mlm\"` is for encoders"))
            }
            (Architecture::Encoder(_), None) => Err(Error::invalid("an encoder makes no text")
                .with_hint("it learns from `classes`, `tags` or `answers` in `[data]`")),
            (Architecture::Han(_), _) => Err(Error::invalid("a `han` learns the classes of documents alone")
                .with_hint("it learns from `classes` in `[data]`")),
            (Architecture::Vit(_), _) => Err(Error::invalid("a `vit` sees, and learns from no text")
                .with_hint("it learns from `images` and `labels` in `[data]`")),
            (Architecture::Describe(_) | Architecture::Vqa(_) | Architecture::Detect(_), _) => {
                Err(Error::invalid(format!("a `{kind}` looks at images, and learns from no text alone"))
                    .with_hint("it learns from `captions`, `questions` or `boxes` in `[data]`"))
            }
            (Architecture::Speaker(_), _) => Err(Error::invalid("a `voice` learns from recordings")
                .with_hint("it learns from `spoken` or `tones` in `[data]`")),
            (_, Some(_)) => Err(Error::invalid(format!("a {kind} cannot learn to read labels"))
                .with_hint("set `model.kind` to `encoder`, or for documents with classes to `han`")),
            (architecture, None) => {
                let specials = SpecialTokens::of(&tokenizer);
                let search = recipe.search.clone();
                let Some(start) = start else {
                    let config = ModelConfig::new(architecture.clone(), tokenizer.len(), specials);
                    let (model, parameters) = Model::new(&config, recipe.seed)?;
                    return Ok((TrainedModel::Text(Translator { model, parameters, tokenizer, search }), None));
                };
                let Some(config) = &start.config else {
                    return Err(Error::invalid(format!("a {kind} generates no text")));
                };
                let vocab_size = config.vocab_size.max(tokenizer.len());
                let pairs = matches!(data, Dataset::Pairs(_));
                let config = match pairs {
                    true => ModelConfig::new(architecture.clone(), vocab_size, specials),
                    false => ModelConfig { vocab_size, ..config.clone() },
                };
                let (model, mut parameters) = Model::blank(&config)?;
                let layout = start.layout.clone().unwrap_or_else(|| Layout::own(&parameters));
                let found = layout.fill_from(&mut parameters, &start.weights, |_| false, recipe.seed)?;
                if pairs || model.gpt().is_none() {
                    let translator = Translator { model, parameters, tokenizer, search };
                    return Ok((TrainedModel::Text(translator), Some(found)));
                }
                let Start { template, generation, .. } = start;
                let read = Checkpoint { model, parameters, tokenizer, template, generation };
                let path = recipe.model.pretrained().map_or(Path::new(""), |model| &model.from);
                let generator = Generator::of_checkpoint(read, path)?;
                Ok((TrainedModel::Generator(generator), Some(found)))
            }
        }
    }

    /// A model that looks at images and reads or writes text; `answers` are the training questions' answers.
    fn of_pictures(
        recipe: &Recipe,
        model: &Architecture,
        start: Option<Start>,
        tokenizer: Tokenizer,
        answers: Vec<String>,
    ) -> Result<(TrainedModel, Option<Provenance>)> {
        let (seed, search) = (recipe.seed, recipe.search.clone());
        match (model, start) {
            (Architecture::Describe(config), None) if answers.is_empty() => {
                Ok((TrainedModel::Describer(Describer::new(config, tokenizer, search, seed)?), None))
            }
            (Architecture::Describe(config), Some(start)) if answers.is_empty() => {
                let (describer, found) = Describer::from_start(config, tokenizer, &start, search, seed)?;
                Ok((TrainedModel::Describer(describer), Some(found)))
            }
            (Architecture::Vqa(config), start) if !answers.is_empty() => {
                let config = VqaConfig { labels: answers, ..config.clone() };
                let Some(start) = start else {
                    return Ok((TrainedModel::Vqa(Vqa::new(&config, tokenizer, seed)?), None));
                };
                let (vqa, found) = Vqa::from_start(&config, tokenizer, &start, seed)?;
                Ok((TrainedModel::Vqa(vqa), Some(found)))
            }
            _ => Err(Error::invalid(format!("a `{}` does not learn from this data", model.name()))
                .with_hint("`describe` learns from captions, `vqa` from questions")),
        }
    }

    fn of_images(
        recipe: &Recipe,
        model: &Architecture,
        start: Option<Start>,
        data: &Dataset,
    ) -> Result<(TrainedModel, Option<Provenance>)> {
        if let (Architecture::Detect(config), Dataset::Pictures(pictures)) = (model, data) {
            let config = DetectConfig { labels: pictures.names().unwrap_or_default().to_vec(), ..config.clone() };
            let Some(start) = start else {
                return Ok((TrainedModel::Detector(Detector::new(&config, recipe.seed)?), None));
            };
            let (detector, found) = Detector::from_start(&config, &start, recipe.seed)?;
            return Ok((TrainedModel::Detector(detector), Some(found)));
        }
        let (Architecture::Vit(config), Some(images)) = (model, data.images()) else {
            return Err(
                Error::invalid(format!("a {} sees no images", model.name())).with_hint("set `model.kind` to `vit`")
            );
        };
        if let Some(start) = start {
            let config = VitConfig { labels: images.names.clone(), ..config.clone() };
            let (vit, found) = Vit::from_start(&config, &start, recipe.seed)?;
            return Ok((TrainedModel::Vit(vit), Some(found)));
        }
        let side = images.side().ok_or_else(|| {
            Error::invalid("the images are no squares of one size").with_hint("cut them before they are learned from")
        })?;
        let given = |found: usize, there: usize| if found == 0 { there } else { found };
        let (image_size, channels) = (given(config.image_size, side), given(config.channels, images.channels()));
        let config = VitConfig { image_size, channels, labels: images.names.clone(), ..config.clone() };
        Ok((TrainedModel::Vit(Vit::new(&config, recipe.seed)?), None))
    }

    /// The kind of the model, as in a recipe.
    pub fn kind(&self) -> &'static str {
        match self {
            TrainedModel::Text(Translator { model, .. }) | TrainedModel::Generator(Generator { model, .. }) => {
                model.config().architecture.name()
            }
            TrainedModel::Encoder(_) => "encoder",
            TrainedModel::Han(_) => "han",
            TrainedModel::Vit(_) => "vit",
            TrainedModel::Describer(_) => "describe",
            TrainedModel::Vqa(_) => "vqa",
            TrainedModel::Detector(_) => "detect",
            TrainedModel::Speaker(_) => "voice",
        }
    }

    /// The model that generates text, if it is one.
    pub fn generative(&self) -> Option<&Model> {
        match self {
            TrainedModel::Text(Translator { model, .. }) | TrainedModel::Generator(Generator { model, .. }) => {
                Some(model)
            }
            _ => None,
        }
    }

    /// Its parameters.
    pub fn parameters(&self) -> &Parameters<f32> {
        match self {
            TrainedModel::Text(translator) => &translator.parameters,
            TrainedModel::Generator(generator) => &generator.parameters,
            TrainedModel::Encoder(encoder) => &encoder.parameters,
            TrainedModel::Han(han) => &han.parameters,
            TrainedModel::Vit(vit) => &vit.parameters,
            TrainedModel::Describer(describer) => &describer.parameters,
            TrainedModel::Vqa(vqa) => &vqa.parameters,
            TrainedModel::Detector(detector) => &detector.parameters,
            TrainedModel::Speaker(voice) => &voice.parameters,
        }
    }

    /// Its parameters, mutable.
    pub fn parameters_mut(&mut self) -> &mut Parameters<f32> {
        match self {
            TrainedModel::Text(translator) => &mut translator.parameters,
            TrainedModel::Generator(generator) => &mut generator.parameters,
            TrainedModel::Encoder(encoder) => &mut encoder.parameters,
            TrainedModel::Han(han) => &mut han.parameters,
            TrainedModel::Vit(vit) => &mut vit.parameters,
            TrainedModel::Describer(describer) => &mut describer.parameters,
            TrainedModel::Vqa(vqa) => &mut vqa.parameters,
            TrainedModel::Detector(detector) => &mut detector.parameters,
            TrainedModel::Speaker(voice) => &mut voice.parameters,
        }
    }

    /// Its tokenizer, if it reads or writes text.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        match self {
            TrainedModel::Text(translator) => Some(&translator.tokenizer),
            TrainedModel::Generator(generator) => Some(&generator.tokenizer),
            TrainedModel::Encoder(encoder) => Some(&encoder.tokenizer),
            TrainedModel::Han(han) => Some(&han.tokenizer),
            TrainedModel::Vit(_) | TrainedModel::Detector(_) => None,
            TrainedModel::Describer(describer) => Some(&describer.tokenizer),
            TrainedModel::Vqa(vqa) => Some(&vqa.tokenizer),
            TrainedModel::Speaker(voice) => Some(&voice.tokenizer),
        }
    }

    /// The loss of a batch; the gradient of each label is multiplied by `scale`.
    pub fn loss(
        &self,
        tape: &mut Tape<'_, f32>,
        batch: &TrainBatch,
        smoothing: f64,
        scale: f64,
    ) -> Result<PendingLoss> {
        match (self, batch) {
            (TrainedModel::Text(Translator { model, .. }), TrainBatch::Text(batch))
            | (TrainedModel::Generator(Generator { model, .. }), TrainBatch::Text(batch)) => {
                model.loss(tape, batch, smoothing, scale)
            }
            (TrainedModel::Encoder(encoder), TrainBatch::Examples(examples)) => encoder.loss(tape, examples, scale),
            (TrainedModel::Han(han), TrainBatch::Documents(documents)) => han.loss(tape, documents, smoothing, scale),
            (TrainedModel::Vit(vit), TrainBatch::Images(batch)) => vit.loss(
                tape,
                &batch.images,
                &[(&batch.classes, batch.share), (&batch.others, 1.0 - batch.share)],
                smoothing,
                scale,
            ),
            (TrainedModel::Describer(describer), TrainBatch::Pictures(PictureBatch::Captions(images, texts))) => {
                let texts: Vec<&[u32]> = texts.iter().map(Vec::as_slice).collect();
                describer.loss(tape, (images, &texts), smoothing, scale)
            }
            (TrainedModel::Vqa(vqa), TrainBatch::Pictures(PictureBatch::Questions(asked))) => {
                vqa.loss(tape, asked, smoothing, scale)
            }
            (TrainedModel::Detector(detector), TrainBatch::Pictures(PictureBatch::Boxes(batch))) => {
                detector.loss(tape, batch, smoothing, scale)
            }
            (TrainedModel::Speaker(voice), TrainBatch::Spoken(spoken)) => {
                voice.loss(tape, &spoken.iter().collect::<Vec<&SpokenText>>(), scale)
            }
            _ => Err(Error::invalid("this data is for a model of another kind")),
        }
    }

    /// The names of its tensors in files.
    pub fn layout(&self) -> Layout {
        match self {
            TrainedModel::Text(Translator { model, parameters, .. })
            | TrainedModel::Generator(Generator { model, parameters, .. }) => {
                let config = model.config();
                Dialect::of(config).layout(config).unwrap_or_else(|| Layout::own(parameters))
            }
            TrainedModel::Encoder(encoder) => encoder.layout(),
            TrainedModel::Han(han) => Layout::own(&han.parameters),
            TrainedModel::Vit(vit) => crate::layout::vit::layout(&vit.config),
            TrainedModel::Describer(Describer { parameters, .. })
            | TrainedModel::Vqa(Vqa { parameters, .. })
            | TrainedModel::Speaker(Speaker { parameters, .. })
            | TrainedModel::Detector(Detector { parameters, .. }) => Layout::own(parameters),
        }
    }

    /// Writes the model's folder: the whole model, or only its adapters to the model in `base`, unless they are merged.
    pub fn save(&mut self, folder: &Path, base: &Path, merge: bool) -> Result<()> {
        if self.parameters().adapted().is_empty() {
            return self.save_whole(folder);
        }
        let alone = matches!(self, TrainedModel::Generator(_) | TrainedModel::Encoder(_));
        if alone && !merge {
            let task = match self {
                TrainedModel::Encoder(Encoder { config: EncoderConfig { head, .. }, .. }) => match head {
                    Head::Classes => "SEQ_CLS",
                    Head::Tags => "TOKEN_CLS",
                    Head::Span => "QUESTION_ANS",
                    Head::None | Head::Masked => "FEATURE_EXTRACTION",
                },
                _ => "CAUSAL_LM",
            };
            adapters::write(folder, self.parameters(), &self.layout(), base, task)?;
            return match self {
                TrainedModel::Encoder(encoder) => encoder.save_settings(folder),
                TrainedModel::Generator(Generator { model, tokenizer, template, .. }) => {
                    write_json(&folder.join(CONFIG), &Dialect::of(model.config()).write(model.config()))?;
                    write_tokenizer(tokenizer, template.as_ref(), folder)
                }
                _ => Ok(()),
            };
        }
        let mut merged = self.parameters().clone();
        merged.adapted().into_iter().for_each(|param| merged.merge(param));
        std::mem::swap(self.parameters_mut(), &mut merged);
        let written = self.save_whole(folder);
        std::mem::swap(self.parameters_mut(), &mut merged);
        written
    }

    fn save_whole(&self, folder: &Path) -> Result<()> {
        match self {
            TrainedModel::Text(translator) => translator.save(folder, Storage::F32),
            TrainedModel::Generator(generator) => generator.save(folder, Storage::F32),
            TrainedModel::Encoder(encoder) => encoder.save(folder, Storage::F32),
            TrainedModel::Han(han) => han.save(folder, Storage::F32),
            TrainedModel::Vit(vit) => vit.save(folder, Storage::F32),
            TrainedModel::Describer(describer) => describer.save(folder, Storage::F32),
            TrainedModel::Vqa(vqa) => vqa.save(folder, Storage::F32),
            TrainedModel::Detector(detector) => detector.save(folder, Storage::F32),
            TrainedModel::Speaker(voice) => voice.save(folder, Storage::F32),
        }
    }
}
