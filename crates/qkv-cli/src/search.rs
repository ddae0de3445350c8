//! How sentences are searched for, as it is typed: the choices that `qkv translate` and `qkv eval` share. What is left out
//! is as the model's `generation_config.json` has it.

use crate::choices::{Choice, Kind};
use clap::ArgMatches;
use qkv_models::{Sampling, Search};

/// What goes with `--sample` alone.
const SAMPLE: &[&str] = &["sample"];

/// The choices about searching.
pub(crate) const SEARCH: &[Choice] = &[
    Choice::new("beam", Kind::Count, "Follow N translations side by side; left out, as the model says, mostly 5")
        .value("N"),
    Choice::new("greedy", Kind::Switch, "Take the likeliest token at each step").clashes(&["beam", "sample"]),
    Choice::new(
        "length-penalty",
        Kind::Finite,
        "Divide log-probabilities by length to the power of X: more favours longer",
    )
    .value("X"),
    Choice::new("max-length", Kind::Tokens, "At most N tokens; left out, twice the source and 10 more").value("N"),
    Choice::new("no-repeat", Kind::Whole, "Say no sequence of N tokens twice; 0 allows any").value("N"),
    Choice::new("repetition-penalty", Kind::Positive, "Tokens that were said count X times less; 1 is none").value("X"),
    Choice::new("stop", Kind::Text, "End a translation before this text").value("TEXT").many(),
    Choice::new("sample", Kind::Switch, "Draw tokens instead of searching").clashes(&["beam", "length-penalty"]),
    Choice::new("temperature", Kind::Positive, "Divide scores by T before drawing")
        .value("T")
        .default("1")
        .needs(SAMPLE),
    Choice::new("top-k", Kind::Whole, "Draw from the K likeliest tokens; 0 is all")
        .value("K")
        .default("0")
        .needs(SAMPLE),
    Choice::new("top-p", Kind::Share, "Draw from the likeliest tokens that together have this probability")
        .value("P")
        .default("1")
        .needs(SAMPLE),
    Choice::new("min-p", Kind::Share, "Draw from tokens at least this fraction as likely as the likeliest")
        .value("P")
        .default("0")
        .needs(SAMPLE),
    Choice::new("seed", Kind::Seed, "What is drawn; the same gives the same").value("SEED").default("1").needs(SAMPLE),
    Choice::new(
        "no-cache",
        Kind::Switch,
        "Compute keys and values anew at every step, to check that it makes no difference",
    ),
];

/// What was typed about searching.
#[derive(Clone, Debug, Default)]
pub(crate) struct Searching {
    beam: Option<usize>,
    length_penalty: Option<f64>,
    max_length: Option<usize>,
    no_repeat: Option<usize>,
    repetition_penalty: Option<f64>,
    stop: Vec<String>,
    sample: Option<Sampling>,
    no_cache: bool,
}

impl Searching {
    /// From a command line that holds together.
    pub fn read(matches: &ArgMatches) -> Searching {
        let number = |name| matches.get_one::<f64>(name).copied();
        let whole = |name| matches.get_one::<u64>(name).map(|&n| usize::try_from(n).unwrap_or(usize::MAX));
        let drawn = || {
            let other = Sampling::default();
            Sampling {
                temperature: number("temperature").unwrap_or(other.temperature),
                top_k: whole("top-k").unwrap_or(other.top_k),
                top_p: number("top-p").unwrap_or(other.top_p),
                min_p: number("min-p").unwrap_or(other.min_p),
                seed: matches.get_one("seed").copied().unwrap_or(other.seed),
                before: 0,
            }
        };
        Searching {
            beam: if matches.get_flag("greedy") { Some(1) } else { whole("beam") },
            length_penalty: number("length-penalty"),
            max_length: whole("max-length"),
            no_repeat: whole("no-repeat"),
            repetition_penalty: number("repetition-penalty"),
            stop: matches.get_many("stop").into_iter().flatten().cloned().collect(),
            sample: matches.get_flag("sample").then(drawn),
            no_cache: matches.get_flag("no-cache"),
        }
    }

    /// A model's own search with what was typed, wide enough for `best` translations.
    pub fn over(&self, own: &Search, best: usize) -> Search {
        let mut search = own.clone();
        if let Some(sample) = self.sample {
            (search.sample, search.beam) = (Some(sample), 1);
        } else if self.beam.is_some() {
            search.sample = None;
        }
        search.beam = self.beam.unwrap_or(search.beam).max(best);
        search.length_penalty = self.length_penalty.unwrap_or(search.length_penalty);
        if let Some(most) = self.max_length {
            (search.length_ratio, search.length_extra) = (0.0, most);
        }
        search.no_repeat = self.no_repeat.unwrap_or(search.no_repeat);
        search.repetition_penalty = self.repetition_penalty.unwrap_or(search.repetition_penalty);
        search.stop.extend_from_slice(&self.stop);
        search.cache &= !self.no_cache;
        search
    }
}
