//! A ResNet as the stem of an image encoder: a 7 × 7 convolution and a max pooling, which quarter the side lengths, and
//! stages of bottleneck blocks (He et al. 2015, arXiv:1512.03385), each with half the side lengths and twice the
//! channels of the one before, all with group norms (the hybrid models of Dosovitskiy et al. 2020, arXiv:2010.11929).

use crate::{Error, Result};
use qkv_nn::layers::{Builder, Conv2d, GroupNorm, Norm};
use qkv_nn::{Activation, Float, Tape, Var, Windows2d};

/// Groups of every norm.
const GROUPS: usize = 32;
/// The most stages, and blocks per stage.
const MOST_STAGES: usize = 8;
const MOST_BLOCKS: usize = 64;
/// Factor from the inner channels of a block to its output channels.
const EXPANSION: usize = 4;

/// Sizes of a stem.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ResNetStemConfig<'a> {
    /// Channels of the image.
    pub inputs: usize,
    /// Channels of the first convolution, and inside the blocks of the first stage.
    pub channels: usize,
    /// Side length of an output place in pixels.
    pub patch_size: usize,
    /// Blocks of each stage.
    pub blocks: &'a [usize],
}

impl ResNetStemConfig<'_> {
    /// Rejects sizes that make no stem.
    pub fn check(&self) -> Result<()> {
        let ResNetStemConfig { channels, patch_size, blocks, .. } = *self;
        let good = |&count: &usize| (1..=MOST_BLOCKS).contains(&count);
        if blocks.is_empty() || blocks.len() > MOST_STAGES || !blocks.iter().all(good) {
            let what = format!("`image.stem_blocks` is {blocks:?}, expected 1 to {MOST_STAGES} numbers");
            return Err(Error::invalid(format!("{what} from 1 to {MOST_BLOCKS}")).with_hint("one for each stage"));
        }
        if patch_size != 2 << blocks.len() {
            let what = format!("`image.patch_size` is {patch_size}, with {} stages", blocks.len());
            return Err(Error::invalid(what).with_hint(format!("they make places of {} pixels", 2 << blocks.len())));
        }
        if !channels.is_multiple_of(GROUPS) {
            let what = format!("`image.stem_channels` is {channels}, expected a multiple of {GROUPS}");
            return Err(Error::invalid(what).with_hint("the norms of a ResNet have that many groups"));
        }
        Ok(())
    }

    /// Output channels.
    pub fn outputs(&self) -> usize {
        (EXPANSION * self.channels) << self.blocks.len().saturating_sub(1)
    }

    /// The names of its convolutions, without `.weight`, each with its input channels, output channels and side length.
    pub fn convolutions(&self) -> Vec<(String, [usize; 3])> {
        let mut all = vec![("stem.conv".to_owned(), [self.inputs, self.channels, 7])];
        let mut inputs = self.channels;
        for (stage, &blocks) in self.blocks.iter().enumerate() {
            let inner = self.channels << stage;
            for block in 0..blocks {
                let at = format!("stem.stages.{stage}.{block}");
                let mut conv = |name: &str, sizes| all.push((format!("{at}.{name}"), sizes));
                conv("conv1", [inputs, inner, 1]);
                conv("conv2", [inner, inner, 3]);
                conv("conv3", [inner, EXPANSION * inner, 1]);
                if block == 0 {
                    conv("shortcut.conv", [inputs, EXPANSION * inner, 1]);
                }
                inputs = EXPANSION * inner;
            }
        }
        all
    }
}

/// The name of the norm after a convolution.
pub(crate) fn norm_after(conv: &str) -> String {
    let (before, name) = conv.rsplit_once('.').unwrap_or(("", conv));
    format!("{before}.{}", name.replace("conv", "norm"))
}

/// A convolution and its norm.
#[derive(Clone, Copy, Debug)]
struct ConvNorm {
    conv: Conv2d,
    norm: GroupNorm,
    kernel: usize,
}

impl ConvNorm {
    /// `[B, H, W, I]` to `[B, H / stride, W / stride, O]`, rounded up.
    fn forward<T: Float>(&self, tape: &mut Tape<'_, T>, x: &Var<T>, stride: usize) -> Var<T> {
        let windows = Windows2d::same([x.shape()[1], x.shape()[2]], self.kernel, stride);
        let y = self.conv.activated(tape, x, windows, Activation::None);
        self.norm.forward(tape, &y)
    }

    fn rectified<T: Float>(&self, tape: &mut Tape<'_, T>, x: &Var<T>, stride: usize) -> Var<T> {
        let y = self.forward(tape, x, stride);
        tape.relu(y)
    }
}

/// A bottleneck block; in the first of a stage, the shortcut has a convolution too.
#[derive(Clone, Copy, Debug)]
struct Bottleneck {
    convolutions: [ConvNorm; 3],
    shortcut: Option<ConvNorm>,
    stride: usize,
}

/// A stem. It holds handles to its parameters.
#[derive(Clone, Debug)]
pub(crate) struct ResNetStem {
    first: ConvNorm,
    blocks: Vec<Bottleneck>,
    /// Output channels.
    pub outputs: usize,
}

impl ResNetStem {
    /// Adds its parameters: `stem.conv`, `stem.norm`, and for each block `stem.stages.N.M.conv1`, `norm1` and so on.
    pub fn new<T: Float>(at: &mut Builder<'_, T>, config: ResNetStemConfig<'_>) -> ResNetStem {
        let mut new = config.convolutions().into_iter().map(|(name, [inputs, outputs, kernel])| ConvNorm {
            conv: Conv2d::new(&mut at.at(&name), inputs, outputs, kernel, false),
            norm: GroupNorm::new(&mut at.at(&norm_after(&name)), outputs, GROUPS, Norm::EPSILON),
            kernel,
        });
        let mut next = || new.next().expect("as many convolutions as blocks need");
        let first = next();
        let mut blocks = Vec::new();
        for (stage, &count) in config.blocks.iter().enumerate() {
            for block in 0..count {
                let convolutions = [next(), next(), next()];
                let shortcut = (block == 0).then(&mut next);
                let stride = if block == 0 && stage > 0 { 2 } else { 1 };
                blocks.push(Bottleneck { convolutions, shortcut, stride });
            }
        }
        ResNetStem { first, blocks, outputs: config.outputs() }
    }

    /// From pixels `[B, H, W, C]` to `[B, H / patch, W / patch, outputs]`.
    pub fn forward<T: Float>(&self, tape: &mut Tape<'_, T>, pixels: Var<T>) -> Var<T> {
        let x = self.first.rectified(tape, &pixels, 2);
        let windows = Windows2d::same([x.shape()[1], x.shape()[2]], 3, 2);
        let mut x = tape.max_pool2d(&x, windows);
        for Bottleneck { convolutions: [one, two, three], shortcut, stride } in &self.blocks {
            let y = one.rectified(tape, &x, 1);
            let y = two.rectified(tape, &y, *stride);
            let y = three.forward(tape, &y, 1);
            let same = match shortcut {
                Some(shortcut) => shortcut.forward(tape, &x, *stride),
                None => x,
            };
            let sum = tape.add(&same, y);
            x = tape.relu(sum);
        }
        x
    }
}
