//! A tile of the score matrix: the positions and classes that its queries and keys span, and its keys, in their natural
//! order or gathered by a list.

use super::Bits;
use std::ops::Range;

/// Blocks smaller than this are tested key by key.
const SMALL_BLOCK: usize = 8;

/// The smallest and largest position (of queries) or index (of keys) in a tile, and their classes if the tile is
/// ordered by class.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Extent {
    pub low: i64,
    pub high: i64,
    pub classes: Option<Classes>,
}

/// What a gathered list is sorted by: residues modulo a stride, or the hash buckets of a round.
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

/// A tile of the score matrix of one head.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TileAt {
    pub b: usize,
    pub h: usize,
    pub queries: Extent,
    pub keys: Extent,
    /// In natural order on both sides: first query, number of queries, first key, number of keys.
    pub natural: Option<[usize; 4]>,
}

/// Some or all indices, in an order other than the natural one.
#[derive(Clone, Debug)]
pub(crate) struct List {
    pub(crate) indices: Vec<u32>,
    /// What they are sorted by, and the class of each.
    classes: Option<(ClassOf, Vec<u32>)>,
    /// The extent of each tile.
    pub(crate) extents: Vec<Extent>,
}

impl List {
    pub(crate) fn new(
        indices: Vec<u32>,
        tile: usize,
        place: impl Fn(u32) -> i64,
        class: Option<(ClassOf, &dyn Fn(u32) -> u32)>,
    ) -> List {
        let classes: Option<(ClassOf, Vec<u32>)> =
            class.map(|(of, class)| (of, indices.iter().map(|&at| class(at)).collect()));
        let range = |of: &mut dyn Iterator<Item = i64>| {
            of.fold((i64::MAX, i64::MIN), |(low, high), x| (low.min(x), high.max(x)))
        };
        let extents = (0..indices.len().div_ceil(tile))
            .map(|t| {
                let within = t * tile..((t + 1) * tile).min(indices.len());
                let (low, high) = range(&mut indices[within.clone()].iter().map(|&at| place(at)));
                let classes = classes.as_ref().map(|(of, classes)| {
                    let (low, high) = range(&mut classes[within.clone()].iter().map(|&class| i64::from(class)));
                    Classes { of: *of, low: low as u32, high: high as u32 }
                });
                Extent { low, high, classes }
            })
            .collect();
        List { indices, classes, extents }
    }

    /// All of `0 .. len`, sorted by class, and in natural order within a class.
    pub(crate) fn by_class(
        len: usize,
        tile: usize,
        place: impl Fn(u32) -> i64,
        (of, class): (ClassOf, &dyn Fn(u32) -> u32),
    ) -> List {
        let mut indices: Vec<u32> = (0..len as u32).collect();
        indices.sort_by_cached_key(|&at| class(at));
        List::new(indices, tile, place, Some((of, class)))
    }
}

/// The keys of one tile.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TileKeys<'a> {
    pub(crate) list: Option<&'a List>,
    /// The first place in the order.
    pub start: usize,
    pub len: usize,
}

impl TileKeys<'_> {
    /// The natural index of the tile's key `at`.
    #[inline]
    pub fn index(&self, at: usize) -> usize {
        self.list.map_or(self.start + at, |list| list.indices[self.start + at] as usize)
    }

    /// The first key, if the keys are in natural order.
    pub fn natural(&self) -> Option<usize> {
        self.list.is_none().then_some(self.start)
    }

    /// The places in the tile that hold the keys of a class, if the keys are sorted by these classes.
    #[inline]
    pub(crate) fn of_class(&self, of: ClassOf, class: u32) -> Option<Range<usize>> {
        let (by, classes) = self.list?.classes.as_ref()?;
        (*by == of).then(|| {
            let classes = &classes[self.start..][..self.len];
            let start = classes.partition_point(|&at| at < class);
            start..start + classes[start..].partition_point(|&at| at == class)
        })
    }

    /// All bits, or none.
    pub(crate) fn fill(&self, bits: &mut Bits, value: bool) {
        *bits = bits_of(0..if value { self.len } else { 0 });
    }

    /// The places in the tile that hold the keys between `low` and `high`, if the keys are in natural order.
    #[inline]
    pub(crate) fn between(&self, low: i64, high: i64) -> Option<Range<usize>> {
        let start = self.natural()? as i64;
        let within = |x: i64| (x.saturating_sub(start)).clamp(0, self.len as i64) as usize;
        Some(within(low)..within(high.saturating_add(1)))
    }

    /// The bits of keys between `low` and `high`.
    pub(crate) fn interval(&self, bits: &mut Bits, low: i64, high: i64) {
        match self.between(low, high) {
            Some(range) => *bits = bits_of(range),
            None => self.each(bits, |j| (low..=high).contains(&(j as i64))),
        }
    }

    /// The bits of keys for which `f`, given the natural index, is true.
    pub(crate) fn each(&self, bits: &mut Bits, f: impl Fn(usize) -> bool) {
        // A word at a time, in a register.
        for (word, bits) in bits.iter_mut().enumerate() {
            let within = (word * 64).min(self.len)..((word + 1) * 64).min(self.len);
            *bits = match self.list {
                Some(list) => {
                    let indices = &list.indices[self.start..][within];
                    indices.iter().rev().fold(0, |bits, &j| bits << 1 | u64::from(f(j as usize)))
                }
                None => within.rev().fold(0, |bits, at| bits << 1 | u64::from(f(self.start + at))),
            };
        }
    }

    /// The bits of keys for which `f`, given the number of their block of `size`, is true.
    pub(crate) fn each_block(&self, bits: &mut Bits, size: usize, f: impl Fn(usize) -> bool) {
        let Some(start) = self.natural().filter(|_| size >= SMALL_BLOCK) else {
            return self.each(bits, |j| f(j / size));
        };
        *bits = Bits::default();
        let (mut at, end) = (start, start + self.len);
        while at < end {
            let next = (at / size + 1).saturating_mul(size).min(end);
            if f(at / size) {
                let [low, high] = bits_of(at - start..next - start);
                *bits = [bits[0] | low, bits[1] | high];
            }
            at = next;
        }
    }
}

/// The bits of these places; none if the range ends before it starts.
#[inline]
pub(crate) fn bits_of(range: Range<usize>) -> Bits {
    let below = |end: usize| if end == 128 { u128::MAX } else { (1 << end) - 1 };
    let set = below(range.end) & !below(range.start);
    [set as u64, (set >> 64) as u64]
}
