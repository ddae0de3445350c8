//! Training: from a recipe to a folder with a model in it, in steps that depend on nothing but the recipe.
//!
//! A run can stop anywhere, killed or interrupted, and go on from its last checkpoint: the weights at the end are the same, bit
//! for bit, as if it had never stopped. So nothing here is decided by the clock, and everything that a step depends on is either
//! a function of the step's number or in the checkpoint.

mod checkpoint;
mod dataset;
mod events;
mod trained_model;
mod validation;

pub use events::{Event, Measured, Validation, Watcher};

use crate::files::atomic;
use crate::translator::Translator;
use crate::{Error, Metric, Recipe, Result};
use checkpoint::{Progress, SavedCheckpoint};
use dataset::{Augmentation, Dataset, TrainBatch};
use qkv_nn::{Gradients, Loss, Machine, Moments, Parameters, Pool, Tape};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use trained_model::TrainedModel;

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
    data: Dataset,
    model: TrainedModel,
    /// The running average of the weights; `None` where they are used as they are.
    average: Option<Parameters<f32>>,
    moments: Moments<f32>,
    progress: Progress,
    metrics: checkpoint::Metrics,
    machine: Machine,
    pool: Pool<f32>,
}

impl std::fmt::Debug for Run {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Run({} at step {})", self.folder.display(), self.progress.step)
    }
}

impl Run {
    /// A new run in a folder that must not be there yet, or be empty.
    ///
    /// # Errors
    /// Where the folder is taken, the data is not what it should be, or sizes do not fit.
    pub fn new(recipe: &Recipe, folder: impl AsRef<Path>, threads: usize) -> Result<Run> {
        Self::new_at(recipe, folder.as_ref(), threads)
    }

    /// `new` for the one type of path: compiled here, once, and not again by every caller.
    fn new_at(recipe: &Recipe, folder: &Path, threads: usize) -> Result<Run> {
        let taken = std::fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some());
        if taken {
            let what = format!("`{}` is there already, and not empty", folder.display());
            return Err(
                Error::invalid(what).with_hint("add `--resume` to go on with it, or choose another with `--out`")
            );
        }
        let (data, tokenizer) = Dataset::new(recipe, None)?;
        std::fs::create_dir_all(folder).map_err(|e| Error::file("write", folder, e))?;
        atomic::write(folder.join(RECIPE), recipe.to_toml().as_bytes())?;
        if let Some(tokenizer) = &tokenizer {
            tokenizer.save(folder.join("tokenizer.json"))?;
        }
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
        Self::resume_changed_at(folder.as_ref(), changes, threads)
    }

    /// `resume_changed` for the one type of path: compiled here, once, and not again by every caller.
    fn resume_changed_at(folder: &Path, changes: &[String], threads: usize) -> Result<Run> {
        let recipe = Recipe::read(folder.join(RECIPE), changes)?;
        let path = folder.join("tokenizer.json");
        // A run that was killed in its first moments has none yet.
        let kept = path.exists().then(|| crate::text::tokenizer::Tokenizer::open(&path)).transpose()?;
        let (data, tokenizer) = Dataset::new(&recipe, kept)?;
        if let Some(tokenizer) = tokenizer.as_ref().filter(|_| !path.exists()) {
            tokenizer.save(&path)?;
        }
        let mut run = Run::start(recipe, folder, threads, data, tokenizer)?;
        if let Some(saved) = SavedCheckpoint::latest(folder)? {
            run.progress = saved.read(run.model.parameters_mut(), run.average.as_mut(), &mut run.moments)?;
        }
        run.metrics.cut(run.progress.metrics_bytes)?;
        if !changes.is_empty() {
            atomic::write(folder.join(RECIPE), run.recipe.to_toml().as_bytes())?;
        }
        Ok(run)
    }

    fn start(
        recipe: Recipe,
        folder: &Path,
        threads: usize,
        data: Dataset,
        tokenizer: Option<crate::text::tokenizer::Tokenizer>,
    ) -> Result<Run> {
        let model = TrainedModel::new(&recipe, tokenizer, &data)?;
        let mut data = data;
        match (&model, &mut data) {
            (TrainedModel::Encoder(encoder), data) => data.cut(encoder)?,
            (TrainedModel::Han(han), data) => data.cut_documents(han),
            (TrainedModel::Vit(vit), data) => data.prepare(vit)?,
            (TrainedModel::Text(translator), Dataset::Text(text)) => {
                let model = &translator.model;
                if model.gpt().is_none() {
                    return Err(Error::invalid(format!("a {} cannot go on with a text", recipe.model.name()))
                        .with_hint("set `model.kind` to `gpt`, or learn from pairs"));
                }
                if text.block > model.max_len() {
                    let what = format!("`train.longest` is {}, the model takes {} tokens", text.block, model.max_len());
                    return Err(Error::invalid(what).with_hint("raise `model.max_positions`"));
                }
            }
            (TrainedModel::Text(translator), pairs) => pairs.limit(translator.model.max_len()),
        }
        let average = (recipe.train.average > 0.0).then(|| model.parameters().clone());
        let moments = Moments::of(model.parameters());
        let machine = Machine::new(threads).precision(recipe.train.precision);
        let metrics = checkpoint::Metrics::open(folder)?;
        let (folder, progress) = (folder.to_owned(), Progress::default());
        Ok(Run { folder, recipe, data, model, average, moments, progress, metrics, machine, pool: Pool::new() })
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
        self.progress.best.map(|best| (best, self.progress.best_step))
    }

    /// Steps taken so far.
    pub fn step(&self) -> u64 {
        self.progress.step
    }

    /// Numbers that are trained.
    pub fn parameters(&self) -> usize {
        self.model.parameters().count()
    }

    /// The model as it would be used now, with averaged weights where the recipe asks for them.
    fn used(&self) -> TrainedModel {
        self.model.with(self.average.as_ref().unwrap_or(self.model.parameters()).clone())
    }

    /// The same, where it makes text.
    pub fn translator(&self) -> Option<Translator> {
        match self.used() {
            TrainedModel::Text(translator) => Some(translator),
            _ => None,
        }
    }

    /// The pairs that the model is measured on.
    pub fn dev(&self) -> &[crate::text::corpus::Pair] {
        self.data.dev()
    }

    /// What was read, for the first lines of a log.
    pub fn summary(&self) -> String {
        self.data.summary(self.model.tokenizer().map_or(0, crate::text::tokenizer::Tokenizer::len))
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
        let mut gradients = Gradients::of(self.model.parameters());
        let mut epoch = None;
        let (mut since, mut clock) = (LossAverages::default(), Instant::now());
        while self.progress.step < train.steps {
            if self.progress.stale > train.patience && train.patience > 0 {
                self.finish(watcher)?;
                return Ok(Outcome::NoBetter);
            }
            if stop.load(Ordering::Relaxed) {
                self.save(watcher)?;
                return Ok(Outcome::Interrupted);
            }
            let mut batches = Vec::with_capacity(train.accumulate);
            for _ in 0..train.accumulate {
                batches.push(self.next_batch(&mut epoch)?);
            }
            let step = self.progress.step + 1;
            let tokens: usize = batches.iter().map(TrainBatch::targets).sum();
            gradients.clear(&self.machine);
            let mut loss = Loss::default();
            let mut penalty = 0.0;
            for (at, batch) in batches.iter().enumerate() {
                let noise = crate::draws::Draws::new(self.recipe.seed, [NOISE, step as u32, at as u32]).word();
                let noise = u64::from(noise) << 32 | step;
                let mut tape =
                    Tape::training(self.model.parameters(), &mut gradients, &self.pool, &self.machine, noise);
                loss += self.model.loss(&mut tape, batch, train.smoothing, 1.0 / tokens.max(1) as f64)?;
                penalty += tape.penalty();
                tape.backward();
            }
            let norm = gradients.norm(&self.machine);
            let mean = loss.smoothed / loss.rows.max(1) as f64;
            if !(mean + penalty).is_finite() || !norm.is_finite() {
                let progress = format!("epoch {}, batch {}", self.progress.epoch, self.progress.batch);
                let what = format!("the loss is {mean} and the gradient's length {norm} at step {step} ({progress})");
                return Err(Error::invalid(what).with_hint("lower `train.lr`, warm up longer, or clip harder"));
            }
            let rate = train.lr * train.schedule.factor(step, train.warmup, train.steps);
            let factor = if train.clip > 0.0 && norm > train.clip { train.clip / norm } else { 1.0 };
            let parameters = self.model.parameters_mut();
            train.adam.step(parameters, &gradients, &mut self.moments, rate, factor, &self.machine);
            if let Some(average) = &mut self.average {
                // Young averages follow faster.
                let kept = train.average.min((1.0 + step as f64) / (10.0 + step as f64));
                average.average(parameters, kept, &self.machine);
            }
            self.progress.step = step;
            since.add(&loss, penalty);
            let event = Event {
                step,
                steps: train.steps,
                epoch: self.progress.epoch,
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
                (since, clock) = (LossAverages::default(), Instant::now());
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

    /// The batch that comes next: a function of seed, epoch and progress in the epoch.
    fn next_batch(&mut self, epoch: &mut Option<(u64, Vec<Vec<usize>>)>) -> Result<TrainBatch> {
        loop {
            if epoch.as_ref().is_none_or(|(number, _)| *number != self.progress.epoch) {
                *epoch = Some((self.progress.epoch, self.data.epoch(self.recipe.seed, self.progress.epoch)?));
            }
            let (_, batches) = epoch.as_ref().expect("just made");
            if let Some(entries) = batches.get(self.progress.batch as usize) {
                let (epoch, batch) = (self.progress.epoch as u32, self.progress.batch as u32);
                self.progress.batch += 1;
                let draws = crate::draws::Draws::new(self.recipe.seed, [AUGMENTATION, epoch, batch]);
                let (words, shift) = (self.recipe.train.word_dropout, self.recipe.train.shift);
                return Ok(self.data.batch(entries, Augmentation { draws, words, shift }));
            }
            (self.progress.epoch, self.progress.batch) = (self.progress.epoch + 1, 0);
        }
    }

    /// Measures on the dev set, and keeps the weights if they are the best so far.
    fn validate(&mut self, watcher: &mut dyn Watcher) -> Result<()> {
        watcher.validating(self.progress.step);
        let model = self.used();
        let found =
            validation::validate(&model, &self.data, &self.recipe, &self.machine, &self.pool, self.progress.step)?;
        let score = match self.recipe.train.metric {
            Metric::Bleu => found.bleu,
            Metric::Chrf => found.chrf,
            Metric::Exact => found.exact,
            Metric::F1 => found.f1,
            Metric::Loss => -found.loss,
        };
        self.metrics.write(&found)?;
        let better = self.progress.best.is_none_or(|best| score > best);
        if better {
            self.progress.best = Some(score);
            self.progress.best_step = self.progress.step;
            self.progress.stale = 0;
            model.save(&self.folder)?;
        } else {
            self.progress.stale += 1;
        }
        watcher.validated(&found, better);
        Ok(())
    }

    /// Writes a checkpoint, and removes those that are too old.
    fn save(&mut self, watcher: &mut dyn Watcher) -> Result<()> {
        self.progress.metrics_bytes = self.metrics.bytes();
        SavedCheckpoint::write(
            &self.folder,
            &self.progress,
            self.model.parameters(),
            self.average.as_ref(),
            &self.moments,
            self.recipe.train.keep.max(1),
        )?;
        watcher.saved(self.progress.step);
        Ok(())
    }

    /// The last checkpoint, and a model in any case.
    fn finish(&mut self, watcher: &mut dyn Watcher) -> Result<()> {
        if self.progress.best.is_none() {
            self.used().save(&self.folder)?;
        }
        self.save(watcher)
    }
}

/// The resolved recipe in a run's folder.
const RECIPE: &str = "recipe.toml";
/// What draws of noise are for, and those that disturb the data.
const NOISE: u32 = 4;
const AUGMENTATION: u32 = 7;

/// Sums since the last line of progress.
#[derive(Default)]
struct LossAverages {
    smoothed: f64,
    nll: f64,
    tokens: usize,
    penalty: f64,
    steps: usize,
}

impl LossAverages {
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
