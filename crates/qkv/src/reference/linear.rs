//! The definition of linear attention. Its weight is `φ(q)·φ(k)`, so it is softmax attention with the score
//! `ln φ(q)·φ(k)`: that score, one pair at a time, and its gradient are all that is defined here.

use super::{sum, wide};
use crate::feature::orthogonal_rows;
use crate::features::Features;
use crate::problem::Problem;
use qkv_simd::{Element, Real};

/// The rows that the score compares: features, or with FAVOR+ their exponents.
pub(super) fn compared<F: Real, T: Element>(
    problem: &Problem<'_, T>,
    features: Features,
    rows: &[Vec<F>],
) -> Vec<Vec<F>> {
    let simple = |map: fn(F) -> F| rows.iter().map(|row| row.iter().map(|&x| map(x)).collect()).collect();
    match features {
        Features::Elu => simple(|x| if x > F::ZERO { x + F::ONE } else { x.exp() }),
        Features::Relu => simple(|x| if x < F::ZERO { F::ZERO } else { x }),
        Features::Favor { .. } => {
            let w = random_rows::<F, T>(problem, features);
            let exponents = |x: &Vec<F>| {
                let half = F::from_f64(-0.5 * scale(problem)) * sum(x.len(), |c| x[c] * x[c]);
                w.iter().map(|w| sum(x.len(), |c| w[c] * x[c]) + half).collect()
            };
            rows.iter().map(exponents).collect()
        }
    }
}

fn scale<T: Element>(problem: &Problem<'_, T>) -> f64 {
    problem.attention.scale.of_favor(problem.d)
}

/// The rows `w_f` times the root of the scale.
fn random_rows<F: Real, T: Element>(problem: &Problem<'_, T>, features: Features) -> Vec<Vec<F>> {
    let Features::Favor { count, seed } = features else { return Vec::new() };
    let (d, root) = (problem.d, scale(problem).sqrt());
    let all = orthogonal_rows(d, count, seed);
    (0..count).map(|f| all[f * d..][..d].iter().map(|&w| wide(w * root)).collect()).collect()
}

/// `ln φ(q)·φ(k)`.
pub(super) fn score<F: Real>(features: Features, query: &[F], key: &[F]) -> F {
    match features {
        Features::Elu | Features::Relu => {
            let weight = sum(query.len(), |f| query[f] * key[f]);
            if weight == F::ZERO { F::NEG_INFINITY } else { weight.ln() }
        }
        Features::Favor { count, .. } => {
            let most = query.iter().zip(key).fold(F::NEG_INFINITY, |most, (&a, &b)| {
                let x = a + b;
                if x > most || x.is_nan() { x } else { most }
            });
            let mean = sum(count, |f| (query[f] + key[f] - most).exp()) / F::from_f64(count as f64);
            most + mean.ln()
        }
    }
}

/// Adds the gradient of the score to those of the compared rows.
pub(super) fn gradient<F: Real>(
    features: Features,
    query: &[F],
    key: &[F],
    d_score: F,
    d_query: &mut [F],
    d_key: &mut [F],
) {
    let score = score(features, query, key);
    let d_weight = d_score / score.exp();
    for f in 0..query.len() {
        match features {
            Features::Elu | Features::Relu => {
                d_query[f] += d_weight * key[f];
                d_key[f] += d_weight * query[f];
            }
            Features::Favor { count, .. } => {
                let share = (query[f] + key[f] - score).exp() / F::from_f64(count as f64);
                d_query[f] += d_score * share;
                d_key[f] += d_score * share;
            }
        }
    }
}

/// Computes the gradients of the given rows from those of the compared rows.
pub(super) fn back<F: Real, T: Element>(
    problem: &Problem<'_, T>,
    features: Features,
    rows: &[Vec<F>],
    grads: &[Vec<F>],
) -> Vec<Vec<F>> {
    let w = random_rows::<F, T>(problem, features);
    let back = |(x, grad): (&Vec<F>, &Vec<F>)| -> Vec<F> {
        let along = F::from_f64(scale(problem)) * sum(grad.len(), |f| grad[f]);
        let each = |c: usize| match features {
            Features::Elu => grad[c] * if x[c] > F::ZERO { F::ONE } else { x[c].exp() },
            Features::Relu => grad[c] * if x[c] > F::ZERO { F::ONE } else { F::ZERO },
            Features::Favor { .. } => sum(grad.len(), |f| grad[f] * w[f][c]) - along * x[c],
        };
        (0..x.len()).map(each).collect()
    };
    rows.iter().zip(grads).map(back).collect()
}
