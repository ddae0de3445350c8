//! The idx format of MNIST: a magic number with type and number of axes, the axes, then the values, big-endian; plain
//! or compressed with gzip.

use super::Image;
use crate::files::packed;
use crate::{Error, Result};
use std::path::Path;

/// The axes of a file of bytes, and the offset of its values.
fn opened<const AXES: usize>(bytes: &[u8], path: &Path) -> Result<([usize; AXES], usize)> {
    let wrong = |what: String| Error::format(path, "idx header", what);
    let [0, 0, kind, axes, ..] = *bytes else { return Err(wrong("it does not begin with two zeros".into())) };
    if kind != 8 {
        return Err(wrong(format!("its numbers are of kind {kind:#04x}, expected bytes, 0x08")));
    }
    if usize::from(axes) != AXES {
        return Err(wrong(format!("it has {axes} axes, expected {AXES}")));
    }
    let start = 4 + 4 * AXES;
    let Some(sizes) = bytes.get(4..start) else { return Err(wrong("it is cut off".into())) };
    let mut found = [0; AXES];
    for (axis, size) in found.iter_mut().zip(sizes.chunks_exact(4)) {
        *axis = u32::from_be_bytes([size[0], size[1], size[2], size[3]]) as usize;
    }
    let numbers = found.iter().try_fold(1usize, |all, &axis| all.checked_mul(axis));
    if numbers != Some(bytes.len() - start) {
        return Err(wrong(format!("it says {found:?}, and {} bytes follow", bytes.len() - start)));
    }
    Ok((found, start))
}

/// Reads the images of a file: three axes in gray, or four in color, the last of them red, green and blue.
///
/// ```
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path().join("images.idx");
/// // Two images of two pixels each.
/// std::fs::write(&path, [0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 2, 10, 20, 30, 40]).unwrap();
/// let images = qkv_formats::image::idx::images(&path)?;
/// assert_eq!((images.len(), images[1].points()), (2, &[30, 40][..]));
/// # Ok::<(), qkv_formats::Error>(())
/// ```
///
/// # Errors
/// Names the file and what is wrong with it.
pub fn images(path: impl AsRef<Path>) -> Result<Vec<Image>> {
    let path = path.as_ref();
    let bytes = packed::bytes(path, packed::LARGEST)?;
    let ([count, height, width], channels, start) = match bytes.get(3) {
        Some(4) => {
            let ([count, height, width, channels], start) = opened::<4>(&bytes, path)?;
            if channels != 3 {
                return Err(Error::format(path, "idx header", format!("it has {channels} channels, expected 3")));
            }
            ([count, height, width], 3, start)
        }
        _ => {
            let (axes, start) = opened::<3>(&bytes, path)?;
            (axes, 1, start)
        }
    };
    Image::fits(width, height).map_err(|what| Error::format(path, "idx header", what))?;
    let images: Vec<Image> = (bytes[start..].chunks_exact(width * height * channels))
        .map(|points| Image::new(width, height, channels, points.to_vec()))
        .collect::<Result<_>>()?;
    debug_assert_eq!(images.len(), count);
    Ok(images)
}

/// Reads the classes of a file, one per image.
///
/// # Errors
/// As [`images`].
pub fn labels(path: impl AsRef<Path>) -> Result<Vec<u8>> {
    let path = path.as_ref();
    let mut bytes = packed::bytes(path, packed::LARGEST)?;
    let ([_], start) = opened::<1>(&bytes, path)?;
    Ok(bytes.split_off(start))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_that_lie_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.idx");
        let said = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            images(&path).unwrap_err().to_string()
        };
        for (bytes, what) in [
            (&[][..], "does not begin"),
            (&[0, 0, 8, 3, 0, 0], "it is cut off"),
            (&[0, 0, 8, 1, 0, 0, 0, 0], "it has 1 axes, expected 3"),
            (&[0, 0, 13, 3, 0, 0, 0, 0], "kind 0x0d"),
            (&[0, 0, 8, 3, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255], "0 bytes follow"),
            (&[0, 0, 8, 3, 0, 0, 0, 0, 255, 255, 255, 255, 0, 0, 0, 1], "at most 16384 each way"),
            (&[0, 0, 8, 3, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 0], "with nothing in it"),
            (&[0x1f, 0x8b, 8, 0], "cannot read"),
        ] {
            assert!(said(bytes).contains(what), "{what}: {}", said(bytes));
        }
    }

    #[test]
    fn four_axes_are_in_color() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.idx");
        let header = |channels: u8| [0, 0, 8, 4, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, channels];
        std::fs::write(&path, [&header(3)[..], &[1, 2, 3, 4, 5, 6]].concat()).unwrap();
        let found = images(&path).unwrap();
        assert_eq!((found[0].channels(), found[0].points()), (3, &[1, 2, 3, 4, 5, 6][..]));
        std::fs::write(&path, [&header(2)[..], &[1, 2, 3, 4]].concat()).unwrap();
        assert!(images(&path).unwrap_err().to_string().contains("it has 2 channels, expected 3"));
    }

    #[test]
    fn what_is_packed_is_unpacked() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("labels.gz");
        std::fs::write(&path, packed::pack(&[0, 0, 8, 1, 0, 0, 0, 3, 7, 0, 9])).unwrap();
        assert_eq!(labels(&path).unwrap(), [7, 0, 9]);
    }
}
