//! Random numbers as a function of a seed and a place, so that any stream can be restarted wherever it is needed:
//! Philox ([`qkv_simd::philox`]), in streams separate from those of dropout.

use qkv_simd::philox;

/// Separates these streams from others of the same seed.
const APART: u64 = 0x7478_6574_2076_6b71;

/// A stream of random numbers.
///
/// ```
/// use qkv_formats::draws::Draws;
///
/// let mut one = Draws::new(42, [1, 0, 0]);
/// let mut same = Draws::new(42, [1, 0, 0]);
/// assert_eq!(one.below(1000), same.below(1000));
/// assert!((0.0..1.0).contains(&one.unit()));
/// ```
#[derive(Clone, Debug)]
pub struct Draws {
    seed: u64,
    place: [u32; 3],
    block: u32,
    words: [u32; 4],
    used: usize,
}

impl Draws {
    /// The stream of a seed at a place: a purpose, and two indices.
    pub fn new(seed: u64, place: [u32; 3]) -> Self {
        Draws { seed: seed ^ APART, place, block: 0, words: [0; 4], used: 4 }
    }

    /// 32 random bits.
    pub fn word(&mut self) -> u32 {
        if self.used == 4 {
            let [a, b, c] = self.place;
            self.words = philox::block([self.block, a, b, c], self.seed);
            self.block = self.block.wrapping_add(1);
            self.used = 0;
        }
        self.used += 1;
        self.words[self.used - 1]
    }

    /// A uniform number below `end` (Lemire, "Fast random integer generation in an interval", 2019); 0 if `end` is 0.
    pub fn below(&mut self, end: usize) -> usize {
        let end = u64::try_from(end).unwrap_or(u64::MAX);
        if let Ok(end) = u32::try_from(end) {
            let reject = end.wrapping_neg().checked_rem(end).unwrap_or(0);
            loop {
                let product = u64::from(self.word()) * u64::from(end);
                if product as u32 >= reject {
                    return (product >> 32) as usize;
                }
            }
        }
        let reject = end.wrapping_neg() % end;
        loop {
            let word = u64::from(self.word()) << 32 | u64::from(self.word());
            let product = u128::from(word) * u128::from(end);
            if product as u64 >= reject {
                return (product >> 64) as usize;
            }
        }
    }

    /// A uniform number in [0, 1), a multiple of 2⁻⁵³.
    pub fn unit(&mut self) -> f64 {
        let word = u64::from(self.word()) << 32 | u64::from(self.word());
        (word >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A random element of a nonempty list.
    pub fn pick<'a, T: ?Sized>(&mut self, among: &[&'a T]) -> &'a T {
        among[self.below(among.len())]
    }

    /// Shuffles a list.
    pub fn shuffle<T>(&mut self, list: &mut [T]) {
        for end in (2..=list.len()).rev() {
            list.swap(end - 1, self.below(end));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_below_is_about_as_likely() {
        let mut draws = Draws::new(3, [0; 3]);
        let mut seen = [0u32; 7];
        (0..70_000).for_each(|_| seen[draws.below(7)] += 1);
        assert!(seen.iter().all(|&n| (9_600..10_400).contains(&n)), "{seen:?}");
        assert_eq!((draws.below(0), draws.below(1)), (0, 0));
        assert!(draws.below(usize::MAX) > u32::MAX as usize);
    }

    #[test]
    fn every_order_is_about_as_likely() {
        let mut seen = std::collections::BTreeMap::new();
        for at in 0..12_000 {
            let mut list = [0, 1, 2];
            Draws::new(5, [at, 0, 0]).shuffle(&mut list);
            *seen.entry(list).or_insert(0) += 1;
        }
        assert_eq!(seen.len(), 6);
        assert!(seen.values().all(|n| (1_800..2_200).contains(n)), "{seen:?}");
    }

    #[test]
    fn other_seeds_and_places_draw_other_numbers() {
        let words = |seed, place| -> Vec<u32> {
            let mut draws = Draws::new(seed, place);
            (0..8).map(|_| draws.word()).collect()
        };
        let first = words(1, [1, 2, 3]);
        assert_eq!(first, words(1, [1, 2, 3]));
        assert!([words(2, [1, 2, 3]), words(1, [0, 2, 3]), words(1, [1, 2, 4])].iter().all(|other| *other != first));
    }
}
