//! Image to text: an image encoder, and a decoder that attends to its places as it generates text. With a GRU and
//! additive attention this is the model of Show, Attend and Tell (Xu et al. 2015, arXiv:1502.03044); with a Transformer
//! decoder, that of image-to-LaTeX and of most captioners since.

mod reader;

pub(crate) use reader::inspect;
pub use reader::{Describer, Description, LookedAt};

use crate::Result;
use crate::image_encoder::{ImageEncoderConfig, Widths};
use crate::recurrent::RecurrentConfig;
use crate::sizes::check_sizes;
use crate::transformer::{TransformerConfig, is_usual};
use qkv::Attention;
use qkv_nn::layers::{FeedKind, Norm, PositionKind};
use serde::{Deserialize, Serialize};

/// The decoder that generates the text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DecoderKind {
    /// Transformer layers, each with cross-attention to the image.
    #[default]
    Transformer,
    /// A GRU that attends to the image before each token.
    Gru,
}

/// Sizes and settings of a model that describes images.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DescribeConfig {
    /// The image encoder.
    pub image: ImageEncoderConfig,
    /// Model width.
    pub d_model: usize,
    /// Inner width of the feed-forward layers.
    pub ffn_dim: usize,
    /// Number of heads.
    pub heads: usize,
    /// The decoder that generates the text.
    pub decoder: DecoderKind,
    /// Number of decoder layers.
    pub decoder_layers: usize,
    /// The longest text in tokens.
    pub max_positions: usize,
    /// Attention of the decoder to the image; by default scaled dot-product in a Transformer, additive in a GRU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attention: Option<Attention>,
    /// Dropout of embeddings and of each residual branch.
    pub dropout: f64,
    /// Dropout of attention weights.
    pub attention_dropout: f64,
    /// Weight of the mean attention entropy in the loss.
    pub entropy: f64,
    /// Position encoding of the text, in a Transformer decoder.
    #[serde(skip_serializing_if = "is_sinusoidal")]
    pub positions: PositionKind,
    /// Whether the embedding of the text and the output projection share a matrix.
    #[serde(skip_serializing_if = "Clone::clone")]
    pub tied: bool,
    /// `ε` of the norms.
    #[serde(skip_serializing_if = "is_usual")]
    pub epsilon: f64,
    /// Whether the embeddings of places and tokens are normalized before the first layer.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub embedding_norm: bool,
    /// Whether the output projection has a bias.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub output_bias: bool,
    /// Activation of the feed-forward layers of a Transformer decoder.
    #[serde(skip_serializing_if = "is_gelu")]
    pub activation: FeedKind,
    /// Width of the heads of a Transformer decoder, if it is not the model width over the number of heads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub head_width: Option<usize>,
    /// Whether its query, key and value projections have biases.
    #[serde(skip_serializing_if = "Clone::clone")]
    pub attention_bias: bool,
    /// Whether the output of each of its attentions is gated: attention on attention (Huang et al. 2019,
    /// arXiv:1908.06954).
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub gated_attention: bool,
}

fn is_gelu(activation: &FeedKind) -> bool {
    *activation == FeedKind::Gelu
}

fn is_sinusoidal(positions: &PositionKind) -> bool {
    *positions == PositionKind::Sinusoidal
}

impl Default for DescribeConfig {
    fn default() -> Self {
        DescribeConfig {
            image: ImageEncoderConfig::default(),
            d_model: 128,
            ffn_dim: 512,
            heads: 4,
            decoder: DecoderKind::Transformer,
            decoder_layers: 2,
            max_positions: 256,
            attention: None,
            dropout: 0.1,
            attention_dropout: 0.0,
            entropy: 0.0,
            positions: PositionKind::Sinusoidal,
            tied: true,
            epsilon: Norm::EPSILON,
            embedding_norm: false,
            output_bias: false,
            activation: FeedKind::Gelu,
            head_width: None,
            attention_bias: true,
            gated_attention: false,
        }
    }
}

impl DescribeConfig {
    pub(crate) fn widths(&self) -> Widths {
        let DescribeConfig { d_model, ffn_dim, heads, dropout, attention_dropout, epsilon, embedding_norm, .. } = *self;
        Widths { d_model, ffn_dim, heads, dropout, attention_dropout, epsilon, embedding_norm }
    }

    /// Refuses sizes that are zero or that no machine could hold.
    pub(crate) fn check(&self) -> Result<()> {
        self.image.check()?;
        self.widths().check()?;
        check_sizes(&[
            ("decoder_layers", self.decoder_layers, 1 << 8),
            ("max_positions", self.max_positions, 1 << 16),
            ("head_width", self.head_width.unwrap_or(1), 1 << 12),
        ])
    }

    /// The configuration of a Transformer decoder.
    pub(crate) fn transformer(&self) -> TransformerConfig {
        TransformerConfig {
            d_model: self.d_model,
            ffn_dim: self.ffn_dim,
            heads: self.heads,
            encoder_layers: 0,
            decoder_layers: self.decoder_layers,
            positions: self.positions,
            max_positions: self.max_positions,
            activation: self.activation,
            dropout: self.dropout,
            attention_dropout: self.attention_dropout,
            entropy: self.entropy,
            tied: self.tied,
            epsilon: self.epsilon,
            embedding_norm: self.embedding_norm,
            output_bias: self.output_bias,
            head_width: self.head_width,
            attention_bias: self.attention_bias,
            gated_attention: self.gated_attention,
            cross_attention: self.attention.clone().unwrap_or_else(Attention::scaled_dot),
            ..TransformerConfig::default()
        }
    }

    /// The configuration of a GRU decoder.
    pub(crate) fn recurrent(&self) -> RecurrentConfig {
        RecurrentConfig {
            d_model: self.d_model,
            hidden: self.d_model,
            layers: self.decoder_layers,
            attention: self.attention.clone().unwrap_or_else(Attention::additive),
            attention_width: self.d_model,
            dropout: self.dropout,
            entropy: self.entropy,
            tied: self.tied,
            ..RecurrentConfig::default()
        }
    }
}
