//! Passes over a row of logits, for decoding searches: log-sum-exp, finiteness and the highest logits. They are
//! compiled here, for every instruction set, and not at the optimization level of the caller's crate.

mod products;

use crate::isa::Isa;
use crate::kernel::{Kernel, dispatch};
use crate::lanes::Lanes;
use crate::pass::{self, EXPONENTIAL, LN_2, MAGIC, Pass, Smooth};
pub use products::{Projection, survey_products};
use std::cmp::Ordering;

/// Lanes of every reduction, so that a result has the same bits on every instruction set.
const LANES: usize = 16;
/// Logits whose maximum is compared at a time in the search for the highest ones.
const BLOCK: usize = 64;

/// `ln Σ eˣ` of a row; −∞ if it is empty or all −∞.
///
/// ```
/// use qkv_simd::{Isa, logits::log_sum_exp};
/// assert!((log_sum_exp(Isa::best(), &[0.0, 0.0]) - 2f32.ln()).abs() < 1e-6);
/// ```
pub fn log_sum_exp(isa: Isa, row: &[f32]) -> f32 {
    pass::run(isa, LogSumExp(row))
}

/// Whether every logit is finite.
pub fn all_finite(isa: Isa, row: &[f32]) -> bool {
    pass::run(isa, AllFinite(row))
}

/// The highest logit; −∞ if there is none. NaN is skipped.
pub fn maximum(row: &[f32]) -> f32 {
    row.iter().fold(f32::NEG_INFINITY, |most, &x| if x > most { x } else { most })
}

/// Excludes tokens: sets their logits to −∞.
pub fn exclude(row: &mut [f32]) {
    row.fill(f32::NEG_INFINITY);
}

/// Weights of tokens to draw from: `e^((x − highest) / temperature)`.
///
/// ```
/// let weights = qkv_simd::logits::Weights { highest: 2.0, temperature: 0.5 };
/// assert_eq!(weights.of(2.0), 1.0);
/// assert_eq!(weights.total(&[2.0, f32::NEG_INFINITY]), 1.0);
/// assert_eq!(weights.reached(&[2.0, f32::NEG_INFINITY], 0.5), Some(0));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Weights {
    /// The highest logit.
    pub highest: f32,
    /// What differences from it are divided by.
    pub temperature: f64,
}

impl Weights {
    /// The weight of a logit.
    pub fn of(self, logit: f32) -> f64 {
        (f64::from(logit - self.highest) / self.temperature).exp()
    }

    /// The total weight of a row.
    pub fn total(self, row: &[f32]) -> f64 {
        row.iter().filter(|x| **x > f32::NEG_INFINITY).map(|&x| self.of(x)).sum()
    }

    /// The index at which the weights up to there reach `mass`.
    pub fn reached(self, row: &[f32], mass: f64) -> Option<usize> {
        let mut left = mass;
        row.iter().position(|&x| {
            left -= self.of(x);
            left <= 0.0
        })
    }
}

/// The `count` highest logits with their indices, best first; among equals the lower index comes first. Logits of −∞
/// and NaN are never among them.
///
/// ```
/// use qkv_simd::{Isa, logits::top};
/// assert_eq!(top(Isa::best(), &[1.0, 3.0, 2.0, 3.0], 3), [(1, 3.0), (3, 3.0), (2, 2.0)]);
/// ```
pub fn top(isa: Isa, row: &[f32], count: usize) -> Vec<(u32, f32)> {
    if count > MAX_INSERTED {
        return sorted(row, count);
    }
    let mut best = Vec::with_capacity(count.min(row.len()) + 1);
    if count > 0 {
        pass::run(isa, Top { row, count, best: &mut best });
    }
    best
}

/// What a decoding search needs of a row of logits.
#[derive(Clone, Debug, PartialEq)]
pub struct Survey {
    /// Whether every logit is finite.
    pub is_finite: bool,
    /// `ln Σ eˣ`; −∞ if the row is empty or all −∞.
    pub log_sum_exp: f32,
    /// The highest logits with their indices, as [`top`] finds them.
    pub best: Vec<(u32, f32)>,
}

/// Surveys a row of logits for the `count` highest.
///
/// ```
/// use qkv_simd::{Isa, logits::survey};
/// let found = survey(Isa::best(), &[0.0, 1.0, 0.0], 2);
/// assert!(found.is_finite && (found.log_sum_exp - 1.551_445).abs() < 1e-5);
/// assert_eq!(found.best, [(1, 1.0), (0, 0.0)]);
/// ```
pub fn survey(isa: Isa, row: &[f32], count: usize) -> Survey {
    let mut survey = RunningSurvey::new(count);
    row.chunks(PART).for_each(|part| survey.add(isa, part));
    survey.finish()
}

/// Logits that a survey takes at a time: few enough to be in the first-level cache in both passes over them.
pub const PART: usize = 512;

/// A [`survey`] of a row whose logits come [a part](PART) at a time.
#[derive(Clone, Debug)]
pub struct RunningSurvey {
    count: usize,
    /// Number of logits so far.
    seen: usize,
    /// Each lane: 0 if all of its logits are finite, NaN otherwise.
    odd: [f32; BLOCK],
    /// The highest logit so far.
    most: f32,
    /// Each lane: `Σ eˣ⁻ᵐ`, where `m` is the highest logit so far of all lanes.
    sums: [f32; BLOCK],
    best: Vec<(u32, f32)>,
}

impl RunningSurvey {
    /// A survey for the `count` highest logits.
    pub fn new(count: usize) -> Self {
        let best = Vec::with_capacity(count.min(BLOCK) + 1);
        RunningSurvey { count, seen: 0, odd: [0.0; BLOCK], most: f32::NEG_INFINITY, sums: [0.0; BLOCK], best }
    }

    /// Continues with the next [`PART`] logits of the row, or its last ones.
    ///
    /// # Panics
    /// If there are more.
    pub fn add(&mut self, isa: Isa, part: &[f32]) {
        assert!(part.len() <= PART, "{} logits at a time", part.len());
        dispatch(isa, SurveyPart { part, survey: self });
    }

    /// What was found.
    pub fn finish(self) -> Survey {
        let RunningSurvey { odd, most, sums, best, .. } = self;
        let log_sum_exp = if most == f32::NEG_INFINITY { most } else { most + sums.iter().sum::<f32>().ln() };
        Survey { is_finite: odd.iter().sum::<f32>() == 0.0, log_sum_exp, best }
    }

    /// Below this no logit is among the highest.
    fn least(&self) -> f32 {
        match self.best.last() {
            _ if self.count == 0 => f32::INFINITY,
            Some(&(_, last)) if self.best.len() == self.count => last,
            _ => f32::NEG_INFINITY,
        }
    }
}

struct SurveyPart<'a> {
    part: &'a [f32],
    survey: &'a mut RunningSurvey,
}

/// Vectors of a block.
const VECTORS: usize = BLOCK / LANES;

impl Kernel<f32> for SurveyPart<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes<Scalar = f32>>(self) {
        let SurveyPart { part, survey } = self;
        let count = survey.count;
        let (blocks, rest) = part.as_chunks::<BLOCK>();
        // The last block is filled up with logits of −∞, which change nothing.
        let mut last = [f32::NEG_INFINITY; BLOCK];
        last[..rest.len()].copy_from_slice(rest);
        for (odd, x) in survey.odd.iter_mut().zip(rest) {
            *odd += x * 0.0;
        }
        // SAFETY: blocks and the arrays of a survey have whole vectors; the caller guarantees the instruction set.
        unsafe {
            let load = |block: &[f32; BLOCK], v: usize| V::load(block.as_ptr().add(v * LANES));
            let (mut lanes, mut odd) = ([V::splat(0.0); VECTORS], [V::splat(0.0); VECTORS]);
            for v in 0..VECTORS {
                (lanes[v], odd[v]) = (load(&last, v), load(&survey.odd, v));
            }
            for block in blocks {
                for v in 0..VECTORS {
                    let x = load(block, v);
                    lanes[v] = x.max(lanes[v]);
                    odd[v] = x.mul_add(V::splat(0.0), odd[v]);
                }
            }
            for v in 0..VECTORS {
                odd[v].store(survey.odd.as_mut_ptr().add(v * LANES));
                lanes[v].store(last.as_mut_ptr().add(v * LANES));
            }
            let maxima = last;
            last = [f32::NEG_INFINITY; BLOCK];
            last[..rest.len()].copy_from_slice(rest);
            let highest = lanes[0].max(lanes[1]).max(lanes[2].max(lanes[3])).max_lane();
            if highest == f32::NEG_INFINITY {
                survey.seen += part.len();
                return;
            }
            let mut least = survey.least();
            if least == f32::NEG_INFINITY && count <= BLOCK {
                // Each maximum of a lane is a logit, so at least `count` logits are as high as the `count`-th highest.
                let mut best = Vec::with_capacity(count + 1);
                maxima.iter().for_each(|&x| offer(&mut best, count, (0, x)));
                if let Some(&(_, last)) = best.last().filter(|_| best.len() == count) {
                    least = last;
                }
            }
            let mut sums = [V::splat(0.0); VECTORS];
            let factor = if highest > survey.most { exponential_below_zero(survey.most - highest) } else { 1.0 };
            for (v, sum) in sums.iter_mut().enumerate() {
                *sum = load(&survey.sums, v).mul(V::splat(factor));
            }
            survey.most = if highest > survey.most { highest } else { survey.most };
            let (most, zero, one) = (V::splat(survey.most), V::splat(0.0), V::splat(1.0));
            for (at, block) in blocks.iter().chain([&last]).enumerate() {
                let mut highest = V::splat(f32::NEG_INFINITY);
                for (v, sum) in sums.iter_mut().enumerate() {
                    let x = load(block, v);
                    *sum = sum.add(exponentials_below_zero(x.sub(most)));
                    highest = highest.max(x);
                }
                if highest.where_less(V::splat(least), zero, one).not_zero() == 0 || count > BLOCK {
                    continue;
                }
                for v in 0..VECTORS {
                    let mut higher = load(block, v).where_less(V::splat(least), zero, one).not_zero();
                    while higher != 0 {
                        let x = v * LANES + higher.trailing_zeros() as usize;
                        offer(&mut survey.best, count, ((survey.seen + at * BLOCK + x) as u32, block[x]));
                        higher &= higher - 1;
                    }
                }
                let last = survey.least();
                least = if last > least { last } else { least };
            }
            for (v, sum) in sums.iter().enumerate() {
                sum.store(survey.sums.as_mut_ptr().add(v * LANES));
            }
        }
        if count > BLOCK {
            merge(&mut survey.best, count, survey.seen, part);
        }
        survey.seen += part.len();
    }
}

/// Inserts into `best` the highest logits of a part that begins at `first`, for a large `count`.
fn merge(best: &mut Vec<(u32, f32)>, count: usize, first: usize, logits: &[f32]) {
    best.extend(sorted(logits, count).into_iter().map(|(x, logit)| ((first + x as usize) as u32, logit)));
    // Stable: among equals, those from before come first, and their indices are lower.
    best.sort_by(|a, b| b.1.partial_cmp(&a.1).unwrap_or(Ordering::Equal));
    best.truncate(count);
}

/// Inserts a logit into `best` if it is among the `count` highest of those offered so far, in the order of their
/// indices.
fn offer(best: &mut Vec<(u32, f32)>, count: usize, (x, logit): (u32, f32)) {
    let is_higher = best.len() < count || best.last().is_some_and(|&(_, last)| logit > last);
    if logit > f32::NEG_INFINITY && is_higher {
        insert(best, count, (x, logit));
    }
}

/// Exponentials of numbers that are not above 0; 0 below −87.3. No step is fused, so that every instruction set
/// computes the same bits.
///
/// # Safety
/// The CPU has the instruction set of `V`.
#[inline(always)]
unsafe fn exponentials_below_zero<V: Lanes<Scalar = f32>>(x: V) -> V {
    // SAFETY: the caller guarantees the instruction set.
    unsafe {
        let shifted = x.mul(V::splat(std::f32::consts::LOG2_E)).add(V::splat(MAGIC));
        let k = shifted.sub(V::splat(MAGIC));
        let r = x.sub(k.mul(V::splat(LN_2[0]))).sub(k.mul(V::splat(LN_2[1])));
        let mut y = V::splat(EXPONENTIAL[0]);
        for coefficient in &EXPONENTIAL[1..] {
            y = y.mul(r).add(V::splat(*coefficient));
        }
        let y = y.mul(r).mul(r).add(r).add(V::splat(1.0));
        y.times_power_from(-87.3, x, k, shifted)
    }
}

/// One of [`exponentials_below_zero`].
fn exponential_below_zero(x: f32) -> f32 {
    if x < -87.3 { 0.0 } else { x.exponential() }
}

struct LogSumExp<'a>(&'a [f32]);

impl Pass for LogSumExp<'_> {
    type Output = f32;

    #[inline(always)]
    fn run(self) -> f32 {
        let (chunks, rest) = self.0.as_chunks::<LANES>();
        let mut most = highest(chunks);
        for &x in rest {
            most = if x > most { x } else { most };
        }
        if most == f32::NEG_INFINITY {
            return most;
        }
        let mut sums = [0.0f32; LANES];
        for chunk in chunks {
            for l in 0..LANES {
                sums[l] += (chunk[l] - most).exponential();
            }
        }
        let mut sum = 0.0;
        for &x in rest {
            sum += (x - most).exponential();
        }
        for x in sums {
            sum += x;
        }
        most + sum.ln()
    }
}

/// The highest of all lanes; −∞ if there are none.
#[inline(always)]
fn highest(chunks: &[[f32; LANES]]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for chunk in chunks {
        for l in 0..LANES {
            lanes[l] = if chunk[l] > lanes[l] { chunk[l] } else { lanes[l] };
        }
    }
    highest_of(lanes)
}

/// The highest of some lanes, a power of two.
#[inline(always)]
fn highest_of<const N: usize>(mut lanes: [f32; N]) -> f32 {
    let mut half = N / 2;
    while half > 0 {
        for l in 0..half {
            lanes[l] = if lanes[l + half] > lanes[l] { lanes[l + half] } else { lanes[l] };
        }
        half /= 2;
    }
    lanes[0]
}

struct AllFinite<'a>(&'a [f32]);

impl Pass for AllFinite<'_> {
    type Output = bool;

    #[inline(always)]
    fn run(self) -> bool {
        let (chunks, rest) = self.0.as_chunks::<LANES>();
        // 0 for a finite number, NaN otherwise.
        let mut lanes = [0.0f32; LANES];
        for chunk in chunks {
            for l in 0..LANES {
                lanes[l] += chunk[l] * 0.0;
            }
        }
        for (l, x) in rest.iter().enumerate() {
            lanes[l] += x * 0.0;
        }
        let mut sum = 0.0;
        for x in lanes {
            sum += x;
        }
        sum == 0.0
    }
}

struct Top<'a> {
    row: &'a [f32],
    count: usize,
    best: &'a mut Vec<(u32, f32)>,
}

impl Pass for Top<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        // A logit is inserted if it is above this. Most blocks have none, as their maximum shows.
        let mut least = f32::NEG_INFINITY;
        for (at, block) in self.row.chunks(BLOCK).enumerate() {
            let (chunks, rest) = block.as_chunks::<LANES>();
            if rest.is_empty() && highest(chunks) <= least {
                continue;
            }
            for (x, &logit) in block.iter().enumerate() {
                if logit > least {
                    insert(self.best, self.count, ((at * BLOCK + x) as u32, logit));
                    if self.best.len() == self.count {
                        least = self.best[self.count - 1].1;
                    }
                }
            }
        }
    }
}

/// The largest `count` for which logits are inserted one by one: every insertion moves the lower ones.
const MAX_INSERTED: usize = 128;

/// [`top`] for a large `count`: selects, then sorts.
fn sorted(row: &[f32], count: usize) -> Vec<(u32, f32)> {
    let taken = row.iter().enumerate().filter(|&(_, &logit)| logit > f32::NEG_INFINITY);
    let mut best: Vec<(u32, f32)> = taken.map(|(x, &logit)| (x as u32, logit)).collect();
    let order = |a: &(u32, f32), b: &(u32, f32)| b.1.partial_cmp(&a.1).unwrap_or(Ordering::Equal).then(a.0.cmp(&b.0));
    if count < best.len() {
        best.select_nth_unstable_by(count, order);
        best.truncate(count);
    }
    best.sort_unstable_by(order);
    best
}

/// Inserts a logit behind those that are as high, and drops the lowest if there are more than `count`.
fn insert(best: &mut Vec<(u32, f32)>, count: usize, found: (u32, f32)) {
    if best.len() == count {
        best.pop();
    }
    let place = best.partition_point(|&(_, other)| other >= found.1);
    best.insert(place, found);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_top_logits_are_found_in_order() {
        let row: Vec<f32> = (0..1000).map(|x| ((x * 7919) % 509) as f32).collect();
        let mut expected: Vec<(u32, f32)> = row.iter().enumerate().map(|(x, &s)| (x as u32, s)).collect();
        expected.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        for isa in Isa::available() {
            for count in [0, 1, 7, MAX_INSERTED, MAX_INSERTED + 1, 1000, 2000] {
                assert_eq!(top(isa, &row, count), expected[..count.min(1000)], "{isa} {count}");
            }
            for count in [5, 500] {
                assert_eq!(
                    top(isa, &[f32::NEG_INFINITY, 1.0, f32::NAN, -0.0, 0.0], count),
                    [(1, 1.0), (3, 0.0), (4, 0.0)]
                );
            }
            assert_eq!(top(isa, &[], 5), []);
        }
    }

    #[test]
    fn a_survey_finds_what_the_passes_one_by_one_find() {
        for length in [0, 1, 15, 63, 64, 65, 200, 8000] {
            let mut row: Vec<f32> = (0..length).map(|x| ((x * 7919 % 509) as f32).sin() * 9.0).collect();
            for odd in [None, Some(f32::NEG_INFINITY), Some(f32::INFINITY), Some(f32::NAN)] {
                if let (Some(odd), Some(to)) = (odd, row.get_mut(length / 2)) {
                    *to = odd;
                }
                for isa in Isa::available() {
                    for count in [0, 1, 10, 64, 65, 300] {
                        let found = survey(isa, &row, count);
                        assert_eq!(found.is_finite, all_finite(isa, &row), "{isa} {length}");
                        if odd.is_none_or(|odd| odd == f32::NEG_INFINITY) {
                            assert_eq!(found.best, top(isa, &row, count), "{isa} {length} {count}");
                            let expected = log_sum_exp(isa, &row);
                            let same =
                                found.log_sum_exp == expected || (found.log_sum_exp - expected).abs() < 2e-6 * 9.0;
                            assert!(same, "{isa} {length}: {} {expected}", found.log_sum_exp);
                            assert_eq!(found, survey(Isa::named("portable").unwrap(), &row, count));
                        }
                    }
                }
            }
        }
        let ties = [1.0, 2.0, 2.0, 1.0].repeat(40);
        assert_eq!(survey(Isa::best(), &ties, 90).best, top(Isa::best(), &ties, 90));
        assert_eq!(survey(Isa::best(), &ties, 7).best, top(Isa::best(), &ties, 7));
    }

    #[test]
    fn the_sum_of_exponentials_is_right_and_has_the_same_bits_everywhere() {
        for length in [1, 15, 16, 17, 100, 8000] {
            let row: Vec<f32> = (0..length).map(|x| (x as f32).sin() * 5.0).collect();
            let expected = row.iter().map(|&x| f64::from(x).exp()).sum::<f64>().ln();
            let portable = log_sum_exp(Isa::named("portable").unwrap(), &row);
            assert!((f64::from(portable) - expected).abs() < 1e-5, "{length}: {portable} {expected}");
            for isa in Isa::available() {
                assert_eq!(log_sum_exp(isa, &row), portable, "{isa} {length}");
            }
        }
        assert_eq!(log_sum_exp(Isa::best(), &[f32::NEG_INFINITY; 20]), f32::NEG_INFINITY);
        assert_eq!(log_sum_exp(Isa::best(), &[]), f32::NEG_INFINITY);
    }

    #[test]
    fn one_number_that_is_not_finite_is_noticed_wherever_it_is() {
        for isa in Isa::available() {
            for at in [0, 15, 16, 36] {
                for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    let mut row = [f32::MAX; 37];
                    assert!(all_finite(isa, &row));
                    row[at] = odd;
                    assert!(!all_finite(isa, &row), "{isa} {at} {odd}");
                }
            }
        }
    }
}
