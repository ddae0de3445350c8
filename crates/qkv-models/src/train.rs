//! Training: from a recipe to a folder with a model. A run can be killed at any time and resumed from its last
//! checkpoint; the final weights are the same, bit for bit, as without the interruption. So nothing depends on the
//! clock, and everything that a step depends on is a function of its number or part of the checkpoint.
//!
//! | module | owns |
//! | --- | --- |
//! | `augmentation` | random changes of training images |
//! | `image_data` | images with their classes |
//! | `pair_data` | pairs of texts |
//! | `picture_data` | the data of models that look at images |
//! | `voice_data` | recordings and their texts |
//! | `dataset` | the data of a run, tokenized, and its batches |
//! | `buckets` | pieces of parameters that are sent together, and their owners |
//! | `optimizer_shard` | the optimizer's state, sharded over ranks (ZeRO-1) |
//! | `gradient_sum` | the gradient of a step: its micro-batches, added in one order on any number of ranks |
//! | `context` | sequences, divided over ranks |
//! | `together` | what ranks agree on before and while they train one run |
//! | `trained_model` | the model that is trained, of any architecture |
//! | `plan` | data and model of a recipe, before the first step |
//! | `tuning` | which parameters are trained |
//! | `saving` | validation, the best model and checkpoints of a run |
//! | `submitted_step` | a step whose results a GPU may still be computing |
//! | `validation` | metrics on the dev set |
//! | `checkpoint` | the state that a run resumes from |
//! | `lock` | one process per run folder |
//! | `events` | what a run reports while it trains |

mod augmentation;
mod buckets;
mod checkpoint;
mod context;
mod dataset;
mod events;
mod gradient_sum;
mod image_data;
mod lock;
mod optimizer_shard;
mod pair_data;
mod picture_data;
mod plan;
mod saving;
mod submitted_step;
mod together;
mod trained_model;
mod tuning;
mod validation;
mod voice_data;

pub use events::{Event, Measured, Validation, Watcher};
pub use gradient_sum::{GradientSum, StepSum};
pub use plan::Plan;

use crate::files::atomic;
use crate::files::folder::TOKENIZER;
use crate::text::tokenizer::Tokenizer;
use crate::translator::Translator;
use crate::{Division, Error, Provenance, Recipe, Result, Training};
use augmentation::Augmentation;
use buckets::Buckets;
use checkpoint::{Progress, SavedCheckpoint};
use context::ContextGroup;
use dataset::{Dataset, TrainBatch};
use lock::{LOCK, RunLock};
use optimizer_shard::OptimizerShard;
use qkv_nn::{Device, Gradients, Loss, Machine, Moments, Parameters, Pending, Pool, Reinforce, Tape};
use qkv_ranks::{Ranks, launch};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use submitted_step::{Pace, SubmittedStep};
use together::RunHeader;
use trained_model::TrainedModel;

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All steps were taken.
    Finished,
    /// No validation improved within the recipe's patience.
    NoBetter,
    /// The run was asked to stop; it saved a checkpoint and can be resumed.
    Interrupted,
}

/// How a run is resumed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resume {
    /// Changes to the recipe, each `path=value`, which are saved with the run. They change the resulting weights.
    pub changes: Vec<String>,
    /// The step of the checkpoint to resume from; `None` takes the newest. Newer checkpoints are removed.
    pub checkpoint: Option<u64>,
}

/// A training run.
pub struct Run {
    folder: PathBuf,
    recipe: Recipe,
    data: Dataset,
    model: TrainedModel,
    /// Where the weights of a fine-tuned model come from.
    provenance: Option<Provenance>,
    /// Exponential moving average of the weights, if the recipe asks for one. If it is sharded, the first rank has it
    /// only during validation and at the end.
    average: Option<Parameters<f32>>,
    /// If they are sharded, zeros that take no memory.
    moments: Moments<f32>,
    /// This rank's part of the moments and the average, if they are sharded.
    shard: Option<OptimizerShard>,
    buckets: Arc<Buckets>,
    /// The ranks that share sequences with this one.
    context: Option<Arc<ContextGroup>>,
    /// The digest of the frozen parameters, which are not in checkpoints.
    frozen: Option<String>,
    progress: Progress,
    machine: Machine,
    pool: Pool<f32>,
    ranks: Ranks,
    /// The files that the first rank writes and locks.
    files: Option<RunFiles>,
}

/// The open files of a run's first rank.
struct RunFiles {
    metrics: checkpoint::Metrics,
    _lock: RunLock,
}

impl std::fmt::Debug for Run {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Run({} at step {})", self.folder.display(), self.progress.step)
    }
}

impl Run {
    /// Starts a run in a folder that is empty or does not exist.
    ///
    /// # Errors
    /// If the folder is not empty or in use, data cannot be read, or sizes are inconsistent.
    pub fn new(recipe: &Recipe, folder: impl AsRef<Path>, threads: usize) -> Result<Run> {
        Self::new_at(recipe, folder.as_ref(), threads, Ranks::alone())
    }

    /// [`new`](Run::new) on the first of several ranks; the others [`join`](Run::join). The weights do not depend on
    /// the number of ranks.
    ///
    /// # Errors
    /// As [`new`](Run::new); also if there are more ranks than micro-batches in a step, or they do not agree.
    pub fn new_on(ranks: Ranks, recipe: &Recipe, folder: impl AsRef<Path>, threads: usize) -> Result<Run> {
        Self::new_at(recipe, folder.as_ref(), threads, ranks)
    }

    fn new_at(recipe: &Recipe, folder: &Path, threads: usize, ranks: Ranks) -> Result<Run> {
        context::check_size(recipe, &ranks)?;
        refuse_taken(folder)?;
        let plan = Plan::new(recipe, None)?;
        std::fs::create_dir_all(folder).map_err(|e| Error::file("write", folder, e))?;
        let lock = RunLock::acquire(folder)?;
        atomic::remove_litter(folder)?;
        refuse_taken(folder)?;
        atomic::write(folder.join(RECIPE), recipe.to_toml().as_bytes())?;
        if let Some(tokenizer) = plan.model.tokenizer() {
            tokenizer.save(folder.join(TOKENIZER))?;
        }
        Run::share(recipe, folder, &plan, false, &ranks)?;
        let files = RunFiles { metrics: checkpoint::Metrics::open(folder)?, _lock: lock };
        Run::start(recipe.clone(), folder, threads, plan, ranks, Some(files))
    }

    /// Sends the description of the run to the other ranks.
    fn share(recipe: &Recipe, folder: &Path, plan: &Plan, resumed: bool, ranks: &Ranks) -> Result<()> {
        let tokenizer = plan.model.tokenizer().map(Tokenizer::to_json);
        let header = RunHeader { folder: folder.to_owned(), recipe: recipe.to_toml(), tokenizer, resumed };
        RunHeader::share(Some(header), ranks)?;
        together::agree(recipe, plan.model.parameters(), ranks)
    }

    /// Joins the run that the first rank starts or resumes. Reads the data, but writes no files.
    ///
    /// # Errors
    /// If the ranks do not agree, or one of them is gone.
    pub fn join(ranks: Ranks, threads: usize) -> Result<Run> {
        let RunHeader { folder, recipe, tokenizer, resumed } = RunHeader::share(None, &ranks)?;
        let recipe = Recipe::parse(&recipe, &folder.join(RECIPE), &[])?;
        let tokenizer = tokenizer.map(|json| Tokenizer::from_bytes(json.as_bytes(), folder.join(TOKENIZER)));
        let plan = Plan::new(&recipe, tokenizer.transpose()?)?;
        together::agree(&recipe, plan.model.parameters(), &ranks)?;
        let mut run = Run::start(recipe, &folder, threads, plan, ranks, None)?;
        if resumed {
            run.share_state()?;
        }
        Ok(run)
    }

    /// Sends the first rank's state to all ranks.
    fn share_state(&mut self) -> Result<()> {
        let ranks = self.ranks.clone();
        together::share_progress(&mut self.progress, &ranks)?;
        together::share_weights(self.model.parameters_mut(), &ranks)?;
        if let Some(shard) = &mut self.shard {
            shard.scatter(&self.moments, self.average.as_ref())?;
            self.drop_gathered();
            return Ok(());
        }
        if let Some(average) = &mut self.average {
            together::share_weights(average, &ranks)?;
        }
        together::share_moments(&mut self.moments, self.progress.step, &ranks)
    }

    /// Resumes the run in a folder from its newest checkpoint, or from the start if it has none yet.
    ///
    /// # Errors
    /// If there is no run, another process is training it, or its files are damaged.
    pub fn resume(folder: impl AsRef<Path>, threads: usize) -> Result<Run> {
        Run::resume_with(folder, &Resume::default(), threads)
    }

    /// Resumes a run with changes to its recipe or from an older checkpoint.
    ///
    /// # Errors
    /// As [`resume`](Run::resume); also if a change is invalid or there is no such checkpoint.
    pub fn resume_with(folder: impl AsRef<Path>, how: &Resume, threads: usize) -> Result<Run> {
        Self::resume_at(folder.as_ref(), how, threads, Ranks::alone())
    }

    /// [`resume_with`](Run::resume_with) on the first of several ranks; the others [`join`](Run::join). The number of
    /// ranks may differ from before.
    ///
    /// # Errors
    /// As [`resume_with`](Run::resume_with) and [`new_on`](Run::new_on).
    pub fn resume_on(ranks: Ranks, folder: impl AsRef<Path>, how: &Resume, threads: usize) -> Result<Run> {
        Self::resume_at(folder.as_ref(), how, threads, ranks)
    }

    fn resume_at(folder: &Path, how: &Resume, threads: usize, ranks: Ranks) -> Result<Run> {
        let recipe_path = folder.join(RECIPE);
        if folder.is_dir() && !recipe_path.exists() {
            let what = format!("`{}` has no `{RECIPE}`, so it is no run that could be resumed", folder.display());
            return Err(Error::invalid(what).with_hint("copy the recipe of the run there"));
        }
        let recipe = Recipe::read(recipe_path, &how.changes)?;
        context::check_size(&recipe, &ranks)?;
        let lock = RunLock::acquire(folder)?;
        checkpoint::remove_litter(folder)?;
        let saved = SavedCheckpoint::find(folder, how.checkpoint)?;
        let path = folder.join(TOKENIZER);
        // A run that was killed early has no tokenizer yet.
        let tokenizer = path.exists().then(|| Tokenizer::open(&path)).transpose()?;
        let plan = Plan::new(&recipe, tokenizer)?;
        if let Some(tokenizer) = plan.model.tokenizer().filter(|_| !path.exists()) {
            tokenizer.save(&path)?;
        }
        Run::share(&recipe, folder, &plan, saved.is_some(), &ranks)?;
        let files = RunFiles { metrics: checkpoint::Metrics::open(folder)?, _lock: lock };
        let mut run = Run::start(recipe, folder, threads, plan, ranks, Some(files))?;
        if let Some(saved) = saved {
            if run.shard.is_some() && run.recipe.train.average > 0.0 {
                run.average = Some(run.model.parameters().clone());
            }
            run.progress = saved.read(folder, run.state())?;
            let (step, steps) = (run.progress.step, run.recipe.train.steps);
            if step > steps {
                return Err(Error::invalid(format!("the run is at step {step}, beyond `train.steps` = {steps}"))
                    .with_hint("set it to more steps, or resume from an older checkpoint"));
            }
            if how.checkpoint.is_some() {
                saved.remove_newer(folder)?;
            }
            run.share_state()?;
        }
        let bytes = run.progress.metrics_bytes;
        run.files.as_mut().map_or(Ok(()), |files| files.metrics.cut(bytes))?;
        if !how.changes.is_empty() {
            atomic::write(folder.join(RECIPE), run.recipe.to_toml().as_bytes())?;
        }
        Ok(run)
    }

    fn start(
        recipe: Recipe,
        folder: &Path,
        threads: usize,
        plan: Plan,
        ranks: Ranks,
        files: Option<RunFiles>,
    ) -> Result<Run> {
        let Plan { data, model, provenance } = plan;
        let groups = recipe.parallel.context;
        if groups > 1 && model.generative().is_none_or(|model| model.gpt().is_none()) {
            let what = format!("`parallel.context` is {groups}, and a `{}` has whole sequences", model.kind());
            return Err(Error::invalid(what).with_hint("sequences of `gpt` models can be divided over ranks"));
        }
        let ranks = context::ordered(&ranks, groups)?;
        let context = ContextGroup::of(&ranks, groups)?;
        let buckets = Arc::new(Buckets::new(model.parameters(), ranks.size()));
        let averages = recipe.train.average > 0.0;
        let shard = (recipe.parallel.optimizer == Division::Sharded && ranks.size() > 1)
            .then(|| OptimizerShard::new(ranks.clone(), buckets.clone(), model.parameters(), averages));
        let average = (averages && shard.is_none()).then(|| model.parameters().clone());
        let moments = Moments::of(model.parameters());
        let machine = Machine::new(threads).precision(recipe.train.precision);
        let (folder, progress, pool) = (folder.to_owned(), Progress::default(), Pool::new());
        let frozen = checkpoint::frozen_digest(model.parameters());
        Ok(Run {
            folder,
            recipe,
            data,
            model,
            provenance,
            average,
            moments,
            shard,
            buckets,
            context,
            frozen,
            progress,
            machine,
            pool,
            ranks,
            files,
        })
    }

    /// Continues training on another device. Ranks on one machine are assigned its GPUs by local rank.
    ///
    /// # Errors
    /// If there is no such device, or a library that it needs is not installed.
    pub fn move_to(&mut self, device: Device) -> Result<()> {
        let (threads, precision) = (self.machine.threads(), self.recipe.train.precision);
        let number = if self.ranks.size() > 1 { launch::local_rank().unwrap_or(0) } else { 0 };
        self.machine = match device {
            Device::Cuda => Machine::on_gpu(number, threads, precision)?,
            device => Machine::on(device, threads, precision)?,
        };
        Ok(())
    }

    /// The name of the device that trains the model.
    pub fn device(&self) -> &str {
        self.machine.cuda().map_or("cpu", |operations| &operations.device().name)
    }

    /// The ranks that train the model.
    pub fn ranks(&self) -> &Ranks {
        &self.ranks
    }

    /// The recipe, with its changes.
    pub fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    /// The run's folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The best score of the recipe's metric so far, and its step. The score of a loss is its negative.
    pub fn best(&self) -> Option<(f64, u64)> {
        self.progress.best.map(|best| (best, self.progress.best_step))
    }

    /// Steps taken so far.
    pub fn step(&self) -> u64 {
        self.progress.step
    }

    /// Number of parameters.
    pub fn parameters(&self) -> usize {
        self.model.parameters().count()
    }

    /// Number of parameters that are trained.
    pub fn trained_parameters(&self) -> usize {
        self.model.parameters().trained_count()
    }

    /// The kind of the model, as in a recipe.
    pub fn kind(&self) -> &'static str {
        self.model.kind()
    }

    /// Where the weights of a fine-tuned model come from.
    pub fn provenance(&self) -> Option<&Provenance> {
        self.provenance.as_ref()
    }

    /// The current model for inference, if it translates.
    pub fn translator(&self) -> Option<Translator> {
        let TrainedModel::Text(Translator { model, parameters, tokenizer, search }) = &self.model else { return None };
        let parameters = self.average.as_ref().unwrap_or(parameters).clone();
        let (model, tokenizer, search) = (model.clone(), tokenizer.clone(), search.clone());
        Some(Translator { model, parameters, tokenizer, search })
    }

    /// The pairs that the model is validated on.
    pub fn dev(&self) -> &[crate::text::corpus::Pair] {
        self.data.dev()
    }

    /// The sizes of the data, for the first lines of a log.
    pub fn summary(&self) -> String {
        self.data.summary(self.model.tokenizer().map_or(0, Tokenizer::len))
    }

    /// Trains until the last step of the recipe, or until `stop` is set.
    ///
    /// # Errors
    /// If the loss is not finite, or a file cannot be written.
    pub fn train(&mut self, watcher: &mut dyn Watcher, stop: &AtomicBool) -> Result<Outcome> {
        // Inside the thread pool: a step spawns a thousand tasks, and from outside each would wake a thread.
        rayon::scope(|_| self.steps(watcher, stop))
    }

    fn steps(&mut self, watcher: &mut dyn Watcher, stop: &AtomicBool) -> Result<Outcome> {
        let train = self.recipe.train.clone();
        let ranks = self.ranks.clone();
        let leaves = train.accumulate * self.recipe.parallel.context;
        let mut sum = GradientSum::over(leaves, ranks.clone(), self.buckets.clone(), self.shard.is_none());
        let (mut epoch, mut submitted) = (None, None);
        let mut pace = Pace::begin(&self.progress.averages);
        while self.progress.step < train.steps {
            if self.progress.stale > train.patience && train.patience > 0 {
                self.finish(watcher)?;
                return Ok(Outcome::NoBetter);
            }
            if together::any(stop.load(Ordering::Relaxed), &ranks)? {
                if let Some(before) = submitted.take() {
                    watcher.step(&self.account(before, &pace, &ranks)?);
                }
                self.save(watcher)?;
                return Ok(Outcome::Interrupted);
            }
            let mut batches = Vec::with_capacity(train.accumulate);
            for _ in 0..train.accumulate {
                batches.push(self.next_batch(&mut epoch)?);
            }
            let step = self.progress.step + 1;
            let targets: usize = batches.iter().map(TrainBatch::targets).sum();
            let own = sum.own_leaves();
            let (mut step_sum, mut last, mut losses) = (sum.begin()?, None, Vec::with_capacity(own.len()));
            for leaf in own.clone() {
                // Each of the ranks that share a micro-batch has its own leaf of it.
                let at = leaf % train.accumulate;
                let mut gradients = sum.zeros(self.model.parameters(), &self.machine);
                let noise = crate::draws::Draws::new(self.recipe.seed, [NOISE, step as u32, at as u32]).word();
                let noise = u64::from(noise) << 32 | step;
                let tape = Tape::training(self.model.parameters(), &mut gradients, &self.pool, &self.machine, noise);
                let mut tape = tape.recompute(train.recompute).share(1.0 / train.accumulate.max(1) as f64);
                if train.reinforce != 0.0 {
                    // Before the first step there is no baseline.
                    let (weight, baseline) = self.progress.baseline.map_or((0.0, 0.0), |b| (train.reinforce, b));
                    tape = tape.reinforce(Reinforce { weight, expected: train.expected, baseline });
                }
                if let Some(context) = &self.context {
                    tape = tape.over(context.clone());
                }
                let loss = self.model.loss(&mut tape, &batches[at], train.smoothing, 1.0 / targets.max(1) as f64);
                self.check_context()?;
                losses.push((loss?, tape.penalty()));
                if leaf + 1 == own.end && ranks.size() > 1 {
                    tape.backward_with(|gradients, params| sum.finished(&mut step_sum, leaf, gradients, params));
                    last = Some(gradients);
                } else {
                    tape.backward();
                    sum.push(&mut step_sum, leaf, gradients, &self.machine);
                }
                self.check_context()?;
            }
            let mut gradients = sum.finish(step_sum, last)?;
            let norm = self.update(step, &mut gradients)?;
            sum.give_back(gradients);
            let losses = losses.iter().map(|(loss, penalty)| (loss.fetch(), penalty.fetch())).collect();
            let Progress { epoch: in_epoch, batch, .. } = self.progress;
            let now = SubmittedStep { step, epoch: in_epoch, batch, losses, norm };
            self.progress.step = step;
            // A GPU computes this step while the results of the previous one are read.
            if let Some(before) = submitted.replace(now) {
                watcher.step(&self.account(before, &pace, &ranks)?);
            }
            if self.machine.cuda().is_some() && !self.pauses_after(step) {
                continue;
            }
            self.machine.check()?;
            let now = submitted.take().expect("just submitted");
            let event = self.account(now, &pace, &ranks)?;
            watcher.step(&event);
            if step.is_multiple_of(train.log.max(1)) || step == train.steps {
                self.files.as_mut().map_or(Ok(()), |files| files.metrics.write(&event))?;
                watcher.logged(&event);
                self.progress.averages = LossAverages::default();
                pace = Pace::begin(&self.progress.averages);
            }
            if step.is_multiple_of(train.validate) || step == train.steps {
                pace.pause(|| self.validate(watcher))?;
            }
            if step.is_multiple_of(train.save) && step < train.steps {
                pace.pause(|| self.save(watcher))?;
            }
        }
        self.finish(watcher)?;
        Ok(Outcome::Finished)
    }

    /// Fails if a rank that shares sequences could not be reached.
    fn check_context(&self) -> Result<()> {
        self.context.as_ref().map_or(Ok(()), |context| context.check())
    }

    /// A step of the optimizer and of the running average. Returns the norm of the gradient before clipping.
    fn update(&mut self, step: u64, gradients: &mut Gradients<f32>) -> Result<Pending<f64>> {
        let (train, machine) = (&self.recipe.train, &self.machine);
        let weights = self.model.parameters_mut();
        if let Some(shard) = &mut self.shard {
            return shard.step(train, step, weights, gradients, machine).map(Pending::from);
        }
        let (rate, clip) = (train.rate(step), train.clip.max(0.0));
        let norm = train.adam.step_clipped(weights, gradients, &mut self.moments, rate, clip, machine);
        // A norm that is not finite ends the run, so the average need not check it.
        if let Some(average) = self.average.as_mut() {
            average.average(weights, train.average_decay(step), machine);
        }
        Ok(norm)
    }

    /// The next batch: a function of seed, epoch and batch number.
    fn next_batch(&mut self, epoch: &mut Option<(u64, Vec<Vec<usize>>)>) -> Result<TrainBatch> {
        loop {
            if epoch.as_ref().is_none_or(|(number, _)| *number != self.progress.epoch) {
                *epoch = Some((self.progress.epoch, self.data.epoch(self.recipe.seed, self.progress.epoch)?));
            }
            let (_, batches) = epoch.as_ref().expect("just drawn");
            if let Some(entries) = batches.get(self.progress.batch as usize) {
                let (epoch, batch) = (self.progress.epoch as u32, self.progress.batch as u32);
                self.progress.batch += 1;
                let draws = crate::draws::Draws::new(self.recipe.seed, [AUGMENTATION, epoch, batch]);
                let Training {
                    word_dropout: words, bpe_dropout: merges, shift, mirror, erase, mixup, zoom, color, ..
                } = self.recipe.train;
                let how = Augmentation { draws, words, merges, shift, mirror, erase, mixup, zoom, color };
                return Ok(self.data.batch(entries, how));
            }
            (self.progress.epoch, self.progress.batch) = (self.progress.epoch + 1, 0);
        }
    }
}

/// Rejects a folder that contains anything besides a lock and what a run left that was killed before it began.
fn refuse_taken(folder: &Path) -> Result<()> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names = entries.map(|entry| entry.file_name());
    if names.all(|name| name == LOCK || name.to_str().is_some_and(atomic::is_unfinished)) {
        return Ok(());
    }
    let hint = match folder.join(RECIPE).exists() {
        true => "add `--resume` to continue the run in it, or choose another folder with `--out`",
        false => "choose another folder with `--out`",
    };
    Err(Error::invalid(format!("`{}` exists and is not empty", folder.display())).with_hint(hint))
}

/// The recipe in a run's folder.
const RECIPE: &str = "recipe.toml";
/// Purposes of random draws: dropout and data augmentation.
const NOISE: u32 = 4;
const AUGMENTATION: u32 = 7;

/// Sums of losses since the last line of `metrics.jsonl`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
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
