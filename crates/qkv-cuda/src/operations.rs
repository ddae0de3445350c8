//! The operations of models on a GPU: what the tape of `qkv-nn` needs besides attention. Each is one launch or a few
//! over [`Array`]s in device memory.
//!
//! Activations are bf16, or f32 if requested; parameters, gradients and all accumulation are f32. All work runs in
//! order on one stream, whichever thread enqueues it, so that dropped memory can be reused at once. Sums have a fixed
//! order, so results are bit-identical from run to run.
//!
//! A failure (out of memory, a lost device) is remembered and reported by [`Operations::check`]; operations after it
//! are skipped. Operations therefore return no errors, just as enqueued work could not.
//!
//! | module | owns |
//! | --- | --- |
//! | `array` | reused device memory, and the arrays in it |
//! | `launch` | kernel arguments and grids |
//! | `layers` | products, activations, norms, recurrence |
//! | `rows` | embeddings, gathers and their gradients |
//! | `speech` | losses of spectrograms, and guided attention |
//! | `training` | the loss, and the optimizer over all parameters |
//! | `attention` | attention plans for tensors of the tape |
//! | `additive` | additive attention of one head |
//! | `batch_invariant` | products whose bits do not depend on the number of rows |
//! | `blocks` | matrices in quantized blocks: products of few rows, widened rows |
//! | `decoding` | decoding steps whose positions the device counts |
//! | `logits` | the logits that a search reads, and tokens drawn from logits |
//! | `graph` | recorded work that runs as one launch |
//! | `recorder` | which thread records |
//! | `images` | windows of convolutions, pooling, group normalization |

mod additive;
mod array;
mod attention;
mod batch_invariant;
mod blocks;
mod decoding;
mod graph;
mod images;
mod launch;
mod layers;
mod logits;
mod recorder;
mod rows;
mod speech;
mod training;

pub use additive::{AdditiveCall, AdditiveChoice, AdditiveOutput};
pub use array::{Array, Fetched, Kind};
pub use attention::{AttentionCall, AttentionGradients, AttentionOutput};
pub use blocks::{BlockMatrix, MatrixRef};
pub(crate) use decoding::STAGED;
pub use decoding::{CacheEnd, DecodeBatch, FEW_ROWS, FewRowsInput, FewRowsProduct, NO_TOKEN, RowNorm, has_row_norm};
pub use graph::{Graph, RepeatedWork};
pub use images::ImageWindows;
pub use launch::{Drawing, DropoutKey};
pub use layers::{Activation, Factor, Gate};
pub use logits::{Draws, MOST_HIGHEST};
pub use rows::RowSums;
pub use training::{OptimizerTable, ParameterArrays, StepFactors, logits_stride};

use crate::device::Stream;
use crate::driver::{Driver, Kernel, Source};
use crate::error::{Error, Result};
use crate::memory::Dtype;
use crate::operation_programs;
use crate::{Cuda, Device};
use array::DeviceMemory;
use attention::Plans;
use recorder::Recorder;
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// A GPU that computes the operations of models. Clones share it.
#[derive(Clone)]
pub struct Operations {
    shared: Arc<Shared>,
    batch_invariant: bool,
}

struct Shared {
    cuda: Cuda,
    stream: Stream,
    /// The type of activations.
    dtype: Dtype,
    kernels: HashMap<&'static str, Kernel>,
    /// Kernels that few models need, compiled on first use.
    block_kernels: OnceLock<Result<HashMap<&'static str, Kernel>>>,
    memory: Arc<DeviceMemory>,
    failed: OnceLock<Error>,
    /// Keyed by the bits of their elements.
    constants: Mutex<HashMap<Vec<u32>, Array>>,
    plans: Mutex<Plans>,
    bytes_read: AtomicU64,
    /// Counters of arrived blocks, zero between launches.
    arrived: OnceLock<Array>,
    recorder: Recorder,
}

impl fmt::Debug for Operations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Operations({} in {})", self.device().name, self.shared.dtype)
    }
}

/// The most attention plans kept.
const MAX_PLANS: usize = 256;

impl Cuda {
    /// The operations of models on this device, with activations in bf16 or f32.
    pub fn operations(&self, dtype: Dtype) -> Result<Operations> {
        let kernels = self.kernels_of(&operation_programs::operations(dtype))?;
        let memory = Arc::new(DeviceMemory::new(&self.driver));
        let (cuda, stream) = (self.clone(), self.driver.new_stream()?);
        let recorder = Recorder::new(self.driver.new_recording_stream()?);
        let failed = OnceLock::new();
        let (constants, plans) = (Mutex::default(), Mutex::default());
        Ok(Operations {
            shared: Arc::new(Shared {
                cuda,
                stream,
                dtype,
                kernels,
                block_kernels: OnceLock::new(),
                memory,
                failed,
                constants,
                plans,
                bytes_read: AtomicU64::new(0),
                arrived: OnceLock::new(),
                recorder,
            }),
            batch_invariant: false,
        })
    }
}

impl Cuda {
    fn kernels_of(&self, source: &Source) -> Result<HashMap<&'static str, Kernel>> {
        let module = self.driver.module(source)?;
        let kernel = |&name: &&'static str| Ok((name, self.driver.kernel(&module, name, launch::threads(name), 0)?));
        source.kernels.iter().map(kernel).collect()
    }
}

impl Operations {
    /// The device.
    pub fn device(&self) -> &Device {
        self.shared.cuda.device()
    }

    /// The same device with batch-invariant inference on or off: the bits that a model computes for a sequence then
    /// depend neither on the other sequences of its batch nor on their lengths. Every product is computed by kernels
    /// of this crate that sum a row in an order that its width alone fixes, and attention by the general kernels,
    /// which is slower in large batches. Products of a backward pass become far slower.
    pub fn batch_invariant(self, batch_invariant: bool) -> Operations {
        Operations { batch_invariant, ..self }
    }

    /// Whether inference is batch-invariant.
    pub fn is_batch_invariant(&self) -> bool {
        self.batch_invariant
    }

    /// Whether the two are one: on the same device, with the same memory.
    pub fn is(&self, other: &Operations) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    /// The type of activations.
    pub fn dtype(&self) -> Dtype {
        self.shared.dtype
    }

    /// Waits for all work, and reports the first failure.
    pub fn check(&self) -> Result<()> {
        let waited = self.driver().wait(self.shared.stream);
        self.failed().map_or(waited, Err)
    }

    /// The first failure so far, without waiting.
    pub fn failed(&self) -> Option<Error> {
        self.shared.failed.get().cloned()
    }

    /// Bytes of device memory in use by arrays: now, and at the peak so far.
    pub fn memory_use(&self) -> [usize; 2] {
        self.shared.memory.in_use()
    }

    /// Bytes copied to the host so far. A copy waits for all work, so a training step makes few.
    pub fn bytes_read(&self) -> u64 {
        self.shared.bytes_read.load(Ordering::Relaxed)
    }

    /// The stream that work is enqueued on: the main one, or the recording one if the calling thread records.
    fn stream(&self) -> Stream {
        if self.shared.recorder.is_this_thread() { self.shared.recorder.stream } else { self.shared.stream }
    }

    fn driver(&self) -> &Arc<dyn Driver> {
        &self.shared.cuda.driver
    }

    /// A kernel by its name; an error if it has to be compiled now and that fails.
    fn kernel(&self, name: &str) -> Result<&Kernel> {
        let Shared { cuda, dtype, kernels, block_kernels, .. } = &*self.shared;
        if let Some(kernel) = kernels.get(name) {
            return Ok(kernel);
        }
        let found = block_kernels.get_or_init(|| cuda.kernels_of(&operation_programs::block_operations(*dtype)));
        found.as_ref().map(|kernels| &kernels[name]).map_err(Clone::clone)
    }

    /// Remembers a failure if it is the first.
    fn remember(&self, result: Result<()>) {
        if let Err(error) = result {
            let _ = self.shared.failed.set(error);
        }
    }

    fn plans(&self) -> MutexGuard<'_, Plans> {
        self.shared.plans.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
