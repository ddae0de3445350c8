//! All integration tests of the crate in one binary.

mod audio;
mod bitmaps;
mod images;
mod tensors;
mod tokenizer;
