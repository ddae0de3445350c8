//! The command `qkv bench`: this machine measured, beside its peak and, where there is one, beside PyTorch. It puts the
//! parts in order and owns none of them.
//!
//! | module | owns |
//! | --- | --- |
//! | `asked` | the choices of the command, and what was chosen |
//! | `shape`, `case`, `grid` | what is measured, how much work and memory it is, and which cases there are |
//! | `timing`, `statistics` | calling for a while, and the few numbers that many become |
//! | `ours`, `formula`, `anchor` | the three sides: the library, the materialised formula, PyTorch (`torch.py`) |
//! | `peaks` | what the machine can do at most |
//! | `row`, `table`, `summary`, `machine`, `progress` | what is told, and while it is measured |
//! | `lengths`, `held`, `plot` | time and memory against length, and their picture |
//! | `on_card` | the same on a GPU |
//! | `train`, `steps` | whole training steps of two models, and PyTorch's (`step.py`) |

mod anchor;
mod asked;
mod case;
mod formula;
mod grid;
mod held;
mod lengths;
mod machine;
mod on_card;
mod ours;
mod peaks;
mod plot;
mod progress;
mod row;
mod shape;
mod statistics;
mod steps;
mod summary;
mod table;
mod timing;
mod train;

pub(crate) use asked::{Asked, CHOICES, FEWEST_ROUNDS, SHORTEST, after_help};
pub(crate) use held::Held;
pub(crate) use machine::cpu;
pub(crate) use shape::Shape;
pub(crate) use steps::Step;

use crate::failure::Failure;
use crate::say::Say;
use crate::threads;
use anchor::{Anchor, How};
use asked::Form;
use case::{Case, Direction};
use peaks::Peak;
use progress::Progress;
use row::Row;
use statistics::median;
use std::thread;
use std::time::Duration;
use table::{Column, Table, share, speed, time};
use timing::Timing;

/// Measures what was asked, and tells each case when it is measured.
pub(crate) fn bench(asked: &Asked, say: Say<'_>) -> Result<(), Failure> {
    threads::on(asked.threads, || match asked.lengths {
        _ if asked.on_card => on_card::measure(asked, rayon::current_num_threads(), say),
        _ if asked.train => train::train(asked, rayon::current_num_threads(), say),
        Some(_) => lengths::lengths(asked, rayon::current_num_threads(), say),
        None => measure(asked, rayon::current_num_threads(), say),
    })
}

fn measure(asked: &Asked, threads: usize, say: Say<'_>) -> Result<(), Failure> {
    let cases = grid::cases(asked);
    let sides = if asked.against.is_some() { 2 } else { 1 };
    cases.iter().try_for_each(|case| case.check(sides))?;
    let mut anchor = asked.against.as_ref().map(|(python, _)| Anchor::start(python, threads)).transpose()?;
    let report = Report::new(asked, &cases);
    if !say(&report.head(threads, anchor.as_ref().map(Anchor::version)))? {
        return Ok(());
    }
    let progress = Progress::of(cases.len());
    let mut rows = Vec::new();
    for (at, &case) in cases.iter().enumerate() {
        let row = measure_case(asked, case, threads, &mut anchor, |what| progress.show(at, what))?;
        progress.clear();
        if !say(&report.row(&row))? {
            return Ok(());
        }
        rows.push(row);
    }
    drop(anchor);
    say(&report.end(&rows)).map(|_| ())
}

/// One case: our side and the anchor's in turns, with the peak beside each round, and then the formula.
fn measure_case(
    asked: &Asked,
    case: Case,
    threads: usize,
    anchor: &mut Option<Anchor>,
    show: impl Fn(&str),
) -> Result<Row, Failure> {
    show(&case.to_string());
    let mut call = ours::prepare(case)?;
    if let Some(anchor) = anchor {
        anchor.prepare(case, How::Sdpa)?;
    }
    let mut peak = Peak::of(case, threads);
    let (mut our_rounds, mut their_rounds) = (Vec::new(), Vec::new());
    let rounds = asked.against.as_ref().map_or(1, |(_, rounds)| *rounds);
    for round in 0..rounds {
        if rounds > 1 {
            show(&format!("{case}, round {} of {rounds}", round + 1));
        }
        peak.measure();
        pause();
        our_rounds.push(Timing::of(asked.seconds, &mut call));
        peak.measure();
        if let Some(anchor) = anchor {
            pause();
            their_rounds.push(anchor.measure(asked.seconds)?);
        }
    }
    drop(call);
    let ours = Timing::over(&our_rounds).expect("at least one round");
    let mut row = Row::new(case, ours, &peak);
    let ratios = their_rounds.iter().zip(&our_rounds).map(|(theirs, ours)| theirs.best_ms / ours.best_ms);
    if let (Some(theirs), Some(ratio)) = (Timing::over(&their_rounds), median(ratios)) {
        row = row.against(theirs, ratio);
    }
    if formula::is_for(case) && formula::fits(case) {
        show(&format!("{case}, the formula"));
        row = row.beside_formula(Timing::of(asked.seconds, formula::prepare(case)?));
    }
    Ok(row)
}

/// Long enough for the other side's threads, which look for work a little longer than they have some, to fall asleep.
fn pause() {
    thread::sleep(Duration::from_millis(20));
}

/// How rows are told.
struct Report {
    form: Form,
    rounds: usize,
    table: Table,
    /// Which of the columns that not every run has.
    bandwidth: bool,
    formula: bool,
    against: bool,
}

impl Report {
    fn new(asked: &Asked, cases: &[Case]) -> Report {
        let bandwidth = cases.iter().any(|case| case.direction == Direction::Decode);
        let formula = cases.iter().any(|&case| formula::is_for(case));
        let against = asked.against.is_some();
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
        let rounds = asked.against.as_ref().map_or(1, |(_, rounds)| *rounds);
        Report {
            form: asked.form,
            rounds,
            table: Table::new(columns, asked.form == Form::Markdown),
            bandwidth,
            formula,
            against,
        }
    }

    fn head(&self, threads: usize, torch: Option<&str>) -> String {
        match self.form {
            Form::Json => String::new(),
            _ => format!("{}\n\n{}", machine::told(threads, torch), self.table.head()),
        }
    }

    fn row(&self, row: &Row) -> String {
        if self.form == Form::Json {
            return row.json();
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

    fn end(&self, rows: &[Row]) -> String {
        match self.form {
            Form::Json => String::new(),
            form => summary::summary(rows, self.rounds, form == Form::Markdown),
        }
    }
}
