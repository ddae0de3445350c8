#![doc = include_str!("../README.md")]
#![deny(missing_docs)]

mod benchmark;
mod cache;
mod call;
mod cublas;
mod cuda_driver;
mod decode;
mod device;
mod driver;
mod emulated;
mod error;
mod general;
mod general_params;
mod health;
mod hopper;
mod hopper_params;
mod kernel_abi;
mod libcuda;
mod matmul;
mod memory;
mod nvrtc;
mod operation_programs;
pub mod operations;
mod plan;
mod program;
mod session;
mod short;
mod staging;
mod tensors;
mod tile_list;
mod toolkit;
mod weights;
mod workspace;

pub use benchmark::{Benchmark, Timing};
pub use cache::{Cache, Key};
pub use device::{Device, Stream};
pub use error::{Error, Result};
pub use health::Health;
pub use memory::{Buffer, Dtype, Scalar, Strided};
pub use nvrtc::Compiler;
pub use plan::{Plan, PlanOptions};
pub use session::Session;
pub use tensors::{Gradients, Outputs, Tensors, Upstreams, Vector};
pub use toolkit::look_in;
pub use workspace::Workspace;

use cuda_driver::CudaDriver;
use driver::Driver;
use emulated::EmulatedDriver;
use qkv::{Attention, Place};
use std::sync::Arc;

/// A GPU, ready to compute.
///
/// ```
/// use qkv::{Attention, Inputs, Mask, Tensor};
/// use qkv_cuda::{Cuda, Error};
/// let cuda = match Cuda::new(0) {
///     Ok(cuda) => cuda,
///     Err(Error::NoDriver { .. } | Error::NoDevice { .. }) => return Ok(()), // this machine has no GPU
///     Err(error) => return Err(error),
/// };
/// let x = Tensor::<f32, 4>::randn([1, 8, 256, 64], 1); // [B, H, N, D]
/// let causal = Attention::scaled_dot().mask(Mask::causal());
/// let out = cuda.forward(&causal, Inputs::new(&x, &x, &x))?;
/// assert_eq!(out.values.shape(), [1, 8, 256, 64]);
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Cuda {
    driver: Arc<dyn Driver>,
}

impl Cuda {
    /// The GPU with this number, from 0, with the user's kernel cache.
    pub fn new(number: usize) -> Result<Cuda> {
        Cuda::with_cache(number, Cache::of_the_user())
    }

    /// The GPU with this number, with this kernel cache.
    pub fn with_cache(number: usize, cache: Cache) -> Result<Cuda> {
        Ok(Cuda { driver: Arc::new(CudaDriver::new(number, cache)?) })
    }

    /// The number of GPUs.
    pub fn count() -> Result<usize> {
        CudaDriver::count()
    }

    /// An emulation on the CPU: the general kernels compiled as C++, thousands of times slower than a GPU, for tests.
    /// It needs a C++ compiler.
    pub fn emulated() -> Result<Cuda> {
        Ok(Cuda { driver: Arc::new(EmulatedDriver::new((8, 0), 166_912)?) })
    }

    /// The GPU's properties.
    pub fn device(&self) -> &Device {
        self.driver.device()
    }

    /// Rejects a description that only the CPU supports, whatever its tensors.
    ///
    /// ```
    /// use qkv::Attention;
    /// use qkv_cuda::Cuda;
    /// assert!(Cuda::supports(&Attention::scaled_dot()).is_ok());
    /// assert!(Cuda::supports(&Attention::additive()).is_err());
    /// ```
    pub fn supports(attention: &Attention) -> Result<()> {
        plan::check_supported(attention)
    }

    /// Plans an attention over tensors in device memory: compiles its kernels and copies the data of its mask to the
    /// device. Only the shapes, strides and alignment of the tensors matter, not their contents.
    pub fn plan(
        &self,
        attention: &Attention,
        dtype: Dtype,
        place: Place,
        tensors: &Tensors,
        options: PlanOptions,
    ) -> Result<Plan> {
        Cuda::supports(attention)?;
        tensors.check(attention, place)?;
        Plan::new(&self.driver, attention, dtype, place, tensors, options)
    }

    /// Allocates device memory.
    pub fn buffer(&self, bytes: usize) -> Result<Buffer> {
        Buffer::new(&self.driver, bytes)
    }

    /// Waits for all work on a stream.
    pub fn wait(&self, stream: Stream) -> Result<()> {
        self.driver.wait(stream)
    }

    /// Whether a stream is being captured into a CUDA graph. No plan can be made for it meanwhile, and those made
    /// before have to live as long as the graph.
    pub fn is_capturing(&self, stream: Stream) -> Result<bool> {
        self.driver.is_capturing(stream)
    }

    /// Milliseconds that work on a stream takes, measured on the device.
    pub fn timed(&self, stream: Stream, mut work: impl FnMut() -> Result<()>) -> Result<f64> {
        self.driver.timed(stream, &mut work)
    }
}
