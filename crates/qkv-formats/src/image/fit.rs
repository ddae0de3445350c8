//! Fits an image of any size to the size that a model expects.

use super::{Image, trim};
use crate::Result;
use serde::{Deserialize, Serialize};

/// How an image of another size is fitted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fit {
    /// Resized; the aspect ratio is not kept.
    #[default]
    Stretch,
    /// Shrunk until it fits, never enlarged, and padded with white, at the left and vertically centered: rows of text,
    /// say.
    Pad,
    /// As `Pad`, after cropping to what is not white: a formula on a page.
    Ink,
    /// Shrunk or enlarged until it fits, and centered on black.
    Letterbox,
    /// Cropped to its ink in gray, shrunk until it fits, never enlarged, and padded with white to multiples of 32
    /// pixels: formulas, each in its own size, at most the model's.
    Trim,
}

impl Fit {
    /// The number that the sides of images must be multiples of.
    pub fn step(self) -> usize {
        if self == Fit::Trim { trim::STEP } else { 1 }
    }
}

/// A pixel with a level below this counts as ink.
const INK: u8 = 200;
/// Pixels of white that stay around the ink.
const MARGIN: usize = 4;

impl Image {
    /// Fitted to `width × height`, or to at most that if it is trimmed.
    ///
    /// # Errors
    /// If the size is zero or too large.
    pub fn fitted(&self, width: usize, height: usize, fit: Fit) -> Result<Image> {
        let whole = match fit {
            Fit::Stretch => return self.resized(width, height),
            Fit::Trim => return self.trimmed(width, height),
            Fit::Pad | Fit::Letterbox => None,
            Fit::Ink => self.inked(),
        };
        let whole = whole.as_ref().unwrap_or(self);
        let most = if fit == Fit::Letterbox { f64::INFINITY } else { 1.0 };
        let scale = (width as f64 / whole.width as f64).min(height as f64 / whole.height as f64).min(most);
        let fitted = |old: usize, most: usize| ((old as f64 * scale).round() as usize).clamp(1, most.max(1));
        let small = whole.resized(fitted(whole.width, width), fitted(whole.height, height))?;
        let (ground, left) = if fit == Fit::Letterbox { (0, (width - small.width) / 2) } else { (255, 0) };
        let mut page = Image::new(width, height, self.channels, vec![ground; width * height * self.channels])?;
        let top = (height - small.height) / 2;
        let line = small.width * self.channels;
        for (row, from) in
            page.points.chunks_exact_mut(width * self.channels).skip(top).zip(small.points.chunks_exact(line))
        {
            row[left * self.channels..][..line].copy_from_slice(from);
        }
        Ok(page)
    }

    /// The part that is not white, with a margin; `None` if everything is white.
    fn inked(&self) -> Option<Image> {
        let (mut left, mut right, mut top, mut bottom) = (self.width, 0, self.height, 0);
        for (y, row) in self.points.chunks_exact(self.width * self.channels).enumerate() {
            for (x, pixel) in row.chunks_exact(self.channels).enumerate() {
                if pixel.iter().any(|&level| level < INK) {
                    (left, right) = (left.min(x), right.max(x));
                    (top, bottom) = (top.min(y), bottom.max(y));
                }
            }
        }
        if left > right {
            return None;
        }
        let (left, top) = (left.saturating_sub(MARGIN), top.saturating_sub(MARGIN));
        let (right, bottom) = ((right + MARGIN).min(self.width - 1), (bottom + MARGIN).min(self.height - 1));
        Some(self.cropped([left, top], [right + 1 - left, bottom + 1 - top]))
    }

    /// A rectangle inside the image, given by its upper left corner, width and height.
    pub fn cropped(&self, [left, top]: [usize; 2], [width, height]: [usize; 2]) -> Image {
        let mut points = Vec::with_capacity(width * height * self.channels);
        for row in self.points.chunks_exact(self.width * self.channels).skip(top).take(height) {
            points.extend_from_slice(&row[left * self.channels..][..width * self.channels]);
        }
        Image { width, height, channels: self.channels, points }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_formula_is_cut_out_of_its_page() {
        let mut points = vec![255; 40 * 30];
        points[20 * 40 + 10] = 0;
        points[22 * 40 + 14] = 90;
        let page = Image::new(40, 30, 1, points).unwrap();
        let found = page.fitted(16, 16, Fit::Ink).unwrap();
        // 13 × 11 with the margins, at the left and in the middle.
        assert_eq!((found.width(), found.height()), (16, 16));
        assert_eq!((found.points()[6 * 16 + 4], found.points()[8 * 16 + 8]), (0, 90));
        assert_eq!(found.points().iter().filter(|&&x| x < 255).count(), 2);
        let white = Image::new(9, 4, 1, vec![255; 36]).unwrap();
        assert_eq!(white.fitted(3, 3, Fit::Ink).unwrap().points(), [255; 9]);
    }

    #[test]
    fn a_letterbox_has_black_above_and_below_or_beside() {
        let light = Image::new(4, 2, 1, vec![200; 8]).unwrap();
        let found = light.fitted(8, 6, Fit::Letterbox).unwrap();
        let rows: Vec<u8> = found.points().chunks_exact(8).map(|row| row[7]).collect();
        assert_eq!(rows, [0, 200, 200, 200, 200, 0]);
        let found = light.fitted(4, 1, Fit::Letterbox).unwrap();
        assert_eq!(found.points(), [0, 200, 200, 0]);
    }

    #[test]
    fn what_is_too_wide_becomes_smaller_and_what_is_small_stays() {
        let line = Image::new(8, 2, 3, vec![0; 48]).unwrap();
        let found = line.fitted(4, 4, Fit::Pad).unwrap();
        let dark: Vec<usize> = (0..16).filter(|&at| found.points()[3 * at] == 0).collect();
        assert_eq!(dark, [4, 5, 6, 7]);
        assert_eq!(line.fitted(8, 2, Fit::Pad).unwrap(), line);
        assert_eq!(line.fitted(2, 2, Fit::Stretch).unwrap().points(), [0; 12]);
    }
}
