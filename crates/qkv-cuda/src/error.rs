//! What can go wrong on the way to a GPU. Every variant says what is missing, or which call failed with the driver's own
//! words and on which shapes; a hint says how to mend it.

use std::path::PathBuf;

/// Why an attention was not computed on a GPU.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The description or its inputs do not go together: the library's own words.
    #[error(transparent)]
    Refused(#[from] qkv::Error),
    /// There is no driver on this machine.
    #[error("there is no NVIDIA driver on this machine: its library `{library}` cannot be loaded")]
    NoDriver {
        /// The name that was looked for.
        library: &'static str,
    },
    /// There is a driver, but no card, or not as many.
    #[error("there is no GPU {asked}: the driver sees {found}")]
    NoCard {
        /// The number asked for, from 0.
        asked: usize,
        /// How many there are.
        found: usize,
    },
    /// The card is from before tensor cores for bf16.
    #[error("`{name}` has compute capability {}.{}, and the kernels need 8.0", .capability.0, .capability.1)]
    TooOld {
        /// The card.
        name: String,
        /// What it has.
        capability: (u32, u32),
    },
    /// The compiler that turns kernels into machine code is not there.
    #[error("NVRTC, the compiler for kernels, was not found: looked for {}", .looked_for.join(", "))]
    NoCompiler {
        /// The files that were tried.
        looked_for: Vec<String>,
    },
    /// The compiler did not take a kernel.
    #[error("kernel `{program}` does not compile for {architecture}: {log}")]
    Compile {
        /// Which kernel.
        program: String,
        /// For which card.
        architecture: String,
        /// The compiler's words.
        log: String,
    },
    /// The driver refused a call.
    #[error("{doing}: the driver says `{words}`")]
    Driver {
        /// What was being done, with the shapes.
        doing: String,
        /// The driver's words.
        words: String,
    },
    /// What is asked for is computed on the CPU alone.
    #[error("{what} runs on the CPU alone: {instead}")]
    OnTheCpu {
        /// Which choice.
        what: String,
        /// What to do.
        instead: &'static str,
    },
    /// Device memory that was given is too small, or not where kernels can read it.
    #[error("`{tensor}` on the device {problem}")]
    Memory {
        /// Its name.
        tensor: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// A file of the cache cannot be written.
    #[error("the kernel cache `{}` cannot be used: {reason}", .folder.display())]
    Cache {
        /// Where it is.
        folder: PathBuf,
        /// The system's words.
        reason: String,
    },
}

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// How to mend it.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Error::NoDriver { .. } => {
                Some("install NVIDIA's driver, or leave out `--device cuda` to compute on the CPU")
            }
            Error::NoCompiler { .. } => Some(
                "install the CUDA toolkit, or `pip install nvidia-cuda-nvrtc`, and name the library in `QKV_NVRTC` if it is not found by itself",
            ),
            Error::TooOld { .. } => Some("compute on the CPU: leave out `--device cuda`"),
            Error::Cache { .. } => Some("`QKV_CUDA_CACHE` names another folder"),
            _ => None,
        }
    }

    pub(crate) fn on_the_cpu(what: impl Into<String>) -> Error {
        Error::OnTheCpu { what: what.into(), instead: "call `Attention` itself with host tensors" }
    }

    pub(crate) fn memory(tensor: &'static str, problem: impl Into<String>) -> Error {
        Error::Memory { tensor, problem: problem.into() }
    }
}
