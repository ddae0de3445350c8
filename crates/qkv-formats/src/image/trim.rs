//! Images of formulas as pix2tex expects them: dark on white, cropped from their page, in their own size.

use super::Image;
use crate::Result;

/// Sides of a trimmed image are multiples of this many pixels.
pub(super) const STEP: usize = 32;
/// Darker levels are ink.
const INK: f64 = 128.0;

impl Image {
    /// Cropped to its ink, in gray levels, dark on white, shrunk if it is larger than `width × height`, and padded with
    /// white at the right and the bottom to multiples of 32 pixels.
    pub(super) fn trimmed(&self, width: usize, height: usize) -> Result<Image> {
        let once = self.in_channels(1).cut_out();
        let ratio = (once.width as f64 / width as f64).max(once.height as f64 / height as f64);
        let smaller = |side: usize| floor_quotient(side as f64, ratio).max(1.0) as usize;
        let fitting = if ratio > 1.0 { once.resized(smaller(once.width), smaller(once.height))? } else { once };
        Ok(fitting.cut_out().in_channels(self.channels))
    }

    /// Stretches the levels so that they start at black, makes the image dark on white, crops it to its ink, and pads
    /// it.
    fn cut_out(&self) -> Image {
        let darkest = f64::from(self.points.iter().copied().min().unwrap_or(0));
        let stretched = |x: u8| match darkest < 255.0 {
            true => (f64::from(x) - darkest) / (255.0 - darkest) * 255.0,
            false => 255.0,
        };
        let levels: Vec<f64> = self.points.iter().map(|&x| stretched(x)).collect();
        let dark_on_light = levels.iter().sum::<f64>() / levels.len() as f64 > INK;
        let is_ink = |x: f64| if dark_on_light { x < INK } else { x > INK };
        let (mut left, mut right, mut top, mut bottom) = (self.width, 0, self.height, 0);
        for (at, _) in levels.iter().enumerate().filter(|(_, x)| is_ink(**x)) {
            let (x, y) = (at % self.width, at / self.width);
            (left, right, top, bottom) = (left.min(x), right.max(x), top.min(y), bottom.max(y));
        }
        if left > right {
            (left, right, top, bottom) = (0, self.width - 1, 0, self.height - 1);
        }
        let [width, height] = [right + 1 - left, bottom + 1 - top].map(|side| side.next_multiple_of(STEP));
        let mut points = vec![255; width * height];
        for (row, from) in points.chunks_exact_mut(width).zip(levels.chunks_exact(self.width).skip(top)) {
            let from = from[left..=right].iter().map(|&x| if dark_on_light { x } else { 255.0 - x });
            row.iter_mut().zip(from).for_each(|(to, x)| *to = x as u8);
        }
        for row in points.chunks_exact_mut(width).skip(bottom + 1 - top) {
            row.fill(255);
        }
        Image { width, height, channels: 1, points }
    }
}

/// `⌊a / b⌋` as NumPy computes it, from the remainder: the quotient itself may be rounded up.
fn floor_quotient(a: f64, b: f64) -> f64 {
    let quotient = (a - a % b) / b;
    let below = quotient.floor();
    if quotient - below > 0.5 { below + 1.0 } else { below }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_formula_is_cut_to_its_ink_and_keeps_its_size() {
        let mut points = vec![250; 100 * 90];
        (10..50).for_each(|x| points[20 * 100 + x] = 40);
        points[29 * 100 + 12] = 145;
        points[25 * 100 + 30] = 100;
        let page = Image::new(100, 90, 1, points).unwrap();
        let found = page.trimmed(672, 192).unwrap();
        assert_eq!((found.width(), found.height()), (64, 32));
        // Levels begin with the darkest: 40 is 0, 145 would be 124 and is ink still, 250 is 249 within the box.
        assert_eq!((found.points()[0], found.points()[39], found.points()[40]), (0, 0, 255));
        assert_eq!((found.points()[9 * 64 + 2], found.points()[64]), (124, 249));
        assert_eq!(found.points()[10 * 64..], [255; 22 * 64]);
    }

    #[test]
    fn light_on_dark_is_turned_around() {
        let mut points = vec![0; 40 * 40];
        points[5 * 40 + 5] = 255;
        points[8 * 40 + 9] = 255;
        let found = Image::new(40, 40, 1, points).unwrap().trimmed(64, 64).unwrap();
        assert_eq!((found.width(), found.height()), (32, 32));
        assert_eq!(found.points().iter().filter(|&&x| x == 0).count(), 2);
    }

    #[test]
    fn what_is_too_large_becomes_smaller_and_nothing_stays_whole() {
        let mut points = vec![255; 300 * 20];
        points[..7 * 300].fill(0);
        let found = Image::new(300, 20, 1, points).unwrap().trimmed(64, 64).unwrap();
        assert_eq!((found.width(), found.height()), (64, 32));
        let white = Image::new(40, 8, 3, vec![255; 960]).unwrap().trimmed(64, 64).unwrap();
        assert_eq!((white.width(), white.height(), white.channels()), (64, 32, 3));
    }

    #[test]
    fn quotients_are_numpys() {
        // The rounded quotient is 672; the divisor goes into 704 not quite that often.
        assert_eq!(floor_quotient(704.0, 704.0 / 672.0), 671.0);
        assert_eq!((floor_quotient(7.0, 2.0), floor_quotient(1344.0, 2.0)), (3.0, 672.0));
    }
}
