//! Encoder–decoder Transformer (Vaswani et al. 2017, arXiv:1706.03762), with any attention of the library for each of
//! its three attentions.

use crate::Result;
use crate::batch::Rows;
use qkv::{Attention, Dropout, Mask, Select};
use qkv_cuda::operations::{Array, DecodeBatch, Kind};
use qkv_nn::layers::{
    AttentionConfig, Block, BlockConfig, Builder, Embedding, FeedKind, KvCache, Linear, Norm, NormKind, NormPlace,
    PositionKind,
};
use qkv_nn::{Float, Heads, Init, Param, Tape, Var};
use serde::{Deserialize, Serialize};

/// Sizes and settings of a Transformer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TransformerConfig {
    /// Model width.
    pub d_model: usize,
    /// Inner width of the feed-forward layers.
    pub ffn_dim: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key/value heads, if fewer (grouped-query attention).
    pub key_heads: Option<usize>,
    /// Number of encoder layers.
    pub encoder_layers: usize,
    /// Number of decoder layers.
    pub decoder_layers: usize,
    /// Pre-norm or post-norm.
    pub norm: NormPlace,
    /// Position encoding.
    pub positions: PositionKind,
    /// The longest sequence.
    pub max_positions: usize,
    /// Whether source embedding, target embedding and output projection share a matrix.
    pub tied: bool,
    /// Activation of the feed-forward layers.
    pub activation: FeedKind,
    /// Dropout of embeddings and of each residual branch.
    pub dropout: f64,
    /// Dropout of attention weights.
    pub attention_dropout: f64,
    /// Dropout inside the feed-forward layers.
    pub ffn_dropout: f64,
    /// Weight of the mean attention entropy in the loss: positive values concentrate attention, negative ones spread
    /// it.
    pub entropy: f64,
    /// Self-attention of the encoder.
    pub encoder_attention: Attention,
    /// Self-attention of the decoder; its mask is combined with a causal one.
    pub decoder_attention: Attention,
    /// Attention from the decoder to the encoder.
    pub cross_attention: Attention,
    /// `ε` of the norms.
    #[serde(skip_serializing_if = "is_usual")]
    pub epsilon: f64,
    /// Whether embeddings go through a norm before the first layer.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub embedding_norm: bool,
    /// Whether the output projection has a bias.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub output_bias: bool,
    /// Width of a head, if it is not the model's width divided by the number of heads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub head_width: Option<usize>,
    /// Whether the projections of queries, keys and values have biases.
    #[serde(skip_serializing_if = "Clone::clone")]
    pub attention_bias: bool,
    /// Whether the output of each attention has a gate: attention on attention (Huang et al. 2019, arXiv:1908.06954).
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub gated_attention: bool,
}

/// Whether an `ε` is the default.
pub(crate) fn is_usual(epsilon: &f64) -> bool {
    *epsilon == Norm::EPSILON
}

impl Default for TransformerConfig {
    fn default() -> Self {
        TransformerConfig {
            d_model: 256,
            ffn_dim: 1024,
            heads: 4,
            key_heads: None,
            encoder_layers: 3,
            decoder_layers: 3,
            norm: NormPlace::Pre,
            positions: PositionKind::Sinusoidal,
            max_positions: 1024,
            tied: true,
            activation: FeedKind::Relu,
            dropout: 0.1,
            attention_dropout: 0.0,
            ffn_dropout: 0.0,
            entropy: 0.0,
            encoder_attention: Attention::scaled_dot(),
            decoder_attention: Attention::scaled_dot(),
            cross_attention: Attention::scaled_dot(),
            epsilon: Norm::EPSILON,
            embedding_norm: false,
            output_bias: false,
            head_width: None,
            attention_bias: true,
            gated_attention: false,
        }
    }
}

/// A Transformer. It holds handles to its parameters.
#[derive(Clone, Debug)]
pub struct Transformer {
    source: Embedding,
    target: Embedding,
    output: Param,
    output_bias: Option<Param>,
    encoder_embedding_norm: Option<Norm>,
    decoder_embedding_norm: Option<Norm>,
    encoder: Vec<Block>,
    encoder_norm: Option<Norm>,
    decoder: Vec<Block>,
    decoder_norm: Option<Norm>,
    dropout: f64,
}

/// The capacity of a beam, in tokens, is a multiple of this.
const ROOM_STEP: usize = 16;

/// State of decoding: caches of keys and values per layer.
#[derive(Clone, Debug)]
pub struct TransformerState<T: Float> {
    caches: Vec<[Option<KvCache<T>>; 2]>,
    lengths: Option<Vec<usize>>,
    position: usize,
}

/// Applies a norm to `x`, if there is one.
pub(crate) fn normalized<T: Float>(tape: &mut Tape<'_, T>, norm: Option<Norm>, x: Var<T>) -> Var<T> {
    match norm {
        Some(norm) => norm.forward(tape, &x),
        None => x,
    }
}

impl Transformer {
    /// Adds its parameters.
    ///
    /// # Errors
    /// If heads and widths are inconsistent, or an attention needs data that a layer does not have.
    pub fn new<T: Float>(at: &mut Builder<'_, T>, config: &TransformerConfig, vocabulary: usize) -> Result<Self> {
        let TransformerConfig { d_model, ffn_dim, heads, key_heads, norm, positions, max_positions, dropout, .. } =
            *config;
        let table = |at: &mut Builder<'_, T>, name: &str| {
            Embedding::new(&mut at.at(name), vocabulary, d_model, positions, max_positions)
        };
        let (source, target, output) = if config.tied {
            let shared = table(at, "shared");
            (shared.clone(), shared.clone(), shared.weight)
        } else {
            // Without an encoder, no source is read.
            let source = (config.encoder_layers > 0).then(|| table(at, "encoder.embed_tokens"));
            let target = table(at, "decoder.embed_tokens");
            (
                source.unwrap_or_else(|| target.clone()),
                target,
                Linear::new(&mut at.at("lm_head"), d_model, vocabulary, false).weight,
            )
        };
        at.round_finely(output);
        let output_bias = config.output_bias.then(|| at.add("lm_head.bias", &[vocabulary], Init::Zeros));
        let mut of_embeddings = |side: &str| {
            let name = format!("{side}.layernorm_embedding");
            config.embedding_norm.then(|| Norm::new(&mut at.at(&name), d_model, NormKind::Layer, config.epsilon))
        };
        let encoder_embedding_norm = if config.encoder_layers > 0 { of_embeddings("encoder") } else { None };
        let decoder_embedding_norm = of_embeddings("decoder");
        let attention = |attention: &Attention| {
            let mut attention = attention.clone();
            let drops = config.attention_dropout > 0.0 && attention.select == Select::Soft;
            let linear = matches!(attention.score, qkv::Score::Linear(_));
            if drops && !linear && attention.dropout.is_none() {
                attention.dropout = Some(Dropout { p: config.attention_dropout });
            }
            let heads = Heads { query: heads, key: key_heads.unwrap_or(heads) };
            let entropy = if attention.select == Select::Soft && !linear { config.entropy } else { 0.0 };
            AttentionConfig {
                entropy,
                head_width: config.head_width,
                bias: config.attention_bias,
                gated: config.gated_attention,
                ..AttentionConfig::new(attention, heads)
            }
        };
        let causal = |attention: &Attention| {
            let mask =
                if attention.mask == Mask::Full { Mask::causal() } else { Mask::causal() & attention.mask.clone() };
            attention.clone().mask(mask)
        };
        let block = |own, cross| BlockConfig {
            feed: config.activation,
            norm,
            dropout,
            inner_dropout: config.ffn_dropout,
            epsilon: config.epsilon,
            cross,
            ..BlockConfig::new(d_model, ffn_dim, own)
        };
        let encoder_block = block(attention(&config.encoder_attention), None);
        let decoder_own = attention(&causal(&config.decoder_attention));
        let decoder_block = block(decoder_own, Some(attention(&config.cross_attention)));
        let mut blocks = |side: &str, layers: usize, config: &BlockConfig| -> Result<Vec<Block>> {
            (0..layers).map(|layer| Ok(Block::new(&mut at.at(&format!("{side}.layers.{layer}")), config)?)).collect()
        };
        let encoder = blocks("encoder", config.encoder_layers, &encoder_block)?;
        let decoder = blocks("decoder", config.decoder_layers, &decoder_block)?;
        let mut last = |name: &str| {
            (norm != NormPlace::Post).then(|| Norm::new(&mut at.at(name), d_model, NormKind::Layer, config.epsilon))
        };
        let (encoder_norm, decoder_norm) = (last("encoder.layer_norm"), last("decoder.layer_norm"));
        Ok(Transformer {
            source,
            target,
            output,
            output_bias,
            encoder_embedding_norm,
            decoder_embedding_norm,
            encoder,
            encoder_norm,
            decoder,
            decoder_norm,
            dropout,
        })
    }

    /// The output projection, `[V, C]`.
    pub fn output(&self) -> Param {
        self.output
    }

    /// Its bias, `[V]`.
    pub fn output_bias(&self) -> Option<Param> {
        self.output_bias
    }

    pub(crate) fn encoder_layers(&self) -> usize {
        self.encoder.len()
    }

    pub(crate) fn decoder_layers(&self) -> usize {
        self.decoder.len()
    }

    /// The longest sequence.
    pub fn max_len(&self) -> usize {
        self.target.max_len()
    }

    /// Encodes the source, `[B, S, C]`.
    ///
    /// # Errors
    /// Errors from `qkv`.
    pub fn encode<T: Float>(&self, tape: &mut Tape<'_, T>, source: &Rows) -> Result<Var<T>> {
        let x = self.source.forward(tape, &source.ids, source.length, 0);
        let x = normalized(tape, self.encoder_embedding_norm, x);
        let mut x = tape.dropout(x, self.dropout);
        for block in &self.encoder {
            x = block.forward(tape, x, source.ragged(), None, None)?;
        }
        Ok(match &self.encoder_norm {
            Some(norm) => norm.forward(tape, &x),
            None => x,
        })
    }

    /// Hidden states of the decoder at all positions, `[B, N, C]`.
    ///
    /// # Errors
    /// Errors from `qkv`.
    pub fn decode<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        memory: &Var<T>,
        source: &Rows,
        decoder_input: &Rows,
    ) -> Result<Var<T>> {
        let x = self.target.forward(tape, &decoder_input.ids, decoder_input.length, 0);
        let x = normalized(tape, self.decoder_embedding_norm, x);
        let mut x = tape.dropout(x, self.dropout);
        for block in &self.decoder {
            x = block.forward(tape, x, decoder_input.ragged(), None, Some((memory, source.ragged())))?;
        }
        Ok(match &self.decoder_norm {
            Some(norm) => norm.forward(tape, &x),
            None => x,
        })
    }

    /// State before the first step.
    ///
    /// # Errors
    /// Errors from `qkv`.
    pub fn start<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        memory: &Var<T>,
        source: &Rows,
    ) -> Result<TransformerState<T>> {
        let batch = memory.shape()[0];
        let caches = self.decoder.iter().map(|block| block.caches(tape, batch, Some(memory)));
        let caches = caches.collect::<qkv::Result<_>>()?;
        Ok(TransformerState { caches, lengths: source.ragged().map(<[_]>::to_vec), position: 0 })
    }

    /// Hidden states after one more token per sequence, `[B, 1, C]`.
    ///
    /// # Errors
    /// Errors from `qkv`.
    pub fn step<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        last: &[u32],
        state: &mut TransformerState<T>,
    ) -> Result<Var<T>> {
        let x = self.target.forward(tape, last, 1, state.position);
        let mut x = normalized(tape, self.decoder_embedding_norm, x);
        for (block, caches) in self.decoder.iter().zip(&mut state.caches) {
            x = block.step(tape, x, caches, state.lengths.as_deref(), None)?;
        }
        state.position += 1;
        Ok(match &self.decoder_norm {
            Some(norm) => norm.forward(tape, &x),
            None => x,
        })
    }
}

/// State of a search on a device: the beams of a source are consecutive and share its memory, and the device counts
/// their positions.
#[derive(Clone, Debug)]
pub(crate) struct CountedBeams<T: Float> {
    pub batch: DecodeBatch,
    /// The sequence that each beam continues, u32.
    pub parents: Array,
    /// Beams per source.
    beams: usize,
    caches: Vec<[Option<KvCache<T>>; 2]>,
    lengths: Option<Vec<usize>>,
}

impl Transformer {
    /// State before the first step of a search with `beams` beams of at most `tokens` tokens per source; `None` if
    /// there is no device, or it does not support the whole step.
    pub(crate) fn start_counted<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        memory: &Var<T>,
        source: &Rows,
        [beams, tokens]: [usize; 2],
    ) -> Result<Option<CountedBeams<T>>> {
        let Some(operations) = tape.machine().cuda().cloned() else { return Ok(None) };
        if !self.decoder.iter().all(Block::shares_memory_on_gpu) {
            return Ok(None);
        }
        let (sources, room) = (memory.shape()[0], tokens.next_multiple_of(ROOM_STEP).min(self.max_len()));
        let batch = operations.decode_batch(sources * beams, room);
        let zeros = vec![0; sources * beams];
        operations.set_decode_batch(&batch, &zeros, &zeros);
        let parents = operations.zeros(Kind::U32, sources * beams, "beams");
        let lengths = source.ragged().map(<[_]>::to_vec);
        let caches = self.decoder.iter().map(|block| {
            let [_, mut of_memory] = block.caches(tape, sources, Some(memory))?;
            of_memory.iter_mut().for_each(|cache| cache.keep_lengths(lengths.as_deref()));
            Ok([Some(block.counted_cache(&operations, &batch)), of_memory])
        });
        let caches = caches.collect::<qkv::Result<_>>()?;
        Ok(Some(CountedBeams { batch, parents, beams, caches, lengths }))
    }

    /// Hidden states after one more token of each beam, `[B, 1, C]`, from the caches of their parents. The launches are
    /// the same for every token.
    ///
    /// # Errors
    /// Errors from `qkv`.
    pub(crate) fn step_counted<T: Float>(&self, tape: &mut Tape<'_, T>, state: &mut CountedBeams<T>) -> Result<Var<T>> {
        let CountedBeams { batch, parents, beams, caches, lengths } = state;
        // A single beam always continues itself.
        if *beams > 1 {
            tape.reorder(caches.iter().filter_map(|[own, _]| own.as_ref()), parents, batch);
        }
        let x = self.target.forward_counted(tape, batch);
        let mut x = normalized(tape, self.decoder_embedding_norm, x);
        for (block, caches) in self.decoder.iter().zip(caches) {
            x = block.step(tape, x, caches, lengths.as_deref(), None)?;
        }
        Ok(normalized(tape, self.decoder_norm, x))
    }
}

impl<T: Float> TransformerState<T> {
    /// Reorders the sequences. `same_sources` leaves the keys and values of the source in place.
    pub fn select(&mut self, sequences: &[usize], same_sources: bool) {
        for [own, other] in &mut self.caches {
            if let Some(own) = own {
                own.select(sequences);
            }
            if let (Some(other), false) = (other, same_sources) {
                other.select(sequences);
            }
        }
        if let (Some(lengths), false) = (&mut self.lengths, same_sources) {
            *lengths = sequences.iter().map(|&b| lengths[b]).collect();
        }
    }
}
