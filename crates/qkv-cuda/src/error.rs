//! Errors. Each variant says what is missing, or which driver call failed on which shapes with the driver's message;
//! [`Error::hint`] says how to fix it.

use std::path::PathBuf;

/// Why an attention was not computed on a GPU.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The description and its inputs do not fit together: an error of `qkv`.
    #[error(transparent)]
    Refused(#[from] qkv::Error),
    /// The driver library cannot be loaded.
    #[error("there is no NVIDIA driver on this machine: its library `{library}` cannot be loaded")]
    NoDriver {
        /// The library's file name.
        library: &'static str,
    },
    /// There is a driver, but no GPU with this number.
    #[error("there is no GPU {number}: the driver sees {found}")]
    NoDevice {
        /// The requested number, from 0.
        number: usize,
        /// How many GPUs there are.
        found: usize,
    },
    /// The GPU has no tensor cores for bf16.
    #[error("`{name}` has compute capability {}.{}, and the kernels need 8.0", .capability.0, .capability.1)]
    TooOld {
        /// The GPU's name.
        name: String,
        /// Its compute capability.
        capability: (u32, u32),
    },
    /// No compiler for the kernels was found.
    #[error("NVRTC, the compiler for kernels, was not found: looked for {}", .looked_for.join(", "))]
    NoCompiler {
        /// The files that were tried.
        looked_for: Vec<String>,
    },
    /// cuBLASLt, which multiplies the matrices of models, was not found.
    #[error("cuBLASLt, the library of matrix products, was not found: looked for {}", .looked_for.join(", "))]
    NoCublas {
        /// The files that were tried.
        looked_for: Vec<String>,
    },
    /// There is not enough device memory.
    #[error(
        "the GPU has no {} MiB left for {purpose}: {} MiB of its {} MiB are in use by this process",
        .bytes >> 20, .used >> 20, .total >> 20
    )]
    OutOfMemory {
        /// The requested bytes.
        bytes: usize,
        /// What it is for.
        purpose: String,
        /// What this process has allocated.
        used: usize,
        /// The GPU's memory.
        total: u64,
    },
    /// The compiler rejected a kernel.
    #[error("kernel `{program}` does not compile for {architecture}: {log}")]
    Compile {
        /// The program.
        program: String,
        /// The target architecture.
        architecture: String,
        /// The compiler's log.
        log: String,
    },
    /// A plan would have to be made while a CUDA graph is captured.
    #[error("there is no plan for {what} yet, and none can be made while a CUDA graph is captured")]
    Capturing {
        /// What is computed, with the shapes.
        what: String,
    },
    /// A driver call failed.
    #[error("{action}: the driver reports `{message}`")]
    Driver {
        /// What was being done, with the shapes.
        action: String,
        /// The driver's message.
        message: String,
    },
    /// A feature that only the CPU supports.
    #[error("{what} runs only on the CPU: {instead}")]
    CpuOnly {
        /// The feature.
        what: String,
        /// What to call instead.
        instead: &'static str,
    },
    /// Device memory is too small, or has a layout the kernels cannot read.
    #[error("`{tensor}` on the device {problem}")]
    Memory {
        /// The tensor's name.
        tensor: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// The kernel cache cannot be written.
    #[error("the kernel cache `{}` cannot be used: {reason}", .folder.display())]
    Cache {
        /// Its folder.
        folder: PathBuf,
        /// The system's message.
        reason: String,
    },
}

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// How to fix it.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Error::NoDriver { .. } => {
                Some("install NVIDIA's driver, or leave out `--device cuda` to compute on the CPU")
            }
            Error::NoCompiler { .. } => Some(
                "install the CUDA toolkit, or `pip install nvidia-cuda-nvrtc`; \
                 `QKV_NVRTC` names the library if it is in neither place",
            ),
            Error::NoCublas { .. } => Some(
                "install the CUDA toolkit, or `pip install nvidia-cublas`; \
                 `QKV_CUBLASLT` names the library if it is in neither place",
            ),
            Error::OutOfMemory { .. } => {
                Some("lower the batch or the length, or set `train.recompute = true` to save memory for time")
            }
            Error::Capturing { .. } => Some("compute it once with these shapes before the capture"),
            Error::TooOld { .. } => Some("compute on the CPU: leave out `--device cuda`"),
            Error::Cache { .. } => Some("set `QKV_CUDA_CACHE` to a folder that can be written"),
            _ => None,
        }
    }

    pub(crate) fn cpu_only(what: impl Into<String>) -> Error {
        Error::CpuOnly { what: what.into(), instead: "call `Attention` itself with host tensors" }
    }

    pub(crate) fn memory(tensor: &'static str, problem: impl Into<String>) -> Error {
        Error::Memory { tensor, problem: problem.into() }
    }
}
