//! The arguments of `qkv explore`.

use crate::arguments::{Argument, Arguments, Kind, Matches, THREADS};
use crate::device::{BATCH_INVARIANT, DEVICE, InferenceDevice};
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;

/// The arguments.
pub(crate) const ARGUMENTS: Arguments = &[
    (
        "Model and input",
        &[
            Argument::new("text", Kind::Text, "Start with this sentence; more can be entered on the page")
                .value("TEXT")
                .positional()
                .repeatable(),
            Argument::new(
                "model",
                Kind::Path,
                "Model: a folder or a `.gguf` file, twice to compare two; embedded by default",
            )
            .value("PATH")
            .repeatable(),
            Argument::new("image", Kind::Path, "Show this image (PNG, JPEG, WebP, BMP) to a vision model")
                .value("FILE")
                .repeatable()
                .requires(&["model"])
                .conflicts(&["text"]),
            Argument::new("audio", Kind::Path, "Run a Whisper model on the first 30 seconds of this recording")
                .value("FILE")
                .repeatable()
                .requires(&["model"])
                .conflicts(&["text", "image"]),
            Argument::new(
                "recording",
                Kind::Path,
                "Open a recording: a file of `qkv show --out`, or one with `q` and `k` or with `weights`",
            )
            .value("FILE.safetensors"),
            Argument::new("tokens", Kind::Path, "Tokens of the recording, one per line")
                .value("FILE")
                .requires(&["recording"]),
            Argument::new("sequence", Kind::SEED, "Sequence of the recording's batch, from 0").value("N").default("0"),
            Argument::new("causal", Kind::Switch, "Treat the recorded attention as causal if its file does not say")
                .requires(&["recording"]),
        ],
    ),
    (
        "Server",
        &[
            Argument::new("port", Kind::Integer(0, 65535), "Port; 0 picks a free one").value("PORT").default("0"),
            Argument::new("address", Kind::Text, "Listen on this address; beyond this machine, requests need a token")
                .value("ADDRESS")
                .default("127.0.0.1"),
            Argument::new("open", Kind::Switch, "Open the page in a browser"),
        ],
    ),
    ("Computation", &[DEVICE, BATCH_INVARIANT, THREADS]),
];

/// Command lines to start from.
pub(crate) const EXAMPLES: &[(&str, &str)] = &[
    ("qkv explore --open", "The embedded model on an example, in the browser"),
    ("qkv explore 我们去年一起去过北京。", "Start with a sentence"),
    ("qkv explore --model runs/dates 'November 15th, 2026'", "Your own model"),
    ("qkv explore --model runs/a --model runs/b", "Two models side by side"),
    ("qkv explore --model runs/digits --image seven.png", "The patches that a vision model attends to"),
    ("qkv explore --model whisper-base --audio talk.flac", "When each word sounds, and what it attends to"),
    ("qkv explore --recording long.safetensors", "A recording of any length"),
];

/// The parsed arguments.
#[derive(Debug)]
pub(crate) struct ExploreArgs {
    pub texts: Vec<String>,
    pub models: Vec<PathBuf>,
    pub images: Vec<PathBuf>,
    pub sounds: Vec<PathBuf>,
    pub recording: Option<PathBuf>,
    pub tokens: Option<PathBuf>,
    pub sequence: usize,
    pub causal: bool,
    pub address: IpAddr,
    pub port: u16,
    pub open: bool,
    pub threads: Option<usize>,
    pub device: InferenceDevice,
}

impl ExploreArgs {
    pub fn parse(matches: &Matches<'_>) -> Result<ExploreArgs, String> {
        let address = match matches.text("address") {
            None => IpAddr::V4(Ipv4Addr::LOCALHOST),
            Some(typed) => typed
                .parse()
                .map_err(|_| format!("`--address {typed}` is not an IP address, such as 127.0.0.1 or 0.0.0.0"))?,
        };
        Ok(ExploreArgs {
            texts: matches.texts("text"),
            models: matches.paths("model"),
            images: matches.paths("image"),
            sounds: matches.paths("audio"),
            recording: matches.path("recording"),
            tokens: matches.path("tokens"),
            sequence: matches.count("sequence").unwrap_or(0),
            causal: matches.switch("causal"),
            address,
            port: matches.count("port").and_then(|port| u16::try_from(port).ok()).unwrap_or(0),
            open: matches.switch("open"),
            threads: matches.count("threads"),
            device: InferenceDevice::parse(matches),
        })
    }
}
