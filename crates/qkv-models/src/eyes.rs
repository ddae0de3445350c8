//! Eyes: a trained, frozen [`ResNet`] whose features a model attends to in place of pixels. Its weights are not part of
//! the model, and the features of an image are cached, so that training computes them once per image.

use crate::image::Image;
use crate::image_encoder::ImageEncoderConfig;
use crate::resnet::ResNet;
use crate::{Error, Result};
use half::bf16;
use qkv_formats::numbers;
use qkv_nn::{Machine, Tensor};
use rayon::prelude::*;
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::sync::{Arc, Mutex};

/// Channels of a ResNet's features.
pub(crate) const WIDTH: usize = 2048;
/// Side length of a place in pixels.
pub(crate) const STRIDE: usize = 32;
/// The subfolder with the eyes of a model that ships its own.
const BESIDE: &str = "eyes";
/// The largest number of cached values: 8 GiB.
const MOST_VALUES: usize = 1 << 32;

/// A ResNet, and a cache of its features.
#[derive(Debug)]
pub(crate) struct Eyes {
    resnet: ResNet,
    seen: Mutex<HashMap<u64, Arc<[bf16]>>>,
}

impl Eyes {
    /// The eyes that a model's settings ask for, if any: from the subfolder `eyes` of the model if there is one, else
    /// from the folder in the settings.
    pub fn of(config: &ImageEncoderConfig, model: Option<&Path>) -> Result<Option<Eyes>> {
        let Some(named) = &config.eyes else { return Ok(None) };
        let beside = model.map(|folder| folder.join(BESIDE)).filter(|folder| folder.is_dir());
        let folder = beside.as_deref().unwrap_or(named);
        let resnet = ResNet::open(folder).map_err(|e| {
            e.with_hint("`image.eyes` is the folder of a ResNet-50; see `qkv describe` in the documentation")
        })?;
        if resnet.width() != WIDTH {
            let what = format!("the eyes in `{}` have {} features, expected {WIDTH}", folder.display(), resnet.width());
            return Err(Error::invalid(what));
        }
        Ok(Some(Eyes { resnet, seen: Mutex::default() }))
    }

    /// The features of prepared images, `[B, H / 32, W / 32, 2048]`.
    pub fn look(&self, images: &[Image], machine: &Machine) -> Result<Tensor<f32>> {
        let Some(first) = images.first() else { return Err(Error::invalid("there are no images to look at")) };
        let grid = [first.height(), first.width()].map(|side| side.div_ceil(STRIDE));
        let each = grid[0] * grid[1] * WIDTH;
        let keys: Vec<u64> = images.par_iter().map(key).collect();
        let mut found: Vec<Option<Arc<[bf16]>>> = {
            let seen = self.seen.lock().unwrap_or_else(|e| e.into_inner());
            keys.iter().map(|key| seen.get(key).cloned()).collect()
        };
        let missing: Vec<usize> = (0..images.len()).filter(|&at| found[at].is_none()).collect();
        if !missing.is_empty() {
            let new: Vec<Image> = missing.iter().map(|&at| images[at].clone()).collect();
            let features = self.resnet.features(&new, machine)?;
            let mut seen = self.seen.lock().unwrap_or_else(|e| e.into_inner());
            if (seen.len() + new.len()).saturating_mul(each) > MOST_VALUES {
                seen.clear();
            }
            for (&at, features) in missing.iter().zip(features.data().chunks_exact(each)) {
                let features: Arc<[bf16]> = numbers::to_bf16(features).into();
                seen.insert(keys[at], features.clone());
                found[at] = Some(features);
            }
        }
        let mut data = vec![0.0; images.len() * each];
        data.par_chunks_exact_mut(each).zip(&found).for_each(|(to, features)| {
            let features = features.as_ref().expect("what was missing was looked at");
            numbers::widen_bf16(features, to);
        });
        Ok(Tensor::new(data, &[images.len(), grid[0], grid[1], WIDTH]))
    }
}

/// A hash of an image's size and pixels.
fn key(image: &Image) -> u64 {
    let mut hasher = DefaultHasher::new();
    (image.width(), image.height(), image.points()).hash(&mut hasher);
    hasher.finish()
}

/// The input of a model for prepared images: their pixels, or the features that its eyes compute.
pub(crate) fn input(
    config: &ImageEncoderConfig,
    eyes: Option<&Eyes>,
    images: &[Image],
    machine: &Machine,
) -> Result<Tensor<f32>> {
    match eyes {
        Some(eyes) => eyes.look(images, machine),
        None => Ok(config.pixels(images)),
    }
}
