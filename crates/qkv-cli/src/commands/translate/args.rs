//! The arguments of `qkv translate`.

use crate::arguments::{Argument, Arguments, Kind, MODEL_OR_EMBEDDED, Matches, THREADS};
use crate::device::{self, BATCH_INVARIANT, DEVICE, InferenceDevice, PRECISION};
use crate::search::{SEARCH, SearchArgs};
use std::path::PathBuf;

/// The arguments.
pub(crate) const ARGUMENTS: Arguments = &[
    (
        "Input and output",
        &[
            Argument::new("text", Kind::Text, "Text to translate; the lines of `--input` or stdin by default")
                .value("TEXT")
                .positional()
                .repeatable()
                .conflicts(&["input"]),
            MODEL_OR_EMBEDDED,
            Argument::new("input", Kind::Path, "Translate the lines of this file").value("FILE"),
            Argument::new("output", Kind::Path, "Write to this file, which is replaced when all lines are done")
                .value("FILE"),
            Argument::new("append", Kind::Switch, "Append to `--output` line by line instead, for endless input")
                .requires(&["output"]),
        ],
    ),
    ("Decoding", SEARCH),
    (
        "Format: one line of output for each line of input",
        &[
            Argument::new("n-best", Kind::Integer(1, 1000), "The N best translations, each as `LINE⇥SCORE⇥TEXT`")
                .value("N")
                .default("1")
                .conflicts(&["greedy"]),
            Argument::new("scores", Kind::Switch, "The score before each translation, as `SCORE⇥TEXT`"),
            Argument::new("align", Kind::Word, "Word alignment; drawn by default for a TEXT on a terminal")
                .values(&[
                    ("draw", "a grid below the translation: target words down, source words across"),
                    (
                        "pharaoh",
                        "`TEXT⇥0-0 1-2 …`: source-target word pairs from 0, for the largest weight of each target word \
                         and every weight of at least 0.3",
                    ),
                    ("none", "no alignment"),
                ])
                .bare_value("draw"),
            Argument::new("json", Kind::Switch, "One JSON object per line: tokens, scores, alternatives, alignment")
                .conflicts(&["scores"]),
        ],
    ),
    ("Computation", &[DEVICE, BATCH_INVARIANT, PRECISION, THREADS]),
];

/// Command lines to start from.
pub(crate) const EXAMPLES: &[(&str, &str)] = &[
    ("qkv translate 好久不见", "A sentence, with its alignment on a terminal"),
    ("qkv translate < zh.txt > en.txt", "A file, line by line"),
    ("qkv translate --model runs/dates --align 'November 15th, 2026'", "Your own model, with the alignment"),
    ("qkv translate --input zh.txt --n-best 3 --beam 8 --output en.tsv", "The three best of each line"),
    ("qkv translate --sample --temperature 0.8 --top-p 0.9 --seed 7 好久不见", "Sampled, reproducibly"),
    ("qkv translate --json --align=pharaoh < zh.txt", "Tokens, scores and links as JSON"),
];

/// The format of alignments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AlignFormat {
    Draw,
    Pharaoh,
    None,
}

/// The parsed arguments.
#[derive(Debug)]
pub(crate) struct TranslateArgs {
    pub texts: Vec<String>,
    pub model: Option<PathBuf>,
    pub input: Option<PathBuf>,
    pub output: Option<PathBuf>,
    pub append: bool,
    pub search: SearchArgs,
    pub n_best: usize,
    pub scores: bool,
    /// `None` if it was not typed.
    pub align: Option<AlignFormat>,
    pub json: bool,
    pub threads: Option<usize>,
    pub device: InferenceDevice,
    pub int8: bool,
}

impl TranslateArgs {
    pub fn parse(matches: &Matches<'_>) -> TranslateArgs {
        TranslateArgs {
            texts: matches.texts("text"),
            model: matches.path("model"),
            input: matches.path("input"),
            output: matches.path("output"),
            append: matches.switch("append"),
            search: SearchArgs::parse(matches),
            n_best: matches.count("n-best").unwrap_or(1),
            scores: matches.switch("scores"),
            align: matches.word("align").map(|word| match word {
                "draw" => AlignFormat::Draw,
                "pharaoh" => AlignFormat::Pharaoh,
                _ => AlignFormat::None,
            }),
            json: matches.switch("json"),
            threads: matches.count("threads"),
            device: InferenceDevice::parse(matches),
            int8: device::parse_int8(matches),
        }
    }
}
