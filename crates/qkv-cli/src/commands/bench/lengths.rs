//! Time and memory of one head against its length: ours beside PyTorch's, or beside the formula where there is no PyTorch.

use super::anchor::{Anchor, How};
use super::asked::{Asked, Form, SHORTEST};
use super::held::Held;
use super::ours::Call;
use super::plot::{self, Line};
use super::progress::Progress;
use super::row::to_ten_nanoseconds;
use super::table::{Column, Table, time};
use super::timing::Timing;
use super::{Say, formula, machine, ours, pause};
use crate::failure::Failure;
use serde::Serialize;
use std::fs;

/// What PyTorch's formula may take, scores and weights together.
const MOST_OF_FORMULA: u128 = 4 << 30;

/// What computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Engine {
    Ours,
    Formula,
    Torch(How),
}

impl Engine {
    fn name(self) -> &'static str {
        match self {
            Engine::Ours => "qkv",
            Engine::Formula => "formula",
            Engine::Torch(How::Sdpa) => "torch",
            Engine::Torch(How::Formula) => "torch formula",
        }
    }

    /// In words.
    fn title(self) -> &'static str {
        match self {
            Engine::Ours => "qkv",
            Engine::Formula => "softmax(QKᵀ)·V stored",
            Engine::Torch(How::Sdpa) => "PyTorch, fused",
            Engine::Torch(How::Formula) => "PyTorch, softmax(QKᵀ)·V",
        }
    }

    fn fits(self, n: usize) -> bool {
        match self {
            Engine::Formula => formula::fits(Held::case(n)),
            Engine::Torch(How::Formula) => 2 * 4 * (n as u128).pow(2) <= MOST_OF_FORMULA,
            _ => true,
        }
    }
}

/// A point of the plot.
#[derive(Debug, Serialize)]
struct Point {
    n: usize,
    engine: &'static str,
    best_ms: f64,
    median_ms: f64,
    /// What a call takes beyond its inputs, where the system tells.
    beyond_bytes: Option<u64>,
}

/// Measures every length, tells each point, and draws them.
pub(crate) fn lengths(asked: &Asked, threads: usize, say: Say<'_>) -> Result<(), Failure> {
    let Some((file, longest)) = &asked.lengths else { return Ok(()) };
    let lengths: Vec<usize> =
        std::iter::successors(Some(SHORTEST as usize), |n| n.checked_mul(2)).take_while(|n| n <= longest).collect();
    let mut anchor = asked.against.as_ref().map(|(python, _)| Anchor::start(python, threads)).transpose()?;
    let engines = match anchor {
        Some(_) => &[Engine::Ours, Engine::Torch(How::Sdpa), Engine::Torch(How::Formula)][..],
        None => &[Engine::Ours, Engine::Formula],
    };
    let columns =
        vec![Column::numbers("n"), Column::words("engine", 13), Column::numbers("best ms"), Column::numbers("MiB")];
    let table = Table::new(columns, asked.form == Form::Markdown);
    if asked.form != Form::Json {
        let about = machine::told(threads, anchor.as_ref().map(Anchor::version));
        let head = format!("{about}\nOne head of width 64, f32, forward; memory beyond the inputs\n\n{}", table.head());
        if !say(&head)? {
            return Ok(());
        }
    }
    let progress = Progress::of(lengths.len());
    let mut points: Vec<(Engine, Point)> = Vec::new();
    for (at, &n) in lengths.iter().enumerate() {
        Held::case(n).check(2)?;
        let here: Vec<Engine> = engines.iter().copied().filter(|engine| engine.fits(n)).collect();
        let timings = in_turns(asked, &mut anchor, &here, n, |what| progress.show(at, what))?;
        for (engine, timing) in here.into_iter().zip(timings) {
            progress.show(at, &format!("n = {n}, memory of {}", engine.name()));
            let beyond_bytes = beyond(asked, engine, n, threads)?;
            let [best_ms, median_ms] = [timing.best_ms, timing.median_ms].map(to_ten_nanoseconds);
            let point = Point { n, engine: engine.name(), best_ms, median_ms, beyond_bytes };
            progress.clear();
            if !say(&told(&point, &table, asked.form))? {
                return Ok(());
            }
            points.push((engine, point));
        }
    }
    let lines: Vec<Line> = engines.iter().map(|&engine| line(engine, &points)).collect();
    let svg = plot::draw(&lines, &format!("One head of width 64, f32, forward, {}", crate::threads::told(threads)));
    fs::write(file, svg).map_err(|error| Failure::in_file(file, format!("cannot be written: {error}")))
}

/// The times of several engines at one length, in alternating rounds.
fn in_turns(
    asked: &Asked,
    anchor: &mut Option<Anchor>,
    engines: &[Engine],
    n: usize,
    show: impl Fn(&str),
) -> Result<Vec<Timing>, Failure> {
    let rounds = asked.against.as_ref().map_or(1, |(_, rounds)| *rounds);
    let case = Held::case(n);
    let mut calls: Vec<Option<Call>> = Vec::new();
    for engine in engines {
        calls.push(match engine {
            Engine::Ours => Some(ours::prepare(case)?),
            Engine::Formula => Some(formula::prepare(case)?),
            Engine::Torch(_) => None,
        });
    }
    let mut timings = vec![Vec::new(); engines.len()];
    for round in 0..rounds {
        for (at, engine) in engines.iter().enumerate() {
            show(&format!("n = {n}, {}, round {} of {rounds}", engine.name(), round + 1));
            pause();
            timings[at].push(match (engine, anchor.as_mut(), &mut calls[at]) {
                (_, _, Some(call)) => Timing::of(asked.seconds, call),
                (Engine::Torch(how), Some(anchor), _) => {
                    anchor.prepare(case, *how)?;
                    anchor.measure(asked.seconds)?
                }
                _ => unreachable!("PyTorch's engines come with an anchor"),
            });
        }
    }
    Ok(timings.iter().filter_map(|rounds| Timing::over(rounds)).collect())
}

/// What a call takes, in a process of its own.
fn beyond(asked: &Asked, engine: Engine, n: usize, threads: usize) -> Result<Option<u64>, Failure> {
    match (engine, &asked.against) {
        (Engine::Torch(how), Some((python, _))) => Anchor::start(python, threads)?.memory(Held::case(n), how),
        _ => Held { n, threads, formula: engine == Engine::Formula }.ask(),
    }
}

fn told(point: &Point, table: &Table, form: Form) -> String {
    if form == Form::Json {
        return serde_json::to_string(point).expect("a point is plain data") + "\n";
    }
    let mib = point.beyond_bytes.map_or("–".into(), |bytes| format!("{:.1}", bytes as f64 / f64::from(1 << 20)));
    table.row(&[point.n.to_string(), point.engine.into(), time(point.best_ms), mib])
}

fn line(engine: Engine, points: &[(Engine, Point)]) -> Line {
    let own = || points.iter().filter(|(of, _)| *of == engine).map(|(_, point)| point);
    Line {
        title: engine.title(),
        ms: own().map(|point| (point.n, point.best_ms)).collect(),
        bytes: own().filter_map(|point| Some((point.n, point.beyond_bytes? as f64))).collect(),
    }
}
