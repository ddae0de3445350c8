//! The tile schedule: which tiles are visited, and in which order of the sequence.
//!
//! A plan is a list of pieces that together cover every allowed pair exactly once. Each piece has an order of the
//! queries and of the keys in which its pairs are dense: the natural order, or a gathered list. Verdicts are computed
//! lazily, row by row or column by column; empty tiles are never visited.

pub(crate) mod order;

use crate::attention::Tiles;
use crate::compiled::predicate::{Predicate, Side, class_of_bucket};
use crate::compiled::tile::{ClassOf, Extent, List, TileAt, TileKeys};
use crate::compiled::{Bits, Expr, Spans, Verdict};
use crate::mask::MaskData;
use crate::mask::RowAt;
use crate::place::Place;
use crate::problem::Problem;
use crate::tuning::{GATHER_FROM, GATHER_GAIN, KEYS, QUERIES};
use order::{Order, Places, by_class};
use qkv_simd::{Element, View};
use std::ops::Range;

/// A part of the allowed pairs, in an order in which they are dense.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    pub queries: Order,
    pub keys: Order,
    mask: Expr,
    /// The key tiles of this piece: all of them, unless decoding splits the cache.
    tiles: Range<usize>,
}

/// The order in which a part of a mask is dense.
#[derive(Clone, Debug)]
enum Gather {
    Residue(i64),
    Bucket(usize),
    Only(Side, Vec<i64>),
}

impl Piece {
    fn natural(mask: Expr, n: usize, m: usize) -> Piece {
        Piece { queries: Order::Natural(n), keys: Order::Natural(m), mask, tiles: 0..m.div_ceil(KEYS) }
    }

    fn gathered(gather: Gather, mask: Expr, mask_data: &MaskData<'_>) -> Piece {
        let (n, m) = (mask_data.n, mask_data.m);
        let (mut queries, mut keys) = (Order::Natural(n), Order::Natural(m));
        let place = |i: u32| mask_data.position(0, i as usize);
        match gather {
            Gather::Residue(stride) => {
                let of = ClassOf::Stride(stride);
                let query_class = |i: u32| place(i).rem_euclid(stride) as u32;
                let key_class = |j: u32| i64::from(j).rem_euclid(stride) as u32;
                queries = Order::List(List::by_class(n, QUERIES, place, (of, &query_class)));
                keys = Order::List(List::by_class(m, KEYS, i64::from, (of, &key_class)));
            }
            Gather::Bucket(round) => {
                let (of, Some((q, k))) = (ClassOf::Round(round), mask_data.buckets) else { unreachable!("checked") };
                let per_head = |buckets: View<'_, i32>, len, tile, place: &dyn Fn(u32) -> i64| {
                    let [batch, heads, ..] = buckets.shape();
                    let list = |at: usize| {
                        let class = |i: u32| class_of_bucket(buckets.at(at / heads, at % heads, i as usize, round));
                        List::by_class(len, tile, place, (of, &class))
                    };
                    Order::Heads { lists: (0..batch * heads).map(list).collect(), heads }
                };
                queries = per_head(q, n, QUERIES, &place);
                keys = per_head(k, m, KEYS, &i64::from);
            }
            Gather::Only(Side::Keys, list) => {
                keys = Order::List(List::new(list.iter().map(|&j| j as u32).collect(), KEYS, i64::from, None));
            }
            Gather::Only(Side::Queries, list) => {
                let first = mask_data.position(0, 0);
                let list = list.iter().map(|&p| (p - first) as u32).collect();
                queries = Order::List(List::new(list, QUERIES, place, None));
            }
        }
        let tiles = 0..keys.len().div_ceil(KEYS);
        Piece { queries, keys, mask, tiles }
    }

    /// Whether both sides are in their natural order.
    pub fn is_natural(&self) -> bool {
        self.queries.is_natural() && self.keys.is_natural()
    }

    pub fn query_tiles(&self) -> usize {
        self.queries.len().div_ceil(QUERIES)
    }

    pub fn key_tiles(&self) -> Range<usize> {
        self.tiles.clone()
    }

    /// The places, in the piece's order, of the queries of a tile.
    pub fn query_range(&self, tile: usize) -> Range<usize> {
        tile * QUERIES..((tile + 1) * QUERIES).min(self.queries.len())
    }

    /// The keys of a tile, of a key head.
    pub fn tile_keys(&self, b: usize, key_head: usize, tile: usize) -> TileKeys<'_> {
        let start = tile * KEYS;
        TileKeys { list: self.keys.list(b, key_head), start, len: KEYS.min(self.keys.len() - start) }
    }

    fn query_extent(&self, mask_data: &MaskData<'_>, b: usize, h: usize, tile: usize) -> Extent {
        match self.queries.list(b, h) {
            Some(list) => list.extents[tile],
            None => {
                let range = self.query_range(tile);
                let (low, high) = if mask_data.place == Place::Given {
                    let places = range.map(|i| mask_data.position(b, i));
                    places.fold((i64::MAX, i64::MIN), |(low, high), p| (low.min(p), high.max(p)))
                } else {
                    (mask_data.position(b, range.start), mask_data.position(b, range.end - 1))
                };
                Extent { low, high, classes: None }
            }
        }
    }

    fn key_extent(&self, mask_data: &MaskData<'_>, b: usize, h: usize, tile: usize) -> Extent {
        let keys = self.tile_keys(b, h / mask_data.group, tile);
        match keys.list {
            Some(list) => list.extents[tile],
            None => Extent { low: keys.start as i64, high: (keys.start + keys.len - 1) as i64, classes: None },
        }
    }

    /// The verdict of a tile of the piece. A tile outside the spans of either side is empty, so that rows and columns
    /// agree on which tiles are visited: the backward pass relies on it.
    pub fn verdict(&self, mask_data: &MaskData<'_>, b: usize, h: usize, query_tile: usize, key_tile: usize) -> Verdict {
        let natural = self.is_natural().then(|| {
            let (queries, keys) = (self.query_range(query_tile), self.tile_keys(b, 0, key_tile));
            [queries.start, queries.len(), keys.start, keys.len]
        });
        let (queries, keys) =
            (self.query_extent(mask_data, b, h, query_tile), self.key_extent(mask_data, b, h, key_tile));
        let verdict = self.mask.verdict(mask_data, &TileAt { b, h, queries, keys, natural });
        let touches =
            |side, of: Extent, other: Extent| self.mask.spans(mask_data, b, side, other).touch(of.low, of.high);
        match verdict {
            Verdict::Partial if !touches(Side::Keys, keys, queries) || !touches(Side::Queries, queries, keys) => {
                Verdict::Empty
            }
            verdict => verdict,
        }
    }

    /// The verdict of a tile in natural order for these consecutive rows.
    pub fn verdict_of_rows(&self, mask_data: &MaskData<'_>, rows: &[RowAt], key_tile: usize) -> Verdict {
        let (low, high) = rows.iter().fold((i64::MAX, i64::MIN), |(low, high), row| (low.min(row.p), high.max(row.p)));
        let (b, h) = (rows[0].b, rows[0].h);
        let (queries, keys) = (Extent { low, high, classes: None }, self.tile_keys(b, h / mask_data.group, key_tile));
        let natural = Some([rows[0].i, rows.len(), keys.start, keys.len]);
        let at = TileAt { b, h, queries, keys: self.key_extent(mask_data, b, h, key_tile), natural };
        self.mask.verdict(mask_data, &at)
    }

    /// The tiles that the queries of a tile touch, from key tile `from` on, ascending by key.
    pub fn row(
        &self,
        mask_data: &MaskData<'_>,
        b: usize,
        h: usize,
        query_tile: usize,
        from: usize,
    ) -> impl Iterator<Item = (usize, Verdict)> {
        let extent = self.query_extent(mask_data, b, h, query_tile);
        let Range { start, end } = self.tiles;
        let (spans, tiles, m) = match self.keys.list(b, h / mask_data.group) {
            None => (self.mask.spans(mask_data, b, Side::Keys, extent), 0..0, self.keys.len()),
            Some(list) => (Spans::none(), by_class(&list.extents, extent, start..end), 0),
        };
        let natural = spans.blocks(0, m, KEYS, from.max(start)).take_while(move |&tile| tile < end);
        natural.chain(tiles.start.max(from)..tiles.end).filter_map(move |tile| {
            let verdict = self.verdict(mask_data, b, h, query_tile, tile);
            (verdict != Verdict::Empty).then_some((tile, verdict))
        })
    }

    /// The query tiles, with those that can see the most keys first: all would wait for a long task that starts last.
    pub fn longest_first(&self, mask_data: &MaskData<'_>) -> Vec<usize> {
        let keys_seen = |tile: &usize| {
            let extent = self.query_extent(mask_data, 0, 0, *tile);
            self.mask.spans(mask_data, 0, Side::Keys, extent).size(mask_data.m as i64)
        };
        let mut tiles: Vec<usize> = (0..self.query_tiles()).collect();
        if self.keys.is_natural() {
            tiles.sort_by_cached_key(|tile| -keys_seen(tile));
        }
        tiles
    }

    /// The tiles that the keys of a tile touch, ascending by query.
    pub fn column(
        &self,
        mask_data: &MaskData<'_>,
        b: usize,
        h: usize,
        key_tile: usize,
    ) -> impl Iterator<Item = (usize, Verdict)> {
        let extent = self.key_extent(mask_data, b, h, key_tile);
        let all = 0..self.query_tiles();
        let (spans, tiles) = match self.queries.list(b, h) {
            None if mask_data.place != Place::Given && mask_data.n > 0 => {
                (self.mask.spans(mask_data, b, Side::Queries, extent), 0..0)
            }
            None => (Spans::none(), all),
            Some(list) => (Spans::none(), by_class(&list.extents, extent, all)),
        };
        let first = if mask_data.n > 0 { mask_data.position(b, 0) } else { 0 };
        spans.blocks(-first, mask_data.n, QUERIES, 0).chain(tiles).filter_map(move |tile| {
            let verdict = self.verdict(mask_data, b, h, tile, key_tile);
            (verdict != Verdict::Empty).then_some((tile, verdict))
        })
    }

    /// The bits of one row of a tile.
    pub fn bits(&self, mask_data: &MaskData<'_>, row: &RowAt, keys: &TileKeys<'_>) -> Bits {
        let mut bits = Bits::default();
        self.mask.bits(mask_data, row, keys, &mut bits);
        bits
    }

    /// The places in a tile whose keys a query sees, if they are consecutive.
    #[inline]
    pub fn seen(&self, mask_data: &MaskData<'_>, row: &RowAt, keys: &TileKeys<'_>) -> Option<Range<usize>> {
        let (low, high) = self.mask.interval(mask_data, row)?;
        keys.between(low, high)
    }

    /// The first and last key of a row by natural index, if it sees one interval.
    pub fn interval(&self, mask_data: &MaskData<'_>, row: &RowAt) -> Option<(i64, i64)> {
        self.mask.interval(mask_data, row)
    }

    /// For each query in its natural order, its place in this piece.
    pub fn places_of_queries(&self, n: usize) -> Places {
        Places::new(&self.queries, n)
    }

    /// For each key in its natural order, its place in this piece.
    pub fn places_of_keys(&self, m: usize) -> Places {
        match &self.keys {
            Order::Natural(m) => Places::Range(self.tiles.start * KEYS..(self.tiles.end * KEYS).min(*m)),
            order => Places::new(order, m),
        }
    }
}

/// The pieces of a mask: disjoint, and together all allowed pairs.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub pieces: Vec<Piece>,
}

impl Plan {
    /// The whole mask in the natural order.
    pub fn natural(mask: Expr, mask_data: &MaskData<'_>) -> Plan {
        Plan { pieces: vec![Piece::natural(mask, mask_data.n, mask_data.m)] }
    }

    /// The whole mask in the natural order, but only the key tiles that hold some of `keys`.
    pub fn natural_over(mask: Expr, mask_data: &MaskData<'_>, keys: &Range<usize>) -> Plan {
        let tiles = if keys.is_empty() { 0..0 } else { keys.start / KEYS..keys.end.div_ceil(KEYS) };
        Plan { pieces: vec![Piece { tiles, ..Piece::natural(mask, mask_data.n, mask_data.m) }] }
    }

    /// Gathers scattered parts of the mask where that saves tiles.
    pub fn new<T: Element>(problem: &Problem<'_, T>) -> Plan {
        let mask_data = &problem.mask_data;
        let mask = Expr::of(problem);
        // Given positions differ between sequences; an order per sequence would cost more than it saves.
        let one_order = mask_data.place != Place::Given;
        if mask_data.m < GATHER_FROM
            || mask_data.n == 0
            || mask_data.m.max(mask_data.n) > u32::MAX as usize
            || !one_order
        {
            return Plan::natural(mask, mask_data);
        }
        let mut pieces: Vec<Piece> = Vec::new();
        let mut earlier: Vec<Expr> = Vec::new();
        for Part { gather, mask, inside } in parts(mask, mask_data) {
            let not_earlier = earlier.iter().map(|mask| Expr::Not(Box::new(mask.clone())));
            let only_new = Expr::and(std::iter::once(inside).chain(not_earlier));
            pieces.push(match gather {
                None => Piece::natural(only_new, mask_data.n, mask_data.m),
                Some(gather) => Piece::gathered(gather, only_new, mask_data),
            });
            earlier.push(mask);
        }
        Plan { pieces }
    }

    /// The only piece of the plan, cut into pieces of `size` keys. A plan of several pieces is left as it is.
    pub fn split(mut self, size: usize) -> Plan {
        if let [piece] = &self.pieces[..] {
            let (per, tiles) = (size / KEYS, piece.key_tiles().end);
            let cut = |at: usize| Piece { tiles: at * per..((at + 1) * per).min(tiles), ..piece.clone() };
            if tiles > per {
                self.pieces = (0..tiles.div_ceil(per)).map(cut).collect();
            }
        }
        self
    }
}

/// A part of a mask, and the order in which it is dense.
#[derive(Clone)]
struct Part {
    gather: Option<Gather>,
    /// The pairs that it allows.
    mask: Expr,
    /// The same, for pairs that are gathered.
    inside: Expr,
}

impl Part {
    fn natural(mask: Expr) -> Part {
        Part { gather: None, inside: mask.clone(), mask }
    }

    /// Only the listed positions, if they then touch far fewer tiles than in the natural order.
    fn listed(side: Side, list: Vec<i64>, mask: Expr, tile: usize) -> Part {
        let mut touched: Vec<i64> = list.iter().map(|at| at.div_euclid(tile as i64)).collect();
        touched.dedup();
        if list.len().div_ceil(tile) * GATHER_GAIN <= touched.len() {
            Part { gather: Some(Gather::Only(side, list)), mask, inside: Expr::All }
        } else {
            Part::natural(mask)
        }
    }
}

/// The parts of a mask: first those in natural order, then those to be gathered. They may overlap.
fn parts(mask: Expr, mask_data: &MaskData<'_>) -> Vec<Part> {
    match mask {
        Expr::Leaf(predicate) => predicate_parts(predicate, mask_data),
        Expr::Or(masks) => {
            let all = masks.into_iter().flat_map(|mask| parts(mask, mask_data));
            let (natural, gathered): (Vec<Part>, Vec<Part>) = all.partition(|part| part.gather.is_none());
            let natural: Vec<Expr> = natural.into_iter().map(|part| part.mask).collect();
            let natural = (!natural.is_empty()).then(|| Part::natural(Expr::Or(natural)));
            natural.into_iter().chain(gathered).collect()
        }
        Expr::And(masks) => {
            let split: Vec<Vec<Part>> = masks.iter().map(|mask| parts(mask.clone(), mask_data)).collect();
            // The first operand to be gathered sets the order; the others filter.
            let Some(leader) = split.iter().position(|parts| parts.iter().any(|part| part.gather.is_some())) else {
                return vec![Part::natural(Expr::And(masks))];
            };
            let filtered = |part: &Part| {
                let others = masks.iter().enumerate().filter(|(at, _)| *at != leader).map(|(_, mask)| mask.clone());
                let with = |mask: &Expr| Expr::and(std::iter::once(mask.clone()).chain(others.clone()));
                Part { gather: part.gather.clone(), mask: with(&part.mask), inside: with(&part.inside) }
            };
            split[leader].iter().map(filtered).collect()
        }
        mask => vec![Part::natural(mask)],
    }
}

/// The parts of one predicate.
fn predicate_parts(predicate: Predicate, mask_data: &MaskData<'_>) -> Vec<Part> {
    let mask = || Expr::Leaf(predicate.clone());
    match &predicate {
        &Predicate::Residue { stride } if stride > 1 && stride <= mask_data.m as i64 => {
            vec![Part { gather: Some(Gather::Residue(stride)), inside: mask(), mask: mask() }]
        }
        // A pair that shares a bucket in several rounds belongs to the first: each piece leaves out the earlier ones.
        &Predicate::AnyBucket { rounds } => {
            let part = |round| {
                let bucket = Expr::Leaf(Predicate::Bucket { round });
                Part { gather: Some(Gather::Bucket(round)), mask: bucket.clone(), inside: bucket }
            };
            (0..rounds).map(part).collect()
        }
        &Predicate::Summary { stride, summary } => {
            let keys = (0..mask_data.m as i64).filter(|j| j.rem_euclid(stride) >= stride - summary).collect();
            vec![Part::listed(Side::Keys, keys, mask(), KEYS)]
        }
        Predicate::OneOf { side: Side::Keys, set } => {
            let keys = set.iter().copied().filter(|j| (0..mask_data.m as i64).contains(j)).collect();
            vec![Part::listed(Side::Keys, keys, mask(), KEYS)]
        }
        Predicate::OneOf { side: Side::Queries, set } => {
            let positions = mask_data.position(0, 0)..=mask_data.position(0, mask_data.n - 1);
            let queries = set.iter().copied().filter(|p| positions.contains(p)).collect();
            vec![Part::listed(Side::Queries, queries, mask(), QUERIES)]
        }
        _ => vec![Part::natural(mask())],
    }
}

/// Counts the tiles of a problem by verdict, over all sequences and heads.
pub(crate) fn tiles<T: Element>(problem: &Problem<'_, T>) -> Tiles {
    let plan = Plan::new(problem);
    let mask_data = &problem.mask_data;
    let heads = problem.b * problem.heads.query;
    let all = problem.n.div_ceil(QUERIES).saturating_mul(problem.m.div_ceil(KEYS)).saturating_mul(heads);
    let mut count = Tiles::default();
    for piece in &plan.pieces {
        for b in 0..problem.b {
            for h in 0..problem.heads.query {
                for tile in 0..piece.query_tiles() {
                    for (_, verdict) in piece.row(mask_data, b, h, tile, 0) {
                        if verdict == Verdict::Full { count.full += 1 } else { count.partial += 1 }
                    }
                }
            }
        }
    }
    count.empty = all.saturating_sub(count.partial + count.full);
    count
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mask::arbitrary;
    use crate::{Attention, Inputs, Mask, Tensor};
    use proptest::prelude::*;

    /// Every pair that the mask allows is kept by exactly one piece, and no other pair is; verdicts agree with the
    /// bits; rows and columns list the same tiles.
    fn holds(mask: &Mask, place: Place, n: usize, m: usize, positions: Option<&[i64]>) -> Result<(), TestCaseError> {
        let (q, k) = (Tensor::<f32, 4>::randn([1, 1, n, 1], 1), Tensor::<f32, 4>::randn([1, 1, m, 1], 2));
        let attention = Attention::dot().mask(mask.clone()).place(place);
        let mut inputs = Inputs::new(&q, &k, &k);
        if let Some(positions) = positions {
            inputs = inputs.positions(positions);
        }
        let problem = Problem::new(&attention, inputs).unwrap();
        let mask_data = &problem.mask_data;
        let plans = [Plan::new(&problem), Plan::natural(Expr::of(&problem), mask_data), Plan::new(&problem).split(256)];
        for plan in plans {
            let mut times = vec![0; n * m];
            for piece in &plan.pieces {
                let mut by_row: Vec<(usize, usize)> = Vec::new();
                for query_tile in 0..piece.query_tiles() {
                    let touched: Vec<_> = piece.row(mask_data, 0, 0, query_tile, 0).collect();
                    prop_assert!(touched.is_sorted_by(|a, b| a.0 < b.0));
                    for key_tile in piece.key_tiles() {
                        let keys = piece.tile_keys(0, 0, key_tile);
                        let verdict =
                            touched.iter().find(|(tile, _)| *tile == key_tile).map_or(Verdict::Empty, |t| t.1);
                        if verdict != Verdict::Empty {
                            by_row.push((key_tile, query_tile));
                        }
                        for at in piece.query_range(query_tile) {
                            let i = piece.queries.index(0, 0, at);
                            let bits =
                                piece.bits(mask_data, &RowAt { b: 0, h: 0, i, p: mask_data.position(0, i) }, &keys);
                            for at in 0..keys.len {
                                let bit = bits[at / 64] >> (at % 64) & 1 == 1;
                                prop_assert!(verdict != Verdict::Empty || !bit, "an empty tile keeps a pair");
                                prop_assert!(verdict != Verdict::Full || bit, "a full tile leaves one out");
                                times[i * m + keys.index(at)] += u8::from(bit);
                            }
                        }
                    }
                }
                let columns = piece.key_tiles().flat_map(|key_tile| {
                    piece.column(mask_data, 0, 0, key_tile).map(move |(query_tile, _)| (key_tile, query_tile))
                });
                by_row.sort_unstable();
                prop_assert_eq!(by_row, columns.collect::<Vec<_>>());
            }
            for i in 0..n {
                for j in 0..m {
                    let allowed = mask.allows_pair(mask_data, 0, 0, i, j);
                    prop_assert_eq!(times[i * m + j], u8::from(allowed), "{:?} at ({}, {})", mask, i, j);
                }
            }
        }
        Ok(())
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

        #[test]
        fn every_allowed_pair_is_kept_exactly_once(
            mask in arbitrary::masks(),
            place in arbitrary::places(),
            n in 500usize..600,
            m in 501usize..720,
        ) {
            holds(&mask, place, n, m, None)?;
        }

        #[test]
        fn given_places_are_kept_exactly_once(mask in arbitrary::masks(), seed in 0i64..1000) {
            let positions: Vec<i64> = (0..130).map(|i| (i * 37 + seed) % 700 - 60).collect();
            holds(&mask, Place::Given, 130, 520, Some(&positions))?;
        }
    }

    #[test]
    fn what_lies_scattered_is_gathered() {
        let x = Tensor::<f32, 4>::randn([1, 1, 4096, 1], 1);
        let tiles = |mask: Mask| Attention::dot().mask(mask).tiles(Inputs::new(&x, &x, &x)).unwrap();
        let kept = |mask: Mask| {
            let tiles = tiles(mask);
            tiles.partial + tiles.full
        };
        let all = kept(Mask::full());
        assert_eq!(all, 64 * 32);
        assert_eq!(tiles(Mask::causal()).empty, (0..64).map(|r| 32 - r / 2 - 1).sum::<usize>());
        assert!(kept(Mask::strided(64)) < all / 6, "{}", kept(Mask::strided(64)));
        assert!(kept(Mask::fixed(64, 2)) < all / 10, "{}", kept(Mask::fixed(64, 2)));
        assert!(kept(Mask::longformer(32, (0..4096).step_by(300))) < all / 8);
        assert!(kept(Mask::causal() & !Mask::causal()) <= 64, "only where the diagonal makes both sides partial");
    }
}
