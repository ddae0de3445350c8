//! The arguments of `qkv bench`.

use super::case::Direction;
use super::shape::Shape;
use crate::arguments::{Argument, Arguments, Kind, Matches, THREADS};
use crate::dtype::Precision;
use crate::ranks::{RANK_TIMEOUT, RANKS};
use clap::value_parser;
use std::path::PathBuf;
use std::time::Duration;

/// Fewer alternating rounds say little on a shared machine.
const FEWEST_ROUNDS: u64 = 5;
/// The first length of `--lengths`.
pub(crate) const SHORTEST: u64 = 512;
const LONGEST: usize = 32_768;
/// Long enough to catch a quiet moment, short enough for the whole grid.
const SECONDS: f64 = 1.2;

/// The arguments.
pub(crate) const ARGUMENTS: Arguments = &[
    (
        "Cases; by default a grid of shapes, types, masks and directions",
        &[
            Argument::new("shape", Kind::Custom(|| value_parser!(Shape).into()), "Only this shape")
                .value("B,Hq,Hk,N,M,D")
                .repeatable(),
            Argument::new("dtype", Kind::Word, "Element type; f32 by default, and bf16 too in the grid")
                .values(&[
                    ("f32", "32 bits"),
                    ("f64", "64 bits"),
                    ("bf16", "16 bits with the range of f32, accumulated in f32"),
                    ("f16", "16 bits, IEEE, accumulated in f32"),
                ])
                .repeatable(),
            Argument::new(
                "draw",
                Kind::Integer(0, u64::MAX),
                "24 shapes drawn at random instead of the grid, by this seed",
            )
            .value("SEED")
            .conflicts(&["shape", "causal", "lengths", "train", "device"]),
            Argument::new("causal", Kind::Switch, "Causal mask; full by default, both in the grid"),
            Argument::new("direction", Kind::Word, "Direction; forward by default, all in the grid")
                .values(&[
                    ("forward", "`Attention::forward`, with its allocations"),
                    ("backward", "`Attention::backward`, given the output of forward"),
                    ("decode", "`Attention::decode`: N queries at the end of M keys"),
                ])
                .repeatable(),
            Argument::new("lengths", Kind::Path, "Time and memory of one head against its length, plotted as SVG")
                .value("FILE")
                .conflicts(&["shape", "dtype", "causal", "direction", "device"]),
            Argument::new("scaling", Kind::Path, "Speed-up against threads, from one to all, plotted as SVG")
                .value("FILE")
                .conflicts(&["lengths", "train", "device", "against", "ranks"]),
            Argument::new("train", Kind::Switch, "Whole training steps of some models, in f32 and bf16").conflicts(&[
                "shape",
                "dtype",
                "causal",
                "direction",
                "lengths",
            ]),
            Argument::new("images", Kind::Switch, "Passes of ResNet-50 over one image and over eight, on the CPU")
                .conflicts(&[
                    "shape",
                    "dtype",
                    "draw",
                    "causal",
                    "direction",
                    "lengths",
                    "scaling",
                    "train",
                    "device",
                    "ranks",
                ]),
            Argument::new("longest", Kind::Integer(SHORTEST, 1 << 20), "Lengths from 512 to N, doubling")
                .value("N")
                .default("32768")
                .requires(&["lengths"]),
        ],
    ),
    (
        "Measurement",
        &[
            Argument::new("device", Kind::Word, "Device").default("cpu").values(&[
                ("cpu", "this CPU"),
                (
                    "cuda",
                    "the first NVIDIA GPU, by its own clock and with a cold cache; bf16 and another grid by default",
                ),
            ]),
            THREADS,
            RANKS.conflicts(&["dtype", "direction", "lengths", "device", "against"]),
            RANK_TIMEOUT,
            Argument::new(
                "micro-batches",
                Kind::Integer(1, 1 << 16),
                "Micro-batches of a training step, over all ranks; 4 for each rank by default",
            )
            .value("N")
            .requires(&["train", "ranks"]),
            Argument::new("rank-way", Kind::Word, "Divide attention only in this way; in every way by default")
                .values(&[
                    ("heads", "by heads"),
                    ("gathered", "by rows, keys gathered"),
                    ("ring", "by rows, in a ring"),
                ])
                .requires(&["ranks"])
                .conflicts(&["train"]),
            Argument::new("seconds", Kind::Positive, "Seconds per measurement, after two warm-up calls")
                .value("S")
                .default("1.2"),
            Argument::new("against", Kind::Word, "Measure another library in alternating rounds")
                .values(&[("torch", "PyTorch's `scaled_dot_product_attention`, in the Python of `--python`")]),
            Argument::new("python", Kind::Path, "Python interpreter that has PyTorch")
                .value("PATH")
                .default("python3")
                .requires(&["against"]),
            Argument::new("rounds", Kind::Integer(FEWEST_ROUNDS, 1000), "Alternating rounds, at least 5")
                .value("N")
                .default("5")
                .requires(&["against"]),
        ],
    ),
    (
        "Report",
        &[
            Argument::new("json", Kind::Switch, "One JSON object per line instead of a table").conflicts(&["markdown"]),
            Argument::new("markdown", Kind::Switch, "Tables in Markdown"),
        ],
    ),
];

/// Command lines to start from.
pub(crate) const EXAMPLES: &[(&str, &str)] = &[
    ("qkv bench", "The grid on this machine, in a minute or two"),
    ("qkv bench --shape 1,8,8,2048,2048,64 --causal --direction backward --json", "One case"),
    ("qkv bench --shape 1,32,8,1,4096,128 --direction decode --dtype bf16", "A decoding step with grouped queries"),
    ("qkv bench --draw 1 --against torch --python venv/bin/python", "Shapes that nobody tuned for"),
    ("qkv bench --device cuda --against torch", "On a GPU, against PyTorch's cuDNN"),
    ("qkv bench --threads 2 --against torch --python venv/bin/python --markdown", "The tables of docs/performance.md"),
    ("qkv bench --train --seconds 5 --threads 2 --against torch --python venv/bin/python", "Training steps"),
    ("qkv bench --train --device cuda --against torch --python venv/bin/python", "Training steps on a GPU"),
    ("qkv bench --images --threads 2 --against torch --python venv/bin/python", "ResNet-50 over images"),
    ("qkv bench --ranks 4 --shape 1,8,8,65536,65536,64 --causal", "Divided over four processes, in every way"),
    ("qkv bench --train --ranks 4", "Training steps over four processes, beside as many that train alone"),
    ("qkv bench --scaling scaling.svg", "Speed-up from one thread to all, beside independent copies"),
    ("qkv bench --lengths docs/lengths.svg --against torch --python venv/bin/python", "Time and memory against length"),
];

/// What `--help` explains beyond the arguments.
pub(crate) fn notes() -> String {
    "What is measured:\n  \
     Calls that allocate their results, as PyTorch's do. `best ms` is the fastest call, `median ms` the median.\n  \
     GFLOP/s counts 4·B·Hq·N·M·D forward and 2.5 times that backward, half of it for causal; GB/s counts the keys\n  \
     and values that decoding reads. `of peak` is the fraction of the measured peak of multiply-adds (of AMX for bf16,\n  \
     where the CPU has it), or for decoding of memory bandwidth, whichever is the bottleneck.\n  \
     `formula ms` is softmax(QKᵀ)·V with all N × M scores stored, on the same matrix product; f32 forward, up to 1 GiB.\n  \
     `of copies`, with `--scaling`, is the throughput of calls on T threads over that of T copies of the call, each\n  \
     on one thread.\n  \
     `ratio` is PyTorch's time over ours: the best call of each side per round, the median over rounds.\n"
        .into()
}

/// The format of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReportFormat {
    Text,
    Markdown,
    Json,
}

/// The parsed arguments.
#[derive(Debug)]
pub(crate) struct BenchArgs {
    /// Empty for the grid.
    pub shapes: Vec<Shape>,
    /// The seed of drawn shapes.
    pub draw: Option<u64>,
    /// Empty for the default.
    pub precisions: Vec<Precision>,
    pub causal: bool,
    /// Empty for the default.
    pub directions: Vec<Direction>,
    /// The plot of time and memory against length, and the longest length.
    pub lengths: Option<(PathBuf, usize)>,
    /// The plot of speed-up against threads.
    pub scaling: Option<PathBuf>,
    pub train: bool,
    /// Passes over images instead of attention.
    pub images: bool,
    pub on_device: bool,
    pub threads: Option<usize>,
    /// Ranks to start on this machine.
    pub ranks: Option<usize>,
    pub rank_timeout: Duration,
    /// Micro-batches of a training step, over all ranks.
    pub micro_batches: Option<usize>,
    /// The name of the one way to divide attention; all ways if `None`.
    pub rank_way: Option<String>,
    pub seconds: f64,
    /// The Python that has PyTorch, and the number of rounds.
    pub against: Option<(PathBuf, usize)>,
    pub format: ReportFormat,
}

impl BenchArgs {
    pub fn parse(matches: &Matches<'_>) -> BenchArgs {
        let words = |name| matches.texts(name);
        BenchArgs {
            shapes: matches.all("shape"),
            draw: matches.seed("draw"),
            precisions: without_repeats(words("dtype").iter().filter_map(|word| Precision::named(word))),
            causal: matches.switch("causal"),
            directions: without_repeats(words("direction").iter().filter_map(|word| Direction::named(word))),
            lengths: matches.path("lengths").map(|file| (file, matches.count("longest").unwrap_or(LONGEST))),
            scaling: matches.path("scaling"),
            train: matches.switch("train"),
            images: matches.switch("images"),
            on_device: matches.word("device") == Some("cuda"),
            threads: matches.count("threads"),
            ranks: matches.count(RANKS.name),
            rank_timeout: Duration::from_secs(matches.count(RANK_TIMEOUT.name).unwrap_or(30) as u64),
            micro_batches: matches.count("micro-batches"),
            rank_way: matches.word("rank-way").map(str::to_owned),
            seconds: matches.number("seconds").unwrap_or(SECONDS),
            against: matches.word("against").map(|_| {
                let python = matches.path("python").unwrap_or_else(|| "python3".into());
                (python, matches.count("rounds").unwrap_or(FEWEST_ROUNDS as usize))
            }),
            format: match (matches.switch("json"), matches.switch("markdown")) {
                (true, _) => ReportFormat::Json,
                (_, true) => ReportFormat::Markdown,
                _ => ReportFormat::Text,
            },
        }
    }

    /// Alternating rounds; 1 without `--against`.
    pub fn rounds(&self) -> usize {
        self.against.as_ref().map_or(1, |(_, rounds)| *rounds)
    }
}

/// Each value once, in the order of first occurrence.
fn without_repeats<T: PartialEq>(values: impl Iterator<Item = T>) -> Vec<T> {
    values.fold(Vec::new(), |mut unique, value| {
        if !unique.contains(&value) {
            unique.push(value);
        }
        unique
    })
}
