//! Input files, which must be regular: a FIFO may never get a writer, and a device such as `/dev/zero` has no end.
//! `qkv_models::files::input` refuses both; the program adds the hint that stdin accepts a pipe.

use crate::failure::Failure;
use qkv_models::files::input;
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

/// Opens a regular file.
pub(crate) fn open(path: &Path) -> Result<File, Failure> {
    check(path)?;
    Ok(input::open(path)?)
}

/// Refuses anything but a regular file or a folder. A path that does not exist fails only when it is opened.
pub(crate) fn check(path: &Path) -> Result<(), Failure> {
    match fs::metadata(path) {
        Ok(about) if !about.is_file() && !about.is_dir() => {
            Err(Failure::in_file(path, "not a regular file").hint("copy it to a file first, or pipe it to stdin"))
        }
        _ => Ok(()),
    }
}

/// Reads a text of at most `longest` bytes.
pub(crate) fn read_text(path: &Path, longest: u64) -> Result<String, Failure> {
    text_of(open(path)?, &path.display().to_string(), longest)
}

/// Reads a text of at most `longest` bytes from any reader.
pub(crate) fn text_of(from: impl Read, name: &str, longest: u64) -> Result<String, Failure> {
    let mut bytes = Vec::new();
    let wrong = |what: String| Failure::new(format!("`{name}`: {what}"));
    from.take(longest + 1).read_to_end(&mut bytes).map_err(|error| wrong(format!("cannot be read: {error}")))?;
    if bytes.len() as u64 > longest {
        return Err(wrong(format!("longer than {longest} bytes")));
    }
    String::from_utf8(bytes)
        .map_err(|error| wrong(format!("byte {} is not UTF-8", error.utf8_error().valid_up_to() + 1)))
}
