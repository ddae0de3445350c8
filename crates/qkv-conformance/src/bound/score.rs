//! The raw score of a query and a key, for each [`Score`]: its value, the spread of its roundings, and its derivatives.

use super::{Parameter, Roundoff, joint};
use crate::case::{Case, Data};
use qkv::reference::Reference;
use qkv::{Features, Inputs, Score, Tensor};

/// A raw score of two rows: its value, its spread and its derivatives, written out for each score.
pub enum RawScore {
    Dot,
    /// The matrix `[D, Dk]`, and its offset in its tensor.
    General(Matrix),
    Additive {
        w_q: Matrix,
        w_k: Option<Matrix>,
        v: Vec<f64>,
    },
    Cosine,
    Distance,
    /// `relu` rather than `elu + 1`.
    Simple {
        relu: bool,
    },
    /// The rows of random features times the root of the scale, `[F][D]`, and the scale.
    Favor {
        rows: Vec<Vec<f64>>,
        scale: f64,
    },
}

/// The matrix of one head.
pub struct Matrix {
    begin: usize,
    columns: usize,
    data: Vec<f64>,
}

impl Matrix {
    fn new(of: &Tensor<f64, 4>, h: usize) -> Matrix {
        let [_, heads, r, c] = of.shape();
        let begin = (h % heads) * r * c;
        Matrix { begin, columns: c, data: of.data()[begin..begin + r * c].to_vec() }
    }

    fn at(&self, r: usize, c: usize) -> f64 {
        self.data[r * self.columns + c]
    }
}

impl RawScore {
    /// The score of a case for one query head and its key head.
    pub fn new(case: &Case, data: &Data<f64>, h: usize, kh: usize) -> RawScore {
        match case.attention.score {
            Score::Dot | Score::ScaledDot => RawScore::Dot,
            Score::General => RawScore::General(Matrix::new(data.w.as_ref().expect("general"), h)),
            Score::Additive => RawScore::Additive {
                w_q: Matrix::new(data.w_q.as_ref().expect("additive"), h),
                w_k: data.w_k.as_ref().map(|w| Matrix::new(w, kh)),
                v: data.v_score.clone().expect("additive"),
            },
            Score::Cosine => RawScore::Cosine,
            Score::Distance => RawScore::Distance,
            Score::Linear(Features::Elu) => RawScore::Simple { relu: false },
            Score::Linear(Features::Relu) => RawScore::Simple { relu: true },
            Score::Linear(_) => favor(case),
            _ => panic!("{}: this score has no bound yet", case.name),
        }
    }

    /// The raw score and its spread.
    pub fn value(&self, q: &[f64], k: &[f64], unit: Roundoff) -> (f64, f64) {
        let a = unit.sum;
        let of_terms = |terms: &mut dyn Iterator<Item = f64>, length: usize| {
            let (mut sum, mut norm) = (0.0, 0.0);
            for term in terms {
                sum += term;
                norm += term * term;
            }
            (sum, a * ((length.max(1) as f64) * (norm + sum * sum)).sqrt())
        };
        match self {
            RawScore::Dot => of_terms(&mut q.iter().zip(k).map(|(q, k)| q * k), q.len()),
            RawScore::General(w) => {
                let pairs = (0..q.len()).flat_map(|r| (0..k.len()).map(move |c| (r, c)));
                of_terms(&mut pairs.map(|(r, c)| q[r] * w.at(r, c) * k[c]), q.len() + k.len())
            }
            RawScore::Additive { w_q, w_k, v } => {
                let (mut raw, mut variance, terms) = (0.0, 0.0, v.len() as f64);
                for (at, &v) in v.iter().enumerate() {
                    let (of_q, spread_q) = of_terms(&mut q.iter().enumerate().map(|(x, q)| w_q.at(at, x) * q), q.len());
                    let (of_k, spread_k) = match w_k {
                        Some(w) => of_terms(&mut k.iter().enumerate().map(|(x, k)| w.at(at, x) * k), k.len()),
                        None => (k[at], 0.0),
                    };
                    let z = of_q + of_k;
                    let t = z.tanh();
                    raw += v * t;
                    variance += (v * (1.0 - t * t)).powi(2) * (spread_q.powi(2) + spread_k.powi(2) + (a * z).powi(2));
                    variance += (v * t * a).powi(2) * (4.0 + terms);
                }
                (raw, (variance + a * a * terms * raw * raw).sqrt())
            }
            RawScore::Cosine => {
                let (length_q, length_k) = (norm(q), norm(k));
                if length_q == 0.0 || length_k == 0.0 {
                    return (0.0, 0.0);
                }
                let (raw, spread) =
                    of_terms(&mut q.iter().zip(k).map(|(q, k)| (q / length_q) * (k / length_k)), q.len());
                (raw, 2.0 * spread)
            }
            RawScore::Distance => {
                let (raw, spread) = of_terms(&mut q.iter().zip(k).map(|(q, k)| -(q - k).powi(2)), q.len());
                (raw, 2.0 * spread)
            }
            RawScore::Simple { relu } => {
                let weight: f64 = q.iter().zip(k).map(|(&q, &k)| feature(*relu, q) * feature(*relu, k)).sum();
                (
                    if weight == 0.0 { f64::NEG_INFINITY } else { weight.ln() },
                    unit.exp + a * 2.0 * (q.len() as f64).sqrt(),
                )
            }
            RawScore::Favor { rows, scale } => {
                let exponent = |x: &[f64], w: &[f64]| {
                    let (sum, spread) = of_terms(&mut x.iter().zip(w).map(|(x, w)| x * w), x.len());
                    let (half, half_spread) = of_terms(&mut x.iter().map(|x| 0.5 * scale * x * x), x.len());
                    (sum - half, joint([spread, half_spread, 2.0 * a * (sum - half)]))
                };
                let (mut mean, mut spread) = (0.0, 0.0f64);
                for w in rows {
                    let ((of_q, spread_q), (of_k, spread_k)) = (exponent(q, w), exponent(k, w));
                    mean += (of_q + of_k).exp() / rows.len() as f64;
                    spread = spread.max(joint([spread_q, spread_k]));
                }
                (mean.ln(), spread + unit.exp + a * 2.0 * (rows.len() as f64).sqrt())
            }
        }
    }

    /// The derivative of the raw score with respect to each number that it is computed from, and the norm of the terms
    /// that the derivative is the sum of.
    pub fn derivatives(&self, q: &[f64], k: &[f64], mut visit: impl FnMut(Parameter, usize, f64, f64)) {
        match self {
            RawScore::Dot => {
                for x in 0..q.len() {
                    visit(Parameter::Q, x, k[x], k[x].abs());
                    visit(Parameter::K, x, q[x], q[x].abs());
                }
            }
            RawScore::General(w) => {
                for r in 0..q.len() {
                    let terms = (0..k.len()).map(|c| w.at(r, c) * k[c]);
                    visit(Parameter::Q, r, terms.clone().sum(), terms.map(|t| t * t).sum::<f64>().sqrt());
                    for c in 0..k.len() {
                        let by = q[r] * k[c];
                        visit(Parameter::W, w.begin + r * w.columns + c, by, by.abs());
                    }
                }
                for c in 0..k.len() {
                    let terms = (0..q.len()).map(|r| w.at(r, c) * q[r]);
                    visit(Parameter::K, c, terms.clone().sum(), terms.map(|t| t * t).sum::<f64>().sqrt());
                }
            }
            RawScore::Additive { w_q, w_k, v } => {
                let apply = |w: &Matrix, x: &[f64], at: usize| (0..x.len()).map(|c| w.at(at, c) * x[c]).sum::<f64>();
                let (mut of_q, mut of_k) = (vec![(0.0, 0.0); q.len()], vec![(0.0, 0.0); k.len()]);
                for (at, &v) in v.iter().enumerate() {
                    let z = apply(w_q, q, at) + w_k.as_ref().map_or_else(|| k[at], |w| apply(w, k, at));
                    let t = z.tanh();
                    let slope = v * (1.0 - t * t);
                    visit(Parameter::VScore, at, t, t.abs());
                    for (x, (by, norm)) in of_q.iter_mut().enumerate() {
                        *by += slope * w_q.at(at, x);
                        *norm += (v * w_q.at(at, x)).abs();
                        visit(Parameter::WQ, w_q.begin + at * w_q.columns + x, slope * q[x], (v * q[x]).abs());
                    }
                    match w_k {
                        None => of_k[at] = (slope, v.abs()),
                        Some(w) => {
                            for (x, (by, norm)) in of_k.iter_mut().enumerate() {
                                *by += slope * w.at(at, x);
                                *norm += (v * w.at(at, x)).abs();
                                visit(Parameter::WK, w.begin + at * w.columns + x, slope * k[x], (v * k[x]).abs());
                            }
                        }
                    }
                }
                for (parameter, all) in [(Parameter::Q, of_q), (Parameter::K, of_k)] {
                    for (x, (by, norm)) in all.into_iter().enumerate() {
                        visit(parameter, x, by, norm);
                    }
                }
            }
            RawScore::Cosine => {
                let (length_q, length_k) = (norm(q), norm(k));
                if length_q == 0.0 || length_k == 0.0 {
                    return;
                }
                let cosine: f64 = q.iter().zip(k).map(|(q, k)| (q / length_q) * (k / length_k)).sum();
                for x in 0..q.len() {
                    let (q, k) = (q[x] / length_q, k[x] / length_k);
                    visit(Parameter::Q, x, (k - cosine * q) / length_q, (k.abs() + q.abs()) / length_q);
                    visit(Parameter::K, x, (q - cosine * k) / length_k, (k.abs() + q.abs()) / length_k);
                }
            }
            RawScore::Distance => {
                for x in 0..q.len() {
                    let by = 2.0 * (q[x] - k[x]);
                    visit(Parameter::Q, x, -by, by.abs());
                    visit(Parameter::K, x, by, by.abs());
                }
            }
            RawScore::Simple { relu } => {
                let slope = |x: f64| {
                    if x > 0.0 {
                        1.0
                    } else if *relu {
                        0.0
                    } else {
                        x.exp()
                    }
                };
                let weight: f64 = q.iter().zip(k).map(|(&q, &k)| feature(*relu, q) * feature(*relu, k)).sum();
                if weight == 0.0 {
                    return;
                }
                for x in 0..q.len() {
                    let (of_q, of_k) =
                        (slope(q[x]) * feature(*relu, k[x]) / weight, slope(k[x]) * feature(*relu, q[x]) / weight);
                    visit(Parameter::Q, x, of_q, of_q);
                    visit(Parameter::K, x, of_k, of_k);
                }
            }
            RawScore::Favor { rows, scale } => {
                let exponent =
                    |x: &[f64], w: &[f64]| x.iter().zip(w).map(|(x, w)| x * w - 0.5 * scale * x * x).sum::<f64>();
                let each: Vec<f64> = rows.iter().map(|w| (exponent(q, w) + exponent(k, w)).exp()).collect();
                let all: f64 = each.iter().sum();
                for x in 0..q.len() {
                    for (parameter, row) in [(Parameter::Q, q), (Parameter::K, k)] {
                        let terms = rows.iter().zip(&each).map(|(w, each)| each / all * (w[x] - scale * row[x]));
                        let sizes =
                            rows.iter().zip(&each).map(|(w, each)| each / all * (w[x].abs() + scale * row[x].abs()));
                        visit(parameter, x, terms.sum(), sizes.sum());
                    }
                }
            }
        }
    }
}

fn norm(row: &[f64]) -> f64 {
    row.iter().map(|x| x * x).sum::<f64>().sqrt()
}

fn feature(relu: bool, x: f64) -> f64 {
    match (relu, x > 0.0) {
        (true, true) => x,
        (true, false) => 0.0,
        (false, true) => x + 1.0,
        (false, false) => x.exp(),
    }
}

/// The random rows of FAVOR+, found from the exponents of unit vectors: `±w·e − scale / 2`.
fn favor(case: &Case) -> RawScore {
    let d = case.sizes.d;
    let exponents = |sign: f64| -> Vec<Vec<f64>> {
        let units = Tensor::<f64, 4>::from_fn([1, 1, d, d], |[_, _, i, x]| if i == x { sign } else { 0.0 });
        let mut attention = case.attention.clone();
        (attention.mask, attention.place) = (qkv::Mask::full(), qkv::Place::Start);
        let of = |i| Reference::<f64>::exact().pair(&attention, Inputs::new(&units, &units, &units), [0, 0, i, 0]);
        (0..d).map(|i| of(i).expect("a case is well formed").query).collect()
    };
    if d == 0 {
        return RawScore::Favor { rows: vec![Vec::new()], scale: 0.0 };
    }
    let (plus, minus) = (exponents(1.0), exponents(-1.0));
    let rows = (0..plus[0].len()).map(|f| (0..d).map(|x| (plus[x][f] - minus[x][f]) / 2.0).collect()).collect();
    RawScore::Favor { rows, scale: -(plus[0][0] + minus[0][0]) }
}
