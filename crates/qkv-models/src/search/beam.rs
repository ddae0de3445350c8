//! Beam search, and sampling, over sentences side by side. Every sentence that is not done has `beam` rows; what it is followed
//! by goes into the model as one batch, and the caches change places with the rows.

use super::scores::{LogSumExp, best, draw, forbid_repeats, penalise};
use super::{Found, Search};
use crate::batch::Rows;
use crate::{Model, Result, State};
use qkv_nn::Tape;
use qkv_simd::{Isa, pass};
use rayon::prelude::*;

/// A sentence on its way.
#[derive(Clone, Debug, Default)]
struct Live {
    tokens: Vec<u32>,
    log_probability: f64,
}

/// A source and what is being made of it.
struct Sentence {
    /// Where it stands among all that were given.
    at: usize,
    /// Its row in the batch that was encoded.
    source: usize,
    live: Vec<Live>,
    found: Vec<Found>,
    most: usize,
}

/// What may come next: which of the live sentences, the token, the log-probability then, and the score it is ranked by.
type Candidate = (usize, u32, f64);

/// Translates the rows of `source`; `places` says where each stands among all that were given.
pub(super) fn search(
    search: &Search,
    model: &Model,
    tape: &mut Tape<'_, f32>,
    source: &Rows,
    places: &[usize],
) -> Result<Vec<Vec<Found>>> {
    let beam = search.beam;
    let memory = model.encode(tape, source)?;
    let mut state = Some(model.start(tape, &memory, source)?);
    drop(memory);
    let limit = |length: usize| {
        let most = (length as f64 * search.length_ratio) as usize + search.length_extra;
        most.min(model.room(length + 1).saturating_sub(1)).max(1)
    };
    let mut sentences: Vec<Sentence> = places
        .iter()
        .enumerate()
        .map(|(row, &at)| Sentence {
            at,
            source: row,
            live: vec![Live::default(); beam],
            found: Vec::new(),
            most: limit(source.lengths[row].saturating_sub(1)),
        })
        .collect();
    if let Some(state) = &mut state {
        let rows: Vec<usize> = (0..sentences.len()).flat_map(|row| vec![row; beam]).collect();
        state.select(tape, &rows, false);
    }
    let mut done: Vec<(usize, Vec<Found>)> = Vec::with_capacity(sentences.len());
    while !sentences.is_empty() {
        let scores = next_scores(search, model, tape, source, &sentences, &mut state)?;
        let classes = model.config().vocab_size;
        // All sentences look for what may come next, side by side.
        let (eos, first) = (model.config().eos_token_id, sentences[0].live[0].tokens.is_empty());
        let next: Vec<Vec<Candidate>> = sentences
            .par_iter()
            .zip(scores.par_chunks(beam * classes))
            .map(|(sentence, scores)| candidates(search, sentence, scores, classes, first))
            .collect();
        let (mut rows, mut kept) = (Vec::new(), Vec::new());
        for (place, (mut sentence, next)) in sentences.into_iter().zip(next).enumerate() {
            let moved = advance(search, &mut sentence, &next, eos);
            if let Some(moved) = moved {
                rows.extend(moved.into_iter().map(|row| place * beam + row));
                kept.push(sentence);
            } else {
                done.push((sentence.source, ranked(sentence.found, beam)));
            }
        }
        if let Some(state) = &mut state {
            // As long as no sentence has gone, rows only change places among those of one source.
            let same = rows.len() == scores.len() / classes;
            if !kept.is_empty() {
                state.select(tape, &rows, same);
            }
        }
        sentences = kept;
    }
    done.sort_by_key(|&(source, _)| source);
    Ok(done.into_iter().map(|(_, found)| found).collect())
}

/// Scores for the next token of every row.
fn next_scores(
    search: &Search,
    model: &Model,
    tape: &mut Tape<'_, f32>,
    source: &Rows,
    sentences: &[Sentence],
    state: &mut Option<State<f32>>,
) -> Result<Vec<f32>> {
    let bos = model.config().bos_token_id;
    if search.cache {
        let live = sentences.iter().flat_map(|sentence| &sentence.live);
        let last: Vec<u32> = live.map(|live| live.tokens.last().copied().unwrap_or(bos)).collect();
        let state = state.as_mut().expect("made before the first step");
        return Ok(model.step(tape, &last, state)?.value().data().to_vec());
    }
    let (mut sources, mut shown) = (Vec::new(), Vec::new());
    for sentence in sentences {
        let row = &source.ids[sentence.source * source.length..][..source.lengths[sentence.source]];
        for live in &sentence.live {
            sources.push(row.to_vec());
            shown.push([&[bos], &live.tokens[..]].concat());
        }
    }
    let pad = model.config().pad_token_id;
    let shown = Rows::new(&shown, pad);
    let scores = model.scores(tape, &Rows::new(&sources, pad), &shown)?;
    let classes = model.config().vocab_size;
    let last = |row: usize| &scores.value().data()[((row + 1) * shown.length - 1) * classes..][..classes];
    Ok((0..shown.len()).flat_map(last).copied().collect())
}

/// What may come next in one sentence, best first.
fn candidates(search: &Search, sentence: &Sentence, scores: &[f32], classes: usize, first: bool) -> Vec<Candidate> {
    let mut all: Vec<Candidate> = Vec::new();
    for (row, (live, scores)) in sentence.live.iter().zip(scores.chunks_exact(classes)).enumerate() {
        let bent = search.repetition_penalty != 1.0 || search.no_repeat > 0;
        let mut copy = if bent { scores.to_vec() } else { Vec::new() };
        if bent {
            penalise(&mut copy, &live.tokens, search.repetition_penalty);
            forbid_repeats(&mut copy, &live.tokens, search.no_repeat);
        }
        let scores = if bent { &copy } else { scores };
        let total = f64::from(pass::run(Isa::best(), LogSumExp(scores)));
        let probability = |token: u32| live.log_probability + f64::from(scores[token as usize]) - total;
        if let Some(sampling) = &search.sample {
            let place = [(sampling.before + sentence.at) as u32, row as u32, live.tokens.len() as u32];
            all.extend(draw(scores, sampling, place).map(|token| (row, token, probability(token))));
            continue;
        }
        all.extend(best(scores, 2 * search.beam).into_iter().map(|(token, _)| (row, token, probability(token))));
        if first {
            break; // all rows are still the same
        }
    }
    if search.sample.is_none() {
        all.sort_by(|a, b| b.2.total_cmp(&a.2).then(a.0.cmp(&b.0)).then(a.1.cmp(&b.1)));
        all.truncate(2 * search.beam);
    }
    all
}

/// Moves a sentence on. Returns the row that each of its new ones comes from, or `None` where it is done.
fn advance(search: &Search, sentence: &mut Sentence, next: &[Candidate], eos: u32) -> Option<Vec<usize>> {
    let beam = search.beam;
    let length = sentence.live[0].tokens.len();
    let finish = |found: &mut Vec<Found>, tokens: Vec<u32>, log_probability: f64| {
        let score = log_probability / ((tokens.len() + 1) as f64).powf(search.length_penalty);
        found.push(Found { tokens, log_probability, score });
    };
    let (mut live, mut rows) = (Vec::with_capacity(beam), Vec::with_capacity(beam));
    for (rank, &(row, token, log_probability)) in next.iter().enumerate() {
        let tokens = &sentence.live[row].tokens;
        if token == eos {
            // An end counts only while it is among the best.
            if rank < beam || search.sample.is_some() {
                finish(&mut sentence.found, tokens.clone(), log_probability);
            }
        } else if live.len() < beam {
            live.push(Live { tokens: [&tokens[..], &[token]].concat(), log_probability });
            rows.push(row);
        }
    }
    let sampled = search.sample.is_some();
    let done = if sampled { live.is_empty() } else { sentence.found.len() >= beam || live.is_empty() };
    if length + 1 >= sentence.most && !done {
        // Out of room: what there is has to do.
        for live in live {
            finish(&mut sentence.found, live.tokens, live.log_probability);
        }
        return None;
    }
    if done {
        return None;
    }
    // Fewer ways on than rows: the last one fills up, and can never come before its twin.
    while live.len() < beam {
        let mut copy = live[live.len() - 1].clone();
        copy.log_probability = f64::NEG_INFINITY;
        live.push(copy);
        rows.push(rows[rows.len() - 1]);
    }
    sentence.live = live;
    Some(rows)
}

/// The best, first.
fn ranked(mut found: Vec<Found>, beam: usize) -> Vec<Found> {
    found.retain(|found| found.log_probability > f64::NEG_INFINITY);
    found.sort_by(|a, b| b.score.total_cmp(&a.score).then(a.tokens.cmp(&b.tokens)));
    found.truncate(beam);
    found
}
