//! Moves rows of tensors `[B, H, rows, W]` between ranks. A *slab* is the rows of one sequence and one head.

use crate::error::Result;
use crate::number::Number;
use crate::ranks::Ranks;
use crate::shards::Shards;
use crate::tree::share;
use std::ops::Range;

/// The dimensions of a tensor besides its rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slabs {
    /// Sequences.
    pub batch: usize,
    /// Heads.
    pub heads: usize,
    /// Numbers per row.
    pub width: usize,
}

impl Slabs {
    fn count(self) -> usize {
        self.batch * self.heads
    }

    fn bytes<E>(self, rows: usize) -> usize {
        self.count() * rows * self.width * size_of::<E>()
    }
}

/// Copies a rank's rows to where they belong in the whole tensor.
pub(super) fn place<E: Copy>(whole: &mut [E], len: usize, ranges: &[Range<usize>], local: &[E], of: Slabs) {
    let rows: usize = ranges.iter().map(ExactSizeIterator::len).sum();
    for slab in 0..of.count() {
        let mut from = &local[slab * rows * of.width..][..rows * of.width];
        for range in ranges {
            let (own, rest) = from.split_at(range.len() * of.width);
            whole[(slab * len + range.start) * of.width..][..own.len()].copy_from_slice(own);
            from = rest;
        }
    }
}

/// The rows of these ranges.
pub(super) fn take<E: Copy>(whole: &[E], len: usize, ranges: &[Range<usize>], of: Slabs) -> Vec<E> {
    let rows: usize = ranges.iter().map(ExactSizeIterator::len).sum();
    let mut found = Vec::with_capacity(of.count() * rows * of.width);
    for slab in 0..of.count() {
        for range in ranges {
            found.extend_from_slice(&whole[(slab * len + range.start) * of.width..][..range.len() * of.width]);
        }
    }
    found
}

/// Gathers the whole tensor on every rank.
pub(super) fn gather<E: Number>(ranks: &Ranks, shards: &Shards, local: &[E], of: Slabs) -> Result<Vec<E>> {
    let lens: Vec<usize> = (0..ranks.size()).map(|rank| of.bytes::<E>(shards.rows(rank))).collect();
    let all = ranks.all_gather_sized(&E::to_bytes(local), &lens)?;
    let mut whole = vec![E::default(); of.count() * shards.len() * of.width];
    for (rank, bytes) in all.iter().enumerate() {
        place(&mut whole, shards.len(), shards.of(rank), &E::from_bytes(bytes), of);
    }
    Ok(whole)
}

/// The runs of rows that two ranks have in common, each as its start among the rows of either rank, and its length.
fn common(from: &[Range<usize>], to: &[Range<usize>]) -> Vec<[usize; 3]> {
    let mut found = Vec::new();
    let mut of_to = 0;
    for to in to {
        let mut of_from = 0;
        for from in from {
            let (start, end) = (from.start.max(to.start), from.end.min(to.end));
            if start < end {
                found.push([of_from + start - from.start, of_to + start - to.start, end - start]);
            }
            of_from += from.len();
        }
        of_to += to.len();
    }
    found
}

/// Moves rows to the ranks that hold them in other shards of the same sequence.
pub(super) fn reshard<E: Number>(ranks: &Ranks, from: &Shards, to: &Shards, local: &[E], of: Slabs) -> Result<Vec<E>> {
    let (rank, size) = (ranks.rank(), ranks.size());
    let (before, after) = (from.rows(rank), to.rows(rank));
    let message = |other: usize| {
        let pieces = common(from.of(rank), to.of(other));
        let mut values = Vec::new();
        for slab in 0..of.count() {
            for &[start, _, len] in &pieces {
                values.extend_from_slice(&local[(slab * before + start) * of.width..][..len * of.width]);
            }
        }
        E::to_bytes(&values)
    };
    let pieces: Vec<Vec<[usize; 3]>> = (0..size).map(|other| common(from.of(other), to.of(rank))).collect();
    let lens: Vec<usize> =
        pieces.iter().map(|pieces| of.bytes::<E>(pieces.iter().map(|&[_, _, len]| len).sum())).collect();
    let all = ranks.all_to_all((0..size).map(message).collect(), &lens)?;
    let mut found = vec![E::default(); of.count() * after * of.width];
    for (pieces, bytes) in pieces.iter().zip(&all) {
        let values = E::from_bytes(bytes);
        let mut values = &values[..];
        for slab in 0..of.count() {
            for &[_, start, len] in pieces {
                let (own, rest) = values.split_at(len * of.width);
                found[(slab * after + start) * of.width..][..own.len()].copy_from_slice(own);
                values = rest;
            }
        }
    }
    Ok(found)
}

/// The heads of a rank.
pub(super) fn heads_of(heads: usize, ranks: &Ranks, rank: usize) -> Range<usize> {
    share(heads, ranks.size(), rank)
}

/// All rows of this rank's heads, from some rows of all heads; `groups` is the number of groups of heads that stay
/// together.
pub(super) fn to_heads<E: Number>(
    ranks: &Ranks,
    shards: &Shards,
    local: &[E],
    of: Slabs,
    groups: usize,
) -> Result<Vec<E>> {
    let (each, slab) = (of.heads / groups, shards.rows(ranks.rank()) * of.width);
    let heads = |rank: usize| {
        let own = heads_of(groups, ranks, rank);
        own.start * each..own.end * each
    };
    let message = |to: usize| {
        // The heads of a rank are consecutive.
        let mut values = Vec::new();
        for b in 0..of.batch {
            let of_rank = heads(to);
            values.extend_from_slice(&local[(b * of.heads + of_rank.start) * slab..][..of_rank.len() * slab]);
        }
        E::to_bytes(&values)
    };
    let own = Slabs { heads: heads(ranks.rank()).len(), ..of };
    let lens: Vec<usize> = (0..ranks.size()).map(|from| own.bytes::<E>(shards.rows(from))).collect();
    let all = ranks.all_to_all((0..ranks.size()).map(message).collect(), &lens)?;
    let mut whole = vec![E::default(); own.count() * shards.len() * of.width];
    for (rank, bytes) in all.iter().enumerate() {
        place(&mut whole, shards.len(), shards.of(rank), &E::from_bytes(bytes), own);
    }
    Ok(whole)
}

/// The inverse: this rank's rows of all heads, from all rows of some heads.
pub(super) fn from_heads<E: Number>(
    ranks: &Ranks,
    shards: &Shards,
    whole: &[E],
    of: Slabs,
    groups: usize,
) -> Result<Vec<E>> {
    let each = of.heads / groups;
    let heads = |rank: usize| {
        let own = heads_of(groups, ranks, rank);
        own.start * each..own.end * each
    };
    let own = Slabs { heads: heads(ranks.rank()).len(), ..of };
    let message = |to: usize| E::to_bytes(&take(whole, shards.len(), shards.of(to), own));
    let slab = shards.rows(ranks.rank()) * of.width;
    let lens: Vec<usize> = (0..ranks.size()).map(|from| of.batch * heads(from).len() * slab * size_of::<E>()).collect();
    let all = ranks.all_to_all((0..ranks.size()).map(message).collect(), &lens)?;
    let mut found = vec![E::default(); of.count() * slab];
    for (rank, bytes) in all.iter().enumerate() {
        let (values, heads) = (E::from_bytes(bytes), heads(rank));
        for (at, from) in values.chunks_exact(slab.max(1)).enumerate() {
            let to = at / heads.len() * of.heads + heads.start + at % heads.len();
            found[to * slab..][..slab].copy_from_slice(from);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run_in_process;

    /// Numbers that identify their places.
    fn whole(of: Slabs, len: usize) -> Vec<f32> {
        (0..of.count() * len * of.width).map(|at| at as f32).collect()
    }

    #[test]
    fn rows_arrive_where_they_belong_and_come_back() {
        let uneven = |size: usize| {
            Shards::new((0..size).map(|r| std::iter::once(r * r * 3..(r + 1) * (r + 1) * 3).collect()).collect())
        };
        for size in [1, 2, 3, 5] {
            let from = uneven(size).unwrap();
            let (len, to) = (from.len(), Shards::balanced(from.len(), size).in_blocks(4));
            let of = Slabs { batch: 2, heads: 6, width: 3 };
            let whole = whole(of, len);
            let results = run_in_process(size, |ranks| {
                let local = take(&whole, len, from.of(ranks.rank()), of);
                assert_eq!(gather(&ranks, &from, &local, of)?, whole);
                let moved = reshard(&ranks, &from, &to, &local, of)?;
                assert_eq!(moved, take(&whole, len, to.of(ranks.rank()), of));
                assert_eq!(reshard(&ranks, &to, &from, &moved, of)?, local);
                for groups in [6, 3].into_iter().filter(|groups| *groups >= size) {
                    let heads = to_heads(&ranks, &from, &local, of, groups)?;
                    assert_eq!(from_heads(&ranks, &from, &heads, of, groups)?, local);
                }
                Ok::<(), crate::Error>(())
            });
            assert!(results.iter().all(Result::is_ok), "{results:?}");
        }
    }
}
