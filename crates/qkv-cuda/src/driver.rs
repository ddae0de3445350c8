//! The interface between plans and whatever executes kernels: memory, modules and launches. It has two implementations:
//! NVIDIA's driver ([`cuda_driver`](crate::cuda_driver)) and an emulation on the CPU ([`emulated`](crate::emulated))
//! for tests.

use crate::device::{Device, Stream};
use crate::error::{Error, Result};
use crate::matmul::Matmul;
use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;

/// The source of a module, ready to compile.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    /// Unique among all programs: identifies the module once it is loaded.
    pub name: String,
    /// The prefix of its file in the kernel cache.
    pub cache_prefix: &'static str,
    /// CUDA C++, headers included.
    pub text: String,
    /// Compiler options, except the architecture.
    pub options: Vec<String>,
    /// The entry points.
    pub kernels: &'static [&'static str],
}

/// A kernel with its block size and dynamic shared memory.
#[derive(Clone, Debug)]
pub(crate) struct Kernel {
    pub module: Arc<dyn Module>,
    pub name: &'static str,
    /// The driver's handle.
    pub function: usize,
    pub threads: u32,
    pub shared: u32,
}

/// A loaded module.
pub(crate) trait Module: Send + Sync + Debug + Any {
    /// For the driver that loaded it to downcast.
    fn any(&self) -> &dyn Any;
}

/// The largest deferred copy, in bytes.
pub(crate) const LATER_BYTES: usize = 64;

/// Rejects a deferred copy of more than [`LATER_BYTES`].
pub(crate) fn check_later(bytes: usize) -> Result<()> {
    if bytes > LATER_BYTES {
        return Err(Error::memory("copy", "of more bytes than a slot has"));
    }
    Ok(())
}

/// Bytes in flight to the host.
pub(crate) trait PendingCopy: Send + Sync + Debug {
    /// Waits for them, but not for work enqueued after them.
    fn take(self: Box<Self>) -> Result<Vec<u8>>;
}

/// The most arguments a kernel takes.
pub(crate) const MAX_ARGUMENTS: usize = 32;

pub(crate) trait Driver: Send + Sync + Debug {
    fn device(&self) -> &Device;
    fn allocate(&self, bytes: usize) -> Result<u64>;
    fn free(&self, ptr: u64);
    /// Copies to the device; `from` may be reused when this returns.
    fn write(&self, to: u64, from: &[u8], stream: Stream) -> Result<()>;
    /// Copies to the host, after all work on the stream.
    fn read(&self, to: &mut [u8], from: u64, stream: Stream) -> Result<()>;
    /// Begins a copy of at most [`LATER_BYTES`] to the host, after the work now on the stream.
    fn read_later(&self, from: u64, bytes: usize, stream: Stream) -> Result<Box<dyn PendingCopy>>;
    /// Copies within the device.
    fn copy(&self, to: u64, from: u64, bytes: usize, stream: Stream) -> Result<()>;
    fn zero(&self, ptr: u64, bytes: usize, stream: Stream) -> Result<()>;
    fn wait(&self, stream: Stream) -> Result<()>;
    /// A stream ordered with the default one, for the life of the process.
    fn new_stream(&self) -> Result<Stream>;
    /// A stream that only records and never runs, for the life of the process. It is not ordered with the default
    /// stream, whose work would otherwise be rejected during a recording.
    fn new_recording_stream(&self) -> Result<Stream>;
    /// Records work enqueued on the stream from now on instead of running it; `false` if that is not possible.
    fn begin_capture(&self, stream: Stream) -> Result<bool>;
    /// Ends the recording and makes a graph of it.
    fn end_capture(&self, stream: Stream) -> Result<usize>;
    /// Enqueues a graph on the stream.
    fn launch_graph(&self, graph: usize, stream: Stream) -> Result<()>;
    fn free_graph(&self, graph: usize);
    /// Whether the stream is being recorded into a CUDA graph.
    fn is_capturing(&self, stream: Stream) -> Result<bool>;
    /// The module of this name: compiled and loaded on first use.
    fn module(&self, source: &Source) -> Result<Arc<dyn Module>>;
    fn kernel(&self, module: &Arc<dyn Module>, name: &'static str, threads: u32, shared: u32) -> Result<Kernel>;
    /// Reads a `__device__` variable of a module.
    fn global(&self, module: &Arc<dyn Module>, name: &'static str, to: &mut [u8]) -> Result<()>;
    /// Launches a kernel with these arguments, each by its address.
    ///
    /// # Safety
    /// The arguments have the kernel's parameter types, and every pointer in them is to device memory large enough for
    /// what the kernel reads or writes.
    unsafe fn launch(&self, kernel: &Kernel, grid: [u32; 2], stream: Stream, arguments: &[*const u8]) -> Result<()>;
    /// Programmatic dependent launch: blocks may start while the previous launch on the stream still runs. The kernel
    /// itself waits (`griddepcontrol.wait`) before it reads results of that launch. Without hardware support this is an
    /// ordinary launch.
    ///
    /// # Safety
    /// As for [`launch`](Driver::launch).
    unsafe fn launch_dependent(
        &self,
        kernel: &Kernel,
        grid: [u32; 2],
        stream: Stream,
        arguments: &[*const u8],
    ) -> Result<()> {
        // SAFETY: as the caller promises.
        unsafe { self.launch(kernel, grid, stream, arguments) }
    }
    /// A matrix product.
    ///
    /// # Safety
    /// Every pointer is to device memory as large as the sizes say.
    unsafe fn matmul(&self, call: &Matmul, stream: Stream) -> Result<()>;
    /// A TMA descriptor of a 4-D tensor of 16-bit elements: dimensions innermost first, strides in bytes of all but the
    /// innermost, and boxes of `rows` × 64 elements.
    fn tensor_map(&self, ptr: u64, bf16: bool, dims: [u64; 4], strides: [u64; 3], rows: u32) -> Result<TensorMap>;
    /// Milliseconds that work on a stream takes, measured by events on the device.
    fn timed(&self, stream: Stream, work: &mut dyn FnMut() -> Result<()>) -> Result<f64>;
}

/// A `CUtensorMap`, opaque.
#[derive(Clone, Copy)]
#[repr(C, align(128))]
pub(crate) struct TensorMap(pub [u64; 16]);
