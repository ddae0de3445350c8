//! What `qkv generate` can be asked, as a table of choices, and what was asked.

use crate::choices::{Choice, Kind, Table};
use clap::ArgMatches;
use qkv_models::{Generation, Sampling};
use std::path::PathBuf;

/// Every choice of `qkv generate`.
pub(crate) const CHOICES: Table = &[
    (
        "What is continued, and by which model",
        &[
            Choice::new("text", Kind::Text, "Go on with this; left out, with `--input`, or else with what stdin says")
                .value("TEXT")
                .bare()
                .clashes(&["input"]),
            Choice::new("model", Kind::Path, "The model: a folder in the Hugging Face layout, or a `.gguf` file")
                .value("PATH"),
            Choice::new("input", Kind::Path, "Read the prompt from here").value("FILE"),
            Choice::new(
                "chat",
                Kind::Switch,
                "Hold a conversation, by the model's chat template: TEXT, or each line of `--input` or stdin, is what you say",
            ),
            Choice::new("system", Kind::Text, "What the conversation begins with").value("TEXT").needs(&["chat"]),
        ],
    ),
    (
        "How tokens are chosen; left out, as the model's `generation_config.json` says",
        &[
            Choice::new("greedy", Kind::Switch, "Take the likeliest token at each step"),
            Choice::new("temperature", Kind::Positive, "Divide scores by T before drawing")
                .value("T")
                .clashes(&["greedy"]),
            Choice::new("top-k", Kind::Whole, "Draw from the K likeliest tokens; 0 is all")
                .value("K")
                .clashes(&["greedy"]),
            Choice::new("top-p", Kind::Share, "Draw from the likeliest tokens that together have this probability")
                .value("P")
                .clashes(&["greedy"]),
            Choice::new("min-p", Kind::Share, "Draw from tokens at least this fraction as likely as the likeliest")
                .value("P")
                .clashes(&["greedy"]),
            Choice::new("seed", Kind::Seed, "What is drawn; the same gives the same")
                .value("SEED")
                .default("1")
                .clashes(&["greedy"]),
            Choice::new("repetition-penalty", Kind::Positive, "Tokens that were said count X times less; 1 is none")
                .value("X"),
            Choice::new("no-repeat", Kind::Whole, "Say no sequence of N tokens twice; 0 allows any").value("N"),
            Choice::new("max-tokens", Kind::Tokens, "Say at most N tokens").value("N").default("256"),
            Choice::new("stop", Kind::Text, "End before this text").value("TEXT").many(),
        ],
    ),
    (
        "What is told",
        &[
            Choice::new("echo", Kind::Switch, "The prompt too").clashes(&["chat"]),
            Choice::new("quiet", Kind::Switch, "No speed at the end, on stderr"),
            Choice::new("json", Kind::Switch, "One JSON object for each answer, when it is whole"),
            Choice::new(
                "scores",
                Kind::Path,
                "Write the scores after every token of the prompt to this `.safetensors` file, and say nothing",
            )
            .value("FILE")
            .clashes(&["chat", "json"]),
            Choice::new(
                "one-by-one",
                Kind::Switch,
                "Compute those scores token by token through the cache, as text is written, and not all at once",
            )
            .needs(&["scores"]),
        ],
    ),
    (
        "How",
        &[
            Choice::new("threads", Kind::Threads, "Use N threads; left out, every core").value("N"),
            Choice::new(
                "no-cache",
                Kind::Switch,
                "Compute keys and values anew at every step, to check that it makes no difference",
            ),
        ],
    ),
];

/// What `qkv generate` was asked.
#[derive(Debug)]
pub(crate) struct Asked {
    pub text: Option<String>,
    pub model: PathBuf,
    pub input: Option<PathBuf>,
    pub chat: bool,
    pub system: Option<String>,
    greedy: bool,
    temperature: Option<f64>,
    top_k: Option<usize>,
    top_p: Option<f64>,
    min_p: Option<f64>,
    seed: Option<u64>,
    repetition_penalty: Option<f64>,
    no_repeat: Option<usize>,
    most: Option<usize>,
    stop: Vec<String>,
    no_cache: bool,
    pub echo: bool,
    pub quiet: bool,
    pub json: bool,
    pub scores: Option<PathBuf>,
    pub one_by_one: bool,
    pub threads: Option<usize>,
}

impl Asked {
    /// From a command line that holds together; the error says what is missing.
    pub fn read(matches: &ArgMatches) -> Result<Asked, String> {
        let path = |name| matches.get_one::<PathBuf>(name).cloned();
        let number = |name| matches.get_one::<f64>(name).copied();
        let whole = |name| matches.get_one::<u64>(name).map(|&n| usize::try_from(n).unwrap_or(usize::MAX));
        Ok(Asked {
            text: matches.get_one("text").cloned(),
            model: path("model").ok_or("`qkv generate` needs `--model PATH`")?,
            input: path("input"),
            chat: matches.get_flag("chat"),
            system: matches.get_one("system").cloned(),
            greedy: matches.get_flag("greedy"),
            temperature: number("temperature"),
            top_k: whole("top-k"),
            top_p: number("top-p"),
            min_p: number("min-p"),
            seed: matches.get_one("seed").copied(),
            repetition_penalty: number("repetition-penalty"),
            no_repeat: whole("no-repeat"),
            most: whole("max-tokens"),
            stop: matches.get_many("stop").into_iter().flatten().cloned().collect(),
            no_cache: matches.get_flag("no-cache"),
            echo: matches.get_flag("echo"),
            quiet: matches.get_flag("quiet"),
            json: matches.get_flag("json"),
            scores: path("scores"),
            one_by_one: matches.get_flag("one-by-one"),
            threads: whole("threads"),
        })
    }

    /// A model's own settings with what was typed.
    pub fn over(&self, own: &Generation) -> Generation {
        let mut how = own.clone();
        let typed = self.temperature.is_some() || self.top_k.is_some() || self.top_p.is_some() || self.min_p.is_some();
        if self.greedy {
            how.sample = None;
        } else if typed && how.sample.is_none() {
            how.sample = Some(Sampling::default());
        }
        if let Some(sample) = &mut how.sample {
            sample.temperature = self.temperature.unwrap_or(sample.temperature);
            sample.top_k = self.top_k.unwrap_or(sample.top_k);
            sample.top_p = self.top_p.unwrap_or(sample.top_p);
            sample.min_p = self.min_p.unwrap_or(sample.min_p);
            sample.seed = self.seed.unwrap_or(sample.seed);
        }
        how.repetition_penalty = self.repetition_penalty.unwrap_or(how.repetition_penalty);
        how.no_repeat = self.no_repeat.unwrap_or(how.no_repeat);
        how.max_tokens = self.most.unwrap_or(how.max_tokens);
        how.stop.extend_from_slice(&self.stop);
        how.cache &= !self.no_cache;
        how
    }
}

/// What `qkv generate --help` says beyond its choices.
pub(crate) fn after_help() -> String {
    crate::arguments::examples(&[
        ("qkv generate --model runs/shakespeare 'ROMEO:'", "A model of your own goes on"),
        ("qkv generate --model SmolLM2-135M-Instruct.Q4_1.gguf --chat", "A conversation, line by line"),
        (
            "qkv generate --model gpt2 --temperature 0.7 --top-k 40 --seed 7 --stop . < start.txt",
            "Drawn, up to a full stop",
        ),
        ("qkv generate --model gpt2 --greedy --max-tokens 20 --json 'The sea'", "For programs"),
    ])
}
