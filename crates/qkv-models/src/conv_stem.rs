//! A convolutional stem: the first layers of an image encoder or a vision model, which halve the image until each pixel
//! is one place, a cell of the grid that the Transformer attends to. With little data it works better than patches
//! (Xiao et al. 2021, arXiv:2106.14881; Hassani et al. 2021, arXiv:2104.05704). Each resolution may have residual
//! blocks (He et al. 2015, arXiv:1512.03385).

use crate::{Error, Result};
use qkv_nn::layers::{Builder, Conv2d, GroupNorm, Norm};
use qkv_nn::{Activation, Float, Tape, Var, Windows2d};
use serde::{Deserialize, Serialize};

/// How pixels become places.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stem {
    /// A linear map of each patch (Dosovitskiy et al. 2020, arXiv:2010.11929).
    Patches,
    /// 3 × 3 convolutions that halve the image, each with a group norm, until each pixel covers a patch.
    #[default]
    Conv,
    /// A ResNet of bottleneck blocks with group norms, as in the hybrid models of Dosovitskiy et al.
    ResNet,
}

/// The largest number of residual blocks at one resolution.
const MOST_BLOCKS: usize = 64;

/// Sizes of a stem.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConvStemConfig<'a> {
    /// Channels of the image.
    pub inputs: usize,
    /// Channels of the first convolution; each later one doubles them, up to `most`.
    pub channels: usize,
    /// The largest number of channels.
    pub most: usize,
    /// Side length of a place in pixels, a power of two.
    pub patch_size: usize,
    /// Residual blocks at each resolution, from that of the image to that of the places.
    pub blocks: &'a [usize],
}

impl ConvStemConfig<'_> {
    /// Refuses an invalid stem; `table` is the prefix of its settings in errors.
    pub fn check(&self, table: &str) -> Result<()> {
        let ConvStemConfig { patch_size, blocks, .. } = *self;
        if !patch_size.is_power_of_two() || patch_size < 2 {
            return Err(Error::invalid(format!(
                "`{table}patch_size` is {patch_size}, a stem of convolutions halves images"
            ))
            .with_hint(format!("choose a power of two, or `{table}stem = \"patches\"`")));
        }
        let resolutions = patch_size.ilog2() as usize + 1;
        if blocks.len() > resolutions || blocks.iter().any(|&blocks| blocks > MOST_BLOCKS) {
            let what = format!("`{table}stem_blocks` is {blocks:?}, expected at most {resolutions} numbers");
            return Err(Error::invalid(format!("{what} of at most {MOST_BLOCKS}"))
                .with_hint("one for each resolution, from that of the image to that of the places"));
        }
        Ok(())
    }

    /// The residual blocks after each convolution, and the convolution's stride.
    fn stages(&self) -> impl Iterator<Item = (usize, usize)> + use<'_> {
        let blocks = |resolution: usize| self.blocks.get(resolution).copied().unwrap_or(0);
        // At full resolution there is a convolution only if blocks follow it.
        let first = usize::from(blocks(0) == 0);
        (first..=self.patch_size.ilog2() as usize)
            .map(move |resolution| (blocks(resolution), if resolution == 0 { 1 } else { 2 }))
    }

    /// The names of its parameters.
    pub fn names(&self) -> Vec<String> {
        let mut names = Vec::new();
        for (layer, (blocks, _)) in self.stages().enumerate() {
            names.push(format!("stem.{layer}.weight"));
            let of_blocks = (0..blocks).map(|block| format!("stem_blocks.{layer}.{block}"));
            for block in of_blocks.clone() {
                names.extend(["conv1", "conv2"].map(|part| format!("{block}.{part}.weight")));
            }
            let norms = of_blocks.flat_map(|block| ["norm1", "norm2"].map(|part| format!("{block}.{part}")));
            for norm in norms.chain([format!("stem_norm.{layer}")]) {
                names.extend(["weight", "bias"].map(|part| format!("{norm}.{part}")));
            }
        }
        names
    }
}

/// Number of groups of a norm: groups of 16 channels, or a single group if the channels are not a multiple of 16.
fn groups(channels: usize) -> usize {
    if channels.is_multiple_of(16) { channels / 16 } else { 1 }
}

/// A 3 × 3 convolution and its norm.
#[derive(Clone, Copy, Debug)]
struct ConvNorm {
    conv: Conv2d,
    norm: GroupNorm,
}

impl ConvNorm {
    fn new<T: Float>(at: &mut Builder<'_, T>, [conv, norm]: [&str; 2], inputs: usize, outputs: usize) -> ConvNorm {
        let conv = Conv2d::new(&mut at.at(conv), inputs, outputs, 3, false);
        let norm = GroupNorm::new(&mut at.at(norm), outputs, groups(outputs), Norm::EPSILON);
        ConvNorm { conv, norm }
    }

    fn forward<T: Float>(&self, tape: &mut Tape<'_, T>, x: &Var<T>, stride: usize) -> Var<T> {
        let y = self.conv.activated(tape, x, Windows2d::square(3, stride, 1), Activation::None);
        self.norm.forward(tape, &y)
    }
}

/// A convolution with its stride, and the residual blocks after it.
#[derive(Clone, Debug)]
struct Stage {
    first: ConvNorm,
    stride: usize,
    blocks: Vec<[ConvNorm; 2]>,
}

/// A stem: handles to its parameters.
#[derive(Clone, Debug)]
pub(crate) struct ConvStem {
    stages: Vec<Stage>,
    /// Output channels.
    pub outputs: usize,
}

impl ConvStem {
    /// Adds its parameters: `stem.N`, `stem_norm.N`, and for each block `stem_blocks.N.M.conv1`, `norm1`, `conv2`,
    /// `norm2`.
    pub fn new<T: Float>(at: &mut Builder<'_, T>, config: ConvStemConfig<'_>) -> ConvStem {
        let (mut stages, mut inputs) = (Vec::new(), config.inputs);
        let mut channels = config.channels.min(config.most);
        for (layer, (count, stride)) in config.stages().enumerate() {
            let names = [format!("stem.{layer}"), format!("stem_norm.{layer}")];
            let first = ConvNorm::new(at, [&names[0], &names[1]], inputs, channels);
            let block = |block: usize| {
                let mut at = at.at(&format!("stem_blocks.{layer}.{block}"));
                [["conv1", "norm1"], ["conv2", "norm2"]].map(|names| ConvNorm::new(&mut at, names, channels, channels))
            };
            stages.push(Stage { first, stride, blocks: (0..count).map(block).collect() });
            (inputs, channels) = (channels, (2 * channels).min(config.most));
        }
        ConvStem { stages, outputs: inputs }
    }

    /// From pixels `[B, H, W, C]` to `[B, H / patch, W / patch, outputs]`.
    pub fn forward<T: Float>(&self, tape: &mut Tape<'_, T>, pixels: Var<T>) -> Var<T> {
        let mut x = pixels;
        for Stage { first, stride, blocks } in &self.stages {
            let y = first.forward(tape, &x, *stride);
            x = tape.relu(y);
            for [before, after] in blocks {
                let y = before.forward(tape, &x, 1);
                let y = tape.relu(y);
                let y = after.forward(tape, &y, 1);
                let y = tape.add(&x, y);
                x = tape.relu(y);
            }
        }
        x
    }
}
