//! The shape of a case, as it is typed, and its element counts.

use std::fmt;
use std::str::FromStr;

/// `B` sequences, `Hq` query and `Hk` key heads, `N` queries, `M` keys, head dimension `D`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub b: usize,
    pub hq: usize,
    pub hk: usize,
    pub n: usize,
    pub m: usize,
    pub d: usize,
}

impl Shape {
    pub const fn new([b, hq, hk, n, m, d]: [usize; 6]) -> Shape {
        Shape { b, hq, hk, n, m, d }
    }

    /// `[B, Hq, Hk, N, M, D]`.
    pub fn axes(self) -> [usize; 6] {
        let Shape { b, hq, hk, n, m, d } = self;
        [b, hq, hk, n, m, d]
    }

    /// The shape of queries and outputs, `[B, Hq, N, D]`.
    pub fn queries(self) -> [usize; 4] {
        [self.b, self.hq, self.n, self.d]
    }

    /// The shape of keys and values, `[B, Hk, M, D]`.
    pub fn keys(self) -> [usize; 4] {
        [self.b, self.hk, self.m, self.d]
    }

    /// Elements of the queries.
    pub fn query_count(self) -> u128 {
        volume(self.queries())
    }

    /// Elements of the keys.
    pub fn key_count(self) -> u128 {
        volume(self.keys())
    }

    /// Scores of all query-key pairs.
    pub fn scores(self) -> u128 {
        volume([self.b, self.hq, self.n, self.m])
    }
}

fn volume(axes: [usize; 4]) -> u128 {
    axes.into_iter().fold(1, |volume: u128, axis| volume.saturating_mul(axis as u128))
}

impl FromStr for Shape {
    type Err = String;

    fn from_str(typed: &str) -> Result<Shape, String> {
        let numbers: Option<Vec<usize>> = typed.split(',').map(|axis| axis.trim().parse().ok()).collect();
        let numbers: Option<[usize; 6]> = numbers.and_then(|numbers| numbers.try_into().ok());
        let Some(axes) = numbers.filter(|axes| !axes.contains(&0)) else {
            return Err("expected six whole numbers of at least 1, `B,Hq,Hk,N,M,D`".into());
        };
        let shape = Shape::new(axes);
        if !shape.hq.is_multiple_of(shape.hk) {
            return Err(format!("Hq must be a multiple of Hk, and {} is not a multiple of {}", shape.hq, shape.hk));
        }
        Ok(shape)
    }
}

/// As it is typed.
impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shape { b, hq, hk, n, m, d } = self;
        write!(f, "{b},{hq},{hk},{n},{m},{d}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_prints_as_it_was_typed() {
        let shape: Shape = "2,8,4,512,1024,64".parse().unwrap();
        assert_eq!(shape, Shape::new([2, 8, 4, 512, 1024, 64]));
        assert_eq!(shape.to_string(), "2,8,4,512,1024,64");
        assert_eq!((shape.queries(), shape.keys()), ([2, 8, 512, 64], [2, 4, 1024, 64]));
    }

    #[test]
    fn malformed_shapes_are_refused() {
        for bad in ["", "1", "1,2,3", "1,1,1,1,1,1,1", "1,1,1,0,1,1", "1,1,1,-4,1,1", "1,1,1,x,1,1", "1,1,1,1.5,1,1"] {
            assert!(bad.parse::<Shape>().unwrap_err().contains("six whole numbers"), "{bad}");
        }
        assert!("1,6,4,1,1,1".parse::<Shape>().unwrap_err().contains("6 is not a multiple of 4"));
        assert!("1,2,4,1,1,1".parse::<Shape>().is_err());
    }

    #[test]
    fn counts_of_absurd_shapes_do_not_wrap() {
        let huge = Shape::new([usize::MAX; 6]);
        assert_eq!((huge.query_count(), huge.scores()), (u128::MAX, u128::MAX));
    }
}
