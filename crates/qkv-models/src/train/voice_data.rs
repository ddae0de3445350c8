//! The data of voices: spectrograms of recordings with their texts, from lists of `recording ⇥ text` or synthesized.

use crate::audio::vocoder::{HOP, spoken_range, trimmed};
use crate::audio::{Recording, SAMPLE_RATE, Vocoder};
use crate::files::packed;
use crate::recipe::Data;
use crate::text::batches::{Batching, Lengths};
use crate::text::tokenizer::Tokenizer;
use crate::voice::{SpokenText, spelled};
use crate::{Error, Recipe, Result, Speaker, VoiceConfig, tasks};
use rayon::prelude::*;
use std::path::Path;

/// The longest recording, in seconds.
const LONGEST: usize = 60;
/// Separates synthetic sounds from other uses of the seed.
const SOUNDS: u64 = 0x736f_756e;

/// Recordings and their texts.
pub(super) struct VoiceData {
    train: Vec<SpokenText>,
    pub dev: Vec<SpokenText>,
    lengths: Vec<Lengths>,
    batching: Batching,
    frames: usize,
}

/// A text, the spectrogram of its recording, and the position in the text of each frame, as a fraction, if it is known.
type Said = (String, Vec<f32>, Vec<f32>);

impl VoiceData {
    /// Whether a recipe's data is of this kind.
    pub fn is_named(data: &Data) -> bool {
        matches!(data, Data::Spoken { .. } | Data::Tones { .. })
    }

    /// Reads or synthesizes a recipe's recordings; `tokenizer` returns the tokenizer, which it may train on the texts.
    pub fn read(
        recipe: &Recipe,
        config: &VoiceConfig,
        tokenizer: impl FnOnce(Vec<&str>) -> Result<Tokenizer>,
    ) -> Result<(VoiceData, Tokenizer)> {
        config.check()?;
        let vocoder = Vocoder::new(config.bands);
        let (train, dev) = match &recipe.data {
            Data::Spoken { spoken, dev } => (listed(spoken, &vocoder)?, listed(dev, &vocoder)?),
            Data::Tones { tones, dev_tones } => {
                let (train, dev) = tasks::tones(recipe.seed ^ SOUNDS, *tones, *dev_tones);
                let said = |sung: &tasks::SungText| -> Said {
                    (sung.text.clone(), vocoder.spectrogram(&trimmed(&sung.samples)), Vec::new())
                };
                (train.iter().map(said).collect(), dev.iter().map(said).collect())
            }
            _ => return Err(Error::invalid("the recipe names no recordings")),
        };
        let untimed = |said: &[Said]| said.iter().any(|(_, _, places)| places.is_empty());
        if config.durations && (untimed(&train) || untimed(&dev)) {
            return Err(Error::invalid("`durations` are learned from letter times, which the data has not")
                .with_hint("a third column of the lists says when each letter begins: recipes/letter_times.py"));
        }
        let tokenizer = tokenizer(train.iter().map(|(text, ..)| text.as_str()).collect())?;
        let eos = tokenizer.eos();
        let spoken = |said: Vec<Said>| -> Vec<SpokenText> {
            let one = |(text, frames, mut places): Said| {
                let mut letters = tokenizer.encode(&text);
                // The end token counts as one more letter.
                let share = letters.len() as f32 / (letters.len() + 1) as f32;
                places.iter_mut().for_each(|place| *place *= share);
                letters.push(eos);
                SpokenText { letters, count: frames.len() / config.bands, frames, places }
            };
            said.into_iter().map(one).collect()
        };
        let (train, dev): (Vec<SpokenText>, Vec<SpokenText>) = (spoken(train), spoken(dev));
        let frames = train.iter().map(|one| one.count).sum();
        let batching = Batching { tokens: recipe.train.tokens, longest: recipe.train.longest };
        Ok((VoiceData { train, dev, lengths: Vec::new(), batching, frames }, tokenizer))
    }

    /// Counts letters and steps for a voice, and removes from the dev set what is too long for it.
    pub fn measure(&mut self, voice: &Speaker) -> Result<()> {
        let VoiceConfig { max_letters, max_steps, .. } = voice.config;
        let lengths = |one: &SpokenText| {
            let (source, target) = (one.letters.len(), voice.steps(one.count));
            // The length of what is too long for the model excludes it from training.
            let fits = source <= max_letters + 1 && target <= max_steps;
            if fits { Lengths { source, target } } else { Lengths { source: usize::MAX, target: usize::MAX } }
        };
        self.lengths = self.train.iter().map(lengths).collect();
        self.dev.retain(|one| lengths(one).source < usize::MAX);
        if self.dev.is_empty() {
            return Err(Error::invalid("every recording of the dev set is too long for the voice")
                .with_hint("raise `model.max_steps` or `model.max_letters`"));
        }
        Ok(())
    }

    /// The batches of an epoch: a function of seed and epoch.
    pub fn epoch(&self, seed: u64, epoch: u64) -> Result<Vec<Vec<usize>>> {
        Ok(self.batching.epoch(&self.lengths, seed, epoch)?.batches)
    }

    /// Builds a batch.
    pub fn batch(&self, entries: &[usize]) -> Vec<SpokenText> {
        entries.iter().map(|&at| self.train[at].clone()).collect()
    }

    /// Sizes of the data, in words.
    pub fn summary(&self, vocabulary: usize) -> String {
        let longest = self.batching.longest;
        let long = self.lengths.iter().filter(|lengths| lengths.source.max(lengths.target) > longest).count();
        let left_out = if long > 0 { format!(" ({long} too long are left out)") } else { String::new() };
        let minutes = self.frames as f64 / crate::audio::vocoder::FRAME_RATE as f64 / 60.0;
        let (train, dev) = (self.train.len(), self.dev.len());
        format!("{train} recordings{left_out} of {minutes:.1} minutes, {dev} to measure on, {vocabulary} letters")
    }
}

/// The recordings of a list and their texts, read in parallel. Paths are relative to the list's folder.
fn listed(path: &Path, vocoder: &Vocoder) -> Result<Vec<Said>> {
    let text = packed::text(path)?;
    let lines: Vec<(usize, &str)> = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).collect();
    let read = |&(at, line): &(usize, &str)| recorded(path, at + 1, line, vocoder);
    // If several lines fail, the first one's error is reported.
    let found: Vec<Result<Said>> = lines.par_iter().map(read).collect();
    let found = found.into_iter().collect::<Result<Vec<Said>>>()?;
    if found.is_empty() {
        return Err(Error::line(path, 1, "the list is empty"));
    }
    Ok(found)
}

/// The position of each frame in the text, as a fraction, interpolated between the times at which letters begin.
/// `start` is the sample of the first frame.
fn places(begins: &[f64], end: f64, start: usize, frames: usize) -> Vec<f32> {
    let letter = |frame: usize| {
        let time = (start + frame * HOP) as f64 / SAMPLE_RATE as f64;
        let at = begins.partition_point(|&begin| begin <= time);
        let Some(at) = at.checked_sub(1) else { return 0.0 };
        let next = begins.get(at + 1).copied().unwrap_or(end);
        let within = if next > begins[at] { (time - begins[at]) / (next - begins[at]) } else { 0.5 };
        (((at as f64) + within.min(1.0)) / begins.len() as f64) as f32
    };
    (0..frames).map(letter).collect()
}

/// The third column of a list: the seconds at which each letter begins.
fn begins(column: &str, letters: usize) -> std::result::Result<Vec<f64>, String> {
    let found: Vec<f64> = column
        .split_whitespace()
        .map(|time| time.parse().ok().filter(|time: &f64| time.is_finite()))
        .collect::<Option<_>>()
        .ok_or_else(|| format!("`{column}` is not a list of seconds"))?;
    if found.len() != letters {
        return Err(format!("{} times for {letters} letters", found.len()));
    }
    if !found.is_sorted() {
        return Err("the times of the letters go back".into());
    }
    Ok(found)
}

/// The text of a list's line, the spectrogram of its recording and the positions of its frames in the text.
fn recorded(path: &Path, number: usize, line: &str, vocoder: &Vocoder) -> Result<Said> {
    let wrong = |what: String| Error::line(path, number, what);
    let Some((name, said)) = line.split_once('\t') else {
        return Err(wrong("the line has 1 column, expected 2".into())
            .with_hint("each line is a recording, a tab, and what is said in it"));
    };
    let (said, times) = said.split_once('\t').map_or((said, None), |(said, times)| (said, Some(times)));
    let said = spelled(said);
    if said.is_empty() {
        return Err(wrong(format!("nothing is said in `{}`", name.trim())));
    }
    let folder = path.parent().unwrap_or(Path::new(""));
    let recording = Recording::open(folder.join(name.trim())).map_err(|e| wrong(e.to_string()))?;
    let mut samples = Vec::new();
    for piece in recording.samples().map_err(|e| wrong(e.to_string()))? {
        samples.extend(piece.map_err(|e| wrong(e.to_string()))?);
        if samples.len() > LONGEST * SAMPLE_RATE {
            return Err(wrong(format!("`{}` is longer than {LONGEST} seconds", name.trim()))
                .with_hint("cut recordings into sentences"));
        }
    }
    let (range, seconds) = (spoken_range(&samples), samples.len() as f64 / SAMPLE_RATE as f64);
    let samples = trimmed(&samples);
    if samples.is_empty() {
        return Err(wrong(format!("`{}` is silent", name.trim())));
    }
    let frames = vocoder.spectrogram(&samples);
    let places = match times {
        Some(times) => {
            let begins = begins(times, said.chars().count()).map_err(wrong)?;
            places(&begins, seconds, range.start, frames.len() / vocoder.bands())
        }
        None => Vec::new(),
    };
    Ok((said, frames, places))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::audio::wav;

    #[test]
    fn recordings_are_read_and_lines_that_are_wrong_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let tone: Vec<f32> = (0..8000).map(|at| 0.3 * (at as f32 * 0.3).sin()).collect();
        std::fs::write(folder.path().join("a.wav"), wav::to_bytes(&tone, 16_000)).unwrap();
        std::fs::write(folder.path().join("quiet.wav"), wav::to_bytes(&[0.0; 900], 16_000)).unwrap();
        std::fs::write(folder.path().join("text.wav"), "no sound").unwrap();
        let (path, vocoder) = (folder.path().join("list.tsv"), Vocoder::new(80));
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            listed(&path, &vocoder)
        };
        let found = read("a.wav\tHello  World\n\n").unwrap();
        assert_eq!((found.len(), found[0].0.as_str(), found[0].1.len()), (1, "hello world", 41 * 80));
        let said = |text: &str| read(text).unwrap_err().to_string();
        assert!(said("a.wav\tx\na.wav\n").contains(":2: the line has 1 column"));
        assert!(said("a.wav\t \n").contains(":1: nothing is said in `a.wav`"));
        assert!(said("b.wav\tx\n").contains(":1: cannot open"));
        assert!(said("text.wav\tx\n").contains("neither WAV, FLAC, MP3 nor Ogg"));
        assert!(said("quiet.wav\tx\n").contains("`quiet.wav` is silent"));
        assert!(said("\n").contains("the list is empty"));
        assert!(said("a.wav\tab\t0.1 x\n").contains(":1: `0.1 x` is not a list of seconds"));
        assert!(said("a.wav\tab\t0.1\n").contains(":1: 1 times for 2 letters"));
        assert!(said("a.wav\tab\t0.2 0.1\n").contains(":1: the times of the letters go back"));
    }

    #[test]
    fn frames_lie_at_the_letters_of_their_times() {
        let folder = tempfile::tempdir().unwrap();
        let mut sound = vec![0.0; 16_000];
        sound.extend((0..8000).map(|at| 0.3 * (at as f32 * 0.3).sin()));
        std::fs::write(folder.path().join("a.wav"), wav::to_bytes(&sound, 16_000)).unwrap();
        let (path, vocoder) = (folder.path().join("list.tsv"), Vocoder::new(80));
        // The first letter sounds for 0.1 s of the half second after the silence, the second for the rest.
        std::fs::write(&path, "a.wav\tAb\t1.0 1.1\n").unwrap();
        let (_, frames, places) = &listed(&path, &vocoder).unwrap()[0];
        assert_eq!(places.len(), frames.len() / 80);
        let begin = places.iter().position(|&place| place > 0.0).unwrap();
        assert!((3..=5).contains(&begin), "the margin before the sound has 50 ms: {begin}");
        let half = places.iter().position(|&place| place >= 0.5).unwrap();
        assert!((7..=8).contains(&(half - begin)), "{begin} and {half}");
        assert!(places.is_sorted() && *places.last().unwrap() <= 1.0 && *places.last().unwrap() > 0.9);
    }
}
