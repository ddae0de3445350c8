//! Scores of models that look at images: descriptions, answers about images, boxes, and classes of images, on data in
//! the format that each is trained on.

use super::Evaluation;
use crate::encoder::highest;
use crate::image::{Image, idx};
use crate::kind::kind;
use crate::labelled;
use crate::metrics::captions::Captions;
use crate::metrics::cider;
use crate::metrics::classes::{self, ClassScore};
use crate::metrics::detection::{AveragePrecision, ScoredBox};
use crate::metrics::exact::Exact;
use crate::metrics::words::Words;
use crate::pictures::Pictures;
use crate::search::Search;
use crate::{Describer, Detector, Error, Result, Vit, Vqa};
use qkv_nn::Machine;
use std::path::{Path, PathBuf};

impl Evaluation {
    /// Whether the model in a folder looks at images.
    ///
    /// # Errors
    /// If it has no `config.json`.
    pub fn is_of_images(folder: &Path) -> Result<bool> {
        Ok(matches!(kind(folder)?.as_str(), "describe" | "vqa" | "detect" | "vit"))
    }

    /// Scores a model that looks at images. The data are `image ⇥ text` lines for a model that describes (scored by
    /// BLEU and CIDEr-D over the tokens of `words`, exact match and edit similarity of the texts that `search` finds),
    /// `image ⇥ question ⇥ answer` lines for one that answers, COCO's JSON for a detector, and for a vision model an
    /// idx file of images with that of their classes beside it.
    ///
    /// # Errors
    /// If the model or the data cannot be read, or they do not fit together.
    pub fn of_images(
        folder: &Path,
        data: &Path,
        search: impl FnOnce(&Search) -> Search,
        words: Words,
        machine: &Machine,
    ) -> Result<Evaluation> {
        match kind(folder)?.as_str() {
            "describe" => {
                let describer = Describer::open(folder)?;
                let search = search(&describer.search);
                captions(&describer, data, &search, words, machine)
            }
            "vqa" => questions(&Vqa::open(folder)?, data, machine),
            "detect" => boxes(&Detector::open(folder)?, data, machine),
            "vit" => images(&Vit::open(folder)?, data, machine),
            other => Err(Error::invalid(format!("a `{other}` does not look at images"))),
        }
    }
}

fn captions(
    describer: &Describer,
    data: &Path,
    search: &Search,
    words: Words,
    machine: &Machine,
) -> Result<Evaluation> {
    let found = Pictures::<1>::read(data, |image| describer.config.image.prepared(image))?;
    let mut references: Vec<Vec<&str>> = vec![Vec::new(); found.images.len()];
    for (image, [text]) in &found.lines {
        references[*image].push(text);
    }
    let said = describer.describe(&found.images, search, machine)?;
    let outputs: Vec<&str> = said.iter().map(|found| found.first().map_or("", |best| best.text.as_str())).collect();
    let scores = Captions::of(&outputs, &references, words)?;
    Ok(Evaluation {
        measured: "descriptions",
        items: outputs.len(),
        bleu: Some(scores.bleu.score),
        cider: Some(cider::of(&outputs, &references, words)?),
        exact: Some(scores.exact),
        edit_similarity: Some(scores.similarity),
        ..Evaluation::default()
    })
}

fn questions(vqa: &Vqa, data: &Path, machine: &Machine) -> Result<Evaluation> {
    let found = Pictures::<2>::read(data, |image| vqa.config.image.prepared(image))?;
    let asked = found.lines.iter().map(|(image, [question, _])| (&found.images[*image], question.as_str()));
    let shares = vqa.probabilities(&asked.collect::<Vec<_>>(), machine)?;
    let said: Vec<&str> = shares.iter().map(|row| vqa.config.labels[highest(row)].as_str()).collect();
    let there: Vec<&str> = found.lines.iter().map(|(_, [_, answer])| answer.as_str()).collect();
    let accuracy = Some(Exact::of(&said, &there)?.score());
    Ok(Evaluation { measured: "questions", items: there.len(), accuracy, ..Evaluation::default() })
}

fn boxes(detector: &Detector, data: &Path, machine: &Machine) -> Result<Evaluation> {
    let (images, names) = labelled::boxes(data)?;
    let labels = &detector.config.labels;
    if names.iter().any(|name| !labels.contains(name)) {
        let what = format!("they are {}, the model knows {}", names.join(", "), labels.join(", "));
        return Err(Error::format(data, "field `categories`", what));
    }
    let class = |class: usize| labels.iter().position(|label| *label == names[class]).expect("it was looked for");
    let read = |path: &PathBuf| detector.config.image.prepared(&Image::open(path)?);
    let opened = images.iter().map(|one| read(&one.path)).collect::<Result<Vec<_>>>()?;
    let found = detector.detect(&opened, 0.0, machine)?;
    let found: Vec<Vec<ScoredBox>> = found.iter().map(|boxes| boxes.iter().map(ScoredBox::from).collect()).collect();
    let scored = |&(at, edges): &(usize, [f64; 4])| ScoredBox { class: class(at), score: 1.0, edges };
    let there: Vec<Vec<ScoredBox>> = images.iter().map(|one| one.boxes.iter().map(scored).collect()).collect();
    let precision = AveragePrecision::of(&found, &there);
    Ok(Evaluation {
        measured: "boxes",
        items: images.len(),
        ap50: Some(precision.at_half),
        ap: Some(precision.mean),
        ap50_classes: precision.classes.iter().map(|&(class, value)| (labels[class].clone(), value)).collect(),
        ..Evaluation::default()
    })
}

fn images(vit: &Vit, data: &Path, machine: &Machine) -> Result<Evaluation> {
    let name = data.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    if !name.contains("images") {
        return Err(Error::invalid(format!("`{}` is no file of images with a file of classes", data.display()))
            .with_hint("name an idx file such as `test-images.idx`, with `test-labels.idx` beside it"));
    }
    let beside = data.with_file_name(name.replace("images", "labels"));
    let (images, numbers) = (idx::images(data)?, idx::labels(&beside)?);
    let labels = &vit.config.labels;
    if images.len() != numbers.len() {
        let what = format!("it has {} classes, `{}` has {} images", numbers.len(), data.display(), images.len());
        return Err(Error::format(&beside, "idx", what));
    }
    if let Some(number) = numbers.iter().find(|&&number| usize::from(number) >= labels.len()) {
        return Err(Error::format(
            &beside,
            "idx",
            format!("there is a class {number}, the model has {}", labels.len()),
        ));
    }
    let shares = vit.classify(&images, machine)?;
    let said: Vec<&str> = shares.iter().map(|row| labels[highest(row)].as_str()).collect();
    let there: Vec<&str> = numbers.iter().map(|&number| labels[usize::from(number)].as_str()).collect();
    let classes: Vec<ClassScore> = classes::of(&said, &there)?;
    Ok(Evaluation {
        measured: "images",
        items: there.len(),
        accuracy: Some(Exact::of(&said, &there)?.score()),
        f1: Some(classes::macro_f1(&classes)),
        classes,
        ..Evaluation::default()
    })
}
