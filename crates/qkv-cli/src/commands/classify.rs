//! What `qkv classify` tells: the class of each text or image, how sure the model is, and with `--weights` what it attended to,
//! drawn or as numbers.

use crate::failure::Failure;
use crate::reading::{Asked, each_portion};
use crate::say::Say;
use crate::terminal::Paper;
use qkv_explore::{capture, draw, shades};
use qkv_models::image::Image;
use qkv_models::{Classifier, Han, Reading};
use qkv_nn::Machine;
use serde_json::{Value, json};

/// Images that are seen together at most.
const TOGETHER: usize = 64;

/// Says which class each text or image belongs to.
pub(crate) fn classify(asked: &Asked, machine: &Machine, say: Say<'_>) -> Result<(), Failure> {
    let model = Classifier::open(&asked.model)?;
    if !asked.images.is_empty() {
        return images(asked, &model, machine, say);
    }
    match &model {
        Classifier::Vit(_) => {
            Err(Failure::new("the model sees images and reads no text").hint("name one with `--image FILE`"))
        }
        Classifier::Han(han) if asked.weights => each_portion(asked, say, |texts| {
            texts.iter().map(|text| read(asked, han, text, machine)).collect::<Result<String, Failure>>()
        }),
        _ if asked.weights => {
            let failure = Failure::new("`--weights` is for models of kind `han` and `vit`");
            Err(failure.hint(format!("`qkv explore --model {}` shows what any attends to", asked.model.display())))
        }
        _ => each_portion(asked, say, |texts| {
            let found = model.texts(texts, machine)?;
            Ok(texts.iter().zip(found).map(|(text, row)| told(asked, &model, json!({ "text": text }), row)).collect())
        }),
    }
}

/// A document, and the weights of both levels.
fn read(asked: &Asked, han: &Han, text: &str, machine: &Machine) -> Result<String, Failure> {
    let read = han.read(text, machine)?;
    let Reading { probabilities, sentences, left_out } = &read;
    if asked.json {
        let about = json!({ "text": text, "sentences": sentences, "left_out": left_out });
        return Ok(line(about, &ranked(&han.config.labels, probabilities)));
    }
    let paper = Paper::of_stdout();
    let drawn = draw::document(&read, paper.width, paper.colours());
    Ok(format!("{}\n{drawn}\n", plain(&ranked(&han.config.labels, probabilities))))
}

fn images(asked: &Asked, model: &Classifier, machine: &Machine, say: Say<'_>) -> Result<(), Failure> {
    for paths in asked.images.chunks(TOGETHER) {
        let images = paths.iter().map(Image::open).collect::<Result<Vec<Image>, _>>()?;
        let found = model.images(&images, machine)?;
        let mut words = String::new();
        for ((path, image), row) in paths.iter().zip(&images).zip(found) {
            let name = path.display().to_string();
            let mut about = json!({ "image": name });
            let mut drawn = String::new();
            if let (true, Classifier::Vit(vit)) = (asked.weights, model) {
                let weights =
                    shades::patches(&capture::image(vit, "", image, machine)?, None, None)?.unwrap_or_default();
                let grid = vit.config.grid();
                about["patches"] = weights.chunks(grid.max(1)).map(|row| json!(row)).collect();
                drawn = format!("\n{}", draw::patches(&weights, grid, Paper::of_stdout().colours()));
            }
            // With several, each says which it is.
            let prefix = if asked.images.len() > 1 && !asked.json { format!("{name}\t") } else { String::new() };
            words += &format!("{prefix}{}", told(asked, model, about, row));
            if !asked.json && asked.weights {
                words += &format!("{}\n", drawn.trim_start_matches('\n'));
            }
        }
        if !say(&words)? {
            return Ok(());
        }
    }
    Ok(())
}

/// Classes and how likely each is, the likeliest first.
fn ranked<'a>(labels: &'a [String], row: &[f32]) -> Vec<(&'a String, f32)> {
    let mut all: Vec<(&String, f32)> = labels.iter().zip(row.iter().copied()).collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1));
    all
}

fn plain(all: &[(&String, f32)]) -> String {
    all.first().map_or(String::new(), |(label, share)| format!("{label}\t{share:.4}\n"))
}

/// What is known of something and its classes, as one JSON object on a line.
fn line(mut about: Value, all: &[(&String, f32)]) -> String {
    let shares: serde_json::Map<_, _> = all.iter().map(|(label, share)| ((*label).clone(), json!(share))).collect();
    about["label"] = all.first().map_or(Value::Null, |(label, _)| json!(label));
    about["probabilities"] = Value::Object(shares);
    format!("{about}\n")
}

fn told(asked: &Asked, model: &Classifier, about: Value, row: Vec<f32>) -> String {
    let all = ranked(model.labels(), &row);
    if asked.json { line(about, &all) } else { plain(&all) }
}
