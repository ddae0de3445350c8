//! `qkv eval`: scores of a model's translations, labels or predictions of text, or of any translations in a file.
//!
//! | module | owns |
//! | --- | --- |
//! | `args` | the arguments |
//! | `labels` | scores of labels and of text, as text or JSON |
//! | `report` | scores of translations, as text or JSON |

mod args;
mod labels;
mod report;

use crate::atomic_file::OutputPath;
use crate::command::{Command, Run, Status};
use crate::failure::Failure;
use crate::lines::Lines;
use crate::output::Print;
use crate::{embedded, input, threads};
use args::{ARGUMENTS, EXAMPLES, EvalArgs, EvalSource};
use indicatif::{ProgressBar, ProgressStyle};
use qkv_models::metrics::{bleu::Bleu, chrf::Chrf, exact::Exact, perplexity};
use qkv_models::text::corpus::{Corpus, Pair};
use qkv_models::{Classifier, Evaluation, Generator, Search, Translator};
use qkv_nn::{Machine, Pool};
use report::{EvalReport, ModelScores};
use std::path::Path;
use std::time::Instant;

/// Maximum number of sentences per batch.
const BATCH: usize = 1024;

pub(super) const COMMAND: Command =
    Command::new("eval", "Score a model: BLEU, chrF, accuracy, F1, exact match, perplexity", ARGUMENTS, |matches| {
        Ok(Box::new(EvalArgs::parse(matches)?))
    })
    .examples(EXAMPLES);

impl Run for EvalArgs {
    fn run(&self, print: Print<'_>) -> Result<Status, Failure> {
        threads::on(self.threads, || {
            if let EvalSource::Model { folder: Some(folder), data } = &self.source
                && let Some(found) = evaluate_labels(self, folder, data)?
            {
                print(&if self.json { labels::to_json(folder, &found) } else { labels::to_text(&found) })?;
                return Ok(Status::Done);
            }
            let report = match &self.source {
                EvalSource::Model { folder, data } => evaluate_model(self, folder.as_deref(), data)?,
                EvalSource::Files { hypotheses, references } => {
                    score(self, &lines_of(hypotheses)?, &lines_of(references)?, None)?
                }
            };
            print(&if self.json { report.to_json() } else { report.to_string() })?;
            Ok(Status::Done)
        })
    }
}

/// Scores of labels, of plain text, or of a model that looks at images; `None` for a model that translates.
fn evaluate_labels(args: &EvalArgs, model: &Path, data: &Path) -> Result<Option<Evaluation>, Failure> {
    let adapter = args.adapter.as_deref();
    let is_file = model.is_file();
    if !is_file && (!model.is_dir() || !model.join("config.json").exists()) {
        return Ok(None);
    }
    if !is_file && Evaluation::is_of_labels(model)? {
        input::check(data)?;
        return Ok(Some(Evaluation::of_labels(
            &Classifier::open_with(model, adapter)?,
            data,
            &args.device.machine()?,
        )?));
    }
    if !is_file && Evaluation::is_of_images(model)? {
        if adapter.is_some() {
            return Err(Failure::new("`--adapter` works with encoders and language models, not with image models"));
        }
        input::check(data)?;
        let search = |own: &Search| args.search.apply_to(own, 1);
        let found = Evaluation::of_images(model, data, search, args.tokenize, &args.device.machine()?)?;
        return Ok(Some(found));
    }
    // Pairs are lines of `source ⇥ target`; any other file is text, which a decoder-only model predicts.
    let name = data.file_name().map(|name| name.to_string_lossy().to_lowercase()).unwrap_or_default();
    let pairs = name.trim_end_matches(".gz").ends_with(".tsv");
    let decoder = is_file || qkv_models::kind(model)? == "gpt";
    if pairs || !decoder {
        return match adapter {
            Some(_) => Err(Failure::new("`--adapter` works with encoders and language models, not with translators")),
            None => Ok(None),
        };
    }
    input::check(data)?;
    Ok(Some(Evaluation::of_text(&Generator::open_with(model, adapter)?, data, &args.device.machine()?)?))
}

fn lines_of(path: &Path) -> Result<Vec<String>, Failure> {
    Ok(Lines::new(&[], Some(path))?.all()?.into_iter().map(|line| line.text).collect())
}

fn score(
    args: &EvalArgs,
    outputs: &[String],
    references: &[String],
    model: Option<ModelScores>,
) -> Result<EvalReport, Failure> {
    let bleu = Bleu::of(outputs, references, args.tokenize)?;
    let (chrf, exact) = (Chrf::of(outputs, references)?, Exact::of(outputs, references)?);
    Ok(EvalReport::new(&bleu, &chrf, exact, model))
}

fn evaluate_model(args: &EvalArgs, folder: Option<&Path>, data: &Path) -> Result<EvalReport, Failure> {
    input::check(data)?;
    let output = args.output.as_deref().map(|path| OutputPath::new(path, Some(data))).transpose()?;
    let translator = embedded::translator(folder)?;
    let pairs = Corpus::read(data)?;
    let most = translator.model.max_len().saturating_sub(1);
    for (at, pair) in pairs.iter().enumerate() {
        for (side, text) in [("source", &pair.source), ("target", &pair.target)] {
            let count = translator.tokenizer.encode(text).len();
            if count > most {
                let place = format!("{}:{}", data.display(), at + 1);
                let what = format!("{place}: the {side} has {count} tokens, the model takes at most {most}");
                return Err(Failure::new(what).hint("leave the pair out, or split it"));
            }
        }
    }
    let machine = args.device.machine()?.int8(args.int8);
    let (outputs, seconds) = translate(args, &translator, &pairs, &machine)?;
    if let Some(output) = output {
        output.write(outputs.iter().map(|line| format!("{line}\n")).collect::<String>().as_bytes())?;
    }
    let loss = translator.loss(&pairs, &machine, &Pool::new())?;
    let nll = loss.nll / loss.rows.max(1) as f64;
    let scores = ModelScores {
        model: folder.map_or(embedded::NAME.into(), |folder| folder.display().to_string()),
        loss: nll,
        perplexity: perplexity(nll),
        seconds,
        sentences_per_second: pairs.len() as f64 / seconds,
    };
    let references: Vec<String> = pairs.into_iter().map(|pair| pair.target).collect();
    score(args, &outputs, &references, Some(scores))
}

/// The best translation of each source, and the total time in seconds.
fn translate(
    args: &EvalArgs,
    translator: &Translator,
    pairs: &[Pair],
    machine: &Machine,
) -> Result<(Vec<String>, f64), Failure> {
    let mut search = args.search.apply_to(&translator.search, 1);
    // Sentences of similar length go through the model together.
    let mut order: Vec<usize> = (0..pairs.len()).collect();
    order.sort_by_key(|&at| (pairs[at].source.len(), at));
    let style = ProgressStyle::with_template("{bar:32} {pos}/{len} sentences, {eta} left").expect("a constant");
    let bar = ProgressBar::new(pairs.len() as u64).with_style(style);
    let mut outputs = vec![String::new(); pairs.len()];
    let start = Instant::now();
    for (batch, indices) in order.chunks(BATCH).enumerate() {
        if let Some(sample) = &mut search.sample {
            sample.before = batch * BATCH;
        }
        let sources: Vec<&str> = indices.iter().map(|&at| &pairs[at].source[..]).collect();
        let found = translator.translate(&sources, &search, machine)?;
        for (&at, found) in indices.iter().zip(found) {
            outputs[at] = found.into_iter().next().map(|best| best.text.replace(['\n', '\r'], " ")).unwrap_or_default();
        }
        bar.inc(indices.len() as u64);
    }
    bar.finish_and_clear();
    Ok((outputs, start.elapsed().as_secs_f64()))
}
