//! Philox-4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011): random bits as a
//! pure function of a counter and a key. Dropout draws from it on every device.
//!
//! **The mapping is fixed.** The score of query `i` and key `j`, of query head `h` and sequence `b`, has 16 bits: with
//! the counter `(⌊j/8⌋, i, h, b)` and the key `(low, high)` of the seed, the four words of the block hold the keys
//! `8⌊j/8⌋ …` in order, low half first: word `(j mod 8) / 2`, half `j mod 2`.

use crate::isa::Isa;
use crate::kernel::{Kernel, dispatch};
use crate::lanes::Lanes;

const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
const WEYL: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];

/// One block: four words of random bits.
///
/// ```
/// // The known answer for a zero counter and key.
/// let words = qkv_simd::philox::block([0; 4], 0);
/// assert_eq!(words, [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
/// ```
#[inline(always)]
pub fn block(counter: [u32; 4], seed: u64) -> [u32; 4] {
    let (mut words, mut key) = (counter, [seed as u32, (seed >> 32) as u32]);
    for _ in 0..10 {
        words = round(words, key);
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    words
}

/// One of the ten rounds.
#[inline(always)]
fn round([a, b, c, d]: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let first = a as u64 * MULTIPLIERS[0] as u64;
    let second = c as u64 * MULTIPLIERS[1] as u64;
    [(second >> 32) as u32 ^ b ^ key[0], second as u32, (first >> 32) as u32 ^ d ^ key[1], first as u32]
}

/// The 16 bits of one score.
pub fn bits(seed: u64, sequence: usize, head: usize, i: usize, j: usize) -> u16 {
    let words = block([(j / 8) as u32, i as u32, head as u32, sequence as u32], seed);
    (words[j % 8 / 2] >> (j % 2 * 16)) as u16
}

/// The 32 bits that sampling draws for each of four scores, those of the keys `4·group …` in order. A separate stream,
/// with the counter `(group, i, h, b)` and the high word of the seed inverted.
#[inline]
pub fn words(seed: u64, sequence: usize, head: usize, i: usize, group: usize) -> [u32; 4] {
    block([group as u32, i as u32, head as u32, sequence as u32], seed ^ (0xffff_ffff << 32))
}

/// Groups of eight keys drawn side by side.
const GROUPS: usize = 16;

struct Keep<'a> {
    seed: u64,
    /// Sequence, head and query.
    row: [u32; 3],
    start: usize,
    threshold: u32,
    words: &'a mut [u64],
}

/// Which of the keys `start .. start + 64·words.len()` a query keeps, when each is dropped if its bits are below
/// `threshold` (0 ..= 65,536). `start` is a multiple of 8; `row` is the sequence, the head and the query.
pub fn keep(isa: Isa, seed: u64, row: [usize; 3], start: usize, threshold: u32, words: &mut [u64]) {
    debug_assert_eq!(start % 8, 0);
    dispatch(isa, Keep { seed, row: row.map(|x| x as u32), start, threshold, words });
}

impl Kernel<f32> for Keep<'_> {
    type Output = ();

    /// Loops over arrays, which the compiler vectorizes for the instruction set.
    #[inline(always)]
    unsafe fn run<V: Lanes<Scalar = f32>>(self) {
        let [sequence, head, i] = self.row;
        for (at, words) in self.words.chunks_mut(GROUPS / 8).enumerate() {
            let first = (self.start / 8 + at * GROUPS) as u32;
            let mut a: [u32; GROUPS] = std::array::from_fn(|g| first.wrapping_add(g as u32));
            let [mut b, mut c, mut d] = [[i; GROUPS], [head; GROUPS], [sequence; GROUPS]];
            let mut key = [self.seed as u32, (self.seed >> 32) as u32];
            for _ in 0..10 {
                for g in 0..GROUPS {
                    [a[g], b[g], c[g], d[g]] = round([a[g], b[g], c[g], d[g]], key);
                }
                key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
            }
            let mut kept = [0u32; GROUPS];
            for (word, drawn) in [a, b, c, d].into_iter().enumerate() {
                for g in 0..GROUPS {
                    kept[g] |= u32::from(drawn[g] & 0xffff >= self.threshold) << (2 * word);
                    kept[g] |= u32::from(drawn[g] >> 16 >= self.threshold) << (2 * word + 1);
                }
            }
            for (word, kept) in words.iter_mut().zip(kept.chunks_exact(8)) {
                *word = kept.iter().enumerate().fold(0, |word, (g, &byte)| word | u64::from(byte) << (8 * g));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers_hold() {
        assert_eq!(block([u32::MAX; 4], u64::MAX), [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]);
        let digits = [0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344];
        assert_eq!(block(digits, 0x299f31d0_a4093822), [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1]);
    }

    #[test]
    fn a_row_of_bits_agrees_with_each_bit() {
        for isa in Isa::available() {
            let mut words = [0; 3];
            keep(isa, 7, [2, 3, 11], 64, 20_000, &mut words);
            for j in 0..192 {
                assert_eq!(words[j / 64] >> (j % 64) & 1 == 1, u32::from(bits(7, 2, 3, 11, 64 + j)) >= 20_000);
            }
        }
    }
}
