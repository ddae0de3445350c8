//! The instruction set that the kernels run with. An [`Isa`] exists only for instruction sets of this CPU, so holding
//! one proves that its kernels may be called.

use std::fmt;
use std::sync::OnceLock;

/// The levels that kernels of this architecture are compiled for, from the portable one to the widest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    Portable,
    #[cfg(target_arch = "aarch64")]
    Neon,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// AVX-512 with bf16 dot products (`VDPBF16PS`).
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
    /// The above and AMX.
    #[cfg(target_arch = "x86_64")]
    Amx,
}

/// The instruction set of this process, once it is decided.
static BEST: OnceLock<Isa> = OnceLock::new();

/// An instruction set of this CPU.
///
/// ```
/// use qkv_simd::Isa;
/// let isa = Isa::best();
/// assert!(Isa::available().contains(&isa));
/// assert!(Isa::named("portable").is_some());
/// assert!(Isa::named("abacus").is_none());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Isa(Level);

impl Isa {
    /// The fastest instruction set of this CPU, or the one named by the environment variable `QKV_ISA` (`portable`,
    /// `neon`, `avx2`, `avx512`, `avx512bf16`, `amx`). A name that this CPU does not support is ignored. Decided once
    /// per process.
    pub fn best() -> Isa {
        *BEST.get_or_init(|| {
            let forced = std::env::var("QKV_ISA").ok().and_then(|name| Isa::named(&name));
            forced.unwrap_or_else(|| *Isa::available().last().expect("portable is always there"))
        })
    }

    /// Makes this the instruction set of the process, for ranks that have to agree on one. Returns whether it is now:
    /// it is not if another one was decided before.
    ///
    /// ```
    /// use qkv_simd::Isa;
    /// assert!(Isa::best().decide());
    /// ```
    pub fn decide(self) -> bool {
        *BEST.get_or_init(|| self) == self
    }

    /// Every instruction set of this CPU, narrowest first.
    #[cfg(target_arch = "x86_64")]
    pub fn available() -> Vec<Isa> {
        let mut found = vec![Isa(Level::Portable)];
        let f16c = is_x86_feature_detected!("f16c");
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && f16c {
            found.push(Isa(Level::Avx2));
        }
        if is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("fma")
            && f16c
        {
            found.push(Isa(Level::Avx512));
            if is_x86_feature_detected!("avx512bf16") {
                found.push(Isa(Level::Avx512Bf16));
                if crate::amx::permitted() {
                    found.push(Isa(Level::Amx));
                }
            }
        }
        found
    }

    /// Every instruction set of this CPU, narrowest first: NEON is in every aarch64.
    #[cfg(target_arch = "aarch64")]
    pub fn available() -> Vec<Isa> {
        vec![Isa(Level::Portable), Isa(Level::Neon)]
    }

    /// Every instruction set of this CPU, narrowest first: on this architecture, only the portable lanes.
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    pub fn available() -> Vec<Isa> {
        vec![Isa(Level::Portable)]
    }

    /// The instruction set of this name, if the CPU has it.
    pub fn named(name: &str) -> Option<Isa> {
        Isa::available().into_iter().find(|isa| isa.name() == name)
    }

    /// Its name: `portable`, `neon`, `avx2`, `avx512`, `avx512bf16` or `amx`.
    pub fn name(self) -> &'static str {
        match self.0 {
            Level::Portable => "portable",
            #[cfg(target_arch = "aarch64")]
            Level::Neon => "neon",
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Level::Avx512Bf16 => "avx512bf16",
            #[cfg(target_arch = "x86_64")]
            Level::Amx => "amx",
        }
    }

    /// Whether it has products of bf16 pairs, `VDPBF16PS` or better.
    pub(crate) fn has_bf16_products(self) -> bool {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512Bf16 | Level::Amx => true,
            _ => false,
        }
    }

    /// Whether it has AMX.
    pub(crate) fn has_amx(self) -> bool {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Level::Amx => true,
            _ => false,
        }
    }

    pub(crate) fn level(self) -> Level {
        self.0
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
