//! [`Allocated`]: a tensor that a framework allocates for a result, through the exchange functions of the framework's
//! tensor type, so that no Python code runs.

use crate::dlpack::{self, Device, Exchange, ManagedVersioned};
use crate::dtype::{Dtype, Typed};
use crate::errors::value;
use pyo3::exceptions::{PyMemoryError, PyRuntimeError};
use pyo3::prelude::*;
use qkv::ViewMut;
use std::ffi::{CStr, c_char, c_void};
use std::ptr::{self, NonNull};

/// A dense tensor of a framework, not yet a Python object.
pub struct Allocated {
    exchange: &'static Exchange,
    managed: NonNull<ManagedVersioned>,
    shape: [usize; 4],
    strides: [isize; 4],
}

impl Drop for Allocated {
    fn drop(&mut self) {
        // SAFETY: `self` owns it unless `into_object` has forgotten `self`, so it is freed once.
        unsafe {
            if let Some(deleter) = self.managed.as_ref().deleter {
                deleter(self.managed.as_ptr());
            }
        }
    }
}

impl Allocated {
    /// A tensor on the host with axes `shape`, laid out in memory in this order (`order[0]` outermost).
    pub fn new(exchange: &'static Exchange, dtype: Dtype, shape: [usize; 4], order: [usize; 4]) -> PyResult<Allocated> {
        let allocator = exchange.allocator.ok_or_else(|| value("the type of `q` cannot be allocated"))?;
        let mut axes = order.map(|axis| shape[axis] as i64);
        let mut prototype = dlpack::Tensor {
            data: ptr::null_mut(),
            device: Device { kind: dlpack::HOST[0], id: 0 },
            rank: 4,
            dtype: dtype.dlpack(),
            shape: axes.as_mut_ptr(),
            strides: ptr::null_mut(),
            byte_offset: 0,
        };
        let (mut managed, mut error) = (ptr::null_mut(), String::new());
        // SAFETY: the arguments outlive the call, and `set_error` gets the context that it expects.
        let failed = unsafe { allocator(&mut prototype, &mut managed, (&raw mut error).cast(), set_error) } != 0;
        let Some(managed) = NonNull::new(managed).filter(|_| !failed) else {
            return Err(PyMemoryError::new_err(error));
        };
        let mut strides = [1isize; 4];
        for at in (0..3).rev() {
            strides[order[at]] = strides[order[at + 1]].saturating_mul(shape[order[at + 1]].max(1) as isize);
        }
        Ok(Allocated { exchange, managed, shape, strides })
    }

    /// Its memory, mutable.
    pub fn view_mut<T: Typed>(&mut self) -> PyResult<ViewMut<'_, T>> {
        // SAFETY: the framework allocated a dense tensor of this shape and order, to which nothing else has a reference
        // yet.
        unsafe {
            let tensor = &self.managed.as_ref().tensor;
            let data = tensor.data.cast::<u8>().wrapping_add(tensor.byte_offset as usize);
            ViewMut::from_raw(data.cast(), self.shape, self.strides).map_err(|error| value(error.to_string()))
        }
    }

    /// The tensor as a Python object of the framework, with the first `rank` of its axes.
    pub fn into_object(self, py: Python<'_>, rank: usize) -> PyResult<Bound<'_, PyAny>> {
        let this = std::mem::ManuallyDrop::new(self);
        let give = this.exchange.managed_to_object;
        let mut object: *mut c_void = ptr::null_mut();
        // SAFETY: `managed` is owned here, and `give` takes ownership of it. Its shape and strides have four entries
        // each, of which the first `rank` are rewritten to the axes in their logical order.
        let failed = unsafe {
            let tensor = &mut (*this.managed.as_ptr()).tensor;
            for axis in 0..rank.min(4) {
                *tensor.shape.add(axis) = this.shape[axis] as i64;
                *tensor.strides.add(axis) = this.strides[axis] as i64;
            }
            tensor.rank = rank.min(4) as i32;
            give.is_none_or(|give| give(this.managed.as_ptr(), &mut object) != 0)
        };
        match NonNull::new(object.cast::<pyo3::ffi::PyObject>()).filter(|_| !failed) {
            // SAFETY: a new reference to an object.
            Some(object) => Ok(unsafe { Bound::from_owned_ptr(py, object.as_ptr()) }),
            None => Err(PyErr::take(py).unwrap_or_else(|| PyRuntimeError::new_err("the tensor was not taken"))),
        }
    }
}

/// Stores the message of an error in the string that the context points to.
unsafe extern "C" fn set_error(context: *mut c_void, _kind: *const c_char, message: *const c_char) {
    // SAFETY: `Allocated::new` passed a pointer to a string, and the framework a message or null.
    unsafe {
        if !message.is_null() {
            *context.cast::<String>() = CStr::from_ptr(message).to_string_lossy().into_owned();
        }
    }
}
