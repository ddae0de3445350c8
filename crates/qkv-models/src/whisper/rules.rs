//! Which tokens may follow: suppressed ones never, and times in pairs that do not go backwards. As in the reference,
//! the rules set logits to −∞ before probabilities are computed.

use super::vocabulary::Vocabulary;
use qkv_simd::Isa;
use qkv_simd::logits::{exclude, log_sum_exp, maximum};

/// The rules of one model.
#[derive(Clone, Debug)]
pub(super) struct Rules {
    suppressed: Vec<u32>,
    at_start: Vec<u32>,
    end: usize,
    no_timestamps: usize,
    /// The first time token.
    times: usize,
    /// The latest time that a window may start with, in steps.
    latest_start: usize,
    /// Whether to write times.
    timestamps: bool,
}

/// The latest time that a window may start with: 1 second.
const LATEST_START: usize = 50;

impl Rules {
    pub fn new(vocabulary: &Vocabulary, timestamps: bool) -> Rules {
        Rules {
            suppressed: vocabulary.suppressed(),
            at_start: vocabulary.suppressed_at_start(),
            end: vocabulary.end as usize,
            no_timestamps: vocabulary.no_timestamps as usize,
            times: vocabulary.times() as usize,
            latest_start: LATEST_START,
            timestamps,
        }
    }

    /// Applies the rules to the logits of the token that follows `tokens`.
    pub fn apply(&self, logits: &mut [f32], tokens: &[u32]) {
        let mut suppress = |id: u32| {
            if let Some(logit) = logits.get_mut(id as usize) {
                *logit = f32::NEG_INFINITY;
            }
        };
        self.suppressed.iter().for_each(|&id| suppress(id));
        if tokens.is_empty() {
            self.at_start.iter().for_each(|&id| suppress(id));
        }
        if !self.timestamps {
            return;
        }
        let times = self.times;
        logits[self.no_timestamps] = f32::NEG_INFINITY;
        let is_time = |token: u32| token as usize >= times;
        match tokens {
            [] => {
                // A window starts with a time, and not a late one.
                exclude(&mut logits[..times]);
                let latest = (times + self.latest_start + 1).min(logits.len());
                exclude(&mut logits[latest..]);
                return;
            }
            [only] if is_time(*only) => {
                exclude(&mut logits[times..]);
                return;
            }
            [.., before, last] if is_time(*last) && is_time(*before) => {
                exclude(&mut logits[times..]);
                return;
            }
            [.., last] if is_time(*last) => {
                // The end of a segment: the start of the next one follows, or the end of everything.
                exclude(&mut logits[..self.end]);
                let until = (*last as usize).min(logits.len());
                exclude(&mut logits[times..until]);
            }
            _ => {
                // Times go forward.
                if let Some(&last) = tokens.iter().rev().find(|&&token| is_time(token)) {
                    let until = (last as usize + 1).min(logits.len());
                    exclude(&mut logits[times..until]);
                }
            }
        }
        // If all times together are more probable than any single text token, the token is a time.
        let together = log_sum_exp(Isa::best(), &logits[times..]);
        let text = maximum(&logits[..times]);
        if together > text {
            exclude(&mut logits[..times]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Text 0..9, end 9, no times 10, times 11..31.
    fn rules() -> Rules {
        Rules {
            suppressed: vec![3],
            at_start: vec![4, 9],
            end: 9,
            no_timestamps: 10,
            times: 11,
            latest_start: 5,
            timestamps: true,
        }
    }

    fn allowed(rules: &Rules, logits: &[f32], tokens: &[u32]) -> Vec<usize> {
        let mut logits = logits.to_vec();
        rules.apply(&mut logits, tokens);
        (0..logits.len()).filter(|&id| logits[id] > f32::NEG_INFINITY).collect()
    }

    /// Text tokens each more probable than all times together.
    fn texts() -> Vec<f32> {
        (0..31).map(|id| if id < 11 { 5.0 } else { 0.0 }).collect()
    }

    #[test]
    fn a_window_begins_with_an_early_time_and_goes_on_with_text() {
        let rules = rules();
        assert_eq!(allowed(&rules, &texts(), &[]), (11..=16).collect::<Vec<_>>());
        assert_eq!(allowed(&rules, &texts(), &[12]), [0, 1, 2, 4, 5, 6, 7, 8, 9]);
    }

    #[test]
    fn times_come_in_pairs_and_go_forward() {
        let rules = rules();
        // A time after text: text is excluded, and times before it are too.
        let found = allowed(&rules, &texts(), &[12, 1, 15]);
        assert_eq!(found.first(), Some(&9));
        assert_eq!(found[1..], (15..31).collect::<Vec<_>>());
        // Two times: text follows.
        assert_eq!(allowed(&rules, &texts(), &[12, 1, 15, 15]), [0, 1, 2, 4, 5, 6, 7, 8, 9]);
        // After text: times later than the last one.
        let found = allowed(&rules, &texts(), &[12, 1, 15, 16, 2]);
        assert_eq!(found[..9], [0, 1, 2, 4, 5, 6, 7, 8, 9]);
        assert_eq!(found[9..], (17..31).collect::<Vec<_>>());
    }

    #[test]
    fn times_that_are_likelier_together_than_any_text_win() {
        let mut logits = vec![0.0; 31];
        logits[1] = 2.0;
        // Twenty times of e⁰ against one text token of e².
        assert_eq!(allowed(&rules(), &logits, &[11, 1])[0], 12);
        logits[1] = 4.0;
        assert_eq!(allowed(&rules(), &logits, &[11, 1])[0], 0);
    }

    #[test]
    fn without_times_only_suppressed_tokens_are_gone() {
        let rules = Rules { timestamps: false, ..rules() };
        assert_eq!(allowed(&rules, &texts(), &[]).len(), 31 - 3);
        assert_eq!(allowed(&rules, &texts(), &[1]).len(), 31 - 1);
    }
}
