//! Questions about images: the words of a question attend to each other and to the places of the image; then the
//! question as a whole attends to the image in several hops, each using what the previous one saw (stacked attention,
//! Yang et al. 2015, arXiv:1511.02274). The answer is one of those in the training data.

mod reader;

pub use reader::{ImageAnswer, Vqa};
pub(crate) use reader::{ImageQuestions, inspect};

use crate::batch::Rows;
use crate::image_encoder::{ImageEncoder, ImageEncoderConfig, Widths};
use crate::sizes::check_sizes;
use crate::{Error, Result};
use qkv::Attention;
use qkv_nn::layers::{Block, Builder, Embedding, Linear, Norm, NormKind, PositionKind, RecurrentAttention};
use qkv_nn::{Tape, Tensor, Var};
use serde::{Deserialize, Serialize};

/// Sizes and settings of a model that answers questions about images.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct VqaConfig {
    /// The image encoder.
    pub image: ImageEncoderConfig,
    /// Model width.
    pub d_model: usize,
    /// Inner width of the feed-forward layers.
    pub ffn_dim: usize,
    /// Number of heads.
    pub heads: usize,
    /// Layers over the words of the question.
    pub question_layers: usize,
    /// How many times the question as a whole attends to the image.
    pub hops: usize,
    /// The longest question in tokens.
    pub max_positions: usize,
    /// Dropout of embeddings, of each residual branch, and of the head's input.
    pub dropout: f64,
    /// Dropout of attention weights.
    pub attention_dropout: f64,
    /// The possible answers; in a recipe, they come from the data.
    pub labels: Vec<String>,
}

impl Default for VqaConfig {
    fn default() -> Self {
        VqaConfig {
            image: ImageEncoderConfig::default(),
            d_model: 64,
            ffn_dim: 256,
            heads: 4,
            question_layers: 1,
            hops: 2,
            max_positions: 64,
            dropout: 0.1,
            attention_dropout: 0.0,
            labels: Vec::new(),
        }
    }
}

impl VqaConfig {
    fn widths(&self) -> Widths {
        let VqaConfig { d_model, ffn_dim, heads, dropout, attention_dropout, .. } = *self;
        Widths { d_model, ffn_dim, heads, dropout, attention_dropout, epsilon: Norm::EPSILON, embedding_norm: false }
    }

    /// Rejects sizes that are zero or that no machine could hold.
    pub(crate) fn check(&self) -> Result<()> {
        self.image.check()?;
        self.image.check_places_alone()?;
        self.widths().check()?;
        let sizes = [("hops", self.hops, 1 << 8), ("max_positions", self.max_positions, 1 << 16)];
        check_sizes(&sizes)?;
        if self.question_layers > 1 << 8 {
            let found = self.question_layers;
            return Err(Error::invalid(format!("`question_layers` is {found}, expected at most 256")));
        }
        if self.labels.is_empty() {
            return Err(Error::invalid("there are no answers to choose from"));
        }
        Ok(())
    }
}

/// A model that answers questions about images. It holds handles to its parameters.
#[derive(Clone, Debug)]
pub(crate) struct VqaNetwork {
    image: ImageEncoder,
    tokens: Embedding,
    words: Vec<Block>,
    norm: Norm,
    hops: Vec<RecurrentAttention>,
    head: Linear,
    dropout: f64,
}

impl VqaNetwork {
    /// Adds its parameters: `image`, `tokens`, `layers.N`, `norm`, `hops.N`, `head`.
    pub fn new(at: &mut Builder<'_, f32>, config: &VqaConfig, vocabulary: usize) -> Result<VqaNetwork> {
        config.check()?;
        let d_model = config.d_model;
        let image = ImageEncoder::new(&mut at.at("image"), &config.image, config.widths())?;
        let positions = PositionKind::Sinusoidal;
        let tokens = Embedding::new(&mut at.at("tokens"), vocabulary, d_model, positions, config.max_positions);
        let block = config.widths().block(Attention::scaled_dot(), Some(Attention::scaled_dot()));
        let words =
            (0..config.question_layers).map(|at_| Ok(Block::new(&mut at.at(&format!("layers.{at_}")), &block)?));
        let words = words.collect::<Result<_>>()?;
        let norm = Norm::new(&mut at.at("norm"), d_model, NormKind::Layer, Norm::EPSILON);
        let hop = |hop: usize, at: &mut Builder<'_, f32>| {
            let mut place = at.at(&format!("hops.{hop}"));
            RecurrentAttention::new(&mut place, &Attention::additive(), d_model, d_model, d_model, 0.0)
        };
        let hops = (0..config.hops).map(|at_| hop(at_, at)).collect();
        let head = Linear::new(&mut at.at("head"), d_model, config.labels.len(), true);
        Ok(VqaNetwork { image, tokens, words, norm, hops, head, dropout: config.dropout })
    }

    /// The linear layer of the head.
    pub fn head(&self) -> Linear {
        self.head
    }

    /// Number of layers of the image encoder, layers over words, and hops.
    pub fn depths(&self) -> [usize; 3] {
        [self.image.layers(), self.words.len(), self.hops.len()]
    }

    /// The head's input, `[B, 1, C]`, from pixels `[B, H, W, C]` and questions `[B, N]`.
    pub fn forward(&self, tape: &mut Tape<'_, f32>, pixels: Tensor<f32>, questions: &Rows) -> Result<Var<f32>> {
        let places = self.image.forward(tape, pixels)?; // (B, P, C)
        let x = self.tokens.forward(tape, &questions.ids, questions.length, 0);
        let mut x = tape.dropout(x, self.dropout); // (B, N, C)
        for block in &self.words {
            x = block.forward(tape, x, questions.ragged(), None, Some((&places, None)))?;
        }
        let x = self.norm.forward(tape, &x);
        let mut asked = tape.mean(&x, questions.ragged()); // (B, 1, C)
        for hop in &self.hops {
            let memory = hop.memory(tape, places.clone(), None);
            let seen = hop.forward(tape, &asked, &memory, 0)?;
            asked = tape.add(&asked, seen);
        }
        Ok(tape.dropout(asked, self.dropout))
    }
}
