//! `qkv run` as a user types it: whole commands, in a folder, on files.

mod choices;
mod features;
mod files;
mod gradients;
mod hash;
mod local;
mod misuse;
mod precision;
mod program;
mod report;
mod selection;
mod shapes;
mod tensors;
