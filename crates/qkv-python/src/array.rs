//! [`Array`]: memory that this module owns and shares with Python, on the host through NumPy's array interface and
//! DLPack, on a CUDA device through DLPack; and conversion of results to arrays of the library that the queries came
//! from.

use crate::borrowed::EMULATED;
use crate::dlpack::{self, Managed, ManagedVersioned};
use crate::dtype::{Dtype, Typed};
use crate::errors::{refused, refused_on_cuda, value};
use half::{bf16, f16};
use pyo3::IntoPyObjectExt;
use pyo3::exceptions::{PyAttributeError, PyBufferError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict, PyList, PyTuple};
use qkv::Tensor;
use qkv_cuda::{Buffer, Cuda, Stream};
use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;

/// The memory of a vector, freed when the last array or capsule that shares it is dropped, on any thread, without
/// Python.
struct Memory {
    data: NonNull<u8>,
    len: usize,
    capacity: usize,
    free: fn(NonNull<u8>, usize, usize),
    device: Option<OnDevice>,
}

/// Device memory; freeing it waits for pending work.
struct OnDevice {
    _buffer: Buffer,
    number: i32,
    cuda: Cuda,
    /// The stream of the work that fills it.
    stream: Stream,
}

// SAFETY: it owns its memory, which this module never writes; code that gets the address shares the memory as Python's
// arrays do.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    fn new<T: Typed>(data: Vec<T>) -> Arc<Memory> {
        let mut data = ManuallyDrop::new(data);
        let free = |data: NonNull<u8>, len, capacity| {
            // SAFETY: the parts of the vector above.
            drop(unsafe { Vec::<T>::from_raw_parts(data.cast().as_ptr(), len, capacity) });
        };
        let (len, capacity) = (data.len(), data.capacity());
        let data = NonNull::new(data.as_mut_ptr().cast()).expect("a vector's pointer is not null");
        Arc::new(Memory { data, len, capacity, free, device: None })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        (self.free)(self.data, self.len, self.capacity);
    }
}

/// An array in row-major order that qkv allocated. `numpy.asarray(array)`, `torch.from_dlpack(array)` and
/// `jax.dlpack.from_dlpack(array)` see its memory without a copy.
#[pyclass(frozen, module = "qkv")]
pub struct Array {
    memory: Arc<Memory>,
    dtype: Dtype,
    shape: Vec<usize>,
}

impl Array {
    /// Takes ownership of a tensor's memory; the last `rank` axes are kept, leading axes of length 1 are dropped.
    pub fn new<T: Typed, const R: usize>(tensor: Tensor<T, R>, rank: usize) -> Array {
        let shape = tensor.shape()[R.saturating_sub(rank)..].to_vec();
        Array { memory: Memory::new(tensor.into_data()), dtype: T::DTYPE, shape }
    }

    /// A vector as an array of this shape.
    pub fn shaped<T: Typed>(data: Vec<T>, shape: &[usize]) -> PyResult<Array> {
        let len = data.len();
        let mut array = Array::new(Tensor::new(data, [len]).map_err(refused)?, 1);
        debug_assert_eq!(len, shape.iter().product::<usize>());
        array.shape = shape.to_vec();
        Ok(array)
    }

    /// Device memory as an array of this shape, filled by work on a stream.
    pub fn on_device(
        buffer: Buffer,
        dtype: Dtype,
        shape: &[usize],
        (number, stream): (i32, Stream),
        cuda: Cuda,
    ) -> Array {
        let data = NonNull::new(std::ptr::with_exposed_provenance_mut(buffer.ptr() as usize));
        let data = data.unwrap_or(NonNull::dangling());
        let device = Some(OnDevice { _buffer: buffer, number, cuda, stream });
        let memory = Arc::new(Memory { data, len: 0, capacity: 0, free: |_, _, _| (), device });
        Array { memory, dtype, shape: shape.to_vec() }
    }

    /// The kind and number of its device, as in DLPack.
    fn place(&self) -> dlpack::Device {
        match &self.memory.device {
            Some(device) if device.number != EMULATED => dlpack::Device { kind: dlpack::CUDA, id: device.number },
            _ => dlpack::Device { kind: dlpack::HOST[0], id: 0 },
        }
    }

    /// Makes device memory ready for a consumer's stream, numbered as in DLPack: waits, unless the stream is −1 or the
    /// one that fills the memory.
    fn make_ready(&self, py: Python<'_>, stream: Option<i64>) -> PyResult<()> {
        let Some(device) = &self.memory.device else { return Ok(()) };
        let own = if device.stream.0 == 0 { 1 } else { device.stream.0 as i64 };
        match stream.unwrap_or(1) {
            -1 => Ok(()),
            stream if stream == own => Ok(()),
            _ => py.detach(|| device.cuda.wait(device.stream)).map_err(refused_on_cuda),
        }
    }

    /// The elements of an array on the host.
    fn elements<T: Typed>(&self) -> &[T] {
        debug_assert!(T::DTYPE == self.dtype || T::DTYPE == Dtype::U8);
        // SAFETY: `len` elements of this type, written when the tensor was made.
        unsafe { std::slice::from_raw_parts(self.memory.data.cast().as_ptr(), self.memory.len) }
    }
}

#[pymethods]
impl Array {
    /// The axes.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    /// The name of the element type, as NumPy spells it.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.dtype.name()
    }

    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if self.memory.device.is_some() {
            return Err(PyAttributeError::new_err("the array is on a device: use `from_dlpack` of its library"));
        }
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("typestr", self.dtype.typestr())?;
        interface.set_item("shape", self.shape(py)?)?;
        interface.set_item("data", (self.memory.data.as_ptr().expose_provenance(), false))?;
        Ok(interface)
    }

    /// The kind and number of the device: the host, or a CUDA device.
    fn __dlpack_device__(&self) -> (i32, i32) {
        (self.place().kind, self.place().id)
    }

    /// A capsule that shares the memory.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        if stream.is_some() && self.memory.device.is_none() {
            return Err(value("`stream` was given, but the array is on the host"));
        }
        if dl_device.is_some_and(|device| device != self.__dlpack_device__()) || copy == Some(true) {
            return Err(PyBufferError::new_err("it can only be shared, where it is"));
        }
        self.make_ready(py, stream)?;
        let shared = Shared::new(self);
        if max_version.is_some_and(|(major, _)| major >= 1) {
            let managed = Box::into_raw(Box::new(ManagedVersioned {
                version: dlpack::Version { major: 1, minor: 0 },
                tensor: shared.tensor(),
                context: Box::into_raw(shared).cast(),
                deleter: Some(delete_versioned),
                flags: 0,
            }));
            let managed = NonNull::new(managed).expect("a box is not null").cast();
            // SAFETY: the capsule owns a structure of its name; the destructor frees it unless a consumer did.
            return unsafe {
                PyCapsule::new_with_pointer_and_destructor(py, managed, dlpack::VERSIONED_CAPSULE, Some(drop_versioned))
            };
        }
        let tensor = shared.tensor();
        let context = Box::into_raw(shared).cast();
        let managed = Box::into_raw(Box::new(Managed { tensor, context, deleter: Some(delete) }));
        let managed = NonNull::new(managed).expect("a box is not null").cast();
        // SAFETY: as above.
        unsafe { PyCapsule::new_with_pointer_and_destructor(py, managed, dlpack::CAPSULE, Some(drop_unversioned)) }
    }

    /// Nested lists of numbers.
    fn tolist<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        fn nested<'py, T: Copy>(
            py: Python<'py>,
            data: &[T],
            shape: &[usize],
            number: &dyn Fn(T) -> PyResult<Bound<'py, PyAny>>,
        ) -> PyResult<Bound<'py, PyAny>> {
            let Some((&len, rest)) = shape.split_first() else { return number(data[0]) };
            let step: usize = rest.iter().product();
            let items = (0..len).map(|at| nested(py, &data[at * step..][..step], rest, number));
            PyList::new(py, items.collect::<PyResult<Vec<_>>>()?).map(Bound::into_any)
        }
        if self.memory.device.is_some() {
            return Err(value("the array is on a device: copy it to the host first"));
        }
        let shape = &self.shape;
        match self.dtype {
            Dtype::F32 => nested::<f32>(py, self.elements(), shape, &|x| f64::from(x).into_bound_py_any(py)),
            Dtype::F64 => nested::<f64>(py, self.elements(), shape, &|x| x.into_bound_py_any(py)),
            Dtype::Bf16 => nested::<bf16>(py, self.elements(), shape, &|x| x.to_f64().into_bound_py_any(py)),
            Dtype::F16 => nested::<f16>(py, self.elements(), shape, &|x| x.to_f64().into_bound_py_any(py)),
            Dtype::I32 => nested::<i32>(py, self.elements(), shape, &|x| x.into_bound_py_any(py)),
            Dtype::I64 => nested::<i64>(py, self.elements(), shape, &|x| x.into_bound_py_any(py)),
            Dtype::Bool => nested::<u8>(py, self.elements(), shape, &|x| (x != 0).into_bound_py_any(py)),
            Dtype::U8 | Dtype::I8 | Dtype::I16 => {
                nested::<u8>(py, self.elements(), shape, &|x| x.into_bound_py_any(py))
            }
        }
    }

    fn __repr__(&self) -> String {
        format!("<qkv.Array {:?} {}>", self.shape, self.dtype.name())
    }
}

/// Bytes of 0 and 1 as an array of bool.
pub fn bools(tensor: Tensor<u8, 2>) -> Array {
    let mut array = Array::new(tensor, 2);
    array.dtype = Dtype::Bool;
    array
}

/// The context of a capsule: the memory, and its shape and strides in DLPack's form.
struct Shared {
    memory: Arc<Memory>,
    device: dlpack::Device,
    dtype: dlpack::DataType,
    shape: Vec<i64>,
    strides: Vec<i64>,
}

impl Shared {
    fn new(array: &Array) -> Box<Shared> {
        let shape: Vec<i64> = array.shape.iter().map(|&len| len as i64).collect();
        let mut strides = vec![1; shape.len()];
        for axis in (1..shape.len()).rev() {
            strides[axis - 1] = strides[axis] * shape[axis].max(1);
        }
        let (memory, device, dtype) = (array.memory.clone(), array.place(), array.dtype.dlpack());
        Box::new(Shared { memory, device, dtype, shape, strides })
    }

    fn tensor(&self) -> dlpack::Tensor {
        dlpack::Tensor {
            data: self.memory.data.as_ptr().cast(),
            device: self.device,
            rank: self.shape.len() as i32,
            dtype: self.dtype,
            shape: self.shape.as_ptr().cast_mut(),
            strides: self.strides.as_ptr().cast_mut(),
            byte_offset: 0,
        }
    }
}

/// Frees the context of a capsule. Consumers may call it on any thread, with or without the GIL.
unsafe fn release(context: *mut c_void) {
    // SAFETY: `__dlpack__` created it, and a deleter is called once.
    drop(unsafe { Box::from_raw(context.cast::<Shared>()) });
}

unsafe extern "C" fn delete(managed: *mut Managed) {
    // SAFETY: called once, with the box that `__dlpack__` created.
    unsafe { release(Box::from_raw(managed).context) }
}

unsafe extern "C" fn delete_versioned(managed: *mut ManagedVersioned) {
    // SAFETY: as above.
    unsafe { release(Box::from_raw(managed).context) }
}

/// The destructor of a capsule: frees the tensor unless a consumer has taken it, which renames the capsule.
unsafe extern "C" fn drop_unversioned(capsule: *mut pyo3::ffi::PyObject) {
    // SAFETY: called by Python with the capsule; under its original name it still holds its original pointer.
    unsafe {
        if pyo3::ffi::PyCapsule_IsValid(capsule, dlpack::CAPSULE.as_ptr()) == 1 {
            delete(pyo3::ffi::PyCapsule_GetPointer(capsule, dlpack::CAPSULE.as_ptr()).cast());
        }
    }
}

unsafe extern "C" fn drop_versioned(capsule: *mut pyo3::ffi::PyObject) {
    // SAFETY: as above.
    unsafe {
        if pyo3::ffi::PyCapsule_IsValid(capsule, dlpack::VERSIONED_CAPSULE.as_ptr()) == 1 {
            delete_versioned(pyo3::ffi::PyCapsule_GetPointer(capsule, dlpack::VERSIONED_CAPSULE.as_ptr()).cast());
        }
    }
}

/// The library of the caller's arrays, in which results are returned.
#[derive(Clone, Copy)]
pub enum Library {
    NumPy,
    Torch,
    Jax,
    CuPy,
    Other,
}

impl Library {
    /// The library of an array; refuses a PyTorch tensor that requires a gradient, because the gradient would be lost.
    pub fn of(name: &str, object: &Bound<'_, PyAny>) -> PyResult<Library> {
        let py = object.py();
        let module: String = object.get_type().getattr(intern!(py, "__module__"))?.extract().unwrap_or_default();
        Ok(match module.split('.').next() {
            Some("numpy") => Library::NumPy,
            Some("torch") => {
                if object.getattr(intern!(py, "requires_grad"))?.is_truthy()? {
                    return Err(value(format!(
                        "`{name}` requires a gradient, which this call would lose: use `qkv.torch`, or pass `.detach()`"
                    )));
                }
                Library::Torch
            }
            Some("jax" | "jaxlib") => Library::Jax,
            Some("cupy") => Library::CuPy,
            _ => Library::Other,
        })
    }

    /// An array of this library over the same memory.
    pub fn array<'py>(self, py: Python<'py>, array: Array) -> PyResult<Bound<'py, PyAny>> {
        let dtype = array.dtype;
        let array = Bound::new(py, array)?.into_any();
        match self {
            Library::NumPy => {
                let found = py.import(intern!(py, "numpy"))?.call_method1(intern!(py, "asarray"), (array,))?;
                if dtype != Dtype::Bf16 {
                    return Ok(found);
                }
                let bfloat16 = py.import(intern!(py, "ml_dtypes"))?.getattr(intern!(py, "bfloat16"))?;
                found.call_method1(intern!(py, "view"), (bfloat16,))
            }
            library => library.adopt(array),
        }
    }

    /// An array of this library that shares the memory of an [`Array`].
    pub fn adopt<'py>(self, array: Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = array.py();
        let module = match self {
            Library::NumPy => intern!(py, "numpy"),
            Library::Torch => intern!(py, "torch"),
            Library::Jax => intern!(py, "jax.dlpack"),
            Library::CuPy => intern!(py, "cupy"),
            Library::Other => return Ok(array),
        };
        py.import(module)?.call_method1(intern!(py, "from_dlpack"), (array,))
    }
}
