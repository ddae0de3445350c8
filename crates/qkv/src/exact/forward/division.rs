//! Divides the heads of a forward pass among its workers: most are processed whole, the last ones in parts of a few
//! query tiles, so that all workers finish together. No bit of the result depends on it.

use crate::tuning::{PACKING, QUERY_TILES_AT_ONCE};

/// How many heads, from the first on, are processed whole, and how many query tiles a part of the others has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Division {
    pub whole: usize,
    pub at_once: usize,
}

/// From this many query tiles per head on, parts are so small compared with a head that no count is needed.
const MANY_TILES: usize = 64;

impl Division {
    /// For key heads with `slots` query heads of `tiles` tiles each.
    pub fn new(heads: usize, slots: usize, tiles: usize, threads: usize) -> Division {
        let most = QUERY_TILES_AT_ONCE.min(tiles.max(1));
        if threads <= 1 || tiles == 0 {
            return Division { whole: heads, at_once: most };
        }
        if slots * tiles >= MANY_TILES {
            return Division { whole: heads.saturating_sub(threads), at_once: most };
        }
        // A multiple of the number of workers stays whole; besides the remaining heads, one more per worker may be
        // divided.
        let rest = heads % threads;
        let divided = [0, rest, rest + threads].into_iter().filter(|&divided| divided <= heads);
        let choices = divided.flat_map(|divided| (1..=most).map(move |at_once| (heads - divided, at_once)));
        let time = |&(whole, at_once): &(usize, usize)| {
            let parts = tiles.div_ceil(at_once);
            let of_head = (slots * tiles) as f64 + PACKING;
            let of_part = tiles as f64 / parts as f64 + PACKING;
            let parts = (heads - whole) * slots * parts;
            // No two workers are equally fast: the longer the last tasks, the longer some of them wait at the end.
            let last = if parts > 0 { of_part } else { of_head };
            finished(threads, (whole, of_head), (parts, of_part)) + last / 8.0
        };
        let best = choices.min_by(|a, b| time(a).total_cmp(&time(b)));
        best.map_or(Division { whole: heads, at_once: most }, |(whole, at_once)| Division {
            whole,
            at_once: tiles.div_ceil(tiles.div_ceil(at_once)),
        })
    }
}

/// The time when the last worker finishes, for tasks taken in order: some of one length, then some of another.
fn finished(threads: usize, (whole, of_head): (usize, f64), (mut parts, of_part): (usize, f64)) -> f64 {
    // Workers that took one head more than the others start on parts later.
    let late = whole % threads;
    let early = (whole / threads) as f64 * of_head;
    let mut free = [(early, threads - late), (early + of_head, late)];
    let mut end = if late > 0 { early + of_head } else { early };
    while parts > 0 {
        let next = if late > 0 && free[1].0 < free[0].0 { &mut free[1] } else { &mut free[0] };
        next.0 += of_part;
        end = end.max(next.0);
        parts = parts.saturating_sub(next.1);
    }
    end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_that_divide_evenly_are_whole_where_they_are_short() {
        assert_eq!(Division::new(16, 1, 2, 16).whole, 16);
        assert_eq!(Division::new(7, 1, 5, 1).whole, 7);
    }

    #[test]
    fn the_last_heads_are_divided_where_whole_ones_would_leave_workers_idle() {
        assert!(Division::new(24, 1, 11, 16).whole <= 16);
        assert_eq!(Division::new(5, 1, 11, 16).whole, 0);
        assert_eq!(Division::new(1, 1, 11, 2), Division { whole: 0, at_once: 3 });
        assert_eq!(Division::new(8, 1, 128, 2), Division { whole: 6, at_once: 4 });
    }

    #[test]
    fn every_head_is_taken_and_parts_hold_what_a_worker_computes_at_once() {
        for heads in 0..40 {
            for (slots, tiles) in [(1, 0), (1, 1), (1, 3), (8, 2), (4, 13), (1, 70)] {
                for threads in [1, 2, 3, 16] {
                    let Division { whole, at_once } = Division::new(heads, slots, tiles, threads);
                    assert!(whole <= heads && (1..=QUERY_TILES_AT_ONCE).contains(&at_once));
                }
            }
        }
    }
}
