//! All integration tests of the crate in one binary: models and kernels are linked once.

mod archive;
mod batch_invariant;
mod blocks;
mod checkpoints;
mod devices;
mod gemma;
mod gguf;
mod han;
mod metrics;
mod models;
mod pictures;
mod ranks;
mod resnet;
mod side_by_side;
mod speech;
mod torch;
mod training;
mod vit;
mod whisper;
