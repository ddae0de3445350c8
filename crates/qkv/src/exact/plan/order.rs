//! The order in which a sequence is processed: natural, or as lists that gather what a mask keeps; and the inverse
//! mapping.

use crate::compiled::tile::{Classes, Extent, List};
use std::ops::Range;

/// The order in which one side of a piece is processed.
#[derive(Clone, Debug)]
pub(crate) enum Order {
    /// The natural order of this length.
    Natural(usize),
    /// The same list for every head.
    List(List),
    /// A list for each head of each sequence: `[B, heads]`.
    Heads { lists: Vec<List>, heads: usize },
}

impl Order {
    pub fn len(&self) -> usize {
        match self {
            Order::Natural(len) => *len,
            Order::List(list) => list.indices.len(),
            Order::Heads { lists, .. } => lists.first().map_or(0, |list| list.indices.len()),
        }
    }

    /// The list of a head, if there is one.
    pub(super) fn list(&self, b: usize, h: usize) -> Option<&List> {
        match self {
            Order::Natural(_) => None,
            Order::List(list) => Some(list),
            Order::Heads { lists, heads } => Some(&lists[b * heads + h]),
        }
    }

    /// The natural index of the element at a place in this order.
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

/// The range of tiles, ordered by class, that share a class with `extent`; all of them if it has no classes.
pub(super) fn by_class(extents: &[Extent], extent: Extent, all: Range<usize>) -> Range<usize> {
    let Some(Classes { low, high, .. }) = extent.classes else { return all };
    let start = extents.partition_point(|e| e.classes.is_some_and(|of| of.high < low));
    let end = extents.partition_point(|e| e.classes.is_none_or(|of| of.low <= high));
    start..end.max(start)
}

/// The mapping from natural indices back to the places of a piece.
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
