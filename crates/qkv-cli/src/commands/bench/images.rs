//! `qkv bench --images`: passes of ResNet-50 over images of 224 × 224, ours and PyTorch's in alternating rounds.
//! Weights are drawn at random, since time does not depend on them, and batch norms are folded into convolutions on
//! both sides.

use super::args::{BenchArgs, ReportFormat};
use super::progress::Progress;
use super::statistics::median;
use super::table::{Column, Table, share, speed, time};
use super::timing::Timing;
use super::{machine, pause, python};
use crate::failure::Failure;
use crate::output::Print;
use qkv_models::ResNet;
use qkv_models::image::Image;
use qkv_nn::Machine;
use qkv_simd::{Isa, peak};
use serde::Deserialize;
use serde_json::{Value, json};
use std::cell::LazyCell;

const SCRIPT: &str = include_str!("images.py");
/// Images per pass.
const BATCHES: [usize; 2] = [1, 8];
/// Side length of an image.
const SIDE: usize = 224;
/// Operations of a pass over one image, in billions; a multiply-add counts as two.
const GFLOP: f64 = 7.716;

/// PyTorch's answer.
#[derive(Deserialize)]
struct Theirs {
    version: String,
    #[serde(flatten)]
    timing: Timing,
}

/// A batch of images, measured on both sides.
struct Row {
    batch: usize,
    threads: usize,
    /// GFLOP/s of multiply-adds in registers, the best of all rounds.
    peak: f64,
    ours: Vec<Timing>,
    theirs: Vec<Timing>,
}

pub(super) fn measure(args: &BenchArgs, threads: usize, print: Print<'_>) -> Result<(), Failure> {
    // Created only after the other side has answered, if there is one.
    let resnet = LazyCell::new(|| ResNet::drawn(1));
    let machine = Machine::new(threads);
    let points = (0..SIDE * SIDE * 3).map(|at| ((at * 2_654_435_761) >> 7) as u8).collect();
    let image = Image::new(SIDE, SIDE, 3, points)?;
    let mut columns = vec![Column::numbers("images")];
    columns.extend(["best ms", "median ms", "GFLOP/s", "of peak"].map(Column::numbers));
    if args.against.is_some() {
        columns.extend(["PyTorch ms", "ratio"].map(Column::numbers));
    }
    let table = Table::new(columns, args.format == ReportFormat::Markdown);
    let progress = Progress::of(BATCHES.len());
    for (at, batch) in BATCHES.into_iter().enumerate() {
        let images = vec![image.clone(); batch];
        let mut row = Row { batch, threads, peak: 0.0, ours: Vec::new(), theirs: Vec::new() };
        let (rounds, mut version) = (args.rounds(), None);
        for round in 0..rounds {
            progress.show(at, &format!("{batch} images, round {} of {rounds}", round + 1));
            if let Some((path, _)) = &args.against {
                let arguments = [batch.to_string(), threads.to_string(), args.seconds.to_string()];
                let found: Theirs = python::ask(path, SCRIPT, &arguments)?;
                row.theirs.push(found.timing);
                version = Some(found.version);
                pause();
            }
            row.peak = row.peak.max(peak::fma::<f32>(Isa::best(), threads));
            let mut failed = None;
            row.ours.push(Timing::of(args.seconds, || {
                if let Err(error) = resnet.logits(&images, &machine) {
                    failed = Some(error);
                }
            }));
            if let Some(error) = failed {
                return Err(error.into());
            }
        }
        progress.clear();
        let header = || format!("{}\n\n{}", machine::describe(threads, version.as_deref()), table.header());
        let text = match args.format {
            ReportFormat::Json => format!("{}\n", row.to_json()),
            _ if at == 0 => header() + &table.row(&row.cells()),
            _ => table.row(&row.cells()),
        };
        if !print(&text)? {
            return Ok(());
        }
    }
    if args.format != ReportFormat::Json && args.against.is_some() {
        print("\nratio: PyTorch's time over ours, the best pass of each side per round, the median over rounds.\n")?;
    }
    Ok(())
}

impl Row {
    fn best(&self) -> Timing {
        Timing::over(&self.ours).expect("at least one round")
    }

    fn gflops(&self) -> f64 {
        GFLOP * self.batch as f64 / (self.best().best_ms / 1e3)
    }

    /// PyTorch's best, and its time over ours.
    fn theirs(&self) -> Option<(Timing, f64)> {
        let ratio = median(self.theirs.iter().zip(&self.ours).map(|(theirs, ours)| theirs.best_ms / ours.best_ms));
        Timing::over(&self.theirs).zip(ratio)
    }

    fn cells(&self) -> Vec<String> {
        let Timing { best_ms, median_ms } = self.best();
        let mut cells = vec![self.batch.to_string(), time(best_ms), time(median_ms), speed(self.gflops())];
        cells.push(share(self.gflops() / self.peak));
        if let Some((theirs, ratio)) = self.theirs() {
            cells.extend([time(theirs.best_ms), format!("{ratio:.2}")]);
        }
        cells
    }

    fn to_json(&self) -> Value {
        let Timing { best_ms, median_ms } = self.best();
        let mut object = json!({
            "images": self.batch, "threads": self.threads, "best_ms": best_ms, "median_ms": median_ms,
            "gflops": self.gflops(), "peak_share": self.gflops() / self.peak,
        });
        if let (Some((theirs, ratio)), Some(object)) = (self.theirs(), object.as_object_mut()) {
            object.insert("torch_ms".into(), json!(theirs.best_ms));
            object.insert("torch_median_ms".into(), json!(theirs.median_ms));
            object.insert("ratio".into(), json!(ratio));
        }
        object
    }
}
