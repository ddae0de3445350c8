//! Scores of a model on labelled data or text: accuracy and F1 of classes, entity F1 by kind, exact match and F1 of
//! answers, perplexity; `images` scores models that look at images. Scoring translations is left to
//! [`metrics`](crate::metrics) and the program.

mod images;

use crate::batch::Batch;
use crate::classifier::Classifier;
use crate::encoder::{Head, highest};
use crate::files::packed;
use crate::kind::kind;
use crate::metrics::answers::Answers;
use crate::metrics::classes::{self, ClassScore};
use crate::metrics::entities::Entities;
use crate::metrics::exact::Exact;
use crate::metrics::perplexity;
use crate::{Encoder, Error, Generator, Result, labelled};
use qkv_nn::{Loss, Machine, Pool, Tape};
use serde::Serialize;
use std::path::Path;

/// Scores of a model; those that do not apply are missing. All but the loss and the perplexity are scaled by 100.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Evaluation {
    /// What was scored: `classes`, `tags`, `answers`, `text`, `descriptions`, `questions`, `boxes` or `images`.
    pub measured: &'static str,
    /// Texts, sentences, questions, tokens or images.
    pub items: usize,
    /// Share of correct classes, or of words with the correct tag.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<f64>,
    /// Share of answers or descriptions that match exactly.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exact: Option<f64>,
    /// F1 of entities over all kinds, mean F1 of classes, or mean word F1 of answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub f1: Option<f64>,
    /// Precision and recall of entities.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub precision_recall: Option<[f64; 2]>,
    /// Scores by class, or by kind of entity.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub classes: Vec<ClassScore>,
    /// Cross-entropy per token of text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss: Option<f64>,
    /// Its exponential.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub perplexity: Option<f64>,
    /// BLEU of descriptions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bleu: Option<f64>,
    /// CIDEr-D of descriptions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cider: Option<f64>,
    /// One minus the edit distance in words to the nearest reference, over the longer of the two.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub edit_similarity: Option<f64>,
    /// Average precision of boxes at an overlap of 0.5.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ap50: Option<f64>,
    /// Its mean over overlaps from 0.5 to 0.95.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ap: Option<f64>,
    /// The average precision of each class at an overlap of 0.5.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ap50_classes: Vec<(String, f64)>,
}

/// The most tokens of a text that are predicted in one row.
const ROW: usize = 1024;

impl Evaluation {
    /// Whether the model in a folder is scored on labels rather than on translations.
    ///
    /// # Errors
    /// If it has no `config.json`.
    pub fn is_of_labels(folder: &Path) -> Result<bool> {
        Ok(matches!(kind(folder)?.as_str(), "encoder" | "han"))
    }

    /// Scores a model that classifies, tags or answers on a file in the format of its task: see
    /// [`labelled`](crate::labelled).
    ///
    /// # Errors
    /// If the model or the data cannot be read, or they do not fit together.
    pub fn of_labels(model: &Classifier, data: &Path, machine: &Machine) -> Result<Evaluation> {
        match model {
            Classifier::Encoder(encoder) if encoder.config.head == Head::Tags => tags(encoder, data, machine),
            Classifier::Encoder(encoder) if encoder.config.head == Head::Span => answers(encoder, data, machine),
            _ => class_scores(model, data, machine),
        }
    }

    /// The perplexity of a text under a generative model. The text is split into rows as long as the model accepts, at
    /// most 1,024 tokens, and each token is predicted from those before it in its row.
    ///
    /// # Errors
    /// If the text cannot be read or has fewer than two tokens.
    pub fn of_text(generator: &Generator, data: &Path, machine: &Machine) -> Result<Evaluation> {
        let tokens = generator.tokenizer.encode_text(&packed::text(data)?);
        if tokens.len() < 2 {
            return Err(Error::format(data, "text", "it has fewer than two tokens"));
        }
        let row = generator.model.max_len().min(ROW);
        let (pool, mut loss) = (Pool::new(), Loss::default());
        let mut start = 0;
        while start + 1 < tokens.len() {
            let end = (start + row).min(tokens.len() - 1);
            let mut tape = Tape::inference(&generator.parameters, &pool, machine);
            loss += generator.model.loss(&mut tape, &Batch::of_text([&tokens[start..=end]]), 0.0, 1.0)?.read();
            start = end;
        }
        let nll = loss.nll / loss.rows.max(1) as f64;
        let (loss, perplexity) = (Some(nll), Some(perplexity(nll)));
        Ok(Evaluation { measured: "text", items: tokens.len(), loss, perplexity, ..Evaluation::default() })
    }
}

fn class_scores(model: &Classifier, data: &Path, machine: &Machine) -> Result<Evaluation> {
    let texts = labelled::classes(data)?;
    let found = model.texts(&texts.iter().map(|text| &text.text).collect::<Vec<_>>(), machine)?;
    let said: Vec<&str> = found.iter().map(|row| model.labels()[highest(row)].as_str()).collect();
    let there: Vec<&str> = texts.iter().map(|text| text.label.as_str()).collect();
    let classes = classes::of(&said, &there)?;
    Ok(Evaluation {
        measured: "classes",
        items: texts.len(),
        accuracy: Some(Exact::of(&said, &there)?.score()),
        f1: Some(classes::macro_f1(&classes)),
        classes,
        ..Evaluation::default()
    })
}

fn tags(encoder: &Encoder, data: &Path, machine: &Machine) -> Result<Evaluation> {
    let sentences = labelled::tags(data)?;
    let words: Vec<Vec<&String>> = sentences.iter().map(|sentence| sentence.words.iter().collect()).collect();
    let found = encoder.tag(&words, machine)?;
    let there: Vec<Vec<String>> = sentences.into_iter().map(|sentence| sentence.tags).collect();
    let entities = Entities::of(&found, &there)?;
    Ok(Evaluation {
        measured: "tags",
        items: there.len(),
        accuracy: Some(Exact::of(&found.concat(), &there.concat())?.score()),
        f1: Some(entities.f1()),
        precision_recall: Some([entities.precision(), entities.recall()]),
        classes: Entities::by_kind(&found, &there)?,
        ..Evaluation::default()
    })
}

fn answers(encoder: &Encoder, data: &Path, machine: &Machine) -> Result<Evaluation> {
    let asked = labelled::answers(data)?;
    let found = asked.iter().map(|asked| Ok(encoder.answer(&asked.question, &asked.context, machine)?.text));
    let found = found.collect::<Result<Vec<String>>>()?;
    let there: Vec<Vec<&str>> =
        asked.iter().map(|asked| asked.answers.iter().map(|(_, text)| text.as_str()).collect()).collect();
    let Answers { exact, f1 } = Answers::of(&found, &there)?;
    let (exact, f1) = (Some(exact), Some(f1));
    Ok(Evaluation { measured: "answers", items: asked.len(), exact, f1, ..Evaluation::default() })
}
