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

/// What a validation found.
#[derive(Clone, Debug, PartialEq, Serialize)]
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
    /// The share of them that is right in every character, in percent.
    pub exact: f64,
    /// How many they were.
    pub sentences: usize,
    /// A few of them: source, translation, reference.
    pub samples: Vec<[String; 3]>,
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
