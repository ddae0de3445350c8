//! Vision Transformer (Dosovitskiy et al. 2020, arXiv:2010.11929): patches of an image become tokens by a linear layer,
//! after a class token; positions are learned, layers are pre-norm. The head reads the class token. With a stem of
//! convolutions in place of the linear layer it is a compact convolutional Transformer (Hassani et al. 2021,
//! arXiv:2104.05704), which learns from fewer images.

mod reader;

pub(crate) use reader::inspect;
pub use reader::{ObservedImage, Vit};

use crate::conv_stem::{ConvStem, ConvStemConfig, Stem};
use crate::sizes::check_sizes;
use crate::{Error, Result};
use qkv::{Attention, Dropout};
use qkv_nn::layers::{AttentionConfig, Block, BlockConfig, Builder, FeedKind, Linear, Norm, NormKind};
use qkv_nn::{Float, Heads, Init, Param, Positions, Tape, Tensor, Var};
use serde::{Deserialize, Serialize};

/// Sizes and settings of a vision model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct VitConfig {
    /// Side length of images in pixels; in a recipe, 0 takes that of the data.
    pub image_size: usize,
    /// Side length of patches in pixels.
    pub patch_size: usize,
    /// How pixels become tokens.
    pub stem: Stem,
    /// Channels of the first convolution of a stem; each later one has twice as many, up to the model's width.
    pub stem_channels: usize,
    /// Residual blocks of a stem at each resolution, from that of the image to that of the tokens; none, if left out.
    pub stem_blocks: Vec<usize>,
    /// 1 for gray, 3 for color; in a recipe, 0 takes that of the data.
    pub channels: usize,
    /// Model width.
    pub d_model: usize,
    /// Inner width of the feed-forward layers.
    pub ffn_dim: usize,
    /// Number of heads.
    pub heads: usize,
    /// Number of layers.
    pub layers: usize,
    /// Activation of the feed-forward layers.
    pub activation: FeedKind,
    /// The `ε` of the layer norms.
    pub epsilon: f64,
    /// Dropout of patches and of each residual branch.
    pub dropout: f64,
    /// Dropout of attention weights.
    pub attention_dropout: f64,
    /// Mean of each channel, for values from 0 to 1.
    pub mean: Vec<f64>,
    /// Standard deviation of each channel.
    pub deviation: Vec<f64>,
    /// Names of the classes.
    pub labels: Vec<String>,
}

impl Default for VitConfig {
    fn default() -> Self {
        VitConfig {
            image_size: 0,
            patch_size: 4,
            stem: Stem::Patches,
            stem_channels: 64,
            stem_blocks: Vec::new(),
            channels: 0,
            d_model: 64,
            ffn_dim: 128,
            heads: 4,
            layers: 4,
            activation: FeedKind::Gelu,
            epsilon: 1e-12,
            dropout: 0.1,
            attention_dropout: 0.0,
            mean: Vec::new(),
            deviation: Vec::new(),
            labels: Vec::new(),
        }
    }
}

impl VitConfig {
    /// Refuses sizes that are zero or that no machine could hold.
    pub(crate) fn check(&self) -> Result<()> {
        let sizes = [
            ("image_size", self.image_size, 1 << 13),
            ("patch_size", self.patch_size, 1 << 10),
            ("stem_channels", self.stem_channels, 1 << 12),
            ("d_model", self.d_model, 1 << 16),
            ("ffn_dim", self.ffn_dim, 1 << 18),
            ("heads", self.heads, 1 << 10),
            ("layers", self.layers, 1 << 10),
        ];
        check_sizes(&sizes)?;
        if !self.image_size.is_multiple_of(self.patch_size) {
            let (image, patch) = (self.image_size, self.patch_size);
            return Err(Error::invalid(format!("patches of {patch} do not fill images of {image} points each way"))
                .with_hint("choose a `patch_size` that divides `image_size`"));
        }
        match self.stem {
            Stem::Patches => {}
            Stem::Conv => self.conv_stem().check("")?,
            Stem::ResNet => {
                return Err(Error::invalid("`stem` is resnet, which this model has not")
                    .with_hint("set it to `conv` or `patches`"));
            }
        }
        if !matches!(self.channels, 1 | 3) {
            return Err(Error::invalid(format!("`channels` is {}, expected 1 or 3", self.channels)));
        }
        for (name, found) in [("mean", &self.mean), ("deviation", &self.deviation)] {
            let good = |&x: &f64| x.is_finite() && (name == "mean" || x > 0.0);
            if found.len() != self.channels || !found.iter().all(good) {
                let what = format!("`{name}` is {found:?}, expected a number for each of {} channels", self.channels);
                return Err(Error::invalid(what));
            }
        }
        for (name, found) in [("dropout", self.dropout), ("attention_dropout", self.attention_dropout)] {
            if !(0.0..1.0).contains(&found) {
                return Err(Error::invalid(format!("`{name}` is {found}, expected at least 0 and less than 1")));
            }
        }
        if self.activation.gate().is_some() {
            return Err(Error::invalid("`activation` has a gate, which this model has not")
                .with_hint("set it to `gelu`, `gelu-tanh` or `relu`"));
        }
        if self.labels.is_empty() {
            return Err(Error::invalid("there are no labels to choose from"));
        }
        Ok(())
    }

    /// Patches per side.
    pub fn grid(&self) -> usize {
        self.image_size / self.patch_size.max(1)
    }

    /// Its stem of convolutions.
    pub(crate) fn conv_stem(&self) -> ConvStemConfig<'_> {
        let VitConfig { channels, stem_channels, d_model, patch_size, .. } = *self;
        ConvStemConfig {
            inputs: channels,
            channels: stem_channels,
            most: d_model,
            patch_size,
            blocks: &self.stem_blocks,
        }
    }

    /// Values per patch.
    pub(crate) fn patch(&self) -> usize {
        self.channels * self.patch_size * self.patch_size
    }

    /// A lower bound on the number of parameters.
    pub(crate) fn least(&self) -> usize {
        let layers = self.layers.saturating_mul(self.d_model).saturating_mul(self.d_model);
        let positions = self.grid().saturating_mul(self.grid()).saturating_add(1);
        positions.saturating_mul(self.d_model).saturating_add(layers)
    }
}

/// A vision model: handles to its parameters.
#[derive(Clone, Debug)]
pub(crate) struct VitNetwork {
    stem: Option<ConvStem>,
    patches: Linear,
    class: Param,
    positions: Param,
    layers: Vec<Block>,
    norm: Norm,
    head: Linear,
    dropout: f64,
    count: usize,
}

impl VitNetwork {
    /// Adds its parameters: those of its stem, `patches`, `class_token`, `positions`, `layers.N`, `norm`, `head`.
    pub fn new<T: Float>(at: &mut Builder<'_, T>, config: &VitConfig) -> Result<VitNetwork> {
        config.check()?;
        let VitConfig { d_model, ffn_dim, heads, dropout, epsilon, .. } = *config;
        let count = config.grid() * config.grid();
        let stem = (config.stem == Stem::Conv).then(|| ConvStem::new(at, config.conv_stem()));
        let inputs = stem.as_ref().map_or(config.patch(), |stem| stem.outputs);
        let patches = Linear::new(&mut at.at("patches"), inputs, d_model, true);
        let class = at.add("class_token", &[1, d_model], Init::Normal(0.02));
        let positions = at.add("positions.weight", &[count + 1, d_model], Init::Normal(0.02));
        let mut attention = Attention::scaled_dot();
        attention.dropout = (config.attention_dropout > 0.0).then_some(Dropout { p: config.attention_dropout });
        let block = BlockConfig {
            feed: config.activation,
            epsilon,
            dropout,
            ..BlockConfig::new(d_model, ffn_dim, AttentionConfig::new(attention, Heads { query: heads, key: heads }))
        };
        let layers = (0..config.layers).map(|layer| Ok(Block::new(&mut at.at(&format!("layers.{layer}")), &block)?));
        let layers = layers.collect::<Result<_>>()?;
        let norm = Norm::new(&mut at.at("norm"), d_model, NormKind::Layer, epsilon);
        let head = Linear::new(&mut at.at("head"), d_model, config.labels.len(), true);
        Ok(VitNetwork { stem, patches, class, positions, layers, norm, head, dropout, count })
    }

    /// The linear layer of the head.
    pub fn head(&self) -> Linear {
        self.head
    }

    /// The final state of the class token, `[B, 1, C]`, from patches `[B, P, patch]` or, with a stem, from pixels
    /// `[B, H, W, C]`.
    pub fn forward<T: Float>(&self, tape: &mut Tape<'_, T>, image: Tensor<T>) -> Result<Var<T>> {
        let (batch, count) = (image.shape()[0], self.count);
        let image = tape.constant(image);
        let patches = match &self.stem {
            Some(stem) => stem.forward(tape, image).reshaped(&[batch, count, stem.outputs]),
            None => image,
        };
        let x = self.patches.forward(tape, &patches); // (B, P, C)
        // The class token has position 0, the patches those after it.
        let places: Vec<u32> = (0..batch).flat_map(|_| 1..=count as u32).collect();
        let at = tape.embedding(&places, count, self.positions, 1.0, Positions::None, 0);
        let x = tape.add(&x, at);
        let class = tape.embedding(&vec![0; batch], 1, self.class, 1.0, Positions::Learned(self.positions), 0);
        let rows = (0..batch).flat_map(|b| {
            let patches = (0..count).map(move |n| Some(batch + b * count + n));
            std::iter::once(Some(b)).chain(patches)
        });
        let x = tape.gather(&[&class, &x], &rows.collect::<Vec<_>>(), [batch, count + 1]); // (B, 1 + P, C)
        let mut x = tape.dropout(x, self.dropout);
        for layer in &self.layers {
            x = layer.forward(tape, x, None, None, None)?;
        }
        let x = tape.step(&x, 0);
        Ok(self.norm.forward(tape, &x))
    }
}
