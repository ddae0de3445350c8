//! The image encoder of a model: an image is fitted to the expected size, divided into a grid of places by patches or a
//! convolutional stem, and encoded by Transformer layers over the places. What the places are used for (a caption,
//! boxes, an answer) is left to the model that the encoder is part of.

use crate::conv_stem::{ConvStem, ConvStemConfig, Stem};
use crate::eyes;
use crate::image::{Fit, Image};
use crate::resnet_stem::{ResNetStem, ResNetStemConfig};
use crate::sizes::check_sizes;
use crate::transformer::normalized;
use crate::{Error, Result};
use qkv::{Attention, Dropout};
use qkv_nn::layers::{AttentionConfig, Block, BlockConfig, Builder, Conv2d, FeedKind, Norm, NormKind};
use qkv_nn::{Activation, Float, Heads, Init, Param, Positions, Tape, Tensor, Var, Windows2d};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Sizes and settings of an image encoder: the table `image` of a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ImageEncoderConfig {
    /// Height of images in pixels.
    pub height: usize,
    /// Width of images in pixels.
    pub width: usize,
    /// 1 for gray, 3 for color.
    pub channels: usize,
    /// How an image of another size is fitted.
    pub fit: Fit,
    /// How pixels become places.
    pub stem: Stem,
    /// Side length of a place in pixels; a power of two if the stem is `conv` or `resnet`.
    pub patch_size: usize,
    /// Channels of the first convolution of a stem; each later one doubles them, up to the model's width.
    pub stem_channels: usize,
    /// Residual blocks of a stem at each resolution, from that of the image to that of the places; none by default. For
    /// a ResNet stem, the blocks of each stage; the first stage is at a quarter of the image's resolution.
    pub stem_blocks: Vec<usize>,
    /// Number of Transformer layers.
    pub layers: usize,
    /// Mean of each channel, for values from 0 to 1; 0.5 by default.
    pub mean: Vec<f64>,
    /// Standard deviation of each channel; 0.5 by default.
    pub deviation: Vec<f64>,
    /// Whether there is a class token, which sees the whole image, besides the places.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub class_token: bool,
    /// `ε` of the norms, if it is not the model's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub epsilon: Option<f64>,
    /// The folder of a trained [`ResNet`](crate::ResNet) to use in place of a stem: its last features are the places,
    /// and it stays frozen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eyes: Option<PathBuf>,
}

impl Default for ImageEncoderConfig {
    fn default() -> Self {
        ImageEncoderConfig {
            height: 64,
            width: 64,
            channels: 3,
            fit: Fit::Stretch,
            stem: Stem::Conv,
            patch_size: 8,
            stem_channels: 32,
            stem_blocks: Vec::new(),
            layers: 2,
            mean: Vec::new(),
            deviation: Vec::new(),
            class_token: false,
            epsilon: None,
            eyes: None,
        }
    }
}

/// Widths that an image encoder shares with the model it is part of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Widths {
    pub d_model: usize,
    pub ffn_dim: usize,
    pub heads: usize,
    pub dropout: f64,
    pub attention_dropout: f64,
    pub epsilon: f64,
    pub embedding_norm: bool,
}

impl Widths {
    /// Refuses sizes that are zero or that no machine could hold.
    pub fn check(&self) -> Result<()> {
        let sizes =
            [("d_model", self.d_model, 1 << 14), ("ffn_dim", self.ffn_dim, 1 << 16), ("heads", self.heads, 1 << 10)];
        check_sizes(&sizes)?;
        for (name, found) in [("dropout", self.dropout), ("attention_dropout", self.attention_dropout)] {
            if !(0.0..1.0).contains(&found) {
                return Err(Error::invalid(format!("`{name}` is {found}, expected at least 0 and less than 1")));
            }
        }
        Ok(())
    }

    /// The configuration of a layer.
    pub fn block(&self, attention: Attention, cross: Option<Attention>) -> BlockConfig {
        let heads = Heads { query: self.heads, key: self.heads };
        let config = |mut attention: Attention| {
            attention.dropout = (self.attention_dropout > 0.0).then_some(Dropout { p: self.attention_dropout });
            AttentionConfig::new(attention, heads)
        };
        BlockConfig {
            feed: FeedKind::Gelu,
            dropout: self.dropout,
            epsilon: self.epsilon,
            cross: cross.map(config),
            ..BlockConfig::new(self.d_model, self.ffn_dim, config(attention))
        }
    }
}

impl ImageEncoderConfig {
    /// Refuses sizes that are zero, too large for any machine, or do not fit together.
    pub(crate) fn check(&self) -> Result<()> {
        let sizes = [
            ("image.height", self.height, 1 << 12),
            ("image.width", self.width, 1 << 12),
            ("image.patch_size", self.patch_size, 1 << 10),
            ("image.stem_channels", self.stem_channels, 1 << 12),
        ];
        check_sizes(&sizes)?;
        if self.layers > 1 << 10 {
            return Err(Error::invalid(format!("`image.layers` is {}, expected at most 1024", self.layers)));
        }
        let ImageEncoderConfig { height, width, patch_size, .. } = *self;
        if !height.is_multiple_of(patch_size) || !width.is_multiple_of(patch_size) {
            return Err(Error::invalid(format!(
                "patches of {patch_size} do not fill images of {height} × {width} pixels"
            ))
            .with_hint("choose an `image.patch_size` that divides height and width"));
        }
        if self.eyes.is_some() && (patch_size != eyes::STRIDE || self.channels != 3) {
            return Err(Error::invalid(format!(
                "places of {patch_size} pixels in {} channels have eyes",
                self.channels
            ))
            .with_hint("`image.eyes` sees places of 32 pixels in color: `patch_size = 32`, `channels = 3`"));
        }
        match self.stem {
            _ if self.eyes.is_some() => {}
            Stem::Patches => {}
            Stem::Conv => self.conv_stem(1 << 14).check("image.")?,
            Stem::ResNet => self.resnet_stem().check()?,
        }
        let step = self.fit.step();
        let stepped = height.is_multiple_of(step) && width.is_multiple_of(step) && step.is_multiple_of(patch_size);
        if self.fit == Fit::Trim && (!stepped || self.eyes.is_some()) {
            let what = format!("images of {height} × {width} pixels with places of {patch_size} are trimmed");
            return Err(Error::invalid(what)
                .with_hint(format!("`image.fit = \"trim\"` needs multiples of {step}, and places that divide it")));
        }
        if !matches!(self.channels, 1 | 3) {
            return Err(Error::invalid(format!("`image.channels` is {}, expected 1 or 3", self.channels)));
        }
        for (name, found) in [("mean", &self.mean), ("deviation", &self.deviation)] {
            let good = |&x: &f64| x.is_finite() && (name == "mean" || x > 0.0);
            if !found.is_empty() && (found.len() != self.channels || !found.iter().all(good)) {
                let what =
                    format!("`image.{name}` is {found:?}, expected a number for each of {} channels", self.channels);
                return Err(Error::invalid(what));
            }
        }
        Ok(())
    }

    /// Its convolutional stem, in a model of this width.
    fn conv_stem(&self, d_model: usize) -> ConvStemConfig<'_> {
        let ImageEncoderConfig { channels, stem_channels, patch_size, .. } = *self;
        ConvStemConfig {
            inputs: channels,
            channels: stem_channels,
            most: d_model,
            patch_size,
            blocks: &self.stem_blocks,
        }
    }

    /// Its ResNet stem.
    pub(crate) fn resnet_stem(&self) -> ResNetStemConfig<'_> {
        let ImageEncoderConfig { channels, stem_channels, patch_size, .. } = *self;
        ResNetStemConfig { inputs: channels, channels: stem_channels, patch_size, blocks: &self.stem_blocks }
    }

    /// Refuses settings that only models that describe support: images in their own sizes, and a class token.
    pub(crate) fn check_places_alone(&self) -> Result<()> {
        if self.fit == Fit::Trim || self.class_token {
            return Err(Error::invalid("`image.fit = \"trim\"` and `image.class_token` are for models that describe"));
        }
        Ok(())
    }

    /// Rows and columns of places; those of the largest image if images have their own sizes.
    pub fn grid(&self) -> [usize; 2] {
        [self.height, self.width].map(|side| side / self.patch_size.max(1))
    }

    /// Number of places.
    pub fn places(&self) -> usize {
        self.grid().iter().product()
    }

    /// Rows and columns of places of a [prepared](ImageEncoderConfig::prepared) image.
    pub(crate) fn grid_of(&self, image: &Image) -> [usize; 2] {
        [image.height(), image.width()].map(|side| side / self.patch_size.max(1))
    }

    /// Converts an image to the size and channels that the encoder expects.
    ///
    /// # Errors
    /// If it cannot be resized.
    pub fn prepared(&self, image: &Image) -> Result<Image> {
        match self.fit {
            Fit::Stretch => Ok(image.resized_in(self.channels, self.width, self.height)?),
            fit => Ok(image.in_channels(self.channels).fitted(self.width, self.height, fit)?),
        }
    }

    /// [Prepared](ImageEncoderConfig::prepared) images as normalized numbers, `[B, H, W, C]`, in the size of the
    /// largest; the others are padded with white at the right and the bottom.
    pub(crate) fn pixels(&self, images: &[Image]) -> Tensor<f32> {
        let of = |numbers: &Vec<f64>, c: usize| numbers.get(c).copied().unwrap_or(0.5);
        let levels: Vec<[f32; 2]> = (0..self.channels)
            .map(|c| {
                let (mean, deviation) = (of(&self.mean, c), of(&self.deviation, c));
                [(1.0 / (255.0 * deviation)) as f32, (-mean / deviation) as f32]
            })
            .collect();
        let height = images.iter().map(Image::height).max().unwrap_or(self.height);
        let width = images.iter().map(Image::width).max().unwrap_or(self.width);
        let each = height * width * self.channels;
        let mut data = vec![0.0; images.len() * each];
        let parts = data.par_chunks_exact_mut(each.max(1)).zip(images);
        parts.for_each(|(to, image)| image.write_scaled(to, width, &levels));
        Tensor::new(data, &[images.len(), height, width, self.channels])
    }
}

/// The layers before the last projection.
#[derive(Clone, Debug)]
enum Front {
    Nothing,
    Conv(ConvStem),
    ResNet(ResNetStem),
}

/// An image encoder: handles to its parameters.
#[derive(Clone, Debug)]
pub(crate) struct ImageEncoder {
    front: Front,
    /// The projection to the model's width: of patches, or of each pixel after the stem.
    last: (Conv2d, Windows2d),
    class: Option<Param>,
    positions: Param,
    /// Columns of the grid of positions.
    columns: usize,
    embedding_norm: Option<Norm>,
    layers: Vec<Block>,
    norm: Norm,
    dropout: f64,
}

impl ImageEncoder {
    /// Adds its parameters: those of its stem, `patches`, `class_token`, `positions`, `embedding_norm`, `layers.N` and
    /// `norm`.
    pub fn new<T: Float>(at: &mut Builder<'_, T>, config: &ImageEncoderConfig, widths: Widths) -> Result<ImageEncoder> {
        config.check()?;
        widths.check()?;
        let d_model = widths.d_model;
        let epsilon = config.epsilon.unwrap_or(widths.epsilon);
        let widths = Widths { epsilon, ..widths };
        let (front, last) = match config.stem {
            _ if config.eyes.is_some() => {
                let last = Conv2d::new(&mut at.at("patches"), eyes::WIDTH, d_model, 1, true);
                (Front::Nothing, (last, Windows2d::square(1, 1, 0)))
            }
            Stem::Patches => {
                let windows = Windows2d::square(config.patch_size, config.patch_size, 0);
                let last = Conv2d::new(&mut at.at("patches"), config.channels, d_model, config.patch_size, true);
                (Front::Nothing, (last, windows))
            }
            Stem::Conv => {
                let stem = ConvStem::new(at, config.conv_stem(d_model));
                let last = Conv2d::new(&mut at.at("patches"), stem.outputs, d_model, 1, true);
                (Front::Conv(stem), (last, Windows2d::square(1, 1, 0)))
            }
            Stem::ResNet => {
                let stem = ResNetStem::new(at, config.resnet_stem());
                let last = Conv2d::new(&mut at.at("patches"), stem.outputs, d_model, 1, true);
                (Front::ResNet(stem), (last, Windows2d::square(1, 1, 0)))
            }
        };
        let class = config.class_token.then(|| at.add("class_token", &[1, d_model], Init::Normal(0.02)));
        let places = config.places() + usize::from(config.class_token);
        let positions = at.add("positions.weight", &[places, d_model], Init::Normal(0.02));
        let new_norm =
            |at: &mut Builder<'_, T>, name: &str| Norm::new(&mut at.at(name), d_model, NormKind::Layer, widths.epsilon);
        let embedding_norm = widths.embedding_norm.then(|| new_norm(at, "embedding_norm"));
        let block = widths.block(Attention::scaled_dot(), None);
        let layers = (0..config.layers).map(|layer| Ok(Block::new(&mut at.at(&format!("layers.{layer}")), &block)?));
        let layers = layers.collect::<Result<_>>()?;
        let norm = new_norm(at, "norm");
        let ([_, columns], dropout) = (config.grid(), widths.dropout);
        Ok(ImageEncoder { front, last, class, positions, columns, embedding_norm, layers, norm, dropout })
    }

    /// Number of layers.
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Encodes pixels `[B, H, W, C]`, or the features of [`Eyes`](eyes::Eyes), to a vector per place,
    /// `[B, P, d_model]`, row by row, after the vector of the class token if there is one.
    pub fn forward<T: Float>(&self, tape: &mut Tape<'_, T>, pixels: Tensor<T>) -> Result<Var<T>> {
        let batch = pixels.shape()[0];
        let mut x = tape.constant(pixels);
        match &self.front {
            Front::Nothing => {}
            Front::Conv(stem) => x = stem.forward(tape, x),
            Front::ResNet(stem) => x = stem.forward(tape, x),
        }
        let (last, windows) = &self.last;
        let x = last.activated(tape, &x, *windows, Activation::None);
        let &[_, rows, columns, width] = x.shape() else { unreachable!("images have four axes") };
        let count = rows * columns;
        let x = x.reshaped(&[batch, count, width]);
        // A smaller image uses the positions of the upper left part; that of the class token comes first.
        let first = usize::from(self.class.is_some());
        let place = |at: usize| (first + at / columns * self.columns + at % columns) as u32;
        let places: Vec<u32> = (0..batch).flat_map(|_| (0..count).map(place)).collect();
        let at = tape.embedding(&places, count, self.positions, 1.0, Positions::None, 0);
        let mut x = tape.add(&x, at);
        if let Some(class) = self.class {
            let class = tape.embedding(&vec![0; batch], 1, class, 1.0, Positions::Learned(self.positions), 0);
            let rows = (0..batch)
                .flat_map(|b| std::iter::once(Some(b)).chain((0..count).map(move |n| Some(batch + b * count + n))));
            x = tape.gather(&[&class, &x], &rows.collect::<Vec<_>>(), [batch, count + 1]);
        }
        let x = normalized(tape, self.embedding_norm, x);
        let mut x = tape.dropout(x, self.dropout);
        for layer in &self.layers {
            x = layer.forward(tape, x, None, None, None)?;
        }
        Ok(self.norm.forward(tape, &x))
    }
}
