//! The time of every word: the cross-attention of the heads that follow the sound is smoothed, and the best monotone
//! path through text and time is found in it (dynamic time warping, Sakoe and Chiba 1978).

use super::vocabulary::{TIME_STEP, Vocabulary};
use super::{Encoded, Whisper};
use crate::Result;
use qkv_formats::audio::alignment::{median, normalize, path};
use qkv_formats::numbers;
use qkv_nn::{Parameters, Tape};
use qkv_simd::Isa;
use qkv_simd::logits::log_sum_exp;
use serde::Serialize;

/// A word with its time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Word {
    /// Its start in seconds.
    pub start: f64,
    /// Its end in seconds.
    pub end: f64,
    /// The word with the space before it and punctuation.
    pub word: String,
    /// The mean probability of its tokens.
    pub probability: f64,
}

/// A word with its time within a window, and its number of tokens.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct PlacedWord {
    pub text: String,
    pub tokens: usize,
    pub start: f64,
    pub end: f64,
    pub probability: f64,
}
/// Marks that belong to the word after them.
const OPENING: &str = "\"'“¿([{-";
/// Marks that belong to the word before them.
const CLOSING: &str = "\"'.。,，!！?？:：”)]}、";
/// Marks that end a sentence.
const SENTENCE_ENDS: &str = ".。!！?？";

/// The parts of a model that alignment needs.
pub(super) struct Aligner<'a> {
    pub model: &'a Whisper,
    pub parameters: &'a Parameters<f32>,
    pub vocabulary: &'a Vocabulary,
    /// The decoder's alignment heads: layer and head.
    pub heads: &'a [(usize, usize)],
}

impl Aligner<'_> {
    /// Finds the times of the words of `tokens`, which are text only, within a window of `frames` frames. `start` has
    /// the tokens that start a transcript, language and task included.
    pub fn words(
        &self,
        tape: &mut Tape<'_, f32>,
        encoded: &Encoded<f32>,
        start: &[u32],
        tokens: &[u32],
        language: &str,
        frames: usize,
    ) -> Result<Vec<PlacedWord>> {
        let positions = frames / 2;
        if tokens.is_empty() || positions == 0 {
            return Ok(Vec::new());
        }
        let input = [start, &[self.vocabulary.no_timestamps], tokens, &[self.vocabulary.end]].concat();
        let wanted: Vec<String> =
            self.heads.iter().map(|(layer, _)| format!("decoder.layers.{layer}.encoder_attn")).collect();
        tape.capture_where(move |label| wanted.iter().any(|wanted| wanted == label));
        let hidden = self.model.decode(tape, &input, input.len(), &encoded.output)?;
        let captured = tape.captured();
        let logits = self.model.logits(tape, &hidden);
        let rows = logits.value().data().chunks_exact(logits.value().width()).skip(start.len());
        let probabilities: Vec<f64> = rows
            .zip(tokens)
            .map(|(logits, &token)| {
                let text = &logits[..self.vocabulary.end as usize];
                f64::from(text[token as usize] - log_sum_exp(Isa::best(), text)).exp()
            })
            .collect();
        let mut mean = vec![0.0f32; input.len() * positions];
        for &(layer, head) in self.heads {
            let label = format!("decoder.layers.{layer}.encoder_attn");
            let Some(attention) = captured.iter().find(|attention| attention.label() == label) else { continue };
            let weights = attention.weights(self.parameters, 0, head, 0..input.len())?;
            let all = weights.shape()[1];
            let mut weights: Vec<f32> =
                weights.data().chunks_exact(all).flat_map(|row| row[..positions].to_vec()).collect();
            normalize(&mut weights, positions);
            numbers::add(&mut mean, &median(&weights, positions));
        }
        let rows = &mean[start.len() * positions..(input.len() - 1) * positions];
        let times = jumps(&path(rows, positions));
        let mut at = 0;
        let placed = self.vocabulary.words(tokens, language).into_iter().map(|(text, count)| {
            let (from, to) = (at, at + count);
            at = to;
            let time = |token: usize| times.get(token).map_or(positions as f64, |&x| x as f64) * TIME_STEP;
            let probability = probabilities[from..to].iter().sum::<f64>() / count as f64;
            PlacedWord { text, tokens: count, start: time(from), end: time(to), probability }
        });
        Ok(placed.collect())
    }
}

/// The column at which the path enters each row.
fn jumps(path: &[(usize, usize)]) -> Vec<usize> {
    let mut times = Vec::new();
    let mut last = None;
    for &(row, column) in path {
        if last != Some(row) {
            times.push(column);
            last = Some(row);
        }
    }
    times
}

/// Shortens marks at the ends of sentences, and words after them, that last too long, and joins punctuation to its
/// word. Returns the median duration of a word, at most 0.7 seconds.
pub(super) fn settle(words: &mut [PlacedWord]) -> f64 {
    let mut durations: Vec<f64> = words.iter().map(|word| word.end - word.start).filter(|&x| x != 0.0).collect();
    durations.sort_by(f64::total_cmp);
    let middle = durations.len() / 2;
    let median = match durations.len() {
        0 => 0.0,
        count if count % 2 == 1 => durations[middle],
        _ => (durations[middle - 1] + durations[middle]) / 2.0,
    };
    let median = median.min(0.7);
    if !durations.is_empty() {
        for at in 1..words.len() {
            if words[at].end - words[at].start > 2.0 * median {
                if SENTENCE_ENDS.contains(&words[at].text) {
                    words[at].end = words[at].start + 2.0 * median;
                } else if SENTENCE_ENDS.contains(&words[at - 1].text) {
                    words[at].start = words[at].end - 2.0 * median;
                }
            }
        }
    }
    merge_marks(words);
    median
}

/// Moves opening marks to the following word and closing marks to the preceding one, leaving empty words behind.
fn merge_marks(words: &mut [PlacedWord]) {
    let mut behind = words.len().saturating_sub(1);
    for at in (0..behind).rev() {
        let text = words[at].text.clone();
        if text.starts_with(' ') && OPENING.contains(text.trim()) {
            words[behind].text.insert_str(0, &text);
            words[behind].tokens += std::mem::take(&mut words[at].tokens);
            words[at].text.clear();
        } else {
            behind = at;
        }
    }
    let mut before = 0;
    for at in 1..words.len() {
        let text = words[at].text.clone();
        if !words[before].text.ends_with(' ') && CLOSING.contains(&text[..]) {
            words[before].text += &text;
            words[before].tokens += std::mem::take(&mut words[at].tokens);
            words[at].text.clear();
        } else {
            before = at;
        }
    }
}

/// Rounded to hundredths, as times are written.
pub(super) fn hundredths(seconds: f64) -> f64 {
    (seconds * 100.0).round() / 100.0
}

/// Fits the words of one segment to its times, and the segment to its words: after a pause, the first word is cut to
/// twice the median, and a first or last word that exceeds the segment by more than half a second is cut too.
pub(super) fn fit(words: &mut [Word], segment: &mut (f64, f64), median: f64, last_speech: f64) {
    let longest = 2.0 * median;
    let [first, ..] = words else { return };
    let long = first.end - first.start > longest;
    let after_pause = first.end - last_speech > 4.0 * median;
    let pair = words.get(1).is_some_and(|second| second.end - words[0].start > 2.0 * longest);
    if after_pause && (long || pair) {
        if let [first, second, ..] = &mut *words
            && second.end - second.start > longest
        {
            let boundary = (second.end / 2.0).max(second.end - longest);
            first.end = boundary;
            second.start = boundary;
        }
        words[0].start = (words[0].end - longest).max(0.0);
    }
    let (start, end) = *segment;
    let first = &mut words[0];
    if start < first.end && start - 0.5 > first.start {
        first.start = (first.end - median).min(start).max(0.0);
    } else {
        segment.0 = first.start;
    }
    let Some(last) = words.last_mut() else { return };
    if end > last.start && end + 0.5 < last.end {
        last.end = (last.start + median).max(end);
    } else {
        segment.1 = last.end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_begin_where_the_path_enters_their_rows() {
        assert_eq!(jumps(&[(0, 0), (0, 1), (1, 2), (2, 3), (2, 4)]), [0, 2, 3]);
    }

    #[test]
    fn marks_join_their_words() {
        let word = |text: &str| PlacedWord { text: text.into(), tokens: 1, start: 0.0, end: 0.0, probability: 1.0 };
        let mut words = [" He", " said", ",", " \"", "no", ".", "\""].map(word);
        merge_marks(&mut words);
        let texts: Vec<&str> = words.iter().map(|word| word.text.as_str()).collect();
        assert_eq!(texts, [" He", " said,", "", "", " \"no.\"", "", ""]);
        assert_eq!(words[4].tokens, 4);
    }
}
