//! Attention over short sequences, where one block holds all queries and keys of a head: sentence models train on
//! thousands of them at once, and the tiles of other kernels would be mostly padding.

use crate::call::{Call, Sizes};
use crate::device::Stream;
use crate::driver::Kernel;
use crate::error::Result;
use crate::general::{backward_params, forward_params};
use crate::general_params::GeneralParams;
use crate::memory::Dtype;
use crate::program::{Kind, Program};
use crate::tensors::{Gradients, Outputs, Tensors, Upstreams};
use qkv::engine::Band;
use qkv::{Bias, Place, Scale};

/// The longest sequence.
const MAX_LENGTH: usize = 64;
/// The widest head: its accumulators stay in registers.
const MAX_WIDTH: usize = 128;
/// Beyond any key: no limit.
const FAR: i64 = 1 << 29;

/// The kernels for a call with short sequences.
#[derive(Clone, Debug)]
pub(crate) struct Short {
    forward: Kernel,
    backward: Option<Kernel>,
    band: [i32; 2],
}

impl Short {
    /// `None` if the call does not qualify: long or wide, in f32, with a mask that is more than a band and lengths, or
    /// with scores that are more than scaled products; also on devices whose blocks have too little shared memory.
    pub fn new(call: &Call, backward: bool) -> Result<Option<Short>> {
        let Some(band) = band_of(call, backward) else { return Ok(None) };
        let programs = [Kind::ShortForward, Kind::ShortBackward].map(|kind| program(call, kind));
        if programs.iter().any(|program| program.shared() as usize > call.driver.device().shared_bytes) {
            return Ok(None);
        }
        let kernel = |program: &Program, name: &'static str| {
            let module = call.driver.module(&program.source())?;
            call.driver.kernel(&module, name, program.threads(), program.shared())
        };
        let forward = kernel(&programs[0], "short_forward")?;
        let backward = backward.then(|| kernel(&programs[1], "short_backward")).transpose()?;
        Ok(Some(Short { forward, backward, band }))
    }

    pub fn name(&self, call: &Call) -> String {
        format!("short {}", call.dtype)
    }

    pub fn has_backward(&self) -> bool {
        self.backward.is_some()
    }

    fn launch(&self, kernel: &Kernel, call: &Call, params: GeneralParams, stream: Stream) -> Result<()> {
        let params = GeneralParams { band: self.band, ..params };
        call.launch(kernel, [call.sizes.b * call.sizes.hq, 1], &params, stream)
    }

    pub fn forward(&self, call: &Call, tensors: &Tensors, out: &Outputs, stream: Stream) -> Result<()> {
        self.launch(&self.forward, call, forward_params(call, tensors, out)?, stream)
    }

    /// Does nothing if the plan has no backward pass.
    pub fn backward(
        &self,
        call: &Call,
        tensors: &Tensors,
        out: &Outputs,
        upstream: &Upstreams,
        into: &Gradients,
        stream: Stream,
    ) -> Result<()> {
        let Some(backward) = &self.backward else { return Ok(()) };
        self.launch(backward, call, backward_params(call, tensors, out, upstream, into)?, stream)
    }
}

/// The band of a call's mask; `None` if these kernels do not support the call.
fn band_of(call: &Call, backward: bool) -> Option<[i32; 2]> {
    let Sizes { hq, hk, n, m, d, dv, .. } = call.sizes;
    let attention = &call.attention;
    let sizes_fit = [n, m].iter().all(|length| (1..=MAX_LENGTH).contains(length))
        && [d, dv].iter().all(|width| (1..=MAX_WIDTH).contains(width))
        && (!backward || hq == hk);
    let plain_scores = !matches!(attention.scale, Scale::Learned)
        && attention.softcap.is_none()
        && attention.bias == Bias::none()
        && !attention.sinks
        && !attention.entropy;
    let placed = call.place != Place::Given && call.scalars.offset.abs() < FAR;
    let Band { left, right, segments, .. } = call.mask.band()?;
    let limit = |keys: i64| keys.clamp(-FAR, FAR) as i32;
    (call.dtype != Dtype::F32 && sizes_fit && plain_scores && placed && !segments).then(|| [limit(left), limit(right)])
}

/// A program with tiles as large as the sequences.
fn program(call: &Call, kind: Kind) -> Program {
    let Sizes { n, m, d, dv, .. } = call.sizes;
    let tile = [n, m].map(|length| length.max(16).next_power_of_two());
    Program::fixed(kind, call.dtype, d.max(dv).max(32).next_power_of_two(), tile)
}
