//! The time of a call, repeated for a while.

use super::statistics::median;
use serde::Deserialize;
use std::time::Instant;

/// Warm-up calls, which do not count: the first pays for page faults, the second for sleeping threads.
const WARM_UP: usize = 2;

/// The best and the median of many calls.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub(crate) struct Timing {
    pub best_ms: f64,
    pub median_ms: f64,
}

impl Timing {
    /// Repeats a call for some seconds, at least once.
    pub fn of(seconds: f64, call: impl FnMut()) -> Timing {
        Timing::of_groups(seconds, 1, call, || ())
    }

    /// Repeats groups of calls and waits at the end of each group; within a group, a call may start while a device
    /// still computes the one before. The time of a call is its share of the group's time.
    pub fn of_groups(seconds: f64, group: usize, mut call: impl FnMut(), mut wait: impl FnMut()) -> Timing {
        (0..WARM_UP).for_each(|_| call());
        wait();
        let (begin, mut times) = (Instant::now(), Vec::new());
        while times.is_empty() || begin.elapsed().as_secs_f64() < seconds {
            let start = Instant::now();
            (0..group).for_each(|_| call());
            wait();
            times.push(start.elapsed().as_secs_f64() * 1e3 / group as f64);
        }
        let best_ms = times.iter().copied().fold(f64::INFINITY, f64::min);
        Timing { best_ms, median_ms: median(times).expect("at least one call") }
    }

    /// Combines rounds: the best of all, and the median of the medians. `None` if empty.
    pub fn over(rounds: &[Timing]) -> Option<Timing> {
        let best_ms = rounds.iter().map(|round| round.best_ms).fold(f64::INFINITY, f64::min);
        median(rounds.iter().map(|round| round.median_ms)).map(|median_ms| Timing { best_ms, median_ms })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_warm_up_calls_do_not_count_and_at_least_one_call_does() {
        let mut calls = 0;
        let timing = Timing::of(1e-9, || calls += 1);
        assert_eq!(calls, WARM_UP + 1);
        assert!(timing.best_ms <= timing.median_ms);
    }

    #[test]
    fn rounds_give_the_best_of_all_and_the_median_of_medians() {
        let round = |best_ms, median_ms| Timing { best_ms, median_ms };
        let over = Timing::over(&[round(3.0, 4.0), round(1.0, 9.0), round(2.0, 5.0)]);
        assert_eq!(over, Some(round(1.0, 5.0)));
        assert_eq!(Timing::over(&[]), None);
    }
}
