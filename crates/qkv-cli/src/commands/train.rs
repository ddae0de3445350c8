//! The command `qkv train`: a recipe becomes a folder with a model in it. What training is, is in `qkv_models`; here it is
//! started, watched, and stopped by whoever asks.
//!
//! | module | owns |
//! | --- | --- |
//! | `asked` | the choices of the command, and what was chosen |
//! | `log` | progress on stderr: a bar, lines or JSON |
//! | `end` | what is told at the end |

mod asked;
mod end;
mod log;

pub(crate) use asked::{Asked, CHOICES, after_help};

use crate::failure::Failure;
use crate::say::Say;
use crate::threads;
use end::End;
use log::Log;
use qkv_models::Recipe;
use qkv_models::train::{Outcome, Run};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// The exit code of a run that was interrupted, and saved.
pub(crate) const INTERRUPTED: u8 = 130;

/// Trains what was asked, and tells how it ended.
pub(crate) fn train(asked: &Asked, say: Say<'_>) -> Result<Outcome, Failure> {
    threads::on(asked.threads, || {
        let mut run = run(asked)?;
        let mut log = Log::new(asked.form, &run);
        log.begin(&run);
        let stop = stop()?;
        let outcome = run.train(&mut log, &stop);
        log.finish();
        let outcome = outcome?;
        if outcome == Outcome::Interrupted {
            log.interrupted(&run);
            return Ok(outcome);
        }
        let end = End::new(&run, outcome)?;
        log.end(&end);
        say(&if asked.json { end.json() } else { end.told() })?;
        Ok(outcome)
    })
}

/// The run that was asked for: a new one, or one that goes on.
fn run(asked: &Asked) -> Result<Run, Failure> {
    let threads = rayon::current_num_threads();
    let path = &asked.recipe;
    if path.is_dir() {
        let shown = path.display();
        if !asked.resume {
            let failure = Failure::new(format!("`{shown}` is a folder, not a recipe"));
            return Err(failure.hint(format!("`qkv train --resume {shown}` goes on with the run in it")));
        }
        if asked.out.is_some() {
            return Err(Failure::new(format!("`--out` cannot go with the folder of a run, `{shown}`")));
        }
        return Ok(Run::resume_changed(path, &asked.changes, threads)?);
    }
    let recipe = Recipe::read(path, &asked.changes)?;
    let folder = asked.out.clone().unwrap_or_else(|| Path::new("runs").join(&recipe.name));
    let begun = folder.join("recipe.toml");
    if !(asked.resume && begun.exists()) {
        return Ok(Run::new(&recipe, folder, threads)?);
    }
    let there = Recipe::read(&begun, &[])?;
    if there != recipe {
        let (there, here) = (there.to_toml(), recipe.to_toml());
        let other = there.lines().zip(here.lines()).find(|(there, here)| there != here);
        let other = other.map_or(String::new(), |(there, here)| format!(": `{there}` there, `{here}` here"));
        let shown = folder.display();
        return Err(Failure::new(format!("`{shown}` was begun with another recipe{other}"))
            .hint(format!("`qkv train --resume {shown}` goes on with its own; `--set` changes it on the way")));
    }
    Ok(Run::resume(folder, threads)?)
}

/// A flag that SIGINT and SIGTERM set; the second one of them ends the program.
fn stop() -> Result<Arc<AtomicBool>, Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // In this order: what ends the program looks at the flag before it is set.
        flag::register_conditional_shutdown(signal, INTERRUPTED.into(), Arc::clone(&stop))
            .and_then(|_| flag::register(signal, Arc::clone(&stop)))
            .map_err(|error| Failure::new(format!("signals cannot be listened to: {error}")))?;
    }
    Ok(stop)
}
