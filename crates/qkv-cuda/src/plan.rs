//! A plan: the kernels that compute a description on a device for tensors of given shapes, and the workspace they need.
//! Making a plan compiles, allocates and waits; using one only enqueues launches on a stream.

use crate::call::Call;
use crate::decode::DecodeForward;
use crate::device::{Device, Stream};
use crate::driver::Driver;
use crate::error::{Error, Result};
use crate::general::{GeneralBackward, GeneralForward, Scope, TileScope, WeightsKernels};
use crate::hopper::{Hopper, HopperOptions};
use crate::memory::Dtype;
use crate::short::Short;
use crate::tensors::{Gradients, Outputs, Tensors, Upstreams};
use crate::workspace::{Layout, Workspace};
use qkv::{Attention, Place, Score, Select};
use std::sync::Arc;

/// What a plan is for. The default is a forward pass with the fastest kernels.
///
/// ```
/// use qkv_cuda::PlanOptions;
/// let training = PlanOptions::default().backward(true);
/// assert!(training.backward && !training.weights);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct PlanOptions {
    /// Whether there is a backward pass.
    pub backward: bool,
    /// Whether weights can be recomputed.
    pub weights: bool,
    /// Use only kernels for every supported GPU: the general ones, and those that decode.
    pub general_only: bool,
    /// Let the backward pass add in any order where that is faster. Bits then differ from run to run.
    pub any_order: bool,
    /// The bits of a query depend on its own keys alone, whatever the batch and however far queries and keys are
    /// padded: use only general kernels, and do not split the keys of a few queries.
    pub batch_invariant: bool,
    /// With `batch_invariant`: there is one query per sequence in every batch, so that kernels that decode may be used
    /// and keys may be split.
    pub step: bool,
}

impl PlanOptions {
    /// With [`backward`](PlanOptions::backward).
    pub fn backward(self, backward: bool) -> PlanOptions {
        PlanOptions { backward, ..self }
    }

    /// With [`weights`](PlanOptions::weights).
    pub fn weights(self, weights: bool) -> PlanOptions {
        PlanOptions { weights, ..self }
    }

    /// With [`general_only`](PlanOptions::general_only).
    pub fn general_only(self, general_only: bool) -> PlanOptions {
        PlanOptions { general_only, ..self }
    }

    /// With [`any_order`](PlanOptions::any_order).
    pub fn any_order(self, any_order: bool) -> PlanOptions {
        PlanOptions { any_order, ..self }
    }

    /// With [`batch_invariant`](PlanOptions::batch_invariant).
    pub fn batch_invariant(self, batch_invariant: bool) -> PlanOptions {
        PlanOptions { batch_invariant, ..self }
    }

    /// With [`step`](PlanOptions::step).
    pub fn step(self, step: bool) -> PlanOptions {
        PlanOptions { step, ..self }
    }

    /// Whether what is computed may depend on how few queries there are.
    fn sees_few_queries(self) -> bool {
        !self.batch_invariant || self.step
    }

    /// Whether the choice of kernels is limited to those for every supported GPU.
    fn is_general(self) -> bool {
        self.general_only || self.batch_invariant
    }
}

/// The kernels of a plan.
#[derive(Debug)]
enum Kernels {
    General { forward: GeneralForward, backward: Option<GeneralBackward> },
    Decode { forward: DecodeForward, backward: Option<GeneralBackward> },
    Hopper(Box<Hopper>),
    Short(Short),
}

/// An attention on a device, ready to run. See [`Cuda::plan`](crate::Cuda::plan).
#[derive(Debug)]
pub struct Plan {
    pub(crate) call: Call,
    kernels: Kernels,
    pub(crate) weights: Option<WeightsKernels>,
    forward_bytes: usize,
    backward_bytes: usize,
}

impl Plan {
    /// `tensors` have been checked against the description.
    pub(crate) fn new(
        driver: &Arc<dyn Driver>,
        attention: &Attention,
        dtype: Dtype,
        place: Place,
        tensors: &Tensors,
        options: PlanOptions,
    ) -> Result<Plan> {
        check_supported(attention)?;
        let call = Call::new(driver, attention, dtype, place, tensors)?;
        let (mut forward, mut backward) = (Layout::default(), Layout::default());
        let kernels = if let Some(decode) = Plan::decode(&call, tensors, options, &mut forward)? {
            let backward =
                options.backward.then(|| GeneralBackward::new(&call, TileScope::All, &mut backward)).transpose()?;
            Kernels::Decode { forward: decode, backward }
        } else if let Some(short) = Plan::short(&call, options)? {
            Kernels::Short(short)
        } else if let Some(hopper) = Plan::hopper(&call, tensors, options, &mut forward, &mut backward)? {
            Kernels::Hopper(Box::new(hopper))
        } else {
            let forward = GeneralForward::new(&call, TileScope::All, options.sees_few_queries(), &mut forward)?;
            let backward =
                options.backward.then(|| GeneralBackward::new(&call, TileScope::All, &mut backward)).transpose()?;
            Kernels::General { forward, backward }
        };
        let weights = options.weights.then(|| WeightsKernels::new(&call)).transpose()?;
        Ok(Plan { call, kernels, weights, forward_bytes: forward.bytes(), backward_bytes: backward.bytes() })
    }

    fn decode(
        call: &Call,
        tensors: &Tensors,
        options: PlanOptions,
        layout: &mut Layout,
    ) -> Result<Option<DecodeForward>> {
        match options.sees_few_queries() {
            true => DecodeForward::new(call, tensors, options.general_only, layout),
            false => Ok(None),
        }
    }

    fn short(call: &Call, options: PlanOptions) -> Result<Option<Short>> {
        if options.is_general() { Ok(None) } else { Short::new(call, options.backward) }
    }

    fn hopper(
        call: &Call,
        tensors: &Tensors,
        options: PlanOptions,
        forward: &mut Layout,
        backward: &mut Layout,
    ) -> Result<Option<Hopper>> {
        if options.is_general() {
            return Ok(None);
        }
        let PlanOptions { backward: with_backward, any_order, .. } = options;
        Hopper::new(call, tensors, HopperOptions { backward: with_backward, any_order }, forward, backward)
    }

    /// The name of the forward kernel.
    pub fn forward_kernel(&self) -> String {
        match &self.kernels {
            Kernels::General { forward, .. } => forward.name(&self.call),
            Kernels::Decode { forward, .. } => forward.name(&self.call),
            Kernels::Hopper(hopper) => hopper.forward_name(),
            Kernels::Short(short) => short.name(&self.call),
        }
    }

    /// The name of the backward kernel, if the plan has one.
    pub fn backward_kernel(&self) -> Option<String> {
        match &self.kernels {
            Kernels::General { backward, .. } | Kernels::Decode { backward, .. } => {
                backward.as_ref().map(|_| format!("general {}", self.call.dtype))
            }
            Kernels::Hopper(hopper) => hopper.backward_name(),
            Kernels::Short(short) => short.has_backward().then(|| short.name(&self.call)),
        }
    }

    /// The device it is for.
    pub fn device(&self) -> &Device {
        self.call.driver.device()
    }

    /// Bytes of device memory that [`forward`](Plan::forward) needs besides the tensors.
    pub fn forward_workspace(&self) -> usize {
        self.forward_bytes
    }

    /// Bytes of device memory that [`backward`](Plan::backward) needs besides the tensors.
    pub fn backward_workspace(&self) -> usize {
        self.backward_bytes
    }

    /// Bytes of device memory that the plan itself keeps, for its mask.
    pub fn device_bytes(&self) -> usize {
        let lists = if let Kernels::Hopper(hopper) = &self.kernels { hopper.list_bytes() } else { 0 };
        self.call.constant_bytes() + lists
    }

    /// Enqueues the forward pass on a stream.
    ///
    /// # Safety
    /// Every tensor and the workspace are memory of this plan's device, as large as they say, and stay valid until the
    /// work is done; outputs overlap nothing else.
    pub unsafe fn forward(&self, tensors: &Tensors, out: &Outputs, workspace: Workspace, stream: Stream) -> Result<()> {
        let call = &self.call;
        call.check_forward(tensors, out)?;
        workspace.check(self.forward_bytes)?;
        if call.sizes.rows() == 0 {
            return Ok(());
        }
        match &self.kernels {
            Kernels::General { forward, .. } => forward.launch(call, tensors, out, None, workspace.ptr, stream),
            Kernels::Decode { forward, .. } => forward.launch(call, tensors, out, workspace.ptr, stream),
            Kernels::Hopper(hopper) => hopper.forward(call, tensors, out, workspace.ptr, stream),
            Kernels::Short(short) => short.forward(call, tensors, out, stream),
        }
    }

    /// Enqueues the backward pass on a stream: the gradients of everything that `into` has memory for.
    ///
    /// # Safety
    /// As for [`forward`](Plan::forward); `out` holds what the forward pass of these tensors wrote.
    pub unsafe fn backward(
        &self,
        tensors: &Tensors,
        out: &Outputs,
        upstream: &Upstreams,
        into: &Gradients,
        workspace: Workspace,
        stream: Stream,
    ) -> Result<()> {
        if self.backward_kernel().is_none() {
            return Err(Error::memory("plan", "has no backward pass: set `PlanOptions::backward`"));
        }
        let call = &self.call;
        call.check_forward(tensors, out)?;
        call.check_backward(tensors, upstream, into)?;
        workspace.check(self.backward_bytes)?;
        if call.sizes.rows() == 0 || call.sizes.m == 0 {
            return call.zero_gradients(into, stream);
        }
        let base = workspace.ptr;
        match &self.kernels {
            Kernels::General { backward: Some(backward), .. } | Kernels::Decode { backward: Some(backward), .. } => {
                backward.launch(call, tensors, out, upstream, into, Scope::All, base, stream)
            }
            Kernels::Hopper(hopper) => hopper.backward(call, tensors, out, upstream, into, base, stream),
            Kernels::Short(short) => short.backward(call, tensors, out, upstream, into, stream),
            _ => Ok(()),
        }
    }
}

/// Rejects descriptions that only the CPU supports.
pub(crate) fn check_supported(attention: &Attention) -> Result<()> {
    match attention.score {
        Score::Dot | Score::ScaledDot => {}
        score => return Err(Error::cpu_only(format!("the score `{}`", score.name()))),
    }
    match attention.select {
        Select::Soft => {}
        select => return Err(Error::cpu_only(format!("the selection {select:?}"))),
    }
    match attention.local {
        None => Ok(()),
        Some(_) => Err(Error::cpu_only("predictive local attention")),
    }
}
