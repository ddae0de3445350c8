//! [`On`]: the device and stream on which a call over device memory computes, and allocation of its results. The device
//! is that of the queries, the stream the current one of their library. For PyTorch tensors, PyTorch allocates; for all
//! others, this module allocates and shares the memory through DLPack.

use super::plans;
use crate::array::{Array, Library};
use crate::borrowed::{Borrowed, Memory};
use crate::dtype::Dtype;
use crate::errors::refused_on_cuda;
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use qkv_cuda::Stream;

/// The device, stream and library of a call.
pub struct On<'py> {
    library: Library,
    /// The queries.
    like: Bound<'py, PyAny>,
    /// The device number.
    pub device: i32,
    /// The stream handle.
    pub stream: u64,
}

impl<'py> On<'py> {
    /// The location of the queries; `None` if that is not a CUDA device.
    pub fn of(library: Library, q: &Bound<'py, PyAny>) -> PyResult<Option<On<'py>>> {
        let Some(device) = device_of(library, q)? else { return Ok(None) };
        let stream = stream_of(library, q.py(), device)?;
        Ok(Some(On { library, like: q.clone(), device, stream }))
    }

    fn py(&self) -> Python<'py> {
        self.like.py()
    }

    /// The memory in which inputs must be. Their producers make them ready for the stream.
    pub fn inputs(&self) -> Memory {
        // In DLPack, 1 is the default stream, and 0 is disallowed.
        Memory::Cuda { device: self.device, stream: if self.stream == 0 { 1 } else { self.stream as i64 } }
    }

    /// Memory that is used only on the stream until the call is done.
    fn own(&self) -> Memory {
        Memory::Cuda { device: self.device, stream: -1 }
    }

    /// An array for a result, and its memory.
    pub fn empty(&self, name: &'static str, dtype: Dtype, shape: &[usize]) -> PyResult<(Bound<'py, PyAny>, Borrowed)> {
        let py = self.py();
        let array = if let Library::Torch = self.library {
            let keywords = PyDict::new(py);
            keywords.set_item(intern!(py, "dtype"), py.import(intern!(py, "torch"))?.getattr(dtype.name())?)?;
            self.like.call_method(intern!(py, "new_empty"), (PyTuple::new(py, shape)?,), Some(&keywords))?
        } else {
            let cuda = plans::device(py, self.device)?;
            let bytes = shape.iter().fold(dtype.size(), |bytes, &len| bytes.saturating_mul(len));
            let buffer = py.detach(|| cuda.buffer(bytes)).map_err(refused_on_cuda)?;
            let array = Array::on_device(buffer, dtype, shape, (self.device, Stream(self.stream)), cuda);
            Bound::new(py, array)?.into_any()
        };
        let borrowed = Borrowed::new_in(name, &array, self.own())?;
        Ok((array, borrowed))
    }

    /// A result as an array of the library.
    pub fn finished(&self, array: Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        if let Library::Torch = self.library { Ok(array) } else { self.library.adopt(array) }
    }

    /// An input in the form that the kernels accept: contiguous and, if `dtype` is given, of that type. The input's
    /// library converts it if it can; an input that is still unsuitable is rejected later, when it is used.
    pub fn converted(&self, object: &Bound<'py, PyAny>, dtype: Option<Dtype>) -> PyResult<Bound<'py, PyAny>> {
        let (py, mut object) = (self.py(), object.clone());
        let found = Borrowed::new_in("input", &object, self.inputs())?;
        let torch = matches!(Library::of("input", &object)?, Library::Torch);
        if let Some(dtype) = dtype.filter(|&dtype| dtype != found.dtype()) {
            if torch {
                let dtype = py.import(intern!(py, "torch"))?.getattr(dtype.name())?;
                object = object.call_method1(intern!(py, "to"), (dtype,))?;
            } else if object.hasattr(intern!(py, "astype"))? {
                object = object.call_method1(intern!(py, "astype"), (dtype.name(),))?;
            }
        }
        if found.is_contiguous() {
            return Ok(object);
        }
        match (torch, object.hasattr(intern!(py, "copy"))?) {
            (true, _) => object.call_method0(intern!(py, "contiguous")),
            (false, true) => object.call_method0(intern!(py, "copy")),
            (false, false) => Ok(object),
        }
    }
}

/// The number of the CUDA device that holds an array.
fn device_of(library: Library, q: &Bound<'_, PyAny>) -> PyResult<Option<i32>> {
    let py = q.py();
    match library {
        Library::NumPy => Ok(None),
        Library::Torch if !q.getattr(intern!(py, "is_cuda"))?.is_truthy()? => Ok(None),
        Library::Torch => q.call_method0(intern!(py, "get_device"))?.extract().map(Some),
        _ => {
            let Ok(device) = q.getattr(intern!(py, "__dlpack_device__")) else { return Ok(None) };
            let (kind, number): (i32, i32) = device.call0()?.extract()?;
            // CUDA memory, and CUDA managed memory.
            Ok(matches!(kind, 2 | 13).then_some(number))
        }
    }
}

/// The current stream of a library on a device; the default stream if the library has none.
fn stream_of(library: Library, py: Python<'_>, device: i32) -> PyResult<u64> {
    match library {
        Library::Torch => {
            let cuda = py.import(intern!(py, "torch.cuda"))?;
            let stream = cuda.call_method1(intern!(py, "current_stream"), (device,))?;
            stream.getattr(intern!(py, "cuda_stream"))?.extract()
        }
        Library::CuPy => {
            let (cuda, get) = (py.import(intern!(py, "cupy.cuda"))?, intern!(py, "get_current_stream"));
            let stream = match cuda.call_method1(get, (device,)) {
                // Older releases support only the current device.
                Err(error) if error.is_instance_of::<PyTypeError>(py) => cuda.call_method0(get)?,
                other => other?,
            };
            stream.getattr(intern!(py, "ptr"))?.extract()
        }
        _ => Ok(0),
    }
}
