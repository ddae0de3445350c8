//! The one table of what `qkv run` can be asked and of the tensors that it reads and writes. Help (`arguments`), the
//! page of the guide (`page`), the parser and the warning about unknown tensors all come from here; what a choice does
//! is in `description` and `computation`.

/// How the value of a choice is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// No value: there or not.
    Switch,
    /// The name of a file.
    Path,
    /// One of the words in `values`.
    Word,
    /// A finite number.
    Finite,
    /// A finite number above 0.
    Positive,
    /// At least 0 and less than 1.
    Probability,
    /// A whole number of 64 bits.
    Seed,
    /// How many threads.
    Threads,
    /// `LEFT,RIGHT`.
    Window,
    /// `start`, `end` or a whole number.
    Place,
    /// One of the forms in `values`.
    Pattern,
    /// `predictive:D`.
    Local,
    /// One of the forms in `values`.
    Selection,
    /// One of the forms in `values`.
    Features,
    /// `B,Hq,Hk,N,M,D`.
    Shape,
    /// How many rounds.
    Rounds,
    /// A length of sequences.
    Length,
    /// Any text.
    Text,
    /// A whole number from 1 to 1000.
    Count,
    /// A whole number.
    Whole,
    /// A whole number of tokens, at least 1.
    Tokens,
    /// At least 0 and at most 1.
    Share,
}

/// One choice of a command.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Choice {
    /// Its name, without the dashes.
    pub name: &'static str,
    /// What help calls its value, where no list of `values` says more.
    value: &'static str,
    /// How the value is read.
    pub kind: Kind,
    /// What it is about, in a line.
    pub about: &'static str,
    /// Its value where it is left out.
    pub default: Option<&'static str>,
    /// What each value means.
    pub values: &'static [(&'static str, &'static str)],
    /// Other choices of which one has to be there, or it means nothing.
    pub needs: &'static [Other],
    /// Other choices that it cannot go with.
    pub clashes: &'static [Other],
    /// Whether it may be given more than once.
    pub many: bool,
    /// Whether it is known by its place, without a name.
    pub bare: bool,
    /// The value that its name alone stands for; others follow a `=`.
    pub alone: Option<&'static str>,
}

/// Choices under the heading that help and the page give them.
pub(crate) type Table = &'static [(&'static str, &'static [Choice])];

/// Another choice, without the dashes, as it is typed: `"output"`, or `"select top-k:K"` where it is about one value.
pub(crate) type Other = &'static str;

impl Choice {
    pub const fn new(name: &'static str, kind: Kind, about: &'static str) -> Choice {
        Choice {
            name,
            value: "",
            kind,
            about,
            default: None,
            values: &[],
            needs: &[],
            clashes: &[],
            many: false,
            bare: false,
            alone: None,
        }
    }

    pub const fn value(self, value: &'static str) -> Choice {
        Choice { value, ..self }
    }

    pub const fn default(self, default: &'static str) -> Choice {
        Choice { default: Some(default), ..self }
    }

    pub const fn values(self, values: &'static [(&'static str, &'static str)]) -> Choice {
        Choice { values, ..self }
    }

    pub const fn needs(self, needs: &'static [Other]) -> Choice {
        Choice { needs, ..self }
    }

    pub const fn clashes(self, clashes: &'static [Other]) -> Choice {
        Choice { clashes, ..self }
    }

    pub const fn many(self) -> Choice {
        Choice { many: true, ..self }
    }

    pub const fn bare(self) -> Choice {
        Choice { bare: true, ..self }
    }

    pub const fn alone(self, value: &'static str) -> Choice {
        Choice { alone: Some(value), ..self }
    }

    /// What it is about, what it is where it is left out, and which other choices it needs or cannot go with.
    pub fn told(&self) -> String {
        let mut told = self.about.to_string();
        if self.many {
            told += "; can be given several times";
        }
        if let Some(alone) = self.alone {
            told += &format!("; without a value, `{alone}`");
        }
        if let Some(default) = self.default {
            told += &format!("; left out, `{default}`");
        }
        if !self.needs.is_empty() {
            told += &format!("; needs {}", any_of(self.needs));
        }
        if !self.clashes.is_empty() {
            told += &format!("; not with {}", any_of(self.clashes));
        }
        told
    }

    /// What it is called in a sentence: `--beam`, or `TEXT` where it is known by its place.
    pub fn called(&self) -> String {
        if self.bare { self.value.into() } else { format!("--{}", self.name) }
    }

    /// Its value, as help writes it; empty for a switch.
    pub fn typed(&self) -> String {
        let words: Vec<&str> = self.values.iter().map(|(value, _)| *value).collect();
        if words.is_empty() { self.value.into() } else { words.join("|") }
    }
}

/// Other choices as a sentence has them.
pub(crate) fn any_of(others: &[Other]) -> String {
    let typed: Vec<String> = others.iter().map(|other| format!("`--{other}`")).collect();
    match &typed[..] {
        [first @ .., last] if !first.is_empty() => format!("{} or {last}", first.join(", ")),
        _ => typed.concat(),
    }
}

/// Every choice of `qkv run`.
pub(crate) const CHOICES: Table = &[
    (
        "Files",
        &[
            Choice::new("input", Kind::Path, "Read the tensors from here; without it, a small example is shown")
                .value("FILE"),
            Choice::new("output", Kind::Path, "Write the results here; without it, only the report is printed")
                .value("FILE"),
            Choice::new("weights", Kind::Switch, "Write the weights too, all [B, Hq, N, M] of them").needs(&["output"]),
        ],
    ),
    (
        "Score, how alike a query and a key are",
        &[
            Choice::new("score", Kind::Word, "How a query and a key are compared").default("scaled-dot").values(&[
                ("dot", "q·k"),
                ("scaled-dot", "q·k / √D"),
                ("general", "qᵀ w k (Luong), with the tensor `w`"),
                ("additive", "v_scoreᵀ tanh(w_q q + w_k k) (Bahdanau), with the tensors of these names"),
                ("cosine", "q·k / (‖q‖ ‖k‖)"),
                ("distance", "−‖q − k‖²"),
            ]),
            Choice::new("scale", Kind::Finite, "Multiply scores by X instead of by the score's own scale")
                .value("X")
                .clashes(&["features elu", "features relu"]),
            Choice::new(
                "temperature",
                Kind::Positive,
                "Then divide them by T: above 1 weights spread, below they gather",
            )
            .value("T"),
            Choice::new("softcap", Kind::Positive, "Then keep them between −C and C, by C·tanh(score / C)").value("C"),
            Choice::new("alibi", Kind::Switch, "Then add ALiBi's bias, −slope·|p − j| with the paper's slopes"),
            Choice::new("features", Kind::Features, "Linear attention: weights φ(q)·φ(k), in time linear in N and M")
                .values(&[
                    ("elu", "φ(x) = elu(x) + 1"),
                    ("relu", "φ(x) = max(x, 0)"),
                    ("favor:COUNT", "FAVOR+ (Performer): COUNT random features, drawn with `--seed`, near softmax"),
                ])
                .clashes(&[
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
        "Mask, which keys a query may see: a key has to pass every rule",
        &[
            Choice::new("causal", Kind::Word, "Only keys at or before the query's place").values(&[
                ("start", "with the first query at the first key, or at the key that `--place OFFSET` says"),
                ("end", "with the last query at the last key; implies `--place end`"),
            ]),
            Choice::new("window", Kind::Window, "Only keys from p − LEFT to p + RIGHT").value("LEFT,RIGHT"),
            Choice::new("pattern", Kind::Pattern, "Only keys of a sparse pattern; none is causal by itself").values(&[
                ("strided:S", "|p − j| < S, or (p − j) mod S = 0 (Sparse Transformer)"),
                ("fixed:S,C", "the same block of S, or the last C keys of any block (Sparse Transformer)"),
                ("longformer:W,G", "|p − j| ≤ W/2, or p or j among the first G positions"),
                ("bigbird:B,W,G,R,SEED", "in blocks of B: W around, the first G, and R drawn at random for each"),
                (
                    "lsh:BUCKETS,ROUNDS,SEED",
                    "the same hash bucket in any round (Reformer); `q` and `k` are hashed here",
                ),
            ]),
            Choice::new("local", Kind::Local, "Only keys around the query's predicted centre c, the tensor `center`")
                .values(&[("predictive:D", "|j − c| ≤ D, and weights times exp(−(j − c)²/2σ²) with σ = D/2 (Luong)")])
                .clashes(&["select hard", "select sample", "select top-k:K", "select sparsemax"]),
            Choice::new("place", Kind::Place, "Where query i stands among the keys, its place p")
                .default("start")
                .values(&[("start", "p = i"), ("end", "p = i + M − N"), ("OFFSET", "p = i + OFFSET, a whole number")]),
        ],
    ),
    (
        "Select, how scores become weights",
        &[
            Choice::new("select", Kind::Selection, "Which keys get weight, and how much").default("soft").values(&[
                ("soft", "softmax: every key, by the exponential of its score"),
                ("hard", "1 for the key with the largest score"),
                ("sample", "1 for one key, drawn from the softmax with `--seed`"),
                ("top-k:K", "softmax over the K keys with the largest scores"),
                ("sparsemax", "max(score − τ, 0), with the threshold τ for which the weights sum to 1"),
            ]),
            Choice::new("straight-through", Kind::Switch, "Let scores learn from `d_out` as if the weights were soft")
                .needs(&["select hard", "select sample"]),
            Choice::new("dropout", Kind::Probability, "Drop each weight with probability P, and scale up the others")
                .value("P")
                .clashes(&["select hard", "select sample", "select top-k:K", "select sparsemax"]),
            Choice::new("seed", Kind::Seed, "What is dropped, or drawn: the same seed gives the same")
                .value("SEED")
                .default("0")
                .needs(&["dropout", "select sample", "features favor:COUNT"]),
        ],
    ),
    (
        "Computation",
        &[
            Choice::new("engine", Kind::Word, "What computes it").default("auto").values(&[
                ("auto", "the best there is for the call; now always `exact`"),
                ("reference", "the definition in plain loops, in f64, rounded at the end; takes memory for N × M"),
                (
                    "exact",
                    "tiles with an online softmax, in memory linear in N and M; for `--features` sums of features",
                ),
            ]),
            Choice::new("device", Kind::Word, "Where it is computed").default("cpu").values(&[
                ("cpu", "every mechanism, in every type"),
                (
                    "cuda",
                    "the first NVIDIA GPU: dot products and softmax with every mask and bias, in f32, bf16 and f16",
                ),
            ]),
            Choice::new("dtype", Kind::Word, "Compute in this type, and write it; left out, the type of `q`").values(
                &[
                    ("f32", "32 bits"),
                    ("f64", "64 bits"),
                    ("bf16", "16 bits with the range of f32; sums in f32"),
                    ("f16", "16 bits, IEEE; sums in f32"),
                ],
            ),
            Choice::new(
                "threads",
                Kind::Threads,
                "Use N threads; left out, every core. The result is the same, bit for bit",
            )
            .value("N"),
            Choice::new("json", Kind::Switch, "Report as one JSON object: shapes, engine, tiles, milliseconds, memory"),
        ],
    ),
];

/// A tensor that a file may hold: its name, its shape and what it is.
pub(crate) type TensorRow = (&'static str, &'static str, &'static str);

/// Every tensor that is read.
pub(crate) const INPUTS: &[TensorRow] = &[
    ("q", "[B, Hq, N, D]", "queries"),
    ("k", "[B, Hk, M, Dk]", "keys; Hk divides Hq, and Dk = D unless the score is general or additive"),
    ("v", "[B, Hk, M, Dv]", "values"),
    ("d_out", "[B, Hq, N, Dv]", "the gradient of `out`: with it, gradients are written too"),
    ("d_lse", "[B, Hq, N]", "the gradient of `lse`, where the loss looks at it too; goes with `d_out`"),
    ("d_log_prob", "[B, Hq, N]", "the gradient of `log_prob`, which REINFORCE needs; goes with `d_out`"),
    ("bias", "1 to 4 axes", "added to scores; broadcasts to [B, Hq, N, M] as in NumPy"),
    ("table", "[1 or Hq, 2R + 1]", "relative bias: entry clamp(j − p, −R, R) + R is added to a score"),
    ("scale", "[1 or Hq]", "learned scale, in place of the score's own"),
    ("sinks", "[Hq]", "one logit a head that takes weight and gives no value"),
    ("center", "[B, Hq, N]", "the predicted centres of `--local predictive:D`, places among the keys"),
    ("mask", "1 to 4 axes", "bool or u8, 1 = may see; broadcasts to [B, Hq, N, M] as in NumPy"),
    ("key_lengths", "[B]", "integers: how many keys of each sequence are there, the rest is padding"),
    ("segments_q", "[B, N]", "integers: queries see keys of their own segment only"),
    ("segments_k", "[B, M]", "integers: the segments of the keys"),
    ("w", "[D, Dk]", "the general score's matrix; [Hq, D, Dk] for one a head"),
    ("w_q", "[A, D]", "the additive score's query matrix; left out, queries count as projected"),
    ("w_k", "[A, Dk]", "the additive score's key matrix; left out, keys count as projected"),
    ("v_score", "[A]", "the additive score's vector"),
];

/// Every tensor that is written.
pub(crate) const OUTPUTS: &[TensorRow] = &[
    ("out", "[B, Hq, N, Dv]", "the weighted sums of the values"),
    (
        "lse",
        "[B, Hq, N]",
        "the log-sum-exp of each row of scores (top-k: of those chosen; sparsemax: τ; `--features`: the log of the sum of weights), natural log, in f32 (f64 for f64)",
    ),
    (
        "chosen",
        "[B, Hq, N, 1 or K]",
        "for hard, sample and top-k (K at most M): the keys chosen, ascending, I64; −1 for none",
    ),
    ("log_prob", "[B, Hq, N]", "for hard and sample: the log-probability of the choice, in the type of `lse`"),
    ("weights", "[B, Hq, N, M]", "with `--weights`: what multiplied the values"),
    ("d_q, d_k, d_v", "as q, k, v", "with `d_out`: their gradients"),
    ("d_NAME", "as NAME", "with `d_out`: the gradient of each other float tensor that was given"),
];

/// Commands to start from, each with what it does.
pub(crate) const EXAMPLES: &[(&str, &str)] = &[
    ("qkv run", "Two small sentences: see how context changes what a word means"),
    ("qkv run --input in.safetensors --output out.safetensors --causal start", "A decoder's self-attention"),
    ("qkv run --input in.safetensors --causal end --window 255,0 --json", "How much a local window saves"),
    ("qkv run --input in.safetensors --features favor:256 --causal start --json", "A Performer's, in linear time"),
    ("qkv run --input in.safetensors --pattern lsh:64,2,0 --json", "How much hash buckets save"),
    ("qkv run --input in.safetensors --output out.safetensors --select sample --seed 7", "One key for each query"),
    ("qkv run --input in.safetensors --output out.safetensors --engine reference --dtype f64", "The definition"),
    ("qkv run --input in.safetensors --output out.safetensors --device cuda --json", "On a GPU, and which kernel ran"),
];
