//! Measuring on the dev set: the loss of all of it, and translations of some of it.

use super::data::Prepared;
use super::events::Validation;
use crate::metrics::bleu::Bleu;
use crate::metrics::chrf::Chrf;
use crate::metrics::exact::Exact;
use crate::metrics::perplexity;
use crate::metrics::words::Words;
use crate::search::Search;
use crate::translator::Translator;
use crate::{Recipe, Result};
use qkv_nn::{Machine, Pool};

/// Sentences that are shown.
const SAMPLES: usize = 3;

pub(super) fn validate(
    translator: &Translator,
    data: &Prepared,
    recipe: &Recipe,
    machine: &Machine,
    pool: &Pool<f32>,
    step: u64,
) -> Result<Validation> {
    let loss = translator.loss(&data.dev, machine, pool)?;
    let count = recipe.train.validate_sentences.min(data.dev.len());
    let sources: Vec<&str> = data.dev[..count].iter().map(|pair| pair.source.as_str()).collect();
    let references: Vec<&str> = data.dev[..count].iter().map(|pair| pair.target.as_str()).collect();
    // Greedy: quick, and what is better greedily is better with a beam.
    let search = Search { beam: 1, sample: None, ..recipe.search.clone() };
    let found = translator.translate(&sources, &search, machine)?;
    let outputs: Vec<&str> = found.iter().map(|found| found.first().map_or("", |best| best.text.as_str())).collect();
    let (bleu, chrf, exact) = if outputs.is_empty() {
        (0.0, 0.0, 0.0)
    } else {
        let bleu = Bleu::of(&outputs, &references, Words::default())?.score;
        (bleu, Chrf::of(&outputs, &references)?.score, Exact::of(&outputs, &references)?.score())
    };
    let nll = loss.nll / loss.rows.max(1) as f64;
    let sample = |at: usize| [sources[at], outputs[at], references[at]].map(str::to_owned);
    let samples = (0..outputs.len()).step_by((outputs.len() / SAMPLES).max(1)).take(SAMPLES).map(sample).collect();
    let (perplexity, sentences) = (perplexity(nll), outputs.len());
    Ok(Validation { step, loss: nll, perplexity, bleu, chrf, exact, sentences, samples })
}
