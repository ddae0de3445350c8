//! Prefix sums of states. Each sequence has units (spans of keys, say); the states of the units are computed in
//! parallel and then summed in order.

use super::chunk::{Sizes, State};
use crate::scratch::{Buffer, Scratch};
use qkv_simd::shared::{Rows, for_each_task};
use qkv_simd::{Real, ViewMut};

/// A unit of a sequence, for one key head.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unit {
    pub sequence: usize,
    pub key_head: usize,
    pub unit: usize,
}

/// For every unit, the sum of its state and of those before it.
pub(super) struct Sums<'s, A: Real> {
    size: usize,
    /// The number of units of each sequence, and the offset of its states.
    counts: Vec<usize>,
    firsts: Vec<usize>,
    states: Buffer<'s, A>,
}

impl<'s, A: Real> Sums<'s, A> {
    /// `fill` adds a unit to an empty state, with the buffers that `worker` built.
    #[allow(clippy::too_many_arguments)]
    pub fn new<W>(
        sizes: &Sizes<A>,
        shape: State,
        key_heads: usize,
        counts: impl Iterator<Item = usize>,
        scratch: &'s Scratch<A>,
        threads: usize,
        worker: impl Fn() -> W + Sync,
        fill: impl Fn(&mut W, Unit, &mut [A]) + Sync,
    ) -> Self {
        let (size, counts) = (shape.size(), counts.collect::<Vec<usize>>());
        let (mut firsts, mut units) = (Vec::with_capacity(counts.len()), Vec::new());
        for (sequence, &count) in counts.iter().enumerate() {
            firsts.push(units.len());
            units.extend(
                (0..key_heads).flat_map(|key_head| (0..count).map(move |unit| Unit { sequence, key_head, unit })),
            );
        }
        let mut states = scratch.take(units.len() * size);
        let written = Rows::new(ViewMut::new(&mut states, [1, 1, units.len(), size]).expect("as long as its shape"));
        let worker = || (worker(), scratch.take(size));
        for_each_task(threads, units.len(), worker, |(own, state), task| {
            shape.clear(state);
            fill(own, units[task], state);
            written.write(0, 0, task, state);
        });
        drop(written);
        let mut sum = scratch.take(size);
        for at in (0..units.len()).filter(|&at| units[at].unit > 0) {
            let (before, after) = states.split_at_mut(at * size);
            shape.combine(sizes, &mut sum, &before[(at - 1) * size..], &after[..size]);
            after[..size].copy_from_slice(&sum);
        }
        drop(sum);
        Sums { size, counts, firsts, states }
    }

    /// The sum up to and including a unit.
    pub fn after(&self, Unit { sequence, key_head, unit }: Unit) -> &[A] {
        debug_assert!(unit < self.counts[sequence]);
        let at = self.firsts[sequence] + key_head * self.counts[sequence] + unit;
        &self.states[at * self.size..][..self.size]
    }

    /// The sum of all units of a sequence, if it has any.
    pub fn last(&self, sequence: usize, key_head: usize) -> Option<&[A]> {
        let unit = self.counts[sequence].checked_sub(1)?;
        Some(self.after(Unit { sequence, key_head, unit }))
    }
}
