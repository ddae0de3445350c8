//! From scores to sentences: beam search and sampling, many sentences at a time.

mod beam;
mod scores;

pub(crate) use scores::{best, draw, forbid_repeats, penalise};

use crate::batch::{Rows, ended};
use crate::{Error, Model, Result};
use qkv_nn::{Machine, Parameters, Pool, Tape};
use serde::{Deserialize, Serialize};

/// How sentences are searched for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Search {
    /// Sentences that are followed side by side; 1 is greedy. With sampling, how many are drawn.
    pub beam: usize,
    /// A sentence's log-probability is divided by its length to this power: more favours longer ones.
    pub length_penalty: f64,
    /// The most tokens a translation has, as a multiple of its source …
    pub length_ratio: f64,
    /// … and this many more.
    pub length_extra: usize,
    /// No sequence of so many tokens appears twice; 0 allows any.
    pub no_repeat: usize,
    /// Tokens that were said have their score divided (or, below 0, multiplied) by this.
    pub repetition_penalty: f64,
    /// A translation ends before the first of these texts. It is cut when it is found, so its score is that of the whole.
    pub stop: Vec<String>,
    /// Draw instead of searching.
    pub sample: Option<Sampling>,
    /// Whether keys and values are kept from step to step: without, every step computes everything again.
    pub cache: bool,
}

impl Default for Search {
    fn default() -> Self {
        Search {
            beam: 5,
            length_penalty: 1.0,
            length_ratio: 2.0,
            length_extra: 10,
            no_repeat: 0,
            repetition_penalty: 1.0,
            stop: Vec::new(),
            sample: None,
            cache: true,
        }
    }
}

/// How tokens are drawn. What is cut off by one choice is not seen by the next: temperature, top-k, top-p, min-p, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Sampling {
    /// Scores are divided by it.
    pub temperature: f64,
    /// Only so many of the likeliest tokens; 0 keeps all.
    pub top_k: usize,
    /// Only the likeliest tokens that together have this probability.
    pub top_p: f64,
    /// Only tokens at least this fraction as likely as the likeliest.
    pub min_p: f64,
    /// The seed: the same gives the same sentences, whatever else is in the batch.
    pub seed: u64,
    /// How many sentences came before the first that is given: the same text in parts draws what it draws as a whole.
    #[serde(skip)]
    pub before: usize,
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 1, before: 0 }
    }
}

/// A sentence that was found.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// Its tokens, without start and end.
    pub tokens: Vec<u32>,
    /// Its log-probability, its end included.
    pub log_probability: f64,
    /// What it was ranked by: the log-probability over the length to the power of the penalty.
    pub score: f64,
}

impl Search {
    /// One sentence, the likeliest token at each step.
    pub fn greedy() -> Self {
        Search { beam: 1, ..Search::default() }
    }

    /// Refuses numbers that make no sense.
    ///
    /// # Errors
    /// Names the number and what it may be.
    pub fn check(&self) -> Result<()> {
        let refuse = |name: &str, found: f64, expected: &str| {
            Err(Error::invalid(format!("`{name}` is {found}, expected {expected}")))
        };
        if self.beam == 0 || self.beam > 1000 {
            return refuse("beam", self.beam as f64, "between 1 and 1000");
        }
        if !self.length_penalty.is_finite() || !(0.0..1e6).contains(&self.length_ratio) {
            return Err(Error::invalid("length penalty and ratio have to be ordinary numbers"));
        }
        if !(self.repetition_penalty > 0.0 && self.repetition_penalty.is_finite()) {
            return refuse("repetition-penalty", self.repetition_penalty, "above 0");
        }
        if let Some(Sampling { temperature, top_p, min_p, .. }) = self.sample {
            if !(temperature > 0.0 && temperature.is_finite()) {
                return refuse("temperature", temperature, "above 0");
            }
            if !(top_p > 0.0 && top_p <= 1.0) {
                return refuse("top-p", top_p, "above 0 and at most 1");
            }
            if !(0.0..=1.0).contains(&min_p) {
                return refuse("min-p", min_p, "between 0 and 1");
            }
        }
        Ok(())
    }

    /// Translates sentences given as tokens without special ones: for each, up to `beam` that were found, best first. Sentences
    /// of about the same length go through the model together; the order in which they are given does not matter.
    ///
    /// # Errors
    /// Where a source is longer than the model takes, or `qkv` refuses something.
    pub fn run(
        &self,
        model: &Model,
        parameters: &Parameters<f32>,
        pool: &Pool<f32>,
        machine: &Machine,
        sources: &[Vec<u32>],
    ) -> Result<Vec<Vec<Found>>> {
        self.check()?;
        // Inside the pool: a step hands out work dozens of times, and from outside each would wait for a thread to wake.
        rayon::scope(|_| self.batches(model, parameters, pool, machine, sources))
    }

    fn batches(
        &self,
        model: &Model,
        parameters: &Parameters<f32>,
        pool: &Pool<f32>,
        machine: &Machine,
        sources: &[Vec<u32>],
    ) -> Result<Vec<Vec<Found>>> {
        let specials = model.config().specials();
        let mut order: Vec<usize> = (0..sources.len()).collect();
        order.sort_by_key(|&at| (sources[at].len(), at));
        let mut found = vec![Vec::new(); sources.len()];
        let mut rest = &order[..];
        while let Some(&first) = rest.first() {
            // Room for the source's end, and for the start and one token of the target where both are one sequence.
            let most = model.most().saturating_sub(if model.gpt().is_some() { 3 } else { 1 });
            if let Some(&long) = rest.iter().find(|&&at| sources[at].len() > most) {
                return Err(Error::invalid(format!(
                    "sentence {} has {} tokens, the model takes at most {most}",
                    long + 1,
                    sources[long].len()
                ))
                .with_hint("split it into sentences"));
            }
            // As many as fill the machine without filling its caches.
            let count = |length: usize| (TOKENS / (length + 1) / self.beam).max(1);
            // A decoder alone reads sources of one length side by side.
            let fits = |at: usize| model.gpt().is_none() || sources[at].len() == sources[first].len();
            let mut take = 1;
            while take < rest.len()
                && fits(rest[take])
                && take < count(sources[rest[take]].len().max(sources[first].len()))
            {
                take += 1;
            }
            let (now, later) = rest.split_at(take);
            rest = later;
            let rows: Vec<Vec<u32>> = now.iter().map(|&at| ended(&sources[at], specials.eos)).collect();
            let mut tape = Tape::inference(parameters, pool, machine);
            let results = beam::search(self, model, &mut tape, &Rows::new(&rows, specials.pad), now)?;
            for (&at, result) in now.iter().zip(results) {
                found[at] = result;
            }
        }
        Ok(found)
    }
}

/// Source tokens times beams that go through the model together.
const TOKENS: usize = 6144;
