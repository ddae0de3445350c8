//! `qkv run` on files.

mod features;
mod files;
mod gradients;
mod local;
mod lsh;
mod options;
mod precision;
pub mod program;
mod ranks;
mod report;
mod selection;
mod shapes;
mod tensors;
mod usage;
