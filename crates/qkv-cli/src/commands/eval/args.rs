//! The arguments of `qkv eval`.

use crate::arguments::{ADAPTER, Argument, Arguments, Kind, MODEL_OR_EMBEDDED, Matches, THREADS};
use crate::device::{self, BATCH_INVARIANT, DEVICE, InferenceDevice, PRECISION};
use crate::search::{SEARCH, SearchArgs};
use qkv_models::metrics::words::Words;
use std::path::PathBuf;

/// The arguments.
pub(crate) const ARGUMENTS: Arguments = &[
    (
        "Input and output",
        &[
            Argument::new(
                "data",
                Kind::Path,
                "Score the model on this file: `SOURCE⇥TARGET` or `LABEL⇥TEXT` lines, CoNLL columns, SQuAD's JSON, text, \
                 `IMAGE⇥TEXT` or `IMAGE⇥QUESTION⇥ANSWER` lines, COCO's JSON, an idx file of images",
            )
            .value("DATA")
            .positional()
            .conflicts(&["hypotheses", "references"]),
            MODEL_OR_EMBEDDED.conflicts(&["hypotheses"]),
            ADAPTER.conflicts(&["hypotheses"]).requires(&["model"]),
            Argument::new("output", Kind::Path, "Write the translations to this file")
                .value("FILE")
                .conflicts(&["hypotheses"]),
            Argument::new("hypotheses", Kind::Path, "Score the lines of this file instead, without a model")
                .value("FILE")
                .requires(&["references"]),
            Argument::new("references", Kind::Path, "The reference translations, line by line")
                .value("FILE")
                .requires(&["hypotheses"]),
        ],
    ),
    ("Decoding", SEARCH),
    (
        "Scores",
        &[
            Argument::new("tokenize", Kind::Word, "Tokenizer for BLEU, as named by sacrebleu")
                .values(&[
                    ("13a", "the standard of WMT"),
                    ("zh", "every Chinese character is a token"),
                    ("intl", "every punctuation mark and symbol of Unicode is a token"),
                    ("char", "every character is a token"),
                    ("none", "split at spaces only"),
                ])
                .default("13a"),
            Argument::new("json", Kind::Switch, "Print one JSON object"),
        ],
    ),
    ("Computation", &[DEVICE, BATCH_INVARIANT, PRECISION, THREADS]),
];

/// Command lines to start from.
pub(crate) const EXAMPLES: &[(&str, &str)] = &[
    ("qkv eval dev.tsv", "BLEU, chrF, exact match and perplexity of the embedded model"),
    ("qkv eval --model runs/dates --greedy dates.tsv --json", "Your own model, as JSON"),
    ("qkv eval --model runs/ner-minilm data/wnut17-ner/dev.conll", "Entity F1, by kind, as seqeval reports it"),
    ("qkv eval --model runs/reviews-minilm data/movie-reviews/dev.tsv", "Accuracy, and F1 by class"),
    ("qkv eval --model runs/shakespeare data/tinyshakespeare/dev.txt", "Perplexity of a text"),
    ("qkv eval --model runs/bccd data/bccd/val.json", "Average precision of boxes, as COCO defines it"),
    ("qkv eval --hypotheses out.txt --references ref.txt", "Any translations, as sacrebleu scores them"),
];

/// What is scored.
#[derive(Debug)]
pub(crate) enum EvalSource {
    Model { folder: Option<PathBuf>, data: PathBuf },
    Files { hypotheses: PathBuf, references: PathBuf },
}

/// The parsed arguments.
#[derive(Debug)]
pub(crate) struct EvalArgs {
    pub source: EvalSource,
    pub adapter: Option<PathBuf>,
    pub output: Option<PathBuf>,
    pub search: SearchArgs,
    pub tokenize: Words,
    pub json: bool,
    pub threads: Option<usize>,
    pub device: InferenceDevice,
    pub int8: bool,
}

impl EvalArgs {
    pub fn parse(matches: &Matches<'_>) -> Result<EvalArgs, String> {
        let source = match (matches.path("data"), matches.path("hypotheses"), matches.path("references")) {
            (Some(data), ..) => EvalSource::Model { folder: matches.path("model"), data },
            (_, Some(hypotheses), Some(references)) => EvalSource::Files { hypotheses, references },
            _ => return Err("`qkv eval` requires DATA, or `--hypotheses` and `--references`".into()),
        };
        Ok(EvalArgs {
            source,
            adapter: matches.path("adapter"),
            output: matches.path("output"),
            search: SearchArgs::parse(matches),
            tokenize: match matches.word("tokenize") {
                Some("zh") => Words::Chinese,
                Some("intl") => Words::International,
                Some("char") => Words::Characters,
                Some("none") => Words::Spaces,
                _ => Words::V13a,
            },
            json: matches.switch("json"),
            threads: matches.count("threads"),
            device: InferenceDevice::parse(matches),
            int8: device::parse_int8(matches),
        })
    }
}
