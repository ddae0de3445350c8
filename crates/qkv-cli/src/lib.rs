//! The program `qkv`: the command line around the crates [`qkv`] (attention), `qkv-models` (models and training) and
//! `qkv-explore` (pictures and the explorer page). It parses arguments, opens files, calls the libraries and prints.
//!
//! | module | owns |
//! | --- | --- |
//! | `command`, `arguments` | the tables of commands and arguments, from which parsing, help and relations come |
//! | `commands` | the commands themselves, one file or folder each |
//! | `failure` | an expected failure: one sentence and a hint |
//! | `input`, `lines` | opening input files; text line by line, with bad lines reported and skipped |
//! | `output`, `atomic_file` | stdout and `--output`; output files that are either complete or absent |
//! | `ranks` | running one command as several processes |
//! | `search` | the decoding arguments that `translate` and `eval` share |
//! | `dtype` | element types of tensors, in files and in computation |
//! | `device` | the arguments `--device` and `--precision` |
//! | `embedded` | the model compiled into the program |
//! | `alignment`, `terminal` | alignments as JSON; width and colors of the terminal |
//! | `memory`, `isa`, `threads` | memory, instruction set and threads of the machine |
//!
//! Exit codes: 0 success, 1 failure (a file, a shape), 2 wrong usage, 130 interrupted after saving.

#![forbid(unsafe_code)]

mod alignment;
mod arguments;
mod atomic_file;
mod command;
mod commands;
mod device;
mod dtype;
mod embedded;
mod failure;
mod input;
mod isa;
mod lines;
mod memory;
mod output;
mod ranks;
mod search;
mod terminal;
mod threads;

use command::Status;
use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;

pub use commands::page;

/// Runs the program on a command line; the first argument is the program's own name.
///
/// ```
/// let code = qkv_cli::main(["qkv", "run", "--causal", "start"].map(Into::into));
/// assert_eq!(code, std::process::ExitCode::SUCCESS);
/// ```
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let (command, run) = match commands::parse(arguments) {
        Ok(parsed) => parsed,
        Err(usage_or_help) => {
            // Help goes to stdout, wrong usage to stderr. If the reader has closed the stream, there is nobody to tell.
            let _ = usage_or_help.print();
            return ExitCode::from(u8::try_from(usage_or_help.exit_code()).unwrap_or(2));
        }
    };
    let isa = if command.runs_kernels { isa::check() } else { Ok(()) };
    match isa.and_then(|()| run.run(&mut output::print)) {
        Ok(Status::Done) => ExitCode::SUCCESS,
        Ok(Status::Interrupted) => ExitCode::from(130),
        Err(failure) => {
            let _ = write!(io::stderr(), "{failure}");
            ExitCode::FAILURE
        }
    }
}
