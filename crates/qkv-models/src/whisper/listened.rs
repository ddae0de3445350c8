//! The first window of a recording: what a model writes, and the attention of every token to the sound.

use super::recognizer::{Recognizer, TranscribeOptions};
use super::rules::Rules;
use super::vocabulary::Vocabulary;
use super::words::{Aligner, Word, hundredths, settle};
use crate::audio::{Recording, Spectrogram};
use crate::model::{AttentionSite, Group};
use crate::observed_attention::{ObservedAttention, observed};
use crate::{Error, Result};
use qkv_nn::{Machine, Pool, Tape};
use std::ops::Range;

/// A window of a recording, the text written for it, and every attention of the decoder.
#[derive(Clone, Debug)]
pub struct Listened {
    /// The text.
    pub text: String,
    /// Code of the language.
    pub language: String,
    /// The log-mel spectrogram of the window up to the end of the recording, `[frames, bands]`.
    pub frames: Vec<f32>,
    /// Mel bands.
    pub bands: usize,
    /// Positions of the encoder, two frames each, including the silence after the end of the recording.
    pub positions: usize,
    /// The tokens that the decoder read, in readable form.
    pub read: Vec<String>,
    /// The token that it wrote after each of these.
    pub written: Vec<String>,
    /// Words with their times, and the ranges of their tokens in `written`.
    pub words: Vec<(Word, Range<usize>)>,
    /// Layers and heads of cross-attention that follow the sound.
    pub alignment_heads: Vec<(usize, usize)>,
    /// The attentions of the decoder to itself and to the sound.
    pub attentions: Vec<ObservedAttention>,
}

impl Recognizer {
    /// Recognizes the first window of a recording, 30 seconds, and captures the decoder's attentions over the text it
    /// wrote.
    ///
    /// # Errors
    /// As [`transcribe`](Recognizer::transcribe); also if nobody speaks.
    pub fn listen(&self, recording: &Recording, options: &TranscribeOptions, machine: &Machine) -> Result<Listened> {
        let known = self.known_language(options)?;
        let mut spectrogram = Spectrogram::new(recording, &self.filters)?;
        let size = self.model.window().min(spectrogram.frames());
        let window = spectrogram.window(0, size, self.model.window())?;
        let bands = self.model.config.bands;
        let frames = window[..size * bands].to_vec();
        let pool = Pool::new();
        let mut tape = Tape::inference(&self.parameters, &pool, machine);
        let encoded = self.encode(&mut tape, window)?;
        let (language, _) = match known {
            Some(known) => known,
            None => self.detect(&mut tape, &encoded)?,
        };
        let start = self.start(&language, options.task);
        let rules = Rules::new(&self.vocabulary, true);
        let chosen = self.choose(&mut tape, &rules, &encoded, &start, options, 0)?;
        let Vocabulary { end, no_timestamps, .. } = self.vocabulary;
        let tokens: Vec<u32> = chosen.decoded.tokens.iter().copied().filter(|&token| token < end).collect();
        if tokens.is_empty() || options.is_silence(chosen.no_speech, chosen.decoded.average()) {
            return Err(Error::invalid("nobody speaks in the first 30 seconds of the recording"));
        }
        let aligner = Aligner {
            model: &self.model,
            parameters: &self.parameters,
            vocabulary: &self.vocabulary,
            heads: &self.alignment_heads,
        };
        let mut placed = aligner.words(&mut tape, &encoded, &start, &tokens, &language, size)?;
        settle(&mut placed);
        let mut at = start.len();
        let mut words = Vec::new();
        for word in placed {
            let tokens = at..at + word.tokens;
            at = tokens.end;
            if !word.text.is_empty() {
                let (start, end) = (hundredths(word.start), hundredths(word.end));
                words.push((Word { start, end, word: word.text, probability: word.probability }, tokens));
            }
        }
        let mut tape = Tape::inference(&self.parameters, &pool, machine);
        tape.capture();
        let read = [&start[..], &[no_timestamps], &tokens[..]].concat();
        self.model.decode(&mut tape, &read, read.len(), &encoded.output)?;
        let captured = tape.captured();
        let stack = |group, name: &'static str| {
            let label = move |layer: usize| format!("decoder.layers.{layer}.{name}");
            (0..self.model.config.decoder_layers).map(move |layer| AttentionSite { group, layer, label: label(layer) })
        };
        let sites = stack(Group::Decoder, "self_attn").chain(stack(Group::Cross, "encoder_attn"));
        let attentions = sites.map(|site| observed(&site, &site.calls(&captured), &self.parameters));
        let written = [&read[1..], &[end]].concat();
        Ok(Listened {
            text: self.vocabulary.text(&tokens).trim().to_owned(),
            frames,
            bands,
            positions: self.model.config.audio_positions,
            read: read.iter().map(|&token| self.readable(token)).collect(),
            written: written.iter().map(|&token| self.readable(token)).collect(),
            words,
            alignment_heads: self.alignment_heads.clone(),
            attentions: attentions.collect::<Result<_>>()?,
            language,
        })
    }

    /// A token in readable form: its text, or the name of a special one.
    fn readable(&self, token: u32) -> String {
        let v = &self.vocabulary;
        if token < v.end {
            return v.text(&[token]);
        }
        let named = [
            (v.end, "end"),
            (v.start, "start"),
            (v.transcribe, "transcribe"),
            (v.translate, "translate"),
            (v.no_timestamps, "no times"),
        ];
        let language = v.languages.iter().find(|&&(_, id)| id == token).map(|(code, _)| code.as_str());
        let name = language.or_else(|| named.iter().find(|&&(id, _)| id == token).map(|&(_, name)| name));
        format!("‹{}›", name.unwrap_or("special"))
    }
}
