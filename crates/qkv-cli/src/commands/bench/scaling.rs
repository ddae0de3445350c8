//! `qkv bench --scaling`: speed-up against the number of threads, and throughput relative to as many independent
//! copies.

use super::args::{BenchArgs, ReportFormat};
use super::case::Case;
use super::measurement::to_ten_nanoseconds;
use super::ours::Call;
use super::plot::{self, Curve};
use super::progress::Progress;
use super::statistics::geometric_mean;
use super::table::{Column, Table, share, time};
use super::timing::Timing;
use super::{grid, machine, ours, pause};
use crate::atomic_file::OutputPath;
use crate::failure::Failure;
use crate::output::Print;
use crate::threads;
use serde::Serialize;
use std::sync::Barrier;
use std::thread;

/// Lower bounds for groups of calls in the summary, in milliseconds on one thread: a call at the second one is long
/// enough to divide well.
const LONG: [f64; 2] = [2.0, 10.0];

/// A case on a number of threads.
#[derive(Debug, Serialize)]
struct Point {
    case: String,
    threads: usize,
    best_ms: f64,
    median_ms: f64,
    /// The best time on one thread over the best time here.
    speed_up: f64,
    /// Throughput over that of as many copies of the call, each with its own thread and data.
    of_copies: f64,
}

/// Measures every case on 1, 2, 4, … threads, prints each point, and plots them.
pub(crate) fn scaling(args: &BenchArgs, most: usize, print: Print<'_>) -> Result<(), Failure> {
    let Some(file) = &args.scaling else { return Ok(()) };
    let output = OutputPath::new(file, None)?;
    let cases = grid::scaling_cases(args);
    // A copy for each thread.
    cases.iter().try_for_each(|case| case.check(most as u128))?;
    let widest = cases.iter().map(|case| case.to_string().chars().count()).max().unwrap_or(0);
    let mut columns = vec![Column::words("case", widest)];
    columns.extend(["threads", "best ms", "median ms", "speed-up", "of copies"].map(Column::numbers));
    let table = Table::new(columns, args.format == ReportFormat::Markdown);
    if args.format != ReportFormat::Json && !print(&format!("{}\n\n{}", machine::describe(most, None), table.header()))?
    {
        return Ok(());
    }
    let progress = Progress::of(cases.len());
    let mut points: Vec<Point> = Vec::new();
    for (at, &case) in cases.iter().enumerate() {
        let mut alone = None;
        for threads in thread_counts(most) {
            progress.show(at, &format!("{case}, {}", threads::count(threads)));
            let timing = on_threads(case, threads, args.seconds)?;
            let alone_ms = *alone.get_or_insert(timing.best_ms);
            progress.show(at, &format!("{case}, {threads} copies"));
            let copies_ms = copies(case, threads, args.seconds)?;
            let [best_ms, median_ms] = [timing.best_ms, timing.median_ms].map(to_ten_nanoseconds);
            let point = Point {
                case: case.to_string(),
                threads,
                best_ms,
                median_ms,
                speed_up: alone_ms / timing.best_ms,
                of_copies: copies_ms / threads as f64 / timing.median_ms,
            };
            progress.clear();
            if !print(&format_point(&point, &table, args.format))? {
                return Ok(());
            }
            points.push(point);
        }
    }
    if args.format != ReportFormat::Json && !print(&summary(&points, most))? {
        return Ok(());
    }
    let about = format!("{}, {}", machine::cpu().unwrap_or_else(|| "this CPU".into()), threads::count(most));
    output.write(plot::draw_scaling(&curves(&points), most, &about).as_bytes())
}

/// 1, 2, 4, … and `most`.
fn thread_counts(most: usize) -> Vec<usize> {
    let doubling = std::iter::successors(Some(1), |count| Some(2 * count)).take_while(|&count| count < most);
    doubling.chain([most]).collect()
}

fn on_threads(case: Case, threads: usize, seconds: f64) -> Result<Timing, Failure> {
    let call = ours::prepare(case)?;
    pause();
    threads::on(Some(threads), || Ok(Timing::of(seconds, call)))
}

/// Runs copies of a call at the same time. Returns the mean of their median milliseconds.
fn copies(case: Case, count: usize, seconds: f64) -> Result<f64, Failure> {
    let calls = (0..count).map(|_| ours::prepare(case)).collect::<Result<Vec<_>, _>>()?;
    pause();
    let start = Barrier::new(count);
    let copy = |call: Call| {
        threads::on(Some(1), || {
            start.wait();
            Ok(Timing::of(seconds, call).median_ms)
        })
    };
    let medians = thread::scope(|scope| {
        let running: Vec<_> = calls.into_iter().map(|call| scope.spawn(|| copy(call))).collect();
        running.into_iter().map(|one| one.join().expect("a copy panicked")).collect::<Result<Vec<f64>, _>>()
    })?;
    Ok(medians.iter().sum::<f64>() / count as f64)
}

fn format_point(point: &Point, table: &Table, format: ReportFormat) -> String {
    if format == ReportFormat::Json {
        return serde_json::to_string(point).expect("a point is plain data") + "\n";
    }
    table.row(&[
        point.case.clone(),
        point.threads.to_string(),
        time(point.best_ms),
        time(point.median_ms),
        format!("{:.2}", point.speed_up),
        share(point.of_copies),
    ])
}

/// The gain from the most threads, over all cases and over the long ones.
fn summary(points: &[Point], most: usize) -> String {
    let alone = |point: &Point| point.best_ms * point.speed_up;
    let mut lines = format!("\nOn {}:\n", threads::count(most));
    for (least, which) in [(0.0, "all calls".to_owned())]
        .into_iter()
        .chain(LONG.map(|ms| (ms, format!("calls of at least {ms:.0} ms on one thread"))))
    {
        let of = || points.iter().filter(|point| point.threads == most && alone(point) >= least);
        let speed_up = geometric_mean(of().map(|point| point.speed_up));
        let of_copies = geometric_mean(of().map(|point| point.of_copies));
        let worst = of().min_by(|a, b| a.of_copies.total_cmp(&b.of_copies));
        if let (Some(speed_up), Some(of_copies), Some(worst)) = (speed_up, of_copies, worst) {
            lines += &format!(
                "{which}: speed-up {speed_up:.2}, {} of as many copies, the worst {} ({})\n",
                share(of_copies),
                share(worst.of_copies),
                worst.case
            );
        }
    }
    lines
}

/// A curve for each case.
fn curves(points: &[Point]) -> Vec<Curve> {
    let mut curves: Vec<Curve> = Vec::new();
    for point in points {
        if curves.last().is_none_or(|curve| curve.title != point.case) {
            curves.push(Curve { title: point.case.clone(), points: Vec::new() });
        }
        curves.last_mut().expect("just added").points.push((point.threads, point.speed_up));
    }
    curves
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_double_up_to_the_most() {
        assert_eq!(thread_counts(1), [1]);
        assert_eq!(thread_counts(2), [1, 2]);
        assert_eq!(thread_counts(6), [1, 2, 4, 6]);
        assert_eq!(thread_counts(16), [1, 2, 4, 8, 16]);
    }

    #[test]
    fn the_summary_names_the_worst_of_the_long_calls() {
        let point = |case: &str, best_ms, speed_up, of_copies| Point {
            case: case.into(),
            threads: 4,
            best_ms,
            median_ms: best_ms,
            speed_up,
            of_copies,
        };
        let found = summary(&[point("short", 0.3, 1.0, 0.25), point("long", 4.0, 4.0, 1.0)], 4);
        assert!(found.contains("all calls: speed-up 2.00, 50 % of as many copies, the worst 25 % (short)"), "{found}");
        assert!(found.contains("10 ms on one thread: speed-up 4.00, 100 % of as many copies"), "{found}");
    }
}
