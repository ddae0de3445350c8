//! How much of a backward pass is done beside its main kernel. What it needs of each head (the largest key and value, Σ out · d_out) and the rounding of dq
//! move memory and multiply nothing: before and after the main kernel they cost a short pass a seventh of its time. A few blocks do them beside it, for all
//! heads but the first. Bits do not depend on it.

use crate::plan::Sizes;

/// Blocks beside the main kernel: as few as keep ahead of it, as measured (the ladder).
pub(super) const LATE: u32 = 6;
/// Where there are fewer keys, the main kernel is as fast as they are.
const KEYS: usize = 4_096;
/// Bytes that are worth it.
const MOVED: usize = 64 << 20;
/// Pairs that the main kernel multiplies in the time in which these blocks read one row of q's length or of k's, of two tensors each. With fewer of them for
/// each row, it would wait for what is prepared.
const PAIRS: usize = 500;
/// Of a smaller card they would be too large a part.
const PROCESSORS: usize = 100;

/// How many heads of keys are prepared before the main kernel: what its blocks begin with, and a little more, or all. `pairs` are kept in a head of
/// queries, `works` is what there is to do for one of keys, `section` how many heads are worked on side by side.
pub(super) fn first_heads(sizes: &Sizes, pairs: usize, works: usize, section: usize, processors: usize) -> usize {
    let Sizes { b, hq, hk, n, m, d, dv } = *sizes;
    let (heads, moved) = (b * hk, 2 * b * (hk * m * (d + dv) + 2 * hq * n * dv));
    let first = (processors.div_ceil(works.max(1)) + heads / 16).next_multiple_of(section.max(1));
    let ahead = hq * pairs >= PAIRS * (hk * m + hq * n);
    if moved >= MOVED && m >= KEYS && processors >= PROCESSORS && ahead && 2 * first <= heads { first } else { heads }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(b: usize, h: usize, n: usize, d: usize) -> Sizes {
        Sizes { b, hq: h, hk: h, n, m: n, d, dv: d }
    }

    /// With a window of so many keys.
    fn first(sizes: Sizes, window: usize, works: usize, section: usize, processors: usize) -> usize {
        first_heads(&sizes, sizes.n * window, works, section, processors)
    }

    #[test]
    fn a_long_pass_prepares_only_the_first_heads_before() {
        assert_eq!(first(sizes(1, 16, 16_128, 128), 1_025, 126, 1, 132), 3);
        assert_eq!(first(sizes(1, 32, 16_128, 64), 1_025, 126, 8, 132), 8);
    }

    #[test]
    fn short_heads_small_passes_and_small_cards_prepare_all() {
        assert_eq!(first(sizes(32, 16, 512, 128), 512, 4, 1, 132), 512);
        assert_eq!(first(sizes(1, 2, 8_192, 64), 1_025, 64, 1, 132), 2);
        assert_eq!(first(sizes(1, 16, 16_128, 128), 1_025, 126, 1, 16), 16);
        assert_eq!(first(sizes(1, 16, 16_128, 128), 1_025, 126, 12, 132), 16);
    }

    #[test]
    fn where_there_is_little_to_multiply_all_are_prepared() {
        assert_eq!(first(sizes(1, 16, 16_128, 128), 257, 126, 1, 132), 16);
        // Few queries among many keys, all of which are read.
        let few = Sizes { n: 512, ..sizes(1, 16, 131_072, 128) };
        assert_eq!(first(few, 1_025, 1_024, 1, 132), 16);
        // Heads of queries that share keys read these once.
        let shared = Sizes { hk: 8, ..sizes(1, 64, 16_128, 128) };
        assert_eq!(first(shared, 600, 126, 1, 132), 2);
    }
}
