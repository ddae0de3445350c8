//! Images with their classes, for a vision model.

use super::augmentation::{Augmentation, beta};
use super::dataset::TrainBatch;
use crate::draws::Draws;
use crate::image::{Image, idx};
use crate::recipe::Data;
use crate::{Error, Recipe, Result, Vit};
use rayon::prelude::*;
use std::path::Path;

/// Images of a batch, each with its class and, if images are mixed, the class of the other image, which has one minus
/// the share.
pub(super) struct ClassedImages {
    pub images: Vec<Image>,
    pub classes: Vec<u32>,
    pub others: Vec<u32>,
    pub share: f64,
}

/// Purpose of random draws: the order of images.
const IMAGES: u32 = 6;

/// Images with their classes.
pub(super) struct ImageData {
    /// Training images, resized by [`resize`](ImageData::resize) once the model exists.
    train: Vec<Image>,
    classes: Vec<u32>,
    /// Validation images.
    pub dev: Vec<Image>,
    pub dev_classes: Vec<u32>,
    /// Names of the classes.
    pub names: Vec<String>,
    /// Tokens per image.
    each: usize,
    tokens: usize,
}

impl ImageData {
    /// Reads the images that a recipe names.
    pub fn read(recipe: &Recipe) -> Result<ImageData> {
        let Data::Images { images, labels, dev_images, dev_labels, names } = &recipe.data else {
            return Err(Error::invalid("the recipe names no images"));
        };
        let read = |images: &Path, labels: &Path| {
            let (found, classes) = (idx::images(images)?, idx::labels(labels)?);
            if found.len() != classes.len() || found.is_empty() {
                let (count, there) = (found.len(), classes.len());
                let what = format!("it has {there} classes, `{}` has {count} images", images.display());
                return Err(Error::format(labels, "idx", what));
            }
            Ok((found, classes.into_iter().map(u32::from).collect::<Vec<u32>>()))
        };
        let (train, classes) = read(images, labels)?;
        let (dev, dev_classes) = read(dev_images, dev_labels)?;
        let highest = classes.iter().chain(&dev_classes).max().map_or(0, |&class| class as usize);
        let numbers = || (0..=highest).map(|class| class.to_string()).collect();
        let names: Vec<String> = if names.is_empty() { numbers() } else { names.clone() };
        if names.len() <= highest {
            return Err(Error::invalid(format!(
                "`data.names` has {} names, the highest class is {highest}",
                names.len()
            )));
        }
        Ok(ImageData { train, classes, dev, dev_classes, names, each: 1, tokens: recipe.train.tokens })
    }

    /// The side length in pixels, if all images are squares of one size.
    pub fn side(&self) -> Option<usize> {
        let side = self.train.first()?.width();
        let square = |image: &Image| image.width() == side && image.height() == side;
        self.train.iter().chain(&self.dev).all(square).then_some(side)
    }

    /// 3 if any image is in color, 1 otherwise.
    pub fn channels(&self) -> usize {
        self.train.iter().map(Image::channels).max().unwrap_or(1)
    }

    /// Resizes the training images for a vision model.
    pub fn resize(&mut self, vit: &Vit) -> Result<()> {
        self.train = self.train.iter().map(|image| vit.prepared(image)).collect::<Result<_>>()?;
        self.each = vit.config.grid() * vit.config.grid() + 1;
        Ok(())
    }

    /// The batches of an epoch: a function of seed and epoch.
    pub fn epoch(&self, seed: u64, epoch: u64) -> Vec<Vec<usize>> {
        let mut order: Vec<usize> = (0..self.train.len()).collect();
        Draws::new(seed, [IMAGES, epoch as u32, (epoch >> 32) as u32]).shuffle(&mut order);
        order.chunks((self.tokens / self.each).max(1)).map(<[usize]>::to_vec).collect()
    }

    /// Builds a batch of images, each randomly shifted, mirrored, recolored and partly erased, and mixed with another
    /// of the batch.
    pub fn batch(&self, entries: &[usize], mut augmentation: Augmentation) -> TrainBatch {
        let images = augmentation.each(entries, |how, at, draws| how.classed(&self.train[at], draws));
        let Augmentation { mut draws, mixup, .. } = augmentation;
        let classes: Vec<u32> = entries.iter().map(|&at| self.classes[at]).collect();
        if mixup <= 0.0 || images.len() < 2 {
            return TrainBatch::Images(ClassedImages { images, others: classes.clone(), classes, share: 1.0 });
        }
        // Each is mixed with the next one of the batch, whose order is random.
        let share = beta(mixup, &mut draws);
        let next = |at: usize| (at + 1) % images.len();
        let mixed = (0..images.len()).into_par_iter().map(|at| images[at].mixed(&images[next(at)], share)).collect();
        let others = (0..classes.len()).map(|at| classes[next(at)]).collect();
        TrainBatch::Images(ClassedImages { images: mixed, classes, others, share })
    }

    /// Sizes of the data, in words.
    pub fn summary(&self) -> String {
        let ImageData { train, dev, names, .. } = self;
        let size = train.first().map_or(String::new(), |image| format!("{image:?}"));
        format!("{} images with {} labels, {} to measure on, each {size}", train.len(), names.len(), dev.len())
    }
}
