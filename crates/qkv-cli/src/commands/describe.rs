//! `qkv describe`: descriptions of images, and where the model looked for each token.

use crate::arguments::{Argument, Arguments, Kind, Matches, THREADS};
use crate::atomic_file::OutputPath;
use crate::command::{Command, Run, Status};
use crate::device::{BATCH_INVARIANT, DEVICE, InferenceDevice};
use crate::failure::Failure;
use crate::output::Print;
use crate::terminal::TerminalStyle;
use crate::{input, threads};
use qkv_explore::draw::{self, Fonts, Shaded, Style};
use qkv_models::image::Image;
use qkv_models::text::tokenizer::Tokenizer;
use qkv_models::{Describer, LookedAt, Search};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

pub(super) const COMMAND: Command =
    Command::new("describe", "Describe images: captions, formulas as LaTeX", ARGUMENTS, |matches| {
        Ok(Box::new(DescribeArgs::parse(matches)?))
    })
    .examples(&[
        ("qkv describe --model runs/shapes picture.png", "An image"),
        ("qkv describe --model runs/shapes picture.png --out looks.svg", "And where the model looked for each token"),
        ("qkv describe --model runs/formulas --json *.png", "Several, with scores"),
    ]);

const ARGUMENTS: Arguments = &[
    (
        "Images and model",
        &[
            Argument::new("image", Kind::Path, "Image to describe: PNG, JPEG, WebP or BMP")
                .value("IMAGE")
                .positional()
                .repeatable(),
            Argument::new("model", Kind::Path, "Folder of a model of kind `describe`").value("DIR").required(),
        ],
    ),
    (
        "Output: one line for each image",
        &[
            Argument::new("beam", Kind::Integer(1, 1000), "Beam size; the model's own by default").value("N"),
            Argument::new("greedy", Kind::Switch, "Take the likeliest token at each step").conflicts(&["beam"]),
            Argument::new("weights", Kind::Switch, "Show where the model looked for each token"),
            Argument::new("out", Kind::Path, "Save a picture of where it looked to this file (`.svg` or `.png`)")
                .value("FILE"),
            Argument::new("json", Kind::Switch, "One JSON object for each image"),
        ],
    ),
    ("Computation", &[DEVICE, BATCH_INVARIANT, THREADS]),
];

struct DescribeArgs {
    images: Vec<PathBuf>,
    model: PathBuf,
    beam: Option<usize>,
    weights: bool,
    out: Option<PathBuf>,
    json: bool,
    threads: Option<usize>,
    device: InferenceDevice,
}

/// Maximum number of images per batch.
const BATCH: usize = 16;

impl DescribeArgs {
    fn parse(matches: &Matches<'_>) -> Result<DescribeArgs, String> {
        let args = DescribeArgs {
            images: matches.paths("image"),
            model: matches.required_path("model"),
            beam: if matches.switch("greedy") { Some(1) } else { matches.count("beam") },
            weights: matches.switch("weights"),
            out: matches.path("out"),
            json: matches.switch("json"),
            threads: matches.count("threads"),
            device: InferenceDevice::parse(matches),
        };
        match (&args.images[..], &args.out) {
            ([], _) => Err("name an IMAGE to describe".into()),
            ([_, _, ..], Some(_)) => Err("`--out` draws one IMAGE".into()),
            _ => Ok(args),
        }
    }
}

/// A token's text as the label of a map, with signs for the end of a text and for blank tokens.
pub(super) fn token_label(tokenizer: &Tokenizer, id: u32) -> String {
    match tokenizer.decode(&[id]).trim() {
        "" if id == tokenizer.eos() => "‹end›".to_owned(),
        "" => "␣".to_owned(),
        text => text.to_owned(),
    }
}

/// The text of each token, and where the model looked for it.
fn maps(looked: &LookedAt, describer: &Describer) -> Vec<(String, Vec<f32>)> {
    let named = looked.tokens.iter().map(|&id| token_label(&describer.tokenizer, id));
    named.zip(looked.weights.iter().cloned()).collect()
}

/// Writes a drawing: PNG if the file name ends so, otherwise SVG.
pub(super) fn write_drawing(drawing: &Shaded, path: &Path, from: &Path) -> Result<(), Failure> {
    let output = OutputPath::new(path, Some(from))?;
    let png = path.extension().is_some_and(|end| end.eq_ignore_ascii_case("png"));
    match png {
        true => output.write(&drawing.png(2.0, &Fonts::of_system())?.bytes)?,
        false => output.write(drawing.svg().as_bytes())?,
    };
    Ok(())
}

impl Run for DescribeArgs {
    fn run(&self, print: Print<'_>) -> Result<Status, Failure> {
        threads::on(self.threads, || {
            let machine = self.device.machine()?;
            let describer = Describer::open(&self.model)?;
            let search = Search { beam: self.beam.unwrap_or(describer.search.beam), ..describer.search.clone() };
            for paths in self.images.chunks(BATCH) {
                paths.iter().try_for_each(|path| input::check(path))?;
                let images = paths.iter().map(Image::open).collect::<Result<Vec<_>, _>>()?;
                let found = describer.describe(&images, &search, &machine)?;
                let mut text = String::new();
                for ((path, image), found) in paths.iter().zip(&images).zip(found) {
                    let Some(best) = found.first() else { continue };
                    let looked = match self.weights || self.out.is_some() {
                        true => Some(describer.look_at(image, &best.tokens, &machine)?),
                        false => None,
                    };
                    if let (Some(out), Some(looked)) = (&self.out, &looked) {
                        let maps = maps(looked, &describer);
                        let drawing = Shaded::looks(&looked.image, looked.grid, &maps, &best.text, Style::default())?;
                        write_drawing(&drawing, out, path)?;
                    }
                    let line = best.text.replace(['\n', '\r', '\t'], " ");
                    if self.json {
                        let mut object =
                            json!({ "image": path.display().to_string(), "text": line, "ids": best.tokens });
                        (object["score"], object["log_probability"]) = (json!(best.score), json!(best.log_probability));
                        if let Some(looked) = looked.filter(|_| self.weights) {
                            object["grid"] = json!(looked.grid);
                            object["tokens"] = (maps(&looked, &describer).into_iter())
                                .map(|(text, weights)| json!({ "text": text, "weights": weights }))
                                .collect::<Value>();
                        }
                        text += &format!("{object}\n");
                        continue;
                    }
                    // With several images, each line names its image.
                    if self.images.len() > 1 {
                        text += &format!("{}\t", path.display());
                    }
                    text += &format!("{line}\n");
                    if let Some(looked) = looked.filter(|_| self.weights) {
                        for (label, weights) in maps(&looked, &describer) {
                            let drawing = draw::patches(&weights, looked.grid[1], TerminalStyle::of_stdout().colors());
                            text += &format!("\n{label}\n{drawing}");
                        }
                    }
                }
                if !print(&text)? {
                    break;
                }
            }
            Ok(Status::Done)
        })
    }
}
