//! Logits of the next token: repetition penalties and sampling.

use super::Sampling;
use qkv_simd::logits::top;
use qkv_simd::{Isa, philox};
use std::collections::BTreeSet;

/// Divides the scores of `generated` tokens by the penalty if positive, multiplies them if negative.
pub(crate) fn penalize(scores: &mut [f32], generated: &[u32], penalty: f64) {
    if penalty == 1.0 {
        return;
    }
    for &token in &generated.iter().copied().collect::<BTreeSet<u32>>() {
        let score = &mut scores[token as usize];
        *score = if *score > 0.0 { *score / penalty as f32 } else { *score * penalty as f32 };
    }
}

/// Excludes tokens that would repeat an n-gram of `length` tokens.
pub(crate) fn forbid_repeats(scores: &mut [f32], generated: &[u32], length: usize) {
    if length == 0 || generated.len() + 1 < length {
        return;
    }
    let (before, end) = (length - 1, &generated[generated.len() + 1 - length..]);
    for window in generated.windows(length) {
        if window[..before] == *end {
            scores[window[before] as usize] = f32::NEG_INFINITY;
        }
    }
}

/// How many tokens are sorted at first if any could be drawn.
const FIRST_SORTED: usize = 64;

/// The likeliest tokens, best first, to draw one from, and the total weight that top-p refers to. The tokens are the
/// top-k, or else at least as many as top-p keeps, so that a peaked distribution does not sort the whole vocabulary.
fn likeliest(scores: &[f32], sampling: &Sampling) -> (Vec<(u32, f32)>, f64) {
    let isa = Isa::best();
    let mass = |kept: &[(u32, f32)]| -> f64 {
        kept.first().map_or(0.0, |&(_, highest)| kept.iter().map(|&(_, x)| sampling.weights(highest).of(x)).sum())
    };
    if sampling.top_k > 0 {
        let kept = top(isa, scores, sampling.top_k.min(scores.len()));
        let total = mass(&kept);
        return (kept, total);
    }
    let highest = top(isa, scores, 1).first().map_or(0.0, |&(_, highest)| highest);
    let total = sampling.weights(highest).total(scores);
    let mut count = FIRST_SORTED;
    loop {
        let kept = top(isa, scores, count);
        if kept.len() < count || mass(&kept) >= sampling.top_p * total {
            return (kept, total);
        }
        count *= 16;
    }
}

/// Samples a token; `place`, that is source, prefix and position, selects the random number.
pub(crate) fn draw(scores: &[f32], sampling: &Sampling, place: [u32; 3]) -> Option<u32> {
    let [word, ..] = philox::block([place[0], place[1], place[2], 0x7361_6d70], sampling.seed);
    let share = (f64::from(word) + 0.5) / 4_294_967_296.0;
    if sampling.keeps_all() {
        return draw_from_all(scores, sampling, share);
    }
    let (mut kept, total) = likeliest(scores, sampling);
    let highest = kept.first()?.1;
    let weight = |score: f32| sampling.weights(highest).of(score);
    let mut mass = 0.0;
    let enough = kept.iter().position(|&(_, score)| {
        mass += weight(score);
        mass >= sampling.top_p * total
    });
    kept.truncate(enough.map_or(kept.len(), |at| at + 1));
    kept.retain(|&(_, score)| weight(score) >= sampling.min_p);
    let total: f64 = kept.iter().map(|&(_, score)| weight(score)).sum();
    let mut left = share * total;
    for &(token, score) in &kept {
        left -= weight(score);
        if left <= 0.0 {
            return Some(token);
        }
    }
    kept.last().map(|&(token, _)| token)
}

/// Draws from the whole vocabulary in its order, without sorting.
fn draw_from_all(scores: &[f32], sampling: &Sampling, share: f64) -> Option<u32> {
    let highest = top(Isa::best(), scores, 1).first()?.1;
    let weights = sampling.weights(highest);
    let reached = weights.reached(scores, share * weights.total(scores));
    // If rounding leads past the end: the last one that can be drawn.
    Some(reached.or_else(|| scores.iter().rposition(|&score| score > f32::NEG_INFINITY))? as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_n_gram_is_not_repeated() {
        let mut scores = vec![0.0; 5];
        forbid_repeats(&mut scores, &[1, 2, 3, 1, 2], 3);
        assert_eq!(scores, [0.0, 0.0, 0.0, f32::NEG_INFINITY, 0.0]);
        let mut scores = vec![0.0; 5];
        forbid_repeats(&mut scores, &[4, 2], 1);
        assert_eq!(scores.iter().filter(|x| x.is_finite()).count(), 3);
    }

    #[test]
    fn as_many_tokens_are_sorted_as_top_p_keeps() {
        // Flat and peaked: all of the vocabulary, or only a few.
        for (spread, most) in [(0.01, 5000), (30.0, FIRST_SORTED)] {
            let scores: Vec<f32> = (0..5000).map(|x| ((x * 7919) % 5000) as f32 / 5000.0 * spread * 10.0).collect();
            let sampling = Sampling { top_p: 0.9, ..Sampling::default() };
            let (kept, total) = likeliest(&scores, &sampling);
            assert!(kept.len() <= most, "{} of {most}", kept.len());
            assert_eq!(kept[..], top(Isa::best(), &scores, 5000)[..kept.len()]);
            let highest = kept[0].1;
            let expected: f64 = scores.iter().map(|x| f64::from(x - highest).exp()).sum();
            assert!((total - expected).abs() < 1e-9 * expected);
            let mass: f64 = kept.iter().map(|(_, x)| f64::from(x - highest).exp()).sum();
            assert!(mass >= 0.9 * expected);
        }
    }

    #[test]
    fn draws_follow_the_probabilities_and_the_cuts() {
        let scores = [0.0, 1.0, 2.0, -1.0f32];
        let share = |sampling: &Sampling| {
            let mut counts = [0usize; 4];
            for at in 0..20_000 {
                counts[draw(&scores, sampling, [at, 0, 0]).unwrap() as usize] += 1;
            }
            counts.map(|count| count as f64 / 20_000.0)
        };
        let all = share(&Sampling::default());
        let total: f64 = scores.iter().map(|&x| f64::from(x).exp()).sum();
        for (found, score) in all.into_iter().zip(scores) {
            assert!((found - f64::from(score).exp() / total).abs() < 0.015, "{found} {score}");
        }
        assert_eq!(share(&Sampling { top_k: 2, ..Sampling::default() })[0], 0.0);
        assert_eq!(share(&Sampling { top_p: 0.5, ..Sampling::default() })[2], 1.0);
        assert_eq!(share(&Sampling { min_p: 0.2, ..Sampling::default() })[0], 0.0);
        assert!(share(&Sampling { temperature: 0.1, ..Sampling::default() })[2] > 0.99);
    }
}
