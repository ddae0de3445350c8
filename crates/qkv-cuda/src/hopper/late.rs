//! How much of a backward pass is done beside its main kernel. What it needs of each head (the largest key and value, Σ out · d_out) and the rounding of dq
//! move memory and multiply nothing: before and after the main kernel they cost a short pass a sixth of its time. A few blocks do them beside it, for all
//! heads but the first. Bits do not depend on it.

use crate::plan::Sizes;

/// Blocks beside the main kernel: as few as keep ahead of it, as measured (the ladder).
pub(super) const LATE: u32 = 6;
/// Where there are fewer keys, the main kernel is as fast as they are.
const KEYS: usize = 4_096;
/// Bytes that are worth it.
const MOVED: usize = 64 << 20;
/// Of a smaller card they would be too large a part.
const PROCESSORS: usize = 100;

/// How many heads of keys are prepared before the main kernel: what its blocks begin with, and a little more, or all. `works` is what there is to do for a
/// head, `section` how many heads are worked on side by side.
pub(super) fn first_heads(sizes: &Sizes, works: usize, section: usize, processors: usize) -> usize {
    let Sizes { b, hq, hk, n, m, d, dv } = *sizes;
    let (heads, moved) = (b * hk, 2 * b * (hk * m * (d + dv) + 2 * hq * n * dv));
    let first = (processors.div_ceil(works.max(1)) + heads / 16).next_multiple_of(section.max(1));
    if moved < MOVED || m < KEYS || processors < PROCESSORS || 2 * first > heads { heads } else { first }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(b: usize, h: usize, n: usize, d: usize) -> Sizes {
        Sizes { b, hq: h, hk: h, n, m: n, d, dv: d }
    }

    #[test]
    fn a_long_pass_prepares_only_the_first_heads_before() {
        assert_eq!(first_heads(&sizes(1, 16, 16_128, 128), 126, 1, 132), 3);
        assert_eq!(first_heads(&sizes(1, 32, 16_128, 64), 126, 8, 132), 8);
    }

    #[test]
    fn short_heads_small_passes_and_small_cards_prepare_all() {
        assert_eq!(first_heads(&sizes(32, 16, 512, 128), 4, 1, 132), 512);
        assert_eq!(first_heads(&sizes(1, 2, 8_192, 64), 64, 1, 132), 2);
        assert_eq!(first_heads(&sizes(1, 16, 16_128, 128), 126, 1, 16), 16);
        assert_eq!(first_heads(&sizes(1, 16, 16_128, 128), 126, 12, 132), 16);
    }
}
