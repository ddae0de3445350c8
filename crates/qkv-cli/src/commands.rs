//! Every command of the program, and how a command line becomes one. A new command is a module here, a line in
//! `COMMANDS` and nothing else.

mod answer;
mod bench;
mod classify;
mod completions;
mod convert;
mod describe;
mod detect;
mod doctor;
mod embed;
mod eval;
mod explore;
mod generate;
mod inspect;
mod man;
mod page;
mod run;
mod show;
mod speak;
mod tag;
mod train;
mod transcribe;
mod translate;

pub use page::page;

use crate::arguments::Matches;
use crate::command::{Command, EXIT_CODES, Run};
use clap::error::{Error, ErrorKind};
use std::ffi::OsString;

/// The commands, in the order in which help lists them.
const COMMANDS: &[Command] = &[
    translate::COMMAND,
    explore::COMMAND,
    show::COMMAND,
    generate::COMMAND,
    embed::COMMAND,
    classify::COMMAND,
    tag::COMMAND,
    answer::COMMAND,
    describe::COMMAND,
    detect::COMMAND,
    transcribe::COMMAND,
    speak::COMMAND,
    train::COMMAND,
    eval::COMMAND,
    inspect::COMMAND,
    convert::COMMAND,
    run::COMMAND,
    bench::COMMAND,
    bench::MEMORY_COMMAND,
    bench::STEP_COMMAND,
    doctor::COMMAND,
    completions::COMMAND,
    man::COMMAND,
    page::COMMAND,
];

/// The whole program as a command of `clap`.
fn program() -> clap::Command {
    clap::Command::new("qkv")
        .version(env!("CARGO_PKG_VERSION"))
        .about("Attention in Rust: every mechanism, forward and backward, and models that train, translate and explain")
        .after_help(EXIT_CODES)
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommands(COMMANDS.iter().map(|command| command.to_clap()))
}

/// Parses a command line without running it. The error is either requested help or wrong usage, and carries the exit
/// code.
pub(crate) fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<(Command, Box<dyn Run>), Error> {
    let mut program = program();
    let matches = program.try_get_matches_from_mut(arguments)?;
    let Some((name, matches)) = matches.subcommand() else { unreachable!("a command is required") };
    let Some(command) = COMMANDS.iter().find(|command| command.name == name) else {
        unreachable!("`clap` knows the commands of the table alone")
    };
    let matches = Matches(matches);
    let parsed = matches.check(command.arguments).and_then(|()| (command.parse)(&matches));
    parsed.map(|run| (*command, run)).map_err(|misuse| {
        let command = program.find_subcommand_mut(name).expect("just matched");
        command.error(ErrorKind::ArgumentConflict, misuse)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arguments::assert_relations_exist;

    #[test]
    fn clap_accepts_the_tables() {
        program().debug_assert();
    }

    #[test]
    fn relations_between_arguments_name_arguments_and_values_that_exist() {
        COMMANDS.iter().for_each(|command| assert_relations_exist(command.arguments));
    }

    #[test]
    fn every_argument_is_on_its_page() {
        let docs = |page: &str| {
            let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(page);
            std::fs::read_to_string(path).unwrap()
        };
        for (command, page) in [
            ("train", "train.md"),
            ("translate", "translate.md"),
            ("eval", "translate.md"),
            ("explore", "explore.md"),
            ("show", "show.md"),
            ("generate", "generate.md"),
            ("embed", "generate.md"),
            ("classify", "classify.md"),
            ("tag", "generate.md"),
            ("answer", "generate.md"),
            ("inspect", "generate.md"),
            ("convert", "generate.md"),
            ("transcribe", "transcribe.md"),
            ("describe", "describe.md"),
            ("detect", "detect.md"),
            ("speak", "speak.md"),
        ] {
            let text = docs(page);
            let command = COMMANDS.iter().find(|one| one.name == command).unwrap();
            for argument in command.arguments.iter().flat_map(|(_, list)| *list).filter(|one| !one.positional) {
                let (name, option) = (command.name, argument.name);
                assert!(text.contains(&format!("`--{option}")), "docs/{page} does not mention `{name} --{option}`");
            }
        }
    }

    #[test]
    fn parsing_runs_nothing() {
        // A file that cannot exist is not wrong usage: nothing looks for it before the command runs.
        let typed = ["qkv", "run", "--input", "/no/such/file", "--output", "/no/such/folder/out"];
        assert!(parse(typed.map(Into::into)).is_ok());
    }
}
