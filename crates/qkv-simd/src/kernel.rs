//! Compiles one generic kernel for each instruction set.

use crate::isa::{Isa, Level};
use crate::lanes::Lanes;
use crate::number::Real;

/// A kernel with its arguments, run once the instruction set is known.
pub(crate) trait Kernel<A: Real> {
    type Output;

    /// Runs with vectors of type `V`. Implementations are `#[inline(always)]`, so that they are compiled inside the
    /// function that enables the instruction set.
    ///
    /// # Safety
    /// The CPU has the instruction set of `V`.
    unsafe fn run<V: Lanes<Scalar = A>>(self) -> Self::Output;
}

/// Runs the kernel with the vectors of `isa`.
#[inline]
pub(crate) fn dispatch<A: Real, K: Kernel<A>>(isa: Isa, kernel: K) -> K::Output {
    match isa.level() {
        // SAFETY: portable lanes run on any CPU.
        Level::Portable => unsafe { kernel.run::<A::Portable>() },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: every aarch64 has NEON.
        Level::Neon => unsafe { kernel.run::<A::Neon>() },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `Isa` of this level exists only where the CPU has it.
        Level::Avx2 => unsafe { avx2(kernel) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Level::Avx512 | Level::Avx512Bf16 | Level::Amx => unsafe { avx512(kernel) },
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2<A: Real, K: Kernel<A>>(kernel: K) -> K::Output {
    // SAFETY: this function's own target features are those of the lanes.
    unsafe { kernel.run::<A::Avx2>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn avx512<A: Real, K: Kernel<A>>(kernel: K) -> K::Output {
    // SAFETY: this function's own target features are those of the lanes.
    unsafe { kernel.run::<A::Avx512>() }
}
