//! How the camera was held: the orientation in the EXIF data of a photograph, and turning the image upright
//! accordingly.

use super::Image;

/// The tag of the orientation in a TIFF directory.
const TAG: u16 = 0x0112;
/// The most entries of a directory that are examined.
const MOST_ENTRIES: usize = 1024;

/// The orientation, 1 to 8, in EXIF data: a TIFF file, with or without `Exif\0\0` before it. It is 1, upright, if the
/// data has none or cannot be read: a photograph is not refused because of its metadata.
pub(super) fn of_exif(exif: &[u8]) -> u8 {
    let tiff = exif.strip_prefix(b"Exif\0\0").unwrap_or(exif);
    read(tiff).filter(|found| (1..=8).contains(found)).unwrap_or(1) as u8
}

fn read(tiff: &[u8]) -> Option<u16> {
    let little = match tiff.get(..4)? {
        b"II*\0" => true,
        b"MM\0*" => false,
        _ => return None,
    };
    let short = |at: usize| {
        let bytes = [*tiff.get(at)?, *tiff.get(at.checked_add(1)?)?];
        Some(if little { u16::from_le_bytes(bytes) } else { u16::from_be_bytes(bytes) })
    };
    let long = |at: usize| {
        let [first, second] = [u32::from(short(at)?), u32::from(short(at.checked_add(2)?)?)];
        Some(if little { second << 16 | first } else { first << 16 | second })
    };
    let directory = long(4)? as usize;
    let entries = usize::from(short(directory)?).min(MOST_ENTRIES);
    // An entry: tag, type (3 is a short), count, value.
    let entry = |at: usize| directory.checked_add(2 + 12 * at);
    let at = (0..entries).filter_map(entry).find(|&at| short(at) == Some(TAG))?;
    (short(at + 2)? == 3).then(|| short(at + 8)).flatten()
}

impl Image {
    /// The image upright, from the orientation of its EXIF data: 2, 4, 5 and 7 are mirrored, 5 to 8 lie on their side.
    pub(super) fn upright(self, orientation: u8) -> Image {
        if !(2..=8).contains(&orientation) {
            return self;
        }
        let (old_width, old_height, channels) = (self.width, self.height, self.channels);
        let (width, height) = if orientation > 4 { (old_height, old_width) } else { (old_width, old_height) };
        let mut points = Vec::with_capacity(self.points.len());
        for y in 0..height {
            for x in 0..width {
                let (right, down) = (width - 1 - x, height - 1 - y);
                let (from_x, from_y) = match orientation {
                    2 => (right, y),
                    3 => (right, down),
                    4 => (x, down),
                    5 => (y, x),
                    6 => (y, right),
                    7 => (down, right),
                    _ => (down, x),
                };
                points.extend_from_slice(&self.points[(from_y * old_width + from_x) * channels..][..channels]);
            }
        }
        Image { width, height, channels, points }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// EXIF data with one entry.
    fn exif(tag: u16, kind: u16, value: u16) -> Vec<u8> {
        let mut bytes = b"Exif\0\0MM\0*\0\0\0\x08\0\x01".to_vec();
        for part in [tag, kind, 0, 1, value, 0] {
            bytes.extend(part.to_be_bytes());
        }
        bytes
    }

    #[test]
    fn the_orientation_is_found_and_lies_are_upright() {
        assert_eq!(of_exif(&exif(TAG, 3, 6)), 6);
        assert_eq!(of_exif(b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x08\0\0\0"), 8);
        for wrong in [exif(TAG, 3, 9), exif(TAG, 4, 6), exif(0x0110, 3, 6), b"MM\0*\xff\xff\xff\xff".to_vec(), vec![]] {
            assert_eq!(of_exif(&wrong), 1);
        }
        let whole = exif(TAG, 3, 6);
        for keep in 0..whole.len() - 3 {
            assert_eq!(of_exif(&whole[..keep]), 1, "{keep}");
        }
    }

    #[test]
    fn images_are_turned_upright() {
        let image = Image::new(3, 2, 1, vec![1, 2, 3, 4, 5, 6]).unwrap();
        let turned = |orientation| image.clone().upright(orientation);
        assert_eq!(turned(1), image);
        assert_eq!(turned(2).points(), [3, 2, 1, 6, 5, 4]);
        assert_eq!(turned(3).points(), [6, 5, 4, 3, 2, 1]);
        assert_eq!(turned(4).points(), [4, 5, 6, 1, 2, 3]);
        let sideways: [(u8, [u8; 6]); 4] =
            [(5, [1, 4, 2, 5, 3, 6]), (6, [4, 1, 5, 2, 6, 3]), (7, [6, 3, 5, 2, 4, 1]), (8, [3, 6, 2, 5, 1, 4])];
        for (orientation, expected) in sideways {
            let found = turned(orientation);
            assert_eq!((found.width(), found.height(), found.points()), (2, 3, &expected[..]), "{orientation}");
        }
    }
}
