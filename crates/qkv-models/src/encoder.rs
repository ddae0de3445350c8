//! Encoder-only Transformer (BERT; Devlin et al. 2018, arXiv:1810.04805): token, position and segment embeddings are
//! summed and normalized, layers are post-norm. A head on top predicts a class per text, a tag per token or the span of
//! an answer; without one, texts are embedded as vectors.

mod heads;
mod packed;
mod reader;

pub use heads::Answer;
pub(crate) use heads::{Example, Examples, Label, highest};
use packed::Packed;
pub use reader::{Encoder, Pooling};
pub(crate) use reader::{inspect, settings};

use crate::batch::Rows;
use crate::sizes::check_sizes;
use crate::{Error, Result};
use qkv::{Attention, Dropout, Select};
use qkv_nn::layers::{
    AttentionConfig, Block, BlockConfig, Builder, Embedding, FeedKind, Linear, Norm, NormKind, NormPlace, PositionKind,
};
use qkv_nn::{Activation, Float, Heads, Init, Param, Positions, Tape, Var};
use serde::{Deserialize, Serialize};

/// The head of an encoder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Head {
    /// None: hidden states and sentence vectors only.
    #[default]
    None,
    /// A class per text.
    Classes,
    /// A tag per token.
    Tags,
    /// The first and last token of an answer.
    Span,
    /// Masked tokens, as in the pretraining of BERT.
    Masked,
}

/// The head that predicts masked tokens: a linear layer and a norm, then the tied token embedding and a bias.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MaskedHead {
    pub transform: Linear,
    pub norm: Norm,
    pub bias: Param,
}

/// Sizes and settings of an encoder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EncoderConfig {
    /// Vocabulary size.
    pub vocab_size: usize,
    /// Model width.
    pub d_model: usize,
    /// Inner width of the feed-forward layers.
    pub ffn_dim: usize,
    /// Number of heads.
    pub heads: usize,
    /// Number of layers.
    pub layers: usize,
    /// The longest sequence, special tokens included.
    pub max_positions: usize,
    /// Number of segments: texts in one sequence.
    pub segments: usize,
    /// Activation of the feed-forward layers.
    pub activation: FeedKind,
    /// The `ε` of the layer norms.
    pub epsilon: f64,
    /// Dropout of embeddings, of each residual branch, and before the head.
    pub dropout: f64,
    /// Dropout of attention weights.
    pub attention_dropout: f64,
    /// Pads shorter texts.
    pub pad_token_id: u32,
    /// Whether the first token's row passes through a tanh layer before classification, as in BERT's pooler.
    pub pooler: bool,
    /// The head.
    pub head: Head,
    /// Names of the classes or tags.
    pub labels: Vec<String>,
    /// Self-attention.
    pub attention: Attention,
}

impl Default for EncoderConfig {
    fn default() -> Self {
        EncoderConfig {
            vocab_size: 0,
            d_model: 256,
            ffn_dim: 1024,
            heads: 4,
            layers: 4,
            max_positions: 512,
            segments: 2,
            activation: FeedKind::Gelu,
            epsilon: 1e-12,
            dropout: 0.1,
            attention_dropout: 0.1,
            pad_token_id: 0,
            pooler: true,
            head: Head::None,
            labels: Vec::new(),
            attention: Attention::scaled_dot(),
        }
    }
}

impl EncoderConfig {
    /// Refuses sizes that are zero or that no machine could hold.
    pub(crate) fn check(&self) -> Result<()> {
        let sizes = [
            ("vocab_size", self.vocab_size, 1 << 24),
            ("d_model", self.d_model, 1 << 16),
            ("ffn_dim", self.ffn_dim, 1 << 18),
            ("heads", self.heads, 1 << 10),
            ("layers", self.layers, 1 << 10),
            ("max_positions", self.max_positions, 1 << 22),
            ("segments", self.segments, 1 << 10),
        ];
        check_sizes(&sizes)?;
        for (name, found) in [("dropout", self.dropout), ("attention_dropout", self.attention_dropout)] {
            if !(0.0..1.0).contains(&found) {
                return Err(Error::invalid(format!("`{name}` is {found}, expected at least 0 and less than 1")));
            }
        }
        if matches!(self.head, Head::Classes | Head::Tags) && self.labels.is_empty() {
            return Err(Error::invalid("there are no labels to choose from"));
        }
        Ok(())
    }

    /// A lower bound on the number of parameters.
    pub(crate) fn least(&self) -> usize {
        let layers = self.layers.saturating_mul(self.d_model).saturating_mul(self.d_model);
        self.vocab_size.saturating_mul(self.d_model).saturating_add(layers)
    }
}

/// An encoder: handles to its parameters.
#[derive(Clone, Debug)]
pub(crate) struct Bert {
    tokens: Embedding,
    segments: Param,
    norm: Norm,
    layers: Vec<Block>,
    pooler: Option<Linear>,
    head: Option<Linear>,
    masked: Option<MaskedHead>,
    kind: Head,
    dropout: f64,
}

impl Bert {
    /// Adds its parameters: `tokens`, `segments`, `embed_norm`, `layers.N`, `pooler`, `head` or `masked`.
    pub fn new<T: Float>(at: &mut Builder<'_, T>, config: &EncoderConfig) -> Result<Self> {
        config.check()?;
        let EncoderConfig { d_model, ffn_dim, heads, dropout, epsilon, .. } = *config;
        let positions = PositionKind::Learned;
        let tokens = Embedding::new(&mut at.at("tokens"), config.vocab_size, d_model, positions, config.max_positions)
            .unscaled();
        let segments = at.add("segments.weight", &[config.segments, d_model], Init::Normal(0.02));
        let norm = Norm::new(&mut at.at("embed_norm"), d_model, NormKind::Layer, epsilon);
        let mut attention = config.attention.clone();
        let linear = matches!(attention.score, qkv::Score::Linear(_));
        if config.attention_dropout > 0.0 && attention.select == Select::Soft && !linear {
            attention.dropout.get_or_insert(Dropout { p: config.attention_dropout });
        }
        let block = BlockConfig {
            feed: config.activation,
            norm: NormPlace::Post,
            epsilon,
            dropout,
            ..BlockConfig::new(d_model, ffn_dim, AttentionConfig::new(attention, Heads { query: heads, key: heads }))
        };
        let layers = (0..config.layers).map(|layer| Ok(Block::new(&mut at.at(&format!("layers.{layer}")), &block)?));
        let layers = layers.collect::<Result<_>>()?;
        let pooler = config.pooler.then(|| Linear::new(&mut at.at("pooler"), d_model, d_model, true));
        let outputs = match config.head {
            Head::None | Head::Masked => 0,
            Head::Classes | Head::Tags => config.labels.len(),
            Head::Span => 2,
        };
        let head = (outputs > 0).then(|| Linear::new(&mut at.at("head"), d_model, outputs, true));
        let masked = (config.head == Head::Masked).then(|| {
            let at = &mut at.at("masked");
            MaskedHead {
                transform: Linear::new(&mut at.at("transform"), d_model, d_model, true),
                norm: Norm::new(&mut at.at("norm"), d_model, NormKind::Layer, epsilon),
                bias: at.add("bias", &[config.vocab_size], Init::Zeros),
            }
        });
        Ok(Bert { tokens, segments, norm, layers, pooler, head, masked, kind: config.head, dropout })
    }

    /// The longest sequence it accepts.
    pub fn max_len(&self) -> usize {
        self.tokens.max_len()
    }

    /// Hidden states of padded texts, `[B, N, C]`; `segments [B, N]` has the segment of each token.
    pub fn forward<T: Float>(&self, tape: &mut Tape<'_, T>, rows: &Rows, segments: &[u32]) -> Result<Var<T>> {
        let x = self.tokens.forward(tape, &rows.ids, rows.length, 0);
        let texts = tape.embedding(segments, rows.length, self.segments, 1.0, Positions::None, 0);
        self.through(tape, &x, texts, |tape, layer, x| layer.forward(tape, x, rows.ragged(), None, None))
    }

    /// Hidden states of packed texts, `[1, T, C]`.
    pub fn packed<T: Float>(&self, tape: &mut Tape<'_, T>, texts: &Packed) -> Result<Var<T>> {
        let x = self.tokens.forward_at(tape, &texts.ids, &texts.places());
        let segments = tape.embedding(&texts.segments, texts.ids.len(), self.segments, 1.0, Positions::None, 0);
        self.through(tape, &x, segments, |tape, layer, x| layer.forward_packed(tape, x, &texts.lengths))
    }

    fn through<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        x: &Var<T>,
        segments: Var<T>,
        apply: impl Fn(&mut Tape<'_, T>, &Block, Var<T>) -> qkv::Result<Var<T>>,
    ) -> Result<Var<T>> {
        let x = tape.add(x, segments);
        let x = self.norm.forward(tape, &x);
        let mut x = tape.dropout(x, self.dropout);
        for layer in &self.layers {
            x = apply(tape, layer, x)?;
        }
        Ok(x)
    }

    /// Input of the head: the pooled first row of each text, `[B, 1, C]`, or all rows, `[B, N, C]`.
    pub fn looked_at<T: Float>(&self, tape: &mut Tape<'_, T>, rows: &Rows, segments: &[u32]) -> Result<Var<T>> {
        let x = self.forward(tape, rows, segments)?;
        let x = match self.kind {
            Head::Classes => {
                let first = tape.step(&x, 0);
                self.pooled(tape, first)
            }
            // BERT's head for masked tokens has its own linear layer, and no dropout before it.
            Head::Masked => return Ok(x),
            _ => x,
        };
        Ok(tape.dropout(x, self.dropout))
    }

    /// Logits of packed texts: a row per text, `[B, 1, K]`, or per token, `[1, T, K]`; `None` without a head.
    pub fn scores<T: Float>(&self, tape: &mut Tape<'_, T>, texts: &Packed) -> Result<Option<Var<T>>> {
        let Some(head) = self.head else { return Ok(None) };
        let x = self.packed(tape, texts)?;
        let x = match self.kind {
            Head::Classes => {
                let first = texts.firsts(tape, &x);
                self.pooled(tape, first)
            }
            _ => x,
        };
        Ok(Some(head.forward(tape, &x)))
    }

    /// Applies the pooler, if there is one.
    fn pooled<T: Float>(&self, tape: &mut Tape<'_, T>, x: Var<T>) -> Var<T> {
        match self.pooler {
            Some(pooler) => pooler.activated(tape, &x, Activation::Tanh, 0.0),
            None => x,
        }
    }

    /// The head that predicts masked tokens, and the token embedding.
    pub fn masked(&self) -> Option<(MaskedHead, Param)> {
        self.masked.map(|head| (head, self.tokens.weight))
    }

    /// The linear layer of the head.
    pub fn head(&self) -> Option<Linear> {
        self.head
    }
}
