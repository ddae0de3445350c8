//! Images: PNG, JPEG, WebP and BMP files as rows of gray or RGB pixels, in the size that a model expects. The format is
//! recognized by the first bytes rather than by the name, and sizes are checked before memory is allocated.
//!
//! | module | owns |
//! | --- | --- |
//! | `decode` | PNG, JPEG and WebP, and the choice of the decoder |
//! | `bmp` | BMP |
//! | `fit` | an image in the size that a model expects |
//! | `orientation` | the EXIF orientation of photographs |
//! | `pixels` | pixels as the numbers that models read |
//! | `resize` | resampling |
//! | `sample` | a window of an image, scaled to the size of the image |
//! | `trim` | formulas cropped to their own size |
//! | [`idx`] | files of many small images and their classes, the format of MNIST |

mod bmp;
mod decode;
mod fit;
pub mod idx;
mod orientation;
mod pixels;
mod resize;
mod sample;
mod trim;

pub use fit::Fit;

use crate::files::input;
use crate::{Error, Result};
use std::path::Path;

/// The largest file, in bytes.
const LARGEST_FILE: u64 = 64 << 20;
/// The longest side, and the largest number of pixels: 33 million.
const LONGEST_SIDE: usize = 1 << 14;
const MOST_POINTS: usize = 1 << 25;

/// An image of 8 bits per channel.
#[derive(Clone, PartialEq, Eq)]
pub struct Image {
    width: usize,
    height: usize,
    channels: usize,
    points: Vec<u8>,
}

impl std::fmt::Debug for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Image({} × {}, {} channels)", self.width, self.height, self.channels)
    }
}

impl Image {
    /// From rows of pixels of one channel (gray) or three (red, green, blue).
    ///
    /// ```
    /// use qkv_formats::image::Image;
    /// let image = Image::new(2, 1, 1, vec![0, 255])?;
    /// assert_eq!(image.in_channels(3).points(), [0, 0, 0, 255, 255, 255]);
    /// assert!(Image::new(2, 2, 1, vec![0]).is_err());
    /// # Ok::<(), qkv_formats::Error>(())
    /// ```
    ///
    /// # Errors
    /// If the number of values does not fit the size, or the image is too large.
    pub fn new(width: usize, height: usize, channels: usize, points: Vec<u8>) -> Result<Image> {
        Image::fits(width, height).map_err(Error::invalid)?;
        if !matches!(channels, 1 | 3) || points.len() != width * height * channels {
            let what = format!("{} numbers are no image of {width} × {height} with {channels} channels", points.len());
            return Err(Error::invalid(what));
        }
        Ok(Image { width, height, channels, points })
    }

    /// Checks a size.
    fn fits(width: usize, height: usize) -> Result<(), String> {
        if width == 0 || height == 0 {
            return Err(format!("it is {width} × {height}, with nothing in it"));
        }
        if width.max(height) > LONGEST_SIDE || width * height > MOST_POINTS {
            return Err(format!(
                "it is {width} × {height}, at most {LONGEST_SIDE} each way and {MOST_POINTS} points are taken"
            ));
        }
        Ok(())
    }

    /// Reads a PNG, JPEG, WebP or BMP file, upright.
    ///
    /// # Errors
    /// Names the file and what is wrong with it.
    pub fn open(path: impl AsRef<Path>) -> Result<Image> {
        let path = path.as_ref();
        let bytes = input::read(path, LARGEST_FILE)?;
        Image::from_bytes(&bytes, path)
    }

    /// Decodes the bytes of a PNG, JPEG, WebP or BMP file; `path` is for errors.
    ///
    /// # Errors
    /// As [`open`](Image::open).
    pub fn from_bytes(bytes: &[u8], path: impl AsRef<Path>) -> Result<Image> {
        decode::decode(bytes).map_err(|what| Error::format(path, "image", what))
    }

    /// Width in pixels.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Height in pixels.
    pub fn height(&self) -> usize {
        self.height
    }

    /// 1 for gray, 3 for RGB.
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// Row by row, channels interleaved.
    pub fn points(&self) -> &[u8] {
        &self.points
    }

    /// Converts to gray (luma by ITU-R BT.601) or RGB.
    pub fn in_channels(&self, channels: usize) -> Image {
        let points = match (self.channels, channels) {
            (3, 1) => (self.points.chunks_exact(3))
                .map(|rgb| {
                    let [r, g, b] = [rgb[0], rgb[1], rgb[2]].map(u32::from);
                    ((299 * r + 587 * g + 114 * b + 500) / 1000) as u8
                })
                .collect(),
            (1, 3) => self.points.iter().flat_map(|&grey| [grey; 3]).collect(),
            _ => return self.clone(),
        };
        Image { channels, points, ..*self }
    }

    /// Mirrors the image, horizontally, vertically or both.
    pub fn mirrored(&self, across: bool, down: bool) -> Image {
        let turned = match (across, down) {
            (false, false) => 1,
            (true, false) => 2,
            (true, true) => 3,
            (false, true) => 4,
        };
        self.clone().upright(turned)
    }

    /// The weighted mean of two images of one size; the weight of this one is `share`.
    pub fn mixed(&self, other: &Image, share: f64) -> Image {
        let mix = |(&a, &b): (&u8, &u8)| (share * f64::from(a) + (1.0 - share) * f64::from(b)).round() as u8;
        Image { points: self.points.iter().zip(&other.points).map(mix).collect(), ..*self }
    }

    /// Fills a rectangle inside the image, given by its upper left corner, width and height.
    pub fn fill(&mut self, [left, top]: [usize; 2], [width, height]: [usize; 2], mut value: impl FnMut() -> u8) {
        let line = self.width * self.channels;
        for row in self.points.chunks_exact_mut(line).skip(top).take(height) {
            row[left * self.channels..][..width * self.channels].iter_mut().for_each(|point| *point = value());
        }
    }

    /// Shifts the image; uncovered pixels are black.
    pub fn moved(&self, right: isize, down: isize) -> Image {
        let mut points = vec![0; self.points.len()];
        for (y, row) in points.chunks_exact_mut(self.width * self.channels).enumerate() {
            let Some(from_y) = y.checked_add_signed(-down).filter(|&y| y < self.height) else { continue };
            for (x, point) in row.chunks_exact_mut(self.channels).enumerate() {
                let Some(from_x) = x.checked_add_signed(-right).filter(|&x| x < self.width) else { continue };
                let from = (from_y * self.width + from_x) * self.channels;
                point.copy_from_slice(&self.points[from..from + self.channels]);
            }
        }
        Image { points, ..*self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_that_moves_leaves_the_dark_behind() {
        let image = Image::new(3, 2, 1, vec![1, 2, 3, 4, 5, 6]).unwrap();
        assert_eq!(image.moved(1, 0).points(), [0, 1, 2, 0, 4, 5]);
        assert_eq!(image.moved(-1, 1).points(), [0, 0, 0, 2, 3, 0]);
        assert_eq!(image.moved(0, 9).points(), [0; 6]);
    }

    #[test]
    fn grey_is_how_light_a_color_looks() {
        let image = Image::new(2, 1, 3, vec![255, 255, 255, 0, 255, 0]).unwrap();
        assert_eq!(image.in_channels(1).points(), [255, 150]);
        assert_eq!(image.in_channels(3), image);
    }
}
