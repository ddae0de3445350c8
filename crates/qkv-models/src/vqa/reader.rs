//! A model that answers questions about images, with its parameters and tokenizer: its folder, its loss, its answers,
//! and where each word and each hop looked.

use super::{VqaConfig, VqaNetwork};
use crate::batch::{Rows, SpecialTokens};
use crate::eyes::{self, Eyes};
use crate::files::tensors::Storage;
use crate::image::Image;
use crate::layout::{Inspected, Layout};
use crate::model::{AttentionSite, Group};
use crate::observed_attention::{ObservedAttention, observed};
use crate::own_folder::{self, OwnFolder};
use crate::probabilities::probabilities;
use crate::provenance::Provenance;
use crate::start::Start;
use crate::text::tokenizer::Tokenizer;
use crate::{Architecture, ModelConfig, Result, finite};
use qkv_nn::layers::Builder;
use qkv_nn::{Machine, Parameters, PendingLoss, Pool, Tape, Target, Tensor};
use std::path::Path;

/// Questions per batch.
const TOGETHER: usize = 32;

/// A model that answers questions about images.
#[derive(Debug)]
pub struct Vqa {
    /// Its configuration.
    pub config: VqaConfig,
    /// Its parameters.
    pub parameters: Parameters<f32>,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    eyes: Option<Eyes>,
    network: VqaNetwork,
    vocab_size: usize,
}

/// Questions about prepared images, with the classes of their answers.
pub(crate) struct ImageQuestions {
    pub images: Vec<Image>,
    pub questions: Rows,
    pub answers: Vec<u32>,
}

/// An answer to a question about an image, and where the model looked.
#[derive(Clone, Debug)]
pub struct ImageAnswer {
    /// The probability of each answer, in the order of [`labels`](VqaConfig::labels).
    pub probabilities: Vec<f32>,
    /// The image as the model saw it.
    pub image: Image,
    /// Rows and columns of places.
    pub grid: [usize; 2],
    /// The tokens of the question.
    pub tokens: Vec<u32>,
    /// For each token, the weight of each place, averaged over the heads of the last layer.
    pub words: Vec<Vec<f32>>,
    /// For each hop, the weight of each place.
    pub hops: Vec<Vec<f32>>,
    /// Every attention: of the image encoder, between words, of words to the image, and of the hops.
    pub attentions: Vec<ObservedAttention>,
}

/// The folder of a model of this kind.
fn found(folder: &Path) -> Result<OwnFolder<VqaConfig, VqaNetwork>> {
    let config = |found| if let Architecture::Vqa(config) = found { Some(config) } else { None };
    OwnFolder::open(folder, "vqa", config, VqaNetwork::new)
}

/// Description, number of parameters, mismatches and weights of a folder.
pub(crate) fn inspect(folder: &Path) -> Result<Inspected> {
    let found = found(folder)?;
    let VqaConfig { d_model, question_layers, hops, ref image, ref labels, .. } = found.config;
    let seen = format!("images of {} × {} in {} places", image.width, image.height, image.places());
    let words = format!(
        "vqa: {seen}, {} layers; {question_layers} layers of words, {hops} hops, width {d_model}, vocabulary {}, {} answers",
        image.layers,
        found.vocab_size,
        labels.len()
    );
    Ok(found.inspected(words))
}

impl Vqa {
    /// Reads a folder.
    ///
    /// # Errors
    /// Names the file and the wrong field or tensor.
    pub fn open(folder: impl AsRef<Path>) -> Result<Vqa> {
        let folder = folder.as_ref();
        let found = found(folder)?;
        let (tokenizer, vocab_size) = (found.tokenizer()?, found.vocab_size);
        let (config, network, parameters) = found.fill()?;
        let eyes = Eyes::of(&config.image, Some(folder))?;
        Ok(Vqa { config, parameters, tokenizer, eyes, network, vocab_size })
    }

    /// A new model with parameters initialized from the seed.
    ///
    /// ```
    /// use qkv_models::image::Image;
    /// use qkv_models::text::tokenizer::{Kind, Tokenizer};
    /// use qkv_models::{ImageEncoderConfig, Vqa, VqaConfig};
    /// let tokenizer = Tokenizer::train(["what color is it"; 2], Kind::Words { size: 50 })?;
    /// let image = ImageEncoderConfig { height: 8, width: 16, patch_size: 8, layers: 1, ..Default::default() };
    /// let labels = vec!["blue".into(), "red".into()];
    /// let config = VqaConfig { image, d_model: 16, ffn_dim: 16, labels, ..Default::default() };
    /// let vqa = Vqa::new(&config, tokenizer, 1)?;
    /// let picture = Image::new(16, 8, 3, vec![90; 16 * 8 * 3])?;
    /// let found = vqa.answer(&picture, "what color is it", &qkv_nn::Machine::new(1))?;
    /// assert_eq!((found.probabilities.len(), found.hops.len(), found.words.len()), (2, 2, 4));
    /// # Ok::<(), qkv_models::Error>(())
    /// ```
    ///
    /// # Errors
    /// If sizes are inconsistent.
    pub fn new(config: &VqaConfig, tokenizer: Tokenizer, seed: u64) -> Result<Vqa> {
        let (mut parameters, vocab_size) = (Parameters::new(), tokenizer.len());
        let network = VqaNetwork::new(&mut Builder::new(&mut parameters, seed), config, vocab_size)?;
        let eyes = Eyes::of(&config.image, None)?;
        Ok(Vqa { config: config.clone(), parameters, tokenizer, eyes, network, vocab_size })
    }

    /// A model with the layers of a trained one, for the answers of `config`.
    pub(crate) fn from_start(
        config: &VqaConfig,
        tokenizer: Tokenizer,
        start: &Start,
        seed: u64,
    ) -> Result<(Vqa, Provenance)> {
        let mut vqa = Vqa::new(config, tokenizer, seed)?;
        let same_head = matches!(&start.architecture, Architecture::Vqa(from) if from.labels == config.labels);
        let fresh = |name: &str| name.starts_with("head.") && !same_head;
        let found = Layout::own(&vqa.parameters).fill_from(&mut vqa.parameters, &start.weights, fresh, seed)?;
        Ok((vqa, found))
    }

    /// Writes its folder.
    ///
    /// # Errors
    /// I/O errors.
    pub fn save(&self, folder: impl AsRef<Path>, storage: Storage) -> Result<()> {
        let specials = SpecialTokens::of(&self.tokenizer);
        let config = ModelConfig::new(Architecture::Vqa(self.config.clone()), self.vocab_size, specials);
        own_folder::write(folder.as_ref(), &config, &self.parameters, Some(&self.tokenizer), storage)
    }

    /// The tokens of a question: at least one, and at most the model's maximum.
    pub(crate) fn tokens(&self, question: &str) -> Vec<u32> {
        let mut tokens = self.tokenizer.encode(question);
        tokens.truncate(self.config.max_positions);
        if tokens.is_empty() {
            tokens.push(self.tokenizer.eos());
        }
        tokens
    }

    /// The class of an answer, if the model knows it.
    pub(crate) fn class(&self, answer: &str) -> Option<u32> {
        self.config.labels.iter().position(|label| label == answer).map(|at| at as u32)
    }

    /// Prepared images as the network's input.
    fn input(&self, images: &[Image], machine: &Machine) -> Result<Tensor<f32>> {
        eyes::input(&self.config.image, self.eyes.as_ref(), images, machine)
    }

    /// The loss of questions; the gradient of each is multiplied by `scale`.
    pub(crate) fn loss(
        &self,
        tape: &mut Tape<'_, f32>,
        asked: &ImageQuestions,
        smoothing: f64,
        scale: f64,
    ) -> Result<PendingLoss> {
        let input = self.input(&asked.images, tape.machine())?;
        let x = self.network.forward(tape, input, &asked.questions)?;
        let (head, ids) = (self.network.head(), &asked.answers[..]);
        Ok(tape.cross_entropy(&x, head.weight, head.bias, Target { ids, ignore: None, smoothing, scale }))
    }

    /// The probabilities of all answers to questions about prepared images.
    pub(crate) fn probabilities(&self, asked: &[(&Image, &str)], machine: &Machine) -> Result<Vec<Vec<f32>>> {
        rayon::scope(|_| {
            let (pool, mut all) = (Pool::new(), Vec::with_capacity(asked.len()));
            for asked in asked.chunks(TOGETHER) {
                let images: Vec<Image> = asked.iter().map(|(image, _)| (*image).clone()).collect();
                let rows: Vec<Vec<u32>> = asked.iter().map(|(_, question)| self.tokens(question)).collect();
                let rows = Rows::new(&rows, self.tokenizer.pad());
                let mut tape = Tape::inference(&self.parameters, &pool, machine);
                let x = self.network.forward(&mut tape, self.input(&images, machine)?, &rows)?;
                let scores = self.network.head().forward(&mut tape, &x);
                finite::check(scores.value().data(), &self.parameters)?;
                all.extend(probabilities(scores.value().data(), scores.value().width()));
            }
            Ok(all)
        })
    }

    /// The answer to a question about an image, and where the model looked.
    ///
    /// # Errors
    /// If the model computes NaN.
    pub fn answer(&self, image: &Image, question: &str, machine: &Machine) -> Result<ImageAnswer> {
        let image = self.config.image.prepared(image)?;
        let tokens = self.tokens(question);
        let rows = Rows::new(std::slice::from_ref(&tokens), self.tokenizer.pad());
        let pool = Pool::new();
        let mut tape = Tape::inference(&self.parameters, &pool, machine);
        tape.capture();
        let input = self.input(std::slice::from_ref(&image), machine)?;
        let x = self.network.forward(&mut tape, input, &rows)?;
        let captured = tape.captured();
        let scores = self.network.head().forward(&mut tape, &x);
        finite::check(scores.value().data(), &self.parameters)?;
        let probabilities = probabilities(scores.value().data(), scores.value().width()).remove(0);
        let [of_image, of_words, of_hops] = self.network.depths();
        let stack = |group, layers: usize, label: fn(usize) -> String| {
            (0..layers).map(move |layer| AttentionSite { group, layer, label: label(layer) })
        };
        let sites = stack(Group::Encoder, of_image, |layer| format!("image.layers.{layer}.self_attn"))
            .chain(stack(Group::Words, of_words, |layer| format!("layers.{layer}.self_attn")))
            .chain(stack(Group::Cross, of_words, |layer| format!("layers.{layer}.encoder_attn")))
            .chain(stack(Group::Hops, of_hops, |hop| format!("hops.{hop}")));
        let attentions = sites.map(|site| observed(&site, &site.calls(&captured), &self.parameters));
        let attentions = attentions.collect::<Result<Vec<_>>>()?;
        let of = |group: Group| attentions.iter().filter(move |seen| seen.group == group);
        let words = of(Group::Cross).next_back().map_or(Ok(Vec::new()), ObservedAttention::mean_over_heads)?;
        let hops = of(Group::Hops).map(ObservedAttention::mean_over_heads).collect::<Result<Vec<_>>>()?.concat();
        Ok(ImageAnswer { probabilities, image, grid: self.config.image.grid(), tokens, words, hops, attentions })
    }
}
