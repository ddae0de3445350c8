//! The arguments of `qkv train`.

use crate::arguments::{Argument, Arguments, Kind, Matches, THREADS};
use crate::device::{self, DEVICE};
use crate::ranks::{RANK_TIMEOUT, RANKS};
use qkv_nn::Device;
use std::path::PathBuf;
use std::time::Duration;

/// The arguments.
pub(crate) const ARGUMENTS: Arguments = &[
    (
        "Run",
        &[
            Argument::new("recipe", Kind::Path, "Recipe, a TOML file; with `--resume`, also the folder of a run")
                .value("RECIPE")
                .positional()
                .required(),
            Argument::new("out", Kind::Path, "Folder of the run; `runs/NAME` by default, with the recipe's name")
                .value("DIR"),
            Argument::new("set", Kind::Text, "Override a setting of the recipe, as in `train.lr=3e-4`")
                .value("PATH=VALUE")
                .repeatable(),
            Argument::new(
                "seed",
                Kind::SEED,
                "Seed; the same seed gives bit-identical weights; the recipe's by default",
            )
            .value("SEED")
            .conflicts(&["resume"]),
            Argument::new("resume", Kind::Switch, "Continue from the last checkpoint, as if the run had never stopped"),
            Argument::new(
                "dry-run",
                Kind::Switch,
                "Print data, model and which weights of `model.from` are used, added or left out; do not train",
            )
            .conflicts(&["resume", "out"]),
            Argument::new(
                "sharded",
                Kind::Switch,
                "Each rank writes its part of a checkpoint, into a folder that all share; as `parallel.checkpoint=sharded`",
            ),
            Argument::new("checkpoint", Kind::SEED, "Step of the checkpoint to continue from; the newest by default")
                .value("STEP")
                .requires(&["resume"]),
        ],
    ),
    (
        "Computation and progress",
        &[
            DEVICE,
            THREADS,
            RANKS,
            RANK_TIMEOUT,
            Argument::new("log-format", Kind::Word, "Format of progress, on stderr")
                .values(&[
                    ("auto", "a bar on a terminal, else plain lines"),
                    ("bar", "a bar, with a line for each validation"),
                    ("plain", "lines"),
                    ("json", "one JSON object per line"),
                ])
                .default("auto"),
            Argument::new("quiet", Kind::Switch, "No progress").conflicts(&["log-format"]),
            Argument::new("json", Kind::Switch, "Print the summary at the end as one JSON object"),
        ],
    ),
];

/// Command lines to start from.
pub(crate) const EXAMPLES: &[(&str, &str)] = &[
    ("qkv train recipes/dates.toml", "Dates in words to ISO format; the data is generated"),
    (
        "qkv train recipes/dates.toml --out runs/small --set model.d_model=64 --set train.steps=400",
        "With other settings",
    ),
    ("qkv train recipes/dates.toml --resume", "Continue `runs/dates`, or start it"),
    ("qkv train --resume runs/dates --set train.steps=2000", "Continue for longer"),
    ("qkv train recipes/ner-minilm.toml --dry-run", "Fine-tuning: what of the model would be used"),
    (
        "qkv train recipes/dates.toml --set train.accumulate=4 --ranks 4",
        "Four processes on this machine, with the weights of one",
    ),
    (
        "qkv train recipes/dates.toml --set train.accumulate=4 --ranks 4 --set parallel.optimizer=sharded --sharded",
        "The same with the optimizer's state and checkpoints in four parts",
    ),
    ("qkv train recipes/dates.toml --log-format json 2> log.jsonl", "Progress for programs"),
];

/// What `--help` explains beyond the arguments.
pub(crate) fn notes() -> String {
    "The folder of a run holds the best model so far (`config.json`, `model.safetensors`, `tokenizer.json`,\n\
     `generation_config.json`), `recipe.toml` with every setting, `metrics.jsonl`, and `checkpoints/`.\n\
     Ctrl-C (SIGINT) and SIGTERM save and exit with 130; a second signal exits at once.\n"
        .into()
}

/// The format of progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LogFormat {
    Auto,
    Bar,
    Plain,
    Json,
    Quiet,
}

/// The parsed arguments.
#[derive(Debug)]
pub(crate) struct TrainArgs {
    /// A recipe, or the folder of a run.
    pub recipe: PathBuf,
    pub out: Option<PathBuf>,
    /// Settings that override the recipe, the seed among them.
    pub overrides: Vec<String>,
    pub resume: bool,
    /// Only say what would be trained.
    pub dry_run: bool,
    /// The checkpoint to resume from; the newest by default.
    pub checkpoint: Option<u64>,
    pub threads: Option<usize>,
    pub device: Device,
    /// Ranks to start on this machine.
    pub ranks: Option<usize>,
    pub rank_timeout: Duration,
    pub log_format: LogFormat,
    pub json: bool,
}

impl TrainArgs {
    pub fn parse(matches: &Matches<'_>) -> TrainArgs {
        let mut overrides = matches.texts("set");
        overrides.extend(matches.switch("sharded").then(|| "parallel.checkpoint=sharded".to_owned()));
        overrides.extend(matches.seed("seed").map(|seed| format!("seed={seed}")));
        TrainArgs {
            recipe: matches.required_path("recipe"),
            out: matches.path("out"),
            overrides,
            resume: matches.switch("resume"),
            dry_run: matches.switch("dry-run"),
            checkpoint: matches.seed("checkpoint"),
            threads: matches.count("threads"),
            device: device::parse(matches),
            ranks: matches.count("ranks"),
            rank_timeout: Duration::from_secs(matches.count("rank-timeout").unwrap_or(30) as u64),
            log_format: match matches.word("log-format") {
                _ if matches.switch("quiet") => LogFormat::Quiet,
                Some("bar") => LogFormat::Bar,
                Some("plain") => LogFormat::Plain,
                Some("json") => LogFormat::Json,
                _ => LogFormat::Auto,
            },
            json: matches.switch("json"),
        }
    }
}
