//! A command of the program: its name, its help, its arguments and what it runs, declared in one place. Parsing builds
//! the value to run, but runs nothing.

use crate::arguments::{Arguments, Matches};
use crate::failure::Failure;
use crate::output::Print;

/// The last line of every help text.
pub(crate) const EXIT_CODES: &str = "Exit codes: 0 success, 1 failure, 2 wrong usage, 130 interrupted after saving";

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    Done,
    /// Stopped by a signal, after saving.
    Interrupted,
}

/// A parsed command line, ready to run.
pub(crate) trait Run {
    fn run(&self, print: Print<'_>) -> Result<Status, Failure>;
}

/// Builds the value to run; the error describes wrong usage.
pub(crate) type Parse = fn(&Matches<'_>) -> Result<Box<dyn Run>, String>;

/// A command, as the program and `clap` see it.
#[derive(Clone, Copy)]
pub(crate) struct Command {
    pub name: &'static str,
    about: &'static str,
    pub arguments: Arguments,
    /// Command lines, each with what it does.
    examples: &'static [(&'static str, &'static str)],
    /// What `--help` prints before the examples.
    notes: Option<fn() -> String>,
    pub parse: Parse,
    /// Not listed in help: for the program's own use.
    hidden: bool,
    /// Whether it runs kernels, so that an invalid `QKV_ISA` is an error.
    pub runs_kernels: bool,
}

impl Command {
    pub const fn new(name: &'static str, about: &'static str, arguments: Arguments, parse: Parse) -> Command {
        Command { name, about, arguments, examples: &[], notes: None, parse, hidden: false, runs_kernels: true }
    }

    pub const fn examples(self, examples: &'static [(&'static str, &'static str)]) -> Command {
        Command { examples, ..self }
    }

    pub const fn notes(self, notes: fn() -> String) -> Command {
        Command { notes: Some(notes), ..self }
    }

    pub const fn hidden(self) -> Command {
        Command { hidden: true, ..self }
    }

    pub const fn without_kernels(self) -> Command {
        Command { runs_kernels: false, ..self }
    }

    /// Converts it to a command of `clap`.
    pub fn to_clap(self) -> clap::Command {
        let name = self.name;
        let mut long = self.notes.map_or(String::new(), |notes| notes() + "\n");
        if !self.examples.is_empty() {
            let lines = self.examples.iter().map(|(command, what)| format!("  # {what}\n  {command}\n"));
            long += &format!("Examples:\n{}\n", lines.collect::<String>());
        }
        let command = clap::Command::new(name).about(self.about).hide(self.hidden).next_line_help(true);
        let command = command.after_help(format!("`qkv {name} --help` explains the values and has examples"));
        let command = command.after_long_help(long + EXIT_CODES);
        let arguments = self.arguments.iter().flat_map(|(heading, list)| list.iter().map(move |one| (heading, one)));
        arguments.fold(command, |command, (heading, argument)| command.arg(argument.to_clap().help_heading(*heading)))
    }
}
