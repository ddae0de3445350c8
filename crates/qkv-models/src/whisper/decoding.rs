//! Decoding of one window: greedy, by beam search, or sampled at a temperature. The searches make the same decisions as
//! CTranslate2, on which faster-whisper runs, so that the same logits give the same words.

use super::rules::Rules;
use super::{Encoded, Whisper, WhisperState};
use crate::{Result, finite};
use qkv_nn::{Parameters, Tape, Tensor, Var};
use qkv_simd::logits::{Weights, log_sum_exp, maximum, top};
use qkv_simd::{Isa, philox};

/// How a window is decoded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Strategy {
    /// Beam search of this width; 1 is greedy.
    Beam(usize),
    /// The best of several samples at a temperature.
    Sample { best_of: usize, temperature: f64, seed: u64 },
}

/// A decoded text.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Decoded {
    /// Tokens of text and times, without the end token.
    pub tokens: Vec<u32>,
    /// The log-probability of all tokens and the end token.
    pub log_probability: f64,
}

impl Decoded {
    /// The mean log-probability of all tokens, end token included.
    pub fn average(&self) -> f64 {
        self.log_probability / (self.tokens.len() + 1) as f64
    }

    /// The score that hypotheses are ranked by.
    fn score(&self) -> f64 {
        self.log_probability / self.tokens.len().max(1) as f64
    }
}

/// A window and a prompt, ready to be decoded several times.
pub(super) struct Decoder<'a> {
    model: &'a Whisper,
    parameters: &'a Parameters<f32>,
    rules: &'a Rules,
    encoded: &'a Encoded<f32>,
    /// The state after the prompt, of one sequence.
    state: WhisperState<f32>,
    /// Logits of the first token.
    logits: Vec<f32>,
    /// The probability that the window has no speech.
    pub no_speech: f64,
    end: u32,
    /// The most tokens of text and times.
    longest: usize,
}

/// One row of hidden states as a tensor `[1, 1, C]`.
fn row(tape: &Tape<'_, f32>, hidden: &Var<f32>, at: usize) -> Var<f32> {
    let width = hidden.value().width();
    tape.constant(Tensor::new(hidden.value().data()[at * width..][..width].to_vec(), &[1, 1, width]))
}

/// The softmax probability of `logits[id]`.
fn probability(logits: &[f32], id: u32) -> f64 {
    let total = log_sum_exp(Isa::best(), logits);
    f64::from(logits[id as usize] - total).exp()
}

/// A token drawn at a temperature; `place` selects the random number.
fn sample(logits: &[f32], temperature: f64, seed: u64, place: [u32; 2]) -> Option<u32> {
    let weights = Weights { highest: maximum(logits), temperature };
    let [word, ..] = philox::block([place[0], place[1], 0, 0x7370_6565], seed);
    let mass = (f64::from(word) + 0.5) / 4_294_967_296.0 * weights.total(logits);
    weights.reached(logits, mass).map(|token| token as u32)
}

/// Language detection: probabilities at the start of a window, normalized over the tokens in `among`, highest first.
pub(super) fn detect(
    model: &Whisper,
    tape: &mut Tape<'_, f32>,
    encoded: &Encoded<f32>,
    start: u32,
    among: &[(String, u32)],
) -> Result<Vec<(String, f64)>> {
    let mut state = model.start(tape, 1)?;
    let hidden = model.step(tape, &[start], 1, &mut state, encoded)?;
    let logits = model.logits(tape, &hidden);
    let logits = logits.value().data();
    let chosen: Vec<f32> = among.iter().map(|&(_, id)| logits[id as usize]).collect();
    let mut found: Vec<(String, f64)> =
        among.iter().enumerate().map(|(at, (code, _))| (code.clone(), probability(&chosen, at as u32))).collect();
    found.sort_by(|a, b| b.1.total_cmp(&a.1));
    Ok(found)
}

impl<'a> Decoder<'a> {
    /// Reads a prompt, in which `start` is the token that starts a transcript.
    #[allow(clippy::too_many_arguments)]
    pub fn new(
        model: &'a Whisper,
        parameters: &'a Parameters<f32>,
        rules: &'a Rules,
        tape: &mut Tape<'_, f32>,
        encoded: &'a Encoded<f32>,
        prompt: &[u32],
        [start, no_speech, end]: [u32; 3],
    ) -> Result<Decoder<'a>> {
        let mut state = model.start(tape, 1)?;
        let hidden = model.step(tape, prompt, prompt.len(), &mut state, encoded)?;
        let first = prompt.iter().position(|&token| token == start).unwrap_or(0);
        let at_start = row(tape, &hidden, first);
        let at_start = model.logits(tape, &at_start);
        let no_speech = probability(at_start.value().data(), no_speech);
        let last = row(tape, &hidden, prompt.len() - 1);
        let logits = model.logits(tape, &last).value().data().to_vec();
        finite::check(&logits, parameters)?;
        let positions = model.config.text_positions;
        let longest = (positions / 2).min(positions - (prompt.len() - 1));
        Ok(Decoder { model, parameters, rules, encoded, state, logits, no_speech, end, longest })
    }

    /// Decodes once.
    pub fn decode(&self, tape: &mut Tape<'_, f32>, strategy: Strategy) -> Result<Decoded> {
        match strategy {
            Strategy::Beam(1) => self.follow(tape, 1, None),
            Strategy::Beam(width) => self.beam(tape, width),
            Strategy::Sample { best_of, temperature, seed } => {
                self.follow(tape, best_of.max(1), Some((temperature, seed)))
            }
        }
    }

    /// Logits of the next token of each sequence, after `last`: `[sequences, V]`.
    fn next(&self, tape: &mut Tape<'_, f32>, last: &[u32], state: &mut WhisperState<f32>) -> Result<Vec<f32>> {
        let hidden = self.model.step(tape, last, 1, state, self.encoded)?;
        let logits = self.model.logits(tape, &hidden).value().data().to_vec();
        finite::check(&logits, self.parameters)?;
        Ok(logits)
    }

    /// Decodes several sequences side by side, greedily or by sampling, and returns the best.
    fn follow(&self, tape: &mut Tape<'_, f32>, count: usize, sampling: Option<(f64, u64)>) -> Result<Decoded> {
        let vocabulary = self.logits.len();
        let mut state = self.state.clone();
        state.select(&vec![0; count]);
        let mut logits = self.logits.repeat(count);
        let mut found = vec![Decoded { tokens: Vec::new(), log_probability: 0.0 }; count];
        // The unfinished sequences, one for each row of the state.
        let mut open: Vec<usize> = (0..count).collect();
        for step in 0..self.longest {
            let (mut last, mut rows, mut still) = (Vec::new(), Vec::new(), Vec::new());
            for (place, (&at, logits)) in open.iter().zip(logits.chunks_exact_mut(vocabulary)).enumerate() {
                let sequence = &mut found[at];
                self.rules.apply(logits, &sequence.tokens);
                let total = f64::from(log_sum_exp(Isa::best(), logits));
                let token = match sampling {
                    None => top(Isa::best(), logits, 1).first().map(|&(token, _)| token),
                    Some((temperature, seed)) => sample(logits, temperature, seed, [at as u32, step as u32]),
                };
                let token = token.unwrap_or(self.end);
                sequence.log_probability += f64::from(logits[token as usize]) - total;
                if token != self.end {
                    sequence.tokens.push(token);
                    last.push(token);
                    rows.push(place);
                    still.push(at);
                }
            }
            open = still;
            if open.is_empty() || step + 1 == self.longest {
                break;
            }
            state.select(&rows);
            logits = self.next(tape, &last, &mut state)?;
        }
        let best = found.into_iter().reduce(|best, other| if other.score() > best.score() { other } else { best });
        Ok(best.expect("at least one sequence"))
    }

    /// Beam search with twice as many candidates as beams, so that a beam that ends is replaced, until as many have
    /// ended as there are beams.
    fn beam(&self, tape: &mut Tape<'_, f32>, width: usize) -> Result<Decoded> {
        let vocabulary = self.logits.len();
        let mut state = self.state.clone();
        let mut logits = self.logits.clone();
        let mut beams = vec![Decoded { tokens: Vec::new(), log_probability: 0.0 }];
        let mut ended: Vec<Decoded> = Vec::new();
        for step in 0..self.longest {
            // Beam, token and log-probability of the whole sequence, best first.
            let mut candidates: Vec<(usize, u32, f64)> = Vec::new();
            for (at, (beam, logits)) in beams.iter().zip(logits.chunks_exact_mut(vocabulary)).enumerate() {
                self.rules.apply(logits, &beam.tokens);
                let total = f64::from(log_sum_exp(Isa::best(), logits));
                let best = top(Isa::best(), logits, 2 * width).into_iter();
                candidates.extend(best.map(|(token, x)| (at, token, beam.log_probability + f64::from(x) - total)));
            }
            candidates.sort_by(|a, b| b.2.total_cmp(&a.2).then((a.0, a.1).cmp(&(b.0, b.1))));
            candidates.truncate(2 * width);
            let last_step = step + 1 == self.longest;
            let (mut next, mut rows, mut spare) = (Vec::new(), Vec::new(), width.min(candidates.len()));
            for place in 0..width.min(candidates.len()) {
                let (at, token, log_probability) = candidates[place];
                let mut chosen = Some(candidates[place]);
                if token == self.end || last_step {
                    let mut tokens = beams[at].tokens.clone();
                    if token != self.end {
                        tokens.push(token);
                    }
                    ended.push(Decoded { tokens, log_probability });
                    // The next candidate that does not end takes the place of the one that ended.
                    let more = (spare..candidates.len()).find(|&other| candidates[other].1 != self.end);
                    spare = more.map_or(candidates.len(), |other| other + 1);
                    chosen = more.map(|other| candidates[other]);
                }
                if let Some((at, token, log_probability)) = chosen {
                    let tokens = [&beams[at].tokens[..], &[token]].concat();
                    next.push(Decoded { tokens, log_probability });
                    rows.push(at);
                }
            }
            if last_step || ended.len() >= width || next.is_empty() {
                break;
            }
            state.select(&rows);
            beams = next;
            let last: Vec<u32> = beams.iter().filter_map(|beam| beam.tokens.last().copied()).collect();
            logits = self.next(tape, &last, &mut state)?;
        }
        let all = if ended.is_empty() { beams } else { ended };
        let best = all.into_iter().reduce(|best, other| match other.score() > best.score() {
            true => other,
            false => best,
        });
        Ok(best.expect("at least one beam"))
    }
}
