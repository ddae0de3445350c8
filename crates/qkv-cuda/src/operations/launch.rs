//! Kernel arguments and grids.

use super::{ImageWindows, Operations};

/// Threads per block.
const THREADS: u32 = 256;

/// Threads per block of this kernel.
pub(super) fn threads(kernel: &str) -> u32 {
    let wide = ["cross_entropy_wide", "sum_losses", "next_token", "survey_logits", "draw_token"];
    if wide.contains(&kernel) { 1024 } else { THREADS }
}

/// Kernels that wait for the results of the preceding launch themselves, and read nothing that it may have written
/// before they do: in a recorded decoding step, where weights do not change, they start while it finishes.
const WAITING: [&str; 10] = [
    "embedding",
    "embedding_blocks",
    "layer_norm",
    "rms_norm",
    "append_at",
    "gated",
    "next_token",
    "draw_token",
    "many_rows",
    "unaligned_rows",
];

/// Whether a kernel is one of these; all of few rows are.
fn waits(kernel: &str) -> bool {
    WAITING.contains(&kernel) || kernel.starts_with("few_rows")
}

/// Which elements of a tensor are dropped. The factor of the others is `65536 / (65536 − threshold)`.
#[derive(Clone, Copy, Debug)]
pub struct DropoutKey {
    /// The key of Philox: a different number for each mask.
    pub stream: u64,
    /// Out of 65,536: an element is dropped if its 16 random bits are below.
    pub threshold: u32,
}

/// `Dropout` of `common.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct DropoutArgument {
    stream: u64,
    threshold: u32,
    scale: f32,
}

impl DropoutArgument {
    pub fn new(dropout: Option<&DropoutKey>) -> DropoutArgument {
        dropout.map_or(DropoutArgument { stream: 0, threshold: 0, scale: 1.0 }, |key| DropoutArgument {
            stream: key.stream,
            threshold: key.threshold,
            scale: 65536.0 / (65536.0 - key.threshold as f32),
        })
    }
}

/// How tokens are drawn: in proportion to `exp(logit / temperature)`, among the `top_k` likeliest (0: all), of these
/// among the likeliest that together have a share of `top_p`, and of those among the tokens at least `min_p` times as
/// likely as the likeliest.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Drawing {
    /// 1 / temperature.
    by_temperature: f64,
    top_p: f64,
    min_p: f64,
    seed: u64,
    top_k: u32,
}

const _: () = assert!(size_of::<Drawing>() == 40, "size of `Drawing` in `logits.cu`");

impl Drawing {
    /// With this temperature, top-p, min-p, top-k and seed.
    pub fn new(temperature: f64, top_p: f64, min_p: f64, top_k: usize, seed: u64) -> Drawing {
        let top_k = u32::try_from(top_k).unwrap_or(u32::MAX);
        Drawing { by_temperature: 1.0 / temperature, top_p, min_p, seed, top_k }
    }
}

/// One argument of a kernel.
#[derive(Clone, Copy)]
pub(super) enum Argument {
    Ptr(u64),
    U32(u32),
    F32(f32),
    Dropout(DropoutArgument),
    Windows(ImageWindows),
    Drawing(Drawing),
}

impl Argument {
    /// The address of its value.
    fn address(&self) -> *const u8 {
        match self {
            Argument::Ptr(x) => (&raw const *x).cast(),
            Argument::U32(x) => (&raw const *x).cast(),
            Argument::F32(x) => (&raw const *x).cast(),
            Argument::Dropout(x) => (&raw const *x).cast(),
            Argument::Windows(x) => (&raw const *x).cast(),
            Argument::Drawing(x) => (&raw const *x).cast(),
        }
    }
}

/// A count in the type that kernels take.
///
/// # Panics
/// If it has more than 32 bits.
pub(super) fn count(x: usize) -> Argument {
    Argument::U32(u32::try_from(x).expect("tensors of models have fewer than 2^32 elements"))
}

impl Operations {
    /// Blocks for work of this many threads, which loop if there is more work than blocks; none if there is no work.
    pub(super) fn blocks(&self, threads: usize) -> usize {
        threads.div_ceil(THREADS as usize).min(self.device().processors.max(1) as usize * 16)
    }

    /// Blocks for rows, with eight columns per thread.
    pub(super) fn blocks_of_eights(&self, rows: usize, width: usize) -> usize {
        self.blocks(rows * width.div_ceil(8))
    }

    /// Launches a kernel; an empty grid launches nothing.
    ///
    /// # Safety
    /// The arguments have the kernel's parameter types in order, and every pointer is to device memory large enough for
    /// what the kernel reads or writes.
    pub(super) unsafe fn launch(&self, name: &'static str, grid: [usize; 2], arguments: &[Argument]) {
        if grid.contains(&0) || self.failed().is_some() {
            return;
        }
        let kernel = match self.kernel(name) {
            Ok(kernel) => kernel,
            Err(error) => return self.remember(Err(error)),
        };
        let addresses: Vec<*const u8> = arguments.iter().map(Argument::address).collect();
        let grid = grid.map(|axis| axis as u32);
        let (driver, stream) = (self.driver(), self.stream());
        // SAFETY: as the caller promises; the values outlive the call, and a kernel that starts early waits itself.
        self.remember(unsafe {
            match self.shared.recorder.is_this_thread() && waits(name) {
                true => driver.launch_dependent(kernel, grid, stream, &addresses),
                false => driver.launch(kernel, grid, stream, &addresses),
            }
        });
    }
}
