//! The commands about models, on models so small that they train in a second. How good a model gets is not tested here.

mod damaged;
mod documents;
mod eval;
mod finetune;
mod generate;
mod help;
mod images;
mod labels;
mod lora;
mod pictures;
pub mod program;
mod rank_hashes;
pub mod ranks;
mod resume;
mod show;
mod speak;
mod train;
mod transcribe;
mod translate;
