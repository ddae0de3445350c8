//! Opens files that somebody else wrote. A path that names a device, a pipe or a folder is refused before anything is
//! read from it, and small files (configurations, recipes, tokenizers) have a size limit. Interpreting the bytes is
//! left to the reader of each format.

use crate::{Error, Result};
use std::fs::{File, FileType, OpenOptions};
use std::io::{self, Read};
use std::path::Path;

/// The largest JSON or TOML file of settings that is read.
pub const SETTINGS_MAX: u64 = 16 << 20;
/// The largest `tokenizer.json`, `vocab` or shard index that is read. Vocabularies of 256,000 tokens take 40 MB.
pub const TOKENIZER_MAX: u64 = 128 << 20;

/// Opens a regular file for reading.
///
/// The file is opened without blocking, so that a FIFO without a writer does not hang, and then examined: everything
/// but a regular file is refused.
///
/// # Errors
/// Names the path and the kind of file found there.
pub fn open(path: &Path) -> Result<File> {
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NONBLOCK | libc::O_NOCTTY);
    let file = options.open(path).map_err(|e| Error::file("open", path, e))?;
    let kind = file.metadata().map_err(|e| Error::file("read", path, e))?.file_type();
    if !kind.is_file() {
        let what = format!("it is {}, not a regular file", describe(kind));
        return Err(Error::file("read", path, io::Error::new(io::ErrorKind::InvalidInput, what)));
    }
    Ok(file)
}

/// Reads a whole file of at most `max_len` bytes.
///
/// # Errors
/// Names the path; a larger file is refused without being read to its end.
pub fn read(path: &Path, max_len: u64) -> Result<Vec<u8>> {
    let file = open(path)?;
    // A file can grow while it is read, and files in `/proc` report no length.
    let len = file.metadata().map_or(0, |about| about.len()).min(max_len);
    let mut bytes = Vec::with_capacity(usize::try_from(len).unwrap_or(0));
    let read = file.take(max_len.saturating_add(1)).read_to_end(&mut bytes);
    read.map_err(|e| Error::file("read", path, e))?;
    if bytes.len() as u64 > max_len {
        return Err(Error::format(path, "file", format!("it has more than {max_len} bytes, the limit for its kind")));
    }
    Ok(bytes)
}

/// Reads a whole UTF-8 file of at most `max_len` bytes.
///
/// # Errors
/// As [`read`], or if the bytes are not UTF-8.
pub fn read_to_string(path: &Path, max_len: u64) -> Result<String> {
    String::from_utf8(read(path, max_len)?)
        .map_err(|e| Error::format(path, "text", format!("byte {} is not UTF-8", e.utf8_error().valid_up_to() + 1)))
}

/// The kind of a file that is not a regular one.
fn describe(kind: FileType) -> &'static str {
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        if kind.is_fifo() {
            return "a FIFO";
        }
        if kind.is_char_device() || kind.is_block_device() {
            return "a device";
        }
        if kind.is_socket() {
            return "a socket";
        }
    }
    if kind.is_dir() { "a folder" } else { "a special file" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(unix)]
    fn devices_and_folders_are_refused_by_name() {
        for (path, kind) in [("/dev/zero", "a device"), ("/dev/full", "a device"), ("/", "a folder")] {
            let error = read(Path::new(path), SETTINGS_MAX).unwrap_err().to_string();
            assert_eq!(error, format!("cannot read `{path}`: it is {kind}, not a regular file"));
        }
    }

    #[test]
    #[cfg(unix)]
    fn a_fifo_without_a_writer_is_refused_and_does_not_hang() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("fifo");
        let made = std::process::Command::new("mkfifo").arg(&path).status();
        assert!(made.is_ok_and(|status| status.success()), "`mkfifo` is part of every Unix");
        let error = read(&path, SETTINGS_MAX).unwrap_err().to_string();
        assert!(error.ends_with("it is a FIFO, not a regular file"), "{error}");
    }

    #[test]
    fn a_file_beyond_its_limit_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        std::fs::write(&path, "12345").unwrap();
        assert_eq!(read_to_string(&path, 5).unwrap(), "12345");
        assert!(read(&path, 4).unwrap_err().to_string().contains("more than 4 bytes"));
        std::fs::write(&path, [b'a', 0xff]).unwrap();
        assert!(read_to_string(&path, 5).unwrap_err().to_string().ends_with("byte 2 is not UTF-8"));
    }
}
