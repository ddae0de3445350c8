//! `qkv train`, `qkv translate`, `qkv eval` and the small commands as a user types them: whole commands, in a folder, with
//! models so small that they train in a second. How good a model gets, no test here says.

mod eval;
mod generate;
mod hostile;
mod program;
mod resume;
mod small;
mod train;
mod translate;
