//! What `qkv translate` can be asked, as a table of choices, and what was asked.

use crate::choices::{Choice, Kind, Table};
use crate::searching::{SEARCH, Searching};
use clap::ArgMatches;
use std::path::PathBuf;

/// Every choice of `qkv translate`.
pub(crate) const CHOICES: Table = &[
    (
        "What is translated, and by which model",
        &[
            Choice::new("text", Kind::Text, "Translate this; left out, the lines of `--input`, or else of stdin")
                .value("TEXT")
                .bare()
                .many()
                .clashes(&["input"]),
            Choice::new("model", Kind::Path, "Use the model in this folder; left out, the embedded one").value("DIR"),
            Choice::new("input", Kind::Path, "Read lines from here").value("FILE"),
            Choice::new("output", Kind::Path, "Write there; left out, to stdout").value("FILE"),
        ],
    ),
    ("Search", SEARCH),
    (
        "What is told: one line for each line, an empty one for an empty one",
        &[
            Choice::new("n-best", Kind::Count, "The N best, each as `LINE⇥SCORE⇥TEXT`").value("N").default("1").clashes(&["greedy"]),
            Choice::new("scores", Kind::Switch, "The score before each translation, as `SCORE⇥TEXT`"),
            Choice::new("align", Kind::Word, "Where each word looked; at a terminal it is drawn for TEXT")
                .values(&[
                    ("draw", "a grid under the translation: its words down, those of the source across"),
                    ("pharaoh", "`TEXT⇥0-0 1-2 …`: source and target word, counted from 0, of the largest weight of each target word and of every weight of at least 0.3"),
                    ("none", "nowhere"),
                ])
                .alone("draw"),
            Choice::new("json", Kind::Switch, "One JSON object for each line, with tokens, scores, alternatives and alignment")
                .clashes(&["scores"]),
        ],
    ),
    ("How", &[Choice::new("threads", Kind::Threads, "Use N threads; left out, every core").value("N")]),
];

/// How alignments are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Align {
    Draw,
    Pharaoh,
    None,
}

/// What `qkv translate` was asked.
#[derive(Debug)]
pub(crate) struct Asked {
    pub texts: Vec<String>,
    pub model: Option<PathBuf>,
    pub input: Option<PathBuf>,
    pub output: Option<PathBuf>,
    pub searching: Searching,
    pub n_best: usize,
    pub scores: bool,
    /// Nothing where it was not said.
    pub align: Option<Align>,
    pub json: bool,
    pub threads: Option<usize>,
}

impl Asked {
    /// From a command line that holds together.
    pub fn read(matches: &ArgMatches) -> Asked {
        let path = |name| matches.get_one::<PathBuf>(name).cloned();
        let whole = |name| matches.get_one::<u64>(name).and_then(|&n| usize::try_from(n).ok());
        Asked {
            texts: matches.get_many("text").into_iter().flatten().cloned().collect(),
            model: path("model"),
            input: path("input"),
            output: path("output"),
            searching: Searching::read(matches),
            n_best: whole("n-best").unwrap_or(1),
            scores: matches.get_flag("scores"),
            align: matches.get_one::<String>("align").map(|word| match &word[..] {
                "draw" => Align::Draw,
                "pharaoh" => Align::Pharaoh,
                _ => Align::None,
            }),
            json: matches.get_flag("json"),
            threads: whole("threads"),
        }
    }
}

/// What `qkv translate --help` says beyond its choices.
pub(crate) fn after_help() -> String {
    crate::arguments::examples(&[
        ("qkv translate 好久不见", "A sentence; at a terminal, with its alignment drawn"),
        ("qkv translate < zh.txt > en.txt", "A file, line by line"),
        ("qkv translate --model runs/dates --align 'November 15th, 2026'", "A model of your own, and where it looked"),
        ("qkv translate --input zh.txt --n-best 3 --beam 8 --output en.tsv", "The three best of each line"),
        ("qkv translate --sample --temperature 0.8 --top-p 0.9 --seed 7 好久不见", "Drawn, and the same every time"),
        ("qkv translate --json --align=pharaoh < zh.txt", "Tokens, scores and links, for programs"),
    ])
}
