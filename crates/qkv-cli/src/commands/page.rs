//! The table of `choices` as a page of the guide. The page is generated, committed as `docs/run.md` and held to this by
//! a test; `qkv page > docs/run.md` makes it anew.

use crate::choices::{CHOICES, Choice, EXAMPLES, INPUTS, OUTPUTS, TensorRow};

/// The guide's page about `qkv run`, in Markdown.
///
/// ```
/// assert!(qkv_cli::page().starts_with("# `qkv run`"));
/// ```
pub fn page() -> String {
    let mut page = String::from(
        "# `qkv run`: attention from files\n\n\
         <!-- Made by `cargo run -p qkv-cli -- page > docs/run.md` from crates/qkv-cli/src/choices.rs. -->\n\n\
         `qkv run --input IN.safetensors --output OUT.safetensors [choices]` reads tensors from a file, computes \
         attention forward, and backward if the file holds `d_out`, and writes the results to another. Without \
         `--input` it shows a small example; without `--output` it only reports.\n\n```sh\n",
    );
    for (command, what) in EXAMPLES {
        page += &format!("{command}  # {what}\n");
    }
    page += "```\n\n## Tensors that are read\n\n\
             Letters: `B` sequences, `Hq` and `Hk` query and key heads, `N` queries, `M` keys, `D`, `Dk` and `Dv` \
             the widths of queries, keys and values, `A` that of the additive score. Float tensors may be F32, F64, \
             BF16 or F16 and are converted to the type that is computed in; integers may be of any type. A tensor that \
             is there is used: a `bias` is added, a `mask` masks, `sinks` take their share. One that the choices have \
             no use for is an error; one with an unknown name gets a warning.\n\n";
    page += &tensors(INPUTS);
    page += "\n## Tensors that are written\n\n";
    page += &tensors(OUTPUTS);
    for (heading, choices) in CHOICES {
        page += &format!("\n## {heading}\n\n| choice | what it does |\n| --- | --- |\n");
        page.extend(choices.iter().map(row));
    }
    page + "\n`j` is a key, `p` the place of a query among the keys.\n\n## Exit codes\n\n\
            0 done · 1 an expected failure: a file that cannot be read, tensors that do not go together · 2 misuse of \
            the command line. Errors go to stderr, as `error: …` with a `hint: …` where there is one.\n"
}

fn tensors(rows: &[TensorRow]) -> String {
    let row = |(name, shape, what): &TensorRow| format!("| `{name}` | {shape} | {what} |\n");
    format!("| tensor | shape | what it is |\n| --- | --- | --- |\n{}", rows.iter().map(row).collect::<String>())
}

fn row(choice: &Choice) -> String {
    let mut cell = choice.told();
    for (value, meaning) in choice.values {
        cell += &format!("<br>`{value}`: {meaning}");
    }
    // A bar would end the cell of the table.
    let safe = |text: &str| text.replace('|', "\\|");
    let typed = format!("--{} {}", choice.name, choice.typed());
    format!("| `{}` | {} |\n", safe(typed.trim_end()), safe(&cell))
}
