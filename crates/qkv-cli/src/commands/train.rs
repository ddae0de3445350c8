//! `qkv train`: turns a recipe into a folder with a trained model. Training itself is in `qkv_models::train`; this
//! module starts it, reports its progress, and stops it on signals.
//!
//! | module | owns |
//! | --- | --- |
//! | `args` | the arguments |
//! | `log` | progress on stderr: a bar, lines or JSON |
//! | `summary` | what is printed at the end |

mod args;
mod log;
mod summary;

use crate::command::{Command, Run, Status};
use crate::failure::Failure;
use crate::output::Print;
use crate::ranks::{self, RankJob};
use crate::{input, threads};
use args::{ARGUMENTS, EXAMPLES, LogFormat, TrainArgs, notes};
use log::TrainLog;
use qkv_models::Recipe;
use qkv_models::train::{self, Outcome, Resume};
use qkv_ranks::Ranks;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use summary::TrainSummary;

pub(super) const COMMAND: Command =
    Command::new("train", "Train a model from a recipe, or resume a run", ARGUMENTS, |matches| {
        Ok(Box::new(TrainArgs::parse(matches)))
    })
    .examples(EXAMPLES)
    .notes(notes);

impl Run for TrainArgs {
    fn run(&self, print: Print<'_>) -> Result<Status, Failure> {
        if self.dry_run {
            return threads::on(self.threads, || plan(self, print));
        }
        ranks::start(self.ranks)?;
        let job = RankJob::join(self.rank_timeout)?;
        let threads = job.threads(self.threads)?;
        job.run(|ranks| threads::on(threads, || self.train(ranks, print)))
    }
}

impl TrainArgs {
    /// Trains as one of the ranks.
    fn train(&self, ranks: &Ranks, print: Print<'_>) -> Result<Status, Failure> {
        let first = ranks.is_first();
        let mut run = match first {
            true => open(self, ranks)?,
            false => train::Run::join(ranks.clone(), rayon::current_num_threads())?,
        };
        run.move_to(self.device)?;
        let mut log = TrainLog::new(if first { self.log_format } else { LogFormat::Quiet }, &run);
        log.start(&run);
        let stop = stop_flag()?;
        let outcome = run.train(&mut log, &stop);
        log.finish();
        let outcome = outcome?;
        if outcome == Outcome::Interrupted {
            log.interrupted(&run);
            return Ok(Status::Interrupted);
        }
        if !first {
            return Ok(Status::Done);
        }
        let summary = TrainSummary::new(&run, outcome)?;
        log.end(&summary);
        print(&if self.json { summary.to_json() } else { summary.to_text() })?;
        Ok(Status::Done)
    }
}

/// Prints what a run would do, without creating a folder or taking a step.
fn plan(args: &TrainArgs, print: Print<'_>) -> Result<Status, Failure> {
    input::check(&args.recipe)?;
    args.overrides.iter().try_for_each(|setting| check_range(setting))?;
    if args.recipe.is_dir() {
        return Err(Failure::new(format!("`{}` is a folder, not a recipe", args.recipe.display())));
    }
    let plan = train::Plan::of(&Recipe::read(&args.recipe, &args.overrides)?)?;
    print(&if args.json { log::plan_json(&plan) } else { log::plan_lines(&plan).join("\n") + "\n" })?;
    Ok(Status::Done)
}

/// Starts a new run, or resumes one.
fn open(args: &TrainArgs, ranks: &Ranks) -> Result<train::Run, Failure> {
    let ranks = ranks.clone();
    let threads = rayon::current_num_threads();
    let path = &args.recipe;
    input::check(path)?;
    args.overrides.iter().try_for_each(|setting| check_range(setting))?;
    if path.is_dir() {
        let shown = path.display();
        if !args.resume {
            let failure = Failure::new(format!("`{shown}` is a folder, not a recipe"));
            return Err(failure.hint(format!("`qkv train --resume {shown}` continues the run in it")));
        }
        if args.out.is_some() {
            return Err(Failure::new(format!("`--out` cannot be used with the folder of a run, `{shown}`")));
        }
        let how = Resume { changes: args.overrides.clone(), checkpoint: args.checkpoint };
        return Ok(train::Run::resume_on(ranks, path, &how, threads)?);
    }
    let recipe = Recipe::read(path, &args.overrides)?;
    let folder = args.out.clone().unwrap_or_else(|| Path::new("runs").join(&recipe.name));
    let begun = folder.join("recipe.toml");
    if !(args.resume && begun.exists()) {
        return Ok(train::Run::new_on(ranks, &recipe, folder, threads)?);
    }
    let there = Recipe::read(&begun, &[])?;
    if there != recipe {
        let (there, here) = (there.to_toml(), recipe.to_toml());
        let difference = there.lines().zip(here.lines()).find(|(there, here)| there != here);
        let difference =
            difference.map_or(String::new(), |(there, here)| format!(": `{there}` in the run, `{here}` now"));
        let shown = folder.display();
        return Err(Failure::new(format!("`{shown}` was started with a different recipe{difference}"))
            .hint(format!("`qkv train --resume {shown}` continues with its own; `--set` changes a setting")));
    }
    let how = Resume { checkpoint: args.checkpoint, ..Resume::default() };
    Ok(train::Run::resume_on(ranks, folder, &how, threads)?)
}

/// Refuses a number that TOML cannot represent. The recipe would read it as a string and complain about its type.
fn check_range(setting: &str) -> Result<(), Failure> {
    let Some((_, value)) = setting.split_once('=') else { return Ok(()) };
    let digits = value.trim().trim_start_matches(['+', '-']);
    let number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit() || byte == b'_');
    if number && value.trim().replace('_', "").parse::<i64>().is_err() {
        let what = format!("`--set {setting}`: the number is out of range");
        return Err(Failure::new(what).hint(format!("integers go from {} to {}", i64::MIN, i64::MAX)));
    }
    Ok(())
}

/// A flag that the first SIGINT or SIGTERM sets; the second one exits.
fn stop_flag() -> Result<Arc<AtomicBool>, Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // The order matters: the shutdown must look at the flag before the same signal sets it.
        flag::register_conditional_shutdown(signal, 130, Arc::clone(&stop))
            .and_then(|_| flag::register(signal, Arc::clone(&stop)))
            .map_err(|error| Failure::new(format!("cannot install signal handlers: {error}")))?;
    }
    Ok(stop)
}
