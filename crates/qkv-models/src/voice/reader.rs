//! A voice with its parameters and tokenizer: its folder, and its loss on recordings with known texts.

use super::durations::{frames_of_letters, places_of_steps};
use super::{VoiceConfig, VoiceNetwork, last_frames};
use crate::batch::{IGNORE, Rows, SpecialTokens};
use crate::files::tensors::Storage;
use crate::layout::{Inspected, Layout};
use crate::own_folder::{self, OwnFolder};
use crate::provenance::Provenance;
use crate::start::Start;
use crate::text::tokenizer::Tokenizer;
use crate::{Architecture, Error, ModelConfig, Result};
use qkv_nn::layers::Builder;
use qkv_nn::{Expected, Parameters, PendingLoss, Tape, Target, Tensor, Var};
use std::path::Path;

/// A model that speaks.
#[derive(Debug)]
pub struct Speaker {
    /// Its configuration.
    pub config: VoiceConfig,
    /// Its parameters.
    pub parameters: Parameters<f32>,
    /// Its tokenizer, of letters.
    pub tokenizer: Tokenizer,
    pub(super) network: VoiceNetwork,
    vocab_size: usize,
}

/// A recording and its text.
#[derive(Clone, Debug)]
pub(crate) struct SpokenText {
    /// The letters and the end token.
    pub letters: Vec<u32>,
    /// Its spectrogram, `[count, bands]`.
    pub frames: Vec<f32>,
    /// Number of frames.
    pub count: usize,
    /// The place of each frame as a fraction of the text; empty if unknown.
    pub places: Vec<f32>,
}

/// The results of a pass over recordings.
pub(super) struct Heard {
    /// Hidden states of the decoder, `[B, N, C]`.
    pub hidden: Var<f32>,
    /// Encoded letters, `[B, M, C]`.
    pub memory: Var<f32>,
    /// The number of letters of each text, if they differ.
    pub letters: Option<Vec<usize>>,
    /// Steps of each recording.
    pub steps: Vec<usize>,
}

/// The folder of a voice.
fn found(folder: &Path) -> Result<OwnFolder<VoiceConfig, VoiceNetwork>> {
    let config = |found| if let Architecture::Speaker(config) = found { Some(config) } else { None };
    OwnFolder::open(folder, "voice", config, VoiceNetwork::new)
}

/// Description, number of parameters, mismatches and weights of a folder.
pub(crate) fn inspect(folder: &Path) -> Result<Inspected> {
    let found = found(folder)?;
    let VoiceConfig { bands, reduction, encoder_layers, decoder_layers, d_model, .. } = found.config;
    let layers = format!("{encoder_layers} + {decoder_layers} layers, width {d_model}");
    let letters = found.vocab_size;
    let words = format!("voice: {letters} letters to {bands} mel bands, {reduction} frames a step; {layers}");
    Ok(found.inspected(words))
}

impl Speaker {
    /// Reads a folder.
    ///
    /// # Errors
    /// Names the file and the wrong field or tensor.
    pub fn open(folder: impl AsRef<Path>) -> Result<Speaker> {
        let found = found(folder.as_ref())?;
        let (tokenizer, vocab_size) = (found.tokenizer()?, found.vocab_size);
        let (config, network, parameters) = found.fill()?;
        Ok(Speaker { config, parameters, tokenizer, network, vocab_size })
    }

    /// A new model with parameters initialized from the seed.
    ///
    /// ```
    /// use qkv_models::text::tokenizer::{Kind, Tokenizer};
    /// use qkv_models::{SpeakOptions, Speaker, VoiceConfig};
    /// let tokenizer = Tokenizer::train(["one two"], Kind::Characters)?;
    /// let config = VoiceConfig { d_model: 16, ffn_dim: 16, max_steps: 8, ..Default::default() };
    /// let voice = Speaker::new(&config, tokenizer, 1)?;
    /// let speech = voice.speak("two", &SpeakOptions::default(), &qkv_nn::Machine::new(1))?;
    /// assert_eq!(speech.letters, ["t", "w", "o", "</s>"]);
    /// assert!(!speech.samples.is_empty());
    /// # Ok::<(), qkv_models::Error>(())
    /// ```
    ///
    /// # Errors
    /// If sizes are inconsistent.
    pub fn new(config: &VoiceConfig, tokenizer: Tokenizer, seed: u64) -> Result<Speaker> {
        let (mut parameters, vocab_size) = (Parameters::new(), tokenizer.len());
        let network = VoiceNetwork::new(&mut Builder::new(&mut parameters, seed), config, vocab_size)?;
        Ok(Speaker { config: config.clone(), parameters, tokenizer, network, vocab_size })
    }

    /// A voice with the weights of a trained one and the same letters.
    pub(crate) fn from_start(
        config: &VoiceConfig,
        tokenizer: Tokenizer,
        start: &Start,
        seed: u64,
    ) -> Result<(Speaker, Provenance)> {
        let mut voice = Speaker::new(config, tokenizer, seed)?;
        let layout = Layout::own(&voice.parameters);
        let found = layout.fill_from(&mut voice.parameters, &start.weights, |_| false, seed)?;
        Ok((voice, found))
    }

    /// Writes its folder.
    ///
    /// # Errors
    /// I/O errors.
    pub fn save(&self, folder: impl AsRef<Path>, storage: Storage) -> Result<()> {
        let specials = SpecialTokens::of(&self.tokenizer);
        let config = ModelConfig::new(Architecture::Speaker(self.config.clone()), self.vocab_size, specials);
        own_folder::write(folder.as_ref(), &config, &self.parameters, Some(&self.tokenizer), storage)
    }

    /// The letters of a text, in lower case, and the end token.
    ///
    /// # Errors
    /// If the text is empty or too long, or has a letter that the voice has not learned.
    pub(crate) fn letters(&self, text: &str) -> Result<Vec<u32>> {
        let text = spelled(text);
        if text.is_empty() {
            return Err(Error::invalid("there is nothing to say").with_hint("give a text"));
        }
        let mut letters = self.tokenizer.encode(&text);
        let unknown = |c: &char| {
            let ids = self.tokenizer.encode(&c.to_string());
            ids.is_empty() || ids.iter().any(|&id| Some(id) == self.tokenizer.unk())
        };
        if let Some(letter) = text.chars().find(unknown) {
            return Err(Error::invalid(format!("the voice has not learned the letter `{letter}`"))
                .with_hint("write it as it is spoken, with the letters of the voice's training texts"));
        }
        if letters.len() > self.config.max_letters {
            let what = format!("the text has {} letters, the voice says {}", letters.len(), self.config.max_letters);
            return Err(Error::invalid(what).with_hint("cut it into sentences"));
        }
        letters.push(self.tokenizer.eos());
        Ok(letters)
    }

    /// The number of steps that write `frames` frames.
    pub(crate) fn steps(&self, frames: usize) -> usize {
        frames.div_ceil(self.config.reduction)
    }

    /// What the decoder hears of recordings before each of their steps, `[B, N, C]`.
    pub(super) fn hear_recording(&self, tape: &mut Tape<'_, f32>, spoken: &[&SpokenText]) -> Var<f32> {
        let VoiceConfig { bands, reduction, .. } = self.config;
        let most = spoken.iter().map(|one| self.steps(one.count)).max().unwrap_or(1).max(1);
        let frames: Vec<&[f32]> = spoken.iter().map(|one| &one.frames[..]).collect();
        let last = tape.constant(last_frames(&frames, bands, reduction, most));
        self.network.hear(tape, &last)
    }

    /// A parallel pass over recordings.
    pub(super) fn hear(&self, tape: &mut Tape<'_, f32>, spoken: &[&SpokenText]) -> Result<Heard> {
        let rows: Vec<Vec<u32>> = spoken.iter().map(|one| one.letters.clone()).collect();
        let rows = Rows::new(&rows, self.tokenizer.pad());
        let steps: Vec<usize> = spoken.iter().map(|one| self.steps(one.count)).collect();
        let memory = self.network.encode(tape, &rows)?;
        let heard = self.hear_recording(tape, spoken);
        let most = heard.shape()[1];
        let ragged = steps.iter().any(|&steps| steps != most).then_some(&steps[..]);
        let places = self.places(spoken, most);
        let hidden = self.network.decode(tape, &heard, &places, ragged, &memory, rows.ragged())?;
        let letters = rows.ragged().map(<[usize]>::to_vec);
        Ok(Heard { hidden, memory, letters, steps })
    }

    /// The place in its text of each of `most` steps of every recording, in letters; empty if the voice learns no
    /// durations.
    fn places(&self, spoken: &[&SpokenText], most: usize) -> Vec<f32> {
        if self.network.durations().is_none() {
            return Vec::new();
        }
        let mut places = vec![0.0; spoken.len() * most];
        for (one, row) in spoken.iter().zip(places.chunks_exact_mut(most)) {
            let found = places_of_steps(&frames_of_letters(&one.places, one.letters.len()), self.config.reduction);
            row[..found.len()].copy_from_slice(&found);
        }
        places
    }

    /// Guides attention along the letters' times instead of the diagonal, if they are known.
    fn lead(&self, tape: &mut Tape<'_, f32>, spoken: &[&SpokenText]) {
        if spoken.iter().all(|one| one.places.is_empty()) {
            return;
        }
        let reduction = self.config.reduction;
        let steps: Vec<usize> = spoken.iter().map(|one| self.steps(one.count)).collect();
        let most = steps.iter().copied().max().unwrap_or(1).max(1);
        let mut places = vec![0.0; spoken.len() * most];
        for ((one, row), &steps) in spoken.iter().zip(places.chunks_exact_mut(most)).zip(&steps) {
            for (step, place) in row[..steps].iter_mut().enumerate() {
                let frame = (step * reduction + reduction / 2).min(one.count.saturating_sub(1));
                let diagonal = (step as f32 + 0.5) / steps as f32;
                *place = one.places.get(frame).copied().unwrap_or(diagonal);
            }
        }
        tape.lead(places);
    }

    /// The loss of recordings; the gradient of each frame is multiplied by `scale`.
    pub(crate) fn loss(&self, tape: &mut Tape<'_, f32>, spoken: &[&SpokenText], scale: f64) -> Result<PendingLoss> {
        let VoiceConfig { bands, reduction, stop_weight, .. } = self.config;
        self.lead(tape, spoken);
        let Heard { hidden, memory, letters, steps } = self.hear(tape, spoken)?;
        let most = hidden.shape()[1];
        let length = most * reduction;
        let (mut there, mut counted) = (vec![0.0; spoken.len() * length * bands], vec![false; spoken.len() * length]);
        let frames: Vec<usize> = spoken.iter().map(|one| one.count).collect();
        for (at, one) in spoken.iter().enumerate() {
            there[at * length * bands..][..one.frames.len()].copy_from_slice(&one.frames);
            counted[at * length..][..frames[at]].fill(true);
        }
        let written = self.network.frames(tape, &hidden);
        let ragged = frames.iter().any(|&frames| frames != length).then_some(&frames[..]);
        let refined = self.network.refine(tape, &written, ragged);
        let there = Tensor::new(there, &[spoken.len(), length, bands]);
        let expected = Expected { values: &there, counted: &counted, scale };
        let mut parts = vec![(1.0, tape.distance_loss(&refined, expected))];
        if self.config.postnet_layers > 0 {
            parts.push((1.0, tape.distance_loss(&written, expected)));
        }
        if let Some(durations) = self.network.durations() {
            let sounding = spoken.iter().map(|one| frames_of_letters(&one.places, one.letters.len()));
            let sounding: Vec<Vec<usize>> = sounding.collect();
            parts.push(durations.loss(tape, &memory, letters.as_deref(), &sounding, scale));
        }
        // The stop prediction of the steps before the last, and of the last; a step counts as many times as it has
        // frames.
        let scale = scale * reduction as f64;
        for (class, weight) in [(0, 1.0), (1, stop_weight)] {
            let id = |at: usize| match (at % most + 1).cmp(&steps[at / most]) {
                std::cmp::Ordering::Less => 0,
                std::cmp::Ordering::Equal => 1,
                std::cmp::Ordering::Greater => IGNORE,
            };
            let ids = (0..spoken.len() * most).map(|at| if id(at) == class { class } else { IGNORE });
            let ids: Vec<u32> = ids.collect();
            let target = Target { ids: &ids, ignore: Some(IGNORE), smoothing: 0.0, scale: scale * weight };
            let stop = self.network.stop();
            let found = tape.cross_entropy(&hidden, stop.weight, stop.bias, target);
            parts.push((reduction as f64 * weight, found));
        }
        Ok(PendingLoss::sum(parts, frames.iter().sum()))
    }
}

/// A text in the form that voices read: lower case, single spaces.
pub(crate) fn spelled(text: &str) -> String {
    text.split_whitespace().map(str::to_lowercase).collect::<Vec<_>>().join(" ")
}
