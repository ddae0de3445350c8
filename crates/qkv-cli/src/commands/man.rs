//! `qkv man`: pages of the manual, from the same tables as help.

use crate::arguments::{Argument, Arguments, Kind};
use crate::command::{Command, Run, Status};
use crate::failure::Failure;
use crate::output::Print;

pub(super) const COMMAND: Command = Command::new("man", "Print a page of the manual", ARGUMENTS, |matches| {
    Ok(Box::new(ManArgs { command: matches.text("command") }))
})
.examples(&[("qkv man translate | man -l -", "Read the page of a command")])
.without_kernels();

const ARGUMENTS: Arguments = &[(
    "Page",
    &[Argument::new("command", Kind::Text, "Page of this command; the program's own by default")
        .value("COMMAND")
        .positional()],
)];

struct ManArgs {
    command: Option<String>,
}

impl Run for ManArgs {
    fn run(&self, print: Print<'_>) -> Result<Status, Failure> {
        let mut program = super::program();
        program.build();
        let command = match &self.command {
            None => program,
            Some(name) => {
                let mut visible = program.get_subcommands().filter(|command| !command.is_hide_set());
                let found = visible.find(|command| command.get_name() == name).cloned();
                found.ok_or_else(|| Failure::new(format!("there is no command `{name}`")).hint("see `qkv --help`"))?
            }
        };
        let title = command.get_display_name().unwrap_or("qkv").to_owned();
        let mut bytes = Vec::new();
        let page = clap_mangen::Man::new(command.name(title)).render(&mut bytes);
        page.map_err(|error| Failure::new(format!("the page cannot be rendered: {error}")))?;
        print(&String::from_utf8_lossy(&bytes)).map(|_| Status::Done)
    }
}
