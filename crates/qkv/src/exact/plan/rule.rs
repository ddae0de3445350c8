//! A mask, compiled into a few simple rules that can be asked about whole tiles: is it empty, full or partial, where can
//! something be kept at all, and which bits of a row are set. [`Mask::allows`] says what is meant; this only says it faster.

use super::order::{TileKeys, bits_of};
use crate::exact::scores::RowAt;
use crate::mask::{BigBird, Blocks, Mask, Scene, clamp};
use crate::problem::Problem;
use crate::tuning::{KEYS, PAIRS_LOOKED_AT};
use qkv_simd::Element;

/// Bits of one row of a tile.
pub(crate) type Bits = [u64; KEYS / 64];

/// What a tile keeps. Always sound: *partial* may be said of a tile that turns out empty or full, never the reverse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Empty,
    Partial,
    Full,
}

impl Verdict {
    fn of(empty: bool, full: bool) -> Verdict {
        match (empty, full) {
            (true, _) => Verdict::Empty,
            (_, true) => Verdict::Full,
            _ => Verdict::Partial,
        }
    }
}

/// The smallest and largest place (of queries) or index (of keys) in a tile, and of their classes where it is ordered by
/// those.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Extent {
    pub low: i64,
    pub high: i64,
    pub classes: Option<Classes>,
}

/// What a list is ordered by: residues by a stride, or the hash buckets of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClassOf {
    Stride(i64),
    Round(usize),
}

/// The smallest and largest class in a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Classes {
    pub of: ClassOf,
    pub low: u32,
    pub high: u32,
}

/// A tile as a rule sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TileAt {
    pub b: usize,
    pub h: usize,
    pub queries: Extent,
    pub keys: Extent,
    /// Where both sides are in their natural order: the first query, how many, the first key, how many.
    pub natural: Option<[usize; 4]>,
}

/// Which side of a tile is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Queries,
    Keys,
}

/// One rule, or several joined.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Rule {
    All,
    /// `−left ≤ j − p ≤ right`. Causal is one of these.
    Near {
        left: i64,
        right: i64,
    },
    Lengths,
    Segments,
    Bits,
    /// `(p − j) mod stride = 0`.
    Residue {
        stride: i64,
    },
    /// The same hash bucket in this round.
    Bucket {
        round: usize,
    },
    /// The same hash bucket in any of the first so many rounds.
    AnyBucket {
        rounds: usize,
    },
    /// Within `reach` of the query's predicted centre.
    Around {
        reach: usize,
    },
    /// `⌊p/size⌋ = ⌊j/size⌋`.
    SameBlock {
        size: i64,
    },
    /// `j mod stride ≥ stride − summary`.
    Summary {
        stride: i64,
        summary: i64,
    },
    /// `j` (or `p`) is one of these, ascending.
    OneOf {
        side: Side,
        set: Vec<i64>,
    },
    BigBird {
        pattern: BigBird,
        /// Blocks of keys.
        blocks: usize,
        /// Those drawn for the first blocks of places.
        drawn: Vec<Vec<usize>>,
    },
    Blocks(Blocks),
    And(Vec<Rule>),
    Or(Vec<Rule>),
    Not(Box<Rule>),
}

/// Up to how many positions of a set are worth listing one by one.
const FEW_POINTS: usize = 64;

/// No distance between places is as large as this.
pub(crate) const FAR: i64 = i64::MAX / 4;

impl Rule {
    /// All of these; one alone is itself.
    pub fn and(rules: impl Iterator<Item = Rule>) -> Rule {
        let mut rules: Vec<Rule> = rules.filter(|rule| *rule != Rule::All).collect();
        match rules.len() {
            0 => Rule::All,
            1 => rules.remove(0),
            _ => Rule::And(rules),
        }
    }

    /// The rule of a problem: its mask, and the windows of predicted centres.
    pub fn of<T: Element>(problem: &Problem<'_, T>) -> Rule {
        let around = problem.attention.local.map(|reach| Rule::Around { reach });
        Rule::and(std::iter::once(Rule::new(&problem.attention.mask, &problem.scene)).chain(around))
    }

    /// Compiles a mask for the sizes and places of a scene.
    pub fn new(mask: &Mask, scene: &Scene<'_>) -> Rule {
        let symmetric = |distance: i64| Rule::Near { left: distance, right: distance };
        match mask {
            Mask::Full => Rule::All,
            Mask::Causal => Rule::Near { left: FAR, right: 0 },
            Mask::Lengths => Rule::Lengths,
            Mask::Segments => Rule::Segments,
            Mask::Bits => Rule::Bits,
            Mask::Window { left, right } => Rule::Near { left: clamp(*left), right: clamp(*right) },
            Mask::Strided { stride } => {
                let stride = clamp(*stride);
                Rule::Or(vec![symmetric(stride - 1), Rule::Residue { stride }])
            }
            Mask::Fixed { stride, summary } => {
                let (stride, summary) = (clamp(*stride), clamp(*summary));
                Rule::Or(vec![Rule::SameBlock { size: stride }, Rule::Summary { stride, summary }])
            }
            Mask::Longformer { window, globals } => {
                let set: Vec<i64> = globals.iter().map(|&at| clamp(at)).collect();
                let one_of = |side| Rule::OneOf { side, set: set.clone() };
                Rule::Or(vec![symmetric(clamp(window / 2)), one_of(Side::Keys), one_of(Side::Queries)])
            }
            Mask::BigBird(pattern) => {
                // Places usually lie among the keys; for one that does not, `sees_block` draws again.
                let blocks = scene.m.div_ceil(pattern.block);
                let drawn = (0..blocks).map(|row| pattern.drawn(row, blocks)).collect();
                Rule::BigBird { pattern: *pattern, blocks, drawn }
            }
            Mask::Blocks(blocks) => Rule::Blocks(blocks.clone()),
            Mask::Lsh(lsh) => Rule::AnyBucket { rounds: lsh.rounds },
            Mask::And(a, b) => Rule::And(vec![Rule::new(a, scene), Rule::new(b, scene)]),
            Mask::Or(a, b) => Rule::Or(vec![Rule::new(a, scene), Rule::new(b, scene)]),
            Mask::Not(a) => Rule::Not(Box::new(Rule::new(a, scene))),
        }
    }

    /// What a tile keeps.
    pub fn verdict(&self, scene: &Scene<'_>, at: &TileAt) -> Verdict {
        let (q, k) = (at.queries, at.keys);
        match self {
            Rule::All => Verdict::Full,
            Rule::Near { left, right } => {
                let (least, most) = (k.low - q.high, k.high - q.low);
                Verdict::of(most < -left || least > *right, least >= -left && most <= *right)
            }
            Rule::Lengths => {
                let length = scene.lengths.map_or(i64::MAX, |lengths| lengths[at.b] as i64);
                Verdict::of(k.low >= length, k.high < length)
            }
            Rule::Segments => match (at.natural, scene.segments) {
                (Some([i, rows, j, cols]), Some((queries, keys))) => {
                    let range = |of: &[i32]| of.iter().fold((i32::MAX, i32::MIN), |(a, b), &x| (a.min(x), b.max(x)));
                    let q = range(&queries[at.b * scene.n + i..][..rows]);
                    let k = range(&keys[at.b * scene.m + j..][..cols]);
                    Verdict::of(q.1 < k.0 || k.1 < q.0, q.0 == q.1 && q == k)
                }
                _ => Verdict::Partial,
            },
            Rule::Bits => match (at.natural, scene.bits) {
                (Some([i, rows, j, cols]), Some(bits)) => {
                    let (mut any, mut all) = (false, true);
                    // An axis of stride 0 repeats itself: one look is enough.
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
                _ => Verdict::Partial,
            },
            Rule::Residue { stride: 1 } => Verdict::Full,
            Rule::Residue { stride } => same_class(at, ClassOf::Stride(*stride)),
            Rule::Bucket { round } => same_class(at, ClassOf::Round(*round)),
            Rule::AnyBucket { .. } => Verdict::Partial,
            Rule::Around { reach } => match (at.natural, scene.center(at.b, at.h)) {
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
            Rule::SameBlock { size } => {
                let blocks = |e: Extent| (e.low.div_euclid(*size), e.high.div_euclid(*size));
                let (q, k) = (blocks(q), blocks(k));
                Verdict::of(q.1 < k.0 || k.1 < q.0, q.0 == q.1 && q == k)
            }
            Rule::Summary { stride, summary } => {
                let first = first_summary(k.low, *stride, *summary);
                let same_block = k.low.div_euclid(*stride) == k.high.div_euclid(*stride);
                Verdict::of(first > k.high, first == k.low && same_block || summary == stride)
            }
            Rule::OneOf { side, set } => {
                let extent = if *side == Side::Keys { k } else { q };
                let members = members(set, extent.low, extent.high).len() as i64;
                Verdict::of(members == 0, members == extent.high - extent.low + 1)
            }
            Rule::BigBird { pattern, .. } => {
                let size = clamp(pattern.block);
                let rows = q.low.div_euclid(size)..=q.high.div_euclid(size);
                let cols = k.low.div_euclid(size)..=k.high.div_euclid(size);
                self.over_blocks(at, rows, cols, |row, col| self.sees_block(row, col))
            }
            Rule::Blocks(blocks) => match at.natural {
                Some([i, rows, j, cols]) => {
                    let rows = (i / blocks.size) as i64..=((i + rows - 1) / blocks.size) as i64;
                    let cols = (j / blocks.size) as i64..=((j + cols - 1) / blocks.size) as i64;
                    self.over_blocks(at, rows, cols, |row, col| blocks.seen[row as usize][col as usize])
                }
                None => Verdict::Partial,
            },
            Rule::And(rules) => {
                let mut all = Verdict::Full;
                for rule in rules {
                    match rule.verdict(scene, at) {
                        Verdict::Empty => return Verdict::Empty,
                        Verdict::Partial => all = Verdict::Partial,
                        Verdict::Full => {}
                    }
                }
                all
            }
            Rule::Or(rules) => {
                let mut any = Verdict::Empty;
                for rule in rules {
                    match rule.verdict(scene, at) {
                        Verdict::Full => return Verdict::Full,
                        Verdict::Partial => any = Verdict::Partial,
                        Verdict::Empty => {}
                    }
                }
                any
            }
            Rule::Not(rule) => match rule.verdict(scene, at) {
                Verdict::Empty => Verdict::Full,
                Verdict::Partial => Verdict::Partial,
                Verdict::Full => Verdict::Empty,
            },
        }
    }

    /// A verdict from the pairs of pattern blocks that a tile touches, where these are not too many.
    fn over_blocks(
        &self,
        at: &TileAt,
        rows: std::ops::RangeInclusive<i64>,
        cols: std::ops::RangeInclusive<i64>,
        sees: impl Fn(i64, i64) -> bool,
    ) -> Verdict {
        let pairs = (rows.end() - rows.start() + 1).saturating_mul(cols.end() - cols.start() + 1);
        if at.natural.is_none() || pairs > PAIRS_LOOKED_AT as i64 {
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

    /// Whether BigBird's queries of block `row` see the keys of block `col`.
    fn sees_block(&self, row: i64, col: i64) -> bool {
        let Rule::BigBird { pattern, blocks, drawn } = self else { return false };
        let globals = clamp(pattern.globals);
        (row - col).abs() <= clamp(pattern.window / 2)
            || (0..globals).contains(&row)
            || col < globals
            || usize::try_from(row).is_ok_and(|row| match drawn.get(row) {
                Some(drawn) => drawn.binary_search(&(col as usize)).is_ok(),
                None => pattern.drawn(row, *blocks).contains(&(col as usize)),
            })
    }

    /// Where on one side something can be kept, given the other side of a tile: intervals of places or keys, ascending.
    pub fn spans(&self, scene: &Scene<'_>, b: usize, side: Side, other: Extent) -> Spans {
        match (self, side) {
            (Rule::Near { left, right }, Side::Keys) => Spans::one(other.low - left, other.high + right),
            (Rule::Near { left, right }, Side::Queries) => Spans::one(other.low - right, other.high + left),
            (Rule::Lengths, Side::Keys) => Spans::one(0, scene.lengths.map_or(FAR, |lengths| lengths[b] as i64 - 1)),
            (Rule::SameBlock { size }, _) => {
                let end = other.high.div_euclid(*size).saturating_add(1).saturating_mul(*size);
                Spans::one(other.low.div_euclid(*size).saturating_mul(*size), end.saturating_sub(1))
            }
            (Rule::OneOf { side: of, set }, side) if *of == side && set.len() <= FEW_POINTS => Spans::points(set),
            (Rule::OneOf { side: of, .. }, side) if *of == side => Spans::all(),
            (Rule::OneOf { set, .. }, _) if members(set, other.low, other.high).is_empty() => Spans::none(),
            (Rule::And(rules), side) => {
                let all = |spans: Spans, rule: &Rule| spans.intersect(&rule.spans(scene, b, side, other));
                rules.iter().fold(Spans::all(), all)
            }
            (Rule::Or(rules), side) => {
                let any = |spans: Spans, rule: &Rule| spans.union(rule.spans(scene, b, side, other));
                rules.iter().fold(Spans::none(), any)
            }
            _ => Spans::all(),
        }
    }

    /// The first and the last key that a query may see, by their natural indices, where it sees all between.
    #[inline]
    pub fn interval(&self, scene: &Scene<'_>, row: &RowAt) -> Option<(i64, i64)> {
        match self {
            Rule::All => Some((0, FAR)),
            Rule::Near { left, right } => Some((row.p - left, row.p.saturating_add(*right))),
            Rule::Lengths => Some((0, scene.lengths.map_or(FAR, |lengths| lengths[row.b] as i64 - 1))),
            Rule::SameBlock { size } => {
                let start = row.p.div_euclid(*size).saturating_mul(*size);
                Some((start, start.saturating_add(*size - 1)))
            }
            Rule::Around { reach } => Some(scene.center(row.b, row.h).map_or((0, FAR), |center| {
                let (center, reach) = (center(row.i), *reach as f64);
                ((center - reach).ceil() as i64, (center + reach).floor() as i64)
            })),
            Rule::And(rules) => common(rules, scene, row),
            _ => None,
        }
    }

    /// The bits of one row of a tile: which of its keys the query may see.
    pub fn bits(&self, scene: &Scene<'_>, row: &RowAt, keys: &TileKeys<'_>, bits: &mut Bits) {
        if let Some((low, high)) = self.interval(scene, row) {
            return keys.interval(bits, low, high);
        }
        self.scattered(scene, row, keys, bits);
    }

    /// The same where they are no interval.
    fn scattered(&self, scene: &Scene<'_>, row: &RowAt, keys: &TileKeys<'_>, bits: &mut Bits) {
        match self {
            Rule::All | Rule::Near { .. } | Rule::Lengths | Rule::SameBlock { .. } | Rule::Around { .. } => {
                unreachable!("intervals")
            }
            Rule::Segments => match scene.segments {
                Some((queries, of_keys)) => {
                    let (mine, of_keys) = (queries[row.b * scene.n + row.i], &of_keys[row.b * scene.m..]);
                    keys.each(bits, |j| of_keys[j] == mine);
                }
                None => keys.fill(bits, true),
            },
            Rule::Bits => match scene.bits {
                Some(of_pairs) => match of_pairs.row(row.b, row.h, row.i) {
                    Some(of_pairs) => keys.each(bits, |j| of_pairs[j] != 0),
                    None => keys.each(bits, |j| of_pairs.at(row.b, row.h, row.i, j) != 0),
                },
                None => keys.fill(bits, true),
            },
            Rule::Residue { stride } => {
                let mine = row.p.rem_euclid(*stride);
                match keys.of_class(ClassOf::Stride(*stride), mine as u32) {
                    Some(range) => *bits = bits_of(range),
                    None => keys.each(bits, |j| (j as i64).rem_euclid(*stride) == mine),
                }
            }
            Rule::Bucket { round } => match scene.buckets {
                Some((queries, of_keys)) => {
                    let mine = queries.at(row.b, row.h, row.i, *round);
                    let class = class_of_bucket(mine);
                    let head = row.h / scene.group;
                    match keys.of_class(ClassOf::Round(*round), class) {
                        Some(range) => *bits = bits_of(range),
                        None => keys.each(bits, |j| of_keys.at(row.b, head, j, *round) == mine),
                    }
                }
                None => keys.fill(bits, true),
            },
            Rule::AnyBucket { rounds } => {
                keys.each(bits, |j| (0..*rounds).any(|round| scene.share_bucket(row.b, row.h, row.i, j, round)))
            }
            Rule::Summary { stride, summary } => {
                keys.each(bits, |j| (j as i64).rem_euclid(*stride) >= stride - summary)
            }
            Rule::OneOf { side: Side::Queries, set } => keys.fill(bits, set.binary_search(&row.p).is_ok()),
            Rule::OneOf { set, .. } => match keys.natural() {
                Some(start) => {
                    keys.fill(bits, false);
                    for j in members(set, start as i64, (start + keys.len) as i64 - 1) {
                        let at = *j as usize - start;
                        bits[at / 64] |= 1 << (at % 64);
                    }
                }
                None => keys.each(bits, |j| set.binary_search(&(j as i64)).is_ok()),
            },
            Rule::BigBird { pattern, .. } => {
                let block = row.p.div_euclid(clamp(pattern.block));
                keys.each_block(bits, pattern.block, |col| self.sees_block(block, col as i64));
            }
            Rule::Blocks(blocks) => {
                let seen = &blocks.seen[row.i / blocks.size];
                keys.each_block(bits, blocks.size, |col| seen[col]);
            }
            Rule::And(rules) => {
                keys.fill(bits, true);
                join(rules, scene, row, keys, bits, |a, b| a & b);
            }
            Rule::Or(rules) => {
                keys.fill(bits, false);
                join(rules, scene, row, keys, bits, |a, b| a | b);
            }
            Rule::Not(rule) => {
                let mut inner = Bits::default();
                rule.bits(scene, row, keys, &mut inner);
                keys.fill(bits, true);
                for (bits, inner) in bits.iter_mut().zip(inner) {
                    *bits &= !inner;
                }
            }
        }
    }
}

/// The class of a hash bucket. Any integer can be one: flipping the sign bit makes the order of buckets that of classes.
pub(crate) fn class_of_bucket(bucket: i32) -> u32 {
    bucket as u32 ^ (1 << 31)
}

/// Whether the classes of a tile's two sides meet, where both are ordered by them.
fn same_class(at: &TileAt, of: ClassOf) -> Verdict {
    match (at.queries.classes, at.keys.classes) {
        (Some(q), Some(k)) if q.of == of && k.of == of => {
            Verdict::of(q.high < k.low || k.high < q.low, q.low == q.high && q == k)
        }
        _ => Verdict::Partial,
    }
}

/// What the intervals of all rules have in common, where they are intervals.
fn common(rules: &[Rule], scene: &Scene<'_>, row: &RowAt) -> Option<(i64, i64)> {
    rules.iter().try_fold((0, FAR), |(low, high), rule| {
        let (from, to) = rule.interval(scene, row)?;
        Some((low.max(from), high.min(to)))
    })
}

fn join(
    rules: &[Rule],
    scene: &Scene<'_>,
    row: &RowAt,
    keys: &TileKeys<'_>,
    bits: &mut Bits,
    f: impl Fn(u64, u64) -> u64,
) {
    for rule in rules {
        let mut inner = Bits::default();
        rule.bits(scene, row, keys, &mut inner);
        for (bits, inner) in bits.iter_mut().zip(inner) {
            *bits = f(*bits, inner);
        }
    }
}

/// The first key at or after `from` that everyone sees.
fn first_summary(from: i64, stride: i64, summary: i64) -> i64 {
    let short = stride - summary - from.rem_euclid(stride);
    if short > 0 { from.saturating_add(short) } else { from }
}

/// Those of an ascending set between `low` and `high`.
fn members(set: &[i64], low: i64, high: i64) -> &[i64] {
    let start = set.partition_point(|&x| x < low);
    let end = set.partition_point(|&x| x <= high);
    &set[start..end.max(start)]
}

/// Disjoint intervals, both ends included, ascending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Spans(Vec<(i64, i64)>);

impl Spans {
    pub fn none() -> Spans {
        Spans(Vec::new())
    }

    fn all() -> Spans {
        Spans(vec![(-FAR, FAR)])
    }

    fn one(low: i64, high: i64) -> Spans {
        Spans(if low <= high { vec![(low, high)] } else { Vec::new() })
    }

    fn points(set: &[i64]) -> Spans {
        Spans(set.iter().map(|&x| (x, x)).collect())
    }

    fn intersect(&self, other: &Spans) -> Spans {
        let (mut a, mut b, mut out) = (0, 0, Vec::new());
        while let (Some(x), Some(y)) = (self.0.get(a), other.0.get(b)) {
            let (low, high) = (x.0.max(y.0), x.1.min(y.1));
            if low <= high {
                out.push((low, high));
            }
            if x.1 < y.1 { a += 1 } else { b += 1 }
        }
        Spans(out)
    }

    fn union(mut self, other: Spans) -> Spans {
        self.0.extend(other.0);
        self.0.sort_unstable();
        let mut out: Vec<(i64, i64)> = Vec::with_capacity(self.0.len());
        for (low, high) in self.0 {
            match out.last_mut() {
                Some(last) if low <= last.1.saturating_add(1) => last.1 = last.1.max(high),
                _ => out.push((low, high)),
            }
        }
        Spans(out)
    }

    /// How many whole numbers between 0 and `last` are inside.
    pub fn size(&self, last: i64) -> i64 {
        self.0.iter().map(|&(low, high)| (high.min(last) - low.max(0) + 1).max(0)).sum()
    }

    /// Whether anything between `low` and `high` is inside.
    pub fn touch(&self, low: i64, high: i64) -> bool {
        let next = self.0.partition_point(|span| span.1 < low);
        self.0.get(next).is_some_and(|span| span.0 <= high)
    }

    /// The blocks of `size` among `0 .. len`, none before `from`, that the intervals, moved by `shift`, touch: ascending,
    /// each once.
    pub fn blocks(self, shift: i64, len: usize, size: usize, from: usize) -> impl Iterator<Item = usize> {
        let mut next = from;
        let last = len as i64 - 1;
        self.0.into_iter().flat_map(move |(low, high)| {
            let (low, high) = (low.saturating_add(shift).max(0), high.saturating_add(shift).min(last));
            let end = if low > high { 0 } else { high as usize / size + 1 };
            let range = (low as usize / size).max(next)..end;
            next = next.max(end);
            range
        })
    }
}
