//! The arguments of `qkv show`.

use super::file_format::FileFormat;
use crate::arguments::{Argument, Arguments, Kind, MODEL_OR_EMBEDDED, Matches, THREADS};
use crate::device::{BATCH_INVARIANT, DEVICE, InferenceDevice};
use qkv_explore::draw::{Palette, Scale};
use qkv_explore::{Links, pharaoh};
use std::path::PathBuf;

/// The size of a PNG relative to the SVG.
const MAGNIFICATION: f64 = 2.0;

/// The arguments.
pub(crate) const ARGUMENTS: Arguments = &[
    (
        "Model and input",
        &[
            Argument::new("text", Kind::Text, "Text for the model; the lines of stdin by default")
                .value("TEXT")
                .positional(),
            MODEL_OR_EMBEDDED,
            Argument::new(
                "recording",
                Kind::Path,
                "Show a recording instead: a file of `--out`, or one with `q` and `k` or with `weights`",
            )
            .value("FILE.safetensors")
            .conflicts(&["text", "model", "target", "image"]),
            Argument::new("image", Kind::Path, "Image for a vision model: PNG, JPEG, WebP or BMP")
                .value("FILE")
                .requires(&["model"])
                .conflicts(&["text", "target"]),
            Argument::new("sequence", Kind::SEED, "Sequence of the recording's batch, from 0")
                .value("N")
                .default("0")
                .requires(&["recording"]),
            Argument::new("causal", Kind::Switch, "Treat the recorded attention as causal if its file does not say")
                .requires(&["recording"]),
            Argument::new("target", Kind::Text, "Force this translation instead of the model's own").value("TEXT"),
        ],
    ),
    (
        "Attention",
        &[
            Argument::new(
                "layer",
                Kind::Text,
                "Layer as in `--list`: `encoder.0`, `decoder.1`, `cross.2`, or its full name; by default the one that \
                 aligns words best",
            )
            .value("NAME"),
            Argument::new("head", Kind::Text, "Head, from 0, or the `mean` of all").value("H").default("mean"),
            Argument::new("tokens", Kind::Switch, "Show tokens instead of merging them into words"),
            Argument::new("special", Kind::Switch, "Show special tokens too: starts and ends"),
        ],
    ),
    (
        "Drawing",
        &[
            Argument::new(
                "out",
                Kind::Path,
                "Write a file in the format of its extension; draw in the terminal by default",
            )
            .value("FILE")
            .conflicts(&["heads", "list", "json"]),
            Argument::new("scale", Kind::Word, "How weights map to color")
                .values(&[
                    ("linear", "relative to the largest weight"),
                    ("log", "logarithmic, over four decades"),
                    ("rank", "by the fraction of weights that are no larger"),
                ])
                .default("linear"),
            Argument::new("palette", Kind::Word, "Colors")
                .values(&[
                    ("sea", "white, green, blue, violet; safe for color blindness"),
                    ("ember", "white, yellow, red"),
                    ("grey", "black and white"),
                ])
                .default("sea"),
            Argument::new("dark", Kind::Switch, "Dark background; terminals are always dark").requires(&["out"]),
            Argument::new("magnify", Kind::Positive, "Size of a PNG relative to the SVG")
                .value("X")
                .default("2")
                .requires(&["out"]),
        ],
    ),
    (
        "Output",
        &[
            Argument::new("heads", Kind::Switch, "Measure every head: entropy, where it looks, how important it is")
                .conflicts(&["list", "layer", "head"]),
            Argument::new("list", Kind::Switch, "List layers and heads").conflicts(&["heads", "layer", "head"]),
            Argument::new(
                "links",
                Kind::Text,
                "Compare with a gold alignment, `0-0 1-2 …`: source-target words from 0",
            )
            .value("LINKS")
            .conflicts(&["heads", "list", "out", "tokens", "special"]),
            Argument::new("json", Kind::Switch, "One JSON object for each text"),
        ],
    ),
    ("Computation", &[DEVICE, BATCH_INVARIANT, THREADS]),
];

/// Command lines to start from.
pub(crate) const EXAMPLES: &[(&str, &str)] = &[
    ("qkv show 好久不见", "The alignment of a translation"),
    ("qkv show --layer encoder.2 --head 1 --tokens --special 好久不见", "One head of the encoder, token by token"),
    ("qkv show --list", "Layers and heads of the model"),
    ("qkv show --heads 好久不见", "Every head in numbers"),
    ("qkv show --out attention.svg 好久不见", "For print"),
    ("qkv show --out attention.png --dark --scale log 好久不见", "For a screen, with small weights visible"),
    ("qkv show --model runs/han --out review.svg 'Dull at first. Then it sings.'", "A document with shaded words"),
    ("qkv show --model runs/digits --image seven.png --out seven.svg", "An image with its patch weights"),
    ("qkv show --model runs/dates --target 1934-11-08 --out a.npy 'the eighth of November, 1934'", "For NumPy"),
];

/// What `--help` explains beyond the arguments.
pub(crate) fn notes() -> String {
    let files: String = FileFormat::ALL.iter().map(|(end, _, what)| format!("  {end:16}  {what}\n")).collect();
    format!(
        "Files of `--out`, by extension:\n{files}\n\
         Attention shows where a model looked, not why it answered: weights alone are no explanation.\n"
    )
}

/// What is shown of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ShowMode {
    Picture,
    Heads,
    List,
}

/// The parsed arguments.
#[derive(Debug)]
pub(crate) struct ShowArgs {
    pub text: Option<String>,
    pub model: Option<PathBuf>,
    pub target: Option<String>,
    pub image: Option<PathBuf>,
    pub recording: Option<PathBuf>,
    pub sequence: usize,
    pub causal: bool,
    /// The gold alignment.
    pub links: Option<Links>,
    pub layer: Option<String>,
    /// None for the mean of all.
    pub head: Option<usize>,
    pub tokens: bool,
    pub special: bool,
    pub out: Option<PathBuf>,
    pub scale: Scale,
    pub palette: Palette,
    pub dark: bool,
    pub magnification: f64,
    pub mode: ShowMode,
    pub json: bool,
    pub threads: Option<usize>,
    pub device: InferenceDevice,
}

impl ShowArgs {
    pub fn parse(matches: &Matches<'_>) -> Result<ShowArgs, String> {
        let head = match matches.text("head").as_deref() {
            None | Some("mean") => None,
            Some(typed) => {
                Some(typed.parse().map_err(|_| format!("`--head {typed}`: expected a number from 0, or `mean`"))?)
            }
        };
        fn named<T: Copy + Default>(all: &[(&str, T)], word: Option<&str>) -> T {
            all.iter().find(|(name, _)| Some(*name) == word).map(|(_, value)| *value).unwrap_or_default()
        }
        let links = matches.text("links").map(|text| pharaoh(&text));
        Ok(ShowArgs {
            text: matches.text("text"),
            model: matches.path("model"),
            target: matches.text("target"),
            image: matches.path("image"),
            recording: matches.path("recording"),
            sequence: matches.count("sequence").unwrap_or(0),
            causal: matches.switch("causal"),
            links: links.transpose().map_err(|error| format!("`--links`: {error}"))?,
            layer: matches.text("layer"),
            head,
            tokens: matches.switch("tokens"),
            special: matches.switch("special"),
            out: matches.path("out"),
            scale: named(&Scale::ALL, matches.word("scale")),
            palette: named(&Palette::ALL, matches.word("palette")),
            dark: matches.switch("dark"),
            magnification: matches.number("magnify").unwrap_or(MAGNIFICATION),
            mode: match (matches.switch("heads"), matches.switch("list")) {
                (true, _) => ShowMode::Heads,
                (_, true) => ShowMode::List,
                _ => ShowMode::Picture,
            },
            json: matches.switch("json"),
            threads: matches.count("threads"),
            device: InferenceDevice::parse(matches),
        })
    }

    /// What a recording's file may leave out.
    pub fn recording_options(&self) -> qkv_explore::file::OpenOptions {
        let attention = self.causal.then(|| qkv::Attention::scaled_dot().mask(qkv::Mask::causal()));
        qkv_explore::file::OpenOptions { tokens: None, sequence: self.sequence, attention }
    }
}
