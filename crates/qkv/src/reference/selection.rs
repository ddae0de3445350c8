//! How a row of scores becomes weights, by the definition: one row at a time, in plain loops.

use crate::select::Select;
use qkv_simd::Real;

/// The weights of a row, and its other results.
pub(super) struct Row<F> {
    /// The softmax of the scores (for sparsemax the weights): the gradients of scores are computed from it.
    pub p: Vec<F>,
    /// The factors of the values, before dropout and the like.
    pub weights: Vec<F>,
    /// The log-sum-exp, or sparsemax's threshold.
    pub lse: F,
    /// The keys that were chosen, ascending.
    pub chosen: Vec<usize>,
    /// The log-probability of hard attention's choice.
    pub log_prob: F,
}

/// Applies a selection to a row of scores. Scores that top-k leaves out become −∞.
pub(super) fn select<F: Real>(
    select: Select,
    scores: &mut [F],
    sink: F,
    round: fn(F) -> F,
    noise: impl Fn(usize) -> f64,
) -> Row<F> {
    let kept = |scores: &[F], j: usize| scores[j] != F::NEG_INFINITY;
    let mut row = Row { p: Vec::new(), weights: Vec::new(), lse: F::ZERO, chosen: Vec::new(), log_prob: F::ZERO };
    match select {
        Select::Sparsemax => {
            (row.weights, row.lse) = sparsemax(scores, round);
            row.p = row.weights.clone();
            return row;
        }
        Select::TopK(k) => {
            let mut order: Vec<usize> = (0..scores.len()).filter(|&j| kept(scores, j)).collect();
            // A stable sort: of equal scores the lowest key comes first.
            order.sort_by(|&a, &b| scores[b].to_f64().total_cmp(&scores[a].to_f64()));
            order.truncate(k);
            order.sort_unstable();
            for (j, score) in scores.iter_mut().enumerate() {
                if order.binary_search(&j).is_err() {
                    *score = F::NEG_INFINITY;
                }
            }
            row.chosen = order;
        }
        _ => {}
    }
    (row.p, row.lse) = softmax(scores, sink, round);
    row.weights = row.p.clone();
    if let Select::Hard(_) = select {
        let mut best: Option<(f64, usize)> = None;
        for j in (0..scores.len()).filter(|&j| kept(scores, j)) {
            let noisy = scores[j].to_f64() + noise(j);
            if best.is_none_or(|(most, _)| noisy > most || noisy.is_nan() && !most.is_nan()) {
                best = Some((noisy, j));
            }
        }
        // A visible NaN or +∞ makes the row NaN, as it does for softmax.
        if !row.lse.is_nan() {
            row.weights.fill(F::ZERO);
        }
        if let Some((_, j)) = best {
            if !row.lse.is_nan() {
                row.weights[j] = F::ONE;
            }
            row.log_prob = scores[j] - row.lse;
            row.chosen = vec![j];
        }
    }
    row
}

fn largest<F: Real>(scores: &[F], start: F) -> F {
    // NaN stays: nothing is greater.
    scores.iter().fold(start, |most, &s| if s > most || s.is_nan() { s } else { most })
}

/// The softmax of a row that may have a sink, and its log-sum-exp. A row that sees nothing is 0.
fn softmax<F: Real>(scores: &[F], sink: F, round: fn(F) -> F) -> (Vec<F>, F) {
    let most = largest(scores, sink);
    if most == F::NEG_INFINITY {
        return (vec![F::ZERO; scores.len()], most);
    }
    let power = |s: F| if s == F::NEG_INFINITY { F::ZERO } else { (s - most).exp() };
    let sum = scores.iter().fold(power(sink), |sum, &s| sum + power(s));
    let weight = |s: &F| if *s == F::NEG_INFINITY { F::ZERO } else { round(power(*s) / sum) };
    (scores.iter().map(weight).collect(), most + sum.ln())
}

/// `max(s − τ, 0)` with the threshold for which these sum to 1: sort, and take as many as stay above it.
fn sparsemax<F: Real>(scores: &[F], round: fn(F) -> F) -> (Vec<F>, F) {
    let most = largest(scores, F::NEG_INFINITY);
    if most == F::NEG_INFINITY {
        return (vec![F::ZERO; scores.len()], most);
    }
    if !most.is_finite() {
        #[allow(clippy::eq_op)] // NaN of either a NaN or an infinity.
        let nan = most - most;
        let visible = |s: &F| if *s == F::NEG_INFINITY { F::ZERO } else { nan };
        return (scores.iter().map(visible).collect(), nan);
    }
    let mut sorted: Vec<F> = scores.iter().filter(|&&s| s != F::NEG_INFINITY).map(|&s| s - most).collect();
    sorted.sort_by(|a, b| b.to_f64().total_cmp(&a.to_f64()));
    let (mut sum, mut tau) = (F::ZERO, F::ZERO);
    for (count, &s) in sorted.iter().enumerate() {
        sum += s;
        let candidate = (sum - F::ONE) / F::from_f64(count as f64 + 1.0);
        if s > candidate {
            tau = candidate;
        }
    }
    let above = |s: &F| {
        let above = *s - most - tau;
        if *s == F::NEG_INFINITY || above < F::ZERO { F::ZERO } else { round(above) }
    };
    (scores.iter().map(above).collect(), most + tau)
}
