//! Which instruction set the kernels run with. An [`Isa`] exists only for instruction sets of this CPU, so holding one
//! is the proof that its kernels may be called.

use std::fmt;
use std::sync::OnceLock;

/// The levels that kernels are compiled for, from the portable one to the widest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    Portable,
    Avx2,
    Avx512,
    /// AVX-512 with bf16 dot products (`VDPBF16PS`).
    Avx512Bf16,
    /// The above and AMX.
    Amx,
}

/// The instruction set of this process, once it is decided on.
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
    /// `avx2`, `avx512`, `avx512bf16`, `amx`). A name that this CPU does not have is ignored. Decided once per process.
    pub fn best() -> Isa {
        *BEST.get_or_init(|| {
            let forced = std::env::var("QKV_ISA").ok().and_then(|name| Isa::named(&name));
            forced.unwrap_or_else(|| *Isa::available().last().expect("portable is always there"))
        })
    }

    /// Makes this the instruction set of the process, for ranks that agree on one. Returns whether it is: not where
    /// another one was decided on before.
    ///
    /// ```
    /// use qkv_simd::Isa;
    /// assert!(Isa::best().decide());
    /// ```
    pub fn decide(self) -> bool {
        *BEST.get_or_init(|| self) == self
    }

    /// Every instruction set of this CPU, narrowest first.
    pub fn available() -> Vec<Isa> {
        let mut found = vec![Isa(Level::Portable)];
        #[cfg(target_arch = "x86_64")]
        {
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
        }
        found
    }

    /// The instruction set of this name, if the CPU has it.
    pub fn named(name: &str) -> Option<Isa> {
        Isa::available().into_iter().find(|isa| isa.name() == name)
    }

    /// Its name: `portable`, `avx2`, `avx512`, `avx512bf16` or `amx`.
    pub fn name(self) -> &'static str {
        match self.0 {
            Level::Portable => "portable",
            Level::Avx2 => "avx2",
            Level::Avx512 => "avx512",
            Level::Avx512Bf16 => "avx512bf16",
            Level::Amx => "amx",
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
