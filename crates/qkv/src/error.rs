//! The errors of a description or its inputs. Every variant names the tensor or setting, what was found and what was
//! expected; none of them is ever a panic.

use qkv_simd::ViewError;

/// Why an attention was refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The shape of a tensor does not fit the rest of the call.
    #[error("`{tensor}` has shape {found:?}, expected {expected}")]
    Shape {
        /// Its name.
        tensor: &'static str,
        /// The shape it has.
        found: Vec<usize>,
        /// The shape it should have, with the reason.
        expected: String,
    },
    /// The query heads cannot be divided evenly among the key heads.
    #[error("`q` has {query} heads and `k` has {key}: the first must be a multiple of the second")]
    Heads {
        /// Heads of the queries.
        query: usize,
        /// Heads of the keys and values.
        key: usize,
    },
    /// The description needs a tensor that was not given.
    #[error("`{tensor}` is missing: {needed_by} needs it")]
    Missing {
        /// Its name.
        tensor: &'static str,
        /// What needs it.
        needed_by: &'static str,
    },
    /// A tensor was given that the description does not use.
    #[error("`{tensor}` was given, but {reason}")]
    Unused {
        /// Its name.
        tensor: &'static str,
        /// Why it has no effect.
        reason: &'static str,
    },
    /// A number, or an entry of a tensor, is not valid.
    #[error("`{name}` is {found}, expected {expected}")]
    Value {
        /// Which number.
        name: &'static str,
        /// What it is.
        found: String,
        /// What it may be.
        expected: String,
    },
    /// Two choices exclude each other.
    #[error("{first} cannot go with {second}: {reason}")]
    Conflict {
        /// One choice.
        first: &'static str,
        /// The other.
        second: &'static str,
        /// Why.
        reason: &'static str,
    },
    /// The sizes overflow what this machine can address.
    #[error("`{tensor}` with shape {shape:?} is too large for this machine")]
    TooLarge {
        /// Its name.
        tensor: &'static str,
        /// The requested shape.
        shape: Vec<usize>,
    },
    /// A slice cannot be viewed with the requested shape.
    #[error(transparent)]
    View(#[from] ViewError),
}

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub(crate) fn value(name: &'static str, found: impl ToString, expected: impl Into<String>) -> Error {
        Error::Value { name, found: found.to_string(), expected: expected.into() }
    }

    pub(crate) fn shape(tensor: &'static str, found: &[usize], expected: impl Into<String>) -> Error {
        Error::Shape { tensor, found: found.to_vec(), expected: expected.into() }
    }
}
