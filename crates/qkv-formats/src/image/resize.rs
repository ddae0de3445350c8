//! Resampling with a triangle filter as wide as the scale, at least one pixel, horizontally and then vertically:
//! bilinear interpolation with antialiasing.

use super::Image;
use qkv_simd::resample::{add_weighted, weigh_line};
use rayon::prelude::*;

/// For each new pixel, the first old pixel and the weights from there on.
fn weights(from: usize, to: usize) -> Vec<(usize, Vec<f32>)> {
    let step = from as f64 / to as f64;
    let reach = step.max(1.0);
    (0..to)
        .map(|at| {
            let middle = (at as f64 + 0.5) * step;
            let first = ((middle - reach + 0.5).floor().max(0.0)) as usize;
            let last = ((middle + reach + 0.5).floor() as usize).min(from);
            let near = |old: usize| (1.0 - ((old as f64 + 0.5 - middle) / reach).abs()).max(0.0);
            let all: Vec<f64> = (first..last).map(near).collect();
            let sum: f64 = all.iter().sum();
            (first, all.into_iter().map(|weight| (weight / sum) as f32).collect())
        })
        .collect()
}

impl Image {
    /// Resizes and converts channels. Gray becomes color after resizing, since all three channels are equal; color
    /// becomes gray before.
    ///
    /// # Errors
    /// As [`resized`](Image::resized).
    pub fn resized_in(&self, channels: usize, width: usize, height: usize) -> crate::Result<Image> {
        if channels == 1 && self.channels == 3 {
            return self.in_channels(1).resized(width, height);
        }
        let small = self.resized(width, height)?;
        Ok(if small.channels == channels { small } else { small.in_channels(channels) })
    }

    /// Resamples to another size; the aspect ratio is not kept.
    ///
    /// # Errors
    /// If the size is zero or too large.
    pub fn resized(&self, width: usize, height: usize) -> crate::Result<Image> {
        Image::fits(width, height).map_err(crate::Error::invalid)?;
        if (width, height) == (self.width, self.height) {
            return Ok(self.clone());
        }
        let channels = self.channels;
        // Rows first, then columns.
        let across = weights(self.width, width);
        let mut rows = vec![0f32; self.height * width * channels];
        let lines = self.points.par_chunks_exact(self.width * channels);
        lines.zip(rows.par_chunks_exact_mut(width * channels)).for_each(|(line, out)| {
            weigh_line(line, channels, &across, out);
        });
        let mut points = Vec::with_capacity(width * height * channels);
        let mut sums = vec![0f32; width * channels];
        for (first, weights) in weights(self.height, height) {
            sums.fill(0.0);
            for (row, weight) in rows.chunks_exact(width * channels).skip(first).zip(weights) {
                add_weighted(&mut sums, row, weight);
            }
            points.extend(sums.iter().map(|&x| x.round().clamp(0.0, 255.0) as u8));
        }
        Image::new(width, height, channels, points)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grey_that_becomes_color_after_it_is_small_is_the_same() {
        let grey = Image::new(9, 7, 1, (0..63).map(|x| (x * 37) as u8).collect()).unwrap();
        for image in [grey.in_channels(3), grey] {
            for channels in [1, 3] {
                let expected = image.in_channels(channels).resized(4, 5).unwrap();
                assert_eq!(image.resized_in(channels, 4, 5).unwrap(), expected);
            }
        }
    }

    #[test]
    fn half_the_size_is_the_mean_of_what_is_near() {
        let flat = Image::new(9, 7, 3, vec![77; 9 * 7 * 3]).unwrap();
        assert!(flat.resized(4, 20).unwrap().points().iter().all(|&x| x == 77));
        let line = Image::new(4, 1, 1, vec![0, 0, 200, 200]).unwrap();
        // Weights 3, 3, 1 of 7, and mirrored.
        assert_eq!(line.resized(2, 1).unwrap().points(), [29, 171]);
        assert_eq!(line.resized(4, 1).unwrap(), line);
        assert!(line.resized(0, 1).is_err() && line.resized(1 << 20, 1).is_err());
    }

    #[test]
    fn twice_the_size_goes_evenly_from_point_to_point() {
        let line = Image::new(2, 1, 1, vec![0, 100]).unwrap();
        assert_eq!(line.resized(4, 1).unwrap().points(), [0, 25, 75, 100]);
    }
}
