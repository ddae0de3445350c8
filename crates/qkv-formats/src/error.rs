//! The errors of this crate. Each names the file, and the line, tensor or field in it.

use std::io;
use std::path::{Path, PathBuf};

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate.
///
/// ```
/// use qkv_formats::Error;
///
/// let error = Error::line("pairs.tsv", 12, "the line has no tab");
/// assert_eq!(error.to_string(), "pairs.tsv:12: the line has no tab");
/// assert_eq!(error.hint(), None);
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The system refused to open, read or write a file.
    #[error("cannot {action} `{}`: {source}", path.display())]
    File {
        /// The attempted action: `open`, `read`, `write`, `rename`.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// A line of a text file is invalid.
    #[error("{}:{line}: {what}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// What is wrong with it.
        what: String,
        /// What to do about it.
        hint: Option<String>,
    },
    /// The bytes of a file do not follow its format.
    #[error("`{}`: {part}: {what}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// The part of the file: a tensor, a field, the header.
        part: String,
        /// What is wrong there.
        what: String,
    },
    /// A file of a checkpoint differs from what was written.
    #[error("`{}` is damaged: {what}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
        /// The step of the newest intact checkpoint.
        whole: Option<u64>,
    },
    /// A setting is invalid, or two of them do not fit together.
    #[error("{what}")]
    Invalid {
        /// What is wrong.
        what: String,
        /// What to do about it.
        hint: Option<String>,
    },
}

impl Error {
    /// The system refused a file.
    pub fn file(action: &'static str, path: impl AsRef<Path>, source: io::Error) -> Self {
        Error::File { action, path: path.as_ref().to_owned(), source }
    }

    /// An invalid line.
    pub fn line(path: impl AsRef<Path>, line: usize, what: impl Into<String>) -> Self {
        Error::Line { path: path.as_ref().to_owned(), line, what: what.into(), hint: None }
    }

    /// Invalid bytes in a part of a file.
    pub fn format(path: impl AsRef<Path>, part: impl Into<String>, what: impl Into<String>) -> Self {
        Error::Format { path: path.as_ref().to_owned(), part: part.into(), what: what.into() }
    }

    /// A file of a checkpoint that differs from what was written.
    pub fn damaged(path: impl AsRef<Path>, what: impl Into<String>) -> Self {
        Error::Damaged { path: path.as_ref().to_owned(), what: what.into(), whole: None }
    }

    /// An invalid setting.
    pub fn invalid(what: impl Into<String>) -> Self {
        Error::Invalid { what: what.into(), hint: None }
    }

    /// Adds a hint: one sentence, commands and names in backticks, no full stop.
    ///
    /// ```
    /// let error = qkv_formats::Error::invalid("a vocabulary of 3 is too small").with_hint("use at least `300`");
    /// assert_eq!(error.hint().as_deref(), Some("use at least `300`"));
    /// ```
    pub fn with_hint(mut self, words: impl Into<String>) -> Self {
        if let Error::Line { hint, .. } | Error::Invalid { hint, .. } = &mut self {
            *hint = Some(words.into());
        }
        self
    }

    /// What to do about it, if anything is known.
    pub fn hint(&self) -> Option<String> {
        match self {
            Error::Line { hint, .. } | Error::Invalid { hint, .. } => hint.clone(),
            Error::File { path, source, .. } if source.kind() == io::ErrorKind::NotFound => {
                let relative = if path.is_relative() { ", counted from the folder the program runs in" } else { "" };
                Some(format!("check the path{relative}"))
            }
            Error::Damaged { whole: Some(step), .. } => {
                Some(format!("the checkpoint of step {step} is whole: resume from it with `--checkpoint {step}`"))
            }
            Error::Damaged { whole: None, .. } => Some("no other checkpoint of the run is whole".into()),
            Error::Format { .. } => Some("the file may be cut off or of another kind; write or fetch it again".into()),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_missing_is_named_and_has_a_hint() {
        let source = std::fs::File::open("no/such/file").expect_err("it does not exist");
        let error = Error::file("open", "no/such/file", source);
        assert!(error.to_string().starts_with("cannot open `no/such/file`: "), "{error}");
        assert_eq!(error.hint().as_deref(), Some("check the path, counted from the folder the program runs in"));
    }

    #[test]
    fn a_hint_has_no_full_stop() {
        for error in [Error::format("a", "header", "b"), Error::invalid("c").with_hint("d `e`")] {
            assert!(!error.hint().expect("a hint").ends_with('.'));
        }
    }
}
