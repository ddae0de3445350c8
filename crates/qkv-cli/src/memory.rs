//! What this machine has, and whether a call can fit: a file of a few bytes may claim shapes that no memory holds (an
//! axis of 0 makes any shape free to store), and such a call is refused before it allocates. Linux says what there is;
//! elsewhere only shapes that are beyond any machine are refused.

use crate::failure::Failure;
use qkv::Lsh;
use qkv::tuning::{CHUNK, KEYS, QUERIES, SPAN};
use std::fs;
use std::path::Path;

/// Where the system does not say what it has.
const BEYOND_ANY_MACHINE: u128 = 1 << 42;

/// The most memory that this process has had, in bytes.
pub(crate) fn peak() -> Option<u64> {
    field("/proc/self/status", "VmHWM:")
}

/// What the system could still give, in bytes.
pub(crate) fn available() -> u128 {
    field("/proc/meminfo", "MemAvailable:").map_or(BEYOND_ANY_MACHINE, u128::from)
}

/// A number of kB that a file of the system gives this name to, in bytes.
pub(crate) fn field(file: &str, name: &str) -> Option<u64> {
    let text = fs::read_to_string(file).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// What a call is about, as far as its memory goes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Demand {
    /// `[B, Hq, N, D]`.
    pub q: [usize; 4],
    /// `[B, Hk, M, Dk]`.
    pub k: [usize; 4],
    /// `[B, Hk, M, Dv]`.
    pub v: [usize; 4],
    /// The width of the additive score, or 0.
    pub a: usize,
    /// Bytes of the tensors in the file.
    pub file: u64,
    /// Whether there is a backward pass.
    pub backward: bool,
    /// Whether the definition computes it, which stores scores and weights, `[B, Hq, N, M]`.
    pub reference: bool,
    /// Whether weights are written.
    pub weights: bool,
    /// How many keys are chosen for each query.
    pub chosen: usize,
    /// Whether queries and keys are hashed, and how.
    pub hash: Option<Lsh>,
    /// How many features a row of linear attention has, or 0.
    pub features: usize,
    /// How many threads compute.
    pub threads: usize,
}

impl Demand {
    /// Refuses a call that this machine cannot hold.
    pub fn check(&self, path: Option<&Path>) -> Result<(), Failure> {
        let (needed, available) = (self.bytes(), available());
        if needed <= available {
            return Ok(());
        }
        let gib = |bytes: u128| bytes as f64 / f64::from(1 << 30);
        let (q, k, needed, available) = (self.q, self.k, gib(needed), gib(available));
        let shapes = format!("`q` of shape {q:?} with `k` of shape {k:?}");
        let why = format!("needs some {needed:.1} GiB of memory, and this machine has {available:.1}");
        let failure = match path {
            Some(path) => Failure::in_file(path, format!("{shapes} {why}")),
            None => Failure::new(format!("{shapes} {why}")),
        };
        Err(match self {
            Demand { reference: true, .. } | Demand { weights: true, .. } => {
                failure.hint("`--engine exact` without `--weights` needs no memory for N × M")
            }
            Demand { hash: Some(_), .. } => failure.hint("fewer buckets and fewer rounds need less"),
            Demand { chosen: 2.., .. } => failure.hint("a smaller K of `--select top-k:K` needs less"),
            _ => failure,
        })
    }

    /// A rough count, at least what is sure to be allocated. Axes of 0 count as 1 and sequences as whole tiles, because
    /// loops, lists of rows and scratch go over the other axes all the same.
    fn bytes(&self) -> u128 {
        let widest = self.q[3].max(self.k[3]).max(self.v[3]).max(self.a);
        let queries = volume([self.q[0], self.q[1], self.q[2].max(QUERIES), widest]);
        let keys = volume([self.k[0], self.k[1], self.k[2].max(KEYS), widest]);
        let passes = if self.backward { 2 } else { 1 };
        let pairs = volume([self.q[0], self.q[1], self.q[2], self.k[2]]);
        let pair = if self.reference { 16 } else { 0 } + if self.weights { 8 } else { 0 };
        let chosen = rows(self.q).saturating_mul(16 * self.chosen as u128); // as keys, and as they are collected
        queries
            .saturating_add(keys)
            .saturating_mul(4 * passes)
            .saturating_add(pairs.saturating_mul(pair))
            .saturating_add(self.file.into())
            .saturating_add(chosen)
            .saturating_add(self.hash_bytes())
            .saturating_add(self.feature_bytes())
    }

    /// Of buckets, rotations and rows that are turned, 64 at a time by each thread. At most: many buckets are made of fewer
    /// directions.
    fn hash_bytes(&self) -> u128 {
        let Some(Lsh { buckets, rounds, .. }) = self.hash else { return 0 };
        let turned = self.q[3].saturating_add(self.threads.saturating_mul(64));
        let buckets = volume([turned, rounds, buckets / 2, 8]);
        rows(self.q).saturating_add(rows(self.k)).saturating_mul(4 * rounds as u128).saturating_add(buckets)
    }

    /// Of linear attention's states, features × values for each thread and for each span of a long sequence; in the
    /// definition, of the features of every row.
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

    fn demand(q: [usize; 4], k: [usize; 4]) -> Demand {
        Demand { q, k, v: k, backward: true, threads: 2, ..Demand::default() }
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
        let hashed = |buckets, rounds| Demand { hash: Some(Lsh { buckets, rounds, seed: 0 }), ..small }.check(None);
        assert!(hashed(64, 8).is_ok());
        assert!(hashed(2, usize::MAX).is_err());
        assert!(hashed(2, 1 << 44).is_err());
        assert!(hashed(200_000_006, 1).is_err() || available() > 1 << 36);
        let featured = |features, reference| Demand { features, reference, ..small }.check(None);
        assert!(featured(256, false).is_ok() && featured(256, true).is_ok());
        assert!(featured(usize::MAX, false).is_err() && featured(usize::MAX, true).is_err());
        let long = demand([1, 1, 1 << 24, 4], [1, 1, 1 << 24, 4]);
        assert!(Demand { chosen: 1 << 24, ..long }.check(None).is_err());
    }

    #[test]
    fn the_peak_is_known_where_the_system_tells_it() {
        assert_eq!(peak().is_some(), Path::new("/proc/self/status").exists());
    }
}
