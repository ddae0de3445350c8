//! The device of a tensor.

/// The memory a tensor is in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Device {
    /// Host memory.
    #[default]
    Cpu,
    /// The memory of an NVIDIA GPU.
    Cuda,
}
