//! Beam search and sampling over a batch of sources. Each source has `beam` prefixes that grow by a token per step;
//! finished hypotheses are collected until there are enough of them.

use super::beam_graph::BeamGraph;
use super::scores::{draw, forbid_repeats, penalize};
use super::{Hypothesis, Search};
use crate::batch::{Rows, SpecialTokens};
use crate::model::{Model, State};
use crate::{Result, finite};
use qkv_nn::{Parameters, Tape, Tensor, Var};
use qkv_simd::Isa;
use qkv_simd::logits::{Survey, all_finite, survey};
use rayon::prelude::*;

/// An unfinished hypothesis.
#[derive(Clone, Debug, Default)]
struct Prefix {
    tokens: Vec<u32>,
    log_probability: f64,
}

/// A source with its prefixes and hypotheses.
pub(super) struct SourceBeams {
    /// Its index among all sources of the search.
    index: usize,
    /// Its row in the encoded batch.
    row: usize,
    prefixes: Vec<Prefix>,
    hypotheses: Vec<Hypothesis>,
    pub max_len: usize,
}

/// A prefix extended by a token.
#[derive(Clone, Copy)]
struct Candidate {
    prefix: usize,
    token: u32,
    log_probability: f64,
}

/// Searches for every row of `source`; `indices` has each row's index among all sources of the search.
pub(super) fn search(
    search: &Search,
    model: &Model,
    parameters: &Parameters<f32>,
    tape: &mut Tape<'_, f32>,
    source: &Rows,
    indices: &[usize],
) -> Result<Vec<Vec<Hypothesis>>> {
    let memory = model.encode(tape, source)?;
    search_memory(search, model, parameters, tape, source, memory, indices)
}

/// The same over an encoded memory.
pub(super) fn search_memory(
    search: &Search,
    model: &Model,
    parameters: &Parameters<f32>,
    tape: &mut Tape<'_, f32>,
    source: &Rows,
    memory: Var<f32>,
    indices: &[usize],
) -> Result<Vec<Vec<Hypothesis>>> {
    let beam = search.beam;
    let limit = |length: usize| {
        let max_len = (length as f64 * search.length_ratio) as usize + search.length_extra;
        max_len.min(model.max_target_len(length + 1).saturating_sub(1)).max(1)
    };
    let mut sources: Vec<SourceBeams> = indices
        .iter()
        .enumerate()
        .map(|(row, &index)| SourceBeams {
            index,
            row,
            prefixes: vec![Prefix::default(); beam],
            hypotheses: Vec::new(),
            max_len: limit(source.lengths[row].saturating_sub(1)),
        })
        .collect();
    if let Some(graph) = BeamGraph::new(search, model, tape, source, &memory, &sources)? {
        return search_by_graph(search, parameters, tape, graph, sources, model.config().specials());
    }
    let mut state = model.start(tape, &memory, source)?;
    drop(memory);
    let mut done: Vec<(usize, Vec<Hypothesis>)> = Vec::with_capacity(sources.len());
    let (vocab_size, eos) = (model.config().vocab_size, model.config().eos_token_id);
    // At first, the prefixes of a source are all empty and share a row.
    let mut each = 1;
    while !sources.is_empty() {
        let row_count = sources.len() * each;
        let candidates: Option<Vec<Vec<Candidate>>> = if search.is_by_logits_alone() {
            let surveys = next_surveys(search, model, tape, source, &sources, each, &mut state)?;
            (sources.iter().zip(surveys.chunks_exact(each)))
                .map(|(beams, surveys)| surveyed_candidates(search, beams, surveys))
                .collect()
        } else {
            let logits = next_logits(search, model, tape, source, &sources, each, &mut state)?;
            let logits = logits.value().data();
            let of_source = |(beams, logits): (&SourceBeams, &[f32])| candidates(search, beams, logits, vocab_size);
            let rows_of = each * vocab_size;
            match tape.machine().threads() {
                1 => sources.iter().zip(logits.chunks_exact(rows_of)).map(of_source).collect(),
                _ => sources.par_iter().zip(logits.par_chunks_exact(rows_of)).map(of_source).collect(),
            }
        };
        let Some(candidates) = candidates else { return Err(finite::refusal(parameters)) };
        let (mut rows, mut unfinished) = (Vec::new(), Vec::new());
        for (place, (mut beams, candidates)) in sources.into_iter().zip(candidates).enumerate() {
            match advance(search, &mut beams, &candidates, eos) {
                Some(from) => {
                    rows.extend(from.into_iter().map(|prefix| place * each + prefix.min(each - 1)));
                    unfinished.push(beams);
                }
                None => done.push((beams.row, ranked(beams.hypotheses, beam))),
            }
        }
        // As long as no source is done, rows only move within their source.
        let same_sources = each == beam && rows.len() == row_count;
        if !unfinished.is_empty() {
            state.select(tape, &rows, same_sources);
        }
        (sources, each) = (unfinished, beam);
    }
    Ok(in_order(done))
}

/// The hypotheses of all sources, in the order of their rows.
fn in_order(mut done: Vec<(usize, Vec<Hypothesis>)>) -> Vec<Vec<Hypothesis>> {
    done.sort_by_key(|&(row, _)| row);
    done.into_iter().map(|(_, hypotheses)| hypotheses).collect()
}

/// The search on a device that decodes all beams of all sources in every step. The beams of a finished source keep
/// decoding, each from itself, and their results are ignored.
fn search_by_graph(
    search: &Search,
    parameters: &Parameters<f32>,
    tape: &mut Tape<'_, f32>,
    mut graph: BeamGraph<'_>,
    mut sources: Vec<SourceBeams>,
    SpecialTokens { bos, eos, .. }: SpecialTokens,
) -> Result<Vec<Vec<Hypothesis>>> {
    let (beam, mut is_first) = (search.beam, true);
    let mut done: Vec<(usize, Vec<Hypothesis>)> = Vec::with_capacity(sources.len());
    let mut ids = vec![bos; sources.len() * beam];
    let mut parents: Vec<u32> = (0..ids.len() as u32).collect();
    while !sources.is_empty() {
        let surveys = graph.step(tape, &ids, &parents)?;
        // At first, the prefixes of a source are all empty: one stands for all.
        let each = if is_first { 1 } else { beam };
        is_first = false;
        let of_source = |mut beams: SourceBeams| {
            let candidates = surveyed_candidates(search, &beams, &surveys[beams.row * beam..][..each])?;
            let from = advance(search, &mut beams, &candidates, eos);
            Some((beams, from))
        };
        let advanced: Option<Vec<_>> = match tape.machine().threads() {
            1 => sources.into_iter().map(of_source).collect(),
            _ => sources.into_par_iter().with_min_len(16).map(of_source).collect(),
        };
        let Some(advanced) = advanced else { return Err(finite::refusal(parameters)) };
        sources = Vec::with_capacity(advanced.len());
        for (beams, from) in advanced {
            let first = beams.row * beam;
            let Some(from) = from else {
                parents[first..][..beam].iter_mut().zip(first..).for_each(|(parent, row)| *parent = row as u32);
                done.push((beams.row, ranked(beams.hypotheses, beam)));
                continue;
            };
            for (at, (prefix, parent)) in beams.prefixes.iter().zip(from).enumerate() {
                ids[first + at] = prefix.tokens.last().copied().unwrap_or(bos);
                parents[first + at] = (first + parent) as u32;
            }
            sources.push(beams);
        }
    }
    Ok(in_order(done))
}

/// Surveys of the next token's logits, for the first `each` prefixes of every source.
fn next_surveys(
    search: &Search,
    model: &Model,
    tape: &mut Tape<'_, f32>,
    source: &Rows,
    sources: &[SourceBeams],
    each: usize,
    state: &mut State<f32>,
) -> Result<Vec<Survey>> {
    if search.cache {
        let last = last_tokens(sources, each, model.config().bos_token_id);
        return model.step_survey(tape, &last, state, search.surveyed());
    }
    let logits = next_logits(search, model, tape, source, sources, each, state)?;
    Ok(tape.survey(&logits, search.surveyed()))
}

/// The last token of the first `each` prefixes of every source.
fn last_tokens(sources: &[SourceBeams], each: usize, bos: u32) -> Vec<u32> {
    let prefixes = sources.iter().flat_map(|beams| &beams.prefixes[..each]);
    prefixes.map(|prefix| prefix.tokens.last().copied().unwrap_or(bos)).collect()
}

/// Logits of the next token of the first `each` prefixes of every source, `[sources × each, 1, V]`.
fn next_logits(
    search: &Search,
    model: &Model,
    tape: &mut Tape<'_, f32>,
    source: &Rows,
    sources: &[SourceBeams],
    each: usize,
    state: &mut State<f32>,
) -> Result<Var<f32>> {
    let bos = model.config().bos_token_id;
    if search.cache {
        return model.step(tape, &last_tokens(sources, each, bos), state);
    }
    let (mut encoder_input, mut decoder_input) = (Vec::new(), Vec::new());
    for beams in sources {
        for prefix in &beams.prefixes[..each] {
            encoder_input.push(source.row(beams.row).to_vec());
            decoder_input.push([&[bos], &prefix.tokens[..]].concat());
        }
    }
    let pad = model.config().pad_token_id;
    let decoder_input = Rows::new(&decoder_input, pad);
    let scores = model.scores(tape, &Rows::new(&encoder_input, pad), &decoder_input)?;
    let vocab_size = model.config().vocab_size;
    let last = |row: usize| &scores.value().data()[((row + 1) * decoder_input.length - 1) * vocab_size..][..vocab_size];
    let logits: Vec<f32> = (0..decoder_input.len()).flat_map(last).copied().collect();
    Ok(tape.constant(Tensor::new(logits, &[decoder_input.len(), 1, vocab_size])))
}

/// The candidates of one source, best first, from the logits of its prefixes, or of one row if all are empty; `None` if
/// a logit is not finite.
fn candidates(search: &Search, beams: &SourceBeams, logits: &[f32], vocab_size: usize) -> Option<Vec<Candidate>> {
    let isa = Isa::best();
    let rows = logits.chunks_exact(vocab_size);
    let mut all: Vec<Candidate> = Vec::new();
    // If all prefixes are empty, they share a row: sampling draws from it for each, but a search would find the same
    // for all.
    let count = if search.sample.is_some() { beams.prefixes.len() } else { rows.len() };
    for ((row, prefix), scores) in beams.prefixes.iter().enumerate().zip(rows.cycle()).take(count) {
        if !all_finite(isa, scores) {
            return None;
        }
        let mut scores = scores.to_vec();
        penalize(&mut scores, &prefix.tokens, search.repetition_penalty);
        forbid_repeats(&mut scores, &prefix.tokens, search.no_repeat);
        let most = if search.sample.is_some() { 0 } else { search.surveyed() };
        let found = survey(isa, &scores, most);
        let Some(sampling) = &search.sample else {
            all.extend(of_prefix(search, (row, prefix), &found));
            continue;
        };
        let total = f64::from(found.log_sum_exp);
        for &token in search.never.iter().filter(|&&token| (token as usize) < vocab_size) {
            scores[token as usize] = f32::NEG_INFINITY;
        }
        let place = [(sampling.before + beams.index) as u32, row as u32, prefix.tokens.len() as u32];
        all.extend(draw(&scores, sampling, place).map(|token| {
            let log_probability = prefix.log_probability + f64::from(scores[token as usize]) - total;
            Candidate { prefix: row, token, log_probability }
        }));
    }
    Some(if search.sample.is_some() { all } else { best_of(search, all) })
}

/// The same from surveys of the logits, if only the highest logits decide.
fn surveyed_candidates(search: &Search, beams: &SourceBeams, surveys: &[Survey]) -> Option<Vec<Candidate>> {
    if !surveys.iter().all(|found| found.is_finite) {
        return None;
    }
    let prefixes = beams.prefixes.iter().enumerate().zip(surveys);
    Some(best_of(search, prefixes.flat_map(|(prefix, found)| of_prefix(search, prefix, found)).collect()))
}

/// The candidates that extend one prefix. Forbidden tokens keep their share of the probability: the others are not
/// renormalized.
fn of_prefix(search: &Search, (row, prefix): (usize, &Prefix), found: &Survey) -> impl Iterator<Item = Candidate> {
    let (log_probability, total) = (prefix.log_probability, f64::from(found.log_sum_exp));
    let written = found.best.iter().filter(|(token, _)| !search.never.contains(token));
    written.take(2 * search.beam).map(move |&(token, score)| Candidate {
        prefix: row,
        token,
        log_probability: log_probability + f64::from(score) - total,
    })
}

/// The best candidates of a source, best first.
fn best_of(search: &Search, mut all: Vec<Candidate>) -> Vec<Candidate> {
    let order = |a: &Candidate, b: &Candidate| b.log_probability.total_cmp(&a.log_probability);
    all.sort_by(|a, b| order(a, b).then(a.prefix.cmp(&b.prefix)).then(a.token.cmp(&b.token)));
    all.truncate(2 * search.beam);
    all
}

/// Extends the prefixes of a source by their best candidates. Returns the prefix that each new one extends, or `None`
/// if the source is done.
fn advance(search: &Search, beams: &mut SourceBeams, candidates: &[Candidate], eos: u32) -> Option<Vec<usize>> {
    let beam = search.beam;
    let length = beams.prefixes[0].tokens.len();
    let finish = |hypotheses: &mut Vec<Hypothesis>, tokens: Vec<u32>, log_probability: f64| {
        let score = log_probability / ((tokens.len() + 1) as f64).powf(search.length_penalty);
        hypotheses.push(Hypothesis { tokens, log_probability, score });
    };
    let (mut prefixes, mut rows) = (Vec::with_capacity(beam), Vec::with_capacity(beam));
    for (rank, &Candidate { prefix, token, log_probability }) in candidates.iter().enumerate() {
        let tokens = &beams.prefixes[prefix].tokens;
        if token == eos {
            // An end token counts only among the best `beam` candidates.
            if rank < beam || search.sample.is_some() {
                finish(&mut beams.hypotheses, tokens.clone(), log_probability);
            }
        } else if prefixes.len() < beam {
            prefixes.push(Prefix { tokens: [&tokens[..], &[token]].concat(), log_probability });
            rows.push(prefix);
        }
    }
    let enough = search.sample.is_none() && beams.hypotheses.len() >= beam;
    if enough || prefixes.is_empty() {
        return None;
    }
    if length + 1 >= beams.max_len {
        for Prefix { tokens, log_probability } in prefixes {
            finish(&mut beams.hypotheses, tokens, log_probability);
        }
        return None;
    }
    // If there are fewer prefixes than rows, copies of the last one with probability zero fill up.
    while prefixes.len() < beam {
        let mut copy = prefixes[prefixes.len() - 1].clone();
        copy.log_probability = f64::NEG_INFINITY;
        prefixes.push(copy);
        rows.push(rows[rows.len() - 1]);
    }
    beams.prefixes = prefixes;
    Some(rows)
}

/// The best hypotheses, best first.
fn ranked(mut hypotheses: Vec<Hypothesis>, beam: usize) -> Vec<Hypothesis> {
    hypotheses.retain(|hypothesis| hypothesis.log_probability > f64::NEG_INFINITY);
    hypotheses.sort_by(|a, b| b.score.total_cmp(&a.score).then(a.tokens.cmp(&b.tokens)));
    hypotheses.truncate(beam);
    hypotheses
}
