//! The definition, in plain loops. Every engine is held to it; it is never optimized and never deleted.
//!
//! It stores the whole matrix of weights, one pair of query and key after the other, in the type `F`. In `f64` it is
//! the truth. In a tensor's own precision, rounding scores, weights and their gradients to the tensor's type, it is the
//! *plain formula* whose error sets the bound for every engine.

mod linear;
mod pair;
mod selection;

pub use self::pair::{Pair, Step};

use self::selection::select;
use crate::attention::Attention;
use crate::error::Result;
use crate::gradients::Gradients;
use crate::inputs::{Inputs, Upstream};
use crate::output::Output;
use crate::problem::Problem;
use crate::score::Score;
use crate::select::{Choice, Select};
use crate::source::Source;
use crate::tensor::Tensor;
use qkv_simd::{Element, Real, View, philox};
use std::ops::Range;

/// The definition, computed in `F`.
///
/// ```
/// use qkv::{reference::Reference, Attention, Inputs, Tensor};
/// let x = Tensor::<f32, 4>::randn([1, 1, 4, 8], 1);
/// let truth = Reference::<f64>::exact().forward(&Attention::scaled_dot(), Inputs::new(&x, &x, &x))?;
/// let row: f64 = (0..4).map(|j| truth.weights[[0, 0, 2, j]]).sum();
/// assert!((row - 1.0).abs() < 1e-12);
/// # Ok::<(), qkv::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Reference<F> {
    round: fn(F) -> F,
}

/// The result of the definition: the output, and the weights and scores behind it.
#[derive(Clone, Debug)]
pub struct Forward<F: Real> {
    /// Values, log-sum-exp and entropy (always).
    pub output: Output<F>,
    /// The weights as they multiply the values, `[B, Hq, N, M]`: after dropout, 0 where a pair is absent.
    pub weights: Tensor<F, 4>,
    /// The final scores, `[B, Hq, N, M]`: −∞ where a pair is absent.
    pub scores: Tensor<F, 4>,
}

impl<F: Real> Reference<F> {
    /// Rounds only where `F` itself does.
    pub fn exact() -> Self {
        Reference { round: |x| x }
    }

    /// Rounds scores, weights and their gradients to `T`.
    pub fn rounding_to<T: Element<Acc = F>>() -> Self {
        Reference { round: |x| T::narrow(x).widen() }
    }

    /// Computes the attention.
    pub fn forward<T: Element>(&self, attention: &Attention, inputs: Inputs<'_, T>) -> Result<Forward<F>> {
        let problem = Problem::new(attention, inputs)?;
        let Problem { b: batch, n, m, dv, heads, .. } = problem;
        let rows = [batch, heads.query, n];
        let mut scores = Tensor::allocate("scores", [batch, heads.query, n, m])?;
        let mut weights = Tensor::allocate("weights", [batch, heads.query, n, m])?;
        let per_row = match attention.select {
            Select::TopK(k) => k.min(m.max(1)),
            _ => 1,
        };
        let chooses = matches!(attention.select, Select::Hard(_) | Select::TopK(_));
        let values = Tensor::allocate("out", [batch, heads.query, n, dv])?;
        let mut output = Output::new(values, Tensor::allocate("lse", rows)?, attention.place);
        output.entropy = Some(Tensor::allocate("entropy", rows)?);
        output.chosen = chooses.then(|| Tensor::from_fn([batch, heads.query, n, per_row], |_| -1));
        if let Select::Hard(_) = attention.select {
            output.log_prob = Some(Tensor::allocate("log_prob", rows)?);
        }
        for b in 0..batch {
            for h in 0..heads.query {
                let head = Head::<F, T>::new(&problem, b, h);
                let sink = problem.inputs.sinks.map_or(F::NEG_INFINITY, |sinks| wide(sinks[h]));
                for i in 0..n {
                    let mut of_row: Vec<F> = (0..m).map(|j| (self.round)(head.score(i, j).score)).collect();
                    let noise = |j| match attention.select {
                        Select::Hard(choice) => choice.noise(problem.seed(), b, h, i, j),
                        _ => 0.0,
                    };
                    let row = select(attention.select, &mut of_row, sink, self.round, noise);
                    output.lse[[b, h, i]] = row.lse;
                    if let Some(log_prob) = &mut output.log_prob {
                        log_prob[[b, h, i]] = row.log_prob;
                    }
                    for (at, &j) in row.chosen.iter().enumerate() {
                        let chosen = output.chosen.as_mut().expect("as it chooses");
                        chosen[[b, h, i, per_row - row.chosen.len() + at]] = j as i64;
                    }
                    for j in 0..m {
                        let (s, p) = (of_row[j], row.p[j]);
                        scores[[b, h, i, j]] = s;
                        if p != F::ZERO && attention.select != Select::Sparsemax {
                            output.entropy.as_mut().expect("just made")[[b, h, i]] += -(p * (s - row.lse));
                        }
                        let weight = row.weights[j] * head.modulation(i, j);
                        weights[[b, h, i, j]] = weight;
                        if weight != F::ZERO {
                            for x in 0..dv {
                                output.values[[b, h, i, x]] +=
                                    weight * wide(problem.inputs.v.at(b, h / heads.group, j, x));
                            }
                        }
                    }
                }
            }
        }
        if attention.select == Select::Sparsemax {
            output.threshold = Some(std::mem::replace(&mut output.lse, Tensor::allocate("lse", [0; 3])?));
        }
        Ok(Forward { output, weights, scores })
    }

    /// Computes the gradients of all given inputs.
    pub fn backward<T: Element>(
        &self,
        attention: &Attention,
        inputs: Inputs<'_, T>,
        forward: &Forward<F>,
        upstream: Upstream<'_, T>,
    ) -> Result<Gradients<F>> {
        let problem = Problem::new(attention, inputs)?;
        problem.check_upstream(&upstream, true)?;
        let Problem { b: batch, n, m, d, dk, dv, heads, width, .. } = problem;
        let given = |view: Option<View<'_, T>>| view.map(|view| Tensor::allocate("gradient", view.shape())).transpose();
        let numbers = |slice: Option<&[T]>| slice.map(|slice| vec![F::ZERO; slice.len()]);
        let mut grad = Gradients {
            w: given(inputs.w)?,
            w_q: given(inputs.w_q)?,
            w_k: given(inputs.w_k)?,
            v_score: numbers(inputs.v_score),
            scale: numbers(inputs.scale),
            bias: given(inputs.bias.filter(|_| upstream.for_bias))?,
            table: given(inputs.table)?,
            sinks: numbers(inputs.sinks),
            center: numbers(inputs.center),
            ..Gradients::new(
                Tensor::allocate("d_q", [batch, heads.query, n, d])?,
                Tensor::allocate("d_k", [batch, heads.key, m, dk])?,
                Tensor::allocate("d_v", [batch, heads.key, m, dv])?,
            )
        };
        let straight_through = !matches!(attention.select, Select::Hard(Choice { straight_through: false, .. }));
        for b in 0..batch {
            for h in 0..heads.query {
                let head = Head::<F, T>::new(&problem, b, h);
                let kh = h / heads.group;
                let mut d_query = vec![vec![F::ZERO; width]; n]; // of the rows that scores are computed from
                let mut d_key = vec![vec![F::ZERO; width]; m];
                for i in 0..n {
                    let at = (b * heads.query + h) * n + i;
                    let d_lse = upstream.lse.map_or(F::ZERO, |d| wide(d[at]));
                    let d_entropy = upstream.entropy.map_or(F::ZERO, |d| wide(d[at]));
                    let d_log_prob = upstream.log_prob.map_or(F::ZERO, |d| wide(d[at]));
                    let lse = forward.output.row_statistic()[[b, h, i]];
                    let (mut delta, mut mass, mut entropy) = (F::ZERO, F::ZERO, F::ZERO);
                    let mut d_weights = vec![F::ZERO; m];
                    let mut p = vec![F::ZERO; m];
                    for j in 0..m {
                        let s = forward.scores[[b, h, i, j]];
                        if s == F::NEG_INFINITY {
                            continue;
                        }
                        p[j] = match attention.select {
                            Select::Sparsemax => forward.weights[[b, h, i, j]],
                            _ => (self.round)((s - lse).exp()),
                        };
                        let mut d_weight = F::ZERO;
                        for x in 0..dv {
                            let d_out: F = wide(upstream.values.at(b, h, i, x));
                            d_weight += d_out * wide(problem.inputs.v.at(b, kh, j, x));
                            let weight = forward.weights[[b, h, i, j]];
                            if weight != F::ZERO {
                                grad.v[[b, kh, j, x]] += weight * d_out;
                            }
                        }
                        d_weights[j] = (self.round)(d_weight * head.modulation(i, j));
                        if let Some(center) = &mut grad.center {
                            center[at] += p[j] * d_weights[j] * head.pull(i, j);
                        }
                        if !straight_through {
                            d_weights[j] = F::ZERO;
                        }
                        delta += p[j] * d_weights[j];
                        mass += p[j];
                        if p[j] != F::ZERO {
                            entropy += -(p[j] * (s - lse));
                        }
                    }
                    let row = delta - d_lse + d_log_prob + d_entropy * (entropy - mass);
                    // Sparsemax: the mean over the keys that it keeps.
                    let kept = (0..m).filter(|&j| p[j] != F::ZERO);
                    let mean = kept.clone().map(|j| d_weights[j]).sum::<F>() / F::from_f64(kept.count().max(1) as f64);
                    if let (Some(sinks), Some(logits)) = (&mut grad.sinks, problem.inputs.sinks) {
                        let sink: F = wide(logits[h]);
                        if sink != F::NEG_INFINITY {
                            sinks[h] += -((sink - lse).exp() * row);
                        }
                    }
                    for j in 0..m {
                        let s = forward.scores[[b, h, i, j]];
                        if s == F::NEG_INFINITY {
                            continue;
                        }
                        let of_entropy = if d_entropy == F::ZERO { F::ZERO } else { d_entropy * (s - lse + F::ONE) };
                        let d_score = (self.round)(match attention.select {
                            Select::Sparsemax if p[j] == F::ZERO || p[j].is_nan() => p[j],
                            Select::Sparsemax => d_weights[j] - mean,
                            Select::Hard(_) if forward.weights[[b, h, i, j]] != F::ZERO => {
                                p[j] * (d_weights[j] - row - of_entropy) + d_log_prob
                            }
                            _ => p[j] * (d_weights[j] - row - of_entropy),
                        });
                        if let Some(bias) = &mut grad.bias {
                            let [bb, bh, bn, bm] = bias.shape();
                            bias[[b % bb, h % bh, i % bn, j % bm]] += d_score;
                        }
                        if let Some(table) = &mut grad.table {
                            let entry = problem.table_entry(problem.mask_data.position(b, i), j);
                            let row = h % table.shape()[2];
                            table[[0, 0, row, entry]] += d_score;
                        }
                        let made = head.score(i, j);
                        let d_scaled = d_score * made.slope;
                        if let Some(scale) = &mut grad.scale {
                            let at = h % scale.len();
                            scale[at] += d_scaled * made.raw / F::from_f64(problem.temperature());
                        }
                        let d_raw = d_scaled * head.scale;
                        let d_v = grad.v_score.as_deref_mut();
                        head.raw_gradient(i, j, d_raw, &mut d_query[i], &mut d_key[j], d_v);
                    }
                }
                head.add_to_inputs(&d_query, &d_key, &mut grad);
            }
        }
        Ok(grad)
    }
}

fn wide<T: Element, F: Real>(x: T) -> F {
    F::from_f64(x.to_f64())
}

/// A parameter matrix of a score, for one head.
struct Projection<'a, T> {
    w: View<'a, T>,
    head: usize,
}

impl<T: Element> Projection<'_, T> {
    fn at<F: Real>(&self, r: usize, c: usize) -> F {
        wide(self.w.at(0, self.head, r, c))
    }
}

/// One query head, with the rows that its scores are computed from.
struct Head<'a, F, T: Element> {
    problem: &'a Problem<'a, T>,
    b: usize,
    h: usize,
    scale: F,
    /// The first query and the first key that it holds.
    first: [usize; 2],
    /// Queries and keys as given.
    q: Vec<Vec<F>>,
    k: Vec<Vec<F>>,
    /// Queries and keys as the score compares them: projected, or normalized.
    query: Vec<Vec<F>>,
    key: Vec<Vec<F>>,
}

/// A score and its intermediate values.
struct Made<F> {
    raw: F,
    /// The derivative of the cap.
    slope: F,
    /// After scale, cap, bias and mask.
    score: F,
}

impl<'a, F: Real, T: Element> Head<'a, F, T> {
    fn new(problem: &'a Problem<'a, T>, b: usize, h: usize) -> Self {
        Head::over(problem, b, h, 0..problem.n, 0..problem.m)
    }

    /// Restricted to some queries and some keys.
    fn over(problem: &'a Problem<'a, T>, b: usize, h: usize, queries: Range<usize>, keys: Range<usize>) -> Self {
        let (heads, inputs, first) = (problem.heads, &problem.inputs, [queries.start, keys.start]);
        let rows = |view: Source<'_, T>, head: usize, range: Range<usize>| -> Vec<Vec<F>> {
            let [_, _, _, width] = view.shape();
            range.map(|i| (0..width).map(|x| wide(view.at(b, head, i, x))).collect()).collect()
        };
        let (q, k) = (rows(inputs.q.into(), h, queries), rows(inputs.k, h / heads.group, keys));
        let (query, key) = match problem.attention.score {
            Score::General => {
                let w = projection(inputs.w, h).expect("checked");
                // q' = Wᵀq, so that q'·k = qᵀWk
                let query =
                    q.iter().map(|q| (0..problem.dk).map(|c| sum(problem.d, |r| w.at::<F>(r, c) * q[r])).collect());
                (query.collect(), k.clone())
            }
            Score::Additive => {
                let apply = |w: Option<Projection<'_, T>>, rows: &[Vec<F>]| match w {
                    None => rows.to_vec(),
                    Some(w) => {
                        let project = |row: &Vec<F>| {
                            (0..problem.width).map(|a| sum(row.len(), |x| w.at::<F>(a, x) * row[x])).collect()
                        };
                        rows.iter().map(project).collect()
                    }
                };
                (apply(projection(inputs.w_q, h), &q), apply(projection(inputs.w_k, h / heads.group), &k))
            }
            Score::Cosine => (q.iter().map(|row| unit(row)).collect(), k.iter().map(|row| unit(row)).collect()),
            Score::Linear(features) => {
                (linear::compared(problem, features, &q), linear::compared(problem, features, &k))
            }
            _ => (q.clone(), k.clone()),
        };
        Head { problem, b, h, scale: F::from_f64(problem.scale(h)), first, q, k, query, key }
    }
}

fn projection<T>(w: Option<View<'_, T>>, head: usize) -> Option<Projection<'_, T>> {
    w.map(|w| Projection { w, head: head % w.shape()[1] })
}

fn sum<F: Real>(n: usize, f: impl Fn(usize) -> F) -> F {
    (0..n).map(f).sum()
}

/// The length of a row, relative to its largest number, so that squares neither underflow nor overflow.
fn norm<F: Real>(row: &[F]) -> F {
    let largest = row.iter().fold(F::ZERO, |a, &x| if x.abs() > a || x.is_nan() { x.abs() } else { a });
    if largest == F::ZERO || !largest.is_finite() {
        return largest;
    }
    sum(row.len(), |x| (row[x] / largest) * (row[x] / largest)).sqrt() * largest
}

/// The row divided by its length; the zero vector stays.
fn unit<F: Real>(row: &[F]) -> Vec<F> {
    let length = norm(row);
    row.iter().map(|&x| if length == F::ZERO { F::ZERO } else { x / length }).collect()
}

impl<F: Real, T: Element> Head<'_, F, T> {
    fn score(&self, i: usize, j: usize) -> Made<F> {
        let Head { problem, first: [i0, j0], .. } = *self;
        let (query, key) = (&self.query[i - i0], &self.key[j - j0]);
        let raw = match problem.attention.score {
            Score::Distance => -sum(problem.width, |x| (query[x] - key[x]) * (query[x] - key[x])),
            Score::Linear(features) => linear::score(features, query, key),
            _ => sum(problem.width, |x| self.part(query, key, x)),
        };
        let mut score = raw * self.scale;
        let mut slope = F::ONE;
        if let Some(cap) = problem.attention.softcap {
            let t = (score / F::from_f64(cap)).tanh();
            score = F::from_f64(cap) * t;
            slope = F::ONE - t * t;
        }
        for added in [self.alibi(i, j), self.bias(i, j), self.relative(i, j)].into_iter().flatten() {
            score += added;
        }
        if !self.sees(i, j) {
            score = F::NEG_INFINITY;
        }
        Made { raw, slope, score }
    }

    /// What element `x` of a query and of a key adds to the raw score, if that is a sum over elements.
    fn part(&self, query: &[F], key: &[F], x: usize) -> F {
        match self.problem.attention.score {
            Score::Additive => {
                wide::<T, F>(self.problem.inputs.v_score.expect("checked")[x]) * (query[x] + key[x]).tanh()
            }
            _ => query[x] * key[x],
        }
    }

    /// What ALiBi adds.
    fn alibi(&self, i: usize, j: usize) -> Option<F> {
        let p = self.problem.mask_data.position(self.b, i);
        let &m = self.problem.slopes.get(self.h)?;
        Some(F::from_f64(-m) * F::from_f64((p - j as i64).abs() as f64))
    }

    /// What the bias tensor adds.
    fn bias(&self, i: usize, j: usize) -> Option<F> {
        self.problem.bias.map(|bias| wide(bias.at(self.b, self.h, i, j)))
    }

    /// What the relative table adds.
    fn relative(&self, i: usize, j: usize) -> Option<F> {
        let (p, table) = (self.problem.mask_data.position(self.b, i), self.problem.inputs.table?);
        Some(wide(table.at(0, 0, self.h % table.shape()[2], self.problem.table_entry(p, j))))
    }

    /// Whether the mask and predictive local attention allow the pair.
    fn sees(&self, i: usize, j: usize) -> bool {
        let near = self.apart(i, j).is_none_or(|(apart, sigma)| apart.abs() <= 2.0 * sigma);
        near && self.problem.attention.mask.allows_pair(&self.problem.mask_data, self.b, self.h, i, j)
    }

    /// The factor of a weight after the softmax: 0 or a little more than 1 from dropout, times the Gaussian of
    /// predictive local attention.
    fn modulation(&self, i: usize, j: usize) -> F {
        let kept = match self.problem.attention.dropout {
            None => 1.0,
            Some(d) if u32::from(philox::bits(self.problem.seed(), self.b, self.h, i, j)) < d.threshold() => 0.0,
            Some(d) => d.kept_scale(),
        };
        let gaussian = self.apart(i, j).map_or(1.0, |(apart, sigma)| (-apart * apart / (2.0 * sigma * sigma)).exp());
        F::from_f64(kept * gaussian)
    }

    /// The distance of a key from the query's predicted center, and the width of the Gaussian around that.
    fn apart(&self, i: usize, j: usize) -> Option<(f64, f64)> {
        let center = self.problem.mask_data.center(self.b, self.h)?(i);
        Some((j as f64 - center, self.problem.attention.local? as f64 / 2.0))
    }

    /// The derivative of the log of the Gaussian with respect to the center.
    fn pull(&self, i: usize, j: usize) -> F {
        F::from_f64(self.apart(i, j).map_or(0.0, |(apart, sigma)| apart / (sigma * sigma)))
    }

    /// Adds the gradient of a raw score to those of the rows it was computed from.
    fn raw_gradient(&self, i: usize, j: usize, d_raw: F, d_query: &mut [F], d_key: &mut [F], d_v: Option<&mut [F]>) {
        let (query, key) = (&self.query[i], &self.key[j]);
        let width = self.problem.width;
        match self.problem.attention.score {
            Score::Additive => {
                let (v, d_v) = (self.problem.inputs.v_score.expect("checked"), d_v.expect("as v"));
                for x in 0..width {
                    let t = (query[x] + key[x]).tanh();
                    let d = d_raw * wide(v[x]) * (F::ONE - t * t);
                    d_query[x] += d;
                    d_key[x] += d;
                    d_v[x] += d_raw * t;
                }
            }
            Score::Linear(features) => linear::gradient(features, query, key, d_raw, d_query, d_key),
            Score::Distance => {
                for x in 0..width {
                    let d = d_raw * F::from_f64(-2.0) * (query[x] - key[x]);
                    d_query[x] += d;
                    d_key[x] += -d;
                }
            }
            _ => {
                for x in 0..width {
                    d_query[x] += d_raw * key[x];
                    d_key[x] += d_raw * query[x];
                }
            }
        }
    }

    /// Adds the gradients of the compared rows to those of the inputs: back through projections and norms.
    fn add_to_inputs(&self, d_query: &[Vec<F>], d_key: &[Vec<F>], grad: &mut Gradients<F>) {
        let Head { problem, b, h, .. } = *self;
        let (inputs, kh) = (&problem.inputs, h / problem.heads.group);
        match problem.attention.score {
            Score::General => {
                let w = projection(inputs.w, h).expect("checked");
                let d_w = grad.w.as_mut().expect("as w");
                for (i, d_query) in d_query.iter().enumerate() {
                    for r in 0..problem.d {
                        for c in 0..problem.dk {
                            grad.q[[b, h, i, r]] += w.at::<F>(r, c) * d_query[c];
                            d_w[[0, w.head, r, c]] += self.q[i][r] * d_query[c];
                        }
                    }
                }
                add_rows(&mut grad.k, b, kh, d_key);
            }
            Score::Additive => {
                let through = |w: Option<Projection<'_, T>>,
                               d_w: &mut Option<Tensor<F, 4>>,
                               rows: &[Vec<F>],
                               d: &[Vec<F>],
                               to: &mut Tensor<F, 4>,
                               head: usize| {
                    let Some(w) = w else { return add_rows(to, b, head, d) };
                    let d_w = d_w.as_mut().expect("as w");
                    for (i, d) in d.iter().enumerate() {
                        for (x, &row) in rows[i].iter().enumerate() {
                            for (a, &d) in d.iter().enumerate() {
                                to[[b, head, i, x]] += w.at::<F>(a, x) * d;
                                d_w[[0, w.head, a, x]] += row * d;
                            }
                        }
                    }
                };
                through(projection(inputs.w_q, h), &mut grad.w_q, &self.q, d_query, &mut grad.q, h);
                through(projection(inputs.w_k, kh), &mut grad.w_k, &self.k, d_key, &mut grad.k, kh);
            }
            Score::Cosine => {
                let back = |row: &Vec<F>, d: &Vec<F>| -> Vec<F> {
                    let (length, unit) = (norm(row), unit(row));
                    let along = sum(d.len(), |x| d[x] * unit[x]);
                    (0..d.len())
                        .map(|x| if length == F::ZERO { F::ZERO } else { (d[x] - along * unit[x]) / length })
                        .collect()
                };
                let d_q: Vec<Vec<F>> = self.q.iter().zip(d_query).map(|(row, d)| back(row, d)).collect();
                let d_k: Vec<Vec<F>> = self.k.iter().zip(d_key).map(|(row, d)| back(row, d)).collect();
                add_rows(&mut grad.q, b, h, &d_q);
                add_rows(&mut grad.k, b, kh, &d_k);
            }
            Score::Linear(features) => {
                add_rows(&mut grad.q, b, h, &linear::back(problem, features, &self.q, d_query));
                add_rows(&mut grad.k, b, kh, &linear::back(problem, features, &self.k, d_key));
            }
            _ => {
                add_rows(&mut grad.q, b, h, d_query);
                add_rows(&mut grad.k, b, kh, d_key);
            }
        }
    }
}

fn add_rows<F: Real>(to: &mut Tensor<F, 4>, b: usize, h: usize, rows: &[Vec<F>]) {
    for (i, row) in rows.iter().enumerate() {
        for (x, &value) in row.iter().enumerate() {
            to[[b, h, i, x]] += value;
        }
    }
}
