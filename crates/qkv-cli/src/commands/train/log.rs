//! Progress on stderr: a bar on a terminal, lines in a file, JSON for programs. The same numbers go to `metrics.jsonl`
//! in any case.

use super::args::LogFormat;
use super::summary::TrainSummary;
use crate::output::note;
use crate::threads;
use indicatif::{ProgressBar, ProgressStyle};
use qkv_models::Provenance;
use qkv_models::train::{Event, Plan, Run, Validation, Watcher};
use serde::Serialize;
use serde_json::json;
use std::io::{self, IsTerminal};
use std::time::Instant;

/// The progress of a run.
pub(crate) struct TrainLog {
    format: LogFormat,
    bar: ProgressBar,
    start: Instant,
    /// The step at which this process started.
    first_step: u64,
    /// Whether the loss is per token, so that its exponential is a perplexity; not so for sounds and boxes.
    of_tokens: bool,
}

/// A line of JSON.
#[derive(Serialize)]
struct LogLine<T> {
    event: &'static str,
    #[serde(flatten)]
    fields: T,
}

#[derive(Serialize)]
struct StartEvent<'a> {
    version: &'static str,
    seed: u64,
    threads: usize,
    ranks: usize,
    isa: &'static str,
    device: &'a str,
    data: String,
    model: &'static str,
    parameters: usize,
    trained: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    from: Option<&'a Provenance>,
    folder: &'a str,
    step: u64,
    steps: u64,
}

#[derive(Serialize)]
struct ValidationEvent<'a> {
    #[serde(flatten)]
    validation: &'a Validation,
    better: bool,
}

#[derive(Serialize)]
struct StepEvent {
    step: u64,
}

impl TrainLog {
    pub fn new(format: LogFormat, run: &Run) -> TrainLog {
        let format = match format {
            LogFormat::Auto if io::stderr().is_terminal() => LogFormat::Bar,
            LogFormat::Auto => LogFormat::Plain,
            format => format,
        };
        let style = ProgressStyle::with_template("{bar:24} {pos}/{len} · {msg}").expect("a constant");
        let bar = match format {
            LogFormat::Bar => ProgressBar::new(run.recipe().train.steps).with_style(style.progress_chars("█▉▊▋▌▍▎▏  ")),
            _ => ProgressBar::hidden(),
        };
        let of_tokens = !matches!(run.kind(), "voice" | "detect");
        TrainLog { format, bar, start: Instant::now(), first_step: run.step(), of_tokens }
    }

    /// Reports the start: data, model and settings.
    pub fn start(&self, run: &Run) {
        let recipe = run.recipe();
        let model = run.kind();
        let folder = run.folder().display().to_string();
        let start = StartEvent {
            version: env!("CARGO_PKG_VERSION"),
            seed: recipe.seed,
            threads: rayon::current_num_threads(),
            ranks: run.ranks().size(),
            isa: qkv::Isa::best().name(),
            device: run.device(),
            data: run.summary(),
            model,
            parameters: run.parameters(),
            trained: run.trained_parameters(),
            from: run.provenance(),
            folder: &folder,
            step: run.step(),
            steps: recipe.train.steps,
        };
        if self.format == LogFormat::Json {
            return self.json("begin", start);
        }
        let StartEvent { version, seed, isa, device, ref data, parameters, step, steps, .. } = start;
        let threads = match start.ranks {
            1 => threads::count(start.threads),
            ranks => format!("{ranks} ranks of {}", threads::count(start.threads)),
        };
        self.line(&format!("qkv      {version}, seed {seed}, {threads}, {isa}, {device}"));
        self.line(&format!("data     {data}"));
        for line in model_lines(model, [parameters, start.trained], run.provenance()) {
            self.line(&line);
        }
        let from = if step > 0 { format!(", from step {step}") } else { String::new() };
        self.line(&format!("run      {folder}, {steps} steps{from}"));
        self.bar.set_position(step);
    }

    /// Removes the bar.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }

    /// Reports that a signal stopped the run.
    pub fn interrupted(&self, run: &Run) {
        let (step, folder) = (run.step(), run.folder().display());
        match self.format {
            LogFormat::Json => self.json("interrupted", StepEvent { step }),
            LogFormat::Quiet => {}
            _ => self.line(&format!("interrupted at step {step}, saved; continue with `qkv train --resume {folder}`")),
        }
    }

    /// Reports the end, with the summary for programs that follow the log.
    pub fn end(&self, summary: &TrainSummary) {
        if self.format == LogFormat::Json {
            self.json("end", summary);
        }
    }

    fn json(&self, event: &'static str, fields: impl Serialize) {
        note(serde_json::to_string(&LogLine { event, fields }).expect("plain data"));
    }

    /// Prints a line above the bar.
    fn line(&self, text: &str) {
        if !matches!(self.format, LogFormat::Json | LogFormat::Quiet) {
            self.bar.suspend(|| note(text));
        }
    }

    /// Seconds until the end, at the pace of this process, validations included.
    fn seconds_left(&self, event: &Event) -> f64 {
        let done = event.step.saturating_sub(self.first_step).max(1) as f64;
        self.start.elapsed().as_secs_f64() / done * event.steps.saturating_sub(event.step) as f64
    }

    /// The perplexity as part of a line; empty if the loss is not per token.
    fn perplexity(&self, number: String) -> String {
        if self.of_tokens { format!(" · perplexity {number}") } else { String::new() }
    }

    fn metrics(&self, event: &Event) -> String {
        let Event { loss, rate, norm, tokens_per_second, .. } = event;
        let speed = short_count(*tokens_per_second);
        let left = clock(self.seconds_left(event));
        format!("loss {loss:.4} · lr {rate:.2e} · gradient {norm:.3} · {speed} tokens/s · {left} left")
    }
}

impl Watcher for TrainLog {
    fn step(&mut self, event: &Event) {
        if self.format == LogFormat::Bar {
            self.bar.set_position(event.step);
            self.bar.set_message(self.metrics(event));
        }
    }

    fn logged(&mut self, event: &Event) {
        match self.format {
            LogFormat::Json => self.json("step", event),
            LogFormat::Plain => {
                let Event { step, steps, epoch, perplexity, .. } = event;
                let (metrics, perplexity) = (self.metrics(event), self.perplexity(format!("{perplexity:.2}")));
                self.line(&format!("step {step}/{steps} · epoch {epoch}{perplexity} · {metrics}"));
            }
            _ => {}
        }
    }

    fn validating(&mut self, _step: u64) {
        if self.format == LogFormat::Bar {
            self.bar.set_message("validating on the dev set");
            self.bar.tick();
        }
    }

    fn validated(&mut self, validation: &Validation, better: bool) {
        if self.format == LogFormat::Json {
            return self.json("validation", ValidationEvent { validation, better });
        }
        let Validation { step, loss, perplexity, .. } = validation;
        let best = if better { " · best so far" } else { "" };
        let scores = Some(validation.told()).filter(|scores| !scores.is_empty()).map(|scores| format!(" · {scores}"));
        let (scores, perplexity) = (scores.unwrap_or_default(), self.perplexity(format!("{perplexity:.3}")));
        self.line(&format!("dev at step {step} · loss {loss:.4}{perplexity}{scores}{best}"));
        for [source, output, reference] in &validation.samples {
            let wrong = if output == reference { String::new() } else { format!("   (reference: {reference})") };
            self.line(&format!("    {source} → {output}{wrong}"));
        }
    }

    fn saved(&mut self, step: u64) {
        if self.format == LogFormat::Json {
            self.json("saved", StepEvent { step });
        }
    }
}

/// The model of a run: its size, how much of it is trained, and where its weights come from.
fn model_lines(kind: &str, [parameters, trained]: [usize; 2], from: Option<&Provenance>) -> Vec<String> {
    let mut line = format!("model    {kind}, {} parameters", short_count(parameters as f64));
    if trained < parameters {
        line += &format!(", {} of them trained", short_count(trained as f64));
    }
    let from = from.into_iter().flat_map(Provenance::lines).enumerate();
    let from = from.map(|(at, line)| format!("{}{line}", if at == 0 { "from     " } else { "         " }));
    [line].into_iter().chain(from).collect()
}

/// What a run would do, in lines.
pub(super) fn plan_lines(plan: &Plan) -> Vec<String> {
    let data = format!("data     {}", plan.data());
    [data].into_iter().chain(model_lines(plan.kind(), plan.parameters(), plan.provenance())).collect()
}

/// The same as one JSON object, on one line.
pub(super) fn plan_json(plan: &Plan) -> String {
    let [parameters, trained] = plan.parameters();
    let (data, model, from) = (plan.data(), plan.kind(), plan.provenance());
    format!("{}\n", json!({ "data": data, "model": model, "parameters": parameters, "trained": trained, "from": from }))
}

/// A human-readable count: `413 k`.
fn short_count(count: f64) -> String {
    match count {
        x if x >= 1e6 => format!("{:.1} M", x / 1e6),
        x if x >= 1e4 => format!("{:.0} k", x / 1e3),
        x => format!("{x:.0}"),
    }
}

/// A duration as `1:05` or `2:03:04`.
fn clock(seconds: f64) -> String {
    let seconds = seconds.round() as u64;
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    if hours > 0 { format!("{hours}:{minutes:02}:{seconds:02}") } else { format!("{minutes}:{seconds:02}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_and_times_are_short() {
        assert_eq!([7.0, 9999.0, 413_000.0, 7.3e6].map(short_count), ["7", "9999", "413 k", "7.3 M"]);
        assert_eq!([0.4, 65.0, 7384.0].map(clock), ["0:00", "1:05", "2:03:04"]);
    }
}
