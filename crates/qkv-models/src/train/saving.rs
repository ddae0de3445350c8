//! What a run does between steps: validation, saving the best model, and checkpoints. The first rank writes; if the
//! optimizer's state or checkpoints are sharded, the others send or write their parts.

use super::checkpoint::parts::{self, Piece};
use super::checkpoint::{Progress, SavedCheckpoint, TrainState};
use super::{Run, Watcher, together, validation};
use crate::{Division, Metric, Result};
use qkv_nn::{Moments, Param};
use std::ops::Range;

impl Run {
    /// Runs `body` on the model for inference: with averaged weights if the recipe asks for them.
    fn for_inference<R>(&mut self, body: impl FnOnce(&mut Self) -> R) -> R {
        self.swap_average();
        let result = body(self);
        self.swap_average();
        result
    }

    fn swap_average(&mut self) {
        if let Some(average) = &mut self.average {
            std::mem::swap(self.model.parameters_mut(), average);
        }
    }

    /// Validates on the dev set, and saves the model if it is the best so far. The first rank does this; the others
    /// wait for its result.
    pub(super) fn validate(&mut self, watcher: &mut dyn Watcher) -> Result<()> {
        self.gather_average()?;
        if self.ranks.is_first() {
            self.validate_here(watcher)?;
        }
        self.drop_gathered();
        together::share_progress(&mut self.progress, &self.ranks)
    }

    /// Gathers a sharded average on the first rank.
    fn gather_average(&mut self) -> Result<()> {
        if let Some(shard) = &self.shard {
            self.average = shard.gather_average(self.model.parameters())?;
        }
        Ok(())
    }

    fn validate_here(&mut self, watcher: &mut dyn Watcher) -> Result<()> {
        watcher.validating(self.progress.step);
        let step = self.progress.step;
        let found = self.for_inference(|run| {
            validation::validate(&run.model, &run.data, &run.recipe, &run.machine, &run.pool, step)
        })?;
        let score = match self.recipe.train.metric {
            Metric::Bleu => found.bleu,
            Metric::Chrf => found.chrf,
            Metric::Exact => found.exact,
            Metric::F1 => found.f1,
            Metric::Loss => -found.loss,
        };
        self.files.as_mut().map_or(Ok(()), |files| files.metrics.write(&found))?;
        let better = self.progress.best.is_none_or(|best| score > best);
        if better {
            self.progress.best = Some(score);
            self.progress.best_step = step;
            self.progress.stale = 0;
            self.for_inference(Run::save_model)?;
        } else {
            self.progress.stale += 1;
        }
        watcher.validated(&found, better);
        Ok(())
    }

    /// Writes the model, or its adapters.
    fn save_model(&mut self) -> Result<()> {
        let base = self.recipe.model.pretrained().map(|model| model.from.clone()).unwrap_or_default();
        let merge = self.recipe.lora.as_ref().is_some_and(|lora| lora.merge);
        self.model.save(&self.folder, &base, merge)
    }

    /// Writes a checkpoint, and removes old ones beyond the number to keep.
    pub(super) fn save(&mut self, watcher: &mut dyn Watcher) -> Result<()> {
        self.progress.metrics_bytes = self.files.as_mut().map_or(0, |files| files.metrics.bytes());
        match self.recipe.parallel.checkpoint {
            Division::Sharded if self.ranks.size() > 1 => self.save_parts()?,
            _ => {
                self.gather_state()?;
                self.save_whole()?;
                self.drop_gathered();
            }
        }
        if self.ranks.is_first() {
            watcher.saved(self.progress.step);
        }
        Ok(())
    }

    fn save_whole(&mut self) -> Result<()> {
        if self.files.is_none() {
            return Ok(());
        }
        let (folder, progress, keep) = (self.folder.clone(), self.progress.clone(), self.recipe.train.keep.max(1));
        SavedCheckpoint::write(&folder, &progress, self.state(), keep)
    }

    /// Each rank writes its own buckets, from its part of the state or from the whole state.
    fn save_parts(&self) -> Result<()> {
        let weights = self.model.parameters();
        let piece = |param: Param, range: Range<usize>, [first, second]: [_; 2], average| {
            let (name, weights) = (weights.name(param), &weights.get(param)[range.clone()]);
            Piece { name, range, weights, average, first, second }
        };
        let of_whole = |(param, range): &(Param, Range<usize>)| {
            let moments = [&self.moments.first, &self.moments.second].map(|all| &all[param.index()][range.clone()]);
            let average = self.average.as_ref().map(|average| &average.get(*param)[range.clone()]);
            piece(*param, range.clone(), moments, average)
        };
        let pieces: Vec<Piece<'_>> = match &self.shard {
            Some(shard) => shard.pieces().map(|own| piece(own.param, own.range, own.moments, own.average)).collect(),
            None => self.buckets.pieces_of(self.ranks.rank()).map(of_whole).collect(),
        };
        let progress = Progress { frozen: self.frozen.clone(), ..self.progress.clone() };
        let how = (self.recipe.train.keep.max(1), self.recipe.train.average > 0.0);
        parts::write(&self.ranks, &self.folder, &progress, how, &pieces)
    }

    /// Gathers a sharded state on the first rank.
    fn gather_state(&mut self) -> Result<()> {
        let Some(shard) = &self.shard else { return Ok(()) };
        let weights = self.model.parameters();
        let moments = shard.gather_moments(weights, self.progress.step)?;
        (self.average, self.moments) =
            (shard.gather_average(weights)?, moments.unwrap_or_else(|| Moments::of(weights)));
        Ok(())
    }

    /// Frees a gathered copy of a sharded state.
    pub(super) fn drop_gathered(&mut self) {
        if self.shard.is_some() {
            (self.moments, self.average) = (Moments::of(self.model.parameters()), None);
        }
    }

    /// Weights, their average and the moments of Adam.
    pub(super) fn state(&mut self) -> TrainState<'_> {
        let (weights, average) = (self.model.parameters_mut(), self.average.as_mut());
        TrainState { weights, average, moments: &mut self.moments, frozen: self.frozen.as_deref() }
    }

    /// Writes the last checkpoint, and the model too if no validation has saved one.
    pub(super) fn finish(&mut self, watcher: &mut dyn Watcher) -> Result<()> {
        if self.progress.best.is_none() {
            self.gather_average()?;
            if self.files.is_some() {
                self.for_inference(Run::save_model)?;
            }
        }
        self.save(watcher)?;
        self.gather_average()
    }
}
