//! What a mask reads besides its description: sizes, positions, lengths, segments, bits and buckets.

use super::Mask;
use crate::error::{Error, Result};
use crate::place::Place;
use crate::problem::Problem;
use qkv_simd::{Element, View};
use std::sync::Arc;

/// What a mask depends on besides its description: the number of queries and keys, where the queries stand, and the
/// data of the call. For [`Mask::allows`].
///
/// ```
/// use qkv::{Mask, MaskData, Place};
/// // Two new tokens at the end of six keys.
/// let data = MaskData::new(2, 6).place(Place::End);
/// assert!(!Mask::causal().allows(0, 5, &data)?);
/// assert!(Mask::causal().allows(1, 5, &data)?);
/// # Ok::<(), qkv::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct MaskData<'a> {
    pub(crate) n: usize,
    pub(crate) m: usize,
    pub(crate) place: Place,
    /// The sequence and the query head of [`Mask::allows`].
    pub(crate) of: [usize; 2],
    pub(crate) positions: Option<&'a [i64]>,
    pub(crate) lengths: Option<&'a [usize]>,
    pub(crate) segments: Option<(&'a [i32], &'a [i32])>,
    /// Broadcast to `[B, Hq, N, M]`.
    pub(crate) bits: Option<View<'a, u8>>,
    /// Of queries, `[B, Hq, N, rounds]`, and of keys, `[B, Hk, M, rounds]`.
    pub(crate) buckets: Option<(View<'a, i32>, View<'a, i32>)>,
    /// Query heads per key head, and the number of query heads.
    pub(crate) group: usize,
    pub(crate) heads: usize,
    /// The predicted centers of queries, `[B, Hq, N]`.
    pub(crate) centers: Option<Arc<[f64]>>,
}

impl<'a> MaskData<'a> {
    /// `n` queries and `m` keys, with the first query at the first key.
    pub fn new(n: usize, m: usize) -> Self {
        MaskData {
            n,
            m,
            place: Place::Start,
            of: [0; 2],
            positions: None,
            lengths: None,
            segments: None,
            bits: None,
            buckets: None,
            group: 1,
            heads: 1,
            centers: None,
        }
    }

    /// The data of a call, for all its sequences and heads.
    pub fn of<T: Element>(problem: &Problem<'a, T>) -> Self {
        problem.mask_data.clone()
    }

    /// Where the queries stand; [`Place::Given`] needs [`positions`](MaskData::positions).
    pub fn place(mut self, place: Place) -> Self {
        self.place = place;
        self
    }

    /// The position of each query, `[B, N]`.
    pub fn positions(mut self, positions: &'a [i64]) -> Self {
        (self.place, self.positions) = (Place::Given, Some(positions));
        self
    }

    /// The number of keys of each sequence, `[B]`.
    pub fn lengths(mut self, lengths: &'a [usize]) -> Self {
        self.lengths = Some(lengths);
        self
    }

    /// The segment of each query, `[B, N]`, and of each key, `[B, M]`.
    pub fn segments(mut self, queries: &'a [i32], keys: &'a [i32]) -> Self {
        self.segments = Some((queries, keys));
        self
    }

    /// A bit per pair, `[B, Hq, N, M]`.
    pub fn bits(mut self, bits: impl Into<View<'a, u8>>) -> Self {
        self.bits = Some(bits.into());
        self
    }

    /// The hash buckets of queries, `[B, Hq, N, rounds]`, and of keys, `[B, Hk, M, rounds]`.
    pub fn buckets(mut self, queries: impl Into<View<'a, i32>>, keys: impl Into<View<'a, i32>>) -> Self {
        let (queries, keys) = (queries.into(), keys.into());
        self.heads = queries.shape()[1];
        self.group = self.heads.checked_div(keys.shape()[1]).unwrap_or(1).max(1);
        self.buckets = Some((queries, keys));
        self
    }

    /// Selects a sequence and a query head other than the first.
    pub fn at(mut self, sequence: usize, head: usize) -> Self {
        self.of = [sequence, head];
        self
    }

    /// Whether a query and a key share a bucket in this round.
    #[inline]
    pub(crate) fn share_bucket(&self, b: usize, h: usize, i: usize, j: usize, round: usize) -> bool {
        self.buckets.is_none_or(|(q, k)| q.at(b, h, i, round) == k.at(b, h / self.group, j, round))
    }

    /// The predicted centers of a head's queries.
    pub(crate) fn center(&self, b: usize, h: usize) -> Option<impl Fn(usize) -> f64> {
        self.centers.as_ref().map(|centers| move |i: usize| centers[(b * self.heads + h) * self.n + i])
    }

    /// `p(i)`, the position of query `i` of sequence `b`.
    #[inline]
    pub(crate) fn position(&self, b: usize, i: usize) -> i64 {
        match (self.place, self.positions) {
            (Place::Given, Some(positions)) => positions[b * self.n + i],
            (Place::Start | Place::Given, _) => i as i64,
            (Place::End, _) => i as i64 + self.m as i64 - self.n as i64,
            (Place::Offset(offset), _) => (i as i64).saturating_add(offset),
        }
    }

    /// Checks that the data that a mask reads is present and large enough for a pair.
    pub(super) fn check(&self, mask: &Mask, i: usize, j: usize) -> Result<()> {
        let [b, h] = self.of;
        let outside = |name, at: usize, limit: usize| Err(Error::value(name, at, format!("less than {limit}")));
        if i >= self.n {
            return outside("query", i, self.n);
        }
        if j >= self.m {
            return outside("key", j, self.m);
        }
        mask.check(self.n, self.m)?;
        let large_enough = |used: bool, tensor: &'static str, len: Option<usize>, needed: usize| match len {
            _ if !used => Ok(()),
            None => Err(Error::Missing { tensor, needed_by: "the mask" }),
            Some(len) if len < needed => Err(Error::shape(tensor, &[len], format!("{needed} entries at least"))),
            Some(_) => Ok(()),
        };
        let views = |used: bool, tensor, shape: Option<[usize; 4]>, needed: [usize; 4]| match shape {
            Some(found) if used && found.iter().zip(needed).any(|(&found, needed)| found < needed) => {
                Err(Error::shape(tensor, &found, format!("{needed:?} at least")))
            }
            shape => large_enough(used, tensor, shape.map(|_| 0), 0),
        };
        let rows = (b + 1) * self.n;
        large_enough(self.place == Place::Given, "positions", self.positions.map(<[_]>::len), rows)?;
        large_enough(mask.uses(&Mask::Lengths), "lengths", self.lengths.map(<[_]>::len), b + 1)?;
        let segments = mask.uses(&Mask::Segments);
        large_enough(segments, "segments_q", self.segments.map(|(q, _)| q.len()), rows)?;
        large_enough(segments, "segments_k", self.segments.map(|(_, k)| k.len()), (b + 1) * self.m)?;
        views(mask.uses(&Mask::Bits), "bits", self.bits.map(|bits| bits.shape()), [b + 1, h + 1, self.n, self.m])?;
        let (used, rounds) = mask.lsh_buckets().map_or((false, 0), |lsh| (true, lsh.rounds));
        let (queries, keys) = self.buckets.map(|(q, k)| (q.shape(), k.shape())).unzip();
        views(used, "buckets of queries", queries, [b + 1, h + 1, self.n, rounds])?;
        views(used, "buckets of keys", keys, [b + 1, h / self.group + 1, self.m, rounds])
    }
}

/// A query: its sequence, head, index, and position among the keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowAt {
    pub b: usize,
    pub h: usize,
    pub i: usize,
    pub p: i64,
}
