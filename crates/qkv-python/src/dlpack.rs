//! The C structures of [DLPack](https://dmlc.github.io/dlpack/) 1 that this module reads and writes.

use std::ffi::{CStr, c_char, c_int, c_void};

/// Host memory, and host memory that a CUDA device can read.
pub const HOST: [i32; 2] = [1, 3];

/// CUDA device memory.
pub const CUDA: i32 = 2;

/// The names of a capsule in the unversioned form, in the versioned form, and of a type's exchange functions.
pub const CAPSULE: &CStr = c"dltensor";
pub const VERSIONED_CAPSULE: &CStr = c"dltensor_versioned";
pub const EXCHANGE_CAPSULE: &CStr = c"dlpack_exchange_api";

/// The bit of [`ManagedVersioned::flags`] for memory that must not be written.
pub const READ_ONLY: u64 = 1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Device {
    pub kind: i32,
    pub id: i32,
}

/// `code`: 0 integer, 1 unsigned, 2 float, 4 bfloat, 6 bool.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct DataType {
    pub code: u8,
    pub bits: u8,
    pub lanes: u16,
}

#[repr(C)]
pub struct Tensor {
    pub data: *mut c_void,
    pub device: Device,
    pub rank: i32,
    pub dtype: DataType,
    pub shape: *mut i64,
    pub strides: *mut i64,
    pub byte_offset: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Version {
    pub major: u32,
    pub minor: u32,
}

#[repr(C)]
pub struct Managed {
    pub tensor: Tensor,
    pub context: *mut c_void,
    pub deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

#[repr(C)]
pub struct ManagedVersioned {
    pub version: Version,
    pub context: *mut c_void,
    pub deleter: Option<unsafe extern "C" fn(*mut ManagedVersioned)>,
    pub flags: u64,
    pub tensor: Tensor,
}

/// Fills a [`Tensor`] that borrows from a Python object; 0, or −1 with a Python error set.
pub type FromPyObject = unsafe extern "C" fn(*mut c_void, *mut Tensor) -> c_int;

/// Called with the context, the kind and the message of an error.
pub type SetError = unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char);

/// Allocates a tensor of the prototype's type, shape and device; 0, or −1 after `SetError` was called.
pub type Allocator = unsafe extern "C" fn(*mut Tensor, *mut *mut ManagedVersioned, *mut c_void, SetError) -> c_int;

/// Turns a tensor, whose ownership it takes, into a Python object; 0, or −1 with a Python error set.
pub type ToPyObject = unsafe extern "C" fn(*mut ManagedVersioned, *mut *mut c_void) -> c_int;

/// The exchange functions that a type may offer (DLPack 1.3): the fast path, without a capsule per call.
#[repr(C)]
pub struct Exchange {
    pub version: Version,
    pub older: *mut Exchange,
    pub allocator: Option<Allocator>,
    pub managed_from_object: *mut c_void,
    pub managed_to_object: Option<ToPyObject>,
    pub tensor_from_object: Option<FromPyObject>,
    pub current_stream: *mut c_void,
}
