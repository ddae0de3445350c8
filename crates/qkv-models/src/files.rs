//! File formats and access to files: safetensors, GGUF and compressed data are read with every size checked against the
//! bytes that are there; files are written atomically.

pub mod atomic;
pub(crate) mod folder;
pub mod gguf;
pub mod input;
pub(crate) mod packed;
pub mod safetensors;
pub mod tensors;
pub mod weights;
