//! The gradient of a step: the sum over its micro-batches in the order of a fixed binary tree ([`qkv_ranks::tree`]), on
//! any number of ranks. Every micro-batch starts from zeros. A rank adds up those of its own that are neighbors in the
//! tree, and sends the partial sums while its last backward pass is still running.
//!
//! Each [bucket](super::buckets) has an owner among the ranks: the others send it the roots of their subtrees, and the
//! owner adds the upper levels of the tree and sends the sum to all. So a rank sends `(R·(P − 1) + P − 1) / P` times
//! the gradient, where `R` is the number of its roots: one, if every rank has the same power of two of micro-batches.
//! If the optimizer's state is sharded, the sum stays with the owner, which sends weights instead.

use super::buckets::Buckets;
use qkv_nn::{Gradients, Machine, Param, Parameters};
use qkv_ranks::{Pending, Ranks, Result, tree};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Message tags of a bucket: of its roots, and of its sums or the weights that replace them.
const ROOTS: u32 = 0;
pub(super) const SUMS: u32 = 1;
/// The tag of the optimizer's state when it is gathered or scattered.
pub(super) const STATE: u32 = Ranks::FREE_TAGS;

/// How the gradients of a model are summed over ranks. A step [begins](GradientSum::begin), takes the gradients of this
/// rank's [micro-batches](GradientSum::own_leaves), all but the last by [`push`](GradientSum::push) and the last
/// parameter by parameter as [`finished`](GradientSum::finished), and [ends](GradientSum::finish) with their sum.
pub struct GradientSum {
    ranks: Ranks,
    /// Micro-batches of a step.
    leaves: usize,
    buckets: Arc<Buckets>,
    /// Whether every rank gets the sums, not only their owners.
    spread: bool,
    /// Gradient buffers that are not in use.
    free: Vec<Gradients<f32>>,
}

/// The partial sum of one step.
pub struct StepSum {
    subtrees: tree::Subtrees<Gradients<f32>>,
    /// Parameters of each bucket whose gradients are not final yet.
    unfinished: Vec<usize>,
    /// Messages being received, by bucket and sender, and messages being sent.
    coming: BTreeMap<(usize, usize), Pending>,
    going: Vec<Pending>,
    /// The roots of this rank for its own buckets.
    own: BTreeMap<usize, Vec<f32>>,
    failed: Option<qkv_ranks::Error>,
}

pub(super) fn tag(bucket: usize, of: u32) -> u32 {
    STATE + 1 + 2 * bucket as u32 + of
}

pub(super) fn numbers(bytes: &[u8]) -> Vec<f32> {
    bytemuck::pod_collect_to_vec(bytes)
}

pub(super) fn bytes(numbers: &[f32]) -> Vec<u8> {
    bytemuck::cast_slice(numbers).to_vec()
}

impl GradientSum {
    /// For `leaves` micro-batches per step, over all ranks.
    pub fn new(parameters: &Parameters<f32>, leaves: usize, ranks: Ranks) -> GradientSum {
        let buckets = Arc::new(Buckets::new(parameters, ranks.size()));
        GradientSum::over(leaves, ranks, buckets, true)
    }

    pub(super) fn over(leaves: usize, ranks: Ranks, buckets: Arc<Buckets>, spread: bool) -> GradientSum {
        GradientSum { ranks, leaves, buckets, spread, free: Vec::new() }
    }

    /// The micro-batches of this rank.
    pub fn own_leaves(&self) -> Range<usize> {
        tree::share(self.leaves, self.ranks.size(), self.ranks.rank())
    }

    /// Zeroed gradients, in a free buffer if there is one.
    pub fn zeros(&mut self, parameters: &Parameters<f32>, machine: &Machine) -> Gradients<f32> {
        match self.free.pop() {
            Some(mut found) => {
                found.clear(machine);
                found
            }
            None => Gradients::of(parameters),
        }
    }

    /// Returns gradients that are no longer needed.
    pub fn give_back(&mut self, gradients: Gradients<f32>) {
        self.free.push(gradients);
    }

    /// Starts a step: posts this rank's receives.
    ///
    /// # Errors
    /// If a rank is gone.
    pub fn begin(&self) -> Result<StepSum> {
        let (rank, size) = (self.ranks.rank(), self.ranks.size());
        let mut coming = BTreeMap::new();
        for (at, bucket) in self.buckets.all.iter().enumerate() {
            for from in (0..size).filter(|&from| from != rank) {
                if bucket.owner == rank {
                    let roots = tree::roots(self.leaves, tree::share(self.leaves, size, from)).len();
                    coming.insert((at, from), self.ranks.receive(from, tag(at, ROOTS), roots * bucket.len * 4)?);
                } else if bucket.owner == from && self.spread {
                    coming.insert((at, from), self.ranks.receive(from, tag(at, SUMS), bucket.len * 4)?);
                }
            }
        }
        let mut unfinished = vec![0; self.buckets.all.len()];
        self.buckets.of.values().for_each(|of| unfinished[of.clone()].iter_mut().for_each(|count| *count += 1));
        let subtrees = tree::Subtrees::new(self.leaves);
        Ok(StepSum { subtrees, unfinished, coming, going: Vec::new(), own: BTreeMap::new(), failed: None })
    }

    /// Adds the gradients of one of this rank's micro-batches: any but its last, unless there is only one rank.
    pub fn push(&mut self, step: &mut StepSum, leaf: usize, gradients: Gradients<f32>, machine: &Machine) {
        let free = &mut self.free;
        step.subtrees.push(leaf..leaf + 1, gradients, |mut left, right| {
            left.add(&right, machine);
            free.push(right);
            left
        });
    }

    /// Called when the gradients of some parameters of this rank's last micro-batch are final; sends the buckets that
    /// are complete.
    pub fn finished(&self, step: &mut StepSum, leaf: usize, gradients: &Gradients<f32>, params: &[Param]) {
        for param in params {
            for at in self.buckets.of.get(param).cloned().unwrap_or_default() {
                step.unfinished[at] -= 1;
                if step.unfinished[at] == 0 {
                    let sent = self.send_roots(step, leaf, gradients, at);
                    step.failed = step.failed.take().or(sent.err());
                }
            }
        }
    }

    fn send_roots(&self, step: &mut StepSum, leaf: usize, gradients: &Gradients<f32>, at: usize) -> Result<()> {
        let bucket = &self.buckets.all[at];
        let mut sum = bucket.read(|param| gradients.get(param));
        let nodes = step.subtrees.nodes();
        let (roots, merged) = nodes.split_at(nodes.len() - step.subtrees.merges(leaf));
        merged.iter().rev().for_each(|(_, left)| bucket.add(&mut sum, left));
        let mut all = roots.iter().map(|(_, root)| bucket.read(|param| root.get(param))).collect::<Vec<_>>().concat();
        all.append(&mut sum);
        if bucket.owner == self.ranks.rank() {
            step.own.insert(at, all);
        } else {
            step.going.push(self.ranks.send(bucket.owner, tag(at, ROOTS), bytes(&all))?);
        }
        Ok(())
    }

    /// The gradient of the step; in other ranks' buckets it is arbitrary unless sums are spread. If there are several
    /// ranks, `last` are the gradients of this rank's last micro-batch, and their memory receives the sum.
    ///
    /// # Errors
    /// If a rank is gone.
    ///
    /// # Panics
    /// If a micro-batch of this rank was not added.
    pub fn finish(&mut self, mut step: StepSum, last: Option<Gradients<f32>>) -> Result<Gradients<f32>> {
        if let Some(error) = step.failed {
            return Err(error);
        }
        let Some(mut gradients) = last else {
            return Ok(step.subtrees.into_root().expect("one rank has all micro-batches"));
        };
        let (rank, size) = (self.ranks.rank(), self.ranks.size());
        for (at, bucket) in self.buckets.of_owner(rank) {
            let mut whole = tree::Subtrees::new(self.leaves);
            for from in 0..size {
                let roots = match step.coming.remove(&(at, from)) {
                    Some(message) => numbers(&message.wait()?),
                    None => step.own.remove(&at).expect("every bucket is complete after the backward pass"),
                };
                let nodes = tree::roots(self.leaves, tree::share(self.leaves, size, from));
                for (node, root) in nodes.into_iter().zip(roots.chunks_exact(bucket.len)) {
                    whole.push(node, root.to_vec(), |mut left, right| {
                        qkv_formats::numbers::add(&mut left, &right);
                        left
                    });
                }
            }
            let sum = whole.into_root().expect("every rank sent its roots");
            for to in (0..size).filter(|&to| to != rank && self.spread) {
                step.going.push(self.ranks.send(to, tag(at, SUMS), bytes(&sum))?);
            }
            bucket.write(&sum, |param, range, values| gradients.get_mut(param)[range].copy_from_slice(values));
        }
        for ((at, _), message) in step.coming {
            let sum = numbers(&message.wait()?);
            self.buckets.all[at]
                .write(&sum, |param, range, values| gradients.get_mut(param)[range].copy_from_slice(values));
        }
        step.going.into_iter().try_for_each(|message| message.wait().map(drop))?;
        self.free.extend(step.subtrees.take().into_iter().map(|(_, gradients)| gradients));
        Ok(gradients)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use qkv_nn::Init;
    use qkv_ranks::run_in_process;

    fn parameters() -> Parameters<f32> {
        let mut parameters = Parameters::new();
        for (name, shape) in [("a", &[300, 1000][..]), ("b", &[7]), ("c", &[1, 0]), ("d", &[500, 3])] {
            parameters.add(name, shape, Init::Xavier, 1);
        }
        parameters
    }

    /// The gradients of a micro-batch: numbers whose sum depends on the order of addition.
    fn leaf_gradients(parameters: &Parameters<f32>, leaf: usize, into: &mut Gradients<f32>) {
        for param in parameters.all() {
            let scale = [1.0, 1e4, 1e-3, 3.0][leaf % 4] * (leaf + 1) as f32;
            let from = parameters.get(param);
            into.get_mut(param).iter_mut().zip(from).for_each(|(to, &x)| *to = x * scale);
        }
    }

    /// The sum on one rank of several, and the bytes it sent.
    fn sum_on(ranks: Ranks, leaves: usize) -> Result<(Vec<f32>, u64)> {
        let (parameters, machine) = (parameters(), Machine::new(1));
        let mut sum = GradientSum::new(&parameters, leaves, ranks.clone());
        let mut found = Vec::new();
        let before = ranks.traffic();
        let mut sent = 0;
        for _ in 0..2 {
            let mut step = sum.begin()?;
            let own = sum.own_leaves();
            let mut last = None;
            for leaf in own.clone() {
                let mut gradients = sum.zeros(&parameters, &machine);
                leaf_gradients(&parameters, leaf, &mut gradients);
                if leaf + 1 < own.end || ranks.size() == 1 {
                    sum.push(&mut step, leaf, gradients, &machine);
                } else {
                    let all: Vec<Param> = parameters.all().collect();
                    all.chunks(2).rev().for_each(|params| sum.finished(&mut step, leaf, &gradients, params));
                    last = Some(gradients);
                }
            }
            let gradients = sum.finish(step, last)?;
            sent = (ranks.traffic() - before).sent - sent;
            found = parameters.all().flat_map(|param| gradients.get(param).to_vec()).collect();
            sum.give_back(gradients);
        }
        Ok((found, sent))
    }

    #[test]
    fn the_sum_has_the_same_bits_on_any_number_of_ranks() {
        for leaves in [1, 2, 3, 8, 13] {
            let (whole, _) = sum_on(Ranks::alone(), leaves).unwrap();
            for size in [2, 3, 4, 8].into_iter().filter(|&size| size <= leaves) {
                for found in run_in_process(size, |ranks| sum_on(ranks, leaves)) {
                    let found = found.unwrap().0;
                    assert!(found.iter().zip(&whole).all(|(a, b)| a.to_bits() == b.to_bits()), "{leaves} on {size}");
                }
            }
        }
    }

    #[test]
    fn bytes_sent_are_those_of_the_formula() {
        let elements = parameters().count() as u64;
        for size in [2, 4, 8] {
            let sent: u64 = run_in_process(size, |ranks| sum_on(ranks, 2 * size).unwrap().1).into_iter().sum();
            // 2·(P − 1)/P of the gradient each.
            assert_eq!(sent, 2 * (size as u64 - 1) * 4 * elements, "{size} ranks");
        }
    }
}
