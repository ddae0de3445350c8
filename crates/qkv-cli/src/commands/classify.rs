//! `qkv classify`: the class of each text or image and its probability, and with `--weights` what the model attended
//! to.

use crate::arguments::{ADAPTER, Argument, Arguments, Kind, Matches, THREADS};
use crate::command::{Command, Run, Status};
use crate::device::{BATCH_INVARIANT, DEVICE, InferenceDevice};
use crate::failure::Failure;
use crate::lines::{BatchResult, Line, Lines, for_each_line};
use crate::output::Print;
use crate::terminal::TerminalStyle;
use crate::{input, threads};
use qkv_explore::{capture, draw, token_weights};
use qkv_models::image::Image;
use qkv_models::{Classifier, Han, Reading};
use qkv_nn::Machine;
use serde_json::{Value, json};
use std::path::PathBuf;

pub(super) const COMMAND: Command = Command::new("classify", "Classify texts or images", ARGUMENTS, |matches| {
    Ok(Box::new(ClassifyArgs::parse(matches)))
})
.examples(&[
    ("qkv classify --model runs/reviews 'a film to be seen twice'", "A text"),
    ("qkv classify --model runs/reviews --json < reviews.txt", "A file, line by line, with all probabilities"),
    (
        "qkv classify --model runs/han --weights 'Dull at first. Then it sings.'",
        "With the weights of sentences and words",
    ),
    ("qkv classify --model runs/digits --image seven.png", "An image"),
]);

const ARGUMENTS: Arguments = &[
    (
        "Input and model",
        &[
            Argument::new("text", Kind::Text, "Text to classify; the lines of `--input` or stdin by default")
                .value("TEXT")
                .positional()
                .repeatable()
                .conflicts(&["input", "image"]),
            Argument::new("model", Kind::Path, "Folder of the model, in the Hugging Face layout")
                .value("DIR")
                .required(),
            ADAPTER,
            Argument::new("input", Kind::Path, "Classify the lines of this file").value("FILE").conflicts(&["image"]),
            Argument::new("image", Kind::Path, "Classify this image: PNG, JPEG, WebP or BMP")
                .value("FILE")
                .repeatable(),
        ],
    ),
    (
        "Output: `LABEL⇥PROBABILITY` for each line or image",
        &[
            Argument::new(
                "weights",
                Kind::Switch,
                "Show attention over sentences and words (`han`) or patches (`vit`)",
            ),
            Argument::new("json", Kind::Switch, "One JSON object for each text or image"),
        ],
    ),
    ("Computation", &[DEVICE, BATCH_INVARIANT, THREADS]),
];

struct ClassifyArgs {
    texts: Vec<String>,
    model: PathBuf,
    adapter: Option<PathBuf>,
    input: Option<PathBuf>,
    images: Vec<PathBuf>,
    weights: bool,
    json: bool,
    threads: Option<usize>,
    device: InferenceDevice,
}

/// Maximum number of lines per batch.
const BATCH: usize = 256;
/// Maximum number of images per batch.
const IMAGE_BATCH: usize = 64;

impl Run for ClassifyArgs {
    fn run(&self, print: Print<'_>) -> Result<Status, Failure> {
        threads::on(self.threads, || {
            let machine = self.device.machine()?;
            let model = Classifier::open_with(&self.model, self.adapter.as_deref())?;
            match &model {
                _ if !self.images.is_empty() => self.classify_images(&model, &machine, print)?,
                Classifier::Vit(_) | Classifier::ResNet(_) => {
                    return Err(Failure::new("the model takes images, not texts").hint("name one with `--image FILE`"));
                }
                Classifier::Han(han) if self.weights => self.classify_lines(print, |lines| {
                    Ok(lines.iter().map(|line| self.read_document(han, &line.text, &machine)).collect())
                })?,
                _ if self.weights => {
                    let hint =
                        format!("`qkv explore --model {}` shows the attention of any model", self.model.display());
                    return Err(Failure::new("`--weights` works with models of kind `han` and `vit`").hint(hint));
                }
                _ => self.classify_lines(print, |lines| {
                    let texts: Vec<&str> = lines.iter().map(|line| line.text.as_str()).collect();
                    let found = model.texts(&texts, &machine)?;
                    let rows = texts.iter().zip(found);
                    Ok(rows.map(|(text, row)| Ok(self.format(&model, json!({ "text": text }), &row))).collect())
                })?,
            }
            Ok(Status::Done)
        })
    }
}

impl ClassifyArgs {
    fn parse(matches: &Matches<'_>) -> ClassifyArgs {
        ClassifyArgs {
            texts: matches.texts("text"),
            model: matches.required_path("model"),
            adapter: matches.path("adapter"),
            input: matches.path("input"),
            images: matches.paths("image"),
            weights: matches.switch("weights"),
            json: matches.switch("json"),
            threads: matches.count("threads"),
            device: InferenceDevice::parse(matches),
        }
    }

    fn classify_lines(
        &self,
        print: Print<'_>,
        work: impl FnMut(&[Line]) -> BatchResult<String>,
    ) -> Result<(), Failure> {
        let lines = Lines::new(&self.texts, self.input.as_deref())?;
        for_each_line(lines, BATCH, work, |batch| {
            let failed = if self.json { "null\n" } else { "\n" };
            print(&batch.into_iter().map(|line| line.unwrap_or(failed.into())).collect::<String>())
        })
    }

    /// A document, with the weights of its sentences and words.
    fn read_document(&self, han: &Han, text: &str, machine: &Machine) -> Result<String, Failure> {
        let reading = han.read(text, machine)?;
        let Reading { probabilities, sentences, left_out } = &reading;
        let ranked = ranked(&han.config.labels, probabilities);
        if self.json {
            return Ok(to_json(json!({ "text": text, "sentences": sentences, "left_out": left_out }), &ranked));
        }
        let style = TerminalStyle::of_stdout();
        Ok(format!("{}\n{}\n", to_text(&ranked), draw::document(&reading, style.width, style.colors())))
    }

    fn classify_images(&self, model: &Classifier, machine: &Machine, print: Print<'_>) -> Result<(), Failure> {
        for paths in self.images.chunks(IMAGE_BATCH) {
            paths.iter().try_for_each(|path| input::check(path))?;
            let images = paths.iter().map(Image::open).collect::<Result<Vec<Image>, _>>()?;
            let found = model.images(&images, machine)?;
            let mut text = String::new();
            for ((path, image), row) in paths.iter().zip(&images).zip(found) {
                let name = path.display().to_string();
                let mut object = json!({ "image": name });
                let mut drawing = String::new();
                if let (true, Classifier::Vit(vit)) = (self.weights, model) {
                    let recording = capture::image(vit, "", image, machine)?;
                    let weights = token_weights::patches(&recording, None, None)?.unwrap_or_default();
                    let grid = vit.config.grid();
                    object["patches"] = weights.chunks(grid.max(1)).map(|row| json!(row)).collect();
                    drawing = draw::patches(&weights, grid, TerminalStyle::of_stdout().colors());
                }
                // With several images, each line names its image.
                if self.images.len() > 1 && !self.json {
                    text += &format!("{name}\t");
                }
                text += &self.format(model, object, &row);
                if self.weights && !self.json {
                    text += &format!("{drawing}\n");
                }
            }
            if !print(&text)? {
                return Ok(());
            }
        }
        Ok(())
    }

    fn format(&self, model: &Classifier, object: Value, row: &[f32]) -> String {
        let ranked = ranked(model.labels(), row);
        if self.json { to_json(object, &ranked) } else { to_text(&ranked) }
    }
}

/// Labels and their probabilities, likeliest first.
fn ranked<'a>(labels: &'a [String], row: &[f32]) -> Vec<(&'a String, f32)> {
    let mut all: Vec<(&String, f32)> = labels.iter().zip(row.iter().copied()).collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1));
    all
}

fn to_text(ranked: &[(&String, f32)]) -> String {
    ranked.first().map_or(String::new(), |(label, probability)| format!("{label}\t{probability:.4}\n"))
}

/// An object with its label and probabilities, on one line.
fn to_json(mut object: Value, ranked: &[(&String, f32)]) -> String {
    let probabilities: serde_json::Map<_, _> =
        ranked.iter().map(|(label, probability)| ((*label).clone(), json!(probability))).collect();
    object["label"] = ranked.first().map_or(Value::Null, |(label, _)| json!(label));
    object["probabilities"] = Value::Object(probabilities);
    format!("{object}\n")
}
