//! Validation on the dev set: its loss, and the metrics of translations or labels.

use super::augmentation::ClassedBoxes;
use super::dataset::{Dataset, LabelledData, TextStream};
use super::events::{Measured, Validation};
use super::picture_data::PictureData;
use super::trained_model::TrainedModel;
use crate::batch::Batch;
use crate::encoder::{Example, Examples, highest};
use crate::image::Image;
use crate::labelled::LabelledTexts;
use crate::metrics::answers::Answers;
use crate::metrics::bleu::Bleu;
use crate::metrics::captions::Captions;
use crate::metrics::chrf::Chrf;
use crate::metrics::classes;
use crate::metrics::detection::{AveragePrecision, ScoredBox};
use crate::metrics::entities::Entities;
use crate::metrics::exact::Exact;
use crate::metrics::perplexity;
use crate::metrics::words::Words;
use crate::pictures::Pictures;
use crate::search::Search;
use crate::translator::Translator;
use crate::voice::SpokenText;
use crate::{Describer, Detector, Encoder, Error, Generator, Model, Recipe, Result, Speaker};
use qkv_nn::{Loss, Machine, Parameters, Pool, Tape};

/// Number of examples that are reported.
const SAMPLES: usize = 3;

pub(super) fn validate(
    model: &TrainedModel,
    data: &Dataset,
    recipe: &Recipe,
    machine: &Machine,
    pool: &Pool<f32>,
    step: u64,
) -> Result<Validation> {
    let (translator, dev) = match (model, data) {
        (TrainedModel::Text(translator), Dataset::Pairs(pairs)) => (translator, &pairs.dev),
        (TrainedModel::Text(Translator { model, parameters, .. }), Dataset::Text(text))
        | (TrainedModel::Generator(Generator { model, parameters, .. }), Dataset::Text(text)) => {
            return of_text((model, parameters), text, machine, pool, step);
        }
        (TrainedModel::Generator(Generator { model, parameters, .. }), Dataset::Chat(chat)) => {
            let (mut loss, pad) = (Loss::default(), chat.pad);
            for part in chat.dev.chunks(TOGETHER) {
                let longest = model.max_len().saturating_add(1);
                let rows = part.iter().map(|(ids, answers)| {
                    let length = ids.len().min(longest);
                    (&ids[..length], &answers[..length])
                });
                let mut tape = Tape::inference(parameters, pool, machine);
                loss += model.loss(&mut tape, &Batch::of_answers(rows, pad), 0.0, 1.0)?.read();
            }
            let nll = loss.nll / loss.rows.max(1) as f64;
            return Ok(Validation { step, loss: nll, perplexity: perplexity(nll), ..Validation::default() });
        }
        (TrainedModel::Encoder(encoder), Dataset::Masked(text)) => {
            let nll = loss_of(encoder, &text.dev_examples(), machine, pool)?;
            return Ok(Validation { step, loss: nll, perplexity: perplexity(nll), ..Validation::default() });
        }
        (TrainedModel::Encoder(encoder), Dataset::Labelled(data)) => {
            return of_labels(encoder, data, machine, pool, step);
        }
        (TrainedModel::Han(han), Dataset::Labelled(LabelledData { dev: LabelledTexts::Classes(texts), .. })) => {
            let found = han.classify(&texts.iter().map(|text| &text.text).collect::<Vec<_>>(), machine)?;
            let there: Vec<&str> = texts.iter().map(|text| text.label.as_str()).collect();
            return Ok(of_classes(&found, &there, &han.config.labels, step));
        }
        (TrainedModel::Vit(vit), Dataset::Images(images)) => {
            let found = vit.classify(&images.dev, machine)?;
            let names = &vit.config.labels;
            let there: Vec<&str> = images.dev_classes.iter().map(|&class| names[class as usize].as_str()).collect();
            return Ok(of_classes(&found, &there, names, step));
        }
        (TrainedModel::Describer(describer), Dataset::Pictures(PictureData::Captions(captions))) => {
            return of_captions(describer, &captions.dev, recipe, machine, pool, step);
        }
        (TrainedModel::Vqa(vqa), Dataset::Pictures(PictureData::Questions(questions))) => {
            let dev = &questions.dev;
            let asked: Vec<_> =
                dev.lines.iter().map(|(image, [question, _])| (&dev.images[*image], question.as_str())).collect();
            let there: Vec<&str> = dev.lines.iter().map(|(_, [_, answer])| answer.as_str()).collect();
            return Ok(of_classes(&vqa.probabilities(&asked, machine)?, &there, &vqa.config.labels, step));
        }
        (TrainedModel::Detector(detector), Dataset::Pictures(PictureData::Boxes(boxes))) => {
            return of_boxes(detector, &boxes.dev, machine, step);
        }
        (TrainedModel::Speaker(voice), Dataset::Speaker(data)) => {
            return of_speech(voice, &data.dev, recipe, machine, pool, step);
        }
        _ => return Err(Error::invalid("this data is for a model of another kind")),
    };
    let loss = translator.loss(dev, machine, pool)?;
    let count = recipe.train.validate_sentences.min(dev.len());
    let sources: Vec<&str> = dev[..count].iter().map(|pair| pair.source.as_str()).collect();
    let references: Vec<&str> = dev[..count].iter().map(|pair| pair.target.as_str()).collect();
    // Greedy search is fast and ranks checkpoints as a beam search would.
    let search = Search { beam: 1, sample: None, ..recipe.search.clone() };
    let found = translator.translate(&sources, &search, machine)?;
    let outputs: Vec<&str> = found.iter().map(|found| found.first().map_or("", |best| best.text.as_str())).collect();
    let (bleu, chrf, exact) = if outputs.is_empty() {
        (0.0, 0.0, 0.0)
    } else {
        let bleu = Bleu::of(&outputs, &references, Words::default())?.score;
        (bleu, Chrf::of(&outputs, &references)?.score, Exact::of(&outputs, &references)?.score())
    };
    let nll = loss.nll / loss.rows.max(1) as f64;
    let sample = |at: usize| [sources[at], outputs[at], references[at]].map(str::to_owned);
    let samples = (0..outputs.len()).step_by((outputs.len() / SAMPLES).max(1)).take(SAMPLES).map(sample).collect();
    let (perplexity, sentences) = (perplexity(nll), outputs.len());
    let (measured, f1) = (Measured::Translations, 0.0);
    Ok(Validation { step, loss: nll, perplexity, bleu, chrf, exact, f1, sentences, samples, measured })
}

/// Average precision of the boxes found in images. The reported loss is 1 minus the average precision.
fn of_boxes(detector: &Detector, dev: &[(Image, ClassedBoxes)], machine: &Machine, step: u64) -> Result<Validation> {
    let images: Vec<Image> = dev.iter().map(|(image, _)| image.clone()).collect();
    let found = detector.detect(&images, 0.0, machine)?;
    let found: Vec<Vec<ScoredBox>> = found.iter().map(|boxes| boxes.iter().map(ScoredBox::from).collect()).collect();
    let there =
        |boxes: &ClassedBoxes| boxes.iter().map(|&(class, edges)| ScoredBox { class, score: 1.0, edges }).collect();
    let there: Vec<Vec<ScoredBox>> = dev.iter().map(|(_, boxes)| there(boxes)).collect();
    let AveragePrecision { at_half, mean, .. } = AveragePrecision::of(&found, &there);
    let loss = 1.0 - mean / 100.0;
    let (measured, sentences, perplexity) = (Measured::Boxes, dev.len(), perplexity(loss));
    Ok(Validation { step, loss, perplexity, exact: at_half, f1: mean, sentences, measured, ..Validation::default() })
}

/// The loss of recordings, and the share of attention to their letters that lies near the diagonal.
fn of_speech(
    voice: &Speaker,
    dev: &[SpokenText],
    recipe: &Recipe,
    machine: &Machine,
    pool: &Pool<f32>,
    step: u64,
) -> Result<Validation> {
    let mut loss = Loss::default();
    for spoken in dev.chunks(TOGETHER) {
        let mut tape = Tape::inference(&voice.parameters, pool, machine);
        loss += voice.loss(&mut tape, &spoken.iter().collect::<Vec<_>>(), 1.0)?.read();
    }
    let sentences = recipe.train.validate_sentences.min(dev.len());
    let shares = dev[..sentences].iter().map(|spoken| voice.diagonal(spoken, machine)).collect::<Result<Vec<f64>>>()?;
    let exact = 100.0 * shares.iter().sum::<f64>() / sentences.max(1) as f64;
    let loss = loss.nll / loss.rows.max(1) as f64;
    let (measured, perplexity) = (Measured::Speech, perplexity(loss));
    Ok(Validation { step, loss, perplexity, exact, sentences, measured, ..Validation::default() })
}

/// The loss of all captions, and metrics of the images that are described. An image with several captions is compared
/// with all of them.
fn of_captions(
    describer: &Describer,
    dev: &Pictures<1>,
    recipe: &Recipe,
    machine: &Machine,
    pool: &Pool<f32>,
    step: u64,
) -> Result<Validation> {
    let mut loss = Loss::default();
    for lines in dev.lines.chunks(TOGETHER) {
        let images: Vec<Image> = lines.iter().map(|(image, _)| dev.images[*image].clone()).collect();
        let texts: Vec<Vec<u32>> = lines.iter().map(|(_, [text])| describer.tokens(text)).collect();
        let texts: Vec<&[u32]> = texts.iter().map(Vec::as_slice).collect();
        let mut tape = Tape::inference(&describer.parameters, pool, machine);
        loss += describer.loss(&mut tape, (&images, &texts), 0.0, 1.0)?.read();
    }
    let count = recipe.train.validate_sentences.min(dev.images.len());
    let mut references: Vec<Vec<&str>> = vec![Vec::new(); count];
    for (image, [text]) in dev.lines.iter().filter(|(image, _)| *image < count) {
        references[*image].push(text);
    }
    let search = Search { beam: 1, sample: None, ..recipe.search.clone() };
    let found = describer.describe(&dev.images[..count], &search, machine)?;
    let outputs: Vec<&str> = found.iter().map(|found| found.first().map_or("", |best| best.text.as_str())).collect();
    let scores = Captions::of(&outputs, &references, Words::default())?;
    let nll = loss.nll / loss.rows.max(1) as f64;
    let sample = |at: usize| [format!("image {}", at + 1), outputs[at].into(), references[at][0].into()];
    Ok(Validation {
        step,
        loss: nll,
        perplexity: perplexity(nll),
        bleu: scores.bleu.score,
        exact: scores.exact,
        f1: scores.similarity,
        sentences: count,
        samples: (0..count).step_by((count / SAMPLES).max(1)).take(SAMPLES).map(sample).collect(),
        measured: Measured::Captions,
        ..Validation::default()
    })
}

/// Tokens per batch.
const TOKENS: usize = 4096;

/// The loss of a text in consecutive rows.
fn of_text(
    (model, parameters): (&Model, &Parameters<f32>),
    text: &TextStream,
    machine: &Machine,
    pool: &Pool<f32>,
    step: u64,
) -> Result<Validation> {
    let mut loss = Loss::default();
    let rows: Vec<&[u32]> =
        (0..(text.dev.len() - 1) / text.block).map(|row| &text.dev[row * text.block..][..text.block + 1]).collect();
    // No more rows at once than in a training step, so that validation needs no more memory.
    for rows in rows.chunks((TOKENS / text.block).clamp(1, text.rows.max(1))) {
        let mut tape = Tape::inference(parameters, pool, machine);
        loss += model.loss(&mut tape, &Batch::of_text(rows.iter().copied()), 0.0, 1.0)?.read();
    }
    let nll = loss.nll / loss.rows.max(1) as f64;
    Ok(Validation { step, loss: nll, perplexity: perplexity(nll), ..Validation::default() })
}

/// Accuracy, F1 and loss of predicted classes. A class that the model does not know counts as wrong and is left out of
/// the loss.
fn of_classes(found: &[Vec<f32>], there: &[&str], names: &[String], step: u64) -> Validation {
    let said: Vec<&str> = found.iter().map(|row| names[highest(row)].as_str()).collect();
    let right = said.iter().zip(there).filter(|(said, there)| said == there).count();
    let known = found.iter().zip(there).filter_map(|(row, there)| Some(row[names.iter().position(|n| n == there)?]));
    let losses: Vec<f64> = known.map(|share| -f64::from(share).max(1e-30).ln()).collect();
    let nll = losses.iter().sum::<f64>() / losses.len().max(1) as f64;
    Validation {
        step,
        loss: nll,
        perplexity: perplexity(nll),
        exact: 100.0 * right as f64 / there.len().max(1) as f64,
        f1: classes::macro_f1(&classes::of(&said, there).expect("a class is predicted for each")),
        sentences: there.len(),
        measured: Measured::Classes,
        ..Validation::default()
    }
}

/// Loss and metrics of an encoder on labelled texts.
fn of_labels(
    encoder: &Encoder,
    data: &LabelledData,
    machine: &Machine,
    pool: &Pool<f32>,
    step: u64,
) -> Result<Validation> {
    let (examples, exact, f1, measured) = match &data.dev {
        LabelledTexts::Classes(texts) => {
            let found = encoder.classify(&texts.iter().map(|text| &text.text).collect::<Vec<_>>(), machine)?;
            let there: Vec<&str> = texts.iter().map(|text| text.label.as_str()).collect();
            return Ok(of_classes(&found, &there, &encoder.config.labels, step));
        }
        LabelledTexts::Tags(sentences) => {
            let words: Vec<Vec<&String>> = sentences.iter().map(|sentence| sentence.words.iter().collect()).collect();
            let found = encoder.tag(&words, machine)?;
            let there: Vec<Vec<String>> = sentences.iter().map(|sentence| sentence.tags.clone()).collect();
            let entities = Entities::of(&found, &there)?;
            let (found, there) = (found.concat(), there.concat());
            let exact = Exact::of(&found, &there)?.score();
            let examples = sentences.iter().map(|sentence| encoder.tagged(&sentence.words, &sentence.tags)).collect();
            (examples, exact, entities.f1(), Measured::Tags)
        }
        LabelledTexts::Answers(asked) => {
            let answer = |asked: &crate::labelled::Question| encoder.answer(&asked.question, &asked.context, machine);
            let found = asked.iter().map(|asked| Ok(answer(asked)?.text)).collect::<Result<Vec<String>>>()?;
            let text = |asked: &crate::labelled::Question| asked.answers.iter().map(|(_, text)| text.clone()).collect();
            let answers = Answers::of(&found, &asked.iter().map(text).collect::<Vec<Vec<String>>>())?;
            let windows = asked.iter().map(|asked| encoder.asked(asked)).collect::<Result<Vec<_>>>()?;
            (windows.concat(), answers.exact, answers.f1, Measured::Answers)
        }
    };
    let nll = loss_of(encoder, &examples, machine, pool)?;
    let sentences = data.dev.len();
    let whole =
        Validation { step, loss: nll, perplexity: perplexity(nll), exact, f1, sentences, ..Validation::default() };
    Ok(Validation { measured, ..whole })
}

/// The mean loss of examples.
fn loss_of(encoder: &Encoder, examples: &[Example], machine: &Machine, pool: &Pool<f32>) -> Result<f64> {
    let mut loss = Loss::default();
    for examples in examples.chunks(TOGETHER) {
        let mut tape = Tape::inference(&encoder.parameters, pool, machine);
        loss += encoder.loss(&mut tape, &Examples(examples.to_vec()), 1.0)?.read();
    }
    Ok(loss.nll / loss.rows.max(1) as f64)
}

/// Texts per batch.
const TOGETHER: usize = 16;
