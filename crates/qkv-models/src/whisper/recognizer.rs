//! Recordings to text in windows of 30 seconds. Each window is decoded with the preceding text as a prompt, and again
//! at higher temperatures if the result looks wrong; the next window begins where the last complete segment ends. The
//! rules and their order are those of the reference implementation and of faster-whisper.

use super::decoding::{Decoded, Decoder, Strategy, detect};
use super::rules::Rules;
use super::vocabulary::{TIME_STEP, Vocabulary};
use super::words::{Aligner, Word, fit, hundredths, settle};
use super::{Encoded, Whisper, WhisperConfig, checkpoint, hugging_face};
use crate::audio::log_mel::FRAME_RATE;
use crate::audio::{MelFilters, Recording, Spectrogram};
use crate::files::tensors::Storage;
use crate::{Error, Result};
use flate2::Compression;
use flate2::write::ZlibEncoder;
use qkv_nn::layers::Builder;
use qkv_nn::{Machine, Parameters, Pool, Tape, Tensor};
use serde::Serialize;
use std::io::Write;
use std::path::Path;

/// The text to write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Task {
    /// The speech, in its language.
    #[default]
    Transcribe,
    /// The speech, translated to English.
    Translate,
}

/// Settings of recognition. The defaults are those of the reference.
#[derive(Clone, Debug, PartialEq)]
pub struct TranscribeOptions {
    /// Code of the language; if there is none, it is detected in the first window.
    pub language: Option<String>,
    /// The text to write.
    pub task: Task,
    /// Width of the beam search at temperature 0; 1 is greedy.
    pub beam: usize,
    /// Samples at higher temperatures, of which the best is taken.
    pub best_of: usize,
    /// Temperatures, tried in order until a result looks right.
    pub temperatures: Vec<f64>,
    /// A text with a compression ratio above this repeats itself.
    pub compression_ratio: f64,
    /// A mean log-probability of the tokens below this looks wrong.
    pub log_probability: f64,
    /// If the probability of no speech is above this, an improbable text is taken for silence.
    pub no_speech: f64,
    /// Whether the preceding text is the prompt of a window.
    pub condition: bool,
    /// Whether to compute the times of words.
    pub words: bool,
    /// Seed of sampling.
    pub seed: u64,
}

impl Default for TranscribeOptions {
    fn default() -> Self {
        TranscribeOptions {
            language: None,
            task: Task::Transcribe,
            beam: 5,
            best_of: 5,
            temperatures: vec![0.0, 0.2, 0.4, 0.6, 0.8, 1.0],
            compression_ratio: 2.4,
            log_probability: -1.0,
            no_speech: 0.6,
            condition: true,
            words: false,
            seed: 1,
        }
    }
}

/// If the probability of no speech is above this, even a merely [doubtful](DOUBTFUL) text is silence. The reference
/// hears "you" in a minute of zeros, with a mean log-probability of −0.8 although no speech has a probability of 0.93.
const NEARLY_CERTAIN: f64 = 0.8;
/// A mean log-probability of tokens that speech seldom falls to.
const DOUBTFUL: f64 = -0.5;

impl TranscribeOptions {
    /// Whether a text with this mean log-probability is silence, in a window with this probability of no speech.
    pub(super) fn is_silence(&self, no_speech: f64, average: f64) -> bool {
        let improbable = no_speech > self.no_speech && average <= self.log_probability;
        let doubtful = no_speech > self.no_speech.max(NEARLY_CERTAIN) && average <= DOUBTFUL;
        improbable || doubtful
    }
}

/// Above this temperature, the text of a window is not used as a prompt for the next.
const PROMPT_RESET: f64 = 0.5;

/// A piece of the recording and its text.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Segment {
    /// Its start in seconds.
    pub start: f64,
    /// Its end in seconds.
    pub end: f64,
    /// Its text, to be appended to the text before it: usually with a leading space.
    pub text: String,
    /// Tokens, times included.
    pub tokens: Vec<u32>,
    /// The temperature it was decoded at.
    pub temperature: f64,
    /// The mean log-probability of the window's tokens.
    pub average_log_probability: f64,
    /// The compression ratio of the window's text.
    pub compression_ratio: f64,
    /// The probability that the window has no speech.
    pub no_speech_probability: f64,
    /// Its words with their times, if requested.
    pub words: Vec<Word>,
}

/// Facts known at the end of a transcription.
#[derive(Clone, Debug, PartialEq)]
pub struct Transcript {
    /// Code of the language.
    pub language: String,
    /// Its probability; 1 if it was given.
    pub language_probability: f64,
    /// Length of the recording in seconds.
    pub seconds: f64,
}

/// A model that transcribes speech.
#[derive(Debug)]
pub struct Recognizer {
    pub(super) model: Whisper,
    pub(super) parameters: Parameters<f32>,
    pub(super) vocabulary: Vocabulary,
    pub(super) filters: MelFilters,
    pub(super) alignment_heads: Vec<(usize, usize)>,
}

/// A window whose text has been chosen.
pub(super) struct Chosen {
    pub decoded: Decoded,
    temperature: f64,
    compression_ratio: f64,
    pub no_speech: f64,
}

/// A segment within a window: seconds and tokens.
struct Slice {
    times: (f64, f64),
    tokens: Vec<u32>,
    words: Vec<Word>,
}

impl Recognizer {
    /// Reads a folder of CTranslate2 (`model.bin`, `tokenizer.json`, `config.json`) or in the Hugging Face layout, or a
    /// ggml file.
    ///
    /// # Errors
    /// Names the file and what is wrong with it.
    pub fn open(path: impl AsRef<Path>) -> Result<Recognizer> {
        let mut read = checkpoint::read(path.as_ref())?;
        read.parameters.pack_for_inference();
        let filters = MelFilters::slaney(read.model.config.bands);
        Ok(Recognizer {
            model: read.model,
            parameters: read.parameters,
            vocabulary: read.vocabulary,
            filters,
            alignment_heads: read.alignment_heads,
        })
    }

    /// Whether a path is a model that [`open`](Recognizer::open) reads, judged by its first bytes, the names of its
    /// files and its configuration.
    pub fn is_at(path: impl AsRef<Path>) -> bool {
        checkpoint::is_whisper(path.as_ref())
    }

    /// An untrained model of these sizes, except for the vocabulary, whose text tokens are bytes.
    ///
    /// # Errors
    /// If the heads do not divide the width.
    pub fn untrained(config: &WhisperConfig, seed: u64) -> Result<Recognizer> {
        let (vocabulary, len) = Vocabulary::of_bytes(config.audio_positions);
        let config = &WhisperConfig { vocabulary: len, ..*config };
        let mut parameters = Parameters::new();
        let model = Whisper::new(&mut Builder::new(&mut parameters, seed), config)?;
        parameters.pack_for_inference();
        let filters = MelFilters::slaney(config.bands);
        let layer = config.decoder_layers.saturating_sub(1);
        let alignment_heads = (0..config.decoder_heads).map(|head| (layer, head)).collect();
        Ok(Recognizer { model, parameters, vocabulary, filters, alignment_heads })
    }

    /// Writes a folder in the Hugging Face layout: weights, settings and tokenizer.
    ///
    /// # Errors
    /// I/O errors.
    pub fn save(&self, folder: impl AsRef<Path>, storage: Storage) -> Result<()> {
        let folder = folder.as_ref();
        std::fs::create_dir_all(folder).map_err(|error| Error::file("write", folder, error))?;
        let Recognizer { model, parameters, vocabulary, alignment_heads, .. } = self;
        hugging_face::save(folder, storage, &model.config, parameters, vocabulary, alignment_heads)
    }

    /// Its sizes.
    pub fn config(&self) -> WhisperConfig {
        self.model.config
    }

    /// Its mel filters.
    pub fn filters(&self) -> &MelFilters {
        &self.filters
    }

    /// Codes of the languages that the model knows.
    pub fn languages(&self) -> Vec<&str> {
        match &self.vocabulary.languages[..] {
            [] => vec!["en"],
            some => some.iter().map(|(code, _)| code.as_str()).collect(),
        }
    }

    /// The encoder's output `[positions, C]` and the logits after each token of a prompt, `[tokens, V]`, for one window
    /// of a spectrogram, `[2 · positions, bands]`: for comparison with other implementations.
    ///
    /// # Errors
    /// If the window or a token does not fit.
    pub fn outputs(&self, window: &[f32], prompt: &[u32], machine: &Machine) -> Result<(Vec<f32>, Vec<f32>)> {
        let WhisperConfig { bands, text_positions, vocabulary, .. } = self.model.config;
        let known = prompt.iter().all(|&token| (token as usize) < vocabulary);
        if window.len() != self.model.window() * bands || !known || prompt.is_empty() || prompt.len() > text_positions {
            return Err(Error::invalid("the window or the prompt does not fit the model"));
        }
        let pool = Pool::new();
        let mut tape = Tape::inference(&self.parameters, &pool, machine);
        let encoded = self.encode(&mut tape, window.to_vec())?;
        let mut state = self.model.start(&mut tape, 1)?;
        let hidden = self.model.step(&mut tape, prompt, prompt.len(), &mut state, &encoded)?;
        let logits = self.model.logits(&mut tape, &hidden);
        Ok((encoded.output.value().data().to_vec(), logits.value().data().to_vec()))
    }

    /// Transcribes a recording. `on_segment` gets every segment as soon as it is complete, with the seconds done so far
    /// and the length of the recording; if it returns `false`, transcription ends.
    ///
    /// # Errors
    /// Any error in the recording, found before the first segment; a language that the model does not know; NaN
    /// computed by the model.
    pub fn transcribe(
        &self,
        recording: &Recording,
        options: &TranscribeOptions,
        machine: &Machine,
        on_segment: &mut dyn FnMut(&Segment, f64, f64) -> bool,
    ) -> Result<Transcript> {
        let known = self.known_language(options)?;
        let mut spectrogram = Spectrogram::new(recording, &self.filters)?;
        let (frames, seconds) = (spectrogram.frames(), spectrogram.seconds());
        let rules = Rules::new(&self.vocabulary, true);
        let pool = Pool::new();
        let mut language = known;
        let (mut seek, mut last_speech) = (0, 0.0);
        // The text so far, from which the prompt of the next window is taken.
        let mut previous: Vec<u32> = Vec::new();
        while seek < frames {
            let size = self.model.window().min(frames - seek);
            let window = spectrogram.window(seek, size, self.model.window())?;
            let mut tape = Tape::inference(&self.parameters, &pool, machine);
            let encoded = self.encode(&mut tape, window)?;
            let (code, ..) = match &language {
                Some(found) => found,
                None => language.insert(self.detect(&mut tape, &encoded)?),
            };
            let code = code.clone();
            let start = self.start(&code, options.task);
            let mut prompt = Vec::new();
            if !previous.is_empty() {
                let most = self.model.config.text_positions / 2 - 1;
                prompt.push(self.vocabulary.previous);
                prompt.extend_from_slice(&previous[previous.len().saturating_sub(most)..]);
            }
            prompt.extend_from_slice(&start);
            let chosen = self.choose(&mut tape, &rules, &encoded, &prompt, options, seek as u64)?;
            if options.is_silence(chosen.no_speech, chosen.decoded.average()) {
                seek += size;
                continue;
            }
            let (mut slices, next, ends_with_time) = self.split(&chosen.decoded.tokens, seek, size);
            let offset = seek as f64 / FRAME_RATE as f64;
            seek = next;
            if options.words {
                let aligner = Aligner {
                    model: &self.model,
                    parameters: &self.parameters,
                    vocabulary: &self.vocabulary,
                    heads: &self.alignment_heads,
                };
                let text = |slice: &Slice| -> Vec<u32> {
                    slice.tokens.iter().copied().filter(|&token| token < self.vocabulary.end).collect()
                };
                let tokens: Vec<u32> = slices.iter().flat_map(text).collect();
                let mut placed = aligner.words(&mut tape, &encoded, &start, &tokens, &code, size)?;
                let median = settle(&mut placed);
                let mut placed = placed.into_iter();
                for slice in &mut slices {
                    let (mut taken, all) = (0, text(slice).len());
                    while taken < all {
                        let Some(word) = placed.next() else { break };
                        taken += word.tokens;
                        if !word.text.is_empty() {
                            slice.words.push(Word {
                                start: hundredths(offset + word.start),
                                end: hundredths(offset + word.end),
                                word: word.text,
                                probability: word.probability,
                            });
                        }
                    }
                    fit(&mut slice.words, &mut slice.times, median, last_speech);
                    if let Some(last) = slice.words.last() {
                        last_speech = last.end;
                    }
                }
                let last = slices.iter().rev().find_map(|slice| slice.words.last());
                if let Some(last) = last.filter(|last| !ends_with_time && last.end > offset) {
                    seek = (last.end * FRAME_RATE as f64).round() as usize;
                }
            }
            // Without progress, the same window would be read forever.
            if seek as f64 / FRAME_RATE as f64 <= offset {
                seek = next.max((offset * FRAME_RATE as f64) as usize + size);
            }
            for Slice { times, tokens, words } in slices {
                let text = self.vocabulary.text(&tokens);
                if times.0 == times.1 || text.trim().is_empty() {
                    continue;
                }
                previous.extend_from_slice(&tokens);
                let segment = Segment {
                    start: times.0,
                    end: times.1,
                    text,
                    tokens,
                    temperature: chosen.temperature,
                    average_log_probability: chosen.decoded.average(),
                    compression_ratio: chosen.compression_ratio,
                    no_speech_probability: chosen.no_speech,
                    words,
                };
                if !on_segment(&segment, seek.min(frames) as f64 / FRAME_RATE as f64, seconds) {
                    return Ok(transcript(language, seconds));
                }
            }
            if !options.condition || chosen.temperature > PROMPT_RESET {
                previous.clear();
            }
        }
        Ok(transcript(language, seconds))
    }

    /// The language, if it need not be detected.
    pub(super) fn known_language(&self, options: &TranscribeOptions) -> Result<Option<(String, f64)>> {
        if options.task == Task::Translate && self.vocabulary.languages.is_empty() {
            let what = "the model knows English alone and translates nothing";
            return Err(Error::invalid(what).with_hint("leave out `--task translate`, or use a multilingual model"));
        }
        match options.language.as_deref() {
            Some(code) => self.language(code).map(Some),
            None if self.vocabulary.languages.is_empty() => self.language("en").map(Some),
            None => Ok(None),
        }
    }

    pub(super) fn encode(&self, tape: &mut Tape<'_, f32>, window: Vec<f32>) -> Result<Encoded<f32>> {
        let shape = [1, self.model.window(), self.model.config.bands];
        let window = tape.constant(Tensor::new(window, &shape));
        let output = self.model.encode(tape, &window)?;
        self.model.memorize(tape, output)
    }

    /// A language by its code.
    fn language(&self, code: &str) -> Result<(String, f64)> {
        if self.languages().contains(&code) {
            return Ok((code.to_owned(), 1.0));
        }
        let hint = format!("it knows {}", self.languages().join(", "));
        Err(Error::invalid(format!("the model does not know the language `{code}`")).with_hint(hint))
    }

    pub(super) fn detect(&self, tape: &mut Tape<'_, f32>, encoded: &Encoded<f32>) -> Result<(String, f64)> {
        let Vocabulary { start, languages, .. } = &self.vocabulary;
        let found = detect(&self.model, tape, encoded, *start, languages)?;
        Ok(found.into_iter().next().unwrap_or_else(|| ("en".into(), 1.0)))
    }

    /// The tokens that start a transcript.
    pub(super) fn start(&self, code: &str, task: Task) -> Vec<u32> {
        let language = self.vocabulary.languages.iter().find(|(known, _)| known == code);
        let task = match task {
            Task::Transcribe => self.vocabulary.transcribe,
            Task::Translate => self.vocabulary.translate,
        };
        let more = language.map(|&(_, id)| [id, task]);
        [self.vocabulary.start].into_iter().chain(more.into_iter().flatten()).collect()
    }

    /// Decodes a window at one temperature after the other until a result looks right. If none does, returns the most
    /// probable of those that do not repeat themselves, or of all.
    pub(super) fn choose(
        &self,
        tape: &mut Tape<'_, f32>,
        rules: &Rules,
        encoded: &Encoded<f32>,
        prompt: &[u32],
        options: &TranscribeOptions,
        place: u64,
    ) -> Result<Chosen> {
        let Vocabulary { start, no_speech, end, .. } = self.vocabulary;
        let tokens = [start, no_speech, end];
        let decoder = Decoder::new(&self.model, &self.parameters, rules, tape, encoded, prompt, tokens)?;
        let mut all: Vec<Chosen> = Vec::new();
        for (at, &temperature) in options.temperatures.iter().enumerate() {
            let seed = options.seed ^ (place << 8 | at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let strategy = match temperature > 0.0 {
                true => Strategy::Sample { best_of: options.best_of, temperature, seed },
                false => Strategy::Beam(options.beam),
            };
            let decoded = decoder.decode(tape, strategy)?;
            let compression_ratio = compression_ratio(self.vocabulary.text(&decoded.tokens).trim());
            let repeats = compression_ratio > options.compression_ratio;
            let improbable = decoded.average() < options.log_probability;
            let silent = options.is_silence(decoder.no_speech, decoded.average());
            all.push(Chosen { decoded, temperature, compression_ratio, no_speech: decoder.no_speech });
            if silent || !repeats && !improbable {
                return Ok(all.pop().expect("just pushed"));
            }
        }
        let last = options.temperatures.last().copied().unwrap_or(0.0);
        let fine = |one: &Chosen| one.compression_ratio <= options.compression_ratio;
        let some = all.iter().any(fine);
        let kept = all.into_iter().filter(|one| fine(one) || !some);
        let best = kept.reduce(|best, one| if one.decoded.average() > best.decoded.average() { one } else { best });
        let best = best.ok_or_else(|| Error::invalid("there is no temperature to decode at"))?;
        Ok(Chosen { temperature: last, ..best })
    }

    /// Splits the tokens of a window at pairs of times. Returns the segments, the frame where the next window begins,
    /// and whether the tokens end with a single time, after which nothing is said.
    fn split(&self, tokens: &[u32], seek: usize, size: usize) -> (Vec<Slice>, usize, bool) {
        let first = self.vocabulary.times();
        let is_time = |token: u32| token >= first;
        let time = |token: u32| f64::from(token.saturating_sub(first)) * TIME_STEP;
        let offset = seek as f64 / FRAME_RATE as f64;
        let ends_with_time = matches!(tokens, [.., before, last] if !is_time(*before) && is_time(*last));
        let pairs = |at: &usize| is_time(tokens[*at]) && is_time(tokens[at - 1]);
        let mut ends: Vec<usize> = (1..tokens.len()).filter(pairs).collect();
        if ends.is_empty() {
            let last = tokens.iter().rev().find(|&&token| is_time(token)).filter(|&&token| token != first);
            let duration = last.map_or(size as f64 / FRAME_RATE as f64, |&token| time(token));
            let times = (offset, offset + duration);
            return (vec![Slice { times, tokens: tokens.to_vec(), words: Vec::new() }], seek + size, ends_with_time);
        }
        if ends_with_time {
            ends.push(tokens.len());
        }
        let (mut from, mut slices) = (0, Vec::new());
        for &end in &ends {
            let tokens = tokens[from..end].to_vec();
            let times = (offset + time(tokens[0]), offset + time(tokens[tokens.len() - 1]));
            slices.push(Slice { times, tokens, words: Vec::new() });
            from = end;
        }
        let next = match ends_with_time {
            true => seek + size,
            // What follows is incomplete: it is decoded again from its start.
            false => seek + (tokens[from - 1] - first) as usize * 2,
        };
        (slices, next, ends_with_time)
    }
}

fn transcript(language: Option<(String, f64)>, seconds: f64) -> Transcript {
    let (language, language_probability) = language.unwrap_or_else(|| ("en".into(), 0.0));
    Transcript { language, language_probability, seconds }
}

/// The size of a text divided by its compressed size: large if it repeats itself.
fn compression_ratio(text: &str) -> f64 {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::new(6));
    let written = encoder.write_all(text.as_bytes()).and_then(|()| encoder.finish());
    text.len() as f64 / written.map_or(1, |bytes| bytes.len()).max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_improbable_text_is_silence_and_a_doubtful_one_where_no_speech_is_nearly_certain() {
        let options = TranscribeOptions::default();
        for (no_speech, average, silence) in
            [(0.7, -1.1, true), (0.5, -1.1, false), (0.7, -0.8, false), (0.93, -0.8, true), (0.93, -0.3, false)]
        {
            assert_eq!(options.is_silence(no_speech, average), silence, "{no_speech} and {average}");
        }
        let never = TranscribeOptions { no_speech: 1.0, ..options };
        assert!(!never.is_silence(0.99, -2.0));
    }
}
