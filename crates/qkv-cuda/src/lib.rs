#![doc = include_str!("../README.md")]
#![deny(missing_docs)]

mod cache;
mod card;
mod driver;
mod emulated;
mod error;
mod health;
mod hopper;
mod host;
mod job;
mod launch;
mod measure;
mod memory;
mod nvrtc;
mod plan;
mod program;
mod rules;
mod tensors;
mod tiles;
mod workspace;

pub use cache::{Cache, Key};
pub use driver::{Card, Stream};
pub use error::{Error, Result};
pub use health::Health;
pub use host::Session;
pub use measure::{Measured, Shapes, Taken};
pub use memory::{Buffer, Dtype, Number, Strided};
pub use nvrtc::Compiler;
pub use plan::{Plan, Uses};
pub use tensors::{Gradients, Outputs, Tensors, Upstreams, Vector};
pub use workspace::Workspace;

use driver::Driver;
use qkv::{Attention, Place};
use std::sync::Arc;

/// A card, ready to compute.
///
/// ```
/// use qkv::{Attention, Inputs, Mask, Tensor};
/// use qkv_cuda::{Cuda, Error};
/// let cuda = match Cuda::new(0) {
///     Ok(cuda) => cuda,
///     Err(Error::NoDriver { .. } | Error::NoCard { .. }) => return Ok(()), // nothing to show on this machine
///     Err(error) => return Err(error),
/// };
/// let x = Tensor::<f32, 4>::randn([1, 8, 256, 64], 1);
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
    /// The card of this number, from 0, with the user's cache of kernels.
    pub fn new(number: usize) -> Result<Cuda> {
        Cuda::with_cache(number, Cache::of_the_user())
    }

    /// The card of this number, with this cache of kernels.
    pub fn with_cache(number: usize, cache: Cache) -> Result<Cuda> {
        Ok(Cuda { driver: Arc::new(card::OnCard::new(number, cache)?) })
    }

    /// How many cards there are.
    pub fn count() -> Result<usize> {
        card::OnCard::count()
    }

    /// This CPU in the place of a card: the general kernels, compiled as C++, far too slow for anything but tests. It
    /// needs a C++ compiler.
    pub fn emulated() -> Result<Cuda> {
        Ok(Cuda { driver: Arc::new(emulated::OnCpu::new((8, 0), 166_912)?) })
    }

    /// What the card is.
    pub fn card(&self) -> &Card {
        self.driver.card()
    }

    /// Plans an attention over tensors in device memory: finds and compiles its kernels, and puts what its mask needs on
    /// the card. The tensors' shapes, strides and alignment count; what they hold does not.
    pub fn plan(
        &self,
        attention: &Attention,
        dtype: Dtype,
        place: Place,
        tensors: &Tensors,
        uses: Uses,
    ) -> Result<Plan> {
        Plan::new(&self.driver, attention, dtype, place, tensors, uses)
    }

    /// Device memory.
    pub fn buffer(&self, bytes: usize) -> Result<Buffer> {
        Buffer::new(&self.driver, bytes)
    }

    /// Waits for all that is on a stream.
    pub fn wait(&self, stream: Stream) -> Result<()> {
        self.driver.wait(stream)
    }

    /// Milliseconds that work on a stream takes, by the card's clock.
    pub fn timed(&self, stream: Stream, mut work: impl FnMut() -> Result<()>) -> Result<f64> {
        self.driver.timed(stream, &mut work)
    }
}
