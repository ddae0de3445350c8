//! Hash buckets (Reformer, Kitaev et al. 2020, arXiv:2001.04451): vectors that point the same way fall into the same
//! bucket. The buckets are computed once, in f64, into integers, so that every element type and
//! engine sees the same ones.

use crate::error::{Error, Result};
use crate::tensor::Tensor;
use qkv_simd::shared::for_each_task;
use qkv_simd::{Element, Isa, Matrix, Panels, Real, Target, View, padded, product};
use serde::{Deserialize, Serialize};
use std::sync::Mutex;

/// The parameters of the hash. See [`Mask::lsh`](crate::Mask::lsh).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lsh {
    /// Number of buckets, even.
    pub buckets: usize,
    /// Number of hash rounds; a pair in the same bucket in any round is kept.
    pub rounds: usize,
    /// The seed of the random rotations.
    pub seed: u64,
}

/// The maximum number of directions of one rotation (their opposites count too). More buckets are a product of several
/// hashes, as in Reformer, so that hashing costs n·log(buckets) instead of n·buckets.
const DIRECTIONS: usize = 16;

/// The maximum number of directions of all rounds together: beyond any practical use, and still little memory.
const MOST_DIRECTIONS: usize = 1 << 16;

/// Rows per matrix product.
const BLOCK: usize = 64;

impl Lsh {
    /// The bucket of every row in every round, `[B, H, L, rounds]`: with a random rotation `R`, the largest of `[xR;
    /// −xR]`.
    ///
    /// Queries and keys are hashed with the same rotations. If they are the same tensor, hash once and pass the buckets
    /// for both.
    ///
    /// ```
    /// use qkv::{Lsh, Tensor};
    /// let x = Tensor::<f32, 4>::randn([1, 1, 100, 16], 1);
    /// let lsh = Lsh { buckets: 8, rounds: 2, seed: 7 };
    /// let buckets = lsh.hash(&x)?;
    /// assert_eq!(buckets.shape(), [1, 1, 100, 2]);
    /// // The length of a vector does not matter, only where it points.
    /// assert_eq!(lsh.hash(&x.map(|x| 3.0 * x))?, buckets);
    /// # Ok::<(), qkv::Error>(())
    /// ```
    pub fn hash<'a, T: Element>(&self, x: impl Into<View<'a, T>>) -> Result<Tensor<i32, 4>> {
        self.check()?;
        let x = x.into();
        let [batch, heads, length, width] = x.shape();
        let mut out = Tensor::allocate("buckets", [batch, heads, length, self.rounds])?;
        let factors = self.factors();
        let directions = self.rounds * factors.iter().map(|buckets| buckets / 2).sum::<usize>();
        let row = padded::<f64>(directions);
        // All rotations of all rounds side by side, [width, directions]; one product hashes a block of rows.
        let rotations = Tensor::<f64, 2>::randn([width, row], self.seed);
        let blocks: Vec<(usize, &mut [i32])> = out.data_mut().chunks_mut(BLOCK * self.rounds).enumerate().collect();
        let next = Mutex::new(blocks.into_iter());
        let threads = rayon::current_num_threads();
        for_each_task(
            threads,
            threads,
            || (vec![0.0; BLOCK * width], vec![0.0; BLOCK * row]),
            |(rows, along), _| {
                while let Some((block, to)) = next.lock().expect("nothing panics while it is held").next() {
                    let count = to.len() / self.rounds;
                    for r in 0..count {
                        let at = block * BLOCK + r;
                        let (b, h, i) = (at / (heads * length), at / length % heads, at % length);
                        for c in 0..width {
                            rows[r * width + c] = x.at(b, h, i, c).to_f64();
                        }
                    }
                    along.fill(0.0);
                    let (a, b) = (Matrix::rows(rows, width), Panels::rows(rotations.data(), row));
                    product(Isa::best(), Target::accumulate(along, row), a, b, count, row / f64::LANES, width);
                    for (r, to) in to.chunks_exact_mut(self.rounds).enumerate() {
                        let mut along = &along[r * row..][..directions];
                        for to in to {
                            (*to, along) = bucket(along, &factors);
                        }
                    }
                }
            },
        );
        Ok(out)
    }

    /// The number of buckets as a product of even factors, one rotation each.
    fn factors(&self) -> Vec<usize> {
        let (mut left, mut factors) = (self.buckets, Vec::new());
        while left > 2 * DIRECTIONS {
            // The largest even divisor whose cofactor is even, so that the cofactor can be factored in the same way.
            let fits = |half: &usize| left.is_multiple_of(4 * half);
            let Some(factor) = (1..=DIRECTIONS).rev().find(fits).map(|half| 2 * half) else { break };
            factors.push(factor);
            left /= factor;
        }
        factors.push(left);
        factors
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.buckets < 2 || !self.buckets.is_multiple_of(2) || self.buckets > i32::MAX as usize {
            return Err(Error::value("lsh", format!("{} buckets", self.buckets), "an even number of at least 2"));
        }
        if self.rounds == 0 {
            return Err(Error::value("lsh", "0 rounds", "at least 1"));
        }
        let directions = self.factors().iter().map(|buckets| buckets / 2).sum::<usize>();
        if directions.checked_mul(self.rounds).is_none_or(|all| all > MOST_DIRECTIONS) {
            let found = format!("{} buckets in {} rounds", self.buckets, self.rounds);
            return Err(Error::value(
                "lsh",
                found,
                "fewer rounds, or a number of buckets that is a product of small ones",
            ));
        }
        Ok(())
    }
}

/// The bucket given by the lengths along the directions of one round, and the lengths of the rounds after it. Each
/// factor contributes a digit, the index of the largest of `[xR; −xR]`, the first on a tie.
fn bucket<'a>(mut along: &'a [f64], factors: &[usize]) -> (i32, &'a [f64]) {
    let mut bucket = 0;
    for &factor in factors {
        let (mine, rest) = along.split_at(factor / 2);
        let (mut best, mut digit) = (f64::NEG_INFINITY, 0);
        for (at, &along) in mine.iter().enumerate() {
            for (at, along) in [(at, along), (at + factor / 2, -along)] {
                if along > best {
                    (best, digit) = (along, at);
                }
            }
        }
        bucket = bucket * factor + digit;
        along = rest;
    }
    (bucket as i32, along)
}
