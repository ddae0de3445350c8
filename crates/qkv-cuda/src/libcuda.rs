//! NVIDIA's driver library, `libcuda`, loaded at run time: the few functions this crate calls, with their C signatures.
//! They are bound by hand rather than through a bindings crate, whose features could clash with those of another user
//! of it in the same build. [`cuda_driver`](crate::cuda_driver) is the only caller.

use crate::error::{Error, Result};
use libloading::Library;
use std::ffi::{CStr, OsStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

/// `CUresult`: 0 is success.
pub(crate) type Code = c_int;
/// `CUDA_ERROR_NO_DEVICE`.
pub(crate) const NO_DEVICE: Code = 100;
/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
pub(crate) const MAX_DYNAMIC_SHARED_BYTES: c_int = 8;
/// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`.
const PROGRAMMATIC_STREAM_SERIALIZATION: c_uint = 6;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`: memory may be allocated while a stream is recorded.
pub(crate) const CAPTURE_RELAXED: c_int = 2;
/// `CU_STREAM_NON_BLOCKING`.
pub(crate) const STREAM_NON_BLOCKING: c_uint = 1;
/// The names of the driver library, by platform.
const LIBRARIES: [&str; 2] = if cfg!(windows) { ["nvcuda.dll", "nvcuda"] } else { ["libcuda.so.1", "libcuda.so"] };

/// Values of `CUdevice_attribute`.
pub(crate) mod attribute {
    use std::ffi::c_int;
    pub const MULTIPROCESSOR_COUNT: c_int = 16;
    pub const COMPUTE_CAPABILITY_MAJOR: c_int = 75;
    pub const COMPUTE_CAPABILITY_MINOR: c_int = 76;
    pub const MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: c_int = 97;
}

/// Values that `cuTensorMapEncodeTiled` takes.
pub(crate) mod tensor_map {
    use std::ffi::c_int;
    pub const FLOAT16: c_int = 6;
    pub const BFLOAT16: c_int = 9;
    pub const INTERLEAVE_NONE: c_int = 0;
    pub const SWIZZLE_128B: c_int = 3;
    pub const L2_PROMOTION_256B: c_int = 3;
    pub const OOB_FILL_NONE: c_int = 0;
}

/// `CUlaunchAttribute`: an identifier and a 64-byte union, of which only an integer is used.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct LaunchAttribute {
    id: c_uint,
    _pad: [u8; 4],
    value: [u64; 8],
}

impl LaunchAttribute {
    /// Lets a kernel start before the previous launch on its stream has finished (programmatic dependent launch).
    pub fn programmatic_stream_serialization() -> LaunchAttribute {
        LaunchAttribute { id: PROGRAMMATIC_STREAM_SERIALIZATION, _pad: [0; 4], value: [1, 0, 0, 0, 0, 0, 0, 0] }
    }
}

/// `CUlaunchConfig`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct LaunchConfig {
    pub grid: [c_uint; 3],
    pub block: [c_uint; 3],
    pub shared_bytes: c_uint,
    pub stream: *mut c_void,
    pub attributes: *mut LaunchAttribute,
    pub attribute_count: c_uint,
}

macro_rules! functions {
    ($($(#[$doc:meta])* $field:ident = $symbol:literal ($($argument:ty),*);)*) => {
        /// The driver's functions.
        #[derive(Debug)]
        pub(crate) struct LibCuda {
            $($(#[$doc])* pub $field: unsafe extern "C" fn($($argument),*) -> Code,)*
            _library: Library,
        }

        impl LibCuda {
            fn bind(library: Library, file: &OsStr) -> Result<LibCuda> {
                let failed = |error| failed_to_load(file, error);
                Ok(LibCuda {
                    // SAFETY: these are the signatures of `cuda.h`, which the driver keeps fixed for a symbol's name.
                    $($field: *unsafe { library.get(concat!($symbol, "\0").as_bytes()) }.map_err(failed)?,)*
                    _library: library,
                })
            }
        }
    };
}

functions! {
    init = "cuInit" (c_uint);
    device_count = "cuDeviceGetCount" (*mut c_int);
    device = "cuDeviceGet" (*mut c_int, c_int);
    device_name = "cuDeviceGetName" (*mut c_char, c_int, c_int);
    device_attribute = "cuDeviceGetAttribute" (*mut c_int, c_int, c_int);
    device_memory = "cuDeviceTotalMem_v2" (*mut usize, c_int);
    driver_version = "cuDriverGetVersion" (*mut c_int);
    retain_context = "cuDevicePrimaryCtxRetain" (*mut *mut c_void, c_int);
    push_context = "cuCtxPushCurrent_v2" (*mut c_void);
    pop_context = "cuCtxPopCurrent_v2" (*mut *mut c_void);
    allocate = "cuMemAlloc_v2" (*mut u64, usize);
    free = "cuMemFree_v2" (u64);
    allocate_pinned = "cuMemAllocHost_v2" (*mut *mut c_void, usize);
    copy_to_device = "cuMemcpyHtoDAsync_v2" (u64, *const c_void, usize, *mut c_void);
    copy_to_host = "cuMemcpyDtoHAsync_v2" (*mut c_void, u64, usize, *mut c_void);
    copy_on_device = "cuMemcpyDtoDAsync_v2" (u64, u64, usize, *mut c_void);
    fill_bytes = "cuMemsetD8Async" (u64, u8, usize, *mut c_void);
    synchronize = "cuStreamSynchronize" (*mut c_void);
    is_capturing = "cuStreamIsCapturing" (*mut c_void, *mut c_int);
    create_stream = "cuStreamCreate" (*mut *mut c_void, c_uint);
    begin_capture = "cuStreamBeginCapture_v2" (*mut c_void, c_int);
    end_capture = "cuStreamEndCapture" (*mut c_void, *mut *mut c_void);
    instantiate_graph = "cuGraphInstantiateWithFlags" (*mut *mut c_void, *mut c_void, u64);
    launch_graph = "cuGraphLaunch" (*mut c_void, *mut c_void);
    free_recording = "cuGraphDestroy" (*mut c_void);
    free_graph = "cuGraphExecDestroy" (*mut c_void);
    load_module = "cuModuleLoadData" (*mut *mut c_void, *const c_void);
    module_function = "cuModuleGetFunction" (*mut *mut c_void, *mut c_void, *const c_char);
    module_global = "cuModuleGetGlobal_v2" (*mut u64, *mut usize, *mut c_void, *const c_char);
    set_function_attribute = "cuFuncSetAttribute" (*mut c_void, c_int, c_int);
    launch = "cuLaunchKernelEx" (*const LaunchConfig, *mut c_void, *mut *mut c_void, *mut *mut c_void);
    encode_tensor_map = "cuTensorMapEncodeTiled" (
        *mut c_void, c_int, c_uint, *mut c_void, *const u64, *const u64, *const c_uint, *const c_uint,
        c_int, c_int, c_int, c_int
    );
    create_event = "cuEventCreate" (*mut *mut c_void, c_uint);
    record_event = "cuEventRecord" (*mut c_void, *mut c_void);
    synchronize_event = "cuEventSynchronize" (*mut c_void);
    event_milliseconds = "cuEventElapsedTime" (*mut f32, *mut c_void, *mut c_void);
    destroy_event = "cuEventDestroy_v2" (*mut c_void);
    error_name = "cuGetErrorName" (Code, *mut *const c_char);
    error_string = "cuGetErrorString" (Code, *mut *const c_char);
}

fn failed_to_load(file: &OsStr, error: libloading::Error) -> Error {
    Error::Driver { action: format!("loading `{}`", file.display()), message: error.to_string() }
}

impl LibCuda {
    /// The driver of this machine, loaded once. A driver that lacks a function is an error that names it.
    pub fn find() -> Result<&'static LibCuda> {
        static FOUND: OnceLock<Result<LibCuda>> = OnceLock::new();
        let found = FOUND.get_or_init(|| {
            // SAFETY: the driver library has no initializer with preconditions.
            let loaded = LIBRARIES.into_iter().find_map(|name| Some((unsafe { Library::new(name) }.ok()?, name)));
            let (library, name) = loaded.ok_or(Error::NoDriver { library: LIBRARIES[0] })?;
            LibCuda::bind(library, OsStr::new(name))
        });
        found.as_ref().map_err(Clone::clone)
    }

    /// The driver library in this file.
    #[cfg(test)]
    pub fn open(file: &OsStr) -> Result<LibCuda> {
        // SAFETY: the driver library has no initializer with preconditions.
        let library = unsafe { Library::new(file) }.map_err(|error| failed_to_load(file, error))?;
        LibCuda::bind(library, file)
    }

    /// The driver's name and description of an error code.
    pub fn message(&self, code: Code) -> String {
        let text = |lookup: unsafe extern "C" fn(Code, *mut *const c_char) -> Code| {
            let mut text = std::ptr::null();
            // SAFETY: it writes one pointer, to a static string or null.
            let known = unsafe { lookup(code, &mut text) } == 0 && !text.is_null();
            // SAFETY: the driver says that it is a C string.
            known.then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
        };
        match (text(self.error_name), text(self.error_string)) {
            (Some(name), Some(description)) => format!("{name}: {description}"),
            _ => format!("error {code}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn launch_structures_have_the_layout_of_cuda_h() {
        assert_eq!((size_of::<LaunchAttribute>(), offset_of!(LaunchAttribute, value)), (72, 8));
        assert_eq!((offset_of!(LaunchConfig, block), offset_of!(LaunchConfig, shared_bytes)), (12, 24));
        assert_eq!((offset_of!(LaunchConfig, stream), offset_of!(LaunchConfig, attributes)), (32, 40));
        assert_eq!((offset_of!(LaunchConfig, attribute_count), size_of::<LaunchConfig>()), (48, 56));
    }

    #[test]
    fn a_file_that_is_no_driver_is_an_error_with_its_name() {
        let error = LibCuda::open(OsStr::new("no-such-libcuda.so")).unwrap_err();
        assert!(error.to_string().contains("no-such-libcuda.so"), "{error}");
    }
}
