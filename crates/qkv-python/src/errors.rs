//! The library's typed errors as Python's: `ValueError` with the library's own words. Wrong kinds of objects are a
//! `TypeError`, memory that cannot be had a `MemoryError`.

use pyo3::PyErr;
use pyo3::exceptions::{PyMemoryError, PyTypeError, PyValueError};

/// An error of the library.
pub fn refused(error: qkv::Error) -> PyErr {
    match error {
        qkv::Error::TooLarge { .. } => PyMemoryError::new_err(error.to_string()),
        error => PyValueError::new_err(error.to_string()),
    }
}

/// A value without meaning.
pub fn value(message: impl Into<String>) -> PyErr {
    PyValueError::new_err(message.into())
}

/// An object of the wrong kind.
pub fn kind(message: impl Into<String>) -> PyErr {
    PyTypeError::new_err(message.into())
}
