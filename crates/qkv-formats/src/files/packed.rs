//! Text and data files, plain or compressed with gzip, which is recognized by the first bytes rather than by the name.
//! The decompressed size is limited.

use super::input;
use crate::{Error, Result};
use flate2::bufread::MultiGzDecoder;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

/// The largest decompressed size: gzip can expand a thousandfold.
pub const LARGEST: u64 = 1 << 30;
/// The first bytes of a gzip file.
const GZIP: [u8; 2] = [0x1f, 0x8b];

/// Opens a file as a stream, decompressing it if necessary.
pub fn open(path: &Path) -> Result<Box<dyn BufRead>> {
    Ok(opened(path)?.0)
}

/// The same, also returning whether the file is compressed.
fn opened(path: &Path) -> Result<(Box<dyn BufRead>, bool)> {
    let mut file = BufReader::new(input::open(path)?);
    let packed = file.fill_buf().map_err(|e| Error::file("read", path, e))?.starts_with(&GZIP);
    Ok(if packed { (Box::new(BufReader::new(MultiGzDecoder::new(file))), true) } else { (Box::new(file), false) })
}

/// Reads a whole file of at most `most` bytes, or [`LARGEST`] if it is compressed.
///
/// # Errors
/// Names the file.
pub fn bytes(path: &Path, most: u64) -> Result<Vec<u8>> {
    let (file, packed) = opened(path)?;
    let most = if packed { most.min(LARGEST) } else { most };
    let mut bytes = Vec::new();
    file.take(most.saturating_add(1)).read_to_end(&mut bytes).map_err(|e| Error::file("read", path, e))?;
    if bytes.len() as u64 > most {
        return Err(Error::format(path, "file", format!("it holds more than {most} bytes")));
    }
    Ok(bytes)
}

/// Reads a whole text file.
///
/// # Errors
/// Names the file.
pub fn text(path: &Path) -> Result<String> {
    let wrong = |e: std::string::FromUtf8Error| {
        Error::format(path, "text", format!("byte {} is not UTF-8", e.utf8_error().valid_up_to() + 1))
    };
    String::from_utf8(bytes(path, u64::MAX)?).map_err(wrong)
}

#[cfg(test)]
pub(crate) fn pack(text: &[u8]) -> Vec<u8> {
    use std::io::Write;
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    packed.write_all(text).unwrap();
    packed.finish().unwrap()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packed_file_is_what_was_packed_and_a_file_in_parts_is_read_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.txt");
        std::fs::write(&path, "plain 好").unwrap();
        assert_eq!(text(&path).unwrap(), "plain 好");
        std::fs::write(&path, [pack("first, ".as_bytes()), pack("second".as_bytes())].concat()).unwrap();
        assert_eq!(text(&path).unwrap(), "first, second", "as `cat a.gz b.gz` makes them");
    }

    #[test]
    fn what_is_cut_off_no_text_or_too_much_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.gz");
        let whole = pack(&[b'a'; 5000]);
        std::fs::write(&path, &whole[..whole.len() - 9]).unwrap();
        assert!(text(&path).unwrap_err().to_string().contains("cannot read"));
        std::fs::write(&path, pack(b"ab\xff")).unwrap();
        assert!(text(&path).unwrap_err().to_string().contains("byte 3 is not UTF-8"));
        std::fs::write(&path, &whole).unwrap();
        assert_eq!(bytes(&path, 5000).unwrap().len(), 5000);
        assert!(bytes(&path, 4999).unwrap_err().to_string().contains("more than 4999 bytes"));
    }
}
