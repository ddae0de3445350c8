//! Decoder-only Transformer (Radford et al. 2018), with learned or rotary positions, layer or RMS norm, a gated or
//! plain feed-forward layer, grouped-query attention, and layers that attend within a window: GPT-2, Llama, Qwen2 and
//! Gemma 3 are special cases.
//!
//! Trained on plain text it is a language model; trained on pairs as one sequence, the source first, it translates or
//! summarizes.

use crate::batch::Rows;
use crate::{Error, Result};
use qkv::{Attention, Dropout, Mask, Select};
use qkv_cuda::operations::{DecodeBatch, Operations};
use qkv_nn::layers::{
    AttentionConfig, Block, BlockConfig, Builder, Embedding, FeedKind, KvCache, Linear, Norm, NormKind, NormPlace,
    PositionKind,
};
use qkv_nn::{Angles, Float, Heads, Param, Tape, Var};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Sizes and settings of a decoder-only model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GptConfig {
    /// Model width.
    pub d_model: usize,
    /// Inner width of the feed-forward layers.
    pub ffn_dim: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key/value heads, if fewer (grouped-query attention).
    pub key_heads: Option<usize>,
    /// Width of a head, if not the model width over the number of heads.
    pub head_width: Option<usize>,
    /// Number of layers.
    pub layers: usize,
    /// Position encoding.
    pub positions: PositionKind,
    /// Base of rotary positions.
    pub rotary_base: f64,
    /// The longest sequence.
    pub max_positions: usize,
    /// Normalization before each sublayer and at the end.
    pub norm: NormKind,
    /// Whether the output of each sublayer is normalized as well (sandwich norm: Ding et al. 2021, arXiv:2105.13290).
    pub sandwich_norm: bool,
    /// Whether queries and keys are RMS-normalized per head (Henry et al. 2020, arXiv:2010.04245).
    pub head_norm: bool,
    /// The `ε` of the norms.
    pub epsilon: f64,
    /// Activation of the feed-forward layers.
    pub activation: FeedKind,
    /// Whether linear layers have biases.
    pub bias: bool,
    /// Whether the query, key and value projections have biases, if this differs from the other layers.
    pub qkv_bias: Option<bool>,
    /// Whether input embedding and output projection share a matrix.
    pub tied: bool,
    /// Whether embeddings are multiplied by the square root of the model width.
    pub scaled_embedding: bool,
    /// Dropout of embeddings and of each residual branch.
    pub dropout: f64,
    /// Dropout of attention weights.
    pub attention_dropout: f64,
    /// Self-attention; its mask is combined with a causal one.
    pub attention: Attention,
    /// Layers that attend within a window; `None` if every layer sees all tokens.
    pub local: Option<LocalLayers>,
}

/// Layers that attend within a window, between global layers, which see everything (Gemma Team 2025, arXiv:2503.19786).
/// The last of every `period` layers is global.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LocalLayers {
    /// Tokens that a token sees, itself included.
    pub window: usize,
    /// Number of layers from one global layer to the next.
    pub period: usize,
    /// Base of the rotary positions of local layers.
    pub rotary_base: f64,
}

impl Default for LocalLayers {
    fn default() -> Self {
        LocalLayers { window: 512, period: 6, rotary_base: 10_000.0 }
    }
}

impl LocalLayers {
    /// Whether a layer attends within the window.
    pub(crate) fn has(&self, layer: usize) -> bool {
        !(layer + 1).is_multiple_of(self.period)
    }
}

impl Default for GptConfig {
    fn default() -> Self {
        GptConfig {
            d_model: 256,
            ffn_dim: 1024,
            heads: 4,
            key_heads: None,
            head_width: None,
            layers: 4,
            positions: PositionKind::Learned,
            rotary_base: 10_000.0,
            max_positions: 256,
            norm: NormKind::Layer,
            sandwich_norm: false,
            head_norm: false,
            epsilon: Norm::EPSILON,
            activation: FeedKind::GeluTanh,
            bias: true,
            qkv_bias: None,
            tied: true,
            scaled_embedding: false,
            dropout: 0.0,
            attention_dropout: 0.0,
            attention: Attention::scaled_dot(),
            local: None,
        }
    }
}

impl GptConfig {
    /// Width of a head.
    pub fn head_width(&self) -> usize {
        self.head_width.unwrap_or(self.d_model / self.heads.max(1))
    }

    /// Whether it uses nothing that GPT-2 and Llama lack: head norms, sandwich norms, scaled embeddings, local layers.
    pub(crate) fn is_plain(&self) -> bool {
        !self.sandwich_norm && !self.head_norm && !self.scaled_embedding && self.local.is_none()
    }

    /// Whether the query, key and value projections have biases.
    pub fn qkv_bias(&self) -> bool {
        self.qkv_bias.unwrap_or(self.bias)
    }

    /// Number of key/value heads.
    pub fn key_heads(&self) -> usize {
        self.key_heads.unwrap_or(self.heads)
    }
}

/// A decoder-only model: handles to its parameters.
#[derive(Clone, Debug)]
pub struct Gpt {
    tokens: Embedding,
    output: Param,
    layers: Vec<Block>,
    norm: Norm,
    dropout: f64,
    rotary: Option<Rotary>,
    most: usize,
}

/// Rotary positions of all layers.
#[derive(Clone, Copy, Debug)]
struct Rotary {
    /// Width of a head.
    width: usize,
    base: f64,
    local: Option<LocalLayers>,
}

/// The angles of some positions, in global and in local layers.
#[derive(Clone, Debug)]
struct LayerAngles<T> {
    global: Angles<T>,
    local: Option<(LocalLayers, Angles<T>)>,
}

impl Rotary {
    fn check(self) -> Result<()> {
        let bases = [Some(self.base), self.local.map(|local| local.rotary_base)];
        let wrong = |base: &f64| !(self.width.is_multiple_of(2) && *base > 0.0 && base.is_finite());
        match bases.into_iter().flatten().find(wrong) {
            Some(base) => Err(Error::invalid(format!(
                "rotary positions cannot turn heads of {} numbers by base {base}",
                self.width
            ))
            .with_hint("the width of a head has to be even, the base above 0")),
            None => Ok(()),
        }
    }

    /// The angles of all layers, from a function of head width and base.
    fn angles<T>(self, make: impl Fn(usize, f64) -> Angles<T>) -> LayerAngles<T> {
        let local = self.local.map(|local| (local, make(self.width, local.rotary_base)));
        LayerAngles { global: make(self.width, self.base), local }
    }
}

impl<T> LayerAngles<T> {
    /// The angles of a layer.
    fn of(&self, layer: usize) -> &Angles<T> {
        match &self.local {
            Some((local, angles)) if local.has(layer) => angles,
            _ => &self.global,
        }
    }
}

/// State of decoding: a cache of keys and values per layer.
#[derive(Clone, Debug)]
pub struct GptState<T: Float> {
    caches: Vec<[Option<KvCache<T>>; 2]>,
    position: usize,
}

impl Gpt {
    /// Adds its parameters: `tokens`, `layers.N`, `norm`, and `lm_head` unless it is tied.
    ///
    /// # Errors
    /// If heads and widths do not fit together, or the attention needs data that a layer does not have.
    pub fn new<T: Float>(at: &mut Builder<'_, T>, config: &GptConfig, vocabulary: usize) -> Result<Self> {
        let GptConfig { d_model, ffn_dim, heads, layers, positions, max_positions, dropout, .. } = *config;
        if let Some(LocalLayers { window, period, .. }) = config.local
            && (window == 0 || period == 0)
        {
            let what = format!("`local` has a window of {window} tokens and a period of {period} layers");
            return Err(Error::invalid(what).with_hint("both have to be at least 1"));
        }
        let rotary = (positions == PositionKind::Rotary).then(|| Rotary {
            width: config.head_width(),
            base: config.rotary_base,
            local: config.local,
        });
        rotary.map_or(Ok(()), Rotary::check)?;
        let mut tokens = Embedding::new(&mut at.at("tokens"), vocabulary, d_model, positions, max_positions);
        if !config.scaled_embedding {
            tokens = tokens.unscaled();
        }
        let mut attention = config.attention.clone();
        let mask = std::mem::replace(&mut attention.mask, Mask::causal());
        if mask != Mask::Full {
            attention.mask = Mask::causal() & mask;
        }
        let linear = matches!(attention.score, qkv::Score::Linear(_));
        if config.attention_dropout > 0.0 && attention.select == Select::Soft && !linear {
            attention.dropout.get_or_insert(Dropout { p: config.attention_dropout });
        }
        let own = AttentionConfig {
            head_width: config.head_width,
            bias: config.qkv_bias(),
            out_bias: config.bias,
            head_norm: config.head_norm.then_some(config.epsilon),
            ..AttentionConfig::new(attention, Heads { query: heads, key: config.key_heads() })
        };
        let block = BlockConfig {
            feed: config.activation,
            feed_bias: config.bias,
            norm: if config.sandwich_norm { NormPlace::Both } else { NormPlace::Pre },
            norm_kind: config.norm,
            epsilon: config.epsilon,
            dropout,
            ..BlockConfig::new(d_model, ffn_dim, own)
        };
        let mut local_block = block.clone();
        if let Some(LocalLayers { window, .. }) = config.local {
            let mask = std::mem::replace(&mut local_block.own.attention.mask, Mask::causal());
            local_block.own.attention.mask = mask & Mask::window(window - 1, 0);
        }
        let layers = (0..layers).map(|layer| {
            let block = if config.local.is_some_and(|local| local.has(layer)) { &local_block } else { &block };
            Ok(Block::new(&mut at.at(&format!("layers.{layer}")), block)?)
        });
        let layers = layers.collect::<Result<_>>()?;
        let norm = Norm::new(&mut at.at("norm"), d_model, config.norm, config.epsilon);
        let output = match config.tied {
            true => tokens.weight,
            false => Linear::new(&mut at.at("lm_head"), d_model, vocabulary, false).weight,
        };
        Ok(Gpt { tokens, output, layers, norm, dropout, rotary, most: max_positions })
    }

    /// The output projection, `[V, C]`.
    pub fn output(&self) -> Param {
        self.output
    }

    pub(crate) fn layers(&self) -> usize {
        self.layers.len()
    }

    /// The longest sequence it accepts.
    pub fn max_len(&self) -> usize {
        self.most
    }

    /// The angles of rows at these positions.
    fn angles<T: Float>(&self, places: &[usize]) -> Option<LayerAngles<T>> {
        self.rotary.map(|rotary| rotary.angles(|width, base| Angles::at(width, base, places)))
    }

    /// Hidden states of all positions, `[B, N, C]`; only of the tape's own ones if it [shares](Tape::over) sequences.
    ///
    /// # Errors
    /// If `qkv` refuses an attention call.
    pub fn forward<T: Float>(&self, tape: &mut Tape<'_, T>, input: &Rows) -> Result<Var<T>> {
        let places = tape.places(input.length)?;
        let ids = tape.own(&input.ids, input.length);
        let x = self.tokens.forward_places(tape, &ids, &places);
        let angles = self.angles(&places);
        let mut x = tape.dropout(x, self.dropout);
        for (at, layer) in self.layers.iter().enumerate() {
            x = layer.forward(tape, x, input.ragged(), angles.as_ref().map(|angles| angles.of(at)), None)?;
        }
        Ok(self.norm.forward(tape, &x))
    }

    /// Hidden states of packed sequences, one after the other in one row, `[1, T, C]`. Positions restart with each
    /// sequence, and attention stays within it.
    ///
    /// # Errors
    /// If `qkv` refuses an attention call.
    pub fn forward_packed<T: Float>(&self, tape: &mut Tape<'_, T>, ids: &[u32], lengths: &[usize]) -> Result<Var<T>> {
        if let Some(length) = lengths.iter().find(|&&length| length > self.most) {
            let what = format!("{length} tokens are more than the {} that the model takes", self.most);
            return Err(Error::invalid(what));
        }
        let places: Vec<usize> = lengths.iter().flat_map(|&length| 0..length).collect();
        tape.places(ids.len())?;
        let (ids, places) = (tape.own(ids, ids.len()), tape.own(&places, ids.len()));
        let numbered = lengths.iter().enumerate();
        let segments: Arc<[i32]> = numbered.flat_map(|(at, &length)| std::iter::repeat_n(at as i32, length)).collect();
        let positions: Vec<u32> = places.iter().map(|&place| place as u32).collect();
        let x = self.tokens.forward_at(tape, &ids, &positions);
        let angles = self.angles(&places);
        let mut x = tape.dropout(x, self.dropout);
        for (at, layer) in self.layers.iter().enumerate() {
            x = layer.forward_segments(tape, x, &segments, angles.as_ref().map(|angles| angles.of(at)))?;
        }
        Ok(self.norm.forward(tape, &x))
    }

    /// State before the first token of `batch` sequences.
    ///
    /// # Errors
    /// If `qkv` refuses an attention call.
    pub fn start<T: Float>(&self, tape: &mut Tape<'_, T>, batch: usize) -> Result<GptState<T>> {
        let caches = self.layers.iter().map(|layer| layer.caches(tape, batch, None));
        Ok(GptState { caches: caches.collect::<qkv::Result<_>>()?, position: 0 })
    }

    /// Hidden states of `new` more tokens per sequence, `ids [B, new]`: `[B, new, C]`.
    ///
    /// # Errors
    /// If the sequence becomes longer than the model accepts.
    pub fn step<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        ids: &[u32],
        new: usize,
        state: &mut GptState<T>,
    ) -> Result<Var<T>> {
        let end = state.position.saturating_add(new);
        if end > self.most {
            return Err(Error::invalid(format!("{end} tokens are more than the {} that the model takes", self.most)));
        }
        let angles = self.angles(&(state.position..end).collect::<Vec<_>>());
        let mut x = self.tokens.forward(tape, ids, new, state.position);
        for (at, (layer, caches)) in self.layers.iter().zip(&mut state.caches).enumerate() {
            x = layer.step(tape, x, caches, None, angles.as_ref().map(|angles| angles.of(at)))?;
        }
        state.position = end;
        Ok(self.norm.forward(tape, &x))
    }

    /// Hidden states of the next token of several sequences, `[B, 1, C]`. Each sequence has its own state, of any
    /// length, and its result does not depend on the others.
    ///
    /// # Errors
    /// If a sequence becomes longer than the model accepts.
    pub fn step_each<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        ids: &[u32],
        states: &mut [&mut GptState<T>],
    ) -> Result<Var<T>> {
        let places: Vec<usize> = states.iter().map(|state| state.position).collect();
        if places.iter().any(|&place| place >= self.most) {
            return Err(Error::invalid(format!("a text has more than the {} tokens that the model takes", self.most)));
        }
        let positions: Vec<u32> = places.iter().map(|&place| place as u32).collect();
        let x = self.tokens.forward_at(tape, ids, &positions); // [1, B, C]
        let width = x.value().width();
        let mut x = x.reshaped(&[ids.len(), 1, width]);
        let angles = self.angles(&places);
        for (at, layer) in self.layers.iter().enumerate() {
            let caches = states.iter_mut().map(|state| state.caches[at][0].as_mut().expect("made by `start`"));
            x = layer.step_each(
                tape,
                x,
                &mut caches.collect::<Vec<_>>(),
                angles.as_ref().map(|angles| angles.of(at)),
            )?;
        }
        states.iter_mut().for_each(|state| state.position += 1);
        Ok(self.norm.forward(tape, &x))
    }
}

/// Caches of sequences whose positions are counted on a device, and the angles of all positions.
#[derive(Clone, Debug)]
pub struct CountedState<T: Float> {
    batch: DecodeBatch,
    caches: Vec<[Option<KvCache<T>>; 2]>,
    angles: Option<LayerAngles<T>>,
}

impl<T: Float> CountedState<T> {
    /// The sequences.
    pub fn batch(&self) -> &DecodeBatch {
        &self.batch
    }

    /// Copies the cache of the first `tokens` tokens of a sequence of another state.
    ///
    /// # Panics
    /// If that cache is not on the device or has fewer tokens, or there is not enough room.
    pub fn put(&mut self, sequence: usize, state: &GptState<T>, from: usize, tokens: usize) {
        for (to, cache) in self.caches.iter_mut().flatten().zip(state.caches.iter().flatten()) {
            if let (Some(to), Some(cache)) = (to, cache) {
                to.put(sequence, cache, from, tokens);
            }
        }
    }
}

impl Gpt {
    /// Whether a GPU can decode it, which it cannot if any attention runs only on the CPU.
    pub fn runs_on_gpu(&self) -> bool {
        self.layers.iter().all(Block::runs_on_gpu)
    }

    /// Empty caches for sequences whose positions are counted on a device.
    pub fn start_counted<T: Float>(&self, operations: &Operations, batch: DecodeBatch) -> CountedState<T> {
        let caches = self.layers.iter().map(|layer| [Some(layer.counted_cache(operations, &batch)), None]).collect();
        let counted = |width, base| Angles::counted(width, base, operations, batch.room());
        let angles = self.rotary.map(|rotary| rotary.angles(counted));
        CountedState { batch, caches, angles }
    }

    /// Hidden states of the next token of each sequence, `[B, 1, C]`, with the same kernel launches for every token.
    ///
    /// # Errors
    /// If `qkv` refuses an attention call.
    pub fn step_counted<T: Float>(&self, tape: &mut Tape<'_, T>, state: &mut CountedState<T>) -> Result<Var<T>> {
        let mut x = self.tokens.forward_counted(tape, &state.batch);
        for (at, (layer, caches)) in self.layers.iter().zip(&mut state.caches).enumerate() {
            x = layer.step(tape, x, caches, None, state.angles.as_ref().map(|angles| angles.of(at)))?;
        }
        Ok(self.norm.forward(tape, &x))
    }
}

impl<T: Float> GptState<T> {
    /// Number of tokens so far.
    pub fn len(&self) -> usize {
        self.position
    }

    /// Whether there are none yet.
    pub fn is_empty(&self) -> bool {
        self.position == 0
    }

    /// Reorders the sequences; one may be taken several times.
    pub fn select(&mut self, sequences: &[usize]) {
        for cache in self.caches.iter_mut().flatten().flatten() {
            cache.select(sequences);
        }
    }
}
