//! Vision Transformer (Dosovitskiy et al. 2020, arXiv:2010.11929): patches of an image become tokens by a linear layer,
//! after a class token; positions are learned, layers are pre-norm. The head reads the class token. With a
//! convolutional stem instead of the linear layer, it is a compact convolutional Transformer (Hassani et al. 2021,
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
    /// Side length of images in pixels; in a recipe, 0 means that of the data.
    pub image_size: usize,
    /// Side length of patches in pixels.
    pub patch_size: usize,
    /// How pixels become tokens.
    pub stem: Stem,
    /// Channels of the first convolution of a stem; each later one has twice as many, up to the model's width.
    pub stem_channels: usize,
    /// Residual blocks of a stem at each resolution, from that of the image to that of the tokens; none if left out.
    pub stem_blocks: Vec<usize>,
    /// 1 for gray, 3 for color; in a recipe, 0 means that of the data.
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
    /// Rejects sizes that are zero or that no machine could hold.
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

    /// Its convolutional stem.
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

/// A vision model. It holds handles to its parameters.
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

#[cfg(test)]
mod tests {
    use super::*;
    use qkv_nn::{Gradients, Machine, Parameters, Pool};

    /// Scrambled numbers between −1 and 1.
    fn numbers(shape: &[usize], salt: usize) -> Tensor<f64> {
        let number = |at: usize| ((at + salt) * 2_654_435_761 % 2001) as f64 / 1000.0 - 1.0;
        Tensor::new((0..shape.iter().product()).map(number).collect(), shape)
    }

    #[test]
    fn gradients_of_a_compact_convolutional_transformer_are_those_of_finite_differences() {
        let labels = vec!["a".to_owned(), "b".to_owned()];
        // A block at the resolution of the image, one at half of it, none at that of the tokens.
        let config = VitConfig {
            image_size: 8,
            patch_size: 4,
            stem: Stem::Conv,
            stem_channels: 4,
            stem_blocks: vec![1, 1],
            channels: 3,
            d_model: 16,
            ffn_dim: 12,
            heads: 2,
            layers: 1,
            epsilon: 1e-6,
            dropout: 0.0,
            mean: vec![0.5; 3],
            deviation: vec![0.5; 3],
            labels,
            ..VitConfig::default()
        };
        let mut parameters = Parameters::<f64>::new();
        let network = VitNetwork::new(&mut Builder::new(&mut parameters, 7), &config).unwrap();
        // Positions and the class token start so small that their gradients would be lost among the others.
        for param in parameters.all().collect::<Vec<_>>() {
            let noise = numbers(parameters.shape(param), param.index());
            parameters.get_mut(param).iter_mut().zip(noise.data()).for_each(|(x, more)| *x += 0.3 * more);
        }
        let (pool, machine) = (Pool::new(), Machine::new(2));
        let image = numbers(&[2, 8, 8, 3], 1);
        let forward = |tape: &mut Tape<'_, f64>| {
            let x = network.forward(tape, image.clone()).unwrap();
            network.head().forward(tape, &x)
        };
        let weights = numbers(&[2, 1, 2], 5);
        let loss = |parameters: &Parameters<f64>| {
            let logits = forward(&mut Tape::inference(parameters, &pool, &machine));
            logits.value().data().iter().zip(weights.data()).map(|(x, weight)| x * weight).sum::<f64>()
        };
        let mut gradients = Gradients::of(&parameters);
        let mut tape = Tape::training(&parameters, &mut gradients, &pool, &machine, 1);
        let logits = forward(&mut tape);
        assert_eq!(logits.shape(), [2, 1, 2]);
        tape.seed(&logits, weights.clone());
        tape.backward();
        drop(tape);
        let (step, mut checked) = (1e-6, 0);
        for param in parameters.all().collect::<Vec<_>>() {
            let (name, count) = (parameters.name(param).to_owned(), parameters.get(param).len());
            for at in (0..count).step_by(count.div_ceil(9)) {
                let mut moved = |by: f64| {
                    parameters.get_mut(param)[at] += by;
                    let found = loss(&parameters);
                    parameters.get_mut(param)[at] -= by;
                    found
                };
                let expected = (moved(step) - moved(-step)) / (2.0 * step);
                let found = gradients.get(param)[at];
                assert!(
                    (found - expected).abs() < 1e-6 * (1.0 + expected.abs()),
                    "{name} {at}: {found} for {expected}"
                );
                checked += usize::from(expected.abs() > 1e-4);
            }
        }
        assert!(checked > 150, "{checked} gradients are not almost 0");
    }
}
