//! `qkv bench --ranks`: attention divided over ranks, in each possible way: the time of a call, the bytes that a rank
//! sends, and how long it waits for messages that computation does not hide.

use super::args::{BenchArgs, ReportFormat};
use super::machine;
use super::shape::Shape;
use super::statistics::median;
use super::table::{Column, Table, share, time};
use crate::failure::Failure;
use crate::output::Print;
use qkv::{Attention, Inputs, Mask, Scratch, Tensor, Upstream};
use qkv_ranks::{Ranks, Shards, Way};
use serde_json::json;
use std::time::Instant;

/// The shape that is measured by default.
const SHAPE: Shape = Shape { b: 1, hq: 8, hk: 8, n: 4096, m: 4096, d: 64 };

/// The ways, with their names on the command line.
const WAYS: [(Way, &str); 3] = [(Way::Heads, "heads"), (Way::Gathered, "gathered"), (Way::Ring, "ring")];

/// What one rank measured of a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct RankMeasurement {
    /// Of the whole call: for attention, forward and backward together.
    pub seconds: f64,
    pub sent: u64,
    pub waited: f64,
}

impl RankMeasurement {
    /// Measures a call that all ranks begin together; of each number, the maximum over ranks counts.
    pub fn of(ranks: &Ranks, call: impl FnOnce() -> Result<(), Failure>) -> Result<RankMeasurement, Failure> {
        ranks.barrier()?;
        let (before, start) = (ranks.traffic(), Instant::now());
        call()?;
        let (seconds, counted) = (start.elapsed().as_secs_f64(), ranks.traffic() - before);
        RankMeasurement { seconds, sent: counted.sent, waited: counted.waited.as_secs_f64() }.slowest(ranks)
    }

    /// The slowest rank's time, the most bytes sent by one rank, and the longest wait; the same on every rank.
    pub fn slowest(self, ranks: &Ranks) -> Result<RankMeasurement, Failure> {
        let own = [self.seconds, self.sent as f64, self.waited].map(f64::to_le_bytes).concat();
        let all = ranks.all_gather(&own)?;
        let most = |at: usize| {
            let number = |bytes: &Vec<u8>| f64::from_le_bytes(bytes[8 * at..][..8].try_into().expect("eight bytes"));
            all.iter().map(number).fold(0.0, f64::max)
        };
        Ok(RankMeasurement { seconds: most(0), sent: most(1) as u64, waited: most(2) })
    }
}

/// Measures each shape in each way; the first rank prints.
pub(super) fn measure(args: &BenchArgs, ranks: &Ranks, print: Print<'_>) -> Result<(), Failure> {
    let shapes = if args.shapes.is_empty() { vec![SHAPE] } else { args.shapes.clone() };
    let numbers = ["best ms", "median ms", "MiB sent", "waited ms", "alone ms", "share"].map(Column::numbers);
    let widest = shapes.iter().map(|shape| shape.to_string().len()).max().unwrap_or(0);
    let mut columns = vec![Column::words("b,hq,hk,n,m,d", widest), Column::words("mask", 6), Column::words("way", 8)];
    columns.extend(numbers);
    let table = Table::new(columns, args.format == ReportFormat::Markdown);
    let threads = rayon::current_num_threads();
    let text = args.format != ReportFormat::Json;
    if text && ranks.is_first() {
        let machine = machine::describe(threads, None);
        print(&format!("{machine}\n{} ranks, f32, forward and backward\n\n{}", ranks.size(), table.header()))?;
    }
    for shape in shapes {
        let alone = measure_alone(args, ranks, shape, threads)?;
        for (way, name) in WAYS {
            if args.rank_way.as_ref().is_some_and(|wanted| wanted != name) {
                continue;
            }
            let Some(calls) = measure_way(args, ranks, shape, way, threads)? else { continue };
            if !ranks.is_first() {
                continue;
            }
            let best = best(&calls);
            let middle = median(calls.iter().map(|call| call.seconds)).unwrap_or(f64::NAN);
            let mask = if args.causal { "causal" } else { "full" };
            let line = if text {
                let mib = format!("{:.2}", best.sent as f64 / f64::from(1 << 20));
                let times = [best.seconds, middle].map(|seconds| time(1e3 * seconds));
                let [best_ms, median_ms] = times;
                let shape = shape.to_string();
                let or_dash = |cell: Option<String>| cell.unwrap_or_else(|| "–".into());
                let alone_ms = or_dash(alone.map(|alone| time(1e3 * alone)));
                let part = or_dash(alone.map(|alone| share(alone / best.seconds)));
                let waited = time(1e3 * best.waited);
                table.row(&[shape, mask.into(), name.into(), best_ms, median_ms, mib, waited, alone_ms, part])
            } else {
                let object = json!({
                    "shape": shape.to_string(), "mask": mask, "ranks": ranks.size(), "threads": threads, "way": name,
                    "best_ms": 1e3 * best.seconds, "median_ms": 1e3 * middle, "sent_bytes": best.sent,
                    "waited_ms": 1e3 * best.waited, "alone_ms": alone.map(|alone| 1e3 * alone),
                    "share": alone.map(|alone| alone / best.seconds),
                });
                format!("{object}\n")
            };
            print(&line)?;
        }
    }
    if text && ranks.is_first() {
        print(
            "\nOf the slowest rank; MiB: the most that one rank sends a call; waited: within the best call;\n\
             alone: as many heads of whole sequences on every rank, without messages, and its share of the time.\n",
        )?;
    }
    Ok(())
}

/// The calls of one shape, divided in one way, as measured on the slowest rank; `None` if it cannot be divided that
/// way.
fn measure_way(
    args: &BenchArgs,
    ranks: &Ranks,
    Shape { b, hq, hk, n, m, d }: Shape,
    way: Way,
    threads: usize,
) -> Result<Option<Vec<RankMeasurement>>, Failure> {
    let mask = if args.causal { Mask::causal() } else { Mask::full() };
    let attention = Attention::scaled_dot().mask(mask);
    let (queries, keys) = (Shards::balanced(n, ranks.size()), Shards::balanced(m, ranks.size()));
    let context = ranks.attention(&attention, &queries, &keys).way(way).threads(threads);
    if context.taken(hk).is_err() {
        return Ok(None);
    }
    let rank = ranks.rank();
    let seed = 10 * rank as u64;
    let q = Tensor::<f32, 4>::randn([b, hq, queries.rows(rank), d], seed);
    let k = Tensor::<f32, 4>::randn([b, hk, keys.rows(rank), d], seed + 1);
    let v = Tensor::<f32, 4>::randn([b, hk, keys.rows(rank), d], seed + 2);
    let inputs = Inputs::new(&q, &k, &v);
    let call = || {
        RankMeasurement::of(ranks, || {
            let out = context.forward(inputs)?;
            context.backward(inputs, &out, Upstream::new(&q))?;
            Ok(())
        })
    };
    repeated(args.seconds, call).map(Some)
}

/// The fastest call.
pub(super) fn best(calls: &[RankMeasurement]) -> RankMeasurement {
    calls.iter().copied().min_by(|a, b| a.seconds.total_cmp(&b.seconds)).expect("at least one call")
}

/// Repeats a call for some seconds. The first call is a warm-up, unless it takes longer than that.
pub(super) fn repeated(
    seconds: f64,
    mut call: impl FnMut() -> Result<RankMeasurement, Failure>,
) -> Result<Vec<RankMeasurement>, Failure> {
    let first = call()?;
    if first.seconds > seconds {
        return Ok(vec![first]);
    }
    let mut calls = vec![call()?];
    // Every rank sees the slowest rank's times, so all of them stop after the same call.
    while calls.iter().map(|call| call.seconds).sum::<f64>() < seconds {
        calls.push(call()?);
    }
    Ok(calls)
}

/// Measures as much work as a rank's part, but without messages, on all ranks at once: some heads of whole sequences.
/// Returns the best time of the slowest rank; `None` if the heads cannot be divided.
fn measure_alone(
    args: &BenchArgs,
    ranks: &Ranks,
    Shape { b, hq, hk, n, m, d }: Shape,
    threads: usize,
) -> Result<Option<f64>, Failure> {
    let size = ranks.size();
    if !(hq.is_multiple_of(size) && hk.is_multiple_of(size)) {
        return Ok(None);
    }
    let mask = if args.causal { Mask::causal() } else { Mask::full() };
    let attention = Attention::scaled_dot().mask(mask);
    let seed = 10 * ranks.rank() as u64;
    let q = Tensor::<f32, 4>::randn([b, hq / size, n, d], seed);
    let k = Tensor::<f32, 4>::randn([b, hk / size, m, d], seed + 1);
    let v = Tensor::<f32, 4>::randn([b, hk / size, m, d], seed + 2);
    let (inputs, scratch) = (Inputs::new(&q, &k, &v), Scratch::new());
    let call = || {
        RankMeasurement::of(ranks, || {
            let out = attention.forward_with(inputs, &scratch, threads).map_err(qkv_ranks::Error::from)?;
            let upstream = Upstream::new(&q);
            attention.backward_with(inputs, &out, upstream, &scratch, threads).map_err(qkv_ranks::Error::from)?;
            Ok(())
        })
    };
    let calls = repeated(args.seconds, call)?;
    Ok(calls.iter().map(|call| call.seconds).min_by(f64::total_cmp))
}
