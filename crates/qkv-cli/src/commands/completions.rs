//! `qkv completions`: shell completions, from the same tables as help.

use crate::arguments::{Argument, Arguments, Kind};
use crate::command::{Command, Run, Status};
use crate::failure::Failure;
use crate::output::Print;
use clap::value_parser;
use clap_complete::Shell;

pub(super) const COMMAND: Command =
    Command::new("completions", "Print completions for a shell", ARGUMENTS, |matches| {
        Ok(Box::new(CompletionsArgs { shell: matches.value("shell").unwrap_or(Shell::Bash) }))
    })
    .examples(&[("qkv completions bash > ~/.local/share/bash-completion/completions/qkv", "For one user of bash")])
    .without_kernels();

const ARGUMENTS: Arguments = &[(
    "Shell",
    &[Argument::new("shell", Kind::Custom(|| value_parser!(Shell).into()), "bash, elvish, fish, powershell or zsh")
        .value("SHELL")
        .positional()
        .required()],
)];

struct CompletionsArgs {
    shell: Shell,
}

impl Run for CompletionsArgs {
    fn run(&self, print: Print<'_>) -> Result<Status, Failure> {
        let mut bytes = Vec::new();
        clap_complete::generate(self.shell, &mut super::program(), "qkv", &mut bytes);
        print(&String::from_utf8_lossy(&bytes)).map(|_| Status::Done)
    }
}
