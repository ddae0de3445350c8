//! Beam search and sampling over many sources at once: batching here, the search in `beam`, its steps on a device in
//! `beam_graph`, changes to logits in `scores`.

mod beam;
mod beam_graph;
mod scores;

pub(crate) use scores::{draw, forbid_repeats, penalize};

use crate::batch::{Rows, with_eos};
use crate::{Error, Model, Result};
use qkv_nn::{Machine, Parameters, Pool, Tape, Var};
use qkv_simd::logits::Weights;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Settings of a search.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Search {
    /// Beam width; 1 is greedy. With sampling, the number of samples.
    pub beam: usize,
    /// Log-probabilities are divided by the length raised to this power: larger values favor longer hypotheses.
    pub length_penalty: f64,
    /// The longest hypothesis in tokens, as a multiple of the source, plus `length_extra`.
    pub length_ratio: f64,
    /// Tokens that a hypothesis may have beyond `length_ratio` times the source.
    pub length_extra: usize,
    /// No n-gram of this many tokens is generated twice; 0 allows any.
    pub no_repeat: usize,
    /// Logits of generated tokens are divided by this if positive, multiplied if negative.
    pub repetition_penalty: f64,
    /// Translations are cut before the first of these strings, after the search; their scores are those of the whole.
    pub stop: Vec<String>,
    /// Sample instead of searching.
    pub sample: Option<Sampling>,
    /// Tokens that are never generated, such as the unknown token.
    #[serde(skip)]
    pub never: Vec<u32>,
    /// Whether keys and values are cached between steps; without a cache every step recomputes the whole sequence.
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
            never: Vec::new(),
            cache: true,
        }
    }
}

/// Settings of sampling, applied in this order: temperature, top-k, top-p, min-p. Each sees only what the one before
/// kept.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Sampling {
    /// Logits are divided by this.
    pub temperature: f64,
    /// Keeps this many most probable tokens; 0 keeps all.
    pub top_k: usize,
    /// Keeps the most probable tokens up to this total probability.
    pub top_p: f64,
    /// Keeps tokens at least this fraction as probable as the most probable one.
    pub min_p: f64,
    /// The same seed gives the same samples, whatever else is in the batch.
    pub seed: u64,
    /// Number of sources before this call's first one, so that a text translated in parts gets the same samples as in
    /// one call.
    #[serde(skip)]
    pub before: usize,
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 1, before: 0 }
    }
}

impl Sampling {
    /// Whether every token may be drawn.
    fn keeps_all(&self) -> bool {
        self.top_k == 0 && self.top_p >= 1.0 && self.min_p <= 0.0
    }

    /// The weights of tokens: their probabilities relative to that of the most probable one.
    fn weights(&self, highest: f32) -> Weights {
        Weights { highest, temperature: self.temperature }
    }
}

/// A finished hypothesis of the search.
#[derive(Clone, Debug, PartialEq)]
pub struct Hypothesis {
    /// Its tokens, without special ones.
    pub tokens: Vec<u32>,
    /// Its log-probability, end token included.
    pub log_probability: f64,
    /// The score it was ranked by: its log-probability over its length raised to the length penalty.
    pub score: f64,
}

impl Search {
    /// Greedy search: the most probable token at each step.
    pub fn greedy() -> Self {
        Search { beam: 1, ..Search::default() }
    }

    /// Whether only the highest logits decide, not the tokens generated so far.
    fn is_by_logits_alone(&self) -> bool {
        self.sample.is_none() && self.repetition_penalty == 1.0 && self.no_repeat == 0
    }

    /// How many of the highest logits of each prefix the search needs.
    fn surveyed(&self) -> usize {
        2 * self.beam + self.never.len()
    }

    /// Checks that every setting is in its range.
    ///
    /// # Errors
    /// Names the setting and its range.
    pub fn check(&self) -> Result<()> {
        let refuse = |name: &str, found: f64, expected: &str| {
            Err(Error::invalid(format!("`{name}` is {found}, expected {expected}")))
        };
        if self.beam == 0 || self.beam > 1000 {
            return refuse("beam", self.beam as f64, "between 1 and 1000");
        }
        if !self.length_penalty.is_finite() || !(0.0..1e6).contains(&self.length_ratio) {
            return Err(Error::invalid(
                "`length_penalty` and `length_ratio` must be finite, the ratio between 0 and 1e6",
            ));
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

    /// Searches for every source, given as tokens without special ones, and returns up to `beam` hypotheses for each,
    /// best first. Sources of similar length are batched; their order does not change the results.
    ///
    /// # Errors
    /// If a source is too long for the model, or the model computes NaN.
    pub fn run(
        &self,
        model: &Model,
        parameters: &Parameters<f32>,
        pool: &Pool<f32>,
        machine: &Machine,
        sources: &[Vec<u32>],
    ) -> Result<Vec<Vec<Hypothesis>>> {
        self.check()?;
        // Inside the thread pool: a step spawns dozens of tasks, and from outside each would wake a thread.
        rayon::scope(|_| self.batches(model, parameters, pool, machine, sources))
    }

    /// Searches for every sequence of a memory `[B, M, C]` that something else encoded, such as an image encoder.
    ///
    /// # Errors
    /// If the model computes NaN.
    pub(crate) fn run_over(
        &self,
        model: &Model,
        parameters: &Parameters<f32>,
        tape: &mut Tape<'_, f32>,
        memory: Var<f32>,
    ) -> Result<Vec<Vec<Hypothesis>>> {
        self.check()?;
        let &[batch, length, _] = memory.shape() else { unreachable!("a memory has three axes") };
        let source = Rows { ids: Vec::new(), lengths: vec![length; batch], length };
        // Without a cache, each step would encode the source again, and here there is no source.
        let search = Search { cache: true, ..self.clone() };
        beam::search_memory(&search, model, parameters, tape, &source, memory, &(0..batch).collect::<Vec<_>>())
    }

    fn batches(
        &self,
        model: &Model,
        parameters: &Parameters<f32>,
        pool: &Pool<f32>,
        machine: &Machine,
        sources: &[Vec<u32>],
    ) -> Result<Vec<Vec<Hypothesis>>> {
        let specials = model.config().specials();
        let mut order: Vec<usize> = (0..sources.len()).collect();
        order.sort_by_key(|&at| (sources[at].len(), at));
        // The source needs room for its end token; in a joined sequence, also for the start and one token of the
        // target.
        let max_len = model.max_len().saturating_sub(if model.gpt().is_some() { 3 } else { 1 });
        if let Some(&long) = order.iter().find(|&&at| sources[at].len() > max_len) {
            return Err(Error::invalid(format!(
                "sentence {} has {} tokens, the model takes at most {max_len}",
                long + 1,
                sources[long].len()
            ))
            .with_hint("split it into sentences"));
        }
        // Enough tokens to keep a core busy without overflowing its caches, the longest sources first. Towards the end
        // batches become smaller, so that cores end together. A GPU takes many more tokens, one batch after the other.
        let tokens = |at: usize| self.beam * (sources[at].len() + 1);
        let mut left: usize = order.iter().map(|&at| tokens(at)).sum();
        let mut batches = Vec::new();
        let mut rest = &order[..];
        while let Some(&longest) = rest.last() {
            let most = match (machine.cuda(), machine.threads()) {
                (Some(_), _) => MAX_BATCH_TOKENS_ON_GPU,
                (None, 1) => MAX_BATCH_TOKENS,
                (None, threads) => (left / (3 * threads)).clamp(MIN_BATCH_TOKENS, MAX_BATCH_TOKENS),
            };
            // A decoder-only model needs sources of one length.
            let fits = |&&at: &&usize| model.gpt().is_none() || sources[at].len() == sources[longest].len();
            let take = rest.iter().rev().take((most / tokens(longest)).max(1)).take_while(fits).count();
            let (later, now) = rest.split_at(rest.len() - take);
            left -= now.iter().map(|&at| tokens(at)).sum::<usize>();
            batches.push(now);
            rest = later;
        }
        let search = |batch: &[usize], machine: &Machine| {
            let rows: Vec<Vec<u32>> = batch.iter().map(|&at| with_eos(&sources[at], specials.eos)).collect();
            let mut tape = Tape::inference(parameters, pool, machine);
            beam::search(self, model, parameters, &mut tape, &Rows::new(&rows, specials.pad), batch)
        };
        let next = AtomicUsize::new(0);
        let take = |machine: &Machine| -> Result<Vec<_>> {
            let batches = std::iter::from_fn(|| batches.get(next.fetch_add(1, Ordering::Relaxed)));
            batches.map(|&batch| Ok((batch, search(batch, machine)?))).collect()
        };
        // With a batch for every core, each core takes whole batches instead of sharing every product.
        let threads = machine.threads();
        let results = if batches.len() < threads || threads == 1 || machine.cuda().is_some() {
            take(machine)?
        } else {
            let workers = (0..threads).into_par_iter().with_max_len(1);
            workers.map(|_| take(&machine.single())).collect::<Result<Vec<_>>>()?.concat()
        };
        let mut found = vec![Vec::new(); sources.len()];
        for (batch, results) in results {
            for (&at, result) in batch.iter().zip(results) {
                found[at] = result;
            }
        }
        Ok(found)
    }
}

/// Smallest and largest source tokens × beams per batch.
const MIN_BATCH_TOKENS: usize = 384;
const MAX_BATCH_TOKENS: usize = 1536;
/// The largest on a GPU.
const MAX_BATCH_TOKENS_ON_GPU: usize = 1 << 16;
