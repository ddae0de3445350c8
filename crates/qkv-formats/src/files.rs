//! File formats and access to files: safetensors, GGUF, CTranslate2, ggml, TensorFlow.js and PyTorch files and
//! compressed data are read with every size checked against the bytes that exist; files are written atomically.

pub mod atomic;
pub mod ctranslate2;
mod cursor;
pub mod folder;
pub mod ggml;
pub mod gguf;
pub mod input;
pub mod packed;
pub mod safetensors;
pub mod tensors;
pub mod tfjs;
pub mod torch;
pub mod weights;
pub mod yaml;
