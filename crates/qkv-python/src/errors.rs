//! The library's typed errors as Python exceptions: `ValueError` with the library's message, `TypeError` for objects of
//! the wrong kind, and `MemoryError` if memory cannot be allocated.

use pyo3::PyErr;
use pyo3::exceptions::{PyMemoryError, PyNotImplementedError, PyRuntimeError, PyTypeError, PyValueError};

/// An error of the library.
pub fn refused(error: qkv::Error) -> PyErr {
    match error {
        qkv::Error::TooLarge { .. } => PyMemoryError::new_err(error.to_string()),
        error => PyValueError::new_err(error.to_string()),
    }
}

/// An error of the CUDA engine, with its hint. Computations that only the CPU supports raise `NotImplementedError`;
/// missing components of the machine and errors of its driver raise `RuntimeError`.
pub fn refused_on_cuda(error: qkv_cuda::Error) -> PyErr {
    use qkv_cuda::Error;
    let text = error.hint().map_or_else(|| error.to_string(), |hint| format!("{error}; {hint}"));
    match error {
        Error::Refused(error) => refused(error),
        Error::CpuOnly { .. } => PyNotImplementedError::new_err(text),
        Error::Memory { .. } => PyValueError::new_err(text),
        Error::OutOfMemory { .. } => PyMemoryError::new_err(text),
        _ => PyRuntimeError::new_err(text),
    }
}

/// An invalid value.
pub fn value(message: impl Into<String>) -> PyErr {
    PyValueError::new_err(message.into())
}

/// An object of the wrong kind.
pub fn kind(message: impl Into<String>) -> PyErr {
    PyTypeError::new_err(message.into())
}
