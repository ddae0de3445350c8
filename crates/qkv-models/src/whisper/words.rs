//! The time of every word: the cross-attention of the heads that follow the sound is smoothed, and the best monotone
//! path through text and time is found in it (dynamic time warping, Sakoe and Chiba 1978).

use super::vocabulary::{TIME_STEP, Vocabulary};
use super::{Encoded, Whisper};
use crate::Result;
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

/// Width of the median filter, in positions.
const MEDIAN: usize = 7;
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
            mean.iter_mut().zip(median(&weights, positions)).for_each(|(mean, x)| *mean += x);
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

/// Makes rows sum to 1 over the window's positions, then gives each column mean 0 and standard deviation 1.
fn normalize(weights: &mut [f32], width: usize) {
    for row in weights.chunks_exact_mut(width) {
        let total: f32 = row.iter().sum();
        row.iter_mut().for_each(|x| *x /= total.max(f32::MIN_POSITIVE));
    }
    let count = (weights.len() / width) as f32;
    for column in 0..width {
        let values = || weights[column..].iter().step_by(width);
        let mean = values().sum::<f32>() / count;
        let deviation = (values().map(|x| (x - mean) * (x - mean)).sum::<f32>() / count).sqrt();
        weights[column..].iter_mut().step_by(width).for_each(|x| *x = (*x - mean) / deviation.max(f32::MIN_POSITIVE));
    }
}

/// The median of each position and its neighbors, mirrored at the ends.
fn median(weights: &[f32], width: usize) -> Vec<f32> {
    let half = MEDIAN / 2;
    if width <= half {
        return weights.to_vec();
    }
    let place = |at: isize| match at {
        at if at < 0 => (-at) as usize,
        at if at as usize >= width => 2 * (width - 1) - at as usize,
        at => at as usize,
    };
    let filtered = weights.chunks_exact(width).flat_map(|row| {
        (0..width as isize).map(move |at| {
            let mut near = [0.0; MEDIAN];
            near.iter_mut().enumerate().for_each(|(x, to)| *to = row[place(at + x as isize - half as isize)]);
            near.sort_unstable_by(f32::total_cmp);
            near[half]
        })
    });
    filtered.collect()
}

/// The path with the largest sum from the first row and column to the last, in steps down, right or both.
fn path(weights: &[f32], width: usize) -> Vec<(usize, usize)> {
    let rows = weights.len() / width;
    let (stride, far) = (width + 1, f32::INFINITY);
    let mut cost = vec![far; (rows + 1) * stride];
    let mut trace = vec![0u8; (rows + 1) * stride];
    cost[0] = 0.0;
    for i in 1..=rows {
        for j in 1..=width {
            let [both, down, right] = [(i - 1, j - 1), (i - 1, j), (i, j - 1)].map(|(i, j)| cost[i * stride + j]);
            let (least, step) = match (both, down, right) {
                _ if both < down && both < right => (both, 0),
                _ if down < both && down < right => (down, 1),
                _ => (right, 2),
            };
            cost[i * stride + j] = least - weights[(i - 1) * width + j - 1];
            trace[i * stride + j] = step;
        }
    }
    let (mut i, mut j, mut found) = (rows, width, Vec::new());
    while i > 0 || j > 0 {
        found.push((i.saturating_sub(1), j.saturating_sub(1)));
        match trace[i * stride + j] {
            _ if i == 0 => j -= 1,
            _ if j == 0 => i -= 1,
            0 => (i, j) = (i - 1, j - 1),
            1 => i -= 1,
            _ => j -= 1,
        }
    }
    found.reverse();
    found
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
    fn the_path_follows_the_largest_weights() {
        // Row 0 in columns 0–1, row 1 in column 2, row 2 in columns 3–4.
        let weights = [3.0, 3.0, -1.0, -1.0, -1.0, -1.0, -1.0, 3.0, -1.0, -1.0, -1.0, -1.0, -1.0, 3.0, 3.0];
        let found = path(&weights, 5);
        assert_eq!(found, [(0, 0), (0, 1), (1, 2), (2, 3), (2, 4)]);
        assert_eq!(jumps(&found), [0, 2, 3]);
    }

    #[test]
    fn a_path_is_at_least_as_good_as_any_other() {
        // All monotone paths through a small matrix, by recursion.
        fn best(weights: &[f32], width: usize, i: usize, j: usize) -> f32 {
            let rows = weights.len() / width;
            if (i, j) == (rows - 1, width - 1) {
                return weights[i * width + j];
            }
            let next = [(i + 1, j + 1), (i + 1, j), (i, j + 1)];
            let more = next.iter().filter(|&&(i, j)| i < rows && j < width).map(|&(i, j)| best(weights, width, i, j));
            weights[i * width + j] + more.fold(f32::NEG_INFINITY, f32::max)
        }
        for seed in 0..20u32 {
            let weights: Vec<f32> = (0..20).map(|x| ((x * 37 + seed * 101) as f32).sin()).collect();
            let found = path(&weights, 5);
            let sum: f32 = found.iter().map(|&(i, j)| weights[i * 5 + j]).sum();
            assert!((sum - best(&weights, 5, 0, 0)).abs() < 1e-4, "{seed}");
            assert_eq!((found[0], found[found.len() - 1]), ((0, 0), (3, 4)));
        }
    }

    #[test]
    fn medians_remove_single_peaks_and_columns_are_normalized() {
        let mut row = vec![0.0; 12];
        row[5] = 9.0;
        assert_eq!(median(&row, 12), vec![0.0; 12]);
        let mut weights = vec![0.2, 0.8, 0.6, 0.4];
        normalize(&mut weights, 2);
        weights.iter().zip([-1.0, 1.0, 1.0, -1.0]).for_each(|(x, y)| assert!((x - y).abs() < 1e-4, "{x} {y}"));
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
