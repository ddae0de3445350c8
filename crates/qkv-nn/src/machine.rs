//! How things are computed: threads, instruction set, precision of products.

use crate::float::Float;
use qkv_simd::Isa;
use qkv_simd::matmul::{Operand, Packed, matmul};
use qkv_simd::pass::{self, Pass};
use qkv_simd::quantized::QuantizedMatrix;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::sync::Mutex;

/// What products are made of. Sums, softmax, norms and the parameters themselves stay in the tape's own type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// The tape's own type.
    #[default]
    F32,
    /// Numbers rounded to bf16, multiplied on the tile unit or in pairs, summed in f32. Where the CPU has neither, as `F32`.
    Bf16,
}

/// Threads, instruction set and precision. Threads are taken from the current rayon pool.
#[derive(Debug)]
pub struct Machine {
    threads: usize,
    isa: Isa,
    precision: Precision,
    packed: Mutex<Packed>,
}

/// Numbers that are worth handing to another thread.
const WORTH_A_THREAD: usize = 1 << 14;

impl Machine {
    /// The best instruction set here, products in full precision.
    pub fn new(threads: usize) -> Machine {
        Machine { threads: threads.max(1), isa: Isa::best(), precision: Precision::F32, packed: Mutex::default() }
    }

    /// With another precision of products.
    pub fn precision(mut self, precision: Precision) -> Machine {
        self.precision = precision;
        self
    }

    /// How many threads.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// The instruction set.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// `C = A · B` or, with `add`, `C += A · B`.
    pub(crate) fn product<T: Float>(&self, c: &mut [T], a: Operand<'_, T>, b: Operand<'_, T>, add: bool) {
        if self.precision == Precision::Bf16 {
            let mut packed = self.packed.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            if T::product_of_pairs(self.isa, c, a, b, add, &mut packed, self.threads) {
                return;
            }
        }
        matmul(c, a, b, add, self.threads);
    }

    /// `C = A · Wᵀ` for few rows `A [R, I]` and a matrix of few bits `W [O, I]`; `false`, and nothing done, where the type of the
    /// numbers has no such product.
    pub(crate) fn compact_product<T: Float>(&self, c: &mut [T], a: &[T], w: &QuantizedMatrix) -> bool {
        let rows = a.chunks_exact(w.width()).zip(c.chunks_exact_mut(w.rows()));
        for (x, y) in rows {
            let Some(sums) = T::block_sums(w, x) else { return false };
            let each = if self.threads == 1 { w.rows() } else { w.rows().div_ceil(self.threads) };
            let parts = y.chunks_mut(each.max(1)).collect();
            self.each(parts, |at, y: &mut [T]| {
                T::compact_product(w, self.isa, at * each, x, &sums, y);
            });
        }
        true
    }

    /// Compiled for the instruction set.
    #[inline]
    pub(crate) fn run<P: Pass>(&self, pass: P) -> P::Output {
        pass::run(self.isa, pass)
    }

    /// How many rows of `width` numbers one task takes, so that each thread gets a few tasks that are worth it.
    pub(crate) fn rows_each(&self, rows: usize, width: usize) -> usize {
        let worth = (WORTH_A_THREAD / width.max(1)).max(1);
        if self.threads == 1 { rows.max(1) } else { rows.div_ceil(4 * self.threads).max(worth) }
    }

    /// Runs `body` on every part, parts side by side on the threads.
    pub(crate) fn each<I: Send>(&self, parts: Vec<I>, body: impl Fn(usize, I) + Sync + Send) {
        if self.threads == 1 || parts.len() < 2 {
            parts.into_iter().enumerate().for_each(|(at, part)| body(at, part));
        } else {
            parts.into_par_iter().enumerate().with_max_len(1).for_each(|(at, part)| body(at, part));
        }
    }

    /// Sums columns of rows onto `out`: `out[x] += Σ rows[r][x]`, in one order for any number of threads.
    pub(crate) fn add_columns<T: Float>(&self, rows: &[T], out: &mut [T]) {
        let width = out.len();
        if width == 0 || rows.is_empty() {
            return;
        }
        // Each thread takes some columns and all rows.
        let columns = width.div_ceil(self.threads).div_ceil(64) * 64;
        let parts: Vec<&mut [T]> = out.chunks_mut(columns).collect();
        self.each(parts, |at, out| self.run(Columns { rows, width, from: at * columns, out }));
    }
}

struct Columns<'a, T> {
    rows: &'a [T],
    width: usize,
    from: usize,
    out: &'a mut [T],
}

impl<T: Float> Pass for Columns<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for row in self.rows.chunks_exact(self.width) {
            for (sum, &x) in self.out.iter_mut().zip(&row[self.from..]) {
                *sum += x;
            }
        }
    }
}
