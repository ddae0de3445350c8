//! Decides how much of the backward pass's preprocessing overlaps the main kernel. Preprocessing (the largest key and
//! value of a head, delta of each row) and the final conversion of dq move memory and multiply nothing; run before and
//! after the main kernel, they take a seventh of a short pass. Instead, a few dedicated blocks do them beside it, for
//! all heads but the first. Results are bit-identical either way.

use crate::call::Sizes;

/// Blocks beside the main kernel: the fewest that stay ahead of it, as measured (LADDER.md).
pub(super) const PREP_BLOCKS: u32 = 6;
/// With fewer keys, the main kernel would keep up with these blocks.
const MIN_KEYS: usize = 4_096;
/// The fewest bytes of preprocessing worth overlapping.
const MIN_BYTES: usize = 64 << 20;
/// Pairs that the main kernel multiplies in the time these blocks read one query or key row of two tensors. With fewer
/// per row, the main kernel would wait for them.
const PAIRS_PER_ROW: usize = 500;
/// On a smaller device these blocks would take too large a share.
const MIN_PROCESSORS: usize = 100;

/// How many key heads are preprocessed before the main kernel: those that its blocks begin with and a few more, or all.
/// `pairs` counts the visible pairs of a query head, `tiles` the work of a key head, and `section` the heads processed
/// side by side.
pub(super) fn prepared_heads(sizes: &Sizes, pairs: usize, tiles: usize, section: usize, processors: usize) -> usize {
    let Sizes { b, hq, hk, n, m, d, dv } = *sizes;
    let (heads, bytes) = (b * hk, 2 * b * (hk * m * (d + dv) + 2 * hq * n * dv));
    let first = (processors.div_ceil(tiles.max(1)) + heads / 16).next_multiple_of(section.max(1));
    let stays_ahead = hq * pairs >= PAIRS_PER_ROW * (hk * m + hq * n);
    let large = bytes >= MIN_BYTES && m >= MIN_KEYS && processors >= MIN_PROCESSORS;
    if large && stays_ahead && 2 * first <= heads { first } else { heads }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(b: usize, h: usize, n: usize, d: usize) -> Sizes {
        Sizes { b, hq: h, hk: h, n, m: n, d, dv: d }
    }

    /// With a window of this many keys.
    fn prepared(sizes: Sizes, window: usize, tiles: usize, section: usize, processors: usize) -> usize {
        prepared_heads(&sizes, sizes.n * window, tiles, section, processors)
    }

    #[test]
    fn a_long_pass_prepares_only_the_first_heads_before() {
        assert_eq!(prepared(sizes(1, 16, 16_128, 128), 1_025, 126, 1, 132), 3);
        assert_eq!(prepared(sizes(1, 32, 16_128, 64), 1_025, 126, 8, 132), 8);
    }

    #[test]
    fn short_heads_small_passes_and_small_devices_prepare_all() {
        assert_eq!(prepared(sizes(32, 16, 512, 128), 512, 4, 1, 132), 512);
        assert_eq!(prepared(sizes(1, 2, 8_192, 64), 1_025, 64, 1, 132), 2);
        assert_eq!(prepared(sizes(1, 16, 16_128, 128), 1_025, 126, 1, 16), 16);
        assert_eq!(prepared(sizes(1, 16, 16_128, 128), 1_025, 126, 12, 132), 16);
    }

    #[test]
    fn with_little_to_multiply_all_heads_are_prepared_before() {
        assert_eq!(prepared(sizes(1, 16, 16_128, 128), 257, 126, 1, 132), 16);
        // Few queries among many keys, all of which are read.
        let few = Sizes { n: 512, ..sizes(1, 16, 131_072, 128) };
        assert_eq!(prepared(few, 1_025, 1_024, 1, 132), 16);
        // Query heads that share keys read these once.
        let shared = Sizes { hk: 8, ..sizes(1, 64, 16_128, 128) };
        assert_eq!(prepared(shared, 600, 126, 1, 132), 2);
    }
}
