//! `qkv train`, `qkv translate`, `qkv generate` and the other commands about models as a user types them: whole commands, in a folder, with
//! models so small that they train in a second. How good a model gets, no test here says.

mod documents;
mod eval;
mod generate;
mod hostile;
mod images;
mod program;
mod reading;
mod resume;
mod show;
mod small;
mod train;
mod translate;
