//! Decoding options that `qkv translate` and `qkv eval` share: beam search and sampling. Options that are not given
//! come from the model's `generation_config.json`.

use crate::arguments::{Argument, Kind, Matches};
use qkv_models::{Sampling, Search};

const SAMPLE: &[&str] = &["sample"];

/// The arguments.
pub(crate) const SEARCH: &[Argument] = &[
    Argument::new("beam", Kind::Integer(1, 1000), "Beam size; the model's own by default, usually 5").value("N"),
    Argument::new("greedy", Kind::Switch, "Take the likeliest token at each step").conflicts(&["beam", "sample"]),
    Argument::new("length-penalty", Kind::Finite, "Divide log-probabilities by length^X; larger favors longer output")
        .value("X"),
    Argument::new("max-length", Kind::TOKENS, "Maximum tokens; twice the source plus 10 by default").value("N"),
    NO_REPEAT,
    REPETITION_PENALTY,
    Argument::new("stop", Kind::Text, "Stop a translation before this text").value("TEXT").repeatable(),
    Argument::new("sample", Kind::Switch, "Sample tokens instead of searching").conflicts(&["beam", "length-penalty"]),
    TEMPERATURE.default("1").requires(SAMPLE),
    TOP_K.default("0").requires(SAMPLE),
    TOP_P.default("1").requires(SAMPLE),
    MIN_P.default("0").requires(SAMPLE),
    SAMPLING_SEED.requires(SAMPLE),
    NO_CACHE,
];

/// The arguments that `qkv generate` shares.
pub(crate) const TEMPERATURE: Argument =
    Argument::new("temperature", Kind::Positive, "Divide logits by T before sampling").value("T");
pub(crate) const TOP_K: Argument =
    Argument::new("top-k", Kind::WHOLE, "Sample from the K likeliest tokens; 0 means all").value("K");
pub(crate) const TOP_P: Argument =
    Argument::new("top-p", Kind::Fraction, "Sample from the likeliest tokens with a total probability of P").value("P");
pub(crate) const MIN_P: Argument =
    Argument::new("min-p", Kind::Fraction, "Sample from tokens at least P times as likely as the likeliest").value("P");
pub(crate) const SAMPLING_SEED: Argument =
    Argument::new("seed", Kind::SEED, "Seed of the sampling; the same seed gives the same text")
        .value("SEED")
        .default("1");
pub(crate) const NO_REPEAT: Argument =
    Argument::new("no-repeat", Kind::WHOLE, "Never repeat an n-gram of N tokens; 0 turns it off").value("N");
pub(crate) const REPETITION_PENALTY: Argument =
    Argument::new("repetition-penalty", Kind::Positive, "Penalize tokens that already occurred; 1 turns it off")
        .value("X");
pub(crate) const NO_CACHE: Argument =
    Argument::new("no-cache", Kind::Switch, "Recompute keys and values at every step, to check the cache");

/// The typed decoding options.
#[derive(Clone, Debug, Default)]
pub(crate) struct SearchArgs {
    beam: Option<usize>,
    length_penalty: Option<f64>,
    max_length: Option<usize>,
    no_repeat: Option<usize>,
    repetition_penalty: Option<f64>,
    stop: Vec<String>,
    sample: Option<Sampling>,
    no_cache: bool,
}

impl SearchArgs {
    pub fn parse(matches: &Matches<'_>) -> SearchArgs {
        let sampling = || {
            let default = Sampling::default();
            Sampling {
                temperature: matches.number("temperature").unwrap_or(default.temperature),
                top_k: matches.count("top-k").unwrap_or(default.top_k),
                top_p: matches.number("top-p").unwrap_or(default.top_p),
                min_p: matches.number("min-p").unwrap_or(default.min_p),
                seed: matches.seed("seed").unwrap_or(default.seed),
                before: 0,
            }
        };
        SearchArgs {
            beam: if matches.switch("greedy") { Some(1) } else { matches.count("beam") },
            length_penalty: matches.number("length-penalty"),
            max_length: matches.count("max-length"),
            no_repeat: matches.count("no-repeat"),
            repetition_penalty: matches.number("repetition-penalty"),
            stop: matches.texts("stop"),
            sample: matches.switch("sample").then(sampling),
            no_cache: matches.switch("no-cache"),
        }
    }

    /// The model's own search settings, overridden by the typed options, with a beam wide enough for `n_best`
    /// translations.
    pub fn apply_to(&self, own: &Search, n_best: usize) -> Search {
        let mut search = own.clone();
        if let Some(sample) = self.sample {
            (search.sample, search.beam) = (Some(sample), 1);
        } else if self.beam.is_some() {
            search.sample = None;
        }
        search.beam = self.beam.unwrap_or(search.beam).max(n_best);
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
