//! Architectures and their sizes: the table `[model]` of a recipe and the `config.json` of a model that generates text.
//! Building and running such a model is left to [`Model`](crate::Model); encoders, document readers and vision models
//! build themselves from their own configurations.

use crate::batch::SpecialTokens;
use crate::describe::DescribeConfig;
use crate::detect::DetectConfig;
use crate::encoder::EncoderConfig;
use crate::gpt::GptConfig;
use crate::han::HanConfig;
use crate::recurrent::RecurrentConfig;
use crate::sizes::check_sizes;
use crate::transformer::TransformerConfig;
use crate::vit::VitConfig;
use crate::voice::VoiceConfig;
use crate::vqa::VqaConfig;
use crate::{Error, Result};
use qkv_nn::layers::PositionKind;
use serde::{Deserialize, Serialize};

/// The kind of a model, with its sizes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
// There is one per process and everything reads it; boxing the large variants would only get in the way.
#[allow(clippy::large_enum_variant)]
pub enum Architecture {
    /// Encoder and decoder: see [`Transformer`](crate::Transformer).
    Transformer(TransformerConfig),
    /// Recurrent encoder and decoder: see [`Recurrent`](crate::Recurrent).
    Recurrent(RecurrentConfig),
    /// Decoder only: see [`Gpt`](crate::Gpt).
    Gpt(GptConfig),
    /// Encoder only: see [`Encoder`](crate::Encoder). It generates no text.
    Encoder(EncoderConfig),
    /// Hierarchical attention over documents: see [`Han`](crate::Han). It generates no text.
    Han(HanConfig),
    /// Vision Transformer: see [`Vit`](crate::Vit). It generates no text.
    Vit(VitConfig),
    /// Images to text: see [`Describer`](crate::Describer).
    Describe(DescribeConfig),
    /// Questions about images: see [`Vqa`](crate::Vqa). It generates no text.
    Vqa(VqaConfig),
    /// Objects in images: see [`Detector`](crate::Detector). It generates no text.
    Detect(DetectConfig),
    /// Text to speech: see [`Speaker`](crate::Speaker). It generates no text.
    #[serde(rename = "voice")]
    Speaker(VoiceConfig),
}

/// The sizes of an architecture that generates text.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Generative<'a> {
    Transformer(&'a TransformerConfig),
    Recurrent(&'a RecurrentConfig),
    Gpt(&'a GptConfig),
}

impl Architecture {
    /// Its name in a recipe.
    pub fn name(&self) -> &'static str {
        match self {
            Architecture::Transformer(_) => "transformer",
            Architecture::Recurrent(_) => "recurrent",
            Architecture::Gpt(_) => "gpt",
            Architecture::Encoder(_) => "encoder",
            Architecture::Han(_) => "han",
            Architecture::Vit(_) => "vit",
            Architecture::Describe(_) => "describe",
            Architecture::Vqa(_) => "vqa",
            Architecture::Detect(_) => "detect",
            Architecture::Speaker(_) => "voice",
        }
    }

    /// Its sizes, if it generates text.
    pub(crate) fn generative(&self) -> Result<Generative<'_>> {
        match self {
            Architecture::Transformer(sizes) => Ok(Generative::Transformer(sizes)),
            Architecture::Recurrent(sizes) => Ok(Generative::Recurrent(sizes)),
            Architecture::Gpt(sizes) => Ok(Generative::Gpt(sizes)),
            Architecture::Describe(_) => Err(Error::invalid("a model of kind `describe` writes about images alone")
                .with_hint("`qkv describe --model DIR IMAGE` does")),
            Architecture::Encoder(_)
            | Architecture::Han(_)
            | Architecture::Vit(_)
            | Architecture::Vqa(_)
            | Architecture::Detect(_)
            | Architecture::Speaker(_) => {
                Err(Error::invalid(format!("a model of kind `{}` generates no text", self.name())))
            }
        }
    }

    /// Width and number of layers, for a lower bound on the number of parameters.
    fn width_and_layers(&self) -> (usize, usize) {
        match self {
            Architecture::Transformer(c) => (c.d_model, c.encoder_layers.saturating_add(c.decoder_layers)),
            Architecture::Recurrent(c) => (c.d_model, c.layers),
            Architecture::Gpt(c) => (c.d_model, c.layers),
            Architecture::Encoder(c) => (c.d_model, c.layers),
            Architecture::Han(c) => (c.d_model, 0),
            Architecture::Vit(c) => (c.d_model, c.layers),
            Architecture::Detect(c) => (c.d_model, c.decoder_layers.saturating_add(c.image.layers)),
            Architecture::Speaker(c) => (c.d_model, c.encoder_layers.saturating_add(c.decoder_layers)),
            Architecture::Vqa(c) => (c.d_model, c.question_layers.saturating_add(c.image.layers)),
            Architecture::Describe(c) => (c.d_model, c.decoder_layers.saturating_add(c.image.layers)),
        }
    }
}

impl Generative<'_> {
    /// Sizes, each with the largest value that is accepted.
    fn sizes(self) -> Vec<(&'static str, usize, usize)> {
        match self {
            Generative::Transformer(config) => vec![
                ("d_model", config.d_model, 1 << 16),
                ("ffn_dim", config.ffn_dim, 1 << 18),
                ("heads", config.heads, 1 << 10),
                ("encoder_layers", config.encoder_layers, 1 << 10),
                ("decoder_layers", config.decoder_layers, 1 << 10),
                ("max_positions", config.max_positions, 1 << 22),
            ],
            Generative::Recurrent(config) => vec![
                ("d_model", config.d_model, 1 << 16),
                ("hidden", config.hidden, 1 << 16),
                ("layers", config.layers, 1 << 10),
                ("attention_width", config.attention_width, 1 << 16),
            ],
            Generative::Gpt(config) => vec![
                ("d_model", config.d_model, 1 << 16),
                ("ffn_dim", config.ffn_dim, 1 << 18),
                ("heads", config.heads, 1 << 10),
                ("key_heads", config.key_heads(), 1 << 10),
                ("head_width", config.head_width(), 1 << 16),
                ("layers", config.layers, 1 << 10),
                ("max_positions", config.max_positions, 1 << 22),
            ],
        }
    }

    /// Dropout probabilities.
    fn dropouts(self) -> Vec<(&'static str, f64)> {
        match self {
            Generative::Transformer(c) => {
                vec![("dropout", c.dropout), ("attention_dropout", c.attention_dropout), ("ffn_dropout", c.ffn_dropout)]
            }
            Generative::Recurrent(c) => vec![("dropout", c.dropout)],
            Generative::Gpt(c) => vec![("dropout", c.dropout), ("attention_dropout", c.attention_dropout)],
        }
    }
}

/// Everything needed to build a model: its `config.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelConfig {
    /// The program that reads it: always `qkv`.
    pub model_type: String,
    /// Number of tokens in the vocabulary.
    pub vocab_size: usize,
    /// Pads shorter sequences.
    pub pad_token_id: u32,
    /// Starts a target sequence.
    pub bos_token_id: u32,
    /// Ends a sequence.
    pub eos_token_id: u32,
    /// The architecture and its sizes.
    pub architecture: Architecture,
}

impl ModelConfig {
    /// An architecture over a vocabulary.
    pub fn new(architecture: Architecture, vocab_size: usize, specials: SpecialTokens) -> Self {
        let SpecialTokens { pad, bos, eos } = specials;
        let (pad_token_id, bos_token_id, eos_token_id) = (pad, bos, eos);
        ModelConfig { model_type: "qkv".into(), vocab_size, pad_token_id, bos_token_id, eos_token_id, architecture }
    }

    /// The special tokens.
    pub fn specials(&self) -> SpecialTokens {
        SpecialTokens { pad: self.pad_token_id, bos: self.bos_token_id, eos: self.eos_token_id }
    }

    /// Refuses a configuration that needs more parameters than the `available` values of its file. Called before memory
    /// is allocated for the model.
    pub(crate) fn check_size(&self, available: usize) -> Result<()> {
        let (width, layers) = self.architecture.width_and_layers();
        let blocks = layers.saturating_mul(width).saturating_mul(width);
        let needed = self.vocab_size.saturating_mul(width).saturating_add(blocks);
        if needed > available {
            let what = format!("the configuration needs at least {needed} parameters, the file has {available}");
            return Err(Error::invalid(what));
        }
        Ok(())
    }

    /// Checks the sizes and probabilities of a model that generates text, and returns the sizes.
    pub(crate) fn checked(&self) -> Result<Generative<'_>> {
        let generative = self.architecture.generative()?;
        check_sizes(&generative.sizes())?;
        check_sizes(&[("vocab_size", self.vocab_size, 1 << 24)])?;
        for (name, found) in generative.dropouts() {
            if !(0.0..1.0).contains(&found) {
                return Err(Error::invalid(format!("`{name}` is {found}, expected at least 0 and less than 1")));
            }
        }
        if matches!(generative, Generative::Transformer(c) if c.positions == PositionKind::Rotary) {
            return Err(Error::invalid("`positions` is rotary, which only `kind = \"gpt\"` supports"));
        }
        let specials = [self.pad_token_id, self.bos_token_id, self.eos_token_id];
        if specials.iter().any(|&id| id as usize >= self.vocab_size) {
            let what = format!("special tokens {specials:?} are outside of the vocabulary of {}", self.vocab_size);
            return Err(Error::invalid(what));
        }
        Ok(generative)
    }
}
