//! [`Shards`]: which rank holds which rows of a sequence.

use crate::error::{Error, Result};
use crate::tree::share;
use qkv::{Tensor, View};
use std::ops::Range;

/// The rows of a sequence that each rank holds, as ranges. A rank's tensor has the rows of its ranges one after
/// another.
///
/// ```
/// use qkv_ranks::Shards;
/// assert_eq!(Shards::even(10, 3).of(1), [3..6]);
/// assert_eq!(Shards::balanced(16, 2).of(0), [0..4, 12..16]); // an early and a late part
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shards {
    of_rank: Vec<Vec<Range<usize>>>,
    len: usize,
}

impl Shards {
    /// The ranges of each rank.
    ///
    /// # Errors
    /// If a row has no rank, or two.
    pub fn new(of_rank: Vec<Vec<Range<usize>>>) -> Result<Shards> {
        let mut all: Vec<&Range<usize>> = of_rank.iter().flatten().filter(|range| !range.is_empty()).collect();
        all.sort_by_key(|range| range.start);
        let mut len = 0;
        for range in all {
            if range.start != len {
                let (row, what) = (range.start.min(len), if range.start < len { "two ranks" } else { "no rank" });
                return Err(Error::Invalid(format!("row {row} of the sequence has {what}")));
            }
            len = range.end;
        }
        Ok(Shards { of_rank, len })
    }

    /// One range per rank, all of the same length, give or take a row.
    pub fn even(len: usize, ranks: usize) -> Shards {
        let of_rank = (0..ranks).map(|rank| vec![share(len, ranks, rank)]).collect();
        Shards { of_rank, len }
    }

    /// An early and a late part per rank: under a causal mask, all ranks have equal work.
    pub fn balanced(len: usize, ranks: usize) -> Shards {
        let part = |at: usize| share(len, 2 * ranks, at);
        let of_rank = (0..ranks).map(|rank| vec![part(rank), part(2 * ranks - 1 - rank)]).collect();
        Shards { of_rank, len }
    }

    /// Rows of the sequence.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the sequence has no rows.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.of_rank.len()
    }

    /// The ranges of a rank.
    pub fn of(&self, rank: usize) -> &[Range<usize>] {
        &self.of_rank[rank]
    }

    /// How many rows a rank holds.
    pub fn rows(&self, rank: usize) -> usize {
        self.of(rank).iter().map(ExactSizeIterator::len).sum()
    }

    /// A rank's rows of a whole tensor `[B, H, rows, W]`.
    ///
    /// ```
    /// use qkv::Tensor;
    /// let whole = Tensor::from_fn([1, 1, 8, 1], |[_, _, i, _]| i as f32);
    /// let own = qkv_ranks::Shards::balanced(8, 2).take(1, (&whole).into());
    /// assert_eq!(own.data(), [2.0, 3.0, 4.0, 5.0]);
    /// ```
    pub fn take<E: Copy + Default>(&self, rank: usize, whole: View<'_, E>) -> Tensor<E, 4> {
        let [b, h, _, w] = whole.shape();
        let numbers: Vec<usize> = self.of(rank).iter().cloned().flatten().collect();
        Tensor::from_fn([b, h, numbers.len(), w], |[b, h, i, x]| whole.at(b, h, numbers[i], x))
    }

    /// All rows on one rank.
    pub(crate) fn all_on(rank: usize, len: usize, ranks: usize) -> Shards {
        let of_rank = (0..ranks).map(|other| if other == rank { vec![0..len; 1] } else { Vec::new() }).collect();
        Shards { of_rank, len }
    }

    /// Whole blocks of rows, each on the rank that holds its first row.
    pub(crate) fn in_blocks(&self, block: usize) -> Shards {
        let holder = |row: usize| self.of_rank.iter().position(|of| of.iter().any(|range| range.contains(&row)));
        let mut of_rank: Vec<Vec<Range<usize>>> = vec![Vec::new(); self.size()];
        for start in (0..self.len).step_by(block) {
            let of = &mut of_rank[holder(start).expect("every row has a rank")];
            let end = self.len.min(start + block);
            match of.last_mut().filter(|last| last.end == start) {
                Some(last) => last.end = end,
                None => of.push(start..end),
            }
        }
        Shards { of_rank, len: self.len }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_has_one_rank() {
        for len in [0, 1, 5, 300, 1000] {
            for ranks in [1, 2, 3, 8] {
                for shards in [Shards::even(len, ranks), Shards::balanced(len, ranks)] {
                    assert_eq!(Shards::new(shards.of_rank.clone()).unwrap().len(), len);
                    assert_eq!((0..ranks).map(|rank| shards.rows(rank)).sum::<usize>(), len);
                    let blocks = shards.in_blocks(128);
                    assert_eq!(Shards::new(blocks.of_rank.clone()).unwrap().len(), len);
                }
            }
        }
        assert!(Shards::new(vec![vec![0..3], vec![2..5]]).is_err());
        assert!(Shards::new(vec![vec![0..3], vec![4..5]]).is_err());
    }
}
