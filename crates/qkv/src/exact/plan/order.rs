//! The order in which a sequence is taken: as it is, or as lists that bring together what a mask keeps; the keys of one
//! tile in that order; and the way back.

use crate::compiled::Bits;
use crate::compiled::predicate::{ClassOf, Classes, Extent};
use std::ops::Range;

/// Of smaller blocks each key is asked about.
const SMALL_BLOCK: usize = 8;

/// The order in which one side of a piece is taken.
#[derive(Clone, Debug)]
pub(crate) enum Order {
    /// As it is.
    Natural(usize),
    /// The same list for every head.
    List(List),
    /// A list for each head of each sequence: `[B, heads]`.
    Heads { lists: Vec<List>, heads: usize },
}

/// Some indices, or all, in an order of their own.
#[derive(Clone, Debug)]
pub(crate) struct List {
    pub(super) indices: Vec<u32>,
    /// What orders them, and the class of each.
    classes: Option<(ClassOf, Vec<u32>)>,
    /// The extent of each tile.
    pub(super) extents: Vec<Extent>,
}

impl List {
    pub(super) fn new(
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

    /// All of `0 .. len`, sorted by class and within a class as they are.
    pub(super) fn by_class(
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

impl Order {
    pub fn len(&self) -> usize {
        match self {
            Order::Natural(len) => *len,
            Order::List(list) => list.indices.len(),
            Order::Heads { lists, .. } => lists.first().map_or(0, |list| list.indices.len()),
        }
    }

    /// The list of a head, where there is one.
    pub(super) fn list(&self, b: usize, h: usize) -> Option<&List> {
        match self {
            Order::Natural(_) => None,
            Order::List(list) => Some(list),
            Order::Heads { lists, heads } => Some(&lists[b * heads + h]),
        }
    }

    /// The index, in the natural order, of what stands at a place of this one.
    #[inline]
    pub fn index(&self, b: usize, h: usize, at: usize) -> usize {
        self.list(b, h).map_or(at, |list| list.indices[at] as usize)
    }

    pub(super) fn is_natural(&self) -> bool {
        matches!(self, Order::Natural(_))
    }

    /// Whether it is the same for every head.
    pub fn is_shared(&self) -> bool {
        !matches!(self, Order::Heads { .. })
    }
}

/// The keys of one tile.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TileKeys<'a> {
    pub(super) list: Option<&'a List>,
    /// Places of the order.
    pub start: usize,
    pub len: usize,
}

impl TileKeys<'_> {
    /// The natural index of the tile's key `at`.
    #[inline]
    pub fn index(&self, at: usize) -> usize {
        self.list.map_or(self.start + at, |list| list.indices[self.start + at] as usize)
    }

    /// Where the keys are in their natural order, the first of them.
    pub fn natural(&self) -> Option<usize> {
        self.list.is_none().then_some(self.start)
    }

    /// The places of the tile that hold the keys of a class, where classes order them.
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

    /// The places of the tile that hold the keys between `low` and `high`, where those lie in their natural order.
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

    /// The bits of keys for which `f`, given the natural index, says yes.
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

    /// The bits of keys for whose block of `size`, by its number, `f` says yes.
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

/// The bits of these places; none where the range ends before it starts.
#[inline]
pub(crate) fn bits_of(range: Range<usize>) -> Bits {
    let below = |end: usize| if end == 128 { u128::MAX } else { (1 << end) - 1 };
    let set = below(range.end) & !below(range.start);
    [set as u64, (set >> 64) as u64]
}

/// Of tiles ordered by class, those that share one with `extent`; where there are no classes, all.
pub(super) fn by_class(extents: &[Extent], extent: Extent, all: Range<usize>) -> Range<usize> {
    let Some(Classes { low, high, .. }) = extent.classes else { return all };
    let start = extents.partition_point(|e| e.classes.is_some_and(|of| of.high < low));
    let end = extents.partition_point(|e| e.classes.is_none_or(|of| of.low <= high));
    start..end.max(start)
}

/// The way back from natural indices to the places of a piece.
pub(crate) enum Places {
    Range(Range<usize>),
    /// For each list: one for all heads, or one for each.
    Lists {
        places: Vec<Vec<u32>>,
        heads: usize,
    },
}

impl Places {
    pub(super) fn new(order: &Order, len: usize) -> Places {
        let inverse = |list: &List| {
            let mut places = vec![u32::MAX; len];
            for (place, &index) in list.indices.iter().enumerate() {
                places[index as usize] = place as u32;
            }
            places
        };
        match order {
            Order::Natural(len) => Places::Range(0..*len),
            Order::List(list) => Places::Lists { places: vec![inverse(list)], heads: 0 },
            Order::Heads { lists, heads } => {
                Places::Lists { places: lists.iter().map(inverse).collect(), heads: *heads }
            }
        }
    }

    pub fn of(&self, b: usize, h: usize, index: usize) -> Option<usize> {
        match self {
            Places::Range(range) => range.contains(&index).then_some(index),
            Places::Lists { places, heads } => {
                let place = places[if *heads == 0 { 0 } else { b * heads + h }][index];
                (place != u32::MAX).then_some(place as usize)
            }
        }
    }
}
