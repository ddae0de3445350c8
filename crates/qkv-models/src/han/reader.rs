//! A HAN with its parameters and tokenizer: reading and writing its folder, classification, and attention for display.

use super::{Document, HanConfig, HanNetwork};
use crate::batch::SpecialTokens;
use crate::files::tensors::Storage;
use crate::layout::{Inspected, Layout};
use crate::own_folder::{self, OwnFolder};
use crate::probabilities::probabilities;
use crate::provenance::Provenance;
use crate::start::Start;
use crate::text::tokenizer::Tokenizer;
use crate::{Architecture, ModelConfig, Result, finite};
use qkv_nn::layers::Builder;
use qkv_nn::{Machine, Parameters, PendingLoss, Pool, Tape, Target};
use serde::Serialize;
use std::path::Path;

/// Words per batch of documents.
const WORDS: usize = 16 << 10;

/// A HAN with its parameters and tokenizer.
#[derive(Debug)]
pub struct Han {
    /// Its configuration.
    pub config: HanConfig,
    /// Its parameters.
    pub parameters: Parameters<f32>,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    pub(crate) model: HanNetwork,
}

/// A classified document with both levels of attention.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Reading {
    /// The probability of each class, in the order of the model's labels.
    pub probabilities: Vec<f32>,
    /// Its sentences.
    pub sentences: Vec<ReadSentence>,
    /// Number of sentences that were not read.
    pub left_out: usize,
}

/// A sentence of a classified document.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ReadSentence {
    /// Its text.
    pub text: String,
    /// Its attention weight; those of all sentences sum to 1.
    pub weight: f32,
    /// Its words.
    pub words: Vec<ReadWord>,
}

/// A word of a classified document.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ReadWord {
    /// Its text.
    pub text: String,
    /// Its attention weight; those of all words of the sentence sum to 1.
    pub weight: f32,
}

/// The folder of a HAN.
fn found(folder: &Path) -> Result<OwnFolder<HanConfig, HanNetwork>> {
    let config = |found| if let Architecture::Han(config) = found { Some(config) } else { None };
    OwnFolder::open(folder, "han", config, HanNetwork::new)
}

/// Description, number of parameters, mismatches and weights of a folder.
pub(crate) fn inspect(folder: &Path) -> Result<Inspected> {
    let found = found(folder)?;
    let HanConfig { d_model, hidden, words, sentences, .. } = found.config;
    let limits = format!("{sentences} sentences of {words} words");
    let words = format!("han: width {d_model}, states of {hidden}, {limits}, vocabulary {}", found.vocab_size);
    Ok(found.inspected(words))
}

impl Han {
    /// Reads a folder.
    ///
    /// # Errors
    /// Names the file, and the field or tensor that is wrong.
    pub fn open(folder: impl AsRef<Path>) -> Result<Han> {
        let found = found(folder.as_ref())?;
        let tokenizer = found.tokenizer()?;
        let (config, model, parameters) = found.fill()?;
        Ok(Han { config, parameters, tokenizer, model })
    }

    /// A new model with parameters drawn from the seed.
    ///
    /// ```
    /// use qkv_models::text::tokenizer::{Kind, Tokenizer};
    /// use qkv_models::{Han, HanConfig};
    /// let tokenizer = Tokenizer::train(["a good film . <s> twice good"; 2], Kind::Words { size: 50 })?;
    /// let labels = vec!["bad".into(), "good".into()];
    /// let config = HanConfig { d_model: 8, hidden: 4, labels, ..HanConfig::default() };
    /// let han = Han::new(&config, tokenizer, 1)?;
    /// let read = han.read("A good film. Twice!", &qkv_nn::Machine::new(1))?;
    /// assert_eq!(read.sentences[1].words[0].text, "Twice");
    /// assert!((read.sentences.iter().map(|sentence| sentence.weight).sum::<f32>() - 1.0).abs() < 1e-5);
    /// # Ok::<(), qkv_models::Error>(())
    /// ```
    ///
    /// # Errors
    /// If sizes do not fit together.
    pub fn new(config: &HanConfig, tokenizer: Tokenizer, seed: u64) -> Result<Han> {
        let mut parameters = Parameters::new();
        let model = HanNetwork::new(&mut Builder::new(&mut parameters, seed), config, tokenizer.len())?;
        Ok(Han { config: config.clone(), parameters, tokenizer, model })
    }

    /// A model on the layers of a trained one, with a new head if the classes differ.
    pub(crate) fn from_start(
        config: &HanConfig,
        tokenizer: Tokenizer,
        start: &Start,
        seed: u64,
    ) -> Result<(Han, Provenance)> {
        let mut han = Han::new(config, tokenizer, seed)?;
        let same_head = matches!(&start.architecture, Architecture::Han(from) if from.labels == config.labels);
        let fresh = |name: &str| name.starts_with("head.") && !same_head;
        let layout = Layout::own(&han.parameters);
        let found = layout.fill_from(&mut han.parameters, &start.weights, fresh, seed)?;
        Ok((han, found))
    }

    /// Writes a folder.
    ///
    /// # Errors
    /// If the folder cannot be written.
    pub fn save(&self, folder: impl AsRef<Path>, storage: Storage) -> Result<()> {
        let specials = SpecialTokens::of(&self.tokenizer);
        let config = ModelConfig::new(Architecture::Han(self.config.clone()), self.tokenizer.len(), specials);
        own_folder::write(folder.as_ref(), &config, &self.parameters, Some(&self.tokenizer), storage)
    }

    /// Tokenizes a text within the limits of the model.
    pub fn cut(&self, text: &str) -> Document {
        Document::new(text, &self.tokenizer, self.config.words, self.config.sentences)
    }

    /// The index of a class, if it is known.
    pub(crate) fn label(&self, name: &str) -> Option<u32> {
        self.config.labels.iter().position(|label| label == name).map(|at| at as u32)
    }

    /// The loss of documents with classes; each gradient is multiplied by `scale`.
    pub(crate) fn loss(
        &self,
        tape: &mut Tape<'_, f32>,
        documents: &[(Document, u32)],
        smoothing: f64,
        scale: f64,
    ) -> Result<PendingLoss> {
        let read: Vec<&Document> = documents.iter().map(|(document, _)| document).collect();
        let ids: Vec<u32> = documents.iter().map(|(_, class)| *class).collect();
        let x = self.model.forward(tape, &read, self.tokenizer.pad())?; // (D, 1, 2H)
        let head = self.model.head();
        Ok(tape.cross_entropy(&x, head.weight, head.bias, Target { ids: &ids, ignore: None, smoothing, scale }))
    }

    /// The probabilities of all classes, for each document, in the order of [`labels`](HanConfig::labels).
    ///
    /// # Errors
    /// If the model computes NaN.
    pub fn classify<S: AsRef<str>>(&self, texts: &[S], machine: &Machine) -> Result<Vec<Vec<f32>>> {
        let documents: Vec<Document> = texts.iter().map(|text| self.cut(text.as_ref())).collect();
        rayon::scope(|_| self.classify_cut(&documents, machine))
    }

    fn classify_cut(&self, documents: &[Document], machine: &Machine) -> Result<Vec<Vec<f32>>> {
        let (pool, mut found, mut rest) = (Pool::new(), Vec::with_capacity(documents.len()), documents);
        while !rest.is_empty() {
            let mut words = 0;
            let fits = |document: &&Document| {
                words += document.words();
                words <= WORDS
            };
            let (now, later) = rest.split_at(rest.iter().take_while(fits).count().max(1));
            rest = later;
            let mut tape = Tape::inference(&self.parameters, &pool, machine);
            let x = self.model.forward(&mut tape, &now.iter().collect::<Vec<_>>(), self.tokenizer.pad())?;
            let scores = self.model.head().forward(&mut tape, &x); // [D, 1, K]
            finite::check(scores.value().data(), &self.parameters)?;
            found.extend(probabilities(scores.value().data(), scores.value().width()));
        }
        Ok(found)
    }

    /// Classifies a document and returns both levels of attention.
    ///
    /// # Errors
    /// If `qkv` refuses an attention call.
    pub fn read(&self, text: &str, machine: &Machine) -> Result<Reading> {
        let observed = self.observe(text, machine)?;
        let document = &observed.document;
        let mut sentences = Vec::with_capacity(document.sentences.len());
        if let Some([of_words, of_sentences]) = &observed.attentions {
            let (words, of_document) = (of_words.weights(0)?, of_sentences.weights(0)?);
            let mut from = 0;
            for (at, ids) in document.sentences.iter().enumerate() {
                let word = |(bytes, pieces): (std::ops::Range<usize>, std::ops::Range<usize>)| ReadWord {
                    text: text[bytes].trim().to_owned(),
                    weight: pieces.map(|piece| words[[at, from + piece]]).sum(),
                };
                sentences.push(ReadSentence {
                    text: text[document.sentence(at)].trim().to_owned(),
                    weight: of_document[[0, at]],
                    words: document.whole_words(at).into_iter().map(word).collect(),
                });
                from += ids.len();
            }
        }
        Ok(Reading { probabilities: observed.probabilities, sentences, left_out: document.left_out })
    }
}
