//! `qkv bench --train --ranks`: a training step over ranks, alternating with a step that every rank takes alone: its
//! time, the bytes that a rank sends, and how long it waits for messages that computation does not hide. With the
//! default, a fixed number of micro-batches per rank, the share is that of weak scaling; with a fixed number of
//! micro-batches in all, the times are those of strong scaling.

use super::args::{BenchArgs, ReportFormat};
use super::over_ranks::{RankMeasurement, repeated};
use super::statistics::median;
use super::table::{Column, Table, share, time};
use super::training_step::{StepModel, StepTask, models};
use super::{machine, over_ranks};
use crate::failure::Failure;
use crate::memory;
use crate::output::Print;
use qkv_models::train::GradientSum;
use qkv_nn::{Device, Machine, Moments, Pool, Tape};
use qkv_ranks::Ranks;
use serde_json::json;

/// Micro-batches per batch of `--train`.
const PARTS: usize = 4;

/// A model in training, step by step.
struct Training<'a> {
    task: StepTask,
    moments: Moments<f32>,
    machine: &'a Machine,
    pool: Pool<f32>,
    step: u64,
}

impl Training<'_> {
    /// One step: this rank's micro-batches, their sum over the ranks, and Adam.
    fn step(&mut self, sum: &mut GradientSum, ranks: &Ranks) -> Result<(), Failure> {
        self.step += 1;
        let Training { task: StepTask { parameters, adam, loss }, moments, machine, pool, step } = self;
        let (own, mut step_sum, mut last) = (sum.own_leaves(), sum.begin()?, None);
        for leaf in own.clone() {
            let mut gradients = sum.zeros(parameters, machine);
            let mut tape = Tape::training(parameters, &mut gradients, pool, machine, *step * 1000 + leaf as u64);
            loss(&mut tape)?;
            if leaf + 1 == own.end && ranks.size() > 1 {
                tape.backward_with(|gradients, params| sum.finished(&mut step_sum, leaf, gradients, params));
                last = Some(gradients);
            } else {
                tape.backward();
                drop(tape);
                sum.push(&mut step_sum, leaf, gradients, machine);
            }
        }
        let mut gradients = sum.finish(step_sum, last)?;
        adam.step_clipped(parameters, &mut gradients, moments, 1e-4, 1.0, machine).read();
        sum.give_back(gradients);
        Ok(())
    }
}

/// Refuses fewer micro-batches than ranks.
pub(super) fn check(args: &BenchArgs) -> Result<(), Failure> {
    match (args.ranks, args.micro_batches) {
        (Some(ranks), Some(count)) if count < ranks => {
            Err(Failure::new(format!("{ranks} ranks for {count} micro-batches: each rank needs one")))
        }
        _ => Ok(()),
    }
}

/// Measures each model; the first rank prints.
pub(super) fn measure(args: &BenchArgs, ranks: &Ranks, print: Print<'_>) -> Result<(), Failure> {
    let threads = rayon::current_num_threads();
    let micro_batches = args.micro_batches.unwrap_or(PARTS * ranks.size());
    let mut columns = vec![Column::words("step of", 10)];
    let numbers = ["micro-batches", "best ms", "median ms", "alone ms", "share", "MiB sent", "waited ms", "MB"];
    columns.extend(numbers.map(Column::numbers));
    let table = Table::new(columns, args.format == ReportFormat::Markdown);
    let text = args.format != ReportFormat::Json;
    if text && ranks.is_first() {
        let names = models(Device::Cpu).iter().map(|model| format!("{}: {}\n", model.name, model.what));
        let (names, size) = (names.collect::<String>(), ranks.size());
        let machine = machine::describe(threads, None);
        print(&format!(
            "{machine}\n{names}{size} ranks, f32, micro-batches of a quarter of that\n\n{}",
            table.header()
        ))?;
    }
    for model in models(Device::Cpu) {
        let found = measure_model(args, model, ranks, micro_batches, threads)?;
        if ranks.is_first() {
            let line = if text { table.row(&found.cells()) } else { format!("{}\n", found.to_json(ranks, threads)) };
            print(&line)?;
        }
    }
    if text && ranks.is_first() {
        print(
            "\nOf the slowest rank, a step over all ranks and one of as many micro-batches on every rank alone, in turns;\n\
             share: of the throughput of ranks that train alone; MiB: the most that one rank sends a step;\n\
             waited: within the best step; MB: peak memory of the first rank.\n",
        )?;
    }
    Ok(())
}

/// The measured steps of one model.
struct StepScaling {
    model: &'static str,
    parameters: usize,
    micro_batches: usize,
    best: RankMeasurement,
    median: f64,
    alone: f64,
    peak: Option<u64>,
}

fn measure_model(
    args: &BenchArgs,
    model: &'static StepModel,
    ranks: &Ranks,
    micro_batches: usize,
    threads: usize,
) -> Result<StepScaling, Failure> {
    let (machine, task) = (Machine::new(threads), model.task(Device::Cpu, PARTS)?);
    let mut sum = GradientSum::new(&task.parameters, micro_batches, ranks.clone());
    let mut own_sum = GradientSum::new(&task.parameters, sum.own_leaves().len(), Ranks::alone());
    let moments = Moments::of(&task.parameters);
    let mut training = Training { task, moments, machine: &machine, pool: Pool::new(), step: 0 };
    let mut alone = Vec::new();
    let calls = repeated(args.seconds, || {
        let together = RankMeasurement::of(ranks, || training.step(&mut sum, ranks))?;
        alone.push(RankMeasurement::of(ranks, || training.step(&mut own_sum, &Ranks::alone()))?.seconds);
        Ok(together)
    })?;
    let best = over_ranks::best(&calls);
    // Only as many as are counted on the other side.
    let alone = alone[alone.len() - calls.len()..].iter().copied().fold(f64::INFINITY, f64::min);
    let median = median(calls.iter().map(|call| call.seconds)).unwrap_or(f64::NAN);
    let parameters = training.task.parameters.count();
    Ok(StepScaling { model: model.name, parameters, micro_batches, best, median, alone, peak: memory::peak() })
}

impl StepScaling {
    fn cells(&self) -> Vec<String> {
        let [best, median, alone, waited] =
            [self.best.seconds, self.median, self.alone, self.best.waited].map(|seconds| time(1e3 * seconds));
        let mib = format!("{:.2}", self.best.sent as f64 / f64::from(1 << 20));
        let peak = self.peak.map_or("?".into(), |bytes| (bytes >> 20).to_string());
        let part = share(self.alone / self.best.seconds);
        vec![self.model.into(), self.micro_batches.to_string(), best, median, alone, part, mib, waited, peak]
    }

    fn to_json(&self, ranks: &Ranks, threads: usize) -> serde_json::Value {
        json!({
            "model": self.model, "parameters": self.parameters, "ranks": ranks.size(), "threads": threads,
            "micro_batches": self.micro_batches,
            "best_ms": 1e3 * self.best.seconds, "median_ms": 1e3 * self.median, "alone_ms": 1e3 * self.alone,
            "share": self.alone / self.best.seconds, "sent_bytes": self.best.sent, "waited_ms": 1e3 * self.best.waited,
            "peak_bytes": self.peak,
        })
    }
}
