//! The errors of this crate: those of files and settings ([`qkv_formats::Error`]) and those of what computes. The
//! program prints one as `error: …` and, if something can be done about it, `hint: …`.

use std::io;
use std::path::Path;

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate.
///
/// ```
/// use qkv_models::Error;
///
/// let error = Error::line("pairs.tsv", 12, "the line has no tab");
/// assert_eq!(error.to_string(), "pairs.tsv:12: the line has no tab");
/// assert_eq!(error.hint(), None);
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file or a setting is invalid or cannot be read.
    #[error(transparent)]
    Formats(#[from] qkv_formats::Error),
    /// An error of the parallelism between ranks.
    #[error(transparent)]
    Ranks(#[from] qkv_ranks::Error),
    /// `qkv` refused an attention call.
    #[error(transparent)]
    Attention(#[from] qkv::Error),
    /// The GPU failed: out of memory or no driver, for example.
    #[error(transparent)]
    Device(#[from] qkv_cuda::Error),
}

impl Error {
    /// The system refused a file.
    pub fn file(action: &'static str, path: impl AsRef<Path>, source: io::Error) -> Self {
        qkv_formats::Error::file(action, path, source).into()
    }

    /// An invalid line.
    pub fn line(path: impl AsRef<Path>, line: usize, what: impl Into<String>) -> Self {
        qkv_formats::Error::line(path, line, what).into()
    }

    /// Invalid bytes in a part of a file.
    pub fn format(path: impl AsRef<Path>, part: impl Into<String>, what: impl Into<String>) -> Self {
        qkv_formats::Error::format(path, part, what).into()
    }

    /// A file of a checkpoint that differs from what was written.
    pub fn damaged(path: impl AsRef<Path>, what: impl Into<String>) -> Self {
        qkv_formats::Error::damaged(path, what).into()
    }

    /// An invalid setting.
    pub fn invalid(what: impl Into<String>) -> Self {
        qkv_formats::Error::invalid(what).into()
    }

    /// Adds a hint: one sentence, commands and names in backticks, no full stop.
    ///
    /// ```
    /// let error = qkv_models::Error::invalid("a vocabulary of 3 is too small").with_hint("use at least `300`");
    /// assert_eq!(error.hint().as_deref(), Some("use at least `300`"));
    /// ```
    pub fn with_hint(self, words: impl Into<String>) -> Self {
        match self {
            Error::Formats(error) => error.with_hint(words).into(),
            other => other,
        }
    }

    /// Adds the file to an error about a setting that was read from it.
    pub(crate) fn in_file(self, path: &Path) -> Self {
        match self {
            Error::Formats(qkv_formats::Error::Invalid { .. }) | Error::Attention(_) => {
                Error::format(path, "settings", self.to_string())
            }
            other => other,
        }
    }

    /// What to do about it, if anything is known.
    pub fn hint(&self) -> Option<String> {
        match self {
            Error::Formats(error) => error.hint(),
            Error::Ranks(error) => error.hint().map(Into::into),
            Error::Device(error) => error.hint().map(Into::into),
            Error::Attention(_) => None,
        }
    }
}
