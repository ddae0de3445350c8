//! What stands between a plan and a card: memory, modules and launches. Two of them: the driver of a card ([`card`]
//! (crate::card)) and one that runs the same kernels on this CPU ([`emulated`](crate::emulated)), for tests.

use crate::error::Result;
use crate::program::Program;
use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;

/// A card, as `qkv doctor` tells of it and as plans are made for it.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
#[non_exhaustive]
pub struct Card {
    /// Its name.
    pub name: String,
    /// Its compute capability.
    pub capability: (u32, u32),
    /// Its multiprocessors.
    pub processors: u32,
    /// The most shared memory that a block can have, in bytes.
    pub shared_bytes: usize,
    /// Its memory, in bytes.
    pub memory_bytes: u64,
    /// The newest CUDA that its driver speaks: 13.0 is `(13, 0)`.
    pub driver: (u32, u32),
}

impl Card {
    /// What kernels are compiled for.
    pub fn architecture(&self) -> String {
        let (major, minor) = self.capability;
        // Hopper's own instructions are in a target of their own.
        if self.is_hopper() { "sm_90a".into() } else { format!("sm_{major}{minor}") }
    }

    /// Whether it has Hopper's tensor cores and copy engine.
    pub fn is_hopper(&self) -> bool {
        self.capability == (9, 0)
    }
}

/// A kernel, ready to be launched with so many threads and so much shared memory.
#[derive(Clone, Debug)]
pub(crate) struct Kernel {
    pub module: Arc<dyn Module>,
    pub name: &'static str,
    /// The driver's handle.
    pub function: usize,
    pub threads: u32,
    pub shared: u32,
}

/// A loaded program.
pub(crate) trait Module: Send + Sync + Debug + Any {
    /// For whoever knows which it is.
    fn any(&self) -> &dyn Any;
}

/// A stream of the driver's: work on one is done in order. 0 is the default stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stream(pub u64);

pub(crate) trait Driver: Send + Sync + Debug {
    fn card(&self) -> &Card;
    fn allocate(&self, bytes: usize) -> Result<u64>;
    fn free(&self, at: u64);
    /// Copies in; the source may be used again when it returns.
    fn write(&self, to: u64, from: &[u8], stream: Stream) -> Result<()>;
    /// Copies out, after all that is on the stream.
    fn read(&self, to: &mut [u8], from: u64, stream: Stream) -> Result<()>;
    fn zero(&self, at: u64, bytes: usize, stream: Stream) -> Result<()>;
    fn wait(&self, stream: Stream) -> Result<()>;
    /// Compiles and loads, or finds it loaded.
    fn module(&self, program: &Program) -> Result<Arc<dyn Module>>;
    fn kernel(&self, module: &Arc<dyn Module>, name: &'static str, threads: u32, shared: u32) -> Result<Kernel>;
    /// What a global of a module holds.
    fn global(&self, module: &Arc<dyn Module>, name: &'static str, to: &mut [u8]) -> Result<()>;
    /// Launches with these parameters, each by its address.
    ///
    /// # Safety
    /// The parameters are those that the kernel takes, and every pointer in them is to memory of the card that is as large
    /// as they say.
    unsafe fn launch(&self, kernel: &Kernel, grid: [u32; 2], stream: Stream, parameters: &[*const u8]) -> Result<()>;
    /// Launches so that blocks may start while those of the last launch on this stream are still at work; the kernel itself
    /// waits for them before it reads anything. Where a card cannot, it starts after them.
    ///
    /// # Safety
    /// As for [`launch`](Driver::launch).
    unsafe fn launch_early(
        &self,
        kernel: &Kernel,
        grid: [u32; 2],
        stream: Stream,
        parameters: &[*const u8],
    ) -> Result<()> {
        // SAFETY: as the caller promises.
        unsafe { self.launch(kernel, grid, stream, parameters) }
    }
    /// A map for the copy engine over a tensor of 16-bit elements: axes and strides (of all but the first, in bytes) from
    /// the innermost, and the box that one copy takes.
    fn tensor_map(&self, at: u64, bf16: bool, axes: [u64; 4], strides: [u64; 3], rows: u32) -> Result<TensorMap>;
    /// Milliseconds that work on the stream takes, by the card's own clock.
    fn timed(&self, stream: Stream, work: &mut dyn FnMut() -> Result<()>) -> Result<f64>;
}

/// What the copy engine is told of a tensor.
#[derive(Clone, Copy)]
#[repr(C, align(128))]
pub(crate) struct TensorMap(pub [u64; 16]);
