//! `qkv bench`: attention measured on this machine, against its peak and against PyTorch.
//!
//! | module | owns |
//! | --- | --- |
//! | `args` | the arguments |
//! | `shape`, `case`, `grid` | what is measured, its work and memory, and the default cases |
//! | `timing`, `statistics` | repeated calls, medians and means |
//! | `ours`, `formula`, `torch` | the three sides: the library, the materialized formula, PyTorch (`torch.py`) |
//! | `python` | the Python that runs PyTorch's side, and the common start of its scripts (`prelude.py`) |
//! | `peaks` | the peak of the machine |
//! | `measurement`, `table`, `summary`, `machine`, `progress` | reports |
//! | `lengths`, `memory`, `plot` | time and memory against length |
//! | `scaling` | speed-up against threads |
//! | `on_device` | the same on a GPU |
//! | `over_ranks` | attention divided over ranks: time, bytes sent, and waiting |
//! | `train_over_ranks` | training steps over ranks, beside the same number of ranks that train alone |
//! | `images` | passes of a ResNet over images, and PyTorch's (`images.py`) |
//! | `train`, `training_step` | whole training steps, and PyTorch's (`step.py`) |

mod args;
mod case;
mod formula;
mod grid;
mod images;
mod lengths;
mod machine;
mod measurement;
mod memory;
mod on_device;
mod ours;
mod over_ranks;
mod peaks;
mod plot;
mod progress;
mod python;
mod scaling;
mod shape;
mod statistics;
mod summary;
mod table;
mod timing;
mod torch;
mod train;
mod train_over_ranks;
mod training_step;

pub(super) use machine::cpu;
pub(super) use memory::COMMAND as MEMORY_COMMAND;
pub(super) use training_step::COMMAND as STEP_COMMAND;

use crate::command::{Command, Run, Status};
use crate::failure::Failure;
use crate::output::Print;
use crate::ranks::{self, RankJob};
use crate::threads;
use args::{ARGUMENTS, BenchArgs, EXAMPLES, ReportFormat, notes};
use case::{Case, Direction};
use measurement::Measurement;
use peaks::Peak;
use progress::Progress;
use qkv_ranks::{Ranks, launch};
use statistics::median;
use std::thread;
use std::time::Duration;
use table::{Column, Table, share, speed, time};
use timing::Timing;
use torch::{TorchKernel, TorchProcess};

pub(super) const COMMAND: Command =
    Command::new("bench", "Measure attention on this machine, against its peak and PyTorch", ARGUMENTS, |matches| {
        Ok(Box::new(BenchArgs::parse(matches)))
    })
    .examples(EXAMPLES)
    .notes(notes);

impl Run for BenchArgs {
    fn run(&self, print: Print<'_>) -> Result<Status, Failure> {
        train_over_ranks::check(self)?;
        ranks::start(self.ranks)?;
        if launch::is_rank() {
            let job = RankJob::join(self.rank_timeout)?;
            let threads = job.threads(self.threads)?;
            return job.run(|ranks| {
                threads::on(threads, || match self.train {
                    true => train_over_ranks::measure(self, ranks, print),
                    false => over_ranks::measure(self, ranks, print),
                })?;
                Ok(Status::Done)
            });
        }
        threads::on(self.threads, || {
            let threads = rayon::current_num_threads();
            if self.train && self.ranks.is_some() {
                train_over_ranks::measure(self, &Ranks::alone(), print)
            } else if self.train {
                train::train(self, threads, print)
            } else if self.images {
                images::measure(self, threads, print)
            } else if self.on_device {
                on_device::measure(self, threads, print)
            } else if self.scaling.is_some() {
                scaling::scaling(self, threads, print)
            } else if self.lengths.is_some() {
                lengths::lengths(self, threads, print)
            } else {
                measure(self, threads, print)
            }?;
            Ok(Status::Done)
        })
    }
}

/// Measures every case, and prints each as soon as it is measured.
fn measure(args: &BenchArgs, threads: usize, print: Print<'_>) -> Result<(), Failure> {
    let cases = grid::cases(args);
    let sides = if args.against.is_some() { 2 } else { 1 };
    cases.iter().try_for_each(|case| case.check(sides))?;
    let mut torch = args.against.as_ref().map(|(python, _)| TorchProcess::start(python, threads)).transpose()?;
    let report = BenchReport::new(args, &cases);
    if !print(&report.header(threads, torch.as_ref().map(TorchProcess::version)))? {
        return Ok(());
    }
    let progress = Progress::of(cases.len());
    let mut rows = Vec::new();
    for (at, &case) in cases.iter().enumerate() {
        let row = measure_case(args, case, threads, &mut torch, |what| progress.show(at, what))?;
        progress.clear();
        if !print(&report.row(&row))? {
            return Ok(());
        }
        rows.push(row);
    }
    drop(torch);
    print(&report.footer(&rows)).map(|_| ())
}

/// One case: ours and PyTorch in alternating rounds, with the peak measured in between, then the formula.
fn measure_case(
    args: &BenchArgs,
    case: Case,
    threads: usize,
    torch: &mut Option<TorchProcess>,
    show: impl Fn(&str),
) -> Result<Measurement, Failure> {
    show(&case.to_string());
    let mut call = ours::prepare(case)?;
    if let Some(torch) = torch {
        torch.prepare(case, TorchKernel::Sdpa)?;
    }
    let mut peak = Peak::of(case, threads);
    let (mut our_rounds, mut their_rounds) = (Vec::new(), Vec::new());
    let rounds = args.rounds();
    for round in 0..rounds {
        if rounds > 1 {
            show(&format!("{case}, round {} of {rounds}", round + 1));
        }
        peak.measure();
        pause();
        our_rounds.push(Timing::of(args.seconds, &mut call));
        peak.measure();
        if let Some(torch) = torch {
            pause();
            their_rounds.push(torch.measure(args.seconds)?);
        }
    }
    drop(call);
    let ours = Timing::over(&our_rounds).expect("at least one round");
    let mut row = Measurement::new(case, ours, &peak);
    let ratios = their_rounds.iter().zip(&our_rounds).map(|(theirs, ours)| theirs.best_ms / ours.best_ms);
    if let (Some(theirs), Some(ratio)) = (Timing::over(&their_rounds), median(ratios)) {
        row = row.against(theirs, ratio);
    }
    if formula::is_for(case) && formula::fits(case) {
        show(&format!("{case}, the formula"));
        row = row.with_formula(Timing::of(args.seconds, formula::prepare(case)?));
    }
    Ok(row)
}

/// Lets the other side's threads go to sleep: they spin briefly after their work.
fn pause() {
    thread::sleep(Duration::from_millis(20));
}

/// The table of a run.
struct BenchReport {
    format: ReportFormat,
    rounds: usize,
    table: Table,
    /// Optional columns.
    bandwidth: bool,
    formula: bool,
    against: bool,
}

impl BenchReport {
    fn new(args: &BenchArgs, cases: &[Case]) -> BenchReport {
        let bandwidth = cases.iter().any(|case| case.direction == Direction::Decode);
        let formula = cases.iter().any(|&case| formula::is_for(case));
        let against = args.against.is_some();
        let widest = cases.iter().map(|case| case.shape.to_string().len()).max().unwrap_or(0);
        let mut columns = vec![
            Column::words("b,hq,hk,n,m,d", widest),
            Column::words("type", 4),
            Column::words("mask", 6),
            Column::words("direction", 9),
        ];
        columns.extend(["best ms", "median ms", "GFLOP/s", "of peak"].map(Column::numbers));
        columns.extend(bandwidth.then(|| Column::numbers("GB/s")));
        columns.extend(against.then(|| Column::numbers("PyTorch ms")));
        columns.extend(against.then(|| Column::numbers("ratio")));
        columns.extend(formula.then(|| Column::numbers("formula ms")));
        let rounds = args.rounds();
        BenchReport {
            format: args.format,
            rounds,
            table: Table::new(columns, args.format == ReportFormat::Markdown),
            bandwidth,
            formula,
            against,
        }
    }

    fn header(&self, threads: usize, torch: Option<&str>) -> String {
        match self.format {
            ReportFormat::Json => String::new(),
            _ => format!("{}\n\n{}", machine::describe(threads, torch), self.table.header()),
        }
    }

    fn row(&self, row: &Measurement) -> String {
        if self.format == ReportFormat::Json {
            return row.to_json();
        }
        let case = row.case;
        let or_dash = |cell: Option<String>| cell.unwrap_or_else(|| "–".into());
        let mask = if case.causal { "causal" } else { "full" };
        let mut cells: Vec<String> =
            vec![case.shape.to_string(), case.precision.name().into(), mask.into(), case.direction.name().into()];
        cells.extend([time(row.best_ms), time(row.median_ms), speed(row.gflops), share(row.peak_share)]);
        cells.extend(self.bandwidth.then(|| or_dash(row.gbs.map(speed))));
        cells.extend(self.against.then(|| or_dash(row.torch_ms.map(time))));
        cells.extend(self.against.then(|| or_dash(row.ratio.map(|ratio| format!("{ratio:.2}")))));
        let formula = match row.formula_ms {
            None if formula::is_for(case) => Some("over 1 GiB".into()),
            ms => ms.map(time),
        };
        cells.extend(self.formula.then(|| or_dash(formula)));
        self.table.row(&cells)
    }

    fn footer(&self, rows: &[Measurement]) -> String {
        match self.format {
            ReportFormat::Json => String::new(),
            format => summary::summary(rows, self.rounds, format == ReportFormat::Markdown),
        }
    }
}
