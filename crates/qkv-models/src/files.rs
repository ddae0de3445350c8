//! Files as the ecosystem has them, written whole or not at all and read with suspicion.

pub mod atomic;
pub(crate) mod folder;
pub mod gguf;
pub mod input;
pub(crate) mod packed;
pub mod safetensors;
pub mod tensors;
pub mod weights;
