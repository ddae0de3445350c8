//! The arguments of `qkv run`, the tensors that it reads and writes, and its examples. Help, `docs/run.md`, the parser
//! and the warning about unknown tensors come from these tables.

use super::features::FeatureMap;
use super::pattern::Pattern;
use super::place::{Local, PlaceArg, Window};
use super::selection::Selection;
use crate::arguments::{Argument, Arguments, Kind, Matches, THREADS};
use crate::dtype::Precision;
use crate::ranks::{RANK_TIMEOUT, RANKS};
use clap::value_parser;
use qkv::{Place, Score, Select};
use qkv_ranks::Way;
use std::path::PathBuf;
use std::time::Duration;

/// The arguments.
pub(crate) const ARGUMENTS: Arguments = &[
    (
        "Files",
        &[
            Argument::new("input", Kind::Path, "Read tensors from this safetensors file; a small example by default")
                .value("FILE"),
            Argument::new("output", Kind::Path, "Write results to this safetensors file; only report by default")
                .value("FILE"),
            Argument::new("weights", Kind::Switch, "Write the attention weights too, all [B, Hq, N, M]")
                .requires(&["output"]),
        ],
    ),
    (
        "Score: similarity of a query and a key",
        &[
            Argument::new("score", Kind::Word, "Score function").default("scaled-dot").values(&[
                ("dot", "q·k"),
                ("scaled-dot", "q·k / √D"),
                ("general", "qᵀ w k (Luong), with the tensor `w`"),
                ("additive", "v_scoreᵀ tanh(w_q q + w_k k) (Bahdanau), with the tensors of these names"),
                ("cosine", "q·k / (‖q‖ ‖k‖)"),
                ("distance", "−‖q − k‖²"),
            ]),
            Argument::new("scale", Kind::Finite, "Multiply scores by X instead of the score's own scale")
                .value("X")
                .conflicts(&["features elu", "features relu"]),
            Argument::new("temperature", Kind::Positive, "Divide scores by T; above 1 flattens the weights").value("T"),
            Argument::new("softcap", Kind::Positive, "Cap scores softly: C·tanh(score / C)").value("C"),
            Argument::new("alibi", Kind::Switch, "Add the ALiBi bias, −slope·|p − j|, with the slopes of the paper"),
            Argument::new(
                "features",
                Kind::Custom(|| value_parser!(FeatureMap).into()),
                "Linear attention: weights φ(q)·φ(k), in time linear in N and M",
            )
            .values(&[
                ("elu", "φ(x) = elu(x) + 1"),
                ("relu", "φ(x) = max(x, 0)"),
                ("favor:COUNT", "FAVOR+ (Performer): COUNT random features, seeded by `--seed`; approximates softmax"),
            ])
            .conflicts(&[
                "score",
                "temperature",
                "softcap",
                "alibi",
                "window",
                "pattern",
                "local",
                "select",
                "dropout",
            ]),
        ],
    ),
    (
        "Mask: which keys a query sees; all masks must allow a key",
        &[
            Argument::new("causal", Kind::Word, "Only keys at or before the query's position").values(&[
                ("start", "the first query is at the first key, or where `--place OFFSET` puts it"),
                ("end", "the last query is at the last key; implies `--place end`"),
            ]),
            Argument::new(
                "window",
                Kind::Custom(|| value_parser!(Window).into()),
                "Only keys from p − LEFT to p + RIGHT",
            )
            .value("LEFT,RIGHT"),
            Argument::new(
                "pattern",
                Kind::Custom(|| value_parser!(Pattern).into()),
                "Only keys of a sparse pattern; combine with `--causal` as needed",
            )
            .values(&[
                ("dilated:W,STEP", "|p − j| ≤ STEP·W/2 and (p − j) mod STEP = 0 (Longformer's dilated window)"),
                ("strided:S", "|p − j| < S, or (p − j) mod S = 0 (Sparse Transformer)"),
                ("fixed:S,C", "the same block of S keys, or the last C keys of any block (Sparse Transformer)"),
                ("longformer:W,G", "|p − j| ≤ W/2, or p or j among the first G positions"),
                ("bigbird:B,W,G,R,SEED", "in blocks of B: a window of W, the first G, and R random ones for each"),
                ("lsh:BUCKETS,ROUNDS,SEED", "the same hash bucket in any round (Reformer); hashes `q` and `k`"),
            ]),
            Argument::new(
                "local",
                Kind::Custom(|| value_parser!(Local).into()),
                "Only keys around the query's predicted center c, from the tensor `center`",
            )
            .values(&[("predictive:D", "|j − c| ≤ D, weights times exp(−(j − c)²/2σ²) with σ = D/2 (Luong)")])
            .conflicts(&["select hard", "select sample", "select top-k:K", "select sparsemax"]),
            Argument::new(
                "place",
                Kind::Custom(|| value_parser!(PlaceArg).into()),
                "Position p of query i relative to the keys",
            )
            .default("start")
            .values(&[
                ("start", "p = i"),
                ("end", "p = i + M − N"),
                ("OFFSET", "p = i + OFFSET, a whole number"),
            ]),
        ],
    ),
    (
        "Selection: how scores become weights",
        &[
            Argument::new("select", Kind::Custom(|| value_parser!(Selection).into()), "Selection of keys")
                .default("soft")
                .values(&[
                    ("soft", "softmax over all keys"),
                    ("hard", "1 for the key with the largest score"),
                    ("sample", "1 for a key sampled from the softmax with `--seed`"),
                    ("top-k:K", "softmax over the K largest scores"),
                    ("sparsemax", "max(score − τ, 0), with the threshold τ that makes the weights sum to 1"),
                ]),
            Argument::new("straight-through", Kind::Switch, "Backpropagate to the scores as if the weights were soft")
                .requires(&["select hard", "select sample"]),
            Argument::new("dropout", Kind::Probability, "Drop each weight with probability P and rescale the rest")
                .value("P")
                .conflicts(&["select hard", "select sample", "select top-k:K", "select sparsemax"]),
            Argument::new("seed", Kind::SEED, "Seed of dropout, sampling and random features")
                .value("SEED")
                .default("0")
                .requires(&["dropout", "select sample", "features favor:COUNT"]),
        ],
    ),
    (
        "Computation",
        &[
            Argument::new("engine", Kind::Word, "Engine").default("auto").values(&[
                ("auto", "the best for the call; currently always `exact`"),
                ("reference", "the definition in plain f64 loops, rounded at the end; stores N × M weights"),
                ("exact", "tiled with online softmax, in memory linear in N and M; for `--features`, feature sums"),
            ]),
            Argument::new("device", Kind::Word, "Device").default("cpu").values(&[
                ("cpu", "every mechanism, in every type"),
                ("cuda", "the first NVIDIA GPU: dot scores and softmax, all masks and biases, in f32, bf16 and f16"),
            ]),
            Argument::new("dtype", Kind::Word, "Type to compute and write in; the type of `q` by default").values(&[
                ("f32", "32 bits"),
                ("f64", "64 bits"),
                ("bf16", "16 bits with the range of f32, accumulated in f32"),
                ("f16", "16 bits, IEEE, accumulated in f32"),
            ]),
            Argument::new(
                "threads",
                Kind::Integer(1, 1024),
                "Number of threads; all cores by default. Results are bit-identical for any number",
            )
            .value("N"),
            RANKS,
            Argument::new("rank-way", Kind::Word, "How a call is divided over ranks").default("auto").values(&[
                ("auto", "`heads` if each rank gets a key head and nothing depends on its index, else `gathered`"),
                ("heads", "each rank computes all rows of some heads (all-to-all); bit-identical to one process"),
                (
                    "gathered",
                    "each rank gets all keys and values, and computes some rows; bit-identical to one process",
                ),
                ("ring", "keys and values circulate, for those too large for one rank; equal up to rounding"),
            ]),
            RANK_TIMEOUT,
            Argument::new(
                "json",
                Kind::Switch,
                "Report as one JSON object: shapes, engine, tiles, milliseconds, memory",
            ),
        ],
    ),
];

/// A tensor of a file: its name, its shape and what it is.
pub(crate) type TensorRow = (&'static str, &'static str, &'static str);

/// The tensors that are read.
pub(crate) const INPUTS: &[TensorRow] = &[
    ("q", "[B, Hq, N, D]", "queries"),
    ("k", "[B, Hk, M, Dk]", "keys; Hk divides Hq, and Dk = D unless the score is general or additive"),
    ("v", "[B, Hk, M, Dv]", "values"),
    ("d_out", "[B, Hq, N, Dv]", "gradient of `out`; enables the backward pass"),
    ("d_lse", "[B, Hq, N]", "gradient of `lse`, for losses that use it; requires `d_out`"),
    ("d_log_prob", "[B, Hq, N]", "gradient of `log_prob`, for REINFORCE; requires `d_out`"),
    ("bias", "1 to 4 axes", "added to the scores; broadcasts to [B, Hq, N, M] as in NumPy"),
    ("table", "[1 or Hq, 2R + 1]", "relative bias: entry clamp(j − p, −R, R) + R is added to the score"),
    ("scale", "[1 or Hq]", "learned scale, instead of the score's own"),
    ("sinks", "[Hq]", "one logit per head that takes weight and has no value"),
    ("center", "[B, Hq, N]", "predicted centers of `--local predictive:D`, as key positions"),
    ("mask", "1 to 4 axes", "bool or u8, 1 = visible; broadcasts to [B, Hq, N, M] as in NumPy"),
    ("key_lengths", "[B]", "integers: the number of keys of each sequence; the rest is padding"),
    ("segments_q", "[B, N]", "integers: a query sees keys of its own segment only"),
    ("segments_k", "[B, M]", "integers: the segments of the keys"),
    ("w", "[D, Dk]", "matrix of the general score; [Hq, D, Dk] for one per head"),
    ("w_q", "[A, D]", "query matrix of the additive score; without it, queries are already projected"),
    ("w_k", "[A, Dk]", "key matrix of the additive score; without it, keys are already projected"),
    ("v_score", "[A]", "vector of the additive score"),
];

/// The tensors that are written.
pub(crate) const OUTPUTS: &[TensorRow] = &[
    ("out", "[B, Hq, N, Dv]", "attention output"),
    (
        "lse",
        "[B, Hq, N]",
        "log-sum-exp of each row of scores, in f32 (f64 for f64); top-k: of the selected keys; `--features`: log of the \
         sum of weights",
    ),
    ("threshold", "[B, Hq, N]", "sparsemax, instead of `lse`: τ, in f32 (f64 for f64)"),
    (
        "chosen",
        "[B, Hq, N, 1 or K]",
        "hard, sample and top-k: indices of the selected keys, ascending, I64; −1 for none",
    ),
    ("log_prob", "[B, Hq, N]", "hard and sample: log-probability of the selected key, in the type of `lse`"),
    ("weights", "[B, Hq, N, M]", "with `--weights`: attention weights"),
    ("d_q, d_k, d_v", "as q, k, v", "with `d_out`: gradients"),
    ("d_NAME", "as NAME", "with `d_out`: gradient of every other float tensor in the input"),
];

/// Command lines to start from.
pub(crate) const EXAMPLES: &[(&str, &str)] = &[
    ("qkv run", "A built-in example: how context changes the vector of a word"),
    ("qkv run --input in.safetensors --output out.safetensors --causal start", "Self-attention of a decoder"),
    ("qkv run --input in.safetensors --causal end --window 255,0 --json", "A sliding window, and what it saves"),
    ("qkv run --input in.safetensors --features favor:256 --causal start --json", "A Performer, in linear time"),
    ("qkv run --input in.safetensors --pattern lsh:64,2,0 --json", "LSH buckets, and what they save"),
    ("qkv run --input in.safetensors --output out.safetensors --select sample --seed 7", "One sampled key per query"),
    ("qkv run --input in.safetensors --output out.safetensors --engine reference --dtype f64", "The reference engine"),
    ("qkv run --input in.safetensors --output out.safetensors --causal start --ranks 4", "Divided over four processes"),
    (
        "qkv run --input in.safetensors --output out.safetensors --device cuda --json",
        "On a GPU, with the kernel's name",
    ),
];

/// What `--help` explains beyond the arguments.
pub(crate) fn notes() -> String {
    let rows = |rows: &[TensorRow]| -> String {
        rows.iter().map(|(name, shape, what)| format!("  {name:13}  {shape:18}  {what}\n")).collect()
    };
    format!(
        "Input tensors:\n{}\nOutput tensors:\n{}\n  \
         B sequences, Hq query heads, Hk key heads, N queries, M keys, D, Dk and Dv widths.\n  \
         Float tensors may be F32, F64, BF16 or F16, integers of any type. Every tensor that is present is used.\n",
        rows(INPUTS),
        rows(OUTPUTS)
    )
}

/// What computes the attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Engine {
    Reference,
    Exact,
    /// Linear attention.
    Feature,
    Cuda,
}

impl Engine {
    pub fn name(self) -> &'static str {
        match self {
            Engine::Reference => "reference",
            Engine::Exact => "exact",
            Engine::Feature => "feature",
            Engine::Cuda => "cuda",
        }
    }
}

/// The parsed arguments.
#[derive(Debug)]
pub(crate) struct RunArgs {
    pub input: Option<PathBuf>,
    pub output: Option<PathBuf>,
    pub weights: bool,
    pub score: Score,
    pub scale: Option<f64>,
    pub temperature: Option<f64>,
    pub softcap: Option<f64>,
    pub alibi: bool,
    pub causal: bool,
    pub window: Option<Window>,
    pub pattern: Option<Pattern>,
    pub local: Option<usize>,
    pub place: Place,
    pub select: Select,
    pub dropout: Option<f64>,
    pub seed: u64,
    pub engine: Engine,
    pub dtype: Option<Precision>,
    pub threads: Option<usize>,
    /// Ranks to start on this machine.
    pub ranks: Option<usize>,
    /// How they divide the call.
    pub way: Option<Way>,
    pub rank_timeout: Duration,
    pub json: bool,
}

impl RunArgs {
    pub fn parse(matches: &Matches<'_>) -> Result<RunArgs, String> {
        let scores = [Score::Dot, Score::ScaledDot, Score::General, Score::Additive, Score::Cosine, Score::Distance];
        let score = scores.into_iter().find(|score| matches.word("score") == Some(score.name())).unwrap_or_default();
        let causal = matches.word("causal");
        let seed = matches.seed("seed").unwrap_or(0);
        let features = matches.value("features").map(|map: FeatureMap| map.features(seed));
        let selection: Selection = matches.value("select").unwrap_or_default();
        Ok(RunArgs {
            input: matches.path("input"),
            output: matches.path("output"),
            weights: matches.switch("weights"),
            score: features.map_or(score, Score::Linear),
            scale: matches.number("scale"),
            temperature: matches.number("temperature"),
            softcap: matches.number("softcap"),
            alibi: matches.switch("alibi"),
            causal: causal.is_some(),
            window: matches.value("window"),
            pattern: matches.value("pattern"),
            local: matches.value("local").map(|Local(half_width)| half_width),
            place: place(causal, matches.value("place").map(|PlaceArg(place)| place))?,
            select: selection.select(matches.switch("straight-through")),
            dropout: matches.number("dropout"),
            seed,
            engine: match (matches.word("device"), matches.word("engine"), features) {
                (Some("cuda"), Some("reference"), _) => {
                    return Err("`--engine reference` runs on the CPU, and cannot be used with `--device cuda`".into());
                }
                (Some("cuda"), ..) => Engine::Cuda,
                (_, Some("reference"), _) => Engine::Reference,
                (.., Some(_)) => Engine::Feature,
                (.., None) => Engine::Exact,
            },
            dtype: matches.word("dtype").and_then(Precision::named),
            threads: matches.count(THREADS.name),
            ranks: matches.count(RANKS.name),
            way: match matches.word("rank-way") {
                Some("heads") => Some(Way::Heads),
                Some("gathered") => Some(Way::Gathered),
                Some("ring") => Some(Way::Ring),
                _ => None,
            },
            rank_timeout: Duration::from_secs(matches.count(RANK_TIMEOUT.name).unwrap_or(30) as u64),
            json: matches.switch("json"),
        })
    }
}

/// The place that `--causal` and `--place` agree on. An offset counts from the start, so it goes with `--causal start`.
fn place(causal: Option<&str>, place: Option<Place>) -> Result<Place, String> {
    let conflict = |causal, place| {
        Err(format!("`--causal {causal}` cannot be used with `--place {place}`: both place the queries"))
    };
    match (causal, place) {
        (Some("end"), None | Some(Place::End)) => Ok(Place::End),
        (Some("end"), Some(Place::Offset(offset))) => conflict("end", offset.to_string()),
        (Some("end"), Some(_)) => conflict("end", "start".into()),
        (Some(_), Some(Place::End)) => conflict("start", "end".into()),
        (_, place) => Ok(place.unwrap_or_default()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causal_and_place_agree_or_are_refused() {
        assert_eq!(place(None, None), Ok(Place::Start));
        assert_eq!(place(Some("start"), None), Ok(Place::Start));
        assert_eq!(place(Some("start"), Some(Place::Offset(3))), Ok(Place::Offset(3)));
        assert_eq!(place(Some("end"), None), Ok(Place::End));
        assert_eq!(place(Some("end"), Some(Place::End)), Ok(Place::End));
        assert_eq!(place(None, Some(Place::End)), Ok(Place::End));
        assert!(place(Some("end"), Some(Place::Start)).is_err());
        assert!(place(Some("end"), Some(Place::Offset(0))).is_err());
        assert!(place(Some("start"), Some(Place::End)).is_err());
    }
}
