//! The leaf predicates of a compiled mask, and how each answers for a whole tile: its verdict, the intervals that it
//! can touch, and the bits of one row. Each agrees with [`Mask::allows`](crate::Mask::allows), which defines the masks.

use super::tile::{ClassOf, Extent, TileAt, TileKeys, bits_of};
use super::{Bits, Spans, Verdict};
use crate::mask::RowAt;
use crate::mask::{BigBird, Blocks, MaskData, clamp};
use crate::tuning::MAX_SCANNED_PAIRS;
use std::ops::RangeInclusive;

/// A side of the score matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Queries,
    Keys,
}

/// A predicate on a pair of a query at position `p` and a key `j`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Predicate {
    /// `−left ≤ j − p ≤ right`. Causal is one of these.
    Band { left: i64, right: i64 },
    /// Keys before the length of the sequence.
    Lengths,
    /// The same segment.
    Segments,
    /// The bit of the pair.
    Bits,
    /// `(p − j) mod stride = 0`.
    Residue { stride: i64 },
    /// `⌊p/size⌋ = ⌊j/size⌋`.
    SameBlock { size: i64 },
    /// `j mod stride ≥ stride − summary`.
    Summary { stride: i64, summary: i64 },
    /// `j` (or `p`) is one of these, ascending.
    OneOf { side: Side, set: Vec<i64> },
    BigBird {
        pattern: BigBird,
        /// Blocks of keys.
        blocks: usize,
        /// The blocks drawn for the first rows of blocks.
        drawn: Vec<Vec<usize>>,
    },
    /// A bit per pair of blocks.
    Blocks(Blocks),
    /// The same hash bucket in any of the first rounds.
    AnyBucket { rounds: usize },
    /// The same hash bucket in this round: a part of `AnyBucket`, for the CPU engine's plan.
    Bucket { round: usize },
    /// Within `reach` of the query's predicted center: no mask, but visited like one by the CPU engine.
    Around { reach: usize },
}

/// Sets with up to this many positions are listed one by one.
const FEW_POINTS: usize = 64;

/// Larger than any distance between positions.
pub(crate) const FAR: i64 = i64::MAX / 4;

impl Predicate {
    /// Whether it reads data of the call besides positions.
    pub fn needs_data(&self) -> bool {
        match self {
            Predicate::Lengths
            | Predicate::Segments
            | Predicate::Bits
            | Predicate::AnyBucket { .. }
            | Predicate::Bucket { .. }
            | Predicate::Around { .. } => true,
            Predicate::Band { .. }
            | Predicate::Residue { .. }
            | Predicate::SameBlock { .. }
            | Predicate::Summary { .. }
            | Predicate::OneOf { .. }
            | Predicate::BigBird { .. }
            | Predicate::Blocks(_) => false,
        }
    }

    /// What it allows within a tile.
    pub fn verdict(&self, data: &MaskData<'_>, at: &TileAt) -> Verdict {
        let (q, k) = (at.queries, at.keys);
        match self {
            Predicate::Band { left, right } => {
                let (least, most) = (k.low - q.high, k.high - q.low);
                Verdict::of(most < -left || least > *right, least >= -left && most <= *right)
            }
            Predicate::Lengths => {
                let length = data.lengths.map_or(i64::MAX, |lengths| lengths[at.b] as i64);
                Verdict::of(k.low >= length, k.high < length)
            }
            Predicate::Segments => match (at.natural, data.segments) {
                (Some([i, rows, j, cols]), Some((queries, keys))) => {
                    let range = |of: &[i32]| of.iter().fold((i32::MAX, i32::MIN), |(a, b), &x| (a.min(x), b.max(x)));
                    let q = range(&queries[at.b * data.n + i..][..rows]);
                    let k = range(&keys[at.b * data.m + j..][..cols]);
                    Verdict::of(q.1 < k.0 || k.1 < q.0, q.0 == q.1 && q == k)
                }
                _ => Verdict::Partial,
            },
            Predicate::Bits => bits_verdict(data, at),
            Predicate::Residue { stride: 1 } => Verdict::Full,
            Predicate::Residue { stride } => same_class(at, ClassOf::Stride(*stride)),
            Predicate::Bucket { round } => same_class(at, ClassOf::Round(*round)),
            Predicate::AnyBucket { .. } => Verdict::Partial,
            Predicate::Around { reach } => match (at.natural, data.center(at.b, at.h)) {
                (Some([i, rows, ..]), Some(center)) => {
                    let centers = (i..i + rows).map(center);
                    let (low, high) = centers.fold((f64::MAX, f64::MIN), |(low, high), c| (low.min(c), high.max(c)));
                    let reach = *reach as f64;
                    let (first, last) = (k.low as f64, k.high as f64);
                    let all = first >= high - reach && last <= low + reach;
                    Verdict::of(last < low - reach || first > high + reach, all)
                }
                _ => Verdict::Partial,
            },
            Predicate::SameBlock { size } => {
                let blocks = |e: Extent| (e.low.div_euclid(*size), e.high.div_euclid(*size));
                let (q, k) = (blocks(q), blocks(k));
                Verdict::of(q.1 < k.0 || k.1 < q.0, q.0 == q.1 && q == k)
            }
            Predicate::Summary { stride, summary } => {
                let first = first_summary(k.low, *stride, *summary);
                let same_block = k.low.div_euclid(*stride) == k.high.div_euclid(*stride);
                Verdict::of(first > k.high, first == k.low && same_block || summary == stride)
            }
            Predicate::OneOf { side, set } => {
                let extent = if *side == Side::Keys { k } else { q };
                let members = members(set, extent.low, extent.high).len() as i64;
                Verdict::of(members == 0, members == extent.high - extent.low + 1)
            }
            Predicate::BigBird { pattern, .. } => {
                let size = clamp(pattern.block);
                let rows = q.low.div_euclid(size)..=q.high.div_euclid(size);
                let cols = k.low.div_euclid(size)..=k.high.div_euclid(size);
                over_blocks(at, rows, cols, |row, col| self.sees_block(row, col))
            }
            Predicate::Blocks(blocks) => match at.natural {
                Some([i, rows, j, cols]) => {
                    let rows = (i / blocks.size) as i64..=((i + rows - 1) / blocks.size) as i64;
                    let cols = (j / blocks.size) as i64..=((j + cols - 1) / blocks.size) as i64;
                    over_blocks(at, rows, cols, |row, col| blocks.seen[row as usize][col as usize])
                }
                None => Verdict::Partial,
            },
        }
    }

    /// Whether BigBird's queries of block `row` see the keys of block `col`.
    fn sees_block(&self, row: i64, col: i64) -> bool {
        let Predicate::BigBird { pattern, blocks, drawn } = self else { return false };
        let globals = clamp(pattern.globals);
        (row - col).abs() <= clamp(pattern.window / 2)
            || (0..globals).contains(&row)
            || col < globals
            || usize::try_from(row).is_ok_and(|row| match drawn.get(row) {
                Some(drawn) => drawn.binary_search(&(col as usize)).is_ok(),
                None => pattern.drawn(row, *blocks).contains(&(col as usize)),
            })
    }

    /// The intervals of one side in which it can allow anything, given the other side of a tile.
    pub fn spans(&self, data: &MaskData<'_>, b: usize, side: Side, other: Extent) -> Spans {
        match (self, side) {
            (Predicate::Band { left, right }, Side::Keys) => Spans::one(other.low - left, other.high + right),
            (Predicate::Band { left, right }, Side::Queries) => Spans::one(other.low - right, other.high + left),
            (Predicate::Lengths, Side::Keys) => {
                Spans::one(0, data.lengths.map_or(FAR, |lengths| lengths[b] as i64 - 1))
            }
            (Predicate::SameBlock { size }, _) => {
                let end = other.high.div_euclid(*size).saturating_add(1).saturating_mul(*size);
                Spans::one(other.low.div_euclid(*size).saturating_mul(*size), end.saturating_sub(1))
            }
            (Predicate::OneOf { side: of, set }, side) if *of == side && set.len() <= FEW_POINTS => Spans::points(set),
            (Predicate::OneOf { side: of, .. }, side) if *of == side => Spans::all(),
            (Predicate::OneOf { set, .. }, _) if members(set, other.low, other.high).is_empty() => Spans::none(),
            _ => Spans::all(),
        }
    }

    /// The first and last key of a row by natural index, if the row is one interval.
    #[inline]
    pub fn interval(&self, data: &MaskData<'_>, row: &RowAt) -> Option<(i64, i64)> {
        match self {
            Predicate::Band { left, right } => Some((row.p - left, row.p.saturating_add(*right))),
            Predicate::Lengths => Some((0, data.lengths.map_or(FAR, |lengths| lengths[row.b] as i64 - 1))),
            Predicate::SameBlock { size } => {
                let start = row.p.div_euclid(*size).saturating_mul(*size);
                Some((start, start.saturating_add(*size - 1)))
            }
            Predicate::Around { reach } => Some(data.center(row.b, row.h).map_or((0, FAR), |center| {
                let (center, reach) = (center(row.i), *reach as f64);
                ((center - reach).ceil() as i64, (center + reach).floor() as i64)
            })),
            _ => None,
        }
    }

    /// The bits of one row of a tile, if they are not one interval.
    pub fn scattered(&self, data: &MaskData<'_>, row: &RowAt, keys: &TileKeys<'_>, bits: &mut Bits) {
        match self {
            Predicate::Band { .. } | Predicate::Lengths | Predicate::SameBlock { .. } | Predicate::Around { .. } => {
                unreachable!("rows of these are intervals")
            }
            Predicate::Segments => match data.segments {
                Some((queries, of_keys)) => {
                    let (mine, of_keys) = (queries[row.b * data.n + row.i], &of_keys[row.b * data.m..]);
                    keys.each(bits, |j| of_keys[j] == mine);
                }
                None => keys.fill(bits, true),
            },
            Predicate::Bits => match data.bits {
                Some(of_pairs) => match of_pairs.row(row.b, row.h, row.i) {
                    Some(of_pairs) => keys.each(bits, |j| of_pairs[j] != 0),
                    None => keys.each(bits, |j| of_pairs.at(row.b, row.h, row.i, j) != 0),
                },
                None => keys.fill(bits, true),
            },
            Predicate::Residue { stride } => {
                let mine = row.p.rem_euclid(*stride);
                match keys.of_class(ClassOf::Stride(*stride), mine as u32) {
                    Some(range) => *bits = bits_of(range),
                    None => keys.each(bits, |j| (j as i64).rem_euclid(*stride) == mine),
                }
            }
            Predicate::Bucket { round } => match data.buckets {
                Some((queries, of_keys)) => {
                    let mine = queries.at(row.b, row.h, row.i, *round);
                    let class = class_of_bucket(mine);
                    let head = row.h / data.group;
                    match keys.of_class(ClassOf::Round(*round), class) {
                        Some(range) => *bits = bits_of(range),
                        None => keys.each(bits, |j| of_keys.at(row.b, head, j, *round) == mine),
                    }
                }
                None => keys.fill(bits, true),
            },
            Predicate::AnyBucket { rounds } => {
                keys.each(bits, |j| (0..*rounds).any(|round| data.share_bucket(row.b, row.h, row.i, j, round)))
            }
            Predicate::Summary { stride, summary } => {
                keys.each(bits, |j| (j as i64).rem_euclid(*stride) >= stride - summary)
            }
            Predicate::OneOf { side: Side::Queries, set } => keys.fill(bits, set.binary_search(&row.p).is_ok()),
            Predicate::OneOf { set, .. } => match keys.natural() {
                Some(start) => {
                    keys.fill(bits, false);
                    for j in members(set, start as i64, (start + keys.len) as i64 - 1) {
                        let at = *j as usize - start;
                        bits[at / 64] |= 1 << (at % 64);
                    }
                }
                None => keys.each(bits, |j| set.binary_search(&(j as i64)).is_ok()),
            },
            Predicate::BigBird { pattern, .. } => {
                let block = row.p.div_euclid(clamp(pattern.block));
                keys.each_block(bits, pattern.block, |col| self.sees_block(block, col as i64));
            }
            Predicate::Blocks(blocks) => {
                let seen = &blocks.seen[row.i / blocks.size];
                keys.each_block(bits, blocks.size, |col| seen[col]);
            }
        }
    }
}

/// The verdict of a tile of bits, from the bits.
fn bits_verdict(data: &MaskData<'_>, at: &TileAt) -> Verdict {
    let (Some([i, rows, j, cols]), Some(bits)) = (at.natural, data.bits) else { return Verdict::Partial };
    let (mut any, mut all) = (false, true);
    // A broadcast axis (stride 0) repeats one row or column.
    let rows = if bits.strides()[2] == 0 { rows.min(1) } else { rows };
    let cols = if bits.strides()[3] == 0 { cols.min(1) } else { cols };
    for i in i..i + rows {
        match bits.row(at.b, at.h, i) {
            Some(row) => {
                let seen = row[j..j + cols].iter().filter(|&&bit| bit != 0).count();
                any |= seen > 0;
                all &= seen == cols;
            }
            None => {
                for j in j..j + cols {
                    let seen = bits.at(at.b, at.h, i, j) != 0;
                    any |= seen;
                    all &= seen;
                }
            }
        }
        if any && !all {
            break;
        }
    }
    Verdict::of(!any, all)
}

/// The verdict of a tile from the pairs of pattern blocks that it touches, if these are not too many.
fn over_blocks(
    at: &TileAt,
    rows: RangeInclusive<i64>,
    cols: RangeInclusive<i64>,
    sees: impl Fn(i64, i64) -> bool,
) -> Verdict {
    let pairs = (rows.end() - rows.start() + 1).saturating_mul(cols.end() - cols.start() + 1);
    if at.natural.is_none() || pairs > MAX_SCANNED_PAIRS as i64 {
        return Verdict::Partial;
    }
    let (mut any, mut all) = (false, true);
    for row in rows {
        for col in cols.clone() {
            let seen = sees(row, col);
            any |= seen;
            all &= seen;
        }
    }
    Verdict::of(!any, all)
}

/// The class of a hash bucket. Flipping the sign bit maps the order of `i32` to that of `u32`.
pub(crate) fn class_of_bucket(bucket: i32) -> u32 {
    bucket as u32 ^ (1 << 31)
}

/// Whether the classes of a tile's two sides meet, if both sides are sorted by them.
fn same_class(at: &TileAt, of: ClassOf) -> Verdict {
    match (at.queries.classes, at.keys.classes) {
        (Some(q), Some(k)) if q.of == of && k.of == of => {
            Verdict::of(q.high < k.low || k.high < q.low, q.low == q.high && q == k)
        }
        _ => Verdict::Partial,
    }
}

/// The first summary key at or after `from`.
fn first_summary(from: i64, stride: i64, summary: i64) -> i64 {
    let short = stride - summary - from.rem_euclid(stride);
    if short > 0 { from.saturating_add(short) } else { from }
}

/// The members of an ascending set between `low` and `high`.
fn members(set: &[i64], low: i64, high: i64) -> &[i64] {
    let start = set.partition_point(|&x| x < low);
    let end = set.partition_point(|&x| x <= high);
    &set[start..end.max(start)]
}
