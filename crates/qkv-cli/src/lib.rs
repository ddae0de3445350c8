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
//! | `train` | the command `qkv train`: a recipe becomes a model, watched and interrupted |
//! | `translate`, `searching` | the command `qkv translate`: lines in, lines out; how they are searched for |
//! | `show` | the command `qkv show`: what a model attended to, drawn and written |
//! | `generate` | the command `qkv generate`: a model goes on with a text, or answers |
//! | `embed` | the command `qkv embed`: sentences as vectors |
//! | `reading`, `classes` | the commands `qkv classify`, `qkv tag` and `qkv answer`; what a class is told with |
//! | `inspect` | the commands `qkv inspect` and `qkv convert`: what is in a checkpoint, and the same in another file |
//! | `eval` | the command `qkv eval`: how good translations are |
//! | `explore` | the command `qkv explore`: a page that shows what a model attends to |
//! | `embedded` | the model that is used where none is named |
//! | `aligned`, `terminal` | where each word looked, as JSON; how wide and how colourful drawings are |
//! | `doctor` | the command `qkv doctor`: what this machine has |
//! | `say`, `threads` | where words go; on how many threads work is done |
//! | `bench` | the command `qkv bench`: this machine measured, beside its peak and beside PyTorch |
//!
//! Exit codes: 0 done, 1 an expected failure (a file, a shape), 2 misuse of the command line, 130 interrupted after saving.

#![forbid(unsafe_code)]

mod aligned;
mod arguments;
mod bench;
mod choices;
mod classes;
mod computation;
mod description;
mod doctor;
mod embed;
mod embedded;
mod eval;
mod example;
mod explore;
mod failure;
mod features;
mod generate;
mod given;
mod inspect;
mod memory;
mod number;
mod page;
mod pattern;
mod place;
mod reading;
mod report;
mod results;
mod run;
mod say;
mod searching;
mod selection;
mod show;
mod source;
mod target;
mod terminal;
mod threads;
mod train;
mod translate;

use arguments::Asked;
use qkv_models::train::Outcome;
use say::say;
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
    let done = match arguments::read(arguments) {
        Ok(Asked::Run(choices)) => run::run(&choices).and_then(|words| say(&words)).map(drop),
        Ok(Asked::Bench(asked)) => bench::bench(&asked, &mut say),
        Ok(Asked::BenchMemory(held)) => held.measure().and_then(|words| say(&words)).map(drop),
        Ok(Asked::BenchStep(step)) => step.measure().and_then(|words| say(&words)).map(drop),
        Ok(Asked::Train(asked)) => match train::train(&asked, &mut say) {
            Ok(Outcome::Interrupted) => return ExitCode::from(train::INTERRUPTED),
            ended => ended.map(drop),
        },
        Ok(Asked::Translate(asked)) => translate::translate(&asked, &mut say),
        Ok(Asked::Show(asked)) => show::show(&asked, &mut say),
        Ok(Asked::Eval(asked)) => eval::eval(&asked, &mut say),
        Ok(Asked::Explore(asked)) => explore::explore(&asked, &mut say),
        Ok(Asked::Generate(asked)) => generate::generate(&asked, &mut say),
        Ok(Asked::Embed(asked)) => embed::embed(&asked, &mut say),
        Ok(Asked::Read(asked)) => reading::read(&asked, &mut say),
        Ok(Asked::Inspect(asked)) => inspect::inspect(&asked, &mut say),
        Ok(Asked::Convert(asked)) => inspect::convert(&asked, &mut say),
        Ok(Asked::Words(words)) => say(&words).map(drop),
        Err(misuse_or_help) => {
            // Help goes to stdout, misuse to stderr; whoever closed either does not want to read it.
            let _ = misuse_or_help.print();
            return ExitCode::from(u8::try_from(misuse_or_help.exit_code()).unwrap_or(2));
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            let _ = write!(io::stderr(), "{failure}");
            ExitCode::FAILURE
        }
    }
}
