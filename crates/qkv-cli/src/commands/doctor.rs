//! The command `qkv doctor`: what this machine has, and what the program makes of it.

use crate::{bench, embedded};
use qkv::Isa;
use qkv_simd::bf16_gemm::Bf16Gemm;
use qkv_simd::bf16x3_gemm::Bf16x3Gemm;
use serde::Serialize;
use std::env;
use std::fmt;

/// The facts, in the order in which they are told.
#[derive(Debug, Serialize)]
pub(crate) struct Health {
    version: &'static str,
    cpu: Option<String>,
    /// What the CPU has of what kernels ask for.
    features: Vec<&'static str>,
    /// The instruction set that kernels run with.
    isa: &'static str,
    /// All that could.
    available: Vec<&'static str>,
    /// What `QKV_ISA` says, if anything.
    asked: Option<String>,
    threads: usize,
    kernels: Kernels,
    memory_bytes: Option<u64>,
    gpu: qkv_cuda::Health,
    embedded_model: bool,
}

/// What computes in each type.
#[derive(Debug, Serialize)]
struct Kernels {
    f32: &'static str,
    f64: &'static str,
    bf16: &'static str,
    f16: &'static str,
}

macro_rules! features {
    ($($name:tt),*) => {{
        #[cfg(target_arch = "x86_64")]
        let found = [$(($name, std::is_x86_feature_detected!($name))),*];
        #[cfg(not(target_arch = "x86_64"))]
        let found: [(&'static str, bool); 0] = [];
        found.into_iter().filter(|(_, there)| *there).map(|(name, _)| name).collect()
    }};
}

impl Health {
    pub fn of_this_machine() -> Health {
        let isa = Isa::best();
        // Products of bf16 have units of their own; f16 is widened to f32.
        let plain = match isa.name() {
            "avx512bf16" | "amx" => "avx512",
            name => name,
        };
        let bf16 = match isa.name() {
            "amx" => "amx tiles, sums in f32",
            "avx512bf16" => "avx512 pair products, sums in f32",
            _ if Bf16Gemm::available(isa) => "AVX-512 bf16 dot products, f32 accumulation",
            _ => "widened to f32",
        };
        let f32 = if Bf16x3Gemm::available(isa) { "avx512; attention scores on AMX as bf16x3" } else { plain };
        let mut features: Vec<&'static str> = features!(
            "sse4.2",
            "avx",
            "avx2",
            "fma",
            "f16c",
            "avx512f",
            "avx512bw",
            "avx512dq",
            "avx512vl",
            "avx512bf16"
        );
        // The tile unit is not only there: the system has to allow it.
        features.extend(Isa::named("amx").map(Isa::name));
        Health {
            version: env!("CARGO_PKG_VERSION"),
            cpu: bench::cpu(),
            features,
            isa: isa.name(),
            available: Isa::available().into_iter().map(Isa::name).collect(),
            asked: env::var("QKV_ISA").ok(),
            threads: rayon::current_num_threads(),
            kernels: Kernels { f32, f64: plain, bf16, f16: "widened to f32" },
            memory_bytes: crate::memory::field("/proc/meminfo", "MemTotal:"),
            gpu: qkv_cuda::Health::of_this_machine(),
            embedded_model: embedded::THERE,
        }
    }

    /// As one JSON object on a line.
    pub fn json(&self) -> String {
        serde_json::to_string(self).expect("plain data") + "\n"
    }
}

impl fmt::Display for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Health { version, features, isa, available, kernels, gpu, .. } = self;
        writeln!(f, "qkv        {version}")?;
        writeln!(f, "cpu        {}", self.cpu.as_deref().unwrap_or("the system does not say"))?;
        writeln!(
            f,
            "features   {}",
            if features.is_empty() { "none that kernels ask for".into() } else { features.join(", ") }
        )?;
        let why = match &self.asked {
            Some(asked) if asked == isa => "asked for by `QKV_ISA`".into(),
            Some(asked) => format!("`QKV_ISA` asks for `{asked}`, which this CPU does not have"),
            None => "the best here; `QKV_ISA` chooses another".into(),
        };
        writeln!(f, "isa        {isa} of {} ({why})", available.join(", "))?;
        writeln!(f, "threads    {}", self.threads)?;
        writeln!(
            f,
            "kernels    f32 {} · f64 {} · bf16 {} · f16 {}",
            kernels.f32, kernels.f64, kernels.bf16, kernels.f16
        )?;
        if let Some(bytes) = self.memory_bytes {
            writeln!(f, "memory     {:.1} GiB", bytes as f64 / f64::from(1 << 30))?;
        }
        match &gpu.cards {
            Ok(cards) if cards.is_empty() => writeln!(f, "gpu        none: there is a driver, but no card")?,
            Ok(cards) => {
                for card in cards {
                    let ((major, minor), (newest, tenth)) = (card.capability, card.driver);
                    writeln!(
                        f,
                        "gpu        {}, compute {major}.{minor}, {:.0} GiB, {} multiprocessors, driver for CUDA {newest}.{tenth}",
                        card.name,
                        card.memory_bytes as f64 / f64::from(1 << 30),
                        card.processors
                    )?;
                }
            }
            Err(why) => writeln!(f, "gpu        none: {why}")?,
        }
        match &gpu.compiler {
            Ok(found) => writeln!(f, "nvrtc      {found}")?,
            Err(_) if gpu.cards.is_err() => {}
            Err(why) => writeln!(f, "nvrtc      none: {why}")?,
        }
        if gpu.cards.is_ok() {
            let (count, bytes) = gpu.kernels;
            let problem = gpu.cache_problem.as_ref().map_or(String::new(), |why| format!(" ({why})"));
            writeln!(
                f,
                "cubins     {count} compiled, {:.1} MiB in {}{problem}",
                bytes as f64 / f64::from(1 << 20),
                gpu.cache
            )?;
        }
        let there = if self.embedded_model { "there" } else { "none in this build: `--model DIR` names one" };
        writeln!(f, "model      {there}")
    }
}
