//! Events that a run reports while it trains.

use serde::Serialize;

/// The state of a run after a step. Losses and tokens accumulate from the last line of progress.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Event {
    /// Steps taken.
    pub step: u64,
    /// Steps of the whole run.
    pub steps: u64,
    /// The epoch, counted from 0.
    pub epoch: u64,
    /// Mean loss per token, with label smoothing.
    pub loss: f64,
    /// Perplexity of the training data, without label smoothing.
    pub perplexity: f64,
    /// Mean penalty on attention per step.
    pub penalty: f64,
    /// The learning rate.
    pub rate: f64,
    /// Norm of the gradient before clipping.
    pub norm: f64,
    /// Target tokens.
    pub tokens: usize,
    /// Seconds of training since the last line, without validations and checkpoints.
    pub seconds: f64,
    /// Target tokens per second, since the last line or since the run was resumed.
    #[serde(skip)]
    pub tokens_per_second: f64,
}

/// What a validation measures besides the loss.
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
    /// Descriptions of images.
    Captions,
    /// Boxes in images.
    Boxes,
    /// The alignment of sounds with letters.
    Speech,
}

/// Metrics of a validation.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Validation {
    /// The step.
    pub step: u64,
    /// Mean loss per token on the dev set, without label smoothing.
    pub loss: f64,
    /// Its exponential.
    pub perplexity: f64,
    /// BLEU of the translated sentences.
    pub bleu: f64,
    /// Their chrF.
    pub chrf: f64,
    /// Percentage of exact matches; for classes and tags, the accuracy; for boxes, the average precision at an overlap
    /// of 0.5; for voices, the percentage of attention near the diagonal.
    pub exact: f64,
    /// Macro F1 of classes, F1 of entities, word F1 of answers, edit similarity of descriptions, or average
    /// precision of boxes, in percent.
    pub f1: f64,
    /// Number of sentences.
    pub sentences: usize,
    /// Examples: source, translation, reference.
    pub samples: Vec<[String; 3]>,
    /// What the validation measured.
    #[serde(skip)]
    pub measured: Measured,
}

impl Validation {
    /// The metrics besides the loss, as text.
    pub fn told(&self) -> String {
        let Validation { bleu, chrf, exact, f1, .. } = self;
        match self.measured {
            Measured::Loss => String::new(),
            Measured::Translations => format!("BLEU {bleu:.2} · chrF {chrf:.2} · exact match {exact:.1} %"),
            Measured::Classes => format!("accuracy {exact:.2} % · F1 {f1:.2}"),
            Measured::Tags => format!("entity F1 {f1:.2} · tags right {exact:.2} %"),
            Measured::Boxes => format!("AP50 {exact:.2} · AP {f1:.2}"),
            Measured::Speech => format!("{exact:.1} % of attention near the diagonal"),
            Measured::Captions => format!("BLEU {bleu:.2} · edit similarity {f1:.2} % · exact match {exact:.1} %"),
            Measured::Answers => format!("exact match {exact:.2} % · F1 {f1:.2}"),
        }
    }
}

/// Watches a run. Methods do nothing by default.
pub trait Watcher: Send {
    /// After every step.
    fn step(&mut self, _event: &Event) {}
    /// After a line was written to `metrics.jsonl`.
    fn logged(&mut self, _event: &Event) {}
    /// Before a validation.
    fn validating(&mut self, _step: u64) {}
    /// After a validation; `better` means that it is the best so far.
    fn validated(&mut self, _validation: &Validation, _better: bool) {}
    /// After a checkpoint was written.
    fn saved(&mut self, _step: u64) {}
}

/// Ignores everything.
impl Watcher for () {}
