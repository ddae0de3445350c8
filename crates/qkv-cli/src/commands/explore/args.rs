//! What `qkv explore` can be asked, as a table of choices, and what was asked.

use crate::choices::{Choice, Kind, Table};
use crate::failure::Failure;
use clap::ArgMatches;
use qkv::{Attention, Mask};
use qkv_explore::file;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;

/// Every choice of `qkv explore`.
pub(crate) const CHOICES: Table = &[
    (
        "What is shown",
        &[
            Choice::new("text", Kind::Text, "Start with this sentence; more can be typed in the page")
                .value("TEXT")
                .bare()
                .many(),
            Choice::new(
                "model",
                Kind::Path,
                "Ask the model in this folder, or in this GGUF file; given twice, two side by side; left out, the embedded one",
            )
            .value("PATH")
            .many(),
            Choice::new("image", Kind::Path, "Show this image, PNG or JPEG, to a model that sees")
                .value("FILE")
                .many()
                .needs(&["model"])
                .clashes(&["text"]),
            Choice::new(
                "recording",
                Kind::Path,
                "Show this recording: one that `qkv show --out` wrote, or a file with `q` and `k`, or with `weights`",
            )
            .value("FILE.safetensors"),
            Choice::new("tokens", Kind::Path, "The tokens of the recording, one a line")
                .value("FILE")
                .needs(&["recording"]),
            Choice::new("sequence", Kind::Seed, "Which sequence of the recording, counted from 0")
                .value("N")
                .default("0"),
            Choice::new("causal", Kind::Switch, "The recording's attention was causal, where its file does not say")
                .needs(&["recording"]),
        ],
    ),
    (
        "Where",
        &[
            Choice::new("port", Kind::Seed, "Listen on this port; 0 takes any that is free").value("PORT").default("0"),
            Choice::new(
                "address",
                Kind::Text,
                "Listen beyond this machine; every request then needs the token that is printed",
            )
            .value("ADDRESS")
            .default("127.0.0.1"),
            Choice::new("open", Kind::Switch, "Open the page in a browser"),
        ],
    ),
    ("How", &[Choice::new("threads", Kind::Threads, "Use N threads; left out, every core").value("N")]),
];

/// What `qkv explore` was asked.
#[derive(Debug)]
pub(crate) struct Asked {
    pub text: Vec<String>,
    pub models: Vec<PathBuf>,
    pub images: Vec<PathBuf>,
    pub recording: Option<PathBuf>,
    pub tokens: Option<PathBuf>,
    pub sequence: usize,
    pub causal: bool,
    pub address: IpAddr,
    pub port: u16,
    pub open: bool,
    pub threads: Option<usize>,
}

impl Asked {
    /// From a command line that holds together; the error says what is wrong.
    pub fn read(matches: &ArgMatches) -> Result<Asked, String> {
        let path = |name| matches.get_one::<PathBuf>(name).cloned();
        let whole = |name| matches.get_one::<u64>(name).copied();
        let port = whole("port").unwrap_or(0);
        let address = matches.get_one::<String>("address").map(|text| text.parse().map_err(|_| text.clone()));
        Ok(Asked {
            text: matches.get_many("text").into_iter().flatten().cloned().collect(),
            models: matches.get_many("model").into_iter().flatten().cloned().collect(),
            images: matches.get_many("image").into_iter().flatten().cloned().collect(),
            recording: path("recording"),
            tokens: path("tokens"),
            sequence: whole("sequence").and_then(|n| usize::try_from(n).ok()).unwrap_or(0),
            causal: matches.get_flag("causal"),
            address: address
                .unwrap_or(Ok(IpAddr::V4(Ipv4Addr::LOCALHOST)))
                .map_err(|text| format!("`--address {text}` is no address, such as 127.0.0.1 or 0.0.0.0"))?,
            port: u16::try_from(port).map_err(|_| format!("`--port {port}` is above 65535"))?,
            open: matches.get_flag("open"),
            threads: whole("threads").and_then(|n| usize::try_from(n).ok()),
        })
    }

    /// What the file of the recording does not say by itself.
    pub fn file(&self) -> Result<file::Asked, Failure> {
        Ok(file::Asked {
            tokens: self.tokens.as_deref().map(super::lines).transpose()?,
            sequence: self.sequence,
            attention: self.causal.then(|| Attention::scaled_dot().mask(Mask::causal())),
        })
    }
}

/// What `qkv explore --help` says beyond its choices.
pub(crate) fn after_help() -> String {
    crate::arguments::examples(&[
        ("qkv explore --open", "The embedded model on an example, in the browser"),
        ("qkv explore 我们去年一起去过北京。", "Start with a sentence"),
        ("qkv explore --model runs/dates 'November 15th, 2026'", "A model of your own"),
        ("qkv explore --model runs/a --model runs/b", "Two models side by side"),
        ("qkv explore --model runs/digits --image seven.png", "What a model that sees looked at"),
        ("qkv explore --recording long.safetensors", "A recorded run, of any length"),
    ])
}
