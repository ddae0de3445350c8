//! Timing an attention on a device: random inputs, and calls timed by events with a cold L2.

use crate::Cuda;
use crate::device::Stream;
use crate::error::Result;
use crate::memory::{Buffer, Dtype, Strided};
use crate::plan::{Plan, PlanOptions};
use crate::tensors::{Gradients, Outputs, Tensors, Upstreams, Vector};
use crate::workspace::Workspace;
use half::{bf16, f16};
use qkv::{Attention, Place};
use std::time::Instant;

/// Normal numbers drawn before the sequence repeats: a prime, so that no two rows are alike.
const DRAWN: usize = 65_521;
/// Larger than any L2: zeroed between calls, so that each call reads its inputs from memory.
const FLUSH_BYTES: usize = 256 << 20;
/// Untimed calls before the first timed one.
const WARM_UP: usize = 5;

/// An attention with data on a device, ready to be timed.
#[derive(Debug)]
pub struct Benchmark {
    cuda: Cuda,
    plan: Plan,
    tensors: Tensors,
    out: Outputs,
    upstream: Upstreams,
    into: Gradients,
    workspace: Workspace,
    backward: bool,
    flush: u64,
    _buffers: Vec<Buffer>,
}

/// Milliseconds over many calls.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Timing {
    /// The fastest call.
    pub best_ms: f64,
    /// The median call.
    pub median_ms: f64,
}

impl Cuda {
    /// Prepares to time an attention over normal noise, with queries of shape `q`, `[B, Hq, N, D]`, and keys and values
    /// of shape `k`, `[B, Hk, M, D]`: its forward pass or, with [`PlanOptions::backward`], its backward pass after one
    /// forward pass.
    pub fn benchmark(
        &self,
        attention: &Attention,
        dtype: Dtype,
        [q, k]: [[usize; 4]; 2],
        place: Place,
        options: PlanOptions,
    ) -> Result<Benchmark> {
        let mut buffers = Vec::new();
        let mut allocate = |bytes: usize| {
            let buffer = self.buffer(bytes)?;
            let ptr = buffer.ptr();
            buffers.push(buffer);
            Ok::<u64, crate::Error>(ptr)
        };
        let rows = q[0] * q[1] * q[2];
        let bytes = |shape: [usize; 4]| shape.iter().product::<usize>() * dtype.size();
        let mut noise = [0; 4];
        for (ptr, (shape, seed)) in noise.iter_mut().zip([(q, 1), (k, 2), (k, 3), (q, 4)]) {
            *ptr = allocate(bytes(shape))?;
            self.fill(*ptr, dtype, shape.iter().product(), seed)?;
        }
        let tensor = Strided::contiguous;
        let tensors = Tensors::new(tensor(noise[0], q), tensor(noise[1], k), tensor(noise[2], k));
        let plan = self.plan(attention, dtype, place, &tensors, options)?;
        let out = Outputs::new(tensor(allocate(bytes(q))?, q), Vector::new(allocate(rows * 4)?, rows));
        let upstream = Upstreams::new(tensor(noise[3], q));
        let grads = if options.backward { [bytes(q), bytes(k), bytes(k)] } else { [0; 3] };
        let into = Gradients::new(
            tensor(allocate(grads[0])?, q),
            tensor(allocate(grads[1])?, k),
            tensor(allocate(grads[2])?, k),
        );
        let needed = plan.forward_workspace().max(if options.backward { plan.backward_workspace() } else { 0 });
        let workspace = Workspace::new(allocate(needed)?, needed);
        let flush = allocate(FLUSH_BYTES)?;
        let benchmark = Benchmark {
            cuda: self.clone(),
            plan,
            tensors,
            out,
            upstream,
            into,
            workspace,
            backward: options.backward,
            flush,
            _buffers: buffers,
        };
        benchmark.forward()?;
        self.wait(Stream(0))?;
        Ok(benchmark)
    }

    fn fill(&self, ptr: u64, dtype: Dtype, count: usize, seed: u64) -> Result<()> {
        let drawn = qkv::Tensor::<f32, 1>::randn([DRAWN.min(count)], seed).into_data();
        let once: Vec<u8> = match dtype {
            Dtype::F32 => drawn.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Dtype::Bf16 => drawn.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
            Dtype::F16 => drawn.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
        };
        let total = count * dtype.size();
        // A few megabytes per copy.
        let chunk: Vec<u8> = once.iter().copied().cycle().take((once.len() * 64).min(total)).collect();
        for start in (0..total).step_by(chunk.len().max(1)) {
            let len = chunk.len().min(total - start);
            self.driver.write(ptr + start as u64, &chunk[..len], Stream(0))?;
        }
        Ok(())
    }
}

impl Benchmark {
    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    fn forward(&self) -> Result<()> {
        // SAFETY: all memory belongs to this benchmark, is sized for the plan, and lives as long as the benchmark.
        unsafe { self.plan.forward(&self.tensors, &self.out, self.workspace, Stream(0)) }
    }

    fn call(&self) -> Result<()> {
        if !self.backward {
            return self.forward();
        }
        // SAFETY: likewise.
        unsafe { self.plan.backward(&self.tensors, &self.out, &self.upstream, &self.into, self.workspace, Stream(0)) }
    }

    /// Repeats the pass for this many seconds, timing each call on the device.
    pub fn time(&self, seconds: f64) -> Result<Timing> {
        for _ in 0..WARM_UP {
            self.call()?;
        }
        let (begin, mut times) = (Instant::now(), Vec::new());
        while times.len() < 3 || begin.elapsed().as_secs_f64() < seconds {
            self.cuda.driver.zero(self.flush, FLUSH_BYTES, Stream(0))?;
            times.push(self.cuda.driver.timed(Stream(0), &mut || self.call())?);
        }
        times.sort_by(f64::total_cmp);
        Ok(Timing { best_ms: times[0], median_ms: times[times.len() / 2] })
    }
}
