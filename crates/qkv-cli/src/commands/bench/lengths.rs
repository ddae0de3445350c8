//! `qkv bench --lengths`: time and memory of one head against its length, beside PyTorch or, without it, the formula.

use super::args::{BenchArgs, ReportFormat, SHORTEST};
use super::measurement::to_ten_nanoseconds;
use super::memory::MemoryProbe;
use super::ours::Call;
use super::plot::{self, Series};
use super::progress::Progress;
use super::table::{Column, Table, time};
use super::timing::Timing;
use super::torch::{TorchKernel, TorchProcess};
use super::{formula, machine, ours, pause};
use crate::atomic_file::OutputPath;
use crate::failure::Failure;
use crate::output::Print;
use serde::Serialize;

/// The most memory of PyTorch's formula, scores and weights together.
const MOST_OF_FORMULA: u128 = 4 << 30;

/// An engine of the plot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Curve {
    Ours,
    Formula,
    Torch(TorchKernel),
}

impl Curve {
    fn name(self) -> &'static str {
        match self {
            Curve::Ours => "qkv",
            Curve::Formula => "formula",
            Curve::Torch(TorchKernel::Sdpa) => "torch",
            Curve::Torch(TorchKernel::Formula) => "torch formula",
        }
    }

    /// For the legend.
    fn title(self) -> &'static str {
        match self {
            Curve::Ours => "qkv",
            Curve::Formula => "softmax(QKᵀ)·V stored",
            Curve::Torch(TorchKernel::Sdpa) => "PyTorch, fused",
            Curve::Torch(TorchKernel::Formula) => "PyTorch, softmax(QKᵀ)·V",
        }
    }

    fn fits(self, n: usize) -> bool {
        match self {
            Curve::Formula => formula::fits(MemoryProbe::case(n)),
            Curve::Torch(TorchKernel::Formula) => 2 * 4 * (n as u128).pow(2) <= MOST_OF_FORMULA,
            _ => true,
        }
    }
}

/// One engine at one length.
#[derive(Debug, Serialize)]
struct Point {
    n: usize,
    engine: &'static str,
    best_ms: f64,
    median_ms: f64,
    /// Peak memory beyond the inputs, if the system reports it.
    beyond_bytes: Option<u64>,
}

/// Measures every length, prints each point, and plots them.
pub(crate) fn lengths(args: &BenchArgs, threads: usize, print: Print<'_>) -> Result<(), Failure> {
    let Some((file, longest)) = &args.lengths else { return Ok(()) };
    let output = OutputPath::new(file, None)?;
    let lengths: Vec<usize> =
        std::iter::successors(Some(SHORTEST as usize), |n| n.checked_mul(2)).take_while(|n| n <= longest).collect();
    let mut torch = args.against.as_ref().map(|(python, _)| TorchProcess::start(python, threads)).transpose()?;
    let engines = match torch {
        Some(_) => &[Curve::Ours, Curve::Torch(TorchKernel::Sdpa), Curve::Torch(TorchKernel::Formula)][..],
        None => &[Curve::Ours, Curve::Formula],
    };
    let columns =
        vec![Column::numbers("n"), Column::words("engine", 13), Column::numbers("best ms"), Column::numbers("MiB")];
    let table = Table::new(columns, args.format == ReportFormat::Markdown);
    if args.format != ReportFormat::Json {
        let about = machine::describe(threads, torch.as_ref().map(TorchProcess::version));
        let head =
            format!("{about}\nOne head of width 64, f32, forward; memory beyond the inputs\n\n{}", table.header());
        if !print(&head)? {
            return Ok(());
        }
    }
    let progress = Progress::of(lengths.len());
    let mut points: Vec<(Curve, Point)> = Vec::new();
    for (at, &n) in lengths.iter().enumerate() {
        MemoryProbe::case(n).check(2)?;
        let here: Vec<Curve> = engines.iter().copied().filter(|engine| engine.fits(n)).collect();
        let timings = in_turns(args, &mut torch, &here, n, |what| progress.show(at, what))?;
        for (engine, timing) in here.into_iter().zip(timings) {
            progress.show(at, &format!("n = {n}, memory of {}", engine.name()));
            let beyond_bytes = beyond(args, engine, n, threads)?;
            let [best_ms, median_ms] = [timing.best_ms, timing.median_ms].map(to_ten_nanoseconds);
            let point = Point { n, engine: engine.name(), best_ms, median_ms, beyond_bytes };
            progress.clear();
            if !print(&format_point(&point, &table, args.format))? {
                return Ok(());
            }
            points.push((engine, point));
        }
    }
    let lines: Vec<Series> = engines.iter().map(|&engine| series(engine, &points)).collect();
    let svg = plot::draw(&lines, &format!("One head of width 64, f32, forward, {}", crate::threads::count(threads)));
    output.write(svg.as_bytes())
}

/// The times of several engines at one length, in alternating rounds.
fn in_turns(
    args: &BenchArgs,
    torch: &mut Option<TorchProcess>,
    engines: &[Curve],
    n: usize,
    show: impl Fn(&str),
) -> Result<Vec<Timing>, Failure> {
    let rounds = args.rounds();
    let case = MemoryProbe::case(n);
    let mut calls: Vec<Option<Call>> = Vec::new();
    for engine in engines {
        calls.push(match engine {
            Curve::Ours => Some(ours::prepare(case)?),
            Curve::Formula => Some(formula::prepare(case)?),
            Curve::Torch(_) => None,
        });
    }
    let mut timings = vec![Vec::new(); engines.len()];
    for round in 0..rounds {
        for (at, engine) in engines.iter().enumerate() {
            show(&format!("n = {n}, {}, round {} of {rounds}", engine.name(), round + 1));
            pause();
            timings[at].push(match (engine, torch.as_mut(), &mut calls[at]) {
                (_, _, Some(call)) => Timing::of(args.seconds, call),
                (Curve::Torch(kernel), Some(torch), _) => {
                    torch.prepare(case, *kernel)?;
                    torch.measure(args.seconds)?
                }
                _ => unreachable!("PyTorch's curves come with its process"),
            });
        }
    }
    Ok(timings.iter().filter_map(|rounds| Timing::over(rounds)).collect())
}

/// The memory of a call, measured in a separate process.
fn beyond(args: &BenchArgs, engine: Curve, n: usize, threads: usize) -> Result<Option<u64>, Failure> {
    match (engine, &args.against) {
        (Curve::Torch(kernel), Some((python, _))) => {
            TorchProcess::start(python, threads)?.memory(MemoryProbe::case(n), kernel)
        }
        _ => MemoryProbe { n, threads, formula: engine == Curve::Formula }.spawn(),
    }
}

fn format_point(point: &Point, table: &Table, format: ReportFormat) -> String {
    if format == ReportFormat::Json {
        return serde_json::to_string(point).expect("a point is plain data") + "\n";
    }
    let mib = point.beyond_bytes.map_or("–".into(), |bytes| format!("{:.1}", bytes as f64 / f64::from(1 << 20)));
    table.row(&[point.n.to_string(), point.engine.into(), time(point.best_ms), mib])
}

fn series(engine: Curve, points: &[(Curve, Point)]) -> Series {
    let own = || points.iter().filter(|(of, _)| *of == engine).map(|(_, point)| point);
    Series {
        title: engine.title(),
        ms: own().map(|point| (point.n, point.best_ms)).collect(),
        bytes: own().filter_map(|point| Some((point.n, point.beyond_bytes? as f64))).collect(),
    }
}
