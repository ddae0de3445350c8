//! Speaking: a spectrogram, step by step until the voice predicts the end or all at once, then sound from it; and the
//! alignment of steps with letters.

use super::durations::{places_of_steps, stretched};
use super::reader::{SpokenText, spelled};
use super::{Speaker, VoiceConfig};
use crate::audio::Vocoder;
use crate::audio::vocoder::trimmed;
use crate::batch::Rows;
use crate::model::{AttentionSite, Group};
use crate::observed_attention::{ObservedAttention, observed};
use crate::text::sentences::sentences;
use crate::{Error, Result, finite};
use qkv_nn::{Machine, Pool, Tape, Tensor, Var};

/// How a text is spoken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpeakOptions {
    /// Iterations of the Griffin–Lim algorithm.
    pub iterations: usize,
    /// Seed of the pre-net's dropout and of the initial phases.
    pub seed: u64,
}

impl Default for SpeakOptions {
    fn default() -> Self {
        SpeakOptions { iterations: 60, seed: 1 }
    }
}

/// Speech with its alignment.
#[derive(Clone, Debug)]
pub struct Speech {
    /// Mono samples at 16 kHz.
    pub samples: Vec<f32>,
    /// The spectrogram, `[frames, bands]`.
    pub frames: Vec<f32>,
    /// The letters, the end token last.
    pub letters: Vec<String>,
    /// Seconds per step.
    pub step: f64,
    /// A row for each step, a weight for each letter: the mean over the heads of the decoder's last layer.
    pub alignment: Vec<Vec<f32>>,
    /// Every attention: of the encoder, of the decoder to itself, of the decoder to the letters.
    pub attentions: Vec<ObservedAttention>,
    /// Whether the voice came to its end; otherwise it was stopped at its maximum length.
    pub ended: bool,
}

/// The share of an alignment's weight within a tenth of the length from the diagonal. The alignment has a row for each
/// step, with a weight for each letter and for the end token, which has no time of its own and is left out.
///
/// ```
/// use qkv_models::diagonal_share;
/// let row = |at: usize| (0..9).map(|letter| f32::from(letter == at / 2)).collect::<Vec<f32>>();
/// assert_eq!(diagonal_share(&(0..16).map(row).collect::<Vec<_>>()), 1.0);
/// assert!(diagonal_share(&vec![vec![0.1; 11]; 10]) < 0.3);
/// ```
pub fn diagonal_share(alignment: &[Vec<f32>]) -> f64 {
    let (mut near, mut all) = (0.0, 0.0);
    for (at, row) in alignment.iter().enumerate() {
        let query = (at as f64 + 0.5) / alignment.len() as f64;
        let letters = row.len().saturating_sub(1);
        for (letter, &weight) in row[..letters].iter().enumerate() {
            let key = (letter as f64 + 0.5) / letters as f64;
            all += f64::from(weight);
            if (query - key).abs() <= 0.1 {
                near += f64::from(weight);
            }
        }
    }
    if all > 0.0 { near / all } else { 0.0 }
}

impl Speaker {
    /// The sentences of a text, to be spoken one after the other; one that is too long is cut between words.
    ///
    /// # Errors
    /// If the text is empty.
    pub fn phrases(&self, text: &str) -> Result<Vec<String>> {
        let mut found: Vec<String> = Vec::new();
        for sentence in sentences(text).into_iter().map(|range| spelled(&text[range])) {
            let mut phrase = String::new();
            for word in sentence.split(' ') {
                let longer = phrase.chars().count() + 1 + word.chars().count() > self.config.max_letters;
                if longer && !phrase.is_empty() {
                    found.push(std::mem::take(&mut phrase));
                }
                if !phrase.is_empty() {
                    phrase.push(' ');
                }
                phrase.push_str(word);
            }
            found.push(phrase);
        }
        found.retain(|phrase| !phrase.is_empty());
        if found.is_empty() {
            return Err(Error::invalid("there is nothing to say").with_hint("give a text"));
        }
        Ok(found)
    }

    /// Speaks a text.
    ///
    /// # Errors
    /// If the text is empty or too long or has letters that the voice has not learned, or the model computes NaN.
    pub fn speak(&self, text: &str, options: &SpeakOptions, machine: &Machine) -> Result<Speech> {
        let letters = self.letters(text)?;
        let (pool, rows) = (Pool::new(), Rows::new(std::slice::from_ref(&letters), self.tokenizer.pad()));
        let (mut frames, mut heard, mut ended) = (Vec::new(), Vec::new(), false);
        let mut places = Vec::new();
        rayon::scope(|_| -> Result<()> {
            let mut tape = Tape::inference(&self.parameters, &pool, machine);
            let memory = self.network.encode(&mut tape, &rows)?;
            if let Some(durations) = self.network.durations() {
                let sounding = durations.predict(&mut tape, &memory);
                places = places_of_steps(&sounding, self.config.reduction);
            }
            if self.config.durations && places.is_empty() {
                return Err(Error::invalid("the voice gives no time to any letter of the text"));
            }
            (frames, heard, ended) = match self.config.hears {
                true => self.step_by_step(&mut tape, &memory, &places, options)?,
                false => self.at_once(&mut tape, &memory, &places)?,
            };
            let count = frames.len() / self.config.bands;
            let written = tape.constant(Tensor::new(std::mem::take(&mut frames), &[1, count, self.config.bands]));
            frames = self.network.refine(&mut tape, &written, None).value().data().to_vec();
            finite::check(&frames, &self.parameters)
        })?;
        places.truncate(heard.len() / self.config.d_model);
        self.said(&letters, frames, (heard, places), ended, options, machine)
    }

    /// Writes frames one step after the other; returns them, what was heard before each step, and whether the end was
    /// reached.
    fn step_by_step(
        &self,
        tape: &mut Tape<'_, f32>,
        memory: &Var<f32>,
        places: &[f32],
        options: &SpeakOptions,
    ) -> Result<(Vec<f32>, Vec<f32>, bool)> {
        let VoiceConfig { bands, max_steps, d_model, .. } = self.config;
        let (mut frames, mut heard, mut ended) = (Vec::new(), Vec::new(), false);
        let mut state = self.network.start(tape, memory)?;
        let pool = Pool::new();
        while heard.len() < max_steps * d_model && !ended {
            let at = heard.len() / d_model;
            let last = match frames.len() {
                0 => vec![0.0; bands],
                length => frames[length - bands..].to_vec(),
            };
            // The pre-net's dropout is on in inference too, so that the letters count more than what was just said.
            let seed = options.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(at as u64);
            let mut noisy = Tape::inference(&self.parameters, &pool, tape.machine()).with_noise(seed);
            let last = noisy.constant(Tensor::new(last, &[1, 1, bands]));
            let now = self.network.hear(&mut noisy, &last);
            let place = places.get(at..=at).unwrap_or_default();
            let hidden = self.network.step(tape, &now, at, place, &mut state)?;
            let written = self.network.frames(tape, &hidden);
            finite::check(written.value().data(), &self.parameters)?;
            ended = match places.len() {
                // Without durations, the voice predicts when it is done.
                0 => {
                    let stop = self.network.stop().forward(tape, &hidden);
                    stop.value().data()[1] > stop.value().data()[0]
                }
                steps => at + 1 == steps,
            };
            frames.extend_from_slice(written.value().data());
            heard.extend_from_slice(now.value().data());
        }
        Ok((frames, heard, ended))
    }

    /// The same for a voice that does not hear itself: all steps at once.
    fn at_once(
        &self,
        tape: &mut Tape<'_, f32>,
        memory: &Var<f32>,
        places: &[f32],
    ) -> Result<(Vec<f32>, Vec<f32>, bool)> {
        let VoiceConfig { max_steps, d_model, .. } = self.config;
        let steps = places.len().min(max_steps);
        let heard = vec![0.0; steps * d_model];
        let nothing = tape.constant(Tensor::new(heard.clone(), &[1, steps, d_model]));
        let hidden = self.network.decode(tape, &nothing, &places[..steps], None, memory, None)?;
        let written = self.network.frames(tape, &hidden).value().data().to_vec();
        finite::check(&written, &self.parameters)?;
        Ok((written, heard, steps == places.len()))
    }

    /// Speaks a text while hearing a recording of it instead of itself, which shows the mistakes that do not come from
    /// hearing its own output. The recording is mono samples at 16 kHz; predicted durations of letters are stretched to
    /// its length.
    ///
    /// # Errors
    /// As [`speak`](Speaker::speak); also if the recording is silent or too long for the voice.
    pub fn speak_along(
        &self,
        text: &str,
        samples: &[f32],
        options: &SpeakOptions,
        machine: &Machine,
    ) -> Result<Speech> {
        let VoiceConfig { bands, max_steps, .. } = self.config;
        let (letters, pool) = (self.letters(text)?, Pool::new());
        let frames = Vocoder::new(bands).spectrogram(&trimmed(samples));
        let count = frames.len() / bands;
        if !(1..=max_steps).contains(&self.steps(count)) {
            let what = format!("the recording has {} steps, the voice says 1 to {max_steps}", self.steps(count));
            return Err(Error::invalid(what));
        }
        let spoken = SpokenText { letters, frames, count, places: Vec::new() };
        let mut tape = Tape::inference(&self.parameters, &pool, machine);
        let mut noisy = Tape::inference(&self.parameters, &pool, machine).with_noise(options.seed);
        let heard = self.hear_recording(&mut noisy, &[&spoken]);
        let rows = Rows::new(std::slice::from_ref(&spoken.letters), self.tokenizer.pad());
        let memory = self.network.encode(&mut tape, &rows)?;
        let places = self.network.durations().map_or(Vec::new(), |durations| {
            let sounding = durations.predict(&mut tape, &memory);
            places_of_steps(&stretched(&sounding, count), self.config.reduction)
        });
        let hidden = self.network.decode(&mut tape, &heard, &places, None, &memory, None)?;
        let written = self.network.frames(&mut tape, &hidden);
        let frames = self.network.refine(&mut tape, &written, None).value().data()[..count * bands].to_vec();
        finite::check(&frames, &self.parameters)?;
        self.said(&spoken.letters, frames, (heard.value().data().to_vec(), places), true, options, machine)
    }

    /// The sound of frames, and the attentions, recomputed from what the decoder heard and the places of its steps.
    fn said(
        &self,
        letters: &[u32],
        frames: Vec<f32>,
        (heard, places): (Vec<f32>, Vec<f32>),
        ended: bool,
        options: &SpeakOptions,
        machine: &Machine,
    ) -> Result<Speech> {
        let VoiceConfig { bands, reduction, .. } = self.config;
        let rows = Rows::new(&[letters.to_vec()], self.tokenizer.pad());
        let attentions = self.attentions(&rows, heard, &places, machine)?;
        let alignment = attentions.last().map_or(Ok(Vec::new()), ObservedAttention::mean_over_heads)?;
        let samples = Vocoder::new(bands).samples(&frames, options.iterations, options.seed);
        let letters = self.tokenizer.pieces(letters).into_iter().map(|piece| piece.text).collect();
        let step = (reduction * crate::audio::vocoder::HOP) as f64 / crate::audio::SAMPLE_RATE as f64;
        Ok(Speech { samples, frames, letters, step, alignment, attentions, ended })
    }

    /// Every attention of one text, given what the decoder heard.
    fn attentions(
        &self,
        letters: &Rows,
        heard: Vec<f32>,
        places: &[f32],
        machine: &Machine,
    ) -> Result<Vec<ObservedAttention>> {
        let (pool, width) = (Pool::new(), self.config.d_model);
        let mut tape = Tape::inference(&self.parameters, &pool, machine);
        tape.capture();
        let memory = self.network.encode(&mut tape, letters)?;
        let steps = heard.len() / width;
        let heard = tape.constant(Tensor::new(heard, &[1, steps, width]));
        self.network.decode(&mut tape, &heard, places, None, &memory, None)?;
        let captured = tape.captured();
        let [encoder, decoder] = self.network.depths();
        let stack = |group, layers: usize, side: &'static str, name: &'static str| {
            let label = move |layer: usize| format!("{side}.layers.{layer}.{name}");
            (0..layers).map(move |layer| AttentionSite { group, layer, label: label(layer) })
        };
        let sites = stack(Group::Encoder, encoder, "encoder", "self_attn")
            .chain(stack(Group::Decoder, decoder, "decoder", "self_attn"))
            .chain(stack(Group::Cross, decoder, "decoder", "encoder_attn"));
        sites.map(|site| observed(&site, &site.calls(&captured), &self.parameters)).collect()
    }

    /// The [share](diagonal_share) of the last layer's attention near the diagonal while a voice hears a recording.
    pub(crate) fn diagonal(&self, spoken: &SpokenText, machine: &Machine) -> Result<f64> {
        let pool = Pool::new();
        let mut tape = Tape::inference(&self.parameters, &pool, machine);
        let last = self.network.depths()[1] - 1;
        let label = format!("decoder.layers.{last}.encoder_attn");
        let site = AttentionSite { group: Group::Cross, layer: last, label: label.clone() };
        tape.capture_where(move |found| found == label);
        self.hear(&mut tape, &[spoken])?;
        let captured = tape.captured();
        let found = observed(&site, &site.calls(&captured), &self.parameters)?;
        Ok(diagonal_share(&found.mean_over_heads()?))
    }
}
