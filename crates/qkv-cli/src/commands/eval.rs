//! The command `qkv eval`: how good a model's translations are, or anyone's that lie in a file.

mod asked;
mod report;

pub(crate) use asked::{Asked, CHOICES, after_help};

use crate::failure::Failure;
use crate::say::{Say, Sink};
use crate::translate::{Line, Lines};
use crate::{embedded, threads};
use asked::What;
use indicatif::{ProgressBar, ProgressStyle};
use qkv_models::Translator;
use qkv_models::metrics::{bleu::Bleu, chrf::Chrf, exact::Exact, perplexity};
use qkv_models::text::corpus::{Corpus, Pair};
use qkv_nn::{Machine, Pool};
use report::{Model, Report};
use std::path::Path;
use std::time::Instant;

/// Sentences between two moves of the bar.
const TOGETHER: usize = 128;

/// Measures what was asked.
pub(crate) fn eval(asked: &Asked, say: Say<'_>) -> Result<(), Failure> {
    threads::on(asked.threads, || {
        let report = match &asked.what {
            What::Model { folder, data } => with_model(asked, folder.as_deref(), data)?,
            What::Files { hypotheses, references } => score(asked, &read(hypotheses)?, &read(references)?, None)?,
        };
        say(&if asked.json { report.json() } else { report.to_string() }).map(drop)
    })
}

/// The lines of a file.
fn read(path: &Path) -> Result<Vec<String>, Failure> {
    let mut lines = Lines::open(path)?;
    let mut all = Vec::new();
    loop {
        let portion = lines.next(usize::MAX)?;
        if portion.is_empty() {
            return Ok(all);
        }
        all.extend(portion.into_iter().map(|Line { text, .. }| text));
    }
}

fn score(asked: &Asked, outputs: &[String], references: &[String], model: Option<Model>) -> Result<Report, Failure> {
    let bleu = Bleu::of(outputs, references, asked.words)?;
    let (chrf, exact) = (Chrf::of(outputs, references)?, Exact::of(outputs, references)?);
    Ok(Report::new(&bleu, &chrf, exact, model))
}

fn with_model(asked: &Asked, folder: Option<&Path>, data: &Path) -> Result<Report, Failure> {
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
    let machine = Machine::new(rayon::current_num_threads());
    let (outputs, seconds) = translated(asked, &translator, &pairs, &machine)?;
    if let Some(path) = &asked.output {
        let mut no_stdout = |_: &str| Ok(false);
        let mut sink = Sink::new(Some(path), Some(data), &mut no_stdout)?;
        sink.put(&outputs.iter().map(|line| format!("{line}\n")).collect::<String>())?;
        sink.done()?;
    }
    let loss = translator.loss(&pairs, &machine, &Pool::new())?;
    let nll = loss.nll / loss.rows.max(1) as f64;
    let model = Model {
        model: folder.map_or(embedded::NAME.into(), |folder| folder.display().to_string()),
        loss: nll,
        perplexity: perplexity(nll),
        seconds,
        sentences_per_second: pairs.len() as f64 / seconds,
    };
    let references: Vec<String> = pairs.into_iter().map(|pair| pair.target).collect();
    score(asked, &outputs, &references, Some(model))
}

/// The best translation of each source, and how long they took.
fn translated(
    asked: &Asked,
    translator: &Translator,
    pairs: &[Pair],
    machine: &Machine,
) -> Result<(Vec<String>, f64), Failure> {
    let mut search = asked.searching.over(&translator.search, 1);
    // Sentences of about one length go through the model together.
    let mut order: Vec<usize> = (0..pairs.len()).collect();
    order.sort_by_key(|&at| (pairs[at].source.len(), at));
    let style = ProgressStyle::with_template("{bar:32} {pos}/{len} sentences, {eta} left").expect("a constant");
    let bar = ProgressBar::new(pairs.len() as u64).with_style(style);
    let mut outputs = vec![String::new(); pairs.len()];
    let start = Instant::now();
    for (portion, part) in order.chunks(TOGETHER).enumerate() {
        if let Some(sample) = &mut search.sample {
            sample.before = portion * TOGETHER;
        }
        let sources: Vec<&str> = part.iter().map(|&at| &pairs[at].source[..]).collect();
        let found = translator.translate(&sources, &search, machine)?;
        for (&at, found) in part.iter().zip(found) {
            outputs[at] = found.into_iter().next().map(|best| best.text.replace(['\n', '\r'], " ")).unwrap_or_default();
        }
        bar.inc(part.len() as u64);
    }
    bar.finish_and_clear();
    Ok((outputs, start.elapsed().as_secs_f64()))
}
