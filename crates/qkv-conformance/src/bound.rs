//! How far a result may be from the definition: one standard deviation for each of its elements.
//!
//! Every rounding that an engine is entitled to moves a result by at most `u · |what is rounded| · |derivative|`. The
//! squares of these largest effects are summed per element, with the values of the `f64` definition. The root of that
//! sum is the *spread* of the element: the joint effect of the roundings if their signs are independent. It depends on
//! the row's own scores, weights and values and on the length of its sums, not on any engine's measured error.
//!
//! The roundings, with `u` half an ε of the tensor's type and `a` half an ε of the type of sums:
//!
//! | rounding | size |
//! | --- | --- |
//! | a sum of `L` products, in any order | `a · √L · √(norm of the terms² + sum²)` |
//! | scale, soft-cap, bias, conversion of the exponent to base 2 | `a` of each value |
//! | exponential, hyperbolic tangent | [`Roundoff::exp`]; 4 units in the last place |
//! | weights before they multiply values and upstream gradients | `u`, relative |
//! | output, which the row term `dO·O` of the backward pass reads | `u`, relative |
//! | gradients of scores before they multiply queries and keys | `u`, relative |
//! | every result | `u`, relative; log-sum-exp, entropy and weights `a` |
//!
//! Scores and gradients of weights are never rounded to the tensor's type. An engine that sums gradients of queries in
//! fixed point makes one more rounding, which [`add_fixed_point`] adds.

#![allow(clippy::needless_range_loop)] // Indices follow the formulas of the derivation.

mod fixed_point;
mod score;

use crate::case::{Case, Data, Sizes};
pub use fixed_point::add_fixed_point;
use qkv::reference::Forward;
use qkv::{Choice, Element, Scale, Score, Select, Tensor};
use score::RawScore;

/// Unit roundoffs of an element type.
#[derive(Clone, Copy, Debug)]
pub struct Roundoff {
    /// Of the tensor's type.
    pub stored: f64,
    /// Of the type of sums.
    pub sum: f64,
    /// Relative error of the exponential.
    pub exp: f64,
    /// Absolute error of a number that is subnormal in the tensor's type.
    pub subnormal: f64,
    /// Weights below the largest of their row times this are flushed to 0.
    pub flushed: f64,
    /// The smallest normal number of the type of sums: weights below it are flushed too.
    pub smallest: f64,
}

impl Roundoff {
    /// Those of `T`.
    pub fn of<T: Element>() -> Roundoff {
        // The definition in f64 makes as many roundings as an engine.
        let twice = if T::NAME == "f64" { 2f64.sqrt() } else { 1.0 };
        let sum = <T::Acc as qkv_simd::Element>::EPSILON / 2.0 * twice;
        Roundoff {
            stored: T::EPSILON / 2.0,
            sum,
            // bf16 engines may use an exponential of 18 bits: its error is negligible beside that of a rounded weight.
            exp: if T::NAME == "bf16" { 2f64.powi(-18) } else { 4.0 * sum },
            subnormal: match T::NAME {
                "f16" => 2f64.powi(-25),
                "bf16" => 2f64.powi(-134),
                _ => 0.0,
            },
            flushed: 2f64.powi(if T::NAME == "f64" { -898 } else { -98 }),
            smallest: 2f64.powi(if T::NAME == "f64" { -1022 } else { -126 }),
        }
    }
}

/// The joint spread of independent errors: the root of the sum of their squares.
fn joint<const N: usize>(parts: [f64; N]) -> f64 {
    let square: f64 = parts.iter().map(|x| x * x).sum();
    // `hypot` takes ten times as long: for squares that vanish or overflow.
    if (1e-290..1e290).contains(&square) { square.sqrt() } else { parts.into_iter().fold(0.0, f64::hypot) }
}

/// The spreads of one result, element by element.
pub type Spread = (&'static str, Vec<f64>);

/// The spreads of every result of a case, by name, in a type of these roundoffs. `gradients` are those of the
/// definition.
pub fn spreads(
    case: &Case,
    data: &Data<f64>,
    unit: Roundoff,
    truth: &Forward<f64>,
    gradients: &[(&'static str, Vec<f64>)],
) -> Vec<Spread> {
    let mut all = All::new(case, data);
    for b in 0..case.sizes.b {
        for h in 0..case.sizes.hq {
            Head::new(case, data, unit, truth, b, h).add_to(&mut all);
        }
    }
    let Sizes { b, hq, hk, n, m, .. } = case.sizes;
    let mut spreads = all.finish();
    // The roundings of the sums over queries, keys or all pairs, and that of the result.
    for (name, gradient) in gradients {
        let length = match *name {
            "d_q" | "d_center" => m,
            "d_k" | "d_v" => n * hq / hk.max(1),
            _ => b * hq * n * m,
        };
        let own = unit.stored.powi(2) + unit.sum.powi(2) * length as f64;
        let (_, spread) = spreads.iter_mut().find(|(of, _)| of == name).expect("every gradient has a spread");
        for (spread, x) in spread.iter_mut().zip(gradient) {
            *spread = joint([*spread, own.sqrt() * x, unit.subnormal]);
        }
    }
    spreads
}

/// The variances of all results while heads are added.
struct All {
    out: Vec<f64>,
    lse: Vec<f64>,
    entropy: Vec<f64>,
    log_prob: Vec<f64>,
    weights: Vec<f64>,
    d_v: Vec<f64>,
    d_center: Vec<f64>,
    d_sinks: Vec<f64>,
    d_bias: Sums,
    d_table: Sums,
    d_scale: Sums,
    /// Of queries, keys and the score's parameters, by [`Parameter`].
    of_score: [Sums; 6],
}

/// A gradient that is a sum over pairs of a score's gradient times the derivative of the score.
#[derive(Default)]
struct Sums {
    variance: Vec<f64>,
    /// For each element, Σⱼ p·derivative of the current row: the effect that an error of the whole row has on it.
    row: Vec<f64>,
    touched: Vec<usize>,
}

impl Sums {
    fn new(len: usize) -> Sums {
        Sums { variance: vec![0.0; len], row: vec![0.0; len], touched: Vec::new() }
    }

    /// `by` is the derivative, `norm` the norm of the terms that it is the sum of.
    fn add(&mut self, at: usize, pair: &PairError, by: f64, norm: f64) {
        self.variance[at] += pair.variance * by * by + (pair.relative * norm).powi(2);
        if self.row[at] == 0.0 {
            self.touched.push(at);
        }
        self.row[at] += pair.share * by;
    }

    fn end_row(&mut self, error: f64) {
        for at in self.touched.drain(..) {
            self.variance[at] += (error * self.row[at]).powi(2);
            self.row[at] = 0.0;
        }
    }
}

/// Errors of the gradient of one score.
struct PairError {
    /// Of the gradient itself.
    variance: f64,
    /// The factor of the terms of the derivative: their own roundings and those of the sum over pairs.
    relative: f64,
    /// The pair's share in an error of the whole row.
    share: f64,
}

/// The inputs that a raw score is computed from.
#[derive(Clone, Copy)]
enum Parameter {
    Q,
    K,
    W,
    WQ,
    WK,
    VScore,
}

const PARAMETERS: [&str; 6] = ["d_q", "d_k", "d_w", "d_w_q", "d_w_k", "d_v_score"];

impl All {
    fn new(case: &Case, data: &Data<f64>) -> All {
        let Sizes { b, hq, hk, n, m, dv, .. } = case.sizes;
        let rows = b * hq * n;
        let len = |tensor: &Option<Tensor<f64, 4>>| tensor.as_ref().map_or(0, |t| t.data().len());
        let numbers = |slice: &Option<Vec<f64>>| slice.as_ref().map_or(0, Vec::len);
        All {
            out: vec![0.0; rows * dv],
            lse: vec![0.0; rows],
            entropy: vec![0.0; rows],
            log_prob: vec![0.0; rows],
            weights: vec![0.0; rows * m],
            d_v: vec![0.0; b * hk * m * dv],
            d_center: vec![0.0; numbers(&data.center)],
            d_sinks: vec![0.0; numbers(&data.sinks)],
            d_bias: Sums::new(len(&data.bias)),
            d_table: Sums::new(data.table.as_ref().map_or(0, |t| t.data().len())),
            d_scale: Sums::new(numbers(&data.scale)),
            of_score: [
                Sums::new(data.q.data().len()),
                Sums::new(data.k.data().len()),
                Sums::new(len(&data.w)),
                Sums::new(len(&data.w_q)),
                Sums::new(len(&data.w_k)),
                Sums::new(numbers(&data.v_score)),
            ],
        }
    }

    fn sums(&mut self) -> impl Iterator<Item = &mut Sums> {
        self.of_score.iter_mut().chain([&mut self.d_bias, &mut self.d_table, &mut self.d_scale])
    }

    fn finish(self) -> Vec<Spread> {
        let of_score = PARAMETERS.into_iter().zip(self.of_score.map(|sums| sums.variance));
        let others = [
            ("out", self.out),
            ("lse", self.lse),
            ("entropy", self.entropy),
            ("log_prob", self.log_prob),
            ("weights", self.weights),
            ("d_v", self.d_v),
            ("d_center", self.d_center),
            ("d_sinks", self.d_sinks),
            ("d_bias", self.d_bias.variance),
            ("d_table", self.d_table.variance),
            ("d_scale", self.d_scale.variance),
        ];
        let root = |(name, variance): (_, Vec<f64>)| (name, variance.into_iter().map(f64::sqrt).collect());
        of_score.chain(others).map(root).collect()
    }
}

/// One query head of a case: its rows in `f64`, and the definition's results.
struct Head<'a> {
    case: &'a Case,
    data: &'a Data<f64>,
    truth: &'a Forward<f64>,
    unit: Roundoff,
    b: usize,
    h: usize,
    kh: usize,
    q: Vec<Vec<f64>>,
    k: Vec<Vec<f64>>,
    v: Vec<Vec<f64>>,
    d_out: Vec<Vec<f64>>,
    score: RawScore,
    /// The factor of a raw score, temperature included.
    scale: f64,
}

/// A raw score, its spread, and the derivative of the steps after it.
struct Made {
    raw: f64,
    /// Spread of the final score.
    spread: f64,
    /// Derivative of the final score with respect to the raw one: scale and soft-cap.
    slope: f64,
    /// The largest possible magnitude of terms of the derivative: where a soft-cap saturates, `1 − tanh²` cancels.
    slope_terms: f64,
    /// Relative spread of the terms of the derivative.
    slope_spread: f64,
}

impl<'a> Head<'a> {
    fn new(case: &'a Case, data: &'a Data<f64>, unit: Roundoff, truth: &'a Forward<f64>, b: usize, h: usize) -> Self {
        let kh = h / (case.sizes.hq / case.sizes.hk.max(1)).max(1);
        Head {
            case,
            data,
            truth,
            unit,
            b,
            h,
            kh,
            q: rows(&data.q, b, h),
            k: rows(&data.k, b, kh),
            v: rows(&data.v, b, kh),
            d_out: rows(&data.d_out, b, h),
            score: RawScore::new(case, data, h, kh),
            scale: factor(case, data)(h),
        }
    }

    /// Adds the variances of this head to `all`.
    fn add_to(&self, all: &mut All) {
        for i in 0..self.case.sizes.n {
            self.add_row(i, all);
        }
    }

    fn add_row(&self, i: usize, all: &mut All) {
        let Sizes { hq, n, m, dv, .. } = self.case.sizes;
        let (b, h, unit) = (self.b, self.h, self.unit);
        let (u, a) = (unit.stored, unit.sum);
        let select = self.case.attention.select;
        let sparse = select == Select::Sparsemax;
        let at = (b * hq + h) * n + i;
        let output = &self.truth.output;
        let lse = output.threshold.as_ref().unwrap_or(&output.lse)[[b, h, i]];
        if lse == f64::NEG_INFINITY {
            return; // it sees no key, and every result is exactly 0 or −∞
        }
        let length = m as f64;
        let scores: Vec<f64> = (0..m).map(|j| self.truth.scores[[b, h, i, j]]).collect();
        let weights: Vec<f64> = (0..m).map(|j| self.truth.weights[[b, h, i, j]]).collect();
        let seen: Vec<usize> = (0..m).filter(|&j| scores[j] != f64::NEG_INFINITY).collect();
        let made: Vec<Made> = (0..m).map(|j| self.made(i, j, scores[j])).collect();
        // Softmax: a probability and its relative spread. Sparsemax: 1 within the support, and the score's own spread.
        let p: Vec<f64> = (0..m)
            .map(|j| match select {
                Select::Sparsemax => f64::from(weights[j] != 0.0),
                _ => (scores[j] - lse).exp(),
            })
            .collect();
        let support: f64 = p.iter().sum();
        let relative = |j: usize| {
            let exponent = if sparse { 0.0 } else { 2.0 * a * (scores[j] - lse).abs() };
            joint([made[j].spread, exponent])
        };
        // The log-sum-exp, or sparsemax's threshold.
        let mut lse_spread = seen.iter().map(|&j| (p[j] * relative(j) / support.max(1e-300)).powi(2)).sum::<f64>();
        if sparse {
            lse_spread += (a * (lse.abs() + 1.0)).powi(2) * length;
        } else {
            lse_spread += a * a * (length + lse * lse) + unit.exp.powi(2);
        }
        let lse_spread = lse_spread.sqrt();
        all.lse[at] = lse_spread.powi(2);

        // Entropy: −Σ p (s − lse).
        let entropy = seen.iter().map(|&j| if p[j] > 0.0 { -p[j] * (scores[j] - lse) } else { 0.0 }).sum::<f64>();
        let mut entropy_variance = (lse_spread * (1.0 + entropy)).powi(2) + a * a * length * entropy.powi(2);
        entropy_variance += (a * lse).powi(2) + (unit.exp * (1.0 + entropy)).powi(2);
        for &j in &seen {
            let by = p[j] * (1.0 + (scores[j] - lse).abs());
            entropy_variance += by * by * (relative(j).powi(2) + a * a * length);
        }
        all.entropy[at] = entropy_variance;

        // Weights, and the error of each when it multiplies a value.
        let of_weight: Vec<f64> = (0..m)
            .map(|j| {
                if scores[j] == f64::NEG_INFINITY {
                    return 0.0;
                }
                let modulation = if p[j] > 0.0 { weights[j] / p[j] } else { 0.0 };
                let own = match select {
                    Select::Hard(_) => 0.0,
                    Select::Sparsemax => p[j] * joint([relative(j), lse_spread]),
                    _ => weights[j] * joint([relative(j), unit.exp, lse_spread, 2.0 * a]),
                };
                let gaussian = if self.case.attention.local.is_some() { 8.0 * a * modulation * p[j] } else { 0.0 };
                joint([own, gaussian])
            })
            .collect();
        // Weights far below the largest of the row are flushed to 0, and so are all below the smallest normal number:
        // beside a sink that takes all the mass, those of a whole row.
        let largest = seen.iter().fold(0.0f64, |largest, &j| largest.max(p[j]));
        let modulated = seen.iter().filter(|&&j| p[j] > 0.0).fold(1.0f64, |most, &j| most.max(weights[j] / p[j]));
        let flushed = (largest * modulated * unit.flushed).max(unit.smallest);
        for &j in &seen {
            all.weights[at * m + j] = of_weight[j].powi(2) + flushed.powi(2);
        }
        if let Select::Hard(_) = select {
            let chosen = seen.iter().copied().find(|&j| weights[j] != 0.0);
            if let Some(j) = chosen {
                all.log_prob[at] = made[j].spread.powi(2) + lse_spread.powi(2) + (a * (scores[j] - lse)).powi(2);
            }
        }

        // Output. A hard choice copies a value without rounding.
        let hard = matches!(select, Select::Hard(_));
        let rounded: Vec<f64> = (0..m)
            .map(|j| match select {
                Select::Hard(_) => 0.0,
                _ => {
                    let rounding = joint([u * weights[j], unit.subnormal, flushed]);
                    of_weight[j].powi(2) + rounding.powi(2)
                }
            })
            .collect();
        let mut out_variance = vec![0.0; dv];
        for x in 0..dv {
            let out = self.truth.output.values[[b, h, i, x]];
            let mut variance = 0.0;
            let mut norm = 0.0;
            for &j in &seen {
                variance += rounded[j] * self.v[j][x].powi(2);
                norm += (weights[j] * self.v[j][x]).powi(2);
            }
            let threshold: f64 =
                if sparse { lse_spread * seen.iter().map(|&j| p[j] * self.v[j][x]).sum::<f64>() } else { 0.0 };
            variance += threshold.powi(2) + (lse_spread * out).powi(2);
            if !hard {
                variance += a * a * length * (norm + out * out) + (u * out).powi(2) + unit.subnormal.powi(2);
            }
            all.out[at * dv + x] = variance;
            out_variance[x] = variance;
        }

        // Values: each key of the row.
        let queries = (n * self.case.sizes.hq / self.case.sizes.hk.max(1)) as f64;
        for &j in &seen {
            for x in 0..dv {
                let d_out = self.d_out[i][x];
                let term = (weights[j] * d_out).powi(2);
                let to = (((b * self.case.sizes.hk + self.kh) * m) + j) * dv + x;
                all.d_v[to] += rounded[j] * d_out * d_out + a * a * queries * term;
            }
        }

        // Gradients of scores.
        let of_rows = |data: &Option<Vec<f64>>| data.as_ref().map_or(0.0, |d| d[at]);
        let (d_lse, d_entropy) = (of_rows(&self.data.d_lse), of_rows(&self.data.d_entropy));
        let d_log_prob = of_rows(&self.data.d_log_prob);
        let through = !matches!(select, Select::Hard(Choice { straight_through: false, .. }));
        let mut d_weights = vec![0.0; m];
        let mut d_weight_spreads = vec![0.0; m];
        for &j in &seen {
            let modulation = if hard {
                1.0
            } else if p[j] > 0.0 {
                weights[j] / p[j]
            } else {
                0.0
            };
            let modulation = if sparse { 1.0 } else { modulation };
            let terms = (0..dv).map(|x| self.d_out[i][x] * self.v[j][x]);
            let sum: f64 = terms.clone().sum();
            let norm: f64 = terms.map(|term| term * term).sum();
            if through {
                d_weights[j] = sum * modulation;
                d_weight_spreads[j] = a * ((dv as f64) * (norm + sum * sum)).sqrt() * modulation.abs();
            }
            if let (Some(_), Some(local)) = (&self.data.center, self.case.attention.local) {
                let sigma = local as f64 / 2.0;
                let center = self.data.center.as_ref().expect("just seen")[at];
                let pull = (j as f64 - center) / (sigma * sigma);
                let term = p[j] * d_weights[j] * pull;
                let own = relative(j).powi(2) + lse_spread.powi(2) + unit.exp.powi(2) + a * a * (length + 64.0);
                all.d_center[at] += term * term * own + (p[j] * d_weight_spreads[j] * pull).powi(2);
                all.d_center[at] += (a * p[j] * d_weights[j] * center / (sigma * sigma)).powi(2);
            }
        }
        let delta: f64 = seen.iter().map(|&j| p[j] * d_weights[j]).sum();
        let mass: f64 = seen.iter().map(|&j| p[j]).sum();
        let row = delta - d_lse + d_log_prob + d_entropy * (entropy - mass);
        // An error that all scores of the row share: the row term, computed from the rounded output.
        let mut row_variance = entropy_variance * d_entropy.powi(2) + (a * row).powi(2);
        row_variance += (d_entropy * lse_spread).powi(2);
        if sparse {
            let mean: f64 = seen.iter().map(|&j| (p[j] * d_weight_spreads[j]).powi(2)).sum::<f64>();
            row_variance += mean / support.max(1.0).powi(2) + a * a * length * (delta / support.max(1.0)).powi(2);
        } else if through {
            let norm: f64 = (0..dv).map(|x| (self.d_out[i][x] * self.truth.output.values[[b, h, i, x]]).powi(2)).sum();
            row_variance += (0..dv).map(|x| self.d_out[i][x].powi(2) * out_variance[x]).sum::<f64>();
            row_variance += a * a * (dv as f64) * (norm + delta * delta);
            if hard {
                // The row term of a choice is computed from probabilities, not from the output.
                row_variance += seen
                    .iter()
                    .map(|&j| {
                        (p[j] * d_weights[j]).powi(2) * (relative(j).powi(2) + lse_spread.powi(2) + a * a * length)
                    })
                    .sum::<f64>();
            }
        }
        let row_spread = row_variance.sqrt();
        if let Some(sinks) = &self.data.sinks {
            let sink = (sinks[h] - lse).exp();
            let relative = joint([lse_spread, unit.exp, a * (all_rows(self.case).sqrt() + lse.abs())]);
            all.d_sinks[h] += (sink * row * relative).powi(2) + (sink * row_spread).powi(2);
        }
        let mean = delta / support.max(1.0);
        // What is rounded is the gradient before the scale, with soft-cap; with a learned scale it may be after it.
        let scale_first = self.case.attention.scale == Scale::Learned;
        let subnormal = unit.subnormal / if scale_first { self.scale.abs().max(1e-6) } else { 1.0 };
        let linear = matches!(self.case.attention.score, Score::Linear(_));
        for &j in &seen {
            let of_entropy = if d_entropy == 0.0 { 0.0 } else { d_entropy * (scores[j] - lse + 1.0) };
            let chosen = hard && weights[j] != 0.0;
            let size = if sparse { d_weights[j] - mean } else { d_weights[j] - row - of_entropy };
            let d_score = p[j] * size + if chosen { d_log_prob } else { 0.0 };
            let probability = if sparse { 0.0 } else { joint([relative(j), lse_spread, unit.exp, 2.0 * a]) };
            let mut variance = (p[j] * size * probability).powi(2) + (p[j] * d_weight_spreads[j]).powi(2);
            variance += (p[j] * d_entropy * joint([made[j].spread, lse_spread])).powi(2);
            variance += (u * d_score).powi(2) + (flushed * size).powi(2);
            // Linear attention never computes the difference: its two terms are summed separately.
            let magnitude =
                if linear { p[j] * (d_weights[j].abs() + row.abs()) } else { d_score.abs() + a * p[j] * row.abs() };
            let error = |length: f64, own: f64| PairError {
                variance,
                relative: joint([magnitude * joint([a * length.sqrt(), own]), subnormal]),
                share: p[j],
            };
            self.add_pair(i, j, &made[j], &error, all);
        }
        for sums in all.sums() {
            sums.end_row(row_spread);
        }
    }

    /// Adds what the gradient of one score contributes to the gradients of all inputs that the score is computed from.
    fn add_pair(&self, i: usize, j: usize, made: &Made, error: &impl Fn(f64, f64) -> PairError, all: &mut All) {
        let Sizes { b, hq, n, m, .. } = self.case.sizes;
        let group = hq / self.case.sizes.hk.max(1);
        let (of_query, of_key) = (error(m as f64, made.slope_spread), error((n * group) as f64, made.slope_spread));
        let of_all = error((b * hq * n * m) as f64, made.slope_spread);
        let [q, k, rest @ ..] = &mut all.of_score;
        self.score.derivatives(&self.q[i], &self.k[j], |parameter, at, by, norm| {
            let (by, norm) = (by * made.slope, norm * made.slope_terms);
            match parameter {
                Parameter::Q => q.add(((self.b * hq + self.h) * n + i) * self.q[i].len() + at, &of_query, by, norm),
                Parameter::K => {
                    let row = (self.b * self.case.sizes.hk + self.kh) * m + j;
                    k.add(row * self.k[j].len() + at, &of_key, by, norm);
                }
                other => rest[other as usize - 2].add(at, &of_all, by, norm),
            }
        });
        if let Some(bias) = &self.data.bias {
            let [bb, bh, bn, bm] = bias.shape();
            let at = (((self.b % bb) * bh + self.h % bh) * bn + i % bn) * bm + j % bm;
            all.d_bias.add(at, &of_all, 1.0, 1.0);
        }
        if let (Some(table), Some((reach, _))) = (&self.data.table, self.case.extras.table) {
            let reach = reach as i64;
            let entry = ((j as i64 - self.place(i)).clamp(-reach, reach) + reach) as usize;
            let [heads, width] = table.shape();
            all.d_table.add((self.h % heads) * width + entry, &of_all, 1.0, 1.0);
        }
        if let Some(scale) = &self.data.scale {
            let unscaled = made.raw / self.scale / self.case.attention.temperature.unwrap_or(1.0);
            let (by, norm) = (unscaled * made.slope, unscaled * made.slope_terms);
            all.d_scale.add(self.h % scale.len(), &of_all, by, norm);
        }
    }

    fn place(&self, i: usize) -> i64 {
        let Sizes { n, m, .. } = self.case.sizes;
        match self.case.attention.place {
            qkv::Place::Start => i as i64,
            qkv::Place::End => i as i64 + m as i64 - n as i64,
            qkv::Place::Offset(offset) => i as i64 + offset,
            qkv::Place::Given => self.data.positions.as_ref().expect("as the case says")[self.b * n + i],
        }
    }

    fn made(&self, i: usize, j: usize, score: f64) -> Made {
        let a = self.unit.sum;
        let (raw, raw_spread) = self.score.value(&self.q[i], &self.k[j], self.unit);
        let scaled = raw * self.scale;
        let (capped, slope) = match self.case.attention.softcap {
            None => (scaled, 1.0),
            Some(cap) => {
                let t = (scaled / cap).tanh();
                (cap * t, 1.0 - t * t)
            }
        };
        let added = if score.is_finite() { score - capped } else { 0.0 };
        let steps = 2.0 * a * joint([scaled * slope, capped, added, if score.is_finite() { score } else { 0.0 }]);
        let spread = joint([raw_spread * self.scale * slope, steps]);
        // A derivative through tanh has the error of tanh, taken to be 4 units in the last place.
        let capped_spread =
            self.case.attention.softcap.map(|cap| joint([2.0 * raw_spread * self.scale / cap, 8.0 * a]));
        let additive = matches!(self.score, RawScore::Additive { .. }).then_some(8.0 * a);
        let slope_spread = joint([spread, capped_spread.unwrap_or(0.0), additive.unwrap_or(0.0)]);
        Made { raw, spread, slope: slope * self.scale, slope_terms: self.scale.abs(), slope_spread }
    }
}

/// The factor of a raw score by head, temperature included.
fn factor<'a>(case: &'a Case, data: &'a Data<f64>) -> impl Fn(usize) -> f64 + use<'a> {
    let attention = &case.attention;
    move |h| {
        let scale = match (attention.scale, &data.scale) {
            _ if matches!(attention.score, Score::Linear(_)) => 1.0,
            (Scale::Fixed(scale), _) => scale,
            (Scale::Learned, Some(given)) => given[h % given.len()],
            _ if attention.score == Score::ScaledDot => 1.0 / (case.sizes.d.max(1) as f64).sqrt(),
            _ => 1.0,
        };
        scale / attention.temperature.unwrap_or(1.0)
    }
}

fn all_rows(case: &Case) -> f64 {
    (case.sizes.b * case.sizes.n) as f64
}

fn rows(tensor: &Tensor<f64, 4>, b: usize, h: usize) -> Vec<Vec<f64>> {
    let [_, _, n, d] = tensor.shape();
    (0..n).map(|i| (0..d).map(|x| tensor[[b, h, i, x]]).collect()).collect()
}
