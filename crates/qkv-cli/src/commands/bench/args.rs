//! What `qkv bench` can be asked, as a table of choices, and what was asked.

use super::case::Direction;
use super::shape::Shape;
use crate::choices::{Choice, Kind, Table};
use crate::number::Precision;
use clap::ArgMatches;
use std::path::PathBuf;

/// Fewer alternating rounds than this say little on a machine that others use too.
pub(crate) const FEWEST_ROUNDS: u64 = 5;
/// Where the lengths of `--lengths` begin.
pub(crate) const SHORTEST: u64 = 512;
const LONGEST: u64 = 32_768;
/// Long enough to see a quiet moment, short enough for the whole grid.
const SECONDS: f64 = 1.2;

/// Every choice of `qkv bench`.
pub(crate) const CHOICES: Table =
    &[
        (
            "What is measured; left out, a grid of shapes, types, masks and directions",
            &[
                Choice::new(
                    "shape",
                    Kind::Shape,
                    "Just this shape: B sequences, Hq and Hk heads, N queries, M keys, width D",
                )
                .value("B,Hq,Hk,N,M,D")
                .many(),
                Choice::new("dtype", Kind::Word, "In this type; left out, f32, and for the grid bf16 too")
                    .values(&[
                        ("f32", "32 bits"),
                        ("f64", "64 bits"),
                        ("bf16", "16 bits with the range of f32; sums in f32"),
                        ("f16", "16 bits, IEEE; sums in f32"),
                    ])
                    .many(),
                Choice::new("causal", Kind::Switch, "Causal; left out, every key, and for the grid both"),
                Choice::new("direction", Kind::Word, "In this direction; left out, forward, and for the grid all")
                    .values(&[
                        ("forward", "`Attention::forward`, with what it allocates"),
                        ("backward", "`Attention::backward`, given the output of forward"),
                        ("decode", "`Attention::decode`: N queries at the end of M keys"),
                    ])
                    .many(),
                Choice::new(
                    "lengths",
                    Kind::Path,
                    "Time and memory of one head against its length instead, drawn here as SVG",
                )
                .value("FILE")
                .clashes(&["shape", "dtype", "causal", "direction", "device"]),
                Choice::new("train", Kind::Switch, "Whole training steps of two models instead, f32 and bf16")
                    .clashes(&["shape", "dtype", "causal", "direction", "lengths", "device"]),
                Choice::new("longest", Kind::Length, "Draw lengths from 512 up to N, each twice the last")
                    .value("N")
                    .default("32768")
                    .needs(&["lengths"]),
            ],
        ),
        (
            "How",
            &[
                Choice::new("device", Kind::Word, "Where it is measured").default("cpu").values(&[
                    ("cpu", "here"),
                    (
                        "cuda",
                        "on the first NVIDIA GPU, by its clock and with a cold cache; left out, bf16 over another grid",
                    ),
                ]),
                Choice::new("threads", Kind::Threads, "Use N threads; left out, every core").value("N"),
                Choice::new(
                    "seconds",
                    Kind::Positive,
                    "Each measurement takes S seconds, after two calls that do not count",
                )
                .value("S")
                .default("1.2"),
                Choice::new("against", Kind::Word, "Measure another library in the same run, in turns")
                    .values(&[("torch", "PyTorch's `scaled_dot_product_attention`, by the Python of `--python`")]),
                Choice::new("python", Kind::Path, "The Python to ask for PyTorch")
                    .value("PATH")
                    .default("python3")
                    .needs(&["against"]),
                Choice::new("rounds", Kind::Rounds, "Take turns N times, at least 5")
                    .value("N")
                    .default("5")
                    .needs(&["against"]),
            ],
        ),
        (
            "Report",
            &[
                Choice::new("json", Kind::Switch, "One JSON object a line instead of a table").clashes(&["markdown"]),
                Choice::new("markdown", Kind::Switch, "Tables in Markdown"),
            ],
        ),
    ];

/// How a report looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    Text,
    Markdown,
    Json,
}

/// What `qkv bench` was asked.
#[derive(Debug)]
pub(crate) struct Asked {
    /// None for the grid.
    pub shapes: Vec<Shape>,
    /// None for what goes without saying.
    pub precisions: Vec<Precision>,
    pub causal: bool,
    /// None for what goes without saying.
    pub directions: Vec<Direction>,
    /// Where to draw time and memory against length, and up to which.
    pub lengths: Option<(PathBuf, usize)>,
    /// Training steps instead of calls of attention.
    pub train: bool,
    /// On a GPU.
    pub on_card: bool,
    pub threads: Option<usize>,
    pub seconds: f64,
    /// The Python that runs the anchor, and in how many rounds.
    pub against: Option<(PathBuf, usize)>,
    pub form: Form,
}

impl Asked {
    /// From a command line that holds together.
    pub fn read(matches: &ArgMatches) -> Asked {
        let words = |name| matches.get_many::<String>(name).into_iter().flatten().map(String::as_str);
        let path = |name| matches.get_one::<PathBuf>(name).cloned();
        let count = |name, otherwise: u64| {
            let typed = matches.get_one::<u64>(name).copied().unwrap_or(otherwise);
            usize::try_from(typed).expect("the parser keeps it small")
        };
        Asked {
            shapes: matches.get_many("shape").into_iter().flatten().copied().collect(),
            precisions: once(words("dtype").filter_map(Precision::named)),
            causal: matches.get_flag("causal"),
            directions: once(words("direction").filter_map(Direction::named)),
            lengths: path("lengths").map(|file| (file, count("longest", LONGEST))),
            train: matches.get_flag("train"),
            on_card: words("device").any(|word| word == "cuda"),
            threads: matches.contains_id("threads").then(|| count("threads", 1)),
            seconds: matches.get_one("seconds").copied().unwrap_or(SECONDS),
            against: matches
                .contains_id("against")
                .then(|| (path("python").unwrap_or_else(|| "python3".into()), count("rounds", FEWEST_ROUNDS))),
            form: match (matches.get_flag("json"), matches.get_flag("markdown")) {
                (true, _) => Form::Json,
                (_, true) => Form::Markdown,
                _ => Form::Text,
            },
        }
    }
}

/// Each once, in the order of their first coming.
fn once<T: PartialEq>(all: impl Iterator<Item = T>) -> Vec<T> {
    all.fold(Vec::new(), |mut once, x| {
        if !once.contains(&x) {
            once.push(x);
        }
        once
    })
}

/// What `qkv bench --help` says beyond its choices.
pub(crate) fn after_help() -> String {
    let examples = [
        ("qkv bench", "The grid on this machine, in a minute or two"),
        ("qkv bench --shape 1,8,8,2048,2048,64 --causal --direction backward --json", "Just that"),
        ("qkv bench --shape 1,32,8,1,4096,128 --direction decode --dtype bf16", "A token of a grouped-query model"),
        ("qkv bench --device cuda --against torch", "On a GPU, beside PyTorch's cuDNN"),
        ("qkv bench --threads 2 --against torch --python venv/bin/python --markdown", "docs/performance.md"),
        ("qkv bench --train --seconds 5 --threads 2 --against torch --python venv/bin/python", "Training steps"),
        ("qkv bench --lengths docs/lengths.svg --against torch --python venv/bin/python", "Its picture"),
    ];
    let mut help = String::from(
        "What is measured:\n  \
         Calls that allocate what they return, as the anchor's do. `best ms` is the best call, `median ms` the median.\n  \
         GFLOP/s counts 4·B·Hq·N·M·D forward and 2.5 times that backward, half of it for causal; GB/s the keys and\n  \
         values that decoding reads. `of peak` is the share of what the cores reach with multiply-adds alone (for bf16\n  \
         with tiles, where the CPU has them), or for decoding of what they read if that is what holds it back, measured\n  \
         beside each case.\n  \
         `formula ms` is softmax(QKᵀ)·V with all N × M scores stored, on the same matrix product; f32 forward, up to 1 GiB.\n  \
         `ratio` is PyTorch's time over ours: the best call of either side in each round, the median over rounds.\n\n\
         Examples:\n",
    );
    for (command, what) in examples {
        help += &format!("  # {what}\n  {command}\n");
    }
    help + "\nExit codes: 0 done, 1 an expected failure (a shape without room, no PyTorch), 2 misuse"
}
