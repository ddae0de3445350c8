//! Training: from a recipe to a folder with a model in it, in steps that depend on nothing but the recipe.
//!
//! A run can stop anywhere, killed or interrupted, and go on from its last checkpoint: the weights at the end are the same, bit
//! for bit, as if it had never stopped. So nothing here is decided by the clock, and everything that a step depends on is either
//! a function of the step's number or in the checkpoint.

mod checkpoint;
mod data;
mod events;
mod validation;

pub use events::{Event, Validation, Watcher};

use crate::batch::{Batch, Specials};
use crate::files::atomic;
use crate::files::tensors::Storage;
use crate::text::batches::Batching;
use crate::translator::Translator;
use crate::{Error, Metric, Model, ModelConfig, Recipe, Result};
use checkpoint::{Place, Saved};
use data::Prepared;
use qkv_nn::{Gradients, Loss, Machine, Moments, Parameters, Pool, Tape};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All steps were taken.
    Finished,
    /// Nothing got better for as long as the recipe's patience.
    NoBetter,
    /// Somebody asked it to stop; it saved, and can be resumed.
    Interrupted,
}

/// A run: a recipe on its way.
pub struct Run {
    folder: PathBuf,
    recipe: Recipe,
    data: Prepared,
    translator: Translator,
    /// The running average of the weights; `None` where they are used as they are.
    average: Option<Parameters<f32>>,
    moments: Moments<f32>,
    place: Place,
    metrics: checkpoint::Metrics,
    machine: Machine,
    pool: Pool<f32>,
}

impl std::fmt::Debug for Run {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Run({} at step {})", self.folder.display(), self.place.step)
    }
}

impl Run {
    /// A new run in a folder that must not be there yet, or be empty.
    ///
    /// # Errors
    /// Where the folder is taken, the data is not what it should be, or sizes do not fit.
    pub fn new(recipe: &Recipe, folder: impl AsRef<Path>, threads: usize) -> Result<Run> {
        let folder = folder.as_ref();
        let taken = std::fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some());
        if taken {
            let what = format!("`{}` is there already, and not empty", folder.display());
            return Err(
                Error::invalid(what).with_hint("add `--resume` to go on with it, or choose another with `--out`")
            );
        }
        let (data, tokenizer) = Prepared::new(recipe, None)?;
        std::fs::create_dir_all(folder).map_err(|e| Error::file("write", folder, e))?;
        atomic::write(folder.join(RECIPE), recipe.to_toml().as_bytes())?;
        tokenizer.save(folder.join("tokenizer.json"))?;
        Run::start(recipe.clone(), folder, threads, data, tokenizer)
    }

    /// Goes on with the run in a folder, from its last checkpoint, or from the start where it has none yet.
    ///
    /// # Errors
    /// Where there is no run, or its files are not what they should be.
    pub fn resume(folder: impl AsRef<Path>, threads: usize) -> Result<Run> {
        Run::resume_changed(folder, &[], threads)
    }

    /// The same with changes to its recipe, each `path=value`, which are kept: more steps, say. What is changed no longer
    /// gives what the run without the change would have.
    ///
    /// # Errors
    /// As [`resume`](Run::resume), and where a change makes no sense.
    pub fn resume_changed(folder: impl AsRef<Path>, changes: &[String], threads: usize) -> Result<Run> {
        let folder = folder.as_ref();
        let recipe = Recipe::read(folder.join(RECIPE), changes)?;
        let path = folder.join("tokenizer.json");
        // A run that was killed in its first moments has none yet.
        let kept = path.exists().then(|| crate::text::tokenizer::Tokenizer::open(&path)).transpose()?;
        let (data, tokenizer) = Prepared::new(&recipe, kept)?;
        if !path.exists() {
            tokenizer.save(&path)?;
        }
        let mut run = Run::start(recipe, folder, threads, data, tokenizer)?;
        if let Some(saved) = Saved::latest(folder)? {
            run.place = saved.read(&mut run.translator.parameters, run.average.as_mut(), &mut run.moments)?;
        }
        run.metrics.cut(run.place.metrics_bytes)?;
        if !changes.is_empty() {
            atomic::write(folder.join(RECIPE), run.recipe.to_toml().as_bytes())?;
        }
        Ok(run)
    }

    fn start(
        recipe: Recipe,
        folder: &Path,
        threads: usize,
        data: Prepared,
        tokenizer: crate::text::tokenizer::Tokenizer,
    ) -> Result<Run> {
        let config = ModelConfig::new(recipe.model.clone(), tokenizer.len(), Specials::of(&tokenizer));
        let (model, parameters) = Model::new(&config, recipe.seed)?;
        let average = (recipe.train.average > 0.0).then(|| parameters.clone());
        let moments = Moments::of(&parameters);
        let machine = Machine::new(threads).precision(recipe.train.precision);
        let translator = Translator { model, parameters, tokenizer, search: recipe.search.clone() };
        let metrics = checkpoint::Metrics::open(folder)?;
        let (folder, place) = (folder.to_owned(), Place::default());
        Ok(Run { folder, recipe, data, translator, average, moments, place, metrics, machine, pool: Pool::new() })
    }

    /// Its recipe, resolved.
    pub fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    /// Where it lies.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The best score so far of the metric that the recipe chose, and the step it was reached at. A loss counts below 0.
    pub fn best(&self) -> Option<(f64, u64)> {
        self.place.best.map(|best| (best, self.place.best_step))
    }

    /// Steps taken so far.
    pub fn step(&self) -> u64 {
        self.place.step
    }

    /// Numbers that are trained.
    pub fn parameters(&self) -> usize {
        self.translator.parameters.count()
    }

    /// The model as it would be used now, with averaged weights where the recipe asks for them.
    pub fn translator(&self) -> Translator {
        Translator {
            model: self.translator.model.clone(),
            parameters: self.average.as_ref().unwrap_or(&self.translator.parameters).clone(),
            tokenizer: self.translator.tokenizer.clone(),
            search: self.recipe.search.clone(),
        }
    }

    /// The pairs that the model is measured on.
    pub fn dev(&self) -> &[crate::text::corpus::Pair] {
        &self.data.dev
    }

    /// What was read, for the first lines of a log.
    pub fn summary(&self) -> String {
        self.data.summary(self.translator.tokenizer.len())
    }

    /// Takes steps until the recipe is done, or `stop` is set.
    ///
    /// # Errors
    /// Where a loss is no number, or the system refuses to write.
    pub fn train(&mut self, watcher: &mut dyn Watcher, stop: &AtomicBool) -> Result<Outcome> {
        // Inside the pool: a step hands out work a thousand times, and from outside each would wait for a thread to wake.
        rayon::scope(|_| self.steps(watcher, stop))
    }

    fn steps(&mut self, watcher: &mut dyn Watcher, stop: &AtomicBool) -> Result<Outcome> {
        let train = self.recipe.train.clone();
        let mut gradients = Gradients::of(&self.translator.parameters);
        let batching = Batching { tokens: train.tokens, longest: train.longest };
        let mut epoch = None;
        let (mut since, mut clock) = (Since::default(), Instant::now());
        while self.place.step < train.steps {
            if self.place.stale > train.patience && train.patience > 0 {
                self.finish(watcher)?;
                return Ok(Outcome::NoBetter);
            }
            if stop.load(Ordering::Relaxed) {
                self.save(watcher)?;
                return Ok(Outcome::Interrupted);
            }
            let mut batches = Vec::with_capacity(train.accumulate);
            for _ in 0..train.accumulate {
                batches.push(self.next_batch(&batching, &mut epoch)?);
            }
            let step = self.place.step + 1;
            let tokens: usize = batches.iter().map(Batch::tokens).sum();
            gradients.clear(&self.machine);
            let mut loss = Loss::default();
            let mut penalty = 0.0;
            for (at, batch) in batches.iter().enumerate() {
                let noise = crate::draws::Draws::new(self.recipe.seed, [NOISE, step as u32, at as u32]).word();
                let noise = u64::from(noise) << 32 | step;
                let parameters = &self.translator.parameters;
                let mut tape = Tape::training(parameters, &mut gradients, &self.pool, &self.machine, noise);
                loss += self.translator.model.loss(&mut tape, batch, train.smoothing, 1.0 / tokens as f64)?;
                penalty += tape.penalty();
                tape.backward();
            }
            let norm = gradients.norm(&self.machine);
            let mean = loss.smoothed / loss.rows.max(1) as f64;
            if !(mean + penalty).is_finite() || !norm.is_finite() {
                let place = format!("epoch {}, batch {}", self.place.epoch, self.place.batch);
                let what = format!("the loss is {mean} and the gradient's length {norm} at step {step} ({place})");
                return Err(Error::invalid(what).with_hint("lower `train.lr`, warm up longer, or clip harder"));
            }
            let rate = train.lr * train.schedule.factor(step, train.warmup, train.steps);
            let factor = if train.clip > 0.0 && norm > train.clip { train.clip / norm } else { 1.0 };
            let parameters = &mut self.translator.parameters;
            train.adam.step(parameters, &gradients, &mut self.moments, rate, factor, &self.machine);
            if let Some(average) = &mut self.average {
                // Young averages follow faster.
                let kept = train.average.min((1.0 + step as f64) / (10.0 + step as f64));
                average.follow(parameters, kept, &self.machine);
            }
            self.place.step = step;
            since.add(&loss, penalty);
            let event = Event {
                step,
                steps: train.steps,
                epoch: self.place.epoch,
                loss: since.loss(),
                perplexity: crate::metrics::perplexity(since.nll()),
                penalty: since.penalty(),
                rate,
                norm,
                tokens: since.tokens,
                seconds: clock.elapsed().as_secs_f64(),
            };
            watcher.step(&event);
            if step.is_multiple_of(train.log.max(1)) || step == train.steps {
                self.metrics.write(&event)?;
                watcher.logged(&event);
                (since, clock) = (Since::default(), Instant::now());
            }
            if step.is_multiple_of(train.validate) || step == train.steps {
                self.validate(watcher)?;
                clock = Instant::now();
            }
            if step.is_multiple_of(train.save) && step < train.steps {
                self.save(watcher)?;
                clock = Instant::now();
            }
        }
        self.finish(watcher)?;
        Ok(Outcome::Finished)
    }

    /// The batch that comes next: a function of seed, epoch and place in the epoch.
    fn next_batch(&mut self, batching: &Batching, epoch: &mut Option<(u64, Vec<Vec<usize>>)>) -> Result<Batch> {
        loop {
            if epoch.as_ref().is_none_or(|(number, _)| *number != self.place.epoch) {
                let batches = batching.epoch(&self.data.lengths, self.recipe.seed, self.place.epoch)?.batches;
                *epoch = Some((self.place.epoch, batches));
            }
            let (_, batches) = epoch.as_ref().expect("just made");
            if let Some(pairs) = batches.get(self.place.batch as usize) {
                self.place.batch += 1;
                let tokens = pairs.iter().map(|&at| {
                    let (source, target) = &self.data.train[at];
                    (&source[..], &target[..])
                });
                return Ok(Batch::new(tokens, self.translator.model.config().specials()));
            }
            (self.place.epoch, self.place.batch) = (self.place.epoch + 1, 0);
        }
    }

    /// Measures on the dev set, and keeps the weights if they are the best so far.
    fn validate(&mut self, watcher: &mut dyn Watcher) -> Result<()> {
        watcher.validating(self.place.step);
        let translator = self.translator();
        let found =
            validation::validate(&translator, &self.data, &self.recipe, &self.machine, &self.pool, self.place.step)?;
        let score = match self.recipe.train.metric {
            Metric::Bleu => found.bleu,
            Metric::Chrf => found.chrf,
            Metric::Exact => found.exact,
            Metric::Loss => -found.loss,
        };
        self.metrics.write(&found)?;
        let better = self.place.best.is_none_or(|best| score > best);
        if better {
            self.place.best = Some(score);
            self.place.best_step = self.place.step;
            self.place.stale = 0;
            translator.save(&self.folder, Storage::F32)?;
        } else {
            self.place.stale += 1;
        }
        watcher.validated(&found, better);
        Ok(())
    }

    /// Writes a checkpoint, and removes those that are too old.
    fn save(&mut self, watcher: &mut dyn Watcher) -> Result<()> {
        self.place.metrics_bytes = self.metrics.bytes();
        Saved::write(
            &self.folder,
            &self.place,
            &self.translator.parameters,
            self.average.as_ref(),
            &self.moments,
            self.recipe.train.keep.max(1),
        )?;
        watcher.saved(self.place.step);
        Ok(())
    }

    /// The last checkpoint, and a model in any case.
    fn finish(&mut self, watcher: &mut dyn Watcher) -> Result<()> {
        if self.place.best.is_none() {
            self.translator().save(&self.folder, Storage::F32)?;
        }
        self.save(watcher)
    }
}

/// The resolved recipe in a run's folder.
const RECIPE: &str = "recipe.toml";
/// What draws of noise are for.
const NOISE: u32 = 4;

/// Sums since the last line of progress.
#[derive(Default)]
struct Since {
    smoothed: f64,
    nll: f64,
    tokens: usize,
    penalty: f64,
    steps: usize,
}

impl Since {
    fn add(&mut self, loss: &Loss, penalty: f64) {
        self.smoothed += loss.smoothed;
        self.nll += loss.nll;
        self.tokens += loss.rows;
        self.penalty += penalty;
        self.steps += 1;
    }

    fn loss(&self) -> f64 {
        self.smoothed / self.tokens.max(1) as f64
    }

    fn nll(&self) -> f64 {
        self.nll / self.tokens.max(1) as f64
    }

    fn penalty(&self) -> f64 {
        self.penalty / self.steps.max(1) as f64
    }
}
