//! Intervals of positions on one side of the score matrix in which a mask can allow anything.

use super::predicate::FAR;

/// Disjoint intervals, both ends included, ascending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Spans(Vec<(i64, i64)>);

impl Spans {
    pub fn none() -> Spans {
        Spans(Vec::new())
    }

    pub fn all() -> Spans {
        Spans(vec![(-FAR, FAR)])
    }

    pub fn one(low: i64, high: i64) -> Spans {
        Spans(if low <= high { vec![(low, high)] } else { Vec::new() })
    }

    pub fn points(set: &[i64]) -> Spans {
        Spans(set.iter().map(|&x| (x, x)).collect())
    }

    pub fn intersect(&self, other: &Spans) -> Spans {
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

    pub fn union(mut self, other: Spans) -> Spans {
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

    /// The number of integers from 0 to `last` inside.
    pub fn size(&self, last: i64) -> i64 {
        self.0.iter().map(|&(low, high)| (high.min(last) - low.max(0) + 1).max(0)).sum()
    }

    /// Whether anything between `low` and `high` is inside.
    pub fn touch(&self, low: i64, high: i64) -> bool {
        let next = self.0.partition_point(|span| span.1 < low);
        self.0.get(next).is_some_and(|span| span.0 <= high)
    }

    /// The blocks of `size` in `0 .. len`, from block `from` on, that the shifted intervals touch: ascending, each
    /// once.
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
