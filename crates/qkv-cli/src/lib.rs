//! The program `qkv`: arguments in, words out. What attention is, and how it is computed, is in the crate [`qkv`].
//!
//! | module | owns |
//! | --- | --- |
//! | `choices` | the one table of choices and tensors that help, page and parser come from |
//! | `arguments`, `place`, `pattern`, `selection`, `features` | from what was typed to what was meant |
//! | `page` | the table as Markdown, `docs/run.md` |
//! | `failure` | an expected failure: one sentence and a hint |
//! | `source`, `number`, `target` | tensors from a file, their numbers, tensors into a file |
//! | `memory` | what this machine has, and whether a call can fit |
//! | `given`, `description` | the tensors of a call, and the attention that they and the choices ask for |
//! | `computation`, `results` | the call itself, and the tensors that come out of it |
//! | `run`, `report`, `example` | the command `qkv run`, what it says, and what it shows without a file |
//! | `bench` | the command `qkv bench`: this machine measured, beside its peak and beside PyTorch |
//!
//! Exit codes: 0 done, 1 an expected failure (a file, a shape), 2 misuse of the command line.

#![forbid(unsafe_code)]

mod arguments;
mod bench;
mod choices;
mod computation;
mod description;
mod example;
mod failure;
mod features;
mod given;
mod memory;
mod number;
mod page;
mod pattern;
mod place;
mod report;
mod results;
mod run;
mod selection;
mod source;
mod target;

use arguments::Asked;
use failure::Failure;
use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;

pub use page::page;

/// Runs the program on these arguments, the first being its own name.
///
/// ```
/// let code = qkv_cli::main(["qkv", "run", "--causal", "start"].map(Into::into));
/// assert_eq!(code, std::process::ExitCode::SUCCESS);
/// ```
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let said = match arguments::read(arguments) {
        Ok(Asked::Run(choices)) => run::run(&choices),
        Ok(Asked::Bench(asked)) => bench::bench(&asked, &mut say).map(|()| String::new()),
        Ok(Asked::BenchMemory(held)) => held.measure(),
        Ok(Asked::Page) => Ok(page()),
        Err(misuse_or_help) => {
            // Help goes to stdout, misuse to stderr; whoever closed either does not want to read it.
            let _ = misuse_or_help.print();
            return ExitCode::from(u8::try_from(misuse_or_help.exit_code()).unwrap_or(2));
        }
    };
    match said.and_then(|words| say(&words)) {
        Ok(_) => ExitCode::SUCCESS,
        Err(failure) => {
            let _ = write!(io::stderr(), "{failure}");
            ExitCode::FAILURE
        }
    }
}

/// Writes to stdout, and tells whether anyone reads on. A reader that has gone away has seen enough, which is no failure.
fn say(words: &str) -> Result<bool, Failure> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(words.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::new(format!("the report could not be written: {error}")))
        }
        written => Ok(written.is_ok()),
    }
}
