//! The hidden `qkv page`: prints `docs/run.md` from the tables of `qkv run`. A test compares the committed page with
//! it.

use super::run::args::{ARGUMENTS, EXAMPLES, INPUTS, OUTPUTS, TensorRow};
use crate::arguments::Argument;
use crate::command::{Command, Run, Status};
use crate::failure::Failure;
use crate::output::Print;

pub(super) const COMMAND: Command =
    Command::new("page", "Print `docs/run.md`, the page of `qkv run`", &[], |_| Ok(Box::new(PageArgs)))
        .hidden()
        .without_kernels();

struct PageArgs;

impl Run for PageArgs {
    fn run(&self, print: Print<'_>) -> Result<Status, Failure> {
        print(&page()).map(|_| Status::Done)
    }
}

/// The page of `qkv run`, in Markdown.
///
/// ```
/// assert!(qkv_cli::page().starts_with("# `qkv run`"));
/// ```
pub fn page() -> String {
    let mut page = String::from(
        "# `qkv run`: attention on files\n\n\
         <!-- Generated from crates/qkv-cli/src/commands/run/args.rs by `cargo run -p qkv-cli -- page > docs/run.md`. -->\n\n\
         `qkv run --input IN.safetensors --output OUT.safetensors [OPTIONS]` reads tensors from a file, computes attention \
         forward, and backward if the file has `d_out`, and writes the results to another file. Without `--input` it runs a \
         small example; without `--output` it only reports.\n\n```sh\n",
    );
    for (command, what) in EXAMPLES {
        page += &format!("{command}  # {what}\n");
    }
    page += "```\n\n## Input tensors\n\n\
             `B` sequences, `Hq` query heads, `Hk` key heads, `N` queries, `M` keys, `D`, `Dk` and `Dv` the widths of queries, \
             keys and values, `A` the width of the additive score. Float tensors may be F32, F64, BF16 or F16 and are converted \
             to the type of the computation; integers may be of any type. Every tensor that is present is used: a `bias` is \
             added, a `mask` masks, `sinks` take their share. A tensor that the options do not use is an error; an unknown name \
             is a warning.\n\n";
    page += &tensor_table(INPUTS);
    page += "\n## Output tensors\n\n";
    page += &tensor_table(OUTPUTS);
    for (heading, arguments) in ARGUMENTS {
        page += &format!("\n## {heading}\n\n| option | meaning |\n| --- | --- |\n");
        page.extend(arguments.iter().map(argument_row));
    }
    page + "\n`j` is a key, `p` the position of a query relative to the keys.\n\n## Exit codes\n\n\
            0 success · 1 failure: a file that cannot be read, tensors that do not fit together · 2 wrong usage. Errors go to \
            stderr as `error: …`, with a `hint: …` where there is a way out.\n"
}

fn tensor_table(rows: &[TensorRow]) -> String {
    let row = |(name, shape, what): &TensorRow| format!("| `{name}` | {shape} | {what} |\n");
    format!("| tensor | shape | meaning |\n| --- | --- | --- |\n{}", rows.iter().map(row).collect::<String>())
}

fn argument_row(argument: &Argument) -> String {
    let mut cell = argument.describe();
    for (value, meaning) in argument.values {
        cell += &format!("<br>`{value}`: {meaning}");
    }
    // A bar would end the table cell.
    let escaped = |text: &str| text.replace('|', "\\|");
    let typed = format!("--{} {}", argument.name, argument.placeholder());
    format!("| `{}` | {} |\n", escaped(typed.trim_end()), escaped(&cell))
}
