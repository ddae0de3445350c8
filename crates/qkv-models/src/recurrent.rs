//! Recurrent sequence-to-sequence model with attention: a bidirectional GRU encoder, and a GRU decoder that attends at
//! every step (Bahdanau et al. 2014, arXiv:1409.0473; Luong et al. 2015, arXiv:1508.04025).

use crate::Result;
use crate::batch::Rows;
use qkv::Attention;
use qkv_nn::layers::{
    AttentionStyle, Builder, Embedding, Gru, Linear, PositionKind, RecurrentAttention, RecurrentMemory,
};
use qkv_nn::{Activation, Float, Param, Tape, Var};
use serde::{Deserialize, Serialize};

/// Sizes and settings of a recurrent model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RecurrentConfig {
    /// Width of embeddings and of the decoder's output.
    pub d_model: usize,
    /// Width of the GRU states, each direction.
    pub hidden: usize,
    /// Number of layers of encoder and decoder.
    pub layers: usize,
    /// Which state is the query: Bahdanau's or Luong's.
    pub style: AttentionStyle,
    /// The attention: additive, general, dot or scaled-dot scores; a window or `local`; a hard selection.
    pub attention: Attention,
    /// Width of queries and keys of the additive score.
    pub attention_width: usize,
    /// Whether source embedding, target embedding and output projection share a matrix.
    pub tied: bool,
    /// Dropout of embeddings, between layers, and of the decoder's output.
    pub dropout: f64,
    /// Weight of the mean attention entropy in the loss.
    pub entropy: f64,
}

impl Default for RecurrentConfig {
    fn default() -> Self {
        RecurrentConfig {
            d_model: 256,
            hidden: 256,
            layers: 1,
            style: AttentionStyle::Bahdanau,
            attention: Attention::additive(),
            attention_width: 256,
            tied: true,
            dropout: 0.2,
            entropy: 0.0,
        }
    }
}

/// A recurrent model. It holds handles to its parameters.
#[derive(Clone, Debug)]
pub struct Recurrent {
    source: Embedding,
    target: Embedding,
    output: Param,
    /// `None` if something else encodes the memory.
    encoder: Option<Gru>,
    bridge: Vec<Linear>,
    decoder: Gru,
    attention: RecurrentAttention,
    combine: Linear,
    style: AttentionStyle,
    dropout: f64,
}

/// State of decoding: GRU states, and keys and values of the source.
#[derive(Clone, Debug)]
pub struct RecurrentState<T: Float> {
    states: Vec<Var<T>>,
    memory: RecurrentMemory<T>,
    step: usize,
}

impl Recurrent {
    /// Adds its parameters.
    ///
    /// # Errors
    /// If the attention needs data that a layer does not have.
    pub fn new<T: Float>(at: &mut Builder<'_, T>, config: &RecurrentConfig, vocabulary: usize) -> Result<Self> {
        Recurrent::build(at, config, vocabulary, None)
    }

    /// Only the decoder, over a memory with rows of `width`, such as the output of an image encoder.
    pub(crate) fn over<T: Float>(
        at: &mut Builder<'_, T>,
        config: &RecurrentConfig,
        vocabulary: usize,
        width: usize,
    ) -> Result<Self> {
        Recurrent::build(at, config, vocabulary, Some(width))
    }

    fn build<T: Float>(
        at: &mut Builder<'_, T>,
        config: &RecurrentConfig,
        vocabulary: usize,
        memory: Option<usize>,
    ) -> Result<Self> {
        let RecurrentConfig { d_model, hidden, layers, style, attention_width, dropout, entropy, .. } = *config;
        let table = |at: &mut Builder<'_, T>, name: &str| {
            Embedding::new(&mut at.at(name), vocabulary, d_model, PositionKind::None, 0)
        };
        let (source, target, output) = if config.tied {
            let shared = table(at, "shared");
            (shared.clone(), shared.clone(), shared.weight)
        } else {
            let (source, target) = (table(at, "encoder.embed_tokens"), table(at, "decoder.embed_tokens"));
            (source, target, Linear::new(&mut at.at("lm_head"), d_model, vocabulary, false).weight)
        };
        let encoder = match memory {
            None => Some(Gru::new(&mut at.at("encoder.rnn"), d_model, hidden, layers, true, dropout)),
            Some(_) => None,
        };
        let memory = memory.unwrap_or(2 * hidden);
        let bridge = (0..layers)
            .map(|layer| Linear::new(&mut at.at(&format!("bridge.{layer}")), memory, hidden, true))
            .collect();
        let inputs = if style == AttentionStyle::Bahdanau { d_model + memory } else { d_model };
        let decoder = Gru::new(&mut at.at("decoder.rnn"), inputs, hidden, layers, false, dropout);
        let mut place = at.at("decoder.attention");
        let attention =
            RecurrentAttention::new(&mut place, &config.attention, hidden, memory, attention_width, entropy);
        let combine = Linear::new(&mut at.at("decoder.combine"), hidden + memory, d_model, true);
        Ok(Recurrent { source, target, output, encoder, bridge, decoder, attention, combine, style, dropout })
    }

    /// The output projection, `[V, C]`.
    pub fn output(&self) -> Param {
        self.output
    }

    /// Encodes the source, `[B, S, 2H]`.
    ///
    /// # Panics
    /// If the model has no encoder because something else encodes the memory.
    pub fn encode<T: Float>(&self, tape: &mut Tape<'_, T>, source: &Rows) -> Var<T> {
        let encoder = self.encoder.as_ref().expect("a model of its own has an encoder");
        let x = self.source.forward(tape, &source.ids, source.length, 0);
        let x = tape.dropout(x, self.dropout);
        let zeros = encoder.zeros(tape, source.len());
        encoder.forward(tape, x, &zeros, source.ragged())
    }

    /// State before the first step: GRU states from the encoder's first row, at which its backward direction has read
    /// the whole source, or, if something else encodes, from the mean of the rows (Xu et al. 2015).
    pub fn start<T: Float>(&self, tape: &mut Tape<'_, T>, encoded: &Var<T>, source: &Rows) -> RecurrentState<T> {
        let first = match self.encoder {
            Some(_) => tape.step(encoded, 0),
            None => tape.mean(encoded, source.ragged()),
        };
        let states = self.bridge.iter().map(|map| map.activated(tape, &first, Activation::Tanh, 0.0)).collect();
        let memory = self.attention.memory(tape, encoded.clone(), source.ragged());
        RecurrentState { states, memory, step: 0 }
    }

    /// The decoder's output from its state and the context.
    fn combined<T: Float>(&self, tape: &mut Tape<'_, T>, state: &Var<T>, context: &Var<T>) -> Var<T> {
        let both = tape.concat(&[state, context]);
        let y = self.combine.activated(tape, &both, Activation::Tanh, 0.0);
        tape.dropout(y, self.dropout)
    }

    /// One step from an embedded token `x [B, 1, C]`.
    fn advance<T: Float>(&self, tape: &mut Tape<'_, T>, x: &Var<T>, state: &mut RecurrentState<T>) -> Result<Var<T>> {
        let RecurrentState { states, memory, step } = state;
        let top = states.last().expect("a unit has a layer").clone();
        let (hidden, context) = match self.style {
            AttentionStyle::Bahdanau => {
                let context = self.attention.forward(tape, &top, memory, *step)?;
                let x = tape.concat(&[x, &context]);
                (self.decoder.step(tape, &x, states), context)
            }
            AttentionStyle::Luong => {
                let hidden = self.decoder.step(tape, x, states);
                let context = self.attention.forward(tape, &hidden, memory, *step)?;
                (hidden, context)
            }
        };
        *step += 1;
        Ok(self.combined(tape, &hidden, &context))
    }

    /// Outputs of the decoder at all positions, `[B, N, C]`. Luong's attention is computed for all positions at once,
    /// Bahdanau's step by step.
    ///
    /// # Errors
    /// Errors from `qkv`.
    pub fn decode<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        encoded: &Var<T>,
        source: &Rows,
        decoder_input: &Rows,
    ) -> Result<Var<T>> {
        let mut state = self.start(tape, encoded, source);
        let x = self.target.forward(tape, &decoder_input.ids, decoder_input.length, 0);
        let x = tape.dropout(x, self.dropout);
        if self.style == AttentionStyle::Luong {
            let hidden = self.decoder.forward(tape, x, &state.states, None);
            let context = self.attention.forward(tape, &hidden, &state.memory, 0)?;
            return Ok(self.combined(tape, &hidden, &context));
        }
        let mut outputs = Vec::with_capacity(decoder_input.length);
        for step in 0..decoder_input.length {
            let x = tape.step(&x, step);
            outputs.push(self.advance(tape, &x, &mut state)?);
        }
        Ok(tape.stack(&outputs))
    }

    /// Output after one more token per sequence, `[B, 1, C]`.
    ///
    /// # Errors
    /// Errors from `qkv`.
    pub fn step<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        last: &[u32],
        state: &mut RecurrentState<T>,
    ) -> Result<Var<T>> {
        let x = self.target.forward(tape, last, 1, 0);
        self.advance(tape, &x, state)
    }
}

impl<T: Float> RecurrentState<T> {
    /// Reorders the sequences. `same_sources` leaves the keys and values of the source in place.
    pub fn select(&mut self, tape: &Tape<'_, T>, sequences: &[usize], same_sources: bool) {
        for state in &mut self.states {
            *state = tape.constant(state.value().select(sequences));
        }
        if !same_sources {
            self.memory.select(tape, sequences);
        }
    }
}
