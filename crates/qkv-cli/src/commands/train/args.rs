//! What `qkv train` can be asked, as a table of choices, and what was asked.

use crate::choices::{Choice, Kind, Table};
use clap::ArgMatches;
use std::path::PathBuf;

/// Every choice of `qkv train`.
pub(crate) const CHOICES: Table = &[
    (
        "What is trained",
        &[
            Choice::new("recipe", Kind::Path, "The recipe, a TOML file; with `--resume`, or the folder of a run")
                .value("RECIPE")
                .bare(),
            Choice::new("out", Kind::Path, "The folder of the run; left out, `runs/NAME` by the recipe's name")
                .value("DIR"),
            Choice::new("set", Kind::Text, "Change a setting of the recipe, as `train.lr=3e-4`")
                .value("PATH=VALUE")
                .many(),
            Choice::new(
                "seed",
                Kind::Seed,
                "What is drawn: the same gives the same weights, bit for bit; left out, the recipe's",
            )
            .value("SEED")
            .clashes(&["resume"]),
            Choice::new("resume", Kind::Switch, "Go on from the last checkpoint, as if the run had never stopped"),
        ],
    ),
    (
        "How",
        &[
            Choice::new("threads", Kind::Threads, "Use N threads; left out, every core").value("N"),
            Choice::new("log-format", Kind::Word, "How progress is told, on stderr")
                .values(&[
                    ("auto", "a bar at a terminal, else plain lines"),
                    ("bar", "a bar, with a line for each validation"),
                    ("plain", "lines"),
                    ("json", "JSON, one object a line"),
                ])
                .default("auto"),
            Choice::new("quiet", Kind::Switch, "Tell no progress").clashes(&["log-format"]),
            Choice::new("json", Kind::Switch, "The report at the end as one JSON object"),
        ],
    ),
];

/// How progress is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    Auto,
    Bar,
    Plain,
    Json,
    Quiet,
}

/// What `qkv train` was asked.
#[derive(Debug)]
pub(crate) struct Asked {
    /// A recipe, or the folder of a run.
    pub recipe: PathBuf,
    pub out: Option<PathBuf>,
    /// Changes to the recipe, the seed among them.
    pub changes: Vec<String>,
    pub resume: bool,
    pub threads: Option<usize>,
    pub form: Form,
    pub json: bool,
}

impl Asked {
    /// From a command line that holds together; the error says what is missing.
    pub fn read(matches: &ArgMatches) -> Result<Asked, String> {
        let path = |name| matches.get_one::<PathBuf>(name).cloned();
        let mut changes: Vec<String> = matches.get_many("set").into_iter().flatten().cloned().collect();
        changes.extend(matches.get_one::<u64>("seed").map(|seed| format!("seed={seed}")));
        Ok(Asked {
            recipe: path("recipe").ok_or("`qkv train` needs a RECIPE, or `--resume` and the folder of a run")?,
            out: path("out"),
            changes,
            resume: matches.get_flag("resume"),
            threads: matches.get_one::<u64>("threads").and_then(|&threads| usize::try_from(threads).ok()),
            form: match matches.get_one::<String>("log-format").map(String::as_str) {
                _ if matches.get_flag("quiet") => Form::Quiet,
                Some("bar") => Form::Bar,
                Some("plain") => Form::Plain,
                Some("json") => Form::Json,
                _ => Form::Auto,
            },
            json: matches.get_flag("json"),
        })
    }
}

/// What `qkv train --help` says beyond its choices.
pub(crate) fn after_help() -> String {
    let help = "A run's folder holds the model as soon as one was measured (`config.json`, `model.safetensors`, `tokenizer.json`,\n\
                `generation_config.json`: the best so far), `recipe.toml` with every setting, `metrics.jsonl` and `checkpoints/`.\n\
                Ctrl-C (SIGINT) and SIGTERM save, then end with exit code 130; a second one ends at once.\n\n";
    help.to_owned()
        + &crate::arguments::examples(&[
            ("qkv train recipes/dates.toml", "Dates in words to ISO form: the program makes its own data"),
            (
                "qkv train recipes/dates.toml --out runs/small --set model.d_model=64 --set train.steps=400",
                "A change or two",
            ),
            ("qkv train recipes/dates.toml --resume", "Go on with `runs/dates`, or begin it"),
            ("qkv train --resume runs/dates --set train.steps=2000", "Go on for longer"),
            ("qkv train recipes/dates.toml --log-format json 2> log.jsonl", "Progress for programs"),
        ])
}
