//! Whisper (Radford et al. 2022, arXiv:2212.04356): a Transformer from a log-mel spectrogram of 30 seconds to text,
//! with the language, the task and times among its tokens.
//!
//! | module | owns |
//! | --- | --- |
//! | this | the network: two convolutions, encoder, decoder |
//! | `checkpoint` | reading it from CTranslate2, ggml and Hugging Face files |
//! | `hugging_face` | writing it in the Hugging Face layout |
//! | `vocabulary` | tokens: bytes of text, languages, tasks, times |
//! | `rules` | which tokens may follow |
//! | `decoding` | greedy, sampled and beam search in one window |
//! | `recognizer` | recordings to segments, window by window |
//! | `words` | the time of every word, from cross-attention |
//! | `listened` | one window, and the attention of each token of its text |

mod checkpoint;
mod decoding;
mod hugging_face;
mod listened;
mod recognizer;
mod rules;
mod vocabulary;
mod words;

pub use listened::Listened;
pub use recognizer::{Recognizer, Segment, Task, TranscribeOptions, Transcript};
pub use vocabulary::LANGUAGES;
pub use words::Word;

use crate::Result;
use qkv::{Attention, Mask};
use qkv_nn::layers::{
    AttentionConfig, Block, BlockConfig, Builder, Conv1d, Embedding, FeedKind, KvCache, Norm, NormKind, PositionKind,
};
use qkv_nn::{Activation, Float, Heads, Init, Param, Positions, Tape, Var, Windows};

/// Sizes of a Whisper model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WhisperConfig {
    /// Mel bands.
    pub bands: usize,
    /// Positions of the encoder: half the frames of a window.
    pub audio_positions: usize,
    /// Positions of the decoder.
    pub text_positions: usize,
    /// Width.
    pub d_model: usize,
    /// Heads of the encoder.
    pub encoder_heads: usize,
    /// Heads of the decoder.
    pub decoder_heads: usize,
    /// Layers of the encoder.
    pub encoder_layers: usize,
    /// Layers of the decoder.
    pub decoder_layers: usize,
    /// Inner width of the encoder's feed-forward layers.
    pub encoder_ffn: usize,
    /// Inner width of the decoder's feed-forward layers.
    pub decoder_ffn: usize,
    /// Tokens.
    pub vocabulary: usize,
}

impl WhisperConfig {
    /// A lower bound on the number of parameters, which a file must have.
    fn least_numbers(&self) -> f64 {
        let [bands, audio, text, width, encoder, decoder, inner, outer, vocabulary] = [
            self.bands,
            self.audio_positions,
            self.text_positions,
            self.d_model,
            self.encoder_layers,
            self.decoder_layers,
            self.encoder_ffn,
            self.decoder_ffn,
            self.vocabulary,
        ]
        .map(|size| size as f64);
        let attention = 4.0 * width * width;
        width * (3.0 * (bands + width) + audio + text + vocabulary)
            + encoder * (attention + 2.0 * width * inner)
            + decoder * (2.0 * attention + 2.0 * width * outer)
    }
}

/// A Whisper model. It holds handles to its parameters, which have the names of the Hugging Face layout.
#[derive(Clone, Debug)]
pub(crate) struct Whisper {
    conv1: Conv1d,
    conv2: Conv1d,
    audio_positions: Param,
    encoder: Vec<Block>,
    encoder_norm: Norm,
    tokens: Embedding,
    decoder: Vec<Block>,
    decoder_norm: Norm,
    pub config: WhisperConfig,
}

/// An encoded window: the encoder's output, and its keys and values in each layer of the decoder.
#[derive(Clone, Debug)]
pub(crate) struct Encoded<T: Float> {
    /// `[1, positions, C]`.
    pub output: Var<T>,
    memory: Vec<KvCache<T>>,
}

/// The state of decoding: keys and values of the tokens so far.
#[derive(Clone, Debug)]
pub(crate) struct WhisperState<T: Float> {
    own: Vec<KvCache<T>>,
}

impl<T: Float> WhisperState<T> {
    /// Number of tokens so far.
    pub fn len(&self) -> usize {
        self.own.first().map_or(0, KvCache::len)
    }

    /// Reorders the sequences; one may be repeated.
    pub fn select(&mut self, sequences: &[usize]) {
        self.own.iter_mut().for_each(|cache| cache.select(sequences));
    }
}

impl Whisper {
    /// Adds its parameters.
    ///
    /// # Errors
    /// If the heads do not divide the width.
    pub fn new<T: Float>(at: &mut Builder<'_, T>, config: &WhisperConfig) -> Result<Self> {
        let width = config.d_model;
        let block = |heads: usize, inner: usize, mask: Mask, cross: bool| {
            let heads = Heads { query: heads, key: heads };
            let attention = |mask| AttentionConfig::new(Attention::scaled_dot().mask(mask), heads);
            BlockConfig {
                feed: FeedKind::Gelu,
                cross: cross.then(|| attention(Mask::Full)),
                ..BlockConfig::new(width, inner, attention(mask))
            }
        };
        let encoder_block = block(config.encoder_heads, config.encoder_ffn, Mask::Full, false);
        let decoder_block = block(config.decoder_heads, config.decoder_ffn, Mask::causal(), true);
        let windows = |stride| Windows { kernel: 3, stride, padding: 1 };
        let conv1 = Conv1d::new(&mut at.at("encoder.conv1"), config.bands, width, windows(1));
        let conv2 = Conv1d::new(&mut at.at("encoder.conv2"), width, width, windows(2));
        let positions = [config.audio_positions, width];
        let audio_positions = at.add("encoder.embed_positions.weight", &positions, Init::Normal(0.02));
        let mut blocks = |side: &str, layers: usize, config: &BlockConfig| -> Result<Vec<Block>> {
            (0..layers).map(|layer| Ok(Block::new(&mut at.at(&format!("{side}.layers.{layer}")), config)?)).collect()
        };
        let encoder = blocks("encoder", config.encoder_layers, &encoder_block)?;
        let decoder = blocks("decoder", config.decoder_layers, &decoder_block)?;
        let (kind, positions) = (PositionKind::Learned, config.text_positions);
        let tokens = &mut at.at("decoder.embed_tokens");
        let tokens = Embedding::new(tokens, config.vocabulary, width, kind, positions).unscaled();
        at.round_finely(tokens.weight);
        let mut norm = |name: &str| Norm::new(&mut at.at(name), width, NormKind::Layer, Norm::EPSILON);
        let (encoder_norm, decoder_norm) = (norm("encoder.layer_norm"), norm("decoder.layer_norm"));
        let config = *config;
        Ok(Whisper { conv1, conv2, audio_positions, encoder, encoder_norm, tokens, decoder, decoder_norm, config })
    }

    /// Frames per window.
    pub fn window(&self) -> usize {
        2 * self.config.audio_positions
    }

    /// Encodes windows of spectrograms, `[B, 2 · positions, bands]`: `[B, positions, C]`.
    ///
    /// # Errors
    /// Errors from `qkv`.
    pub fn encode<T: Float>(&self, tape: &mut Tape<'_, T>, window: &Var<T>) -> Result<Var<T>> {
        let x = self.conv1.activated(tape, window, Activation::Gelu);
        let x = self.conv2.activated(tape, &x, Activation::Gelu); // (B, positions, C)
        let &[batch, length, _] = x.shape() else { unreachable!("a convolution keeps the axes") };
        let places: Vec<u32> = (0..batch).flat_map(|_| 0..length as u32).collect();
        let positions = tape.embedding(&places, length, self.audio_positions, 1.0, Positions::None, 0);
        let mut x = tape.add(&x, positions);
        for block in &self.encoder {
            x = block.forward(tape, x, None, None, None)?;
        }
        Ok(self.encoder_norm.forward(tape, &x))
    }

    /// Prepares the output of the encoder for decoding.
    ///
    /// # Errors
    /// Errors from `qkv`.
    pub fn memorize<T: Float>(&self, tape: &mut Tape<'_, T>, output: Var<T>) -> Result<Encoded<T>> {
        let batch = output.shape()[0];
        let mut memory = Vec::with_capacity(self.decoder.len());
        for block in &self.decoder {
            let [_, cross] = block.caches(tape, batch, Some(&output))?;
            memory.extend(cross);
        }
        Ok(Encoded { output, memory })
    }

    /// The state before the first token of `batch` sequences.
    ///
    /// # Errors
    /// Errors from `qkv`.
    pub fn start<T: Float>(&self, tape: &mut Tape<'_, T>, batch: usize) -> Result<WhisperState<T>> {
        let mut own = Vec::with_capacity(self.decoder.len());
        for block in &self.decoder {
            let [cache, _] = block.caches(tape, batch, None)?;
            own.extend(cache);
        }
        Ok(WhisperState { own })
    }

    /// Hidden states after `new` more tokens of each sequence, `[B, N, C]`.
    ///
    /// # Errors
    /// Errors from `qkv`.
    pub fn step<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        tokens: &[u32],
        new: usize,
        state: &mut WhisperState<T>,
        encoded: &Encoded<T>,
    ) -> Result<Var<T>> {
        let mut x = self.tokens.forward(tape, tokens, new, state.len());
        for ((block, own), memory) in self.decoder.iter().zip(&mut state.own).zip(&encoded.memory) {
            x = block.step_over(tape, x, own, Some(memory), None, None)?;
        }
        Ok(self.decoder_norm.forward(tape, &x))
    }

    /// Hidden states of whole sequences, `[B, N, C]`, whose attentions a tape can capture.
    ///
    /// # Errors
    /// Errors from `qkv`.
    pub fn decode<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        tokens: &[u32],
        length: usize,
        output: &Var<T>,
    ) -> Result<Var<T>> {
        let mut x = self.tokens.forward(tape, tokens, length, 0);
        for block in &self.decoder {
            x = block.forward(tape, x, None, None, Some((output, None)))?;
        }
        Ok(self.decoder_norm.forward(tape, &x))
    }

    /// Logits of the next token after hidden states: `[.., V]`.
    pub fn logits<T: Float>(&self, tape: &mut Tape<'_, T>, hidden: &Var<T>) -> Var<T> {
        tape.linear(hidden, self.tokens.weight, None, Activation::None, 0.0)
    }
}
