//! Random changes of training images: position, scale, colors, and erased parts. Boxes move with their image. Each
//! image of a batch has its own random stream, so that threads work in parallel and the batch is the same for any
//! number of them.

use crate::draws::Draws;
use crate::image::Image;
use rayon::prelude::*;

/// Random augmentation of one batch.
#[derive(Clone)]
pub(super) struct Augmentation {
    pub draws: Draws,
    /// Fraction of words replaced by UNK.
    pub words: f64,
    /// Fraction of BPE merges skipped.
    pub merges: f64,
    /// Maximum shift of images, in pixels.
    pub shift: usize,
    /// Whether images are mirrored.
    pub mirror: bool,
    /// Probability that a rectangle of an image is erased.
    pub erase: f64,
    /// α of the Beta distribution of the share by which images are mixed.
    pub mixup: f64,
    /// Largest change of scale, as a fraction.
    pub zoom: f64,
    /// Largest change of brightness and contrast, as a fraction; each channel's contrast changes by up to half of it
    /// more.
    pub color: f64,
}

/// Purpose of random draws: the changes of one image.
const IMAGE: u32 = 11;
/// The smallest visible part of a box, as a fraction of its area, with which it still counts as an object.
const VISIBLE: f64 = 0.4;
/// The gray around an image with boxes that became smaller.
const SURROUND: u8 = 128;

/// Boxes: a class each, and left, top, right and bottom as fractions of the image.
pub(super) type ClassedBoxes = Vec<(usize, [f64; 4])>;

impl Augmentation {
    /// Applies `change` to each entry in parallel, each with its own random stream.
    pub fn each<R: Send>(
        &mut self,
        entries: &[usize],
        change: impl Fn(&Augmentation, usize, &mut Draws) -> R + Sync,
    ) -> Vec<R> {
        let seed = u64::from(self.draws.word()) << 32 | u64::from(self.draws.word());
        let this = &*self;
        let one = |(number, &at): (usize, &usize)| change(this, at, &mut Draws::new(seed, [IMAGE, number as u32, 0]));
        entries.par_iter().enumerate().map(one).collect()
    }

    /// An image with a class.
    pub fn classed(&self, image: &Image, draws: &mut Draws) -> Image {
        let mut by = || draws.below(2 * self.shift + 1) as isize - self.shift as isize;
        let mut image = if self.shift > 0 { image.moved(by(), by()) } else { image.clone() };
        if self.mirror && draws.below(2) == 1 {
            image = image.mirrored(true, false);
        }
        self.recolor(&mut image, draws);
        if self.erase > 0.0 && draws.unit() < self.erase {
            erase_part(&mut image, draws);
        }
        image
    }

    /// An image of text on white paper, which is neither mirrored nor erased.
    pub fn written(&self, image: &Image, draws: &mut Draws) -> Image {
        if self.shift == 0 && self.zoom <= 0.0 {
            return image.clone();
        }
        let (wide, high) = (image.width() as f64, image.height() as f64);
        let by = |draws: &mut Draws| (2.0 * draws.unit() - 1.0) * self.shift as f64;
        let [x, y] = [by(draws), by(draws)];
        // Text only becomes smaller: enlarged, it could leave the page.
        let [across, down] = [0, 1].map(|_| 1.0 + self.zoom * draws.unit());
        let mut image = image.sampled([x, y - high * (down - 1.0) / 2.0, wide * across, high * down], 255);
        self.recolor(&mut image, draws);
        image
    }

    /// An image with boxes, and the visible parts of the boxes.
    pub fn boxed(&self, image: &Image, boxes: &ClassedBoxes, draws: &mut Draws) -> (Image, ClassedBoxes) {
        let mut flip = || self.mirror && draws.below(2) == 1;
        let flips = [flip(), flip()];
        let mut image = image.mirrored(flips[0], flips[1]);
        let mut boxes: ClassedBoxes = boxes.iter().map(|&(class, edges)| (class, mirrored(edges, flips))).collect();
        if self.zoom > 0.0 {
            let window = self.window(draws);
            let [wide, high] = [image.width() as f64, image.height() as f64];
            let [left, top, across, down] = window;
            image = image.sampled([left * wide, top * high, across * wide, down * high], SURROUND);
            boxes = boxes.iter().filter_map(|&(class, edges)| Some((class, seen_through(edges, window)?))).collect();
        }
        self.recolor(&mut image, draws);
        (image, boxes)
    }

    /// Left, top, width and height of a random window, as fractions of the image. Along each axis, it lies inside the
    /// image if it is smaller, and around it if larger.
    fn window(&self, draws: &mut Draws) -> [f64; 4] {
        let mut stretch = |most: f64| (most * (2.0 * draws.unit() - 1.0)).exp();
        let (scale, ratio) = (stretch((1.0 + self.zoom).ln()), stretch((1.0 + self.zoom / 4.0).ln()));
        let [across, down] = [scale * ratio, scale / ratio];
        let mut start = |side: f64| draws.unit() * (1.0 - side);
        [start(across), start(down), across, down]
    }

    fn recolor(&self, image: &mut Image, draws: &mut Draws) {
        if self.color <= 0.0 {
            return;
        }
        let mut change = |most: f64| most * (2.0 * draws.unit() - 1.0);
        let (light, contrast) = (change(self.color), 1.0 + change(self.color));
        let tables: Vec<[u8; 256]> = (0..image.channels())
            .map(|_| {
                let gain = contrast * (1.0 + change(self.color / 2.0));
                let level = |x: usize| ((x as f64 - 128.0) * gain + 128.0 + 128.0 * light).round().clamp(0.0, 255.0);
                std::array::from_fn(|x| level(x) as u8)
            })
            .collect();
        image.map_channels(&tables);
    }
}

/// A box after its image was mirrored horizontally, vertically, or both.
fn mirrored([left, top, right, bottom]: [f64; 4], [across, down]: [bool; 2]) -> [f64; 4] {
    let (left, right) = if across { (1.0 - right, 1.0 - left) } else { (left, right) };
    let (top, bottom) = if down { (1.0 - bottom, 1.0 - top) } else { (top, bottom) };
    [left, top, right, bottom]
}

/// A box as fractions of a window of the image, clipped at its edges; `None` if too little of it is left.
fn seen_through(edges: [f64; 4], [left, top, across, down]: [f64; 4]) -> Option<[f64; 4]> {
    let whole = |x: f64, start: f64, side: f64| (x - start) / side;
    let moved = [
        whole(edges[0], left, across),
        whole(edges[1], top, down),
        whole(edges[2], left, across),
        whole(edges[3], top, down),
    ];
    let cut = moved.map(|edge| edge.clamp(0.0, 1.0));
    let area = |[left, top, right, bottom]: [f64; 4]| (right - left).max(0.0) * (bottom - top).max(0.0);
    (area(cut) > 0.0 && area(cut) >= VISIBLE * area(moved)).then_some(cut)
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

/// A draw from Beta(α, α) with α of at most 1, by Jöhnk's method.
pub(super) fn beta(alpha: f64, draws: &mut Draws) -> f64 {
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

    fn augmentation(zoom: f64, mirror: bool, color: f64) -> Augmentation {
        let draws = Draws::new(7, [1, 1, 1]);
        Augmentation { draws, words: 0.0, merges: 0.0, shift: 0, mirror, erase: 0.0, mixup: 0.0, zoom, color }
    }

    #[test]
    fn a_box_is_mirrored_with_its_image() {
        let edges = [0.1, 0.2, 0.4, 0.9];
        for flips in [[false, false], [true, false], [false, true], [true, true]] {
            let once = mirrored(edges, flips);
            assert!(once[0] < once[2] && once[1] < once[3]);
            assert!(mirrored(once, flips).iter().zip(edges).all(|(a, b)| (a - b).abs() < 1e-12));
        }
        assert_eq!(mirrored([0.25, 0.5, 0.5, 1.0], [true, true]), [0.5, 0.0, 0.75, 0.5]);
    }

    #[test]
    fn what_a_box_is_around_stays_in_it_and_too_small_a_part_is_no_object() {
        // A light rectangle on a dark background: after any change, the light pixels are those in the box.
        let (wide, high) = (64, 48);
        let mut image = Image::new(wide, high, 3, vec![10; wide * high * 3]).unwrap();
        image.fill([16, 12], [24, 18], || 250);
        let boxes = vec![(1, [0.25, 0.25, 0.625, 0.625])];
        let mut seen = 0;
        for at in 0..200 {
            let (changed, found) = augmentation(0.5, true, 0.2).boxed(&image, &boxes, &mut Draws::new(at, [1, 2, 3]));
            let Some(&(class, edges)) = found.first() else { continue };
            seen += 1;
            assert_eq!((class, found.len()), (1, 1));
            // The gray surroundings are recolored with the rest, and stay darker.
            let light = |x: usize, y: usize| changed.points()[3 * (y * wide + x)] > 185;
            let columns: Vec<usize> = (0..wide).filter(|&x| (0..high).any(|y| light(x, y))).collect();
            let rows: Vec<usize> = (0..high).filter(|&y| (0..wide).any(|x| light(x, y))).collect();
            let ends = [(columns[0], 0, wide), (rows[0], 1, high)];
            for (first, axis, side) in ends {
                assert!((first as f64 - edges[axis] * side as f64).abs() < 1.5, "{edges:?}, {first}");
            }
            let last = (*columns.last().unwrap() + 1) as f64;
            assert!((last - edges[2] * wide as f64).abs() < 1.5, "{edges:?}, {last}");
        }
        assert!(seen > 150, "{seen}");
        assert_eq!(seen_through([0.0, 0.0, 0.5, 1.0], [0.4, 0.0, 0.5, 1.0]), None);
        assert!(seen_through([0.0, 0.0, 0.5, 1.0], [0.25, 0.0, 0.5, 1.0]).is_some());
    }

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

    #[test]
    fn images_change_alike_for_any_number_of_threads() {
        let image = Image::new(8, 8, 1, (0..64).collect()).unwrap();
        let changed = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let mut augmentation = augmentation(0.3, true, 0.3);
            pool.install(|| augmentation.each(&[0, 1, 2, 3, 4], |this, _, draws| this.classed(&image, draws)))
        };
        assert_eq!(changed(1), changed(3));
    }
}
