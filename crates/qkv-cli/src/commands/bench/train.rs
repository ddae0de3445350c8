//! `qkv bench --train`: whole training steps of some models, on the CPU or on a GPU, ours and PyTorch's in alternating
//! rounds, each in its own process.

use super::args::{BenchArgs, ReportFormat};
use super::progress::Progress;
use super::python;
use super::statistics::median;
use super::table::{Column, Table, time};
use super::training_step::{PRECISIONS, StepTiming, TrainingStep, models};
use crate::failure::Failure;
use crate::output::Print;
use qkv_nn::Device;
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

const SCRIPT: &str = include_str!("step.py");

/// A model in a precision, measured on both sides.
struct StepComparison {
    step: TrainingStep,
    ours: Vec<StepTiming>,
    theirs: Vec<StepTiming>,
}

pub(super) fn train(args: &BenchArgs, threads: usize, print: Print<'_>) -> Result<(), Failure> {
    let device = if args.on_device { Device::Cuda } else { Device::Cpu };
    // On a GPU nobody trains in f32.
    let precisions = if args.on_device { &PRECISIONS[1..] } else { &PRECISIONS[..] };
    let seconds = args.seconds;
    let cases: Vec<TrainingStep> = models(device)
        .iter()
        .flat_map(|model| {
            precisions.iter().map(move |precision| TrainingStep { model, precision, threads, seconds, device })
        })
        .collect();
    let against = args.against.is_some();
    let mut columns = vec![Column::words("step of", 10), Column::words("products", 8)];
    columns.extend(["best ms", "median ms", "MB"].map(Column::numbers));
    if against {
        columns.extend(["torch ms", "torch MB", "ratio", "memory"].map(Column::numbers));
    }
    let table = Table::new(columns, args.format == ReportFormat::Markdown);
    let names = models(device).iter().map(|model| format!("{}: {}\n", model.name, model.what));
    let mut header: String = names.collect();
    let place = if args.on_device { "one GPU".into() } else { format!("{threads} threads") };
    header += &format!("{place}\n\n{}", table.header());
    if args.format != ReportFormat::Json && !print(&header)? {
        return Ok(());
    }
    let progress = Progress::of(cases.len());
    for (at, &step) in cases.iter().enumerate() {
        let mut row = StepComparison { step, ours: Vec::new(), theirs: Vec::new() };
        let rounds = args.rounds();
        for round in 0..rounds {
            progress.show(at, &format!("{} {}, round {} of {rounds}", step.model.name, step.precision, round + 1));
            row.ours.push(ours(step)?);
            if let Some((python, _)) = &args.against {
                row.theirs.push(theirs(step, python)?);
            }
        }
        progress.clear();
        let text =
            if args.format == ReportFormat::Json { format!("{}\n", row.to_json()) } else { table.row(&row.cells()) };
        if !print(&text)? {
            return Ok(());
        }
    }
    let end = "\nratio: PyTorch's time over ours, the best step of each side per round, the median over rounds.\n\
               MB: peak memory of the process, or of the GPU; memory: ours over PyTorch's.\n";
    if args.format != ReportFormat::Json && against {
        print(end)?;
    }
    Ok(())
}

impl StepComparison {
    fn best(rounds: &[StepTiming]) -> f64 {
        rounds.iter().map(|found| found.best_ms).fold(f64::INFINITY, f64::min)
    }

    fn median(rounds: &[StepTiming]) -> f64 {
        median(rounds.iter().map(|found| found.median_ms)).unwrap_or(f64::NAN)
    }

    fn peak(rounds: &[StepTiming]) -> Option<u64> {
        rounds.iter().filter_map(|found| found.peak_bytes).max()
    }

    /// PyTorch's time over ours.
    fn ratio(&self) -> Option<f64> {
        median(self.theirs.iter().zip(&self.ours).map(|(theirs, ours)| theirs.best_ms / ours.best_ms))
    }

    /// Our memory over PyTorch's.
    fn memory(&self) -> Option<f64> {
        StepComparison::peak(&self.ours)
            .zip(StepComparison::peak(&self.theirs))
            .map(|(ours, theirs)| ours as f64 / theirs as f64)
    }

    fn cells(&self) -> Vec<String> {
        let megabytes = |peak: Option<u64>| peak.map_or("?".into(), |bytes| (bytes >> 20).to_string());
        let mut cells = vec![self.step.model.name.into(), self.step.precision.into()];
        cells.extend([
            time(StepComparison::best(&self.ours)),
            time(StepComparison::median(&self.ours)),
            megabytes(StepComparison::peak(&self.ours)),
        ]);
        if let Some(ratio) = self.ratio() {
            cells.extend([
                time(StepComparison::best(&self.theirs)),
                megabytes(StepComparison::peak(&self.theirs)),
                format!("{ratio:.2}"),
            ]);
            cells.push(self.memory().map_or("?".into(), |memory| format!("{memory:.2}")));
        }
        cells
    }

    fn to_json(&self) -> Value {
        let mut object = json!({
            "model": self.step.model.name, "products": self.step.precision, "threads": self.step.threads,
            "best_ms": StepComparison::best(&self.ours), "median_ms": StepComparison::median(&self.ours),
            "peak_bytes": StepComparison::peak(&self.ours),
        });
        if let (Some(ratio), Some(object)) = (self.ratio(), object.as_object_mut()) {
            object.insert("torch_best_ms".into(), json!(StepComparison::best(&self.theirs)));
            object.insert("torch_peak_bytes".into(), json!(StepComparison::peak(&self.theirs)));
            object.insert("ratio".into(), json!(ratio));
        }
        object
    }
}

fn arguments(step: TrainingStep) -> [String; 5] {
    let device = if step.device == Device::Cuda { "cuda" } else { "cpu" };
    [step.model.name.into(), step.precision.into(), step.threads.to_string(), step.seconds.to_string(), device.into()]
}

fn ours(step: TrainingStep) -> Result<StepTiming, Failure> {
    let failed = |why: String| Failure::new(format!("cannot measure a training step: {why}"));
    let program = std::env::current_exe().map_err(|error| failed(error.to_string()))?;
    let ran = Command::new(program).arg("bench-step").args(arguments(step)).output();
    let ran = ran.map_err(|error| failed(error.to_string()))?;
    python::read(&ran).ok_or_else(|| failed(python::last_line(&ran)))
}

fn theirs(step: TrainingStep, python: &Path) -> Result<StepTiming, Failure> {
    python::ask(python, SCRIPT, &arguments(step))
}
