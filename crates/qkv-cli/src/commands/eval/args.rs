//! What `qkv eval` can be asked, as a table of choices, and what was asked.

use crate::choices::{Choice, Kind, Table};
use crate::searching::{SEARCH, Searching};
use clap::ArgMatches;
use qkv_models::metrics::words::Words;
use std::path::PathBuf;

/// Every choice of `qkv eval`.
pub(crate) const CHOICES: Table = &[
    (
        "What is measured",
        &[
            Choice::new(
                "data",
                Kind::Path,
                "Translate the sources of these pairs, a source, a tab and a target a line",
            )
            .value("DATA.tsv")
            .bare()
            .clashes(&["hypotheses", "references"]),
            Choice::new("model", Kind::Path, "Use the model in this folder; left out, the embedded one")
                .value("DIR")
                .clashes(&["hypotheses"]),
            Choice::new("output", Kind::Path, "Write the translations there").value("FILE").clashes(&["hypotheses"]),
            Choice::new("hypotheses", Kind::Path, "Measure the lines of this file instead, without a model")
                .value("FILE")
                .needs(&["references"]),
            Choice::new("references", Kind::Path, "What they should be, line by line")
                .value("FILE")
                .needs(&["hypotheses"]),
        ],
    ),
    ("Search", SEARCH),
    (
        "What is told",
        &[
            Choice::new("tokenize", Kind::Word, "How BLEU cuts words, by sacrebleu's names")
                .values(&[
                    ("13a", "as the WMT conferences do"),
                    ("zh", "every Chinese character is a word"),
                    ("intl", "every sign and symbol of Unicode is a word"),
                    ("char", "every character is a word"),
                    ("none", "at spaces alone"),
                ])
                .default("13a"),
            Choice::new("json", Kind::Switch, "One JSON object"),
        ],
    ),
    ("How", &[Choice::new("threads", Kind::Threads, "Use N threads; left out, every core").value("N")]),
];

/// What is measured.
#[derive(Debug)]
pub(crate) enum What {
    Model { folder: Option<PathBuf>, data: PathBuf },
    Files { hypotheses: PathBuf, references: PathBuf },
}

/// What `qkv eval` was asked.
#[derive(Debug)]
pub(crate) struct Asked {
    pub what: What,
    pub output: Option<PathBuf>,
    pub searching: Searching,
    pub words: Words,
    pub json: bool,
    pub threads: Option<usize>,
}

impl Asked {
    /// From a command line that holds together; the error says what is missing.
    pub fn read(matches: &ArgMatches) -> Result<Asked, String> {
        let path = |name| matches.get_one::<PathBuf>(name).cloned();
        let what = match (path("data"), path("hypotheses"), path("references")) {
            (Some(data), ..) => What::Model { folder: path("model"), data },
            (_, Some(hypotheses), Some(references)) => What::Files { hypotheses, references },
            _ => return Err("`qkv eval` needs DATA.tsv, or `--hypotheses` and `--references`".into()),
        };
        Ok(Asked {
            what,
            output: path("output"),
            searching: Searching::read(matches),
            words: match matches.get_one::<String>("tokenize").map(String::as_str) {
                Some("zh") => Words::Chinese,
                Some("intl") => Words::International,
                Some("char") => Words::Characters,
                Some("none") => Words::Spaces,
                _ => Words::V13a,
            },
            json: matches.get_flag("json"),
            threads: matches.get_one::<u64>("threads").and_then(|&threads| usize::try_from(threads).ok()),
        })
    }
}

/// What `qkv eval --help` says beyond its choices.
pub(crate) fn after_help() -> String {
    crate::arguments::examples(&[
        ("qkv eval dev.tsv", "BLEU, chrF, exact match and perplexity of the embedded model"),
        ("qkv eval --model runs/dates --greedy dates.tsv --json", "Of a model of your own, for programs"),
        ("qkv eval --hypotheses out.txt --references ref.txt", "Of any translations, as sacrebleu does it"),
    ])
}
