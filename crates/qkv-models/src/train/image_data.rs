//! Images with their classes, for a vision model.

use super::dataset::{Augmentation, TrainBatch};
use crate::draws::Draws;
use crate::image::{Image, idx};
use crate::recipe::Data;
use crate::{Error, Recipe, Result, Vit};
use std::path::Path;

/// Images of a batch, each with its class and, where images are mixed, with the class of the other, which has one minus
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

    /// 3 where an image is in color, 1 otherwise.
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

    /// Builds a batch of images, each moved, mirrored and partly erased at random, and mixed with another of the batch.
    pub fn batch(&self, entries: &[usize], augmentation: Augmentation) -> TrainBatch {
        let Augmentation { mut draws, shift, mirror, erase, mixup, .. } = augmentation;
        let mut changed = |&at: &usize| {
            let mut by = || draws.below(2 * shift + 1) as isize - shift as isize;
            let mut image = if shift > 0 { self.train[at].moved(by(), by()) } else { self.train[at].clone() };
            if mirror && draws.below(2) == 1 {
                image = image.mirrored(true, false);
            }
            if erase > 0.0 && draws.unit() < erase {
                erase_part(&mut image, &mut draws);
            }
            image
        };
        let images: Vec<Image> = entries.iter().map(&mut changed).collect();
        let classes: Vec<u32> = entries.iter().map(|&at| self.classes[at]).collect();
        if mixup <= 0.0 || images.len() < 2 {
            return TrainBatch::Images(ClassedImages { images, others: classes.clone(), classes, share: 1.0 });
        }
        // Each with the next one of the batch, which is in random order.
        let share = beta(mixup, &mut draws);
        let next = |at: usize| (at + 1) % images.len();
        let mixed = (0..images.len()).map(|at| images[at].mixed(&images[next(at)], share)).collect();
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

/// Fills a rectangle of 2 to 25 % of an image with noise.
fn erase_part(image: &mut Image, draws: &mut Draws) {
    let (wide, high) = (image.width(), image.height());
    let area = (0.02 + 0.23 * draws.unit()) * (wide * high) as f64;
    let ratio = (0.3f64.ln() + draws.unit() * (1.0 / 0.3f64 / 0.3).ln()).exp();
    let side = |length: f64, most: usize| (length.round() as usize).clamp(1, most);
    let (across, down) = (side((area * ratio).sqrt(), wide), side((area / ratio).sqrt(), high));
    let (left, top) = (draws.below(wide - across + 1), draws.below(high - down + 1));
    image.fill([left, top], [across, down], || draws.below(256) as u8);
}

/// A draw from Beta(α, α) with α of at most 1: Jöhnk's method.
fn beta(alpha: f64, draws: &mut Draws) -> f64 {
    loop {
        let (x, y) = (draws.unit().powf(1.0 / alpha), draws.unit().powf(1.0 / alpha));
        if x + y > 0.0 && x + y <= 1.0 {
            return x / (x + y);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_of_mixed_images_are_as_the_distribution_says() {
        let mut draws = Draws::new(3, [1, 2, 3]);
        for alpha in [0.2, 0.5, 1.0] {
            let drawn: Vec<f64> = (0..4000).map(|_| beta(alpha, &mut draws)).collect();
            let mean = drawn.iter().sum::<f64>() / 4000.0;
            let variance = drawn.iter().map(|x| (x - 0.5) * (x - 0.5)).sum::<f64>() / 4000.0;
            assert!((mean - 0.5).abs() < 0.03, "{alpha}: {mean}");
            assert!((variance - 0.25 / (2.0 * alpha + 1.0)).abs() < 0.01, "{alpha}: {variance}");
        }
    }

    #[test]
    fn a_part_of_an_image_is_erased_and_mixing_is_a_mean() {
        let mut draws = Draws::new(5, [1, 2, 3]);
        for _ in 0..50 {
            let mut image = Image::new(20, 10, 1, vec![7; 200]).unwrap();
            erase_part(&mut image, &mut draws);
            let changed = image.points().iter().filter(|&&x| x != 7).count();
            assert!((1..=100).contains(&changed), "{changed}");
        }
        let [dark, light] = [0, 200].map(|x| Image::new(1, 1, 1, vec![x]).unwrap());
        assert_eq!(dark.mixed(&light, 0.25).points(), [150]);
    }
}
