//! The random rows of FAVOR+: orthogonal in blocks of the width, each as long as a normal vector would be. They depend
//! only on width, count and seed, and are computed with additions, multiplications, divisions and roots in `f64`, which
//! every machine rounds alike; the logarithm is computed with these too, since a system's own may differ in its last
//! bit.

use qkv_simd::philox;
use std::sync::{Arc, Mutex, PoisonError};

/// `count` rows of `d` numbers. A row is distributed like a vector of normal numbers; rows of one block of `d` are
/// orthogonal, which makes the estimate better than that of independent rows (Choromanski et al. 2020).
///
/// The rows drawn last are kept, because the steps of a model ask for the same ones again and again.
pub(crate) fn orthogonal_rows(d: usize, count: usize, seed: u64) -> Arc<[f64]> {
    type Drawn = ((usize, usize, u64), Arc<[f64]>);
    static LAST: Mutex<Option<Drawn>> = Mutex::new(None);
    let (asked, last) = ((d, count, seed), || LAST.lock().unwrap_or_else(PoisonError::into_inner));
    if let Some((of, rows)) = &*last()
        && *of == asked
    {
        return rows.clone();
    }
    let rows: Arc<[f64]> = draw_rows(d, count, seed).into();
    if rows.len() <= MOST_KEPT {
        *last() = Some((asked, rows.clone()));
    }
    rows
}

/// More numbers than this (16 MiB) are drawn again at each call.
const MOST_KEPT: usize = 1 << 21;

fn draw_rows(d: usize, count: usize, seed: u64) -> Vec<f64> {
    let mut rows = vec![0.0; count * d]; // [F, D]
    if d == 0 {
        return rows;
    }
    let mut normals = Normals { seed, next: 0, spare: None };
    for block in rows.chunks_mut(d * d) {
        for at in 0..block.len() / d {
            let (before, row) = block.split_at_mut(at * d);
            let row = &mut row[..d];
            loop {
                row.fill_with(|| normals.draw());
                // Twice, since the first time leaves rounding errors along the earlier rows.
                for _ in 0..2 {
                    for other in before.chunks_exact(d) {
                        let along = dot(row, other);
                        row.iter_mut().zip(other).for_each(|(x, &y)| *x -= along * y);
                    }
                }
                let length = dot(row, row).sqrt();
                if length > 1e-6 {
                    row.iter_mut().for_each(|x| *x /= length);
                    break;
                }
            }
        }
    }
    for row in rows.chunks_exact_mut(d) {
        let length = (0..d).map(|_| normals.draw()).fold(0.0, |sum, x| sum + x * x).sqrt(); // chi of d degrees
        row.iter_mut().for_each(|x| *x *= length);
    }
    rows
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).fold(0.0, |sum, (x, y)| sum + x * y)
}

/// Normal numbers by Marsaglia's polar method.
struct Normals {
    seed: u64,
    next: u64,
    spare: Option<f64>,
}

impl Normals {
    fn draw(&mut self) -> f64 {
        if let Some(spare) = self.spare.take() {
            return spare;
        }
        loop {
            let at = self.next;
            self.next += 1;
            let [a, b, c, d] = philox::block([at as u32, (at >> 32) as u32, 0x6661_766f, 0], self.seed);
            // 53 bits each, between −1 and 1.
            let unit = |high: u32, low: u32| {
                let bits = (u64::from(high) << 32 | u64::from(low)) >> 11;
                (bits as f64 + 0.5) / (1u64 << 52) as f64 - 1.0
            };
            let (x, y) = (unit(a, b), unit(c, d));
            let square = x * x + y * y;
            if square < 1.0 && square > 0.0 {
                let factor = (-2.0 * ln(square) / square).sqrt();
                self.spare = Some(y * factor);
                return x * factor;
            }
        }
    }
}

/// The natural logarithm of a normal number above 0: `ln(2ᵉ·m) = e·ln 2 + 2·artanh((m − 1)/(m + 1))`, by its series.
fn ln(x: f64) -> f64 {
    let bits = x.to_bits();
    let mut exponent = (bits >> 52) as i64 - 1023;
    let mut m = f64::from_bits(bits & ((1 << 52) - 1) | 1023 << 52); // 1 ≤ m < 2
    if m > std::f64::consts::SQRT_2 {
        m *= 0.5;
        exponent += 1;
    }
    let t = (m - 1.0) / (m + 1.0); // |t| < 0.172
    let square = t * t;
    let series = (0..13).rev().fold(0.0, |sum, k| sum * square + 1.0 / f64::from(2 * k + 1));
    exponent as f64 * std::f64::consts::LN_2 + 2.0 * t * series
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_logarithm_is_the_logarithm() {
        for step in 1..10_000 {
            let x = f64::from(step) * 1e-4;
            assert!((ln(x) - x.ln()).abs() <= 4.0 * f64::EPSILON * x.ln().abs().max(0.1), "{x}");
        }
    }

    #[test]
    fn rows_of_a_block_are_orthogonal_and_as_long_as_normal_vectors() {
        let (d, count) = (24, 24 * 40 + 7);
        let rows = orthogonal_rows(d, count, 3);
        let row = |r: usize| &rows[r * d..][..d];
        let mut squares = 0.0;
        for r in 0..count {
            squares += dot(row(r), row(r));
            for other in r / d * d..r {
                let cosine = dot(row(r), row(other)) / (dot(row(r), row(r)) * dot(row(other), row(other))).sqrt();
                assert!(cosine.abs() < 1e-14, "rows {other} and {r}: {cosine}");
            }
        }
        let mean = squares / count as f64;
        assert!((mean - d as f64).abs() < 1.0, "a squared length of {mean} for {d}");
        assert_eq!(*rows, draw_rows(d, count, 3));
        assert_ne!(*rows, draw_rows(d, count, 4));
        assert!(orthogonal_rows(0, 5, 1).is_empty());
    }

    #[test]
    fn rows_that_are_kept_are_those_that_are_drawn() {
        for (d, count, seed) in [(6, 9, 1), (6, 9, 1), (9, 6, 1), (6, 9, 2), (6, 9, 1), (6, 10, 1), (6, 9, 1)] {
            assert_eq!(*orthogonal_rows(d, count, seed), draw_rows(d, count, seed), "{count} of {d}, seed {seed}");
        }
    }

    /// Written down once: another machine, another day, the same numbers.
    #[test]
    fn the_first_numbers_of_a_seed_are_these() {
        let rows = draw_rows(3, 2, 1);
        let bits: Vec<u64> = rows.iter().map(|x| x.to_bits()).collect();
        assert_eq!(bits, KNOWN, "{bits:#x?}");
    }

    const KNOWN: [u64; 6] = [
        0x3feb_1a1b_5a25_77b7,
        0xbffd_84b1_fd88_8c9e,
        0x3ff1_8f24_fe1d_7a26,
        0xbfd3_428e_21c8_f725,
        0x3fe9_4302_fb67_87f5,
        0x3ff8_f30c_88d9_6466,
    ];
}
