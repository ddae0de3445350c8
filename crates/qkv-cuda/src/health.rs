//! What this machine offers the crate, as `qkv doctor` prints it: GPUs, driver, compiler and kernel cache.

use crate::cache::Cache;
use crate::cuda_driver::CudaDriver;
use crate::device::Device;
use crate::driver::Driver;
use crate::nvrtc::Compiler;
use serde::Serialize;

/// What is available and what is missing.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Health {
    /// The GPUs, or why there are none.
    pub devices: Result<Vec<Device>, String>,
    /// NVRTC's version and path, or what is missing.
    pub compiler: Result<String, String>,
    /// The folder of compiled kernels.
    pub cache: String,
    /// How many compiled kernels it has, and their size in bytes.
    pub kernels: (usize, u64),
    /// Why the cache cannot be written, if it cannot.
    pub cache_problem: Option<String>,
}

impl Health {
    /// Inspects this machine.
    ///
    /// ```
    /// let health = qkv_cuda::Health::of_this_machine();
    /// assert!(!health.cache.is_empty());
    /// ```
    pub fn of_this_machine() -> Health {
        let cache = Cache::of_the_user();
        let devices = CudaDriver::count().and_then(|count| {
            (0..count).map(|number| Ok(CudaDriver::new(number, cache.clone())?.device().clone())).collect()
        });
        let compiler = Compiler::find().map(|found| {
            let (major, minor) = found.version();
            format!("{major}.{minor}, {}", found.path())
        });
        let with_hint = |error: crate::Error| match error.hint() {
            Some(hint) => format!("{error}; {hint}"),
            None => error.to_string(),
        };
        Health {
            // Without a driver there is nothing to compile for, and the cache folder is not created.
            cache_problem: devices.is_ok().then(|| cache.writable().err()).flatten().map(|error| error.to_string()),
            devices: devices.map_err(with_hint),
            compiler: compiler.map_err(with_hint),
            cache: cache.folder().display().to_string(),
            kernels: cache.size(),
        }
    }
}
