//! A submitted step, whose loss and gradient norm a GPU may still be computing. They are read after the next step has
//! been submitted, so that the GPU does not wait for the host between steps; before a run logs, validates or saves,
//! everything is read.

use super::{LossAverages, Run, events::Event, together};
use crate::{Error, Result};
use qkv_nn::{Loss, Pending};
use qkv_ranks::Ranks;
use std::time::Instant;

/// A step whose work has all been submitted, with its pending results.
#[derive(Debug)]
pub(super) struct SubmittedStep {
    pub step: u64,
    pub epoch: u64,
    /// The number of its last batch in the epoch.
    pub batch: u64,
    /// Losses and penalties of this rank's micro-batches.
    pub losses: Vec<(Pending<Loss>, Pending<f64>)>,
    /// The norm of the gradient before clipping.
    pub norm: Pending<f64>,
}

/// The speed of training: the time since the last line of progress, excluding pauses.
#[derive(Debug)]
pub(super) struct Pace {
    /// The start time, moved later by all pauses.
    since: Instant,
    /// Tokens in the averages at the start: a resumed run has some from before.
    tokens: usize,
}

impl Pace {
    /// Starts measuring.
    pub fn begin(averages: &LossAverages) -> Pace {
        Pace { since: Instant::now(), tokens: averages.tokens }
    }

    /// Does `work`, whose time does not count as training.
    pub fn pause<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let done = work();
        self.since += began.elapsed();
        done
    }
}

impl Run {
    /// Whether step `step` is followed by something that needs all results: a log line, a validation or a checkpoint.
    pub(super) fn pauses_after(&self, step: u64) -> bool {
        let train = &self.recipe.train;
        let every = [train.log.max(1), train.validate, train.save];
        step == train.steps || every.into_iter().any(|every| step.is_multiple_of(every))
    }

    /// Reads the results of a step and adds them to the averages.
    pub(super) fn account(&mut self, submitted: SubmittedStep, pace: &Pace, ranks: &Ranks) -> Result<Event> {
        let SubmittedStep { step, epoch, batch, losses, norm } = submitted;
        let losses: Vec<(Loss, f64)> =
            losses.into_iter().map(|(loss, penalty)| (loss.read(), penalty.read())).collect();
        let norm = norm.read();
        self.machine.failed()?;
        let (loss, penalty) = together::sum_losses(&losses, ranks)?;
        let mean = loss.smoothed / loss.rows.max(1) as f64;
        if !(mean + penalty).is_finite() || !norm.is_finite() {
            let place = format!("epoch {epoch}, batch {batch}");
            let what = format!("the loss is {mean} and the gradient norm {norm} at step {step} ({place})");
            let hint = "lower `train.lr`, raise `train.warmup`, or set a smaller `train.clip`";
            return Err(Error::invalid(what).with_hint(hint));
        }
        let found = -loss.nll / loss.rows.max(1) as f64;
        self.progress.baseline = Some(self.progress.baseline.map_or(found, |before| 0.9 * before + 0.1 * found));
        let averages: &mut LossAverages = &mut self.progress.averages;
        averages.add(&loss, penalty);
        let seconds = pace.since.elapsed().as_secs_f64();
        Ok(Event {
            step,
            steps: self.recipe.train.steps,
            epoch,
            loss: averages.loss(),
            perplexity: crate::metrics::perplexity(averages.nll()),
            penalty: averages.penalty(),
            rate: self.recipe.train.rate(step),
            norm,
            tokens: averages.tokens,
            seconds,
            tokens_per_second: (averages.tokens - pace.tokens) as f64 / seconds.max(1e-9),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn pauses_and_what_was_before_do_not_count() {
        let averages = LossAverages { tokens: 7, ..LossAverages::default() };
        let mut pace = Pace::begin(&averages);
        let began = Instant::now();
        assert_eq!(
            pace.pause(|| {
                std::thread::sleep(Duration::from_millis(60));
                3
            }),
            3
        );
        assert!(pace.since.elapsed() + Duration::from_millis(60) <= began.elapsed() + Duration::from_millis(1));
        assert_eq!(pace.tokens, 7);
    }
}
