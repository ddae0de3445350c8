//! `qkv detect`: the objects in images, and where they are.

use super::describe::write_drawing;
use crate::arguments::{Argument, Arguments, Kind, Matches, THREADS};
use crate::command::{Command, Run, Status};
use crate::device::{BATCH_INVARIANT, DEVICE, InferenceDevice};
use crate::failure::Failure;
use crate::output::Print;
use crate::{input, threads};
use qkv_explore::draw::{LabelledBox, Shaded, Style};
use qkv_models::image::Image;
use qkv_models::{Detector, FoundBox};
use serde_json::{Value, json};
use std::path::PathBuf;

pub(super) const COMMAND: Command =
    Command::new("detect", "Find objects in images: boxes, classes and probabilities", ARGUMENTS, |matches| {
        Ok(Box::new(DetectArgs::parse(matches)?))
    })
    .examples(&[
        ("qkv detect --model runs/bccd photo.jpg", "An image"),
        ("qkv detect --model runs/bccd photo.jpg --out boxes.png", "And the boxes, drawn"),
        ("qkv detect --model runs/bccd --json *.jpg", "Several, in pixels and with probabilities"),
    ]);

const ARGUMENTS: Arguments = &[
    (
        "Images and model",
        &[
            Argument::new("image", Kind::Path, "Image to look at: PNG, JPEG, WebP or BMP")
                .value("IMAGE")
                .positional()
                .repeatable(),
            Argument::new("model", Kind::Path, "Folder of a model of kind `detect`").value("DIR").required(),
            Argument::new("threshold", Kind::Fraction, "Report objects of at least this probability")
                .value("P")
                .default("0.5"),
        ],
    ),
    (
        "Output: `LABEL⇥PROBABILITY⇥LEFT⇥TOP⇥RIGHT⇥BOTTOM` in pixels for each box",
        &[
            Argument::new("weights", Kind::Switch, "With `--json`: where the query of each box looked")
                .requires(&["json"]),
            Argument::new("out", Kind::Path, "Save a picture of the boxes to this file (`.svg` or `.png`)")
                .value("FILE"),
            Argument::new("json", Kind::Switch, "One JSON object for each image"),
        ],
    ),
    ("Computation", &[DEVICE, BATCH_INVARIANT, THREADS]),
];

struct DetectArgs {
    images: Vec<PathBuf>,
    model: PathBuf,
    threshold: f32,
    weights: bool,
    out: Option<PathBuf>,
    json: bool,
    threads: Option<usize>,
    device: InferenceDevice,
}

impl DetectArgs {
    fn parse(matches: &Matches<'_>) -> Result<DetectArgs, String> {
        let args = DetectArgs {
            images: matches.paths("image"),
            model: matches.required_path("model"),
            threshold: matches.number("threshold").unwrap_or(0.5) as f32,
            weights: matches.switch("weights"),
            out: matches.path("out"),
            json: matches.switch("json"),
            threads: matches.count("threads"),
            device: InferenceDevice::parse(matches),
        };
        match (&args.images[..], &args.out) {
            ([], _) => Err("name an IMAGE to look at".into()),
            ([_, _, ..], Some(_)) => Err("`--out` draws one IMAGE".into()),
            _ => Ok(args),
        }
    }
}

/// The edges of a box in pixels.
fn pixels(found: &FoundBox, image: &Image) -> [f64; 4] {
    let (wide, high) = (image.width() as f64, image.height() as f64);
    let [left, top, right, bottom] = found.edges;
    [left * wide, top * high, right * wide, bottom * high].map(|edge| (edge * 10.0).round() / 10.0)
}

impl Run for DetectArgs {
    fn run(&self, print: Print<'_>) -> Result<Status, Failure> {
        threads::on(self.threads, || {
            let machine = self.device.machine()?;
            let detector = Detector::open(&self.model)?;
            for path in &self.images {
                input::check(path)?;
                let image = Image::open(path)?;
                let (boxes, looked, grid) = match self.weights {
                    true => {
                        let found = detector.look(&image, self.threshold, &machine)?;
                        (found.boxes, found.looked, found.grid)
                    }
                    false => {
                        let mut found = detector.detect(std::slice::from_ref(&image), self.threshold, &machine)?;
                        (found.remove(0), Vec::new(), [0, 0])
                    }
                };
                let label = |found: &FoundBox| &detector.config.labels[found.class];
                if let Some(out) = &self.out {
                    let drawn: Vec<LabelledBox> = (boxes.iter())
                        .map(|found| LabelledBox {
                            edges: found.edges,
                            class: found.class,
                            label: format!("{} {:.2}", label(found), found.probability),
                        })
                        .collect();
                    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
                    write_drawing(&Shaded::boxes(&image, &drawn, &name, Style::default()), out, path)?;
                }
                let text = if self.json {
                    let one = |found: &FoundBox| {
                        let mut object = json!({ "label": label(found), "probability": found.probability });
                        object["box"] = json!(pixels(found, &image));
                        if let Some(map) = looked.get(found.query) {
                            (object["weights"], object["grid"]) = (json!(map), json!(grid));
                        }
                        object
                    };
                    let objects: Value = boxes.iter().map(one).collect();
                    format!("{}\n", json!({ "image": path.display().to_string(), "boxes": objects }))
                } else {
                    // With several images, each line names its image.
                    let before = if self.images.len() > 1 { format!("{}\t", path.display()) } else { String::new() };
                    let line = |found: &FoundBox| {
                        let [left, top, right, bottom] = pixels(found, &image);
                        let (label, share) = (label(found), found.probability);
                        format!("{before}{label}\t{share:.4}\t{left}\t{top}\t{right}\t{bottom}\n")
                    };
                    boxes.iter().map(line).collect()
                };
                if !print(&text)? {
                    break;
                }
            }
            Ok(Status::Done)
        })
    }
}
