//! The arguments of `qkv generate`.

use crate::arguments::{ADAPTER, Argument, Arguments, Kind, Matches, THREADS};
use crate::device::{BATCH_INVARIANT, DEVICE, InferenceDevice};
use crate::search::{MIN_P, NO_CACHE, NO_REPEAT, REPETITION_PENALTY, SAMPLING_SEED, TEMPERATURE, TOP_K, TOP_P};
use qkv_models::{Generation, Sampling};
use std::path::PathBuf;

const GREEDY: &[&str] = &["greedy"];

/// The arguments.
pub(crate) const ARGUMENTS: Arguments = &[
    (
        "Prompt and model",
        &[
            Argument::new("text", Kind::Text, "Prompt; `--input` or stdin by default")
                .value("TEXT")
                .positional()
                .conflicts(&["input"]),
            Argument::new("model", Kind::Path, "Model: a folder in the Hugging Face layout, or a `.gguf` file")
                .value("PATH")
                .required(),
            ADAPTER,
            Argument::new("input", Kind::Path, "Read the prompt from this file").value("FILE"),
            Argument::new("each-line", Kind::Switch, "Treat each line of `--input` or stdin as a prompt")
                .requires(&["json"])
                .conflicts(&["text", "chat"]),
            Argument::new(
                "together",
                Kind::Integer(1, 1024),
                "Generate N of these texts at a time; on a CPU at most 16",
            )
            .value("N")
            .default("64")
            .requires(&["each-line"]),
            Argument::new("chat", Kind::Switch, "Chat: TEXT, or each line of `--input` or stdin, is a user message"),
            Argument::new("system", Kind::Text, "System message of the chat").value("TEXT").requires(&["chat"]),
        ],
    ),
    (
        "Decoding; defaults come from the model's `generation_config.json`",
        &[
            Argument::new("greedy", Kind::Switch, "Take the likeliest token at each step"),
            TEMPERATURE.conflicts(GREEDY),
            TOP_K.conflicts(GREEDY),
            TOP_P.conflicts(GREEDY),
            MIN_P.conflicts(GREEDY),
            SAMPLING_SEED.conflicts(GREEDY),
            REPETITION_PENALTY,
            NO_REPEAT,
            Argument::new("max-tokens", Kind::TOKENS, "Generate at most N tokens").value("N").default("256"),
            Argument::new("stop", Kind::Text, "Stop before this text").value("TEXT").repeatable(),
        ],
    ),
    (
        "Output",
        &[
            Argument::new("echo", Kind::Switch, "Print the prompt too").conflicts(&["chat"]),
            Argument::new("quiet", Kind::Switch, "Do not print the speed to stderr"),
            Argument::new("stats", Kind::Switch, "Print a breakdown of the time per token to stderr"),
            Argument::new("json", Kind::Switch, "Print one JSON object for each answer, once it is complete"),
            Argument::new(
                "scores",
                Kind::Path,
                "Write the logits after every prompt token to this `.safetensors` file",
            )
            .value("FILE")
            .conflicts(&["chat", "json"]),
            Argument::new("one-by-one", Kind::Switch, "Compute these logits token by token through the KV cache")
                .requires(&["scores"]),
        ],
    ),
    ("Computation", &[DEVICE, BATCH_INVARIANT, THREADS, NO_CACHE]),
];

/// Command lines to start from.
pub(crate) const EXAMPLES: &[(&str, &str)] = &[
    ("qkv generate --model runs/shakespeare 'ROMEO:'", "Continue a prompt"),
    ("qkv generate --model SmolLM2-135M-Instruct.Q4_1.gguf --chat", "Chat, line by line"),
    (
        "qkv generate --model gpt2 --temperature 0.7 --top-k 40 --seed 7 --stop . < start.txt",
        "Sample up to a full stop",
    ),
    ("qkv generate --model gpt2 --greedy --max-tokens 20 --json 'The sea'", "For programs"),
    (
        "qkv generate --model gpt2 --input prompts.txt --each-line --json --device cuda",
        "Many texts, 64 of them at a time",
    ),
];

/// The parsed arguments.
#[derive(Debug)]
pub(crate) struct GenerateArgs {
    pub text: Option<String>,
    pub model: PathBuf,
    pub adapter: Option<PathBuf>,
    pub input: Option<PathBuf>,
    pub each_line: bool,
    pub together: usize,
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
    max_tokens: Option<usize>,
    stop: Vec<String>,
    no_cache: bool,
    pub echo: bool,
    pub quiet: bool,
    pub stats: bool,
    pub json: bool,
    pub scores: Option<PathBuf>,
    pub one_by_one: bool,
    pub threads: Option<usize>,
    pub device: InferenceDevice,
}

impl GenerateArgs {
    pub fn parse(matches: &Matches<'_>) -> GenerateArgs {
        GenerateArgs {
            text: matches.text("text"),
            model: matches.required_path("model"),
            adapter: matches.path("adapter"),
            input: matches.path("input"),
            each_line: matches.switch("each-line"),
            together: matches.count("together").unwrap_or(64),
            chat: matches.switch("chat"),
            system: matches.text("system"),
            greedy: matches.switch("greedy"),
            temperature: matches.number("temperature"),
            top_k: matches.count("top-k"),
            top_p: matches.number("top-p"),
            min_p: matches.number("min-p"),
            seed: matches.seed("seed"),
            repetition_penalty: matches.number("repetition-penalty"),
            no_repeat: matches.count("no-repeat"),
            max_tokens: matches.count("max-tokens"),
            stop: matches.texts("stop"),
            no_cache: matches.switch("no-cache"),
            echo: matches.switch("echo"),
            quiet: matches.switch("quiet"),
            stats: matches.switch("stats"),
            json: matches.switch("json"),
            scores: matches.path("scores"),
            one_by_one: matches.switch("one-by-one"),
            threads: matches.count("threads"),
            device: InferenceDevice::parse(matches),
        }
    }

    /// The model's own settings, overridden by the typed ones.
    pub fn apply_to(&self, own: &Generation) -> Generation {
        let mut settings = own.clone();
        let typed = self.temperature.is_some() || self.top_k.is_some() || self.top_p.is_some() || self.min_p.is_some();
        if self.greedy {
            settings.sample = None;
        } else if typed && settings.sample.is_none() {
            settings.sample = Some(Sampling::default());
        }
        if let Some(sample) = &mut settings.sample {
            sample.temperature = self.temperature.unwrap_or(sample.temperature);
            sample.top_k = self.top_k.unwrap_or(sample.top_k);
            sample.top_p = self.top_p.unwrap_or(sample.top_p);
            sample.min_p = self.min_p.unwrap_or(sample.min_p);
            sample.seed = self.seed.unwrap_or(sample.seed);
        }
        settings.repetition_penalty = self.repetition_penalty.unwrap_or(settings.repetition_penalty);
        settings.no_repeat = self.no_repeat.unwrap_or(settings.no_repeat);
        settings.max_tokens = self.max_tokens.unwrap_or(settings.max_tokens);
        settings.stop.extend_from_slice(&self.stop);
        settings.cache &= !self.no_cache;
        settings
    }
}
