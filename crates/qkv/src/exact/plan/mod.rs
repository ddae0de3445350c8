//! Which tiles are touched, in which order of the sequence.
//!
//! A plan is a list of pieces that together keep every pair once. A piece has an order of the queries and of the keys in
//! which what it keeps lies together: the natural one, or a list. Tiles are looked at lazily, row by row or column by
//! column; one that keeps nothing is never touched.

pub(crate) mod order;
pub(crate) mod rule;

use crate::attention::Tiles;
use crate::exact::scores::RowAt;
use crate::mask::Scene;
use crate::place::Place;
use crate::problem::Problem;
use crate::tuning::{GATHER_FROM, GATHER_GAIN, KEYS, QUERIES};
use order::{List, Order, Places, TileKeys, by_class};
use qkv_simd::{Element, View};
use rule::{Bits, ClassOf, Extent, Rule, Side, Spans, TileAt, Verdict, class_of_bucket};
use std::ops::Range;

/// A part of what the mask keeps, in an order in which it lies together.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    pub queries: Order,
    pub keys: Order,
    rule: Rule,
    /// The key tiles that belong to this piece; all of them but where a cache is split.
    tiles: Range<usize>,
}

/// How a part of a mask wants the sequence ordered.
#[derive(Clone, Debug)]
enum Gather {
    Residue(i64),
    Bucket(usize),
    Only(Side, Vec<i64>),
}

impl Piece {
    fn natural(rule: Rule, n: usize, m: usize) -> Piece {
        Piece { queries: Order::Natural(n), keys: Order::Natural(m), rule, tiles: 0..m.div_ceil(KEYS) }
    }

    fn gathered(gather: Gather, rule: Rule, scene: &Scene<'_>) -> Piece {
        let (n, m) = (scene.n, scene.m);
        let (mut queries, mut keys) = (Order::Natural(n), Order::Natural(m));
        let place = |i: u32| scene.place(0, i as usize);
        match gather {
            Gather::Residue(stride) => {
                let of = ClassOf::Stride(stride);
                let query_class = |i: u32| place(i).rem_euclid(stride) as u32;
                let key_class = |j: u32| i64::from(j).rem_euclid(stride) as u32;
                queries = Order::List(List::by_class(n, QUERIES, place, (of, &query_class)));
                keys = Order::List(List::by_class(m, KEYS, i64::from, (of, &key_class)));
            }
            Gather::Bucket(round) => {
                let (of, Some((q, k))) = (ClassOf::Round(round), scene.buckets) else { unreachable!("checked") };
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
                let first = scene.place(0, 0);
                let list = list.iter().map(|&p| (p - first) as u32).collect();
                queries = Order::List(List::new(list, QUERIES, place, None));
            }
        }
        let tiles = 0..keys.len().div_ceil(KEYS);
        Piece { queries, keys, rule, tiles }
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

    fn query_extent(&self, scene: &Scene<'_>, b: usize, h: usize, tile: usize) -> Extent {
        match self.queries.list(b, h) {
            Some(list) => list.extents[tile],
            None => {
                let range = self.query_range(tile);
                let (low, high) = if scene.place == Place::Given {
                    let places = range.map(|i| scene.place(b, i));
                    places.fold((i64::MAX, i64::MIN), |(low, high), p| (low.min(p), high.max(p)))
                } else {
                    (scene.place(b, range.start), scene.place(b, range.end - 1))
                };
                Extent { low, high, classes: None }
            }
        }
    }

    fn key_extent(&self, scene: &Scene<'_>, b: usize, h: usize, tile: usize) -> Extent {
        let keys = self.tile_keys(b, h / scene.group, tile);
        match keys.list {
            Some(list) => list.extents[tile],
            None => Extent { low: keys.start as i64, high: (keys.start + keys.len - 1) as i64, classes: None },
        }
    }

    /// What a tile of the piece keeps. A tile that the spans of either side leave out is empty, so that rows and columns
    /// agree on which tiles there are: the backward pass counts on it.
    pub fn verdict(&self, scene: &Scene<'_>, b: usize, h: usize, query_tile: usize, key_tile: usize) -> Verdict {
        let natural = self.is_natural().then(|| {
            let (queries, keys) = (self.query_range(query_tile), self.tile_keys(b, 0, key_tile));
            [queries.start, queries.len(), keys.start, keys.len]
        });
        let (queries, keys) = (self.query_extent(scene, b, h, query_tile), self.key_extent(scene, b, h, key_tile));
        let verdict = self.rule.verdict(scene, &TileAt { b, h, queries, keys, natural });
        let touches = |side, of: Extent, other: Extent| self.rule.spans(scene, b, side, other).touch(of.low, of.high);
        match verdict {
            Verdict::Partial if !touches(Side::Keys, keys, queries) || !touches(Side::Queries, queries, keys) => {
                Verdict::Empty
            }
            verdict => verdict,
        }
    }

    /// What a tile of the natural order keeps for these rows, which follow one another.
    pub fn verdict_of_rows(&self, scene: &Scene<'_>, rows: &[RowAt], key_tile: usize) -> Verdict {
        let (low, high) = rows.iter().fold((i64::MAX, i64::MIN), |(low, high), row| (low.min(row.p), high.max(row.p)));
        let (b, h) = (rows[0].b, rows[0].h);
        let (queries, keys) = (Extent { low, high, classes: None }, self.tile_keys(b, h / scene.group, key_tile));
        let natural = Some([rows[0].i, rows.len(), keys.start, keys.len]);
        let at = TileAt { b, h, queries, keys: self.key_extent(scene, b, h, key_tile), natural };
        self.rule.verdict(scene, &at)
    }

    /// The tiles, none before key tile `from`, that the queries of a tile touch, ascending by key.
    pub fn row(
        &self,
        scene: &Scene<'_>,
        b: usize,
        h: usize,
        query_tile: usize,
        from: usize,
    ) -> impl Iterator<Item = (usize, Verdict)> {
        let extent = self.query_extent(scene, b, h, query_tile);
        let Range { start, end } = self.tiles;
        let (spans, tiles, m) = match self.keys.list(b, h / scene.group) {
            None => (self.rule.spans(scene, b, Side::Keys, extent), 0..0, self.keys.len()),
            Some(list) => (Spans::none(), by_class(&list.extents, extent, start..end), 0),
        };
        let natural = spans.blocks(0, m, KEYS, from.max(start)).take_while(move |&tile| tile < end);
        natural.chain(tiles.start.max(from)..tiles.end).filter_map(move |tile| {
            let verdict = self.verdict(scene, b, h, query_tile, tile);
            (verdict != Verdict::Empty).then_some((tile, verdict))
        })
    }

    /// The tiles of queries, those first that can see the most keys: a long task that starts last would be waited for.
    pub fn longest_first(&self, scene: &Scene<'_>) -> Vec<usize> {
        let keys_seen = |tile: &usize| {
            let extent = self.query_extent(scene, 0, 0, *tile);
            self.rule.spans(scene, 0, Side::Keys, extent).size(scene.m as i64)
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
        scene: &Scene<'_>,
        b: usize,
        h: usize,
        key_tile: usize,
    ) -> impl Iterator<Item = (usize, Verdict)> {
        let extent = self.key_extent(scene, b, h, key_tile);
        let all = 0..self.query_tiles();
        let (spans, tiles) = match self.queries.list(b, h) {
            None if scene.place != Place::Given && scene.n > 0 => {
                (self.rule.spans(scene, b, Side::Queries, extent), 0..0)
            }
            None => (Spans::none(), all),
            Some(list) => (Spans::none(), by_class(&list.extents, extent, all)),
        };
        let first = if scene.n > 0 { scene.place(b, 0) } else { 0 };
        spans.blocks(-first, scene.n, QUERIES, 0).chain(tiles).filter_map(move |tile| {
            let verdict = self.verdict(scene, b, h, tile, key_tile);
            (verdict != Verdict::Empty).then_some((tile, verdict))
        })
    }

    /// The bits of one row of a tile.
    pub fn bits(&self, scene: &Scene<'_>, row: &RowAt, keys: &TileKeys<'_>) -> Bits {
        let mut bits = Bits::default();
        self.rule.bits(scene, row, keys, &mut bits);
        bits
    }

    /// The places of a tile whose keys a query sees, where they follow each other.
    #[inline]
    pub fn seen(&self, scene: &Scene<'_>, row: &RowAt, keys: &TileKeys<'_>) -> Option<Range<usize>> {
        let (low, high) = self.rule.interval(scene, row)?;
        keys.between(low, high)
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

/// The pieces of a mask: disjoint, and together all that it keeps.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub pieces: Vec<Piece>,
}

impl Plan {
    /// Everything in the natural order.
    pub fn natural(rule: Rule, scene: &Scene<'_>) -> Plan {
        Plan { pieces: vec![Piece::natural(rule, scene.n, scene.m)] }
    }

    /// Everything in the natural order, but only the key tiles that hold some of `keys`.
    pub fn natural_over(rule: Rule, scene: &Scene<'_>, keys: &Range<usize>) -> Plan {
        let tiles = if keys.is_empty() { 0..0 } else { keys.start / KEYS..keys.end.div_ceil(KEYS) };
        Plan { pieces: vec![Piece { tiles, ..Piece::natural(rule, scene.n, scene.m) }] }
    }

    /// Scattered parts gathered, where that pays.
    pub fn new<T: Element>(problem: &Problem<'_, T>) -> Plan {
        let scene = &problem.scene;
        let rule = Rule::of(problem);
        let placed_alike = scene.place != Place::Given; // an order that differs by sequence is not worth its trouble
        if scene.m < GATHER_FROM || scene.n == 0 || scene.m.max(scene.n) > u32::MAX as usize || !placed_alike {
            return Plan::natural(rule, scene);
        }
        let mut pieces: Vec<Piece> = Vec::new();
        let mut earlier: Vec<Rule> = Vec::new();
        for Part { gather, rule, inside } in parts(rule, scene) {
            let not_earlier = earlier.iter().map(|rule| Rule::Not(Box::new(rule.clone())));
            let only_new = Rule::and(std::iter::once(inside).chain(not_earlier));
            pieces.push(match gather {
                None => Piece::natural(only_new, scene.n, scene.m),
                Some(gather) => Piece::gathered(gather, only_new, scene),
            });
            earlier.push(rule);
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

/// A part of a rule, and the order that it wants.
#[derive(Clone)]
struct Part {
    gather: Option<Gather>,
    /// What it keeps.
    rule: Rule,
    /// The same, among what is gathered.
    inside: Rule,
}

impl Part {
    fn natural(rule: Rule) -> Part {
        Part { gather: None, inside: rule.clone(), rule }
    }

    /// The list alone, if that touches far fewer tiles than the natural order does.
    fn listed(side: Side, list: Vec<i64>, rule: Rule, tile: usize) -> Part {
        let mut touched: Vec<i64> = list.iter().map(|at| at.div_euclid(tile as i64)).collect();
        touched.dedup();
        if list.len().div_ceil(tile) * GATHER_GAIN <= touched.len() {
            Part { gather: Some(Gather::Only(side, list)), rule, inside: Rule::All }
        } else {
            Part::natural(rule)
        }
    }
}

/// The parts of a rule: first what stays in the natural order, then what is to be gathered. They may overlap.
fn parts(rule: Rule, scene: &Scene<'_>) -> Vec<Part> {
    match rule {
        Rule::Residue { stride } if stride > 1 && stride <= scene.m as i64 => {
            vec![Part { gather: Some(Gather::Residue(stride)), inside: rule.clone(), rule }]
        }
        // A pair that meets in several rounds is kept by the first: each piece leaves out what earlier ones keep.
        Rule::AnyBucket { rounds } => {
            let part = |round| Part {
                gather: Some(Gather::Bucket(round)),
                rule: Rule::Bucket { round },
                inside: Rule::Bucket { round },
            };
            (0..rounds).map(part).collect()
        }
        Rule::Summary { stride, summary } => {
            let keys = (0..scene.m as i64).filter(|j| j.rem_euclid(stride) >= stride - summary).collect();
            vec![Part::listed(Side::Keys, keys, rule, KEYS)]
        }
        Rule::OneOf { side: Side::Keys, ref set } => {
            let keys = set.iter().copied().filter(|j| (0..scene.m as i64).contains(j)).collect();
            vec![Part::listed(Side::Keys, keys, rule, KEYS)]
        }
        Rule::OneOf { side: Side::Queries, ref set } => {
            let places = scene.place(0, 0)..=scene.place(0, scene.n - 1);
            let queries = set.iter().copied().filter(|p| places.contains(p)).collect();
            vec![Part::listed(Side::Queries, queries, rule, QUERIES)]
        }
        Rule::Or(rules) => {
            let all = rules.into_iter().flat_map(|rule| parts(rule, scene));
            let (natural, gathered): (Vec<Part>, Vec<Part>) = all.partition(|part| part.gather.is_none());
            let natural: Vec<Rule> = natural.into_iter().map(|part| part.rule).collect();
            let natural = (!natural.is_empty()).then(|| Part::natural(Rule::Or(natural)));
            natural.into_iter().chain(gathered).collect()
        }
        Rule::And(rules) => {
            let split: Vec<Vec<Part>> = rules.iter().map(|rule| parts(rule.clone(), scene)).collect();
            // The first that wants an order gets it; the others become filters.
            let Some(leader) = split.iter().position(|parts| parts.iter().any(|part| part.gather.is_some())) else {
                return vec![Part::natural(Rule::And(rules))];
            };
            let filtered = |part: &Part| {
                let others = rules.iter().enumerate().filter(|(at, _)| *at != leader).map(|(_, rule)| rule.clone());
                let with = |rule: &Rule| Rule::and(std::iter::once(rule.clone()).chain(others.clone()));
                Part { gather: part.gather.clone(), rule: with(&part.rule), inside: with(&part.inside) }
            };
            split[leader].iter().map(filtered).collect()
        }
        rule => vec![Part::natural(rule)],
    }
}

/// Counts the tiles that a problem leaves, in all sequences and heads.
pub(crate) fn tiles<T: Element>(problem: &Problem<'_, T>) -> Tiles {
    let plan = Plan::new(problem);
    let scene = &problem.scene;
    let heads = problem.b * problem.heads.query;
    let all = problem.n.div_ceil(QUERIES).saturating_mul(problem.m.div_ceil(KEYS)).saturating_mul(heads);
    let mut count = Tiles::default();
    for piece in &plan.pieces {
        for b in 0..problem.b {
            for h in 0..problem.heads.query {
                for tile in 0..piece.query_tiles() {
                    for (_, verdict) in piece.row(scene, b, h, tile, 0) {
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
    use crate::{Attention, BigBird, Blocks, Inputs, Mask, Tensor};
    use proptest::prelude::*;

    /// Every pair that the mask allows is kept by exactly one piece, no other is; a verdict agrees with the bits; rows and
    /// columns list the same tiles.
    fn holds(mask: &Mask, place: Place, n: usize, m: usize, positions: Option<&[i64]>) -> Result<(), TestCaseError> {
        let (q, k) = (Tensor::<f32, 4>::randn([1, 1, n, 1], 1), Tensor::<f32, 4>::randn([1, 1, m, 1], 2));
        let attention = Attention::dot().mask(mask.clone()).place(place);
        let mut inputs = Inputs::new(&q, &k, &k);
        if let Some(positions) = positions {
            inputs = inputs.positions(positions);
        }
        let problem = Problem::new(&attention, inputs).unwrap();
        let scene = &problem.scene;
        let plans = [Plan::new(&problem), Plan::natural(Rule::new(mask, scene), scene), Plan::new(&problem).split(256)];
        for plan in plans {
            let mut times = vec![0; n * m];
            for piece in &plan.pieces {
                let mut by_row: Vec<(usize, usize)> = Vec::new();
                for query_tile in 0..piece.query_tiles() {
                    let touched: Vec<_> = piece.row(scene, 0, 0, query_tile, 0).collect();
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
                            let bits = piece.bits(scene, &RowAt { b: 0, h: 0, i, p: scene.place(0, i) }, &keys);
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
                    piece.column(scene, 0, 0, key_tile).map(move |(query_tile, _)| (key_tile, query_tile))
                });
                by_row.sort_unstable();
                prop_assert_eq!(by_row, columns.collect::<Vec<_>>());
            }
            for i in 0..n {
                for j in 0..m {
                    let allowed = mask.allows(scene, 0, 0, i, j);
                    prop_assert_eq!(times[i * m + j], u8::from(allowed), "{:?} at ({}, {})", mask, i, j);
                }
            }
        }
        Ok(())
    }

    fn masks() -> impl Strategy<Value = Mask> {
        let leaf = prop_oneof![
            Just(Mask::causal()),
            (0usize..200, 0usize..200).prop_map(|(l, r)| Mask::window(l, r)),
            (1usize..90).prop_map(Mask::strided),
            (1usize..90).prop_flat_map(|s| (Just(s), 1..=s)).prop_map(|(s, c)| Mask::fixed(s, c)),
            (0usize..100, prop::collection::vec(0usize..500, 0..9)).prop_map(|(w, g)| Mask::longformer(w, g)),
            (1usize..90, 0usize..5, 0usize..3, 0usize..4).prop_map(|(block, window, globals, random)| {
                Mask::bigbird(BigBird { block, window, globals, random, seed: 9 })
            }),
            (40usize..90).prop_map(|size| {
                let seen = (0..20).map(|r| (0..20).map(|c| (r * 7 + c * 3) % 5 < 2).collect()).collect();
                Mask::blocks(Blocks { size, seen })
            }),
        ];
        leaf.prop_recursive(2, 5, 2, |inner| {
            prop_oneof![
                (inner.clone(), inner.clone()).prop_map(|(a, b)| a & b),
                (inner.clone(), inner.clone()).prop_map(|(a, b)| a | b),
                inner.prop_map(|a| !a),
            ]
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

        #[test]
        fn every_allowed_pair_is_kept_exactly_once(
            mask in masks(),
            place in prop_oneof![Just(Place::Start), Just(Place::End), (-300i64..300).prop_map(Place::Offset)],
            n in 500usize..600,
            m in 501usize..720,
        ) {
            holds(&mask, place, n, m, None)?;
        }

        #[test]
        fn given_places_are_kept_exactly_once(mask in masks(), seed in 0i64..1000) {
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
