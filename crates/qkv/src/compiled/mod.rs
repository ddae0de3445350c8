//! A mask, compiled: the one form that every engine reads.
//!
//! [`Mask::allows`] defines what a mask means, one pair at a time. A [`CompiledMask`] means the same for a given number
//! of queries and keys, as an expression over a dozen simple predicates. It answers for whole tiles (empty, partial,
//! full), and it is compiled once per call:
//!
//! - the CPU engine visits the tiles that are not empty and masks the partial ones row by row, an interval at a time;
//! - linear attention needs every query to see a prefix of its sequence, and uses [`CompiledMask::band`];
//! - GPU kernels run it as a postfix program, [`CompiledMask::program`], whose opcodes come from one table.
//!
//! A new mask needs an arm of [`lower`], and nothing else here, if these predicates can express it; see
//! `docs/adding-a-mask.md`.

pub(crate) mod predicate;
mod program;
mod spans;
pub(crate) mod tile;

pub use self::program::{MAX_DRAWN, MAX_STEPS, MaskProgram, Opcode, Step, mask_constants};
pub(crate) use self::spans::Spans;

use self::predicate::{FAR, Predicate, Side};
use self::tile::{Extent, TileAt, TileKeys};
use crate::mask::RowAt;
use crate::mask::{Mask, MaskData, clamp};
use crate::place::Place;
use crate::problem::Problem;
use crate::tuning::KEYS;
use qkv_simd::Element;
use std::ops::Range;

/// The bits of one row of a tile.
pub(crate) type Bits = [u64; KEYS / 64];

/// What a mask allows within a tile. Verdicts are sound: *partial* may turn out empty or full, never the reverse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Verdict {
    /// No pair.
    Empty = 0,
    /// Some pairs.
    Partial = 1,
    /// Every pair.
    Full = 2,
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

/// Lowers a mask to predicates, for `m` keys: one arm per mask.
fn lower(mask: &Mask, m: usize) -> Expr {
    let band = |left, right| Expr::Leaf(Predicate::Band { left, right });
    match mask {
        Mask::Full => Expr::All,
        Mask::Causal => band(FAR, 0),
        Mask::Lengths => Expr::Leaf(Predicate::Lengths),
        Mask::Segments => Expr::Leaf(Predicate::Segments),
        Mask::Bits => Expr::Leaf(Predicate::Bits),
        Mask::Window { left, right } => band(clamp(*left), clamp(*right)),
        Mask::Dilated { window, step } => {
            let (half, step) = (clamp(*window / 2), clamp(*step));
            let reach = half.saturating_mul(step).min(FAR);
            Expr::And(vec![band(reach, reach), Expr::Leaf(Predicate::Residue { stride: step })])
        }
        Mask::Strided { stride } => {
            let stride = clamp(*stride);
            Expr::Or(vec![band(stride - 1, stride - 1), Expr::Leaf(Predicate::Residue { stride })])
        }
        Mask::Fixed { stride, summary } => {
            let (stride, summary) = (clamp(*stride), clamp(*summary));
            let same_block = Predicate::SameBlock { size: stride };
            Expr::Or(vec![Expr::Leaf(same_block), Expr::Leaf(Predicate::Summary { stride, summary })])
        }
        Mask::Longformer { window, globals } => {
            let set: Vec<i64> = globals.iter().map(|&at| clamp(at)).collect();
            let one_of = |side| Expr::Leaf(Predicate::OneOf { side, set: set.clone() });
            let half = clamp(window / 2);
            Expr::Or(vec![band(half, half), one_of(Side::Keys), one_of(Side::Queries)])
        }
        Mask::BigBird(pattern) => {
            // Queries usually stand among the keys; for one that does not, `sees_block` draws again.
            let blocks = m.div_ceil(pattern.block.max(1));
            let drawn = (0..blocks).map(|row| pattern.drawn(row, blocks)).collect();
            Expr::Leaf(Predicate::BigBird { pattern: *pattern, blocks, drawn })
        }
        Mask::Blocks(blocks) => Expr::Leaf(Predicate::Blocks(blocks.clone())),
        Mask::Lsh(lsh) => Expr::Leaf(Predicate::AnyBucket { rounds: lsh.rounds }),
        Mask::And(a, b) => Expr::And(vec![lower(a, m), lower(b, m)]),
        Mask::Or(a, b) => Expr::Or(vec![lower(a, m), lower(b, m)]),
        Mask::Not(a) => Expr::Not(Box::new(lower(a, m))),
    }
}

/// A mask compiled for a number of queries and keys.
///
/// ```
/// use qkv::engine::{CompiledMask, Verdict};
/// use qkv::{Mask, Place};
/// let compiled = CompiledMask::new(&(Mask::causal() & Mask::window(128, 0)), 1024, 1024, Place::Start);
/// assert_eq!(compiled.classify(512..576, 0..128), Verdict::Empty);
/// assert_eq!(compiled.classify(512..576, 448..512), Verdict::Full);
/// assert_eq!(compiled.classify(512..576, 512..640), Verdict::Partial);
/// assert_eq!(compiled.program()?.steps.len(), 3); // band, band, and
/// # Ok::<(), qkv::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct CompiledMask {
    expr: Expr,
    n: usize,
    m: usize,
    place: Place,
}

/// A mask that is a band, padding, segments, or an `&` of these: queries see one interval of each sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Band {
    /// Whether the positions matter at all.
    pub limited: bool,
    /// The keys before the query's position that it sees; [`Band::UNLIMITED`] without a limit.
    pub left: i64,
    /// The keys after the query's position that it sees.
    pub right: i64,
    /// Whether keys end at the length of their sequence.
    pub lengths: bool,
    /// Whether query and key must be of the same segment.
    pub segments: bool,
}

impl Band {
    /// Farther than any key.
    pub const UNLIMITED: i64 = FAR;

    const ALL: Band = Band { limited: false, left: FAR, right: FAR, lengths: false, segments: false };
}

impl CompiledMask {
    /// Compiles a mask for `n` queries that stand at `place` among `m` keys. The mask must fit these sizes, which
    /// [`Problem`] checks.
    pub fn new(mask: &Mask, n: usize, m: usize, place: Place) -> CompiledMask {
        CompiledMask { expr: lower(mask, m), n, m, place }
    }

    /// Whether every pair is allowed.
    pub fn allows_all(&self) -> bool {
        self.expr == Expr::All
    }

    /// Whether it depends on data of the call (lengths, segments, bits, buckets) besides positions.
    pub fn needs_data(&self) -> bool {
        self.expr.needs_data()
    }

    /// Whether it depends on segments.
    pub fn needs_segments(&self) -> bool {
        self.expr.any(&|predicate| *predicate == Predicate::Segments)
    }

    /// The verdict of a tile, for a mask that depends only on positions; for others it is partial.
    pub fn classify(&self, queries: Range<usize>, keys: Range<usize>) -> Verdict {
        if queries.is_empty() || keys.is_empty() {
            return Verdict::Empty;
        }
        if self.place == Place::Given || self.needs_data() {
            return if self.allows_all() { Verdict::Full } else { Verdict::Partial };
        }
        let data = MaskData::new(self.n, self.m).place(self.place);
        let extent = |low, high| Extent { low, high, classes: None };
        let at = TileAt {
            b: 0,
            h: 0,
            queries: extent(data.position(0, queries.start), data.position(0, queries.end - 1)),
            keys: extent(keys.start as i64, keys.end as i64 - 1),
            natural: Some([queries.start, queries.len(), keys.start, keys.len()]),
        };
        self.expr.verdict(&data, &at)
    }

    /// The mask as a band, if it is an `&` of bands, lengths and segments.
    pub fn band(&self) -> Option<Band> {
        self.expr.conjuncts().into_iter().try_fold(Band::ALL, |band, conjunct| match conjunct {
            Expr::All => Some(band),
            Expr::Leaf(Predicate::Band { left, right }) => {
                Some(Band { limited: true, left: band.left.min(*left), right: band.right.min(*right), ..band })
            }
            Expr::Leaf(Predicate::Lengths) => Some(Band { lengths: true, ..band }),
            Expr::Leaf(Predicate::Segments) => Some(Band { segments: true, ..band }),
            _ => None,
        })
    }

    /// Whether padding is one of the conjuncts, and the rest of the mask, if the rest depends only on positions.
    pub fn without_lengths(&self) -> Option<(bool, CompiledMask)> {
        let (lengths, rest): (Vec<&Expr>, Vec<&Expr>) =
            self.expr.conjuncts().into_iter().partition(|conjunct| **conjunct == Expr::Leaf(Predicate::Lengths));
        let expr = Expr::and(rest.into_iter().cloned());
        (!expr.needs_data()).then_some((!lengths.is_empty(), CompiledMask { expr, ..*self }))
    }
}

/// An expression over predicates.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Expr {
    All,
    Leaf(Predicate),
    And(Vec<Expr>),
    Or(Vec<Expr>),
    Not(Box<Expr>),
}

impl Expr {
    /// The conjunction of these; a single one stays as it is.
    pub fn and(exprs: impl Iterator<Item = Expr>) -> Expr {
        let mut exprs: Vec<Expr> = exprs.filter(|expr| *expr != Expr::All).collect();
        match exprs.len() {
            0 => Expr::All,
            1 => exprs.remove(0),
            _ => Expr::And(exprs),
        }
    }

    /// The mask of a problem, and the windows of predicted centers.
    pub fn of<T: Element>(problem: &Problem<'_, T>) -> Expr {
        let around = problem.attention.local.map(|reach| Expr::Leaf(Predicate::Around { reach }));
        Expr::and(std::iter::once(lower(&problem.attention.mask, problem.m)).chain(around))
    }

    fn any(&self, of: &dyn Fn(&Predicate) -> bool) -> bool {
        match self {
            Expr::All => false,
            Expr::Leaf(predicate) => of(predicate),
            Expr::And(exprs) | Expr::Or(exprs) => exprs.iter().any(|expr| expr.any(of)),
            Expr::Not(expr) => expr.any(of),
        }
    }

    fn needs_data(&self) -> bool {
        self.any(&Predicate::needs_data)
    }

    /// The operands of nested `And`s, flat.
    fn conjuncts(&self) -> Vec<&Expr> {
        match self {
            Expr::And(exprs) => exprs.iter().flat_map(Expr::conjuncts).collect(),
            expr => vec![expr],
        }
    }

    /// What it allows within a tile.
    pub fn verdict(&self, data: &MaskData<'_>, at: &TileAt) -> Verdict {
        match self {
            Expr::All => Verdict::Full,
            Expr::Leaf(predicate) => predicate.verdict(data, at),
            Expr::And(exprs) => {
                let mut all = Verdict::Full;
                for expr in exprs {
                    match expr.verdict(data, at) {
                        Verdict::Empty => return Verdict::Empty,
                        Verdict::Partial => all = Verdict::Partial,
                        Verdict::Full => {}
                    }
                }
                all
            }
            Expr::Or(exprs) => {
                let mut any = Verdict::Empty;
                for expr in exprs {
                    match expr.verdict(data, at) {
                        Verdict::Full => return Verdict::Full,
                        Verdict::Partial => any = Verdict::Partial,
                        Verdict::Empty => {}
                    }
                }
                any
            }
            Expr::Not(expr) => match expr.verdict(data, at) {
                Verdict::Empty => Verdict::Full,
                Verdict::Partial => Verdict::Partial,
                Verdict::Full => Verdict::Empty,
            },
        }
    }

    /// The intervals of one side in which it can allow anything, given the other side of a tile.
    pub fn spans(&self, data: &MaskData<'_>, b: usize, side: Side, other: Extent) -> Spans {
        match self {
            Expr::Leaf(predicate) => predicate.spans(data, b, side, other),
            Expr::And(exprs) => {
                let all = |spans: Spans, expr: &Expr| spans.intersect(&expr.spans(data, b, side, other));
                exprs.iter().fold(Spans::all(), all)
            }
            Expr::Or(exprs) => {
                let any = |spans: Spans, expr: &Expr| spans.union(expr.spans(data, b, side, other));
                exprs.iter().fold(Spans::none(), any)
            }
            Expr::All | Expr::Not(_) => Spans::all(),
        }
    }

    /// The first and last key of a row by natural index, if the row is one interval.
    #[inline]
    pub fn interval(&self, data: &MaskData<'_>, row: &RowAt) -> Option<(i64, i64)> {
        match self {
            Expr::All => Some((0, FAR)),
            Expr::Leaf(predicate) => predicate.interval(data, row),
            Expr::And(exprs) => common_interval(exprs, data, row),
            Expr::Or(_) | Expr::Not(_) => None,
        }
    }

    /// The bits of one row of a tile: the keys that the query may see.
    pub fn bits(&self, data: &MaskData<'_>, row: &RowAt, keys: &TileKeys<'_>, bits: &mut Bits) {
        if let Some((low, high)) = self.interval(data, row) {
            return keys.interval(bits, low, high);
        }
        match self {
            Expr::All => unreachable!("every key is an interval"),
            Expr::Leaf(predicate) => predicate.scattered(data, row, keys, bits),
            Expr::And(exprs) => {
                keys.fill(bits, true);
                join(exprs, data, row, keys, bits, |a, b| a & b);
            }
            Expr::Or(exprs) => {
                keys.fill(bits, false);
                join(exprs, data, row, keys, bits, |a, b| a | b);
            }
            Expr::Not(expr) => {
                let mut inner = Bits::default();
                expr.bits(data, row, keys, &mut inner);
                keys.fill(bits, true);
                for (bits, inner) in bits.iter_mut().zip(inner) {
                    *bits &= !inner;
                }
            }
        }
    }
}

/// The intersection of all intervals, if each is an interval.
fn common_interval(exprs: &[Expr], data: &MaskData<'_>, row: &RowAt) -> Option<(i64, i64)> {
    exprs.iter().try_fold((0, FAR), |(low, high), expr| {
        let (from, to) = expr.interval(data, row)?;
        Some((low.max(from), high.min(to)))
    })
}

fn join(
    exprs: &[Expr],
    data: &MaskData<'_>,
    row: &RowAt,
    keys: &TileKeys<'_>,
    bits: &mut Bits,
    f: impl Fn(u64, u64) -> u64,
) {
    for expr in exprs {
        let mut inner = Bits::default();
        expr.bits(data, row, keys, &mut inner);
        for (bits, inner) in bits.iter_mut().zip(inner) {
            *bits = f(*bits, inner);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mask::arbitrary;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 80, ..ProptestConfig::default() })]

        #[test]
        fn verdicts_are_sound(
            mask in arbitrary::masks(),
            place in arbitrary::places(),
            n in 1usize..300,
            m in 1usize..300,
            size in 1usize..90,
        ) {
            let data = MaskData::new(n, m).place(place);
            let compiled = CompiledMask::new(&mask, n, m, place);
            for i in (0..n).step_by(size) {
                for j in (0..m).step_by(size) {
                    let (queries, keys) = (i..(i + size).min(n), j..(j + size).min(m));
                    let allowed = queries.clone().flat_map(|i| keys.clone().map(move |j| (i, j)))
                        .filter(|&(i, j)| mask.allows(i, j, &data).unwrap()).count();
                    match compiled.classify(queries.clone(), keys.clone()) {
                        Verdict::Empty => prop_assert_eq!(allowed, 0, "{:?} {:?} {:?}", mask, queries, keys),
                        Verdict::Full => prop_assert_eq!(allowed, queries.len() * keys.len(), "{:?}", mask),
                        Verdict::Partial => {}
                    }
                }
            }
        }

        #[test]
        fn verdicts_of_bands_are_exact(
            left in 0usize..200, right in 0usize..200, place in arbitrary::places(), causal in any::<bool>(),
            i in 0usize..250, rows in 1usize..70, j in 0usize..250, cols in 1usize..130,
        ) {
            let mask = Mask::window(left, right) & if causal { Mask::causal() } else { Mask::full() };
            let data = MaskData::new(320, 380).place(place);
            let pairs = (i..i + rows).flat_map(|i| (j..j + cols).map(move |j| (i, j)));
            let allowed = pairs.filter(|&(i, j)| mask.allows(i, j, &data).unwrap()).count();
            let exact = Verdict::of(allowed == 0, allowed == rows * cols);
            let verdict = CompiledMask::new(&mask, 320, 380, place).classify(i..i + rows, j..j + cols);
            // A window and causal together can leave a tile empty that each of them touches.
            prop_assert!(verdict == exact || causal && exact == Verdict::Empty);
        }
    }

    #[test]
    fn bands_lengths_and_segments_are_known_and_other_masks_are_not() {
        let band = |mask: &Mask| CompiledMask::new(mask, 9, 9, Place::Start).band();
        let causal = band(&(Mask::causal() & Mask::window(256, 9) & Mask::lengths())).unwrap();
        assert_eq!(causal, Band { limited: true, left: 256, right: 0, lengths: true, segments: false });
        assert!(band(&(Mask::segments() & Mask::causal())).unwrap().segments);
        assert_eq!(band(&Mask::causal()).unwrap().left, Band::UNLIMITED);
        assert_eq!(band(&Mask::full()), Some(Band::ALL));
        for mask in [Mask::bits(), Mask::causal() | Mask::window(1, 1), !Mask::causal()] {
            assert_eq!(band(&mask), None, "{mask:?}");
        }
    }

    #[test]
    fn lengths_are_split_off_and_other_data_is_not() {
        let split = |mask: &Mask| CompiledMask::new(mask, 9, 9, Place::Start).without_lengths();
        let (lengths, rest) = split(&(Mask::strided(3) & Mask::lengths() & Mask::causal())).unwrap();
        assert!(lengths);
        assert_eq!(rest, CompiledMask::new(&(Mask::strided(3) & Mask::causal()), 9, 9, Place::Start));
        assert!(split(&Mask::lengths()).unwrap().1.allows_all());
        assert_eq!(split(&(Mask::lengths() | Mask::causal())), None);
        assert_eq!(split(&(Mask::segments() & Mask::causal())), None);
    }
}
