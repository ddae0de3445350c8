//! `qkv doctor`: what this machine has, and which kernels run on it.

use super::bench;
use crate::arguments::{Argument, Arguments, Kind};
use crate::command::{Command, Run, Status};
use crate::failure::Failure;
use crate::output::Print;
use crate::{embedded, isa};
use qkv::Isa;
use qkv_simd::bf16_gemm::Bf16Gemm;
use qkv_simd::bf16x3_gemm::Bf16x3Gemm;
use serde::Serialize;
use std::env;
use std::fmt;

pub(super) const COMMAND: Command =
    Command::new("doctor", "Report CPU features, kernels, GPU and threads of this machine", ARGUMENTS, |matches| {
        Ok(Box::new(DoctorArgs { json: matches.switch("json") }))
    })
    .examples(&[("qkv doctor", "Everything"), ("qkv doctor --json", "As JSON")])
    .without_kernels();

const ARGUMENTS: Arguments = &[("Output", &[Argument::new("json", Kind::Switch, "Print one JSON object")])];

struct DoctorArgs {
    json: bool,
}

impl Run for DoctorArgs {
    fn run(&self, print: Print<'_>) -> Result<Status, Failure> {
        let report = MachineReport::of_this_machine();
        print(&if self.json { report.to_json() } else { report.to_string() })?;
        // An invalid `QKV_ISA` is reported with everything else, and is a failure here too.
        isa::check().map(|()| Status::Done)
    }
}

/// The facts, in the order of the report.
#[derive(Debug, Serialize)]
struct MachineReport {
    version: &'static str,
    cpu: Option<String>,
    /// CPU features that kernels use.
    features: Vec<&'static str>,
    /// The instruction set of the kernels.
    isa: &'static str,
    /// All instruction sets that the CPU supports.
    available: Vec<&'static str>,
    /// `QKV_ISA`.
    #[serde(rename = "asked")]
    requested_isa: Option<String>,
    threads: usize,
    kernels: KernelNames,
    memory_bytes: Option<u64>,
    gpu: qkv_cuda::Health,
    embedded_model: bool,
}

/// The kernels of each type.
#[derive(Debug, Serialize)]
struct KernelNames {
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

impl MachineReport {
    fn of_this_machine() -> MachineReport {
        let isa = Isa::best();
        // bf16 has its own instructions; f16 is widened to f32.
        let native = match isa.name() {
            "avx512bf16" | "amx" => "avx512",
            name => name,
        };
        let bf16 = match isa.name() {
            "amx" => "amx (tdpbf16ps), f32 accumulation",
            "avx512bf16" => "avx512bf16 (vdpbf16ps), f32 accumulation",
            _ if Bf16Gemm::available(isa) => "bf16 products, f32 accumulation",
            _ => "widened to f32",
        };
        let f32 = if Bf16x3Gemm::available(isa) { "avx512, attention on amx in bf16x3" } else { native };
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
        // AMX counts only if the operating system allows it.
        features.extend(Isa::named("amx").map(Isa::name));
        MachineReport {
            version: env!("CARGO_PKG_VERSION"),
            cpu: bench::cpu(),
            features,
            isa: isa.name(),
            available: Isa::available().into_iter().map(Isa::name).collect(),
            requested_isa: env::var_os(isa::VARIABLE).map(|name| name.to_string_lossy().into_owned()),
            threads: rayon::current_num_threads(),
            kernels: KernelNames { f32, f64: native, bf16, f16: "widened to f32" },
            memory_bytes: crate::memory::field("/proc/meminfo", "MemTotal:"),
            gpu: qkv_cuda::Health::of_this_machine(),
            embedded_model: embedded::AVAILABLE,
        }
    }

    /// One JSON object, on one line.
    fn to_json(&self) -> String {
        serde_json::to_string(self).expect("plain data") + "\n"
    }
}

impl fmt::Display for MachineReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MachineReport { version, features, isa, available, kernels, gpu, .. } = self;
        writeln!(f, "qkv        {version}")?;
        writeln!(f, "cpu        {}", self.cpu.as_deref().unwrap_or("unknown"))?;
        writeln!(
            f,
            "features   {}",
            if features.is_empty() { "none that kernels use".into() } else { features.join(", ") }
        )?;
        let why = match &self.requested_isa {
            Some(requested) if requested == isa => "set by `QKV_ISA`".into(),
            Some(requested) => format!("`QKV_ISA={requested}` is not available"),
            None => "the best available; `QKV_ISA` selects another".into(),
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
        match &gpu.devices {
            Ok(devices) if devices.is_empty() => writeln!(f, "gpu        none: the driver found no device")?,
            Ok(devices) => {
                for device in devices {
                    let ((major, minor), (newest, tenth)) = (device.capability, device.driver);
                    writeln!(
                        f,
                        "gpu        {}, compute {major}.{minor}, {:.0} GiB, {} multiprocessors, driver for CUDA {newest}.{tenth}",
                        device.name,
                        device.memory_bytes as f64 / f64::from(1 << 30),
                        device.processors
                    )?;
                }
            }
            Err(why) => writeln!(f, "gpu        none: {why}")?,
        }
        match &gpu.compiler {
            Ok(found) => writeln!(f, "nvrtc      {found}")?,
            Err(_) if gpu.devices.is_err() => {}
            Err(why) => writeln!(f, "nvrtc      none: {why}")?,
        }
        if gpu.devices.is_ok() {
            let (count, bytes) = gpu.kernels;
            let problem = gpu.cache_problem.as_ref().map_or(String::new(), |why| format!(" ({why})"));
            writeln!(
                f,
                "cubins     {count} compiled, {:.1} MiB in {}{problem}",
                bytes as f64 / f64::from(1 << 20),
                gpu.cache
            )?;
        }
        let model = if self.embedded_model { "embedded" } else { "none embedded in this build; use `--model DIR`" };
        writeln!(f, "model      {model}")
    }
}
