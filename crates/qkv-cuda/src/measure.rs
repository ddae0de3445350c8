//! An attention measured on a card: data of its own, and calls timed by the card's clock with a cold cache.

use crate::Cuda;
use crate::driver::Stream;
use crate::error::Result;
use crate::memory::{Buffer, Dtype, Strided};
use crate::plan::{Plan, Uses};
use crate::tensors::{Gradients, Outputs, Tensors, Upstreams, Vector};
use crate::workspace::Workspace;
use half::{bf16, f16};
use qkv::{Attention, Place};
use std::time::Instant;

/// How many normal numbers are drawn before they repeat: a prime, so that no two rows are alike.
const DRAWN: usize = 65_521;
/// More than any card's cache: written between calls, so that each finds its data in memory.
const FLUSHED: usize = 256 << 20;
/// Calls that do not count.
const WARM_UP: usize = 5;

/// What is measured: shapes of queries, keys and values.
#[derive(Clone, Copy, Debug)]
pub struct Shapes {
    /// `[B, Hq, N, D]`.
    pub q: [usize; 4],
    /// `[B, Hk, M, D]`.
    pub k: [usize; 4],
}

/// An attention with data on a card, ready to be timed.
#[derive(Debug)]
pub struct Measured {
    cuda: Cuda,
    plan: Plan,
    tensors: Tensors,
    out: Outputs,
    upstream: Upstreams,
    into: Gradients,
    workspace: Workspace,
    backward: bool,
    flushed: u64,
    _held: Vec<Buffer>,
}

/// Milliseconds of many calls.
#[derive(Clone, Copy, Debug)]
pub struct Taken {
    /// The best.
    pub best_ms: f64,
    /// The one in the middle.
    pub median_ms: f64,
}

impl Cuda {
    /// An attention over normal noise: its forward pass, or its backward pass after one forward pass.
    pub fn measured(
        &self,
        attention: &Attention,
        dtype: Dtype,
        shapes: Shapes,
        place: Place,
        uses: Uses,
    ) -> Result<Measured> {
        let mut held = Vec::new();
        let mut room = |bytes: usize| {
            let buffer = self.buffer(bytes)?;
            let at = buffer.at();
            held.push(buffer);
            Ok::<u64, crate::Error>(at)
        };
        let Shapes { q, k } = shapes;
        let rows = q[0] * q[1] * q[2];
        let bytes = |shape: [usize; 4]| shape.iter().product::<usize>() * dtype.size();
        let given = [(q, 1), (k, 2), (k, 3), (q, 4)];
        let mut at = [0; 4];
        for (at, (shape, seed)) in at.iter_mut().zip(given) {
            *at = room(bytes(shape))?;
            self.fill(*at, dtype, shape.iter().product(), seed)?;
        }
        let tensors =
            Tensors::new(Strided::contiguous(at[0], q), Strided::contiguous(at[1], k), Strided::contiguous(at[2], k));
        let plan = self.plan(attention, dtype, place, &tensors, uses)?;
        let out = Outputs {
            values: Strided::contiguous(room(bytes(q))?, q),
            lse: Vector::new(room(rows * 4)?, rows),
            entropy: None,
        };
        let upstream = Upstreams { values: Strided::contiguous(at[3], q), lse: None, entropy: None };
        let grads = if uses.backward { [bytes(q), bytes(k), bytes(k)] } else { [0; 3] };
        let into = Gradients {
            q: Strided::contiguous(room(grads[0])?, q),
            k: Strided::contiguous(room(grads[1])?, k),
            v: Strided::contiguous(room(grads[2])?, k),
            bias: None,
            table: None,
            scale: None,
            sinks: None,
        };
        let needed = plan.forward_workspace().max(if uses.backward { plan.backward_workspace() } else { 0 });
        let workspace = Workspace { at: room(needed)?, bytes: needed };
        let flushed = room(FLUSHED)?;
        let cuda = self.clone();
        let backward = uses.backward;
        let measured = Measured { cuda, plan, tensors, out, upstream, into, workspace, backward, flushed, _held: held };
        measured.forward()?;
        self.wait(Stream(0))?;
        Ok(measured)
    }

    fn fill(&self, at: u64, dtype: Dtype, count: usize, seed: u64) -> Result<()> {
        let drawn = qkv::Tensor::<f32, 1>::randn([DRAWN.min(count)], seed).into_data();
        let one: Vec<u8> = match dtype {
            Dtype::F32 => drawn.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Dtype::Bf16 => drawn.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
            Dtype::F16 => drawn.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
        };
        let total = count * dtype.size();
        // A few megabytes at a time.
        let stretch: Vec<u8> = one.iter().copied().cycle().take((one.len() * 64).min(total)).collect();
        for start in (0..total).step_by(stretch.len().max(1)) {
            let len = stretch.len().min(total - start);
            self.driver.write(at + start as u64, &stretch[..len], Stream(0))?;
        }
        Ok(())
    }
}

impl Measured {
    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    fn forward(&self) -> Result<()> {
        // SAFETY: all of it is memory of this one's, sized by the plan, and held as long.
        unsafe { self.plan.forward(&self.tensors, &self.out, self.workspace, Stream(0)) }
    }

    fn call(&self) -> Result<()> {
        if !self.backward {
            return self.forward();
        }
        // SAFETY: likewise.
        unsafe { self.plan.backward(&self.tensors, &self.out, &self.upstream, &self.into, self.workspace, Stream(0)) }
    }

    /// Calls it for so many seconds, each call timed by the card.
    pub fn time(&self, seconds: f64) -> Result<Taken> {
        for _ in 0..WARM_UP {
            self.call()?;
        }
        let (begin, mut times) = (Instant::now(), Vec::new());
        while times.len() < 3 || begin.elapsed().as_secs_f64() < seconds {
            self.cuda.driver.zero(self.flushed, FLUSHED, Stream(0))?;
            times.push(self.cuda.driver.timed(Stream(0), &mut || self.call())?);
        }
        times.sort_by(f64::total_cmp);
        Ok(Taken { best_ms: times[0], median_ms: times[times.len() / 2] })
    }
}
