//! Measuring on the dev set: the loss of all of it, and translations of some of it.

use super::data::Prepared;
use super::events::Validation;
use crate::batch::Batch;
use crate::metrics::bleu::Bleu;
use crate::metrics::chrf::Chrf;
use crate::metrics::exact::Exact;
use crate::metrics::perplexity;
use crate::metrics::words::Words;
use crate::search::Search;
use crate::text::batches::{Batching, Lengths};
use crate::translator::Translator;
use crate::{Recipe, Result};
use qkv_nn::{Loss, Machine, Pool, Tape};

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
    let pairs: Vec<(Vec<u32>, Vec<u32>)> = data
        .dev
        .iter()
        .map(|pair| (translator.tokenizer.encode(&pair.source), translator.tokenizer.encode(&pair.target)))
        .collect();
    let lengths: Vec<Lengths> =
        pairs.iter().map(|(source, target)| Lengths { source: source.len() + 1, target: target.len() + 1 }).collect();
    let batching = Batching { tokens: recipe.train.tokens, longest: recipe.train.longest };
    let specials = translator.model.config().specials();
    let mut loss = Loss::default();
    for batch in batching.sorted(&lengths) {
        let batch = Batch::new(batch.iter().map(|&at| (&pairs[at].0[..], &pairs[at].1[..])), specials);
        let mut tape = Tape::inference(&translator.parameters, pool, machine);
        loss += translator.model.loss(&mut tape, &batch, 0.0, 1.0)?;
    }
    let count = recipe.train.validate_sentences.min(data.dev.len());
    let fits = |at: &usize| lengths[*at].source <= translator.model.most();
    let chosen: Vec<usize> = (0..data.dev.len()).filter(fits).take(count).collect();
    let sources: Vec<&str> = chosen.iter().map(|&at| data.dev[at].source.as_str()).collect();
    let references: Vec<&str> = chosen.iter().map(|&at| data.dev[at].target.as_str()).collect();
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
