//! How much memory a call of `qkv run` takes, estimated from shapes and options. A file of a few bytes may claim shapes
//! that no memory can hold, because an axis of 0 makes any shape free to store; such a call is refused before it
//! allocates.

use crate::failure::Failure;
use crate::memory::{available, gib};
use qkv::Lsh;
use qkv::tuning::{CHUNK, KEYS, QUERIES, SPAN};
use std::path::Path;

/// What the memory of a call depends on.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MemoryEstimate {
    /// `[B, Hq, N, D]`.
    pub q: [usize; 4],
    /// `[B, Hk, M, Dk]`.
    pub k: [usize; 4],
    /// `[B, Hk, M, Dv]`.
    pub v: [usize; 4],
    /// The width of the additive score, or 0.
    pub a: usize,
    /// Bytes of the tensors, both as stored in the file and as converted.
    pub file: u64,
    /// Whether there is a backward pass.
    pub backward: bool,
    /// Whether the reference engine computes it, which stores scores and weights, `[B, Hq, N, M]`.
    pub reference: bool,
    /// Whether weights are written.
    pub weights: bool,
    /// Keys selected per query.
    pub chosen: usize,
    /// How queries and keys are hashed, if at all.
    pub hash: Option<Lsh>,
    /// Features per row in linear attention, or 0.
    pub features: usize,
    pub threads: usize,
}

impl MemoryEstimate {
    /// Refuses a call that does not fit in this machine's memory.
    pub fn check(&self, path: Option<&Path>) -> Result<(), Failure> {
        let (needed, available) = (self.bytes(), available());
        if needed <= available {
            return Ok(());
        }
        let (q, k, needed, available) = (self.q, self.k, gib(needed), gib(available));
        let shapes = format!("`q` of shape {q:?} with `k` of shape {k:?}");
        let why = format!("needs about {needed:.1} GiB of memory, and this machine has {available:.1} available");
        let failure = match path {
            Some(path) => Failure::in_file(path, format!("{shapes} {why}")),
            None => Failure::new(format!("{shapes} {why}")),
        };
        Err(match self {
            MemoryEstimate { reference: true, .. } | MemoryEstimate { weights: true, .. } => {
                failure.hint("`--engine exact` without `--weights` never stores N × M weights")
            }
            MemoryEstimate { hash: Some(_), .. } => failure.hint("use fewer buckets or fewer rounds"),
            MemoryEstimate { chosen: 2.., .. } => failure.hint("use a smaller K in `--select top-k:K`"),
            _ => failure,
        })
    }

    /// A lower bound on the allocated bytes. Axes of 0 count as 1 and sequences as whole tiles: loops, lists of rows
    /// and scratch run over the other axes anyway.
    fn bytes(&self) -> u128 {
        let widest = self.q[3].max(self.k[3]).max(self.v[3]).max(self.a);
        let queries = volume([self.q[0], self.q[1], self.q[2].max(QUERIES), widest]);
        let keys = volume([self.k[0], self.k[1], self.k[2].max(KEYS), widest]);
        let passes = if self.backward { 2 } else { 1 };
        let pairs = volume([self.q[0], self.q[1], self.q[2], self.k[2]]);
        let pair = if self.reference { 16 } else { 0 } + if self.weights { 8 } else { 0 };
        let chosen = rows(self.q).saturating_mul(16 * self.chosen as u128); // as indices, and while they are collected
        queries
            .saturating_add(keys)
            .saturating_mul(4 * passes)
            .saturating_add(pairs.saturating_mul(pair))
            .saturating_add(self.file.into())
            .saturating_add(chosen)
            .saturating_add(self.hash_bytes())
            .saturating_add(self.feature_bytes())
    }

    /// Buckets, rotations, and the rotated rows, 64 at a time on each thread. An upper bound: many buckets share
    /// directions.
    fn hash_bytes(&self) -> u128 {
        let Some(Lsh { buckets, rounds, .. }) = self.hash else { return 0 };
        let rotated = self.q[3].saturating_add(self.threads.saturating_mul(64));
        let buckets = volume([rotated, rounds, buckets / 2, 8]);
        rows(self.q).saturating_add(rows(self.k)).saturating_mul(4 * rounds as u128).saturating_add(buckets)
    }

    /// The states of linear attention, features × values for each thread and each span of a long sequence; with the
    /// reference engine, the features of every row.
    fn feature_bytes(&self) -> u128 {
        if self.features == 0 {
            return 0;
        }
        if self.reference {
            return rows(self.q).saturating_add(rows(self.k)).saturating_mul(8 * self.features as u128);
        }
        let spans = rows(self.k) / (CHUNK * SPAN) as u128;
        spans.saturating_add(self.threads as u128).saturating_mul(volume([4, self.features, self.v[3], 1]))
    }
}

fn volume(axes: [usize; 4]) -> u128 {
    axes.into_iter().fold(1, |volume: u128, axis| volume.saturating_mul(axis.max(1) as u128))
}

fn rows([batch, heads, length, _]: [usize; 4]) -> u128 {
    volume([batch, heads, length, 1])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn demand(q: [usize; 4], k: [usize; 4]) -> MemoryEstimate {
        MemoryEstimate { q, k, v: k, backward: true, threads: 2, ..MemoryEstimate::default() }
    }

    #[test]
    fn an_ordinary_call_fits() {
        assert!(demand([2, 8, 512, 64], [2, 8, 512, 64]).check(Some(Path::new("in"))).is_ok());
        assert!(demand([0, 0, 0, 0], [0, 0, 0, 0]).check(Some(Path::new("in"))).is_ok());
    }

    #[test]
    fn shapes_that_are_free_to_store_but_not_to_compute_are_refused() {
        let huge = 1 << 44;
        for axis in 0..4 {
            let mut q = [0; 4];
            q[axis] = huge;
            assert!(demand(q, [0; 4]).check(Some(Path::new("in"))).is_err());
            assert!(demand([0; 4], q).check(Some(Path::new("in"))).is_err());
        }
        assert!(demand([usize::MAX; 4], [usize::MAX; 4]).check(Some(Path::new("in"))).is_err());
    }

    #[test]
    fn choices_that_take_more_than_any_memory_are_refused() {
        let small = demand([1, 1, 6, 4], [1, 1, 6, 4]);
        let hashed =
            |buckets, rounds| MemoryEstimate { hash: Some(Lsh { buckets, rounds, seed: 0 }), ..small }.check(None);
        assert!(hashed(64, 8).is_ok());
        assert!(hashed(2, usize::MAX).is_err());
        assert!(hashed(2, 1 << 44).is_err());
        assert!(hashed(200_000_006, 1).is_err() || available() > 1 << 36);
        let featured = |features, reference| MemoryEstimate { features, reference, ..small }.check(None);
        assert!(featured(256, false).is_ok() && featured(256, true).is_ok());
        assert!(featured(usize::MAX, false).is_err() && featured(usize::MAX, true).is_err());
        let long = demand([1, 1, 1 << 24, 4], [1, 1, 1 << 24, 4]);
        assert!(MemoryEstimate { chosen: 1 << 24, ..long }.check(None).is_err());
    }
}
