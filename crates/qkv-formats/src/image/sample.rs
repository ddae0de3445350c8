//! Samples a window of an image, which may extend beyond it, at the size of the image: bilinear interpolation, for
//! windows of about that size.

use super::Image;

/// For each new pixel along an axis, the old pixel before it, the next one and the weight of the latter; `None` outside
/// of the image.
fn places(start: f64, length: f64, size: usize) -> Vec<Option<(usize, usize, f32)>> {
    let place = |at: usize| {
        let middle = start + (at as f64 + 0.5) / size as f64 * length;
        if !(0.0..size as f64).contains(&middle) {
            return None;
        }
        let from = (middle - 0.5).clamp(0.0, (size - 1) as f64);
        let first = from as usize;
        Some((first, (first + 1).min(size - 1), (from - first as f64) as f32))
    };
    (0..size).map(place).collect()
}

impl Image {
    /// The window given by left, top, width and height, in pixels, scaled to the size of the image; `fill` is the level
    /// outside of the image.
    pub fn sampled(&self, [left, top, wide, high]: [f64; 4], fill: u8) -> Image {
        let (channels, line) = (self.channels, self.width * self.channels);
        let (across, down) = (places(left, wide, self.width), places(top, high, self.height));
        let mut points = vec![fill; self.points.len()];
        for (to, place) in points.chunks_exact_mut(line).zip(down) {
            let Some((above, below, share)) = place else { continue };
            let (above, below) = (&self.points[above * line..][..line], &self.points[below * line..][..line]);
            for (to, place) in to.chunks_exact_mut(channels).zip(&across) {
                let Some((first, second, right)) = *place else { continue };
                for (c, to) in to.iter_mut().enumerate() {
                    let mix = |row: &[u8]| {
                        let (a, b) = (f32::from(row[first * channels + c]), f32::from(row[second * channels + c]));
                        a + (b - a) * right
                    };
                    let (a, b) = (mix(above), mix(below));
                    *to = (a + (b - a) * share + 0.5) as u8;
                }
            }
        }
        Image { points, ..*self }
    }

    /// Replaces each level by its entry in the table of its channel.
    pub fn map_channels(&mut self, tables: &[[u8; 256]]) {
        for pixel in self.points.chunks_exact_mut(self.channels) {
            for (x, table) in pixel.iter_mut().zip(tables) {
                *x = table[usize::from(*x)];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_what_lies_in_it() {
        let image = Image::new(4, 2, 1, vec![0, 40, 80, 120, 0, 40, 80, 120]).unwrap();
        assert_eq!(image.sampled([0.0, 0.0, 4.0, 2.0], 9), image);
        // Twice as large: what lies between pixels is between them.
        assert_eq!(image.sampled([1.0, 0.0, 2.0, 2.0], 9).points()[..4], [30, 50, 70, 90]);
        // Half as large, with surroundings.
        assert_eq!(image.sampled([-2.0, 0.0, 8.0, 2.0], 9).points()[..4], [9, 20, 100, 9]);
        let mut changed = image.clone();
        changed.map_channels(&[std::array::from_fn(|x| 255 - x as u8)]);
        assert_eq!(changed.points()[..2], [255, 215]);
    }
}
