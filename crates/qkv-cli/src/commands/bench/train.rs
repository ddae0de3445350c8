//! `qkv bench --train`: whole training steps of two models, ours and PyTorch's in turns, each in a process of its own.

use super::Say;
use super::asked::{Asked, Form};
use super::progress::Progress;
use super::statistics::median;
use super::steps::{Found, MODELS, PRECISIONS, Step};
use super::table::{Column, Table, time};
use crate::failure::Failure;
use serde_json::{Value, json};
use std::path::Path;
use std::process::{Command, Output};

const SCRIPT: &str = include_str!("step.py");

/// A model in a precision, measured.
struct Row {
    step: Step,
    ours: Vec<Found>,
    theirs: Vec<Found>,
}

pub(super) fn train(asked: &Asked, threads: usize, say: Say<'_>) -> Result<(), Failure> {
    let cases: Vec<Step> = MODELS
        .iter()
        .flat_map(|(model, _)| PRECISIONS.map(|precision| Step { model, precision, threads, seconds: asked.seconds }))
        .collect();
    let against = asked.against.is_some();
    let mut columns = vec![Column::words("step of", 10), Column::words("products", 8)];
    columns.extend(["best ms", "median ms", "MB"].map(Column::numbers));
    if against {
        columns.extend(["torch ms", "torch MB", "ratio", "memory"].map(Column::numbers));
    }
    let table = Table::new(columns, asked.form == Form::Markdown);
    let mut head = MODELS.map(|(name, what)| format!("{name}: {what}\n")).concat();
    head += &format!("{threads} threads\n\n{}", table.head());
    if asked.form != Form::Json && !say(&head)? {
        return Ok(());
    }
    let progress = Progress::of(cases.len());
    for (at, &step) in cases.iter().enumerate() {
        let mut row = Row { step, ours: Vec::new(), theirs: Vec::new() };
        let rounds = asked.against.as_ref().map_or(1, |(_, rounds)| *rounds);
        for round in 0..rounds {
            progress.show(at, &format!("{} {}, round {} of {rounds}", step.model, step.precision, round + 1));
            row.ours.push(ours(step)?);
            if let Some((python, _)) = &asked.against {
                row.theirs.push(theirs(step, python)?);
            }
        }
        progress.clear();
        let told = if asked.form == Form::Json { format!("{}\n", row.json()) } else { table.row(&row.cells()) };
        if !say(&told)? {
            return Ok(());
        }
    }
    let end = "\nratio: PyTorch's time over ours, the best step of either side in each round, the median over rounds.\n\
               MB: the most memory that the whole process had; memory: ours over PyTorch's.\n";
    if asked.form != Form::Json && against {
        say(end)?;
    }
    Ok(())
}

impl Row {
    fn best(rounds: &[Found]) -> f64 {
        rounds.iter().map(|found| found.best_ms).fold(f64::INFINITY, f64::min)
    }

    fn median(rounds: &[Found]) -> f64 {
        median(rounds.iter().map(|found| found.median_ms)).unwrap_or(f64::NAN)
    }

    fn peak(rounds: &[Found]) -> Option<u64> {
        rounds.iter().filter_map(|found| found.peak_bytes).max()
    }

    /// PyTorch's time over ours.
    fn ratio(&self) -> Option<f64> {
        median(self.theirs.iter().zip(&self.ours).map(|(theirs, ours)| theirs.best_ms / ours.best_ms))
    }

    /// Our memory over PyTorch's.
    fn memory(&self) -> Option<f64> {
        Row::peak(&self.ours).zip(Row::peak(&self.theirs)).map(|(ours, theirs)| ours as f64 / theirs as f64)
    }

    fn cells(&self) -> Vec<String> {
        let megabytes = |peak: Option<u64>| peak.map_or("?".into(), |bytes| (bytes >> 20).to_string());
        let mut cells = vec![self.step.model.into(), self.step.precision.into()];
        cells.extend([time(Row::best(&self.ours)), time(Row::median(&self.ours)), megabytes(Row::peak(&self.ours))]);
        if let Some(ratio) = self.ratio() {
            cells.extend([time(Row::best(&self.theirs)), megabytes(Row::peak(&self.theirs)), format!("{ratio:.2}")]);
            cells.push(self.memory().map_or("?".into(), |memory| format!("{memory:.2}")));
        }
        cells
    }

    fn json(&self) -> Value {
        let mut told = json!({
            "model": self.step.model, "products": self.step.precision, "threads": self.step.threads,
            "best_ms": Row::best(&self.ours), "median_ms": Row::median(&self.ours), "peak_bytes": Row::peak(&self.ours),
        });
        if let (Some(ratio), Some(told)) = (self.ratio(), told.as_object_mut()) {
            told.insert("torch_best_ms".into(), json!(Row::best(&self.theirs)));
            told.insert("torch_peak_bytes".into(), json!(Row::peak(&self.theirs)));
            told.insert("ratio".into(), json!(ratio));
        }
        told
    }
}

fn arguments(step: Step) -> [String; 4] {
    [step.model.into(), step.precision.into(), step.threads.to_string(), step.seconds.to_string()]
}

fn ours(step: Step) -> Result<Found, Failure> {
    let failed = |why: String| Failure::new(format!("a training step could not be measured: {why}"));
    let program = std::env::current_exe().map_err(|error| failed(error.to_string()))?;
    let ran = Command::new(program).arg("bench-step").args(arguments(step)).output();
    let ran = ran.map_err(|error| failed(error.to_string()))?;
    read(&ran).ok_or_else(|| failed(last_words(&ran)))
}

fn theirs(step: Step, python: &Path) -> Result<Found, Failure> {
    let ran = Command::new(python).args(["-W", "ignore", "-c", SCRIPT]).args(arguments(step)).output();
    let ran = ran.map_err(|error| {
        Failure::in_file(python, format!("this Python cannot be started: {error}"))
            .hint("`--python PATH` names the one that has PyTorch")
    })?;
    read(&ran).ok_or_else(|| Failure::in_file(python, format!("PyTorch's step failed: {}", last_words(&ran))))
}

fn read(ran: &Output) -> Option<Found> {
    let line = ran.stdout.split(|&byte| byte == b'\n').rfind(|line| !line.is_empty())?;
    serde_json::from_slice(line).ok()
}

/// The last thing that a process said.
fn last_words(ran: &Output) -> String {
    let said = [&ran.stderr[..], &ran.stdout[..]].map(|bytes| String::from_utf8_lossy(bytes).trim_end().to_owned());
    let words = said.iter().find(|words| !words.is_empty()).and_then(|words| words.lines().last());
    words.map_or_else(|| ran.status.to_string(), |words| words.chars().take(200).collect())
}
