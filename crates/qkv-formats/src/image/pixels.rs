//! Pixels as the numbers that models read.

use super::Image;

/// The value of a white channel.
const WHITE: u8 = 255;

impl Image {
    /// Writes every channel as `value · scale + shift`, with a pair of these for each channel, in rows of `width`
    /// pixels; what lies beyond the image is white.
    ///
    /// ```
    /// use qkv_formats::image::Image;
    /// let image = Image::new(1, 1, 1, vec![100])?;
    /// let mut to = [0.0; 4];
    /// image.write_scaled(&mut to, 2, &[[0.1, 1.0]]);
    /// assert_eq!(to, [11.0, 26.5, 26.5, 26.5]);
    /// # Ok::<(), qkv_formats::Error>(())
    /// ```
    ///
    /// # Panics
    /// If there is another number of pairs than channels.
    pub fn write_scaled(&self, to: &mut [f32], width: usize, levels: &[[f32; 2]]) {
        assert_eq!(levels.len(), self.channels, "a scale and a shift for each channel");
        let line = (width * self.channels).max(1);
        let mut rows = self.points.chunks_exact((self.width * self.channels).max(1));
        for to in to.chunks_exact_mut(line) {
            let row = rows.next().unwrap_or_default();
            let pixels = row.iter().chain(std::iter::repeat(&WHITE));
            for ((to, &x), [scale, shift]) in to.iter_mut().zip(pixels).zip(levels.iter().cycle()) {
                *to = f32::from(x) * scale + shift;
            }
        }
    }

    /// Writes every channel as its entry in a table for each channel.
    ///
    /// # Panics
    /// If there are fewer tables than channels.
    pub fn write_levels(&self, to: &mut [f32], levels: &[[f32; 256]]) {
        for (to, pixel) in to.chunks_exact_mut(self.channels).zip(self.points.chunks_exact(self.channels)) {
            for (c, (to, &x)) in to.iter_mut().zip(pixel).enumerate() {
                *to = levels[c][usize::from(x)];
            }
        }
    }

    /// Writes square patches of `side` pixels, row by row, with the channels of each patch one after the other, as in
    /// [`write_levels`](Image::write_levels).
    ///
    /// # Panics
    /// If the image is not whole patches, or there are fewer tables than channels.
    pub fn write_patches(&self, to: &mut [f32], side: usize, levels: &[[f32; 256]]) {
        let (across, channels) = (self.width / side, self.channels);
        for (patch, to) in to.chunks_exact_mut(side * side * channels).enumerate() {
            let (top, left) = (patch / across * side, patch % across * side);
            for (c, plane) in to.chunks_exact_mut(side * side).enumerate() {
                for (y, line) in plane.chunks_exact_mut(side).enumerate() {
                    let row = &self.points[((top + y) * self.width + left) * channels..][..side * channels];
                    for (to, pixel) in line.iter_mut().zip(row.chunks_exact(channels)) {
                        *to = levels[c][usize::from(pixel[c])];
                    }
                }
            }
        }
    }

    /// Appends RGB pixels as blue, green and red, each minus its mean.
    pub fn append_reversed(&self, to: &mut Vec<f32>, means: [f32; 3]) {
        for rgb in self.points.chunks_exact(3) {
            to.extend([2, 1, 0].into_iter().zip(means).map(|(c, mean)| f32::from(rgb[c]) - mean));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patches_hold_the_pixels_of_the_image() {
        let (wide, high, side) = (6, 4, 2);
        let points: Vec<u8> = (0..wide * high * 3).map(|x| (x * 7 % 251) as u8).collect();
        let image = Image::new(wide, high, 3, points.clone()).unwrap();
        let levels: Vec<[f32; 256]> = (0..3).map(|c| std::array::from_fn(|x| (c * 1000 + x) as f32)).collect();
        let mut to = vec![0.0; points.len()];
        image.write_patches(&mut to, side, &levels);
        for (at, found) in to.into_iter().enumerate() {
            let (patch, within) = (at / (side * side * 3), at % (side * side * 3));
            let (c, y, x) = (within / (side * side), within / side % side, within % side);
            let (y, x) = (patch / (wide / side) * side + y, patch % (wide / side) * side + x);
            assert_eq!(found, (c * 1000 + usize::from(points[(y * wide + x) * 3 + c])) as f32);
        }
    }
}
