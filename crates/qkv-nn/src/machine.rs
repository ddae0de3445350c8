//! What a tape computes on: threads, instruction set and precision of matrix products, or a GPU.

use crate::device::Device;
use crate::float::Float;
use crate::loops::{AddAssign, AddColumns, Loop};
use crate::pool::Pool;
use crate::tensor::Tensor;
use qkv_cuda::operations::Operations;
use qkv_cuda::{Cuda, Dtype};
use qkv_simd::Isa;
use qkv_simd::matmul::{Operand, PackBuffers, Product, RightOperand, has_bf16_products};
use qkv_simd::shared::for_each_share;
use qkv_simd::team::Team;
use serde::{Deserialize, Serialize};
use std::sync::{Mutex, OnceLock};
use std::time::Instant;

/// The arithmetic of matrix products. Accumulators, softmax, norms and parameters stay in the tape's element type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// Products in the tape's element type.
    #[default]
    F32,
    /// Operands rounded to bf16, accumulated in f32, on AMX or with `VDPBF16PS`; same as `F32` on a CPU with neither.
    Bf16,
}

/// Threads, instruction set and precision. Threads come from the current rayon pool.
#[derive(Debug)]
pub struct Machine {
    threads: usize,
    isa: Isa,
    precision: Precision,
    int8: bool,
    packed: Mutex<PackBuffers>,
    team: OnceLock<Team>,
    usage: Mutex<Usage>,
    /// The GPU that computes in place of the CPU.
    cuda: Option<Operations>,
    recompute_from: usize,
}

/// Time that inference spent and bytes that it read. The counters only grow; subtract two readings to measure an
/// interval.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Usage {
    /// Seconds spent in matrix products.
    pub products: f64,
    /// Bytes of matrices that products read, counted for every read.
    pub product_bytes: u64,
    /// Seconds spent in attention to a cache.
    pub attention: f64,
    /// Bytes of keys and values that attention read.
    pub attention_bytes: u64,
}

impl std::ops::Sub for Usage {
    type Output = Usage;

    fn sub(self, earlier: Usage) -> Usage {
        Usage {
            products: self.products - earlier.products,
            product_bytes: self.product_bytes - earlier.product_bytes,
            attention: self.attention - earlier.attention,
            attention_bytes: self.attention_bytes - earlier.attention_bytes,
        }
    }
}

/// Smallest number of elements that justifies a separate task.
const MIN_TASK: usize = 1 << 14;

/// Smallest number of columns of sums that justifies a separate task.
const MIN_COLUMNS: usize = 512;

/// Rows per partial sum of a gradient over rows of this width. It depends on nothing else, so that the order of the
/// sums is independent of the threads.
pub(crate) fn summed_rows(width: usize) -> usize {
    (MIN_TASK / width.max(1)).max(16)
}

impl Machine {
    /// A machine with the best instruction set of this CPU and products in full precision.
    pub fn new(threads: usize) -> Machine {
        Machine {
            threads: threads.max(1),
            isa: Isa::best(),
            precision: Precision::F32,
            int8: false,
            packed: Mutex::default(),
            team: OnceLock::new(),
            usage: Mutex::default(),
            cuda: None,
            recompute_from: 1 << 26,
        }
    }

    /// A machine on a device: `threads` threads of the CPU, or the first GPU, where `precision` is also that of
    /// activations.
    ///
    /// # Errors
    /// If there is no GPU, or a library that it needs is not installed.
    pub fn on(device: Device, threads: usize, precision: Precision) -> Result<Machine, qkv_cuda::Error> {
        match device {
            Device::Cpu => Ok(Machine::new(threads).precision(precision)),
            Device::Cuda => Machine::on_gpu(0, threads, precision),
        }
    }

    /// A machine on the GPU with this index, from 0. Indexes beyond the last GPU wrap around, so that processes may
    /// share one.
    ///
    /// # Errors
    /// As [`on`](Machine::on).
    pub fn on_gpu(number: usize, threads: usize, precision: Precision) -> Result<Machine, qkv_cuda::Error> {
        let number = if number == 0 { 0 } else { number % Cuda::count()?.max(1) };
        let dtype = if precision == Precision::Bf16 { Dtype::Bf16 } else { Dtype::F32 };
        let machine = Machine::new(threads).precision(precision);
        Ok(machine.on_cuda(Cuda::new(number)?.operations(dtype)?))
    }

    /// Sets the precision of products.
    pub fn precision(mut self, precision: Precision) -> Machine {
        self.precision = precision;
        self
    }

    /// Turns inference in 8 bits on or off: matrices and rows are rounded, each row with its own scale, and their
    /// products are exact integer sums. It applies to parameters that are
    /// [packed](crate::Parameters::pack_for_inference), on a CPU.
    pub fn int8(mut self, int8: bool) -> Machine {
        self.int8 = int8;
        self
    }

    /// Sets a GPU, on which tapes of this machine compute. Operations that it lacks run on the CPU.
    pub fn on_cuda(mut self, operations: Operations) -> Machine {
        self.cuda = Some(operations);
        self
    }

    /// Turns [batch-invariant](Operations::batch_invariant) inference on a GPU on or off: what is computed for a
    /// sequence then has the same bits alone and in any batch. It changes nothing on a CPU.
    pub fn batch_invariant(mut self, batch_invariant: bool) -> Machine {
        self.cuda = self.cuda.map(|operations| operations.batch_invariant(batch_invariant));
        self
    }

    /// On a GPU, activations of at least this many elements are recomputed in the backward pass if their input is saved
    /// anyway. Recomputing smaller ones would save little memory for the time it costs.
    pub fn recompute_from(mut self, elements: usize) -> Machine {
        self.recompute_from = elements;
        self
    }

    /// Whether an activation of this many elements is recomputed.
    pub(crate) fn recomputes(&self, elements: usize) -> bool {
        elements >= self.recompute_from
    }

    /// The GPU that computes in place of the CPU, if there is one.
    pub fn cuda(&self) -> Option<&Operations> {
        self.cuda.as_ref()
    }

    /// Waits for the GPU, if there is one, and reports its first failure, such as exhausted memory or a lost device.
    ///
    /// # Errors
    /// That failure.
    pub fn check(&self) -> Result<(), qkv_cuda::Error> {
        self.cuda.as_ref().map_or(Ok(()), Operations::check)
    }

    /// Reports the first device failure known so far, without waiting.
    ///
    /// # Errors
    /// That failure.
    pub fn failed(&self) -> Result<(), qkv_cuda::Error> {
        self.cuda.as_ref().and_then(Operations::failed).map_or(Ok(()), Err)
    }

    /// Number of threads.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// A machine of one thread with the same instruction set and precision, for work that is parallel over whole
    /// batches.
    pub fn single(&self) -> Machine {
        let Machine { isa, precision, int8, recompute_from, .. } = *self;
        Machine { isa, precision, int8, recompute_from, cuda: self.cuda.clone(), ..Machine::new(1) }
    }

    /// Time and bytes of inference with this machine so far.
    pub fn usage(&self) -> Usage {
        *self.usage.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Passes the seconds since `start`, and `bytes`, to `add(usage, seconds, bytes)`.
    pub(crate) fn count(&self, start: Instant, bytes: usize, add: impl FnOnce(&mut Usage, f64, u64)) {
        let mut usage = self.usage.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        add(&mut usage, start.elapsed().as_secs_f64(), bytes as u64);
    }

    /// Whether products are computed in the tape's element type.
    pub(crate) fn is_exact(&self) -> bool {
        self.precision == Precision::F32
    }

    /// Whether inference multiplies in 8 bits.
    pub(crate) fn is_int8(&self) -> bool {
        self.int8
    }

    /// The instruction set.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Whether products of these elements are computed in bf16.
    pub(crate) fn multiplies_in_bf16<T: Float>(&self) -> bool {
        self.precision == Precision::Bf16 && T::HAS_BF16_PRODUCTS && has_bf16_products(self.isa)
    }

    /// `C = A · B` or, with `add`, `C += A · B`. Packed operands require products
    /// [in bf16](Machine::multiplies_in_bf16).
    pub(crate) fn product<'a, T: Float>(
        &self,
        c: &'a mut [T],
        a: Operand<'a, T>,
        b: impl Into<RightOperand<'a, T>>,
        add: bool,
    ) {
        self.products(&mut [Product { c, a, b: b.into(), add }]);
    }

    /// Products whose results do not depend on one another.
    pub(crate) fn products<T: Float>(&self, products: &mut [Product<'_, T>]) {
        if !self.multiplies_in_bf16::<T>() {
            return T::matmul(products, self.threads);
        }
        // If another thread, or a product that this thread waits for, uses the buffers, allocate separate ones.
        let (mut held, mut spare) = (self.packed.try_lock().ok(), PackBuffers::default());
        let packed = held.as_deref_mut().unwrap_or(&mut spare);
        for product in products {
            let done = T::matmul_bf16(self.isa, product, packed, self.threads);
            assert!(done, "this machine multiplies in bf16");
        }
    }

    /// The team of threads for tasks of microseconds; its threads start on first use.
    pub(crate) fn team(&self) -> &Team {
        self.team.get_or_init(|| Team::new(self.threads))
    }

    /// Runs an inner loop, compiled for the instruction set.
    pub(crate) fn run<'a, T: Float>(&self, arguments: impl Into<Loop<'a, T>>) {
        T::run(self.isa, arguments.into());
    }

    /// Number of rows of `width` elements per task: a few tasks per thread, none too small to be worthwhile.
    pub(crate) fn rows_each(&self, rows: usize, width: usize) -> usize {
        let min = (MIN_TASK / width.max(1)).max(1);
        if self.threads == 1 { rows.max(1) } else { rows.div_ceil(4 * self.threads).max(min) }
    }

    /// Runs `body` on every part in parallel. Usually, a thread begins with the same share of them in every
    /// call.
    pub(crate) fn each<I: Send>(&self, parts: Vec<I>, body: impl Fn(usize, I) + Sync) {
        if self.threads == 1 || parts.len() < 2 {
            return parts.into_iter().enumerate().for_each(|(at, part)| body(at, part));
        }
        let parts: Vec<Mutex<Option<I>>> = parts.into_iter().map(|part| Mutex::new(Some(part))).collect();
        self.share(parts.len(), &|at| {
            let part = parts[at].lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
            body(at, part.expect("a task is done once"));
        });
    }

    /// Runs tasks on the threads. Not generic, so that handing out work is compiled once, here.
    fn share(&self, tasks: usize, body: &(dyn Fn(usize) + Sync)) {
        for_each_share(self.threads, tasks, body);
    }

    /// Passes every block of [`summed_rows`] rows to `finish`, and adds the sums of the columns of what it returns to
    /// `out`, if there is one: of each block first, then of the blocks, in the same order for any number of threads.
    pub(crate) fn add_columns<'r, T: Float, B: Send>(
        &self,
        pool: &Pool<T>,
        blocks: Vec<B>,
        out: Option<&mut [T]>,
        finish: impl Fn(B) -> &'r [T] + Sync,
    ) {
        let Some(out) = out.filter(|out| !out.is_empty()) else {
            return self.each(blocks, |_, block| {
                finish(block);
            });
        };
        let width = out.len();
        let mut sums = Tensor::zeros(pool, &[blocks.len(), width]);
        let parts = blocks.into_iter().zip(sums.data_mut().chunks_mut(width)).collect();
        self.each(parts, |_, (block, out): (B, &mut [T])| {
            self.run(AddColumns { rows: finish(block), width, from: 0, out });
        });
        // Each task sums all blocks of some columns.
        let columns = width.div_ceil(self.threads).next_multiple_of(MIN_COLUMNS);
        let parts = out.chunks_mut(columns).collect();
        let rows = sums.data();
        self.each(parts, |at, out| self.run(AddColumns { rows, width, from: at * columns, out }));
    }

    /// `sum += more`.
    pub(crate) fn add_assign<T: Float>(&self, sum: &mut [T], more: &[T]) {
        assert_eq!(sum.len(), more.len());
        let each = self.rows_each(sum.len(), 1);
        let parts = sum.chunks_mut(each).zip(more.chunks(each)).collect();
        self.each(parts, |_, (sum, more): (&mut [T], &[T])| self.run(AddAssign(sum, more)));
    }
}
