//! Context parallelism: `parallel.context` ranks form a group that shares the sequences of its micro-batches. Each rank
//! has an early and a late part of every sequence. Attention goes through [`Ranks::attention`]; everything else is per
//! token.
//!
//! Gradients of parameters are sums over tokens, of which each rank of a group has some: with `C` ranks per group, the
//! tree of a step has `C` leaves for each micro-batch. Its shape, and so the bits, depend only on the number of leaves:
//! on `parallel.context`, not on the number of groups.

use crate::{Error, Recipe, Result};
use qkv::{Attention, Gradients, Inputs, Output, Tensor, Upstream};
use qkv_nn::ContextParallel;
use qkv_ranks::{Ranks, Shards};
use std::sync::{Arc, Mutex, PoisonError};

/// Rejects numbers of ranks on which a recipe cannot be trained.
pub(super) fn check_size(recipe: &Recipe, ranks: &Ranks) -> Result<()> {
    let (size, leaves, context) = (ranks.size(), recipe.train.accumulate, recipe.parallel.context);
    if !size.is_multiple_of(context) {
        let what = format!("{size} ranks for `parallel.context` = {context}: they form groups of that many");
        return Err(Error::invalid(what).with_hint(format!("start {context} ranks or a multiple, with `--ranks`")));
    }
    let groups = size / context;
    if groups > leaves {
        let (who, each) = match context {
            1 => (format!("{size} ranks"), "rank"),
            _ => (format!("{groups} groups of {context} ranks"), "group"),
        };
        let what = format!("{who} for {leaves} micro-batches a step: each {each} needs one");
        return Err(Error::invalid(what).with_hint(format!("set `train.accumulate` to {groups} or more")));
    }
    Ok(())
}

/// The same ranks in the order of the tree's leaves: the first of every group, then the second of every group, and so
/// on. Neighboring ranks of the job form a group.
pub(super) fn ordered(ranks: &Ranks, context: usize) -> Result<Ranks> {
    let groups = ranks.size() / context;
    let order: Vec<usize> = (0..context).flat_map(|part| (0..groups).map(move |at| at * context + part)).collect();
    Ok(ranks.group(&order)?)
}

/// One of the ranks that share sequences.
pub(super) struct ContextGroup {
    ranks: Ranks,
    failed: Mutex<Option<qkv_ranks::Error>>,
}

impl ContextGroup {
    /// This rank's group among [ordered](ordered()) ranks; `None` if each rank has whole sequences.
    pub fn of(ordered: &Ranks, context: usize) -> Result<Option<Arc<ContextGroup>>> {
        if context == 1 {
            return Ok(None);
        }
        let groups = ordered.size() / context;
        let own: Vec<usize> = (0..context).map(|part| part * groups + ordered.rank() % groups).collect();
        Ok(Some(Arc::new(ContextGroup { ranks: ordered.group(&own)?, failed: Mutex::default() })))
    }

    /// Fails if a rank could not be reached.
    ///
    /// # Errors
    /// The reason.
    pub fn check(&self) -> Result<()> {
        let failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        failed.clone().map_or(Ok(()), |error| Err(error.into()))
    }

    /// Keeps the reason of a failure for [`check`](ContextGroup::check), as operations of a tape know nothing about
    /// ranks.
    fn keep<T>(&self, result: qkv_ranks::Result<T>) -> qkv::Result<T> {
        result.map_err(|error| match error {
            qkv_ranks::Error::Attention(error) => error,
            error => {
                let found = error.to_string();
                *self.failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                qkv::Error::Value { name: "ranks", found, expected: "all that share the sequence".into() }
            }
        })
    }

    fn shards(&self, length: usize) -> Shards {
        Shards::balanced(length, self.ranks.size())
    }
}

impl ContextParallel<f32> for ContextGroup {
    fn part(&self) -> usize {
        self.ranks.rank()
    }

    fn places(&self, length: usize) -> Vec<usize> {
        let shards = self.shards(length);
        match (0..self.ranks.size()).all(|rank| shards.rows(rank) > 0) {
            true => shards.of(self.ranks.rank()).iter().cloned().flatten().collect(),
            false => Vec::new(),
        }
    }

    fn forward(
        &self,
        length: usize,
        attention: &Attention,
        inputs: Inputs<'_, f32>,
        threads: usize,
    ) -> qkv::Result<Output<f32>> {
        let shards = self.shards(length);
        self.keep(self.ranks.attention(attention, &shards, &shards).threads(threads).forward(inputs))
    }

    fn backward(
        &self,
        length: usize,
        attention: &Attention,
        inputs: Inputs<'_, f32>,
        out: &Output<f32>,
        upstream: Upstream<'_, f32>,
        threads: usize,
    ) -> qkv::Result<Gradients<f32>> {
        let shards = self.shards(length);
        let context = self.ranks.attention(attention, &shards, &shards).threads(threads);
        let shapes = [inputs.q.shape(), inputs.k.shape(), inputs.v.shape()];
        match self.keep(context.backward(inputs, out, upstream)) {
            // Gradients of parameters are complete on every rank: only the first rank's count.
            Ok(found) if self.ranks.is_first() => Ok(found),
            Ok(Gradients { q, k, v, .. }) => Ok(Gradients::new(q, k, v)),
            // The step goes on with zeros, and `check` reports the reason at its end.
            Err(_) if self.check().is_err() => {
                let [q, k, v] = shapes.map(|shape| Tensor::from_fn(shape, |_| 0.0));
                Ok(Gradients::new(q, k, v))
            }
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Architecture, Batch, GptConfig, Model, ModelConfig, SpecialTokens};
    use qkv::Bias;
    use qkv_nn::layers::PositionKind;
    use qkv_nn::{Loss, Machine, Pool, Tape};
    use qkv_ranks::run_in_process;

    const SPECIALS: SpecialTokens = SpecialTokens { pad: 0, bos: 1, eos: 2 };

    /// The loss of some texts of different lengths, and all gradients.
    fn gradients(config: &GptConfig, ranks: Option<Ranks>, recompute: bool) -> (Loss, Vec<f32>) {
        let config = ModelConfig::new(Architecture::Gpt(config.clone()), 30, SPECIALS);
        let (model, parameters) = Model::new::<f32>(&config, 3).unwrap();
        let text = |len: usize| (0..len).map(|at| (3 + at * at % 27) as u32).collect::<Vec<u32>>();
        let texts = [text(140), text(131), text(9)];
        let batch = Batch::new(texts.iter().map(|text| (&[][..], &text[..])), SPECIALS);
        let (machine, pool) = (Machine::new(1), Pool::new());
        let mut found = qkv_nn::Gradients::of(&parameters);
        let mut tape = Tape::training(&parameters, &mut found, &pool, &machine, 5).recompute(recompute);
        if let Some(ranks) = ranks {
            let context = ContextGroup::of(&ranks, ranks.size()).unwrap().unwrap();
            tape = tape.over(context);
        }
        let loss = model.loss(&mut tape, &batch, 0.1, 1e-2).unwrap().read();
        tape.backward();
        drop(tape);
        (loss, parameters.all().flat_map(|param| found.get(param).to_vec()).collect())
    }

    #[test]
    fn the_gradients_of_ranks_that_share_sequences_add_up_to_those_of_one_process() {
        let small = GptConfig { d_model: 24, ffn_dim: 32, heads: 4, layers: 2, ..GptConfig::default() };
        let mut biased = small.clone();
        biased.attention = biased.attention.bias(Bias::alibi());
        biased.attention.sinks = true;
        biased.attention_dropout = 0.2;
        biased.key_heads = Some(1);
        let rotary = GptConfig { positions: PositionKind::Rotary, key_heads: Some(2), ..small.clone() };
        for (config, recompute) in [(small, true), (biased, false), (rotary, false)] {
            let (whole_loss, whole) = gradients(&config, None, recompute);
            let largest = whole.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
            for size in [2, 3] {
                let parts = run_in_process(size, |ranks| gradients(&config, Some(ranks), recompute));
                let mut loss = Loss::default();
                let mut sum = vec![0.0; whole.len()];
                for (part_loss, part) in parts {
                    loss += part_loss;
                    sum.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
                }
                assert_eq!(loss.rows, whole_loss.rows);
                assert!((loss.nll - whole_loss.nll).abs() < 1e-5 * whole_loss.nll, "{loss:?} {whole_loss:?}");
                for (at, (found, expected)) in sum.iter().zip(&whole).enumerate() {
                    assert!((found - expected).abs() <= 3e-6 * largest, "{at} on {size}: {found} {expected} {largest}");
                }
            }
        }
    }
}
