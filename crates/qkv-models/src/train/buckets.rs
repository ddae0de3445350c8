//! Buckets: pieces of parameters that are sent together. Each bucket has an owner among the ranks, which sums its
//! gradients; if the optimizer's state is sharded, the owner keeps it and updates the weights; and if checkpoints are
//! sharded, the owner writes them.

use qkv_formats::numbers;
use qkv_nn::{Gradients, Param, Parameters};
use std::collections::HashMap;
use std::ops::Range;

/// Elements of a bucket: 1 MiB. Large enough that a message is bound by bandwidth, not latency; small enough that the
/// first one leaves early.
const BUCKET: usize = 1 << 18;

/// Pieces of a parameter start at multiples of this, so that each block of squares that a norm adds up first lies in
/// one piece.
const ALIGN: usize = Gradients::<f32>::BLOCK;

/// Pieces of parameters that are sent together.
pub(super) struct Bucket {
    pub pieces: Vec<(Param, Range<usize>)>,
    pub len: usize,
    pub owner: usize,
}

impl Bucket {
    /// Its elements, gathered.
    pub fn read<'a>(&self, of: impl Fn(Param) -> &'a [f32]) -> Vec<f32> {
        let mut found = Vec::with_capacity(self.len);
        self.pieces.iter().for_each(|(param, range)| found.extend_from_slice(&of(*param)[range.clone()]));
        found
    }

    /// Adds a left operand to gathered elements.
    pub fn add(&self, sum: &mut [f32], left: &Gradients<f32>) {
        let mut rest = sum;
        for (param, range) in &self.pieces {
            let (sum, others) = rest.split_at_mut(range.len());
            numbers::add(sum, &left.get(*param)[range.clone()]);
            rest = others;
        }
    }

    /// Scatters gathered elements through `write(parameter, range, elements)`.
    pub fn write(&self, values: &[f32], mut write: impl FnMut(Param, Range<usize>, &[f32])) {
        let mut values = values;
        for (param, range) in &self.pieces {
            let (own, rest) = values.split_at(range.len());
            write(*param, range.clone(), own);
            values = rest;
        }
    }
}

/// All buckets of a model, the last parameters first, as a backward pass finishes these first.
pub(super) struct Buckets {
    pub all: Vec<Bucket>,
    /// The buckets that contain pieces of a parameter.
    pub of: HashMap<Param, Range<usize>>,
}

impl Buckets {
    /// The trained parameters of a model, distributed over `ranks` ranks.
    pub fn new(parameters: &Parameters<f32>, ranks: usize) -> Buckets {
        let (mut all, mut of): (Vec<Bucket>, HashMap<Param, Range<usize>>) = Default::default();
        let trained: Vec<Param> = parameters.trained().collect();
        for &param in trained.iter().rev() {
            let len = parameters.shape(param).iter().product();
            let mut start = 0;
            while start < len {
                let space = all.last().map_or(0, |bucket| BUCKET - bucket.len);
                // Whole, or cut at the end of a norm's block.
                let here = if len - start <= space { len - start } else { space / ALIGN * ALIGN };
                if here == 0 {
                    all.push(Bucket { pieces: Vec::new(), len: 0, owner: all.len() % ranks });
                    continue;
                }
                let at = all.len() - 1;
                all[at].pieces.push((param, start..start + here));
                all[at].len += here;
                of.entry(param).or_insert(at..at + 1).end = at + 1;
                start += here;
            }
        }
        Buckets { all, of }
    }

    /// The buckets of one owner, with their numbers.
    pub fn of_owner(&self, owner: usize) -> impl Iterator<Item = (usize, &Bucket)> {
        self.all.iter().enumerate().filter(move |(_, bucket)| bucket.owner == owner)
    }

    /// The pieces of one owner.
    pub fn pieces_of(&self, owner: usize) -> impl Iterator<Item = &(Param, Range<usize>)> {
        self.of_owner(owner).flat_map(|(_, bucket)| &bucket.pieces)
    }

    /// Elements of one owner.
    pub fn len_of(&self, owner: usize) -> usize {
        self.of_owner(owner).map(|(_, bucket)| bucket.len).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use qkv_nn::Init;

    #[test]
    fn every_element_is_in_one_piece_that_starts_where_a_norms_block_does() {
        let mut parameters = Parameters::<f32>::new();
        let sizes = [3 * BUCKET + 5, 7, 0, ALIGN, BUCKET - 1, 2 * ALIGN + 1];
        for (at, size) in sizes.into_iter().enumerate() {
            parameters.add(&at.to_string(), &[size], Init::Zeros, 1);
        }
        let buckets = Buckets::new(&parameters, 3);
        for (param, size) in parameters.all().zip(sizes) {
            let own = buckets.all.iter().flat_map(|bucket| &bucket.pieces).filter(|(of, _)| *of == param);
            let mut next = 0;
            for (_, range) in own {
                assert_eq!(range.start, next);
                assert!(range.start % ALIGN == 0 && !range.is_empty());
                next = range.end;
            }
            assert_eq!(next, size);
        }
        for bucket in &buckets.all {
            assert_eq!(bucket.len, bucket.pieces.iter().map(|(_, range)| range.len()).sum::<usize>());
            assert!(bucket.len <= BUCKET && bucket.owner < 3);
        }
        let pieces = |owner| buckets.pieces_of(owner).map(|(_, range)| range.len()).sum::<usize>();
        assert_eq!((0..3).map(pieces).sum::<usize>(), parameters.count());
    }
}
