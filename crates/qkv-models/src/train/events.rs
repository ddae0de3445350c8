//! What a run tells whoever watches it.

use serde::Serialize;

/// The state of a run after a step; sums are since the last line of progress.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Event {
    /// Steps taken.
    pub step: u64,
    /// Steps in all.
    pub steps: u64,
    /// Passes over the data that were begun before this one.
    pub epoch: u64,
    /// The loss that is trained on, a token.
    pub loss: f64,
    /// Of the training data, without label smoothing.
    pub perplexity: f64,
    /// What penalties on attention add.
    pub penalty: f64,
    /// The learning rate.
    pub rate: f64,
    /// The length of the gradient, before clipping.
    pub norm: f64,
    /// Target tokens.
    pub tokens: usize,
    /// Seconds they took.
    pub seconds: f64,
}

/// What is measured besides the loss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Measured {
    /// Nothing.
    #[default]
    Loss,
    /// Translations.
    Translations,
    /// Classes of texts.
    Classes,
    /// Tags of words.
    Tags,
    /// Answers to questions.
    Answers,
}

/// What a validation found.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Validation {
    /// After how many steps.
    pub step: u64,
    /// The loss on the dev set, a token, without label smoothing.
    pub loss: f64,
    /// Its exponential.
    pub perplexity: f64,
    /// BLEU of the sentences that were translated.
    pub bleu: f64,
    /// Their chrF.
    pub chrf: f64,
    /// The share of them that is right in every character, in percent; of classes and tags, the share that is right.
    pub exact: f64,
    /// The F1 of classes (their mean), of entities, or of the words of answers, in percent.
    pub f1: f64,
    /// How many they were.
    pub sentences: usize,
    /// A few of them: source, translation, reference.
    pub samples: Vec<[String; 3]>,
    /// What was measured.
    #[serde(skip)]
    pub measured: Measured,
}

impl Validation {
    /// The scores besides the loss, in words.
    pub fn told(&self) -> String {
        let Validation { bleu, chrf, exact, f1, .. } = self;
        match self.measured {
            Measured::Loss => String::new(),
            Measured::Translations => format!("BLEU {bleu:.2} · chrF {chrf:.2} · exact match {exact:.1} %"),
            Measured::Classes => format!("accuracy {exact:.2} % · F1 {f1:.2}"),
            Measured::Tags => format!("entity F1 {f1:.2} · tags right {exact:.2} %"),
            Measured::Answers => format!("exact match {exact:.2} % · F1 {f1:.2}"),
        }
    }
}

/// Someone who watches a run. Every method may be left as it is.
pub trait Watcher: Send {
    /// After every step.
    fn step(&mut self, _event: &Event) {}
    /// After a step whose numbers went into `metrics.jsonl`.
    fn logged(&mut self, _event: &Event) {}
    /// Before a validation.
    fn validating(&mut self, _step: u64) {}
    /// After it; `better` where it is the best so far.
    fn validated(&mut self, _validation: &Validation, _better: bool) {}
    /// After a checkpoint.
    fn saved(&mut self, _step: u64) {}
}

/// Someone who does not look.
impl Watcher for () {}
