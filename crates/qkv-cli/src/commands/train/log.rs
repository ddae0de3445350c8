//! Progress on stderr: a bar where a person watches, lines for a file, JSON for a program. The same numbers lie in
//! `metrics.jsonl` in any case.

use super::asked::Form;
use super::end::End;
use indicatif::{ProgressBar, ProgressStyle};
use qkv_models::train::{Event, Run, Validation, Watcher};
use serde::Serialize;
use std::io::{self, IsTerminal, Write};
use std::time::Instant;

/// Who watches a run for the user.
pub(crate) struct Log {
    form: Form,
    bar: ProgressBar,
    start: Instant,
    /// Where this process took over.
    first: u64,
}

/// A line of JSON.
#[derive(Serialize)]
struct Told<T> {
    event: &'static str,
    #[serde(flatten)]
    about: T,
}

#[derive(Serialize)]
struct Begin<'a> {
    version: &'static str,
    seed: u64,
    threads: usize,
    isa: &'static str,
    device: &'static str,
    data: String,
    model: &'static str,
    parameters: usize,
    folder: &'a str,
    step: u64,
    steps: u64,
}

#[derive(Serialize)]
struct Measured<'a> {
    #[serde(flatten)]
    validation: &'a Validation,
    better: bool,
}

#[derive(Serialize)]
struct At {
    step: u64,
}

impl Log {
    pub fn new(form: Form, run: &Run) -> Log {
        let form = match form {
            Form::Auto if io::stderr().is_terminal() => Form::Bar,
            Form::Auto => Form::Plain,
            form => form,
        };
        let style = ProgressStyle::with_template("{bar:24} {pos}/{len} · {msg}").expect("a constant");
        let bar = match form {
            Form::Bar => ProgressBar::new(run.recipe().train.steps).with_style(style.progress_chars("█▉▊▋▌▍▎▏  ")),
            _ => ProgressBar::hidden(),
        };
        Log { form, bar, start: Instant::now(), first: run.step() }
    }

    /// What is trained, where and how.
    pub fn begin(&self, run: &Run) {
        let recipe = run.recipe();
        let model = recipe.model.name();
        let folder = run.folder().display().to_string();
        let begin = Begin {
            version: env!("CARGO_PKG_VERSION"),
            seed: recipe.seed,
            threads: rayon::current_num_threads(),
            isa: qkv::Isa::best().name(),
            device: "cpu",
            data: run.summary(),
            model,
            parameters: run.parameters(),
            folder: &folder,
            step: run.step(),
            steps: recipe.train.steps,
        };
        if self.form == Form::Json {
            return self.json("begin", begin);
        }
        let Begin { version, seed, isa, device, ref data, parameters, step, steps, .. } = begin;
        let threads = crate::threads::told(begin.threads);
        self.line(&format!("qkv      {version}, seed {seed}, {threads}, {isa}, {device}"));
        self.line(&format!("data     {data}"));
        self.line(&format!("model    {model}, {} parameters", many(parameters as f64)));
        let from = if step > 0 { format!(", from step {step}") } else { String::new() };
        self.line(&format!("run      {folder}, {steps} steps{from}"));
        self.bar.set_position(step);
    }

    /// Nothing moves any more.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }

    /// It was asked to stop, and did.
    pub fn interrupted(&self, run: &Run) {
        let (step, folder) = (run.step(), run.folder().display());
        match self.form {
            Form::Json => self.json("interrupted", At { step }),
            Form::Quiet => {}
            _ => self.line(&format!("interrupted at step {step}, and saved: `qkv train --resume {folder}` goes on")),
        }
    }

    /// How it ended, where programs read along.
    pub fn end(&self, end: &End) {
        if self.form == Form::Json {
            self.json("end", end);
        }
    }

    fn json(&self, event: &'static str, about: impl Serialize) {
        let line = serde_json::to_string(&Told { event, about }).expect("plain data");
        let _ = writeln!(io::stderr(), "{line}");
    }

    /// A line above the bar; whoever closed stderr does not want to read it.
    fn line(&self, words: &str) {
        if !matches!(self.form, Form::Json | Form::Quiet) {
            self.bar.suspend(|| drop(writeln!(io::stderr(), "{words}")));
        }
    }

    /// Seconds that the steps to come take if they take what those of this process took, validations included.
    fn left(&self, event: &Event) -> f64 {
        let taken = event.step.saturating_sub(self.first).max(1) as f64;
        self.start.elapsed().as_secs_f64() / taken * event.steps.saturating_sub(event.step) as f64
    }

    fn told(&self, event: &Event) -> String {
        let Event { loss, rate, norm, tokens, seconds, .. } = event;
        let speed = many(*tokens as f64 / seconds.max(1e-9));
        let left = clock(self.left(event));
        format!("loss {loss:.4} · lr {rate:.2e} · gradient {norm:.3} · {speed} tokens/s · {left} left")
    }
}

impl Watcher for Log {
    fn step(&mut self, event: &Event) {
        if self.form == Form::Bar {
            self.bar.set_position(event.step);
            self.bar.set_message(self.told(event));
        }
    }

    fn logged(&mut self, event: &Event) {
        match self.form {
            Form::Json => self.json("step", event),
            Form::Plain => {
                let Event { step, steps, epoch, perplexity, .. } = event;
                let told = self.told(event);
                self.line(&format!("step {step}/{steps} · epoch {epoch} · perplexity {perplexity:.2} · {told}"));
            }
            _ => {}
        }
    }

    fn validating(&mut self, _step: u64) {
        if self.form == Form::Bar {
            self.bar.set_message("measuring on the dev set");
            self.bar.tick();
        }
    }

    fn validated(&mut self, validation: &Validation, better: bool) {
        if self.form == Form::Json {
            return self.json("validation", Measured { validation, better });
        }
        let Validation { step, loss, perplexity, .. } = validation;
        let best = if better { " · best so far" } else { "" };
        let scores = Some(validation.told()).filter(|told| !told.is_empty()).map(|told| format!(" · {told}"));
        let scores = scores.unwrap_or_default();
        self.line(&format!("dev at step {step} · loss {loss:.4} · perplexity {perplexity:.3}{scores}{best}"));
        for [source, output, reference] in &validation.samples {
            let wrong = if output == reference { String::new() } else { format!("   (reference: {reference})") };
            self.line(&format!("    {source} → {output}{wrong}"));
        }
    }

    fn saved(&mut self, step: u64) {
        if self.form == Form::Json {
            self.json("saved", At { step });
        }
    }
}

/// A count as a person reads it: `413 k`.
fn many(count: f64) -> String {
    match count {
        x if x >= 1e6 => format!("{:.1} M", x / 1e6),
        x if x >= 1e4 => format!("{:.0} k", x / 1e3),
        x => format!("{x:.0}"),
    }
}

/// Seconds as `1:05` or `2:03:04`.
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
        assert_eq!([7.0, 9999.0, 413_000.0, 7.3e6].map(many), ["7", "9999", "413 k", "7.3 M"]);
        assert_eq!([0.4, 65.0, 7384.0].map(clock), ["0:00", "1:05", "2:03:04"]);
    }
}
