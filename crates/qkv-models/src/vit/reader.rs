//! A vision model with its parameters: its folder, in the layout of `ViTForImageClassification`, and classification.

use super::{VitConfig, VitNetwork};
use crate::checkpoint::Blank;
use crate::conv_stem::Stem;
use crate::files::folder::{CONFIG, PREPROCESSOR_CONFIG, WEIGHTS, read_json, read_json_if_present, write_json};
use crate::files::tensors::Storage;
use crate::files::weights::Weights;
use crate::image::Image;
use crate::layout::{self, Inspected, vit};
use crate::model::Group;
use crate::observed_attention::{ObservedAttention, stacked};
use crate::probabilities::probabilities;
use crate::provenance::Provenance;
use crate::start::Start;
use crate::{Architecture, Error, Result, finite};
use qkv_nn::layers::Builder;
use qkv_nn::{Machine, Parameters, PendingLoss, Pool, Tape, Target, Tensor};
use rayon::prelude::*;
use serde_json::Value;
use std::path::Path;

/// Tokens per batch.
const TOKENS: usize = 4096;

/// A vision model with its parameters.
#[derive(Debug)]
pub struct Vit {
    /// Its configuration.
    pub config: VitConfig,
    /// Its parameters.
    pub parameters: Parameters<f32>,
    pub(crate) model: VitNetwork,
}

/// A captured pass over an image.
#[derive(Clone, Debug)]
pub struct ObservedImage {
    /// The image, resized for the model.
    pub image: Image,
    /// The probability of each class.
    pub probabilities: Vec<f32>,
    /// Every attention: the class token first, then the patches, row by row.
    pub attentions: Vec<ObservedAttention>,
}

/// Configuration and weights of a folder, and the model with all parameters zero.
fn found(folder: &Path) -> Result<(VitConfig, Weights, Result<Blank<VitNetwork>>)> {
    let (path, preprocessor) = (folder.join(CONFIG), folder.join(PREPROCESSOR_CONFIG));
    let prepared = read_json_if_present::<Value>(&preprocessor)?.unwrap_or_default();
    let config = vit::config(&read_json(&path)?, &path, &prepared, &preprocessor)?;
    let weights = Weights::of_folder(folder)?;
    let built = || {
        if config.least() > weights.numbers() {
            let (least, there) = (config.least(), weights.numbers());
            let what = format!("the configuration asks for {least} numbers or more, the file has {there}");
            return Err(Error::format(&path, "settings", what));
        }
        let mut parameters = Parameters::new();
        let model = VitNetwork::new(&mut Builder::blank(&mut parameters), &config).map_err(|e| e.in_file(&path))?;
        let layout = vit::layout(&config);
        Ok((model, parameters, layout))
    };
    let built = built();
    Ok((config, weights, built))
}

/// Description, number of parameters, mismatches and weights of a folder.
pub(crate) fn inspect(folder: &Path) -> Result<Inspected> {
    let (config, weights, built) = found(folder)?;
    let VitConfig { image_size, patch_size, channels, d_model, ffn_dim, heads, layers, .. } = config;
    let sizes = format!("{layers} layers, width {d_model}, {heads} heads, feed-forward {ffn_dim}");
    let seen = format!("images of {image_size} × {image_size} × {channels} in patches of {patch_size}");
    let stem = if config.stem == Stem::Conv { ", a stem of convolutions" } else { "" };
    let words = format!("vit: {sizes}, {seen}{stem}, {} classes", config.labels.len());
    Ok(layout::inspected(words, built, weights))
}

impl Vit {
    /// Reads a folder in the Hugging Face layout.
    ///
    /// # Errors
    /// Names the file and the wrong field or tensor.
    pub fn open(folder: impl AsRef<Path>) -> Result<Vit> {
        let (config, weights, built) = found(folder.as_ref())?;
        let (model, mut parameters, layout) = built?;
        layout.fill(&mut parameters, &weights)?;
        Ok(Vit { config, parameters, model })
    }

    /// A new model with parameters initialized from the seed. Mean and deviation of channels default to 0.5.
    ///
    /// ```
    /// use qkv_models::image::Image;
    /// use qkv_models::{Vit, VitConfig};
    /// let labels = vec!["dark".into(), "light".into()];
    /// let sizes = VitConfig { image_size: 4, patch_size: 2, channels: 1, ..VitConfig::default() };
    /// let config = VitConfig { d_model: 8, heads: 2, labels, ..sizes };
    /// let vit = Vit::new(&config, 1)?;
    /// let found = vit.classify(&[Image::new(4, 4, 1, vec![200; 16])?], &qkv_nn::Machine::new(1))?;
    /// assert!((found[0].iter().sum::<f32>() - 1.0).abs() < 1e-5);
    /// # Ok::<(), qkv_models::Error>(())
    /// ```
    ///
    /// # Errors
    /// If sizes are inconsistent.
    pub fn new(config: &VitConfig, seed: u64) -> Result<Vit> {
        let mut config = config.clone();
        for numbers in [&mut config.mean, &mut config.deviation] {
            if numbers.is_empty() {
                *numbers = vec![0.5; config.channels];
            }
        }
        let mut parameters = Parameters::new();
        let model = VitNetwork::new(&mut Builder::new(&mut parameters, seed), &config)?;
        Ok(Vit { config, parameters, model })
    }

    /// A model with the layers of a trained one, for the classes of `config`.
    pub(crate) fn from_start(config: &VitConfig, start: &Start, seed: u64) -> Result<(Vit, Provenance)> {
        let mut vit = Vit::new(config, seed)?;
        let same_head = matches!(&start.architecture, Architecture::Vit(from) if from.labels == config.labels);
        let fresh = |name: &str| name.starts_with("head.") && !same_head;
        let found = vit::layout(config).fill_from(&mut vit.parameters, &start.weights, fresh, seed)?;
        Ok((vit, found))
    }

    /// Writes a folder that `transformers` reads.
    ///
    /// # Errors
    /// I/O errors.
    pub fn save(&self, folder: impl AsRef<Path>, storage: Storage) -> Result<()> {
        let folder = folder.as_ref();
        std::fs::create_dir_all(folder).map_err(|e| Error::file("write", folder, e))?;
        vit::layout(&self.config).write(&folder.join(WEIGHTS), &self.parameters, storage)?;
        for (name, json) in [(PREPROCESSOR_CONFIG, vit::preparation(&self.config)), (CONFIG, vit::json(&self.config))] {
            write_json(&folder.join(name), &json)?;
        }
        Ok(())
    }

    /// An image with the size and channels of the model.
    ///
    /// # Errors
    /// If the model's image size is too large.
    pub fn prepared(&self, image: &Image) -> Result<Image> {
        Ok(image.resized_in(self.config.channels, self.config.image_size, self.config.image_size)?)
    }

    /// [Prepared](Vit::prepared) images as the model's input: patches `[B, P, patch]`, with values channel by channel,
    /// row by row; with a stem, pixels `[B, H, W, C]`.
    fn inputs(&self, images: &[Image]) -> Tensor<f32> {
        let VitConfig { image_size, patch_size, channels, .. } = self.config;
        let grid = self.config.grid();
        let levels: Vec<[f32; 256]> = (0..channels)
            .map(|c| {
                let (mean, deviation) = (self.config.mean[c], self.config.deviation[c]);
                std::array::from_fn(|x| ((x as f64 / 255.0 - mean) / deviation) as f32)
            })
            .collect();
        let each = image_size * image_size * channels;
        let mut data = vec![0.0; images.len() * each];
        data.par_chunks_exact_mut(each.max(1)).zip(images).for_each(|(to, image)| match self.config.stem {
            Stem::Conv => image.write_levels(to, &levels),
            Stem::Patches | Stem::ResNet => image.write_patches(to, patch_size, &levels),
        });
        match self.config.stem {
            Stem::Patches => Tensor::new(data, &[images.len(), grid * grid, self.config.patch()]),
            Stem::Conv | Stem::ResNet => Tensor::new(data, &[images.len(), image_size, image_size, channels]),
        }
    }

    /// The loss of prepared images with one class each, or several with their shares; each gradient is multiplied by
    /// `scale`.
    pub(crate) fn loss(
        &self,
        tape: &mut Tape<'_, f32>,
        images: &[Image],
        classes: &[(&[u32], f64)],
        smoothing: f64,
        scale: f64,
    ) -> Result<PendingLoss> {
        let x = self.model.forward(tape, self.inputs(images))?; // (B, 1, C)
        let head = self.model.head();
        let mut entropy = |ids: &[u32], scale: f64| {
            tape.cross_entropy(&x, head.weight, head.bias, Target { ids, ignore: None, smoothing, scale })
        };
        // Images that are not mixed have a single class.
        if let Some((ids, _)) = classes.iter().find(|(_, share)| *share == 1.0) {
            return Ok(entropy(ids, scale));
        }
        let parts = classes.iter().map(|&(ids, share)| (share, entropy(ids, scale * share))).collect();
        Ok(PendingLoss::sum(parts, images.len()))
    }

    /// The probabilities of all classes, for each image, in the order of [`labels`](VitConfig::labels).
    ///
    /// # Errors
    /// If the model computes NaN.
    pub fn classify(&self, images: &[Image], machine: &Machine) -> Result<Vec<Vec<f32>>> {
        let images = images.iter().map(|image| self.prepared(image)).collect::<Result<Vec<_>>>()?;
        let tokens = self.config.grid() * self.config.grid() + 1;
        rayon::scope(|_| {
            let (pool, mut found) = (Pool::new(), Vec::with_capacity(images.len()));
            for images in images.chunks((TOKENS / tokens).max(1)) {
                let mut tape = Tape::inference(&self.parameters, &pool, machine);
                let x = self.model.forward(&mut tape, self.inputs(images))?;
                let scores = self.model.head().forward(&mut tape, &x); // [B, 1, K]
                finite::check(scores.value().data(), &self.parameters)?;
                found.extend(probabilities(scores.value().data(), scores.value().width()));
            }
            Ok(found)
        })
    }

    /// Runs the model over an image and captures its attentions.
    ///
    /// # Errors
    /// Errors from `qkv`.
    pub fn observe(&self, image: &Image, machine: &Machine) -> Result<ObservedImage> {
        let image = self.prepared(image)?;
        let pool = Pool::new();
        let mut tape = Tape::inference(&self.parameters, &pool, machine);
        tape.capture();
        let x = self.model.forward(&mut tape, self.inputs(std::slice::from_ref(&image)))?;
        let attentions = stacked(Group::Encoder, &tape.captured(), &self.parameters)?;
        let scores = self.model.head().forward(&mut tape, &x);
        let probabilities = probabilities(scores.value().data(), scores.value().width()).remove(0);
        Ok(ObservedImage { image, probabilities, attentions })
    }
}
