//! The optimizer's state sharded over ranks (ZeRO-1; Rajbhandari et al. 2019, arXiv:1910.02054): each rank keeps the
//! moments and the running average of its own [buckets](super::buckets), updates their weights and sends these to the
//! others. Every element is computed as in one process, and the norm of the gradient is summed in the same order, so
//! the bits are the same.

use super::buckets::Buckets;
use super::gradient_sum::{STATE, SUMS, bytes, numbers, tag};
use crate::{Result, Training};
use qkv_nn::{Gradients, Machine, Moments, MomentsPart, Param, Parameters, moving_average};
use qkv_ranks::Ranks;
use std::ops::Range;
use std::sync::Arc;

/// The state that one rank keeps. Each list has the elements of the rank's pieces, one piece after the other.
pub(super) struct OptimizerShard {
    ranks: Ranks,
    buckets: Arc<Buckets>,
    first: Vec<f32>,
    second: Vec<f32>,
    /// The running average of the weights, if the recipe asks for one.
    average: Option<Vec<f32>>,
}

impl OptimizerShard {
    /// Zero moments, and an average equal to the current weights.
    pub fn new(ranks: Ranks, buckets: Arc<Buckets>, weights: &Parameters<f32>, average: bool) -> OptimizerShard {
        let own = ranks.rank();
        let average = average.then(|| flat(&buckets, own, |param| weights.get(param)));
        let zeros = vec![0.0; buckets.len_of(own)];
        OptimizerShard { first: zeros.clone(), second: zeros, average, ranks, buckets }
    }

    /// One step, as [`qkv_nn::AdamW::step_clipped`], with gradients that are complete in this rank's buckets. Returns
    /// the norm before clipping; if it is not finite, nothing changes.
    pub fn step(
        &mut self,
        train: &Training,
        step: u64,
        weights: &mut Parameters<f32>,
        gradients: &Gradients<f32>,
        machine: &Machine,
    ) -> Result<f64> {
        let norm = self.norm(gradients, machine)?;
        if !norm.is_finite() {
            return Ok(norm);
        }
        let factor = if train.clip > 0.0 && norm > train.clip { train.clip / norm } else { 1.0 };
        let (mut firsts, mut seconds) = (&mut self.first[..], &mut self.second[..]);
        for (param, range) in self.buckets.pieces_of(self.ranks.rank()) {
            let (first, second);
            (first, firsts) = firsts.split_at_mut(range.len());
            (second, seconds) = seconds.split_at_mut(range.len());
            let part = MomentsPart { param: *param, range: range.clone(), first, second };
            train.adam.step_part(weights, gradients, part, step, [train.rate(step), factor], machine);
        }
        self.share_weights(weights)?;
        if let Some(mut averages) = self.average.as_deref_mut() {
            for (param, range) in self.buckets.pieces_of(self.ranks.rank()) {
                let own;
                (own, averages) = averages.split_at_mut(range.len());
                moving_average(own, &weights.get(*param)[range.clone()], train.average_decay(step), machine);
            }
        }
        Ok(norm)
    }

    /// The norm of all gradients: the owners' block sums of squares, added in the order of the parameters.
    fn norm(&self, gradients: &Gradients<f32>, machine: &Machine) -> Result<f64> {
        let blocks = |range: &Range<usize>| range.len().div_ceil(Gradients::<f32>::BLOCK);
        let count = |owner| self.buckets.pieces_of(owner).map(|(_, range)| blocks(range)).sum::<usize>();
        let lens: Vec<usize> = (0..self.ranks.size()).map(|owner| 8 * count(owner)).collect();
        let own = self.buckets.pieces_of(self.ranks.rank());
        let own = own.flat_map(|(param, range)| gradients.squares_of(*param, range.clone(), machine));
        let all = self.ranks.all_gather_sized(&own.flat_map(f64::to_le_bytes).collect::<Vec<u8>>(), &lens)?;
        let mut squares: Vec<(Param, usize, f64)> = Vec::new();
        for (owner, found) in all.iter().enumerate() {
            let mut found = found.chunks_exact(8).map(|b| f64::from_le_bytes(b.try_into().expect("eight bytes")));
            for (param, range) in self.buckets.pieces_of(owner) {
                let of_piece = found.by_ref().take(blocks(range)).enumerate();
                squares.extend(of_piece.map(|(at, square)| (*param, range.start + at, square)));
            }
        }
        squares.sort_by_key(|&(param, start, _)| (param, start));
        Ok(squares.iter().map(|(.., square)| square).sum::<f64>().sqrt())
    }

    /// Sends the weights of this rank's buckets to all others and receives theirs.
    fn share_weights(&self, weights: &mut Parameters<f32>) -> Result<()> {
        let (rank, size) = (self.ranks.rank(), self.ranks.size());
        let mut coming = Vec::new();
        for (at, bucket) in self.buckets.all.iter().enumerate().filter(|(_, bucket)| bucket.owner != rank) {
            coming.push((bucket, self.ranks.receive(bucket.owner, tag(at, SUMS), 4 * bucket.len)?));
        }
        let mut going = Vec::new();
        for (at, bucket) in self.buckets.of_owner(rank) {
            let values = bucket.read(|param| weights.get(param));
            for to in (0..size).filter(|&to| to != rank) {
                going.push(self.ranks.send(to, tag(at, SUMS), bytes(&values))?);
            }
        }
        for (bucket, message) in coming {
            let values = numbers(&message.wait()?);
            bucket.write(&values, |param, range, values| weights.get_mut(param)[range].copy_from_slice(values));
        }
        going.into_iter().try_for_each(|message| message.wait().map(drop))?;
        Ok(())
    }

    /// The running average of all weights, gathered on the first rank; `None` on the others.
    pub fn gather_average(&self, weights: &Parameters<f32>) -> Result<Option<Parameters<f32>>> {
        let Some(average) = &self.average else { return Ok(None) };
        let mut whole = self.ranks.is_first().then(|| weights.clone());
        self.gather(average, |param, range, values| {
            whole.iter_mut().for_each(|whole| whole.get_mut(param)[range.clone()].copy_from_slice(values));
        })?;
        Ok(whole)
    }

    /// All moments, gathered on the first rank; `None` on the others.
    pub fn gather_moments(&self, weights: &Parameters<f32>, steps: u64) -> Result<Option<Moments<f32>>> {
        let mut whole = self.ranks.is_first().then(|| Moments::of(weights));
        for (own, second) in [(&self.first, false), (&self.second, true)] {
            self.gather(own, |param, range, values| {
                if let Some(Moments { first: firsts, second: seconds, .. }) = &mut whole {
                    let to = if second { seconds } else { firsts };
                    to[param.index()][range].copy_from_slice(values);
                }
            })?;
        }
        whole.iter_mut().for_each(|whole| whole.steps = steps);
        Ok(whole)
    }

    /// Gathers the elements of all ranks on the first, one rank after the other.
    fn gather(&self, own: &[f32], mut put: impl FnMut(Param, Range<usize>, &[f32])) -> Result<()> {
        if !self.ranks.is_first() {
            self.ranks.send(0, STATE, bytes(own))?.wait()?;
            return Ok(());
        }
        for owner in 0..self.ranks.size() {
            let found = match owner {
                0 => own.to_vec(),
                _ => numbers(&self.ranks.receive(owner, STATE, 4 * self.buckets.len_of(owner))?.wait()?),
            };
            let mut found = &found[..];
            for (param, range) in self.buckets.pieces_of(owner) {
                let (values, rest) = found.split_at(range.len());
                put(*param, range.clone(), values);
                found = rest;
            }
        }
        Ok(())
    }

    /// Sends every rank its part of the whole state, which the first rank has.
    pub fn scatter(&mut self, moments: &Moments<f32>, average: Option<&Parameters<f32>>) -> Result<()> {
        let OptimizerShard { ranks, buckets, first, second, average: own_average } = self;
        scatter(ranks, buckets, |param| &moments.first[param.index()], first)?;
        scatter(ranks, buckets, |param| &moments.second[param.index()], second)?;
        match (own_average, average) {
            (Some(own), Some(average)) => scatter(ranks, buckets, |param| average.get(param), own),
            (Some(own), None) => scatter(ranks, buckets, |_| &[], own),
            (None, _) => Ok(()),
        }
    }

    /// This rank's pieces with their first and second moments and their average.
    pub fn pieces(&self) -> impl Iterator<Item = OwnPiece<'_>> {
        let mut start = 0;
        self.buckets.pieces_of(self.ranks.rank()).map(move |(param, range)| {
            let own = start..start + range.len();
            start = own.end;
            let average = self.average.as_ref().map(|average| &average[own.clone()]);
            let moments = [&self.first[own.clone()], &self.second[own]];
            OwnPiece { param: *param, range: range.clone(), moments, average }
        })
    }
}

/// A piece of a parameter with its part of the state.
pub(super) struct OwnPiece<'a> {
    pub param: Param,
    pub range: Range<usize>,
    pub moments: [&'a [f32]; 2],
    pub average: Option<&'a [f32]>,
}

/// The elements of a rank's pieces, one piece after the other.
fn flat<'a>(buckets: &Buckets, owner: usize, of: impl Fn(Param) -> &'a [f32]) -> Vec<f32> {
    buckets.pieces_of(owner).flat_map(|(param, range)| &of(*param)[range.clone()]).copied().collect()
}

fn scatter<'a>(ranks: &Ranks, buckets: &Buckets, whole: impl Fn(Param) -> &'a [f32], own: &mut [f32]) -> Result<()> {
    if !ranks.is_first() {
        own.copy_from_slice(&numbers(&ranks.receive(0, STATE, size_of_val(own))?.wait()?));
        return Ok(());
    }
    for owner in 1..ranks.size() {
        ranks.send(owner, STATE, bytes(&flat(buckets, owner, &whole)))?.wait()?;
    }
    own.copy_from_slice(&flat(buckets, 0, whole));
    Ok(())
}
