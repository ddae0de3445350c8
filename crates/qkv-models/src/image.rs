//! Images: from PNG and JPEG files to rows of grey or colour, in the size that a model takes. What a file is, its first bytes
//! say and not its name; how large it may be is decided before memory is asked for.
//!
//! | module | owns |
//! | --- | --- |
//! | `decode` | PNG and JPEG |
//! | `resize` | another size |
//! | [`idx`] | files of many small images and their classes, as MNIST has them |

mod decode;
pub mod idx;
mod resize;

use crate::files::input;
use crate::{Error, Result};
use std::path::Path;

/// The largest file, in bytes.
const LARGEST_FILE: u64 = 64 << 20;
/// The longest side, and the most points: 33 million, what a large camera gives.
const LONGEST_SIDE: usize = 1 << 14;
const MOST_POINTS: usize = 1 << 25;

/// An image of 8 bits a channel.
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
    /// From rows of points, each of one channel (grey) or of three (red, green, blue).
    ///
    /// ```
    /// use qkv_models::image::Image;
    /// let image = Image::new(2, 1, 1, vec![0, 255])?;
    /// assert_eq!(image.in_channels(3).points(), [0, 0, 0, 255, 255, 255]);
    /// assert!(Image::new(2, 2, 1, vec![0]).is_err());
    /// # Ok::<(), qkv_models::Error>(())
    /// ```
    ///
    /// # Errors
    /// Where that many points do not make such an image, or it is larger than any that is taken.
    pub fn new(width: usize, height: usize, channels: usize, points: Vec<u8>) -> Result<Image> {
        Image::fits(width, height).map_err(Error::invalid)?;
        if !matches!(channels, 1 | 3) || points.len() != width * height * channels {
            let what = format!("{} numbers are no image of {width} × {height} with {channels} channels", points.len());
            return Err(Error::invalid(what));
        }
        Ok(Image { width, height, channels, points })
    }

    /// Whether a size is taken; else why not.
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

    /// Reads a PNG or JPEG file.
    ///
    /// # Errors
    /// Names the file and what is wrong with it.
    pub fn open(path: impl AsRef<Path>) -> Result<Image> {
        let path = path.as_ref();
        let bytes = input::read(path, LARGEST_FILE)?;
        Image::from_bytes(&bytes, path)
    }

    /// The same from bytes; `path` is what errors call them.
    ///
    /// # Errors
    /// As [`open`](Image::open).
    pub fn from_bytes(bytes: &[u8], path: impl AsRef<Path>) -> Result<Image> {
        decode::decode(bytes).map_err(|what| Error::format(path, "image", what))
    }

    /// Points across.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Points down.
    pub fn height(&self) -> usize {
        self.height
    }

    /// 1 for grey, 3 for red, green and blue.
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// Row by row, the channels of each point side by side.
    pub fn points(&self) -> &[u8] {
        &self.points
    }

    /// The same in grey or in colour. Grey is how light a colour looks (ITU-R BT.601).
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

    /// The same moved by some points, dark where nothing was.
    pub(crate) fn moved(&self, right: isize, down: isize) -> Image {
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
    fn grey_is_how_light_a_colour_looks() {
        let image = Image::new(2, 1, 3, vec![255, 255, 255, 0, 255, 0]).unwrap();
        assert_eq!(image.in_channels(1).points(), [255, 150]);
        assert_eq!(image.in_channels(3), image);
    }
}
