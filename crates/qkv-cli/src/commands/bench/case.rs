//! A case: a shape, a type, a mask and a direction, and its work and memory.

use super::shape::Shape;
use crate::dtype::Precision;
use crate::failure::Failure;
use crate::memory;
use std::fmt;

/// What is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Forward,
    Backward,
    Decode,
}

impl Direction {
    pub const ALL: [Direction; 3] = [Direction::Forward, Direction::Backward, Direction::Decode];

    pub fn name(self) -> &'static str {
        match self {
            Direction::Forward => "forward",
            Direction::Backward => "backward",
            Direction::Decode => "decode",
        }
    }

    pub fn named(name: &str) -> Option<Direction> {
        Direction::ALL.into_iter().find(|direction| direction.name() == name)
    }
}

/// One measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Case {
    pub shape: Shape,
    pub precision: Precision,
    pub causal: bool,
    pub direction: Direction,
}

impl Case {
    /// Visible query-key pairs of one head. A causal square counts as half.
    fn pairs(self) -> f64 {
        let Shape { n, m, .. } = self.shape;
        let (n, m) = (n as f64, m as f64);
        match (self.causal, self.direction) {
            (false, _) => n * m,
            // The last query is at the last key, and each query before it sees one key fewer.
            (true, Direction::Decode) => n * m - n * (n - 1.0) / 2.0,
            // The first query is at the first key; queries beyond the last key see all.
            (true, _) => n.min(m).powi(2) / 2.0 + (n - m).max(0.0) * m,
        }
    }

    /// Floating-point operations: two matrix products forward, five backward.
    pub fn flops(self) -> f64 {
        let Shape { b, hq, d, .. } = self.shape;
        let products = if self.direction == Direction::Backward { 5.0 } else { 2.0 };
        products * 2.0 * (b * hq * d) as f64 * self.pairs()
    }

    /// Bytes of the keys and values, which decoding reads once.
    pub fn bytes(self) -> f64 {
        2.0 * self.shape.key_count() as f64 * self.precision.size() as f64
    }

    /// Refuses a meaningless case, or one that does not fit in memory with a copy per side.
    pub fn check(self, sides: u128) -> Result<(), Failure> {
        let Shape { n, m, .. } = self.shape;
        if self.direction == Direction::Decode && n > m {
            return Err(Failure::new(format!(
                "`{}`: {n} queries cannot be at the end of {m} keys; decoding needs N ≤ M",
                self.shape
            )));
        }
        let (needed, available) = (self.memory().saturating_mul(sides), memory::available());
        if needed <= available {
            return Ok(());
        }
        Err(Failure::new(format!(
            "`{}` in {} needs about {:.1} GiB of memory, and this machine has {:.1} available",
            self.shape,
            self.precision.name(),
            memory::gib(needed),
            memory::gib(available)
        )))
    }

    /// Bytes that one side holds: inputs, outputs and, backward, gradient accumulators.
    fn memory(self) -> u128 {
        let (queries, keys) = (self.shape.query_count(), self.shape.key_count());
        let each = queries.saturating_add(keys).saturating_mul(self.precision.size() as u128);
        match self.direction {
            Direction::Forward => each.saturating_mul(2),
            Direction::Decode => each.saturating_mul(4), // and a buffer to measure bandwidth with
            Direction::Backward => {
                each.saturating_mul(4).saturating_add(queries.saturating_add(keys).saturating_mul(8))
            }
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mask = if self.causal { "causal" } else { "full" };
        write!(f, "{} {} {mask} {}", self.shape, self.precision.name(), self.direction.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case(axes: [usize; 6], causal: bool, direction: Direction) -> Case {
        Case { shape: Shape::new(axes), precision: Precision::F32, causal, direction }
    }

    #[test]
    fn work_is_counted_as_in_the_flash_attention_papers() {
        let square = [8, 8, 512, 512, 512, 64]; // only Hq, N, M and D count
        let full = 4.0 * 8.0 * 8.0 * 512.0 * 512.0 * 64.0;
        assert_eq!(case(square, false, Direction::Forward).flops(), full);
        assert_eq!(case(square, true, Direction::Forward).flops(), full / 2.0);
        assert_eq!(case(square, false, Direction::Backward).flops(), 2.5 * full);
        assert_eq!(case(square, true, Direction::Backward).flops(), 1.25 * full);
    }

    #[test]
    fn causal_work_depends_on_the_place_of_the_queries() {
        let one = [1, 1, 1, 1, 4096, 128];
        let full = 4.0 * 4096.0 * 128.0;
        assert_eq!(case(one, false, Direction::Decode).flops(), full);
        assert_eq!(case(one, true, Direction::Decode).flops(), full, "the last query sees every key");
        assert_eq!(case([1, 1, 1, 3, 5, 1], true, Direction::Decode).flops(), 4.0 * (3.0 + 4.0 + 5.0));
        assert_eq!(case([1, 1, 1, 8, 4, 1], true, Direction::Forward).flops(), 4.0 * (8.0 + 16.0));
    }

    #[test]
    fn decoding_reads_keys_and_values_once() {
        let bytes = |precision| Case { precision, ..case([2, 32, 8, 1, 4096, 128], false, Direction::Decode) }.bytes();
        assert_eq!(bytes(Precision::F32), 2.0 * 2.0 * 8.0 * 4096.0 * 128.0 * 4.0);
        assert_eq!(bytes(Precision::Bf16), bytes(Precision::F32) / 2.0);
    }

    #[test]
    fn cases_without_memory_or_meaning_are_refused() {
        assert!(case([1, 1, 1, 64, 64, 64], false, Direction::Backward).check(2).is_ok());
        for direction in Direction::ALL {
            assert!(case([1, 1, 1, 1, usize::MAX, 64], false, direction).check(1).is_err());
            assert!(case([usize::MAX; 6], false, direction).check(1).is_err());
        }
        assert!(case([1, 1, 1, 5, 4, 8], false, Direction::Decode).check(1).is_err());
    }
}
