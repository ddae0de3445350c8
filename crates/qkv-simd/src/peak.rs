//! Measured peaks of this machine: independent multiply-adds, bf16 products, and memory read once. A speed means
//! something only beside peaks measured at the same time; on a shared machine they vary by a third within minutes.
//!
//! Each measurement takes a few milliseconds and returns the best of several short runs.

use crate::bf16_gemm::{self, Bf16Gemm, DEPTH, PackedA, PackedB, SIDE};
use crate::isa::Isa;
use crate::kernel::{Kernel, dispatch};
use crate::lanes::Lanes;
use crate::number::{Element, Real};
use crate::product::Target;
use half::bf16;
use std::hint::black_box;
use std::sync::Barrier;
use std::thread;
use std::time::Instant;

/// The number of short runs, of which the best counts.
const RUNS: usize = 5;
/// Steps of each chain in a run: about a millisecond if a step of all chains takes eight cycles. Unit tests, which are
/// compiled without optimization, measure nothing.
const STEPS: usize = if cfg!(test) { 4_000 } else { 400_000 };

/// GFLOP/s that `threads` threads reach together with multiply-adds on registers; a multiply-add counts as two
/// operations.
///
/// ```
/// use qkv_simd::{Isa, peak};
/// assert!(peak::fma::<f32>(Isa::best(), 1) > 0.0);
/// ```
pub fn fma<A: Real>(isa: Isa, threads: usize) -> f64 {
    // Compiled here, because the caller's crate may be compiled without optimization.
    let chains = if A::NAME == f64::NAME { chains_of_f64 } else { chains_of_f32 };
    best_of(threads, || chains(isa))
}

fn chains_of_f32(isa: Isa) -> f64 {
    dispatch(isa, Chains::<f32>(std::marker::PhantomData))
}

fn chains_of_f64(isa: Isa) -> f64 {
    dispatch(isa, Chains::<f64>(std::marker::PhantomData))
}

/// GFLOP/s of bf16 products (AMX or AVX-512); `None` if the instruction set has none.
///
/// ```
/// use qkv_simd::{Isa, peak};
/// assert!(peak::tiles(Isa::named("portable").unwrap(), 1).is_none());
/// ```
pub fn tiles(isa: Isa, threads: usize) -> Option<f64> {
    // Two by two tiles, over a depth that stays in the first-level cache and is long enough to hide the start-up.
    const CHUNKS: usize = 10;
    const TIMES: usize = 1000;
    Bf16Gemm::new(isa)?;
    Some(best_of(threads, || {
        let gemm = Bf16Gemm::new(isa).expect("as on the calling thread");
        let (side, depth) = (2 * SIDE, CHUNKS * DEPTH);
        let (a, b) = (vec![bf16::ONE; side * depth], vec![bf16::ONE; bf16_gemm::packed_b_len(depth, side)]);
        let (left, right) =
            (PackedA { data: &a, row: depth }, PackedB { data: &b, chunks: CHUNKS, non_temporal: false });
        let mut c = vec![0.0; side * side];
        for _ in 0..TIMES {
            gemm.product(Target::overwrite(black_box(&mut c), side), left, right, side, 0..2, 0..CHUNKS);
        }
        (2 * side * side * depth * TIMES) as f64
    }))
}

/// GB/s at which `threads` threads read these numbers together by summing them once. Their count decides whether they
/// come from memory or from a cache: for a comparison, use as many as the compared work reads.
///
/// ```
/// use qkv_simd::{Isa, peak};
/// assert!(peak::read(Isa::best(), &vec![1.0; 1 << 16], 1) > 0.0);
/// ```
pub fn read(isa: Isa, numbers: &[f32], threads: usize) -> f64 {
    let piece = numbers.len().div_ceil(threads.max(1)).max(1);
    let mut pieces: Vec<&[f32]> = numbers.chunks(piece).collect();
    pieces.resize(threads.max(1), &[]); // few numbers make fewer pieces than threads
    together(pieces, |piece| {
        black_box(dispatch(isa, Sum(black_box(piece))));
        size_of_val(piece) as f64
    })
}

/// The best rate of `threads` threads that each run this.
fn best_of(threads: usize, work: impl Fn() -> f64 + Sync) -> f64 {
    together(vec![(); threads.max(1)], |()| work())
}

/// Runs one thread per share, all starting at once. Returns the best of several runs, in billions per second from the
/// first start to the last end.
fn together<S: Copy + Send>(shares: Vec<S>, work: impl Fn(S) -> f64 + Sync) -> f64 {
    let barrier = Barrier::new(shares.len());
    let (barrier, work) = (&barrier, &work);
    let runs: Vec<Vec<(Instant, Instant, f64)>> = thread::scope(|scope| {
        let run = move |share: S| {
            let once = |_| {
                barrier.wait();
                let start = Instant::now();
                let done = work(share);
                (start, Instant::now(), done)
            };
            (0..RUNS).map(once).collect()
        };
        let workers: Vec<_> = shares.into_iter().map(|share| scope.spawn(move || run(share))).collect();
        workers.into_iter().map(|worker| worker.join().expect("nothing in it panics")).collect()
    });
    let rate = |run: usize| {
        let of_run = || runs.iter().map(|worker| worker[run]);
        let start = of_run().map(|(start, ..)| start).min().expect("at least one thread");
        let end = of_run().map(|(_, end, _)| end).max().expect("at least one thread");
        of_run().map(|(.., done)| done).sum::<f64>() / end.duration_since(start).as_secs_f64() / 1e9
    };
    (0..RUNS).map(rate).fold(0.0, f64::max)
}

/// Independent chains of multiply-adds; returns the number of operations.
struct Chains<A>(std::marker::PhantomData<A>);

impl<A: Real> Kernel<A> for Chains<A> {
    type Output = f64;

    #[inline(always)]
    unsafe fn run<V: Lanes<Scalar = A>>(self) -> f64 {
        // Enough chains to hide the latency that still fit the registers: 16 of one register each if a panel is a
        // register, otherwise 6 or 3 of several.
        // SAFETY: the caller guarantees the instruction set.
        unsafe {
            if V::TILE_PANELS >= 4 {
                chains::<V, 16>()
            } else if V::TILE_ROWS >= 6 {
                chains::<V, 6>()
            } else {
                chains::<V, 3>()
            }
        }
    }
}

#[inline(always)]
unsafe fn chains<V: Lanes, const CHAINS: usize>() -> f64 {
    // SAFETY: stores go into an array of as many lanes; the caller guarantees the instruction set.
    unsafe {
        // Each chain converges to b / (1 − a) = 1, far from infinities and subnormals.
        let a = V::splat(black_box(V::Scalar::from_f64(0.5)));
        let b = V::splat(black_box(V::Scalar::from_f64(0.5)));
        let mut chains = [V::splat(V::Scalar::ZERO); CHAINS];
        for _ in 0..STEPS {
            for chain in &mut chains {
                *chain = chain.mul_add(a, b);
            }
        }
        let sum = chains.into_iter().fold(V::splat(V::Scalar::ZERO), |sum, chain| sum.add(chain));
        black_box(sum.sum());
    }
    (2 * STEPS * CHAINS * V::Scalar::LANES) as f64
}

/// The sum of numbers, in enough chains that only memory limits it.
struct Sum<'a>(&'a [f32]);

impl Kernel<f32> for Sum<'_> {
    type Output = f32;

    #[inline(always)]
    unsafe fn run<V: Lanes<Scalar = f32>>(self) -> f32 {
        const CHAINS: usize = 4;
        // SAFETY: each chunk is whole panels; the caller guarantees the instruction set.
        unsafe {
            let mut sums = [V::splat(0.0); CHAINS];
            let chunks = self.0.chunks_exact(CHAINS * f32::LANES);
            let rest: f32 = chunks.remainder().iter().sum();
            for chunk in chunks {
                for (sum, panel) in sums.iter_mut().zip(chunk.chunks_exact(f32::LANES)) {
                    *sum = sum.add(V::load(panel.as_ptr()));
                }
            }
            sums.into_iter().fold(V::splat(0.0), |all, sum| all.add(sum)).sum() + rest
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_instruction_set_has_a_peak_in_both_types() {
        for isa in Isa::available() {
            for peak in [fma::<f32>(isa, 1), fma::<f64>(isa, 2)] {
                assert!(peak.is_finite() && peak > 0.0, "{isa}: {peak}");
            }
        }
    }

    #[test]
    fn numbers_are_all_read_whatever_their_count() {
        for isa in Isa::available() {
            for len in [0, 1, 15, 64, 65, 1000] {
                let numbers: Vec<f32> = (0..len).map(|x| x as f32).collect();
                assert_eq!(dispatch(isa, Sum(&numbers)), numbers.iter().sum::<f32>());
            }
            assert!(read(isa, &[1.0; 5], 8).is_finite());
        }
    }

    #[test]
    fn no_threads_count_as_one() {
        assert!(fma::<f32>(Isa::best(), 0) > 0.0);
        assert!(read(Isa::best(), &[1.0; 100], 0) > 0.0);
    }
}
