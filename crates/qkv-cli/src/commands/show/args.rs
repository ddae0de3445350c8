//! What `qkv show` can be asked, as a table of choices, and what was asked.

use crate::choices::{Choice, Kind, Table};
use clap::ArgMatches;
use qkv_explore::draw::{Palette, Scale};
use qkv_explore::{Links, pharaoh};
use std::path::PathBuf;

/// How many times the size of the SVG a PNG has.
const MAGNIFIED: f64 = 2.0;

/// Every choice of `qkv show`.
pub(crate) const CHOICES: Table = &[
    (
        "What is looked at, and by which model",
        &[
            Choice::new("text", Kind::Text, "Translate this, go on with it or read it, as the model does; left out, the lines of stdin").value("TEXT").bare(),
            Choice::new("model", Kind::Path, "Use the model in this folder; left out, the embedded one").value("DIR"),
            Choice::new("recording", Kind::Path, "Look at this recording instead: one that `--out` wrote, or a file with `q` and `k`, or with `weights`")
                .value("FILE.safetensors")
                .clashes(&["text", "model", "target", "image"]),
            Choice::new("image", Kind::Path, "See this image, PNG or JPEG, by a model that sees")
                .value("FILE")
                .needs(&["model"])
                .clashes(&["text", "target"]),
            Choice::new("sequence", Kind::Seed, "Which sequence of the recording, counted from 0")
                .value("N")
                .default("0")
                .needs(&["recording"]),
            Choice::new("causal", Kind::Switch, "The recording's attention was causal, where its file does not say")
                .needs(&["recording"]),
            Choice::new("target", Kind::Text, "Look at this translation instead of the model's own").value("TEXT"),
        ],
    ),
    (
        "Which attention",
        &[
            Choice::new(
                "layer",
                Kind::Text,
                "The layer, as `--list` names it: `encoder.0`, `decoder.1`, `cross.2`, counted from 0, or its whole name; left out, the one that aligns words best",
            )
            .value("NAME"),
            Choice::new("head", Kind::Text, "One head, counted from 0, or the `mean` of all").value("H").default("mean"),
            Choice::new("tokens", Kind::Switch, "Tokens as the model has them, not put together to words"),
            Choice::new("special", Kind::Switch, "With what stands for no text: starts and ends"),
        ],
    ),
    (
        "How it is drawn",
        &[
            Choice::new("out", Kind::Path, "Write there, by the end of its name; left out, draw in the terminal")
                .value("FILE")
                .clashes(&["heads", "list", "json"]),
            Choice::new("scale", Kind::Word, "Which weight is drawn how strongly")
                .values(&[
                    ("linear", "by its share of the largest"),
                    ("log", "by its logarithm, down to four powers of ten below the largest"),
                    ("rank", "by the share of the weights that are no larger"),
                ])
                .default("linear"),
            Choice::new("palette", Kind::Word, "In which colours")
                .values(&[
                    ("sea", "white, green, blue, violet; safe for the colour-blind"),
                    ("ember", "white, yellow, red"),
                    ("grey", "black and white"),
                ])
                .default("sea"),
            Choice::new("dark", Kind::Switch, "On dark paper; a terminal counts as dark already").needs(&["out"]),
            Choice::new("magnify", Kind::Positive, "Make a PNG this many times the size of the SVG")
                .value("X")
                .default("2")
                .needs(&["out"]),
        ],
    ),
    (
        "What is told",
        &[
            Choice::new("heads", Kind::Switch, "Every head in numbers: entropy, where it looks, how much it matters")
                .clashes(&["list", "layer", "head"]),
            Choice::new("list", Kind::Switch, "The layers and their heads").clashes(&["heads", "layer", "head"]),
            Choice::new("links", Kind::Text, "How well the attention that is shown agrees with these links between words, `0-0 1-2 …`: source and target word, counted from 0")
                .value("LINKS")
                .clashes(&["heads", "list", "out", "tokens", "special"]),
            Choice::new("json", Kind::Switch, "One JSON object for each text"),
        ],
    ),
    ("How", &[Choice::new("threads", Kind::Threads, "Use N threads; left out, every core").value("N")]),
];

/// What is shown of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    Picture,
    Heads,
    List,
}

/// What `qkv show` was asked.
#[derive(Debug)]
pub(crate) struct Asked {
    pub text: Option<String>,
    pub model: Option<PathBuf>,
    pub target: Option<String>,
    pub image: Option<PathBuf>,
    pub recording: Option<PathBuf>,
    pub sequence: usize,
    pub causal: bool,
    /// What the attention is compared with.
    pub links: Option<Links>,
    pub layer: Option<String>,
    /// Nothing for the mean of all.
    pub head: Option<usize>,
    pub tokens: bool,
    pub special: bool,
    pub out: Option<PathBuf>,
    pub scale: Scale,
    pub palette: Palette,
    pub dark: bool,
    pub magnified: f64,
    pub what: What,
    pub json: bool,
    pub threads: Option<usize>,
}

impl Asked {
    /// What the file of the recording does not say by itself.
    pub fn file(&self) -> qkv_explore::file::Asked {
        let attention = self.causal.then(|| qkv::Attention::scaled_dot().mask(qkv::Mask::causal()));
        qkv_explore::file::Asked { tokens: None, sequence: self.sequence, attention }
    }

    /// From a command line that holds together; the error says what is no head.
    pub fn read(matches: &ArgMatches) -> Result<Asked, String> {
        let text = |name| matches.get_one::<String>(name).cloned();
        let path = |name| matches.get_one::<PathBuf>(name).cloned();
        let head = match text("head").as_deref() {
            None | Some("mean") => None,
            Some(typed) => {
                Some(typed.parse().map_err(|_| format!("`--head {typed}`: expected a number from 0, or `mean`"))?)
            }
        };
        fn named<T: Copy + Default>(all: &[(&str, T)], word: Option<String>) -> T {
            all.iter().find(|(name, _)| Some(*name) == word.as_deref()).map(|(_, value)| *value).unwrap_or_default()
        }
        Ok(Asked {
            text: text("text"),
            model: path("model"),
            target: text("target"),
            image: path("image"),
            recording: path("recording"),
            sequence: matches.get_one::<u64>("sequence").and_then(|&n| usize::try_from(n).ok()).unwrap_or(0),
            causal: matches.get_flag("causal"),
            links: text("links").map(|text| pharaoh(&text)).transpose().map_err(|e| format!("`--links`: {e}"))?,
            layer: text("layer"),
            head,
            tokens: matches.get_flag("tokens"),
            special: matches.get_flag("special"),
            out: path("out"),
            scale: named(&Scale::ALL, text("scale")),
            palette: named(&Palette::ALL, text("palette")),
            dark: matches.get_flag("dark"),
            magnified: matches.get_one::<f64>("magnify").copied().unwrap_or(MAGNIFIED),
            what: match (matches.get_flag("heads"), matches.get_flag("list")) {
                (true, _) => What::Heads,
                (_, true) => What::List,
                _ => What::Picture,
            },
            json: matches.get_flag("json"),
            threads: matches.get_one::<u64>("threads").and_then(|&threads| usize::try_from(threads).ok()),
        })
    }
}

/// What `qkv show --help` says beyond its choices.
pub(crate) fn after_help() -> String {
    let files: String = super::file::FORMS.iter().map(|(end, _, what)| format!("  {end:13}  {what}\n")).collect();
    let examples = crate::arguments::examples(&[
        ("qkv show 好久不见", "Where each word of the translation looked"),
        ("qkv show --layer encoder.2 --head 1 --tokens --special 好久不见", "One head of the encoder, token by token"),
        ("qkv show --list", "Which layers and heads there are"),
        ("qkv show --heads 好久不见", "What each head does, in numbers"),
        ("qkv show --out attention.svg 好久不见", "For print"),
        ("qkv show --out attention.png --dark --scale log 好久不见", "For a screen, small weights too"),
        ("qkv show --model runs/han --out review.svg 'Dull at first. Then it sings.'", "A document, its words shaded"),
        ("qkv show --model runs/digits --image seven.png --out seven.svg", "An image under the weights of its patches"),
        ("qkv show --model runs/dates --target 1934-11-08 --out a.npy 'the eighth of November, 1934'", "For NumPy"),
    ]);
    format!(
        "Files, by the end of their name:\n{files}\nAttention says where a model looked, not why it answered: weights are not by themselves an explanation.\n\n{examples}"
    )
}
