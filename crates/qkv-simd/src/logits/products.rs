//! Surveys of logits `x Wᵀ + b` that are never stored as a whole: some columns of all rows are multiplied and surveyed
//! while they are in the cache.

use super::{PART, RunningSurvey, Survey};
use crate::int8::{self, Int8Matrix, Int8Rows};
use crate::isa::Isa;
use crate::kept_memory;
use crate::panels::{self, PackedMatrix};
use crate::pass::{self, Pass};
use crate::team::Team;
use std::sync::{Mutex, PoisonError};

/// Rows surveyed at a time.
const ROWS: usize = 256;
/// Logits in memory at a time: half of a second-level cache of 1 MiB.
const LOGITS: usize = ROWS * PART;
/// Logits computed again beyond those that were asked for: rounding to 8 bits may put others among the highest.
const SPARE: usize = 6;

/// An output projection `W [V, C]`, and how rows are multiplied with it.
#[derive(Clone, Copy, Debug)]
pub enum Projection<'a> {
    /// In f32.
    Packed(&'a PackedMatrix<f32>),
    /// In 8 bits.
    Int8(&'a Int8Matrix),
    /// In 8 bits, and the highest logits again in f32, with the elements of `W`.
    Int8ThenF32(&'a Int8Matrix, &'a [f32]),
}

impl Projection<'_> {
    /// Rows and columns of the matrix.
    fn shape(&self) -> [usize; 2] {
        match self {
            Projection::Packed(matrix) => [matrix.rows(), matrix.width()],
            Projection::Int8(matrix) | Projection::Int8ThenF32(matrix, _) => [matrix.rows(), matrix.width()],
        }
    }
}

/// Surveys every row of the logits `x Wᵀ + b` for the `count` highest. A row's survey depends on nothing but the row.
///
/// ```
/// use qkv_simd::logits::{Projection, survey, survey_products};
/// use qkv_simd::{Isa, panels::PackedMatrix, team::Team};
/// let matrix = PackedMatrix::new(&[1.0, 2.0, 3.0, 4.0], 2);
/// let found = survey_products(Isa::best(), &Team::new(1), &[1.0, 0.5], Projection::Packed(&matrix), None, 1);
/// assert_eq!(found, [survey(Isa::best(), &[2.0, 5.0], 1)]);
/// ```
///
/// # Panics
/// If the rows or the bias do not fit the matrix.
pub fn survey_products(
    isa: Isa,
    team: &Team,
    x: &[f32],
    projection: Projection<'_>,
    bias: Option<&[f32]>,
    count: usize,
) -> Vec<Survey> {
    let [vocabulary, width] = projection.shape();
    assert!(x.len().is_multiple_of(width), "whole rows of {width} elements");
    if let Projection::Int8ThenF32(_, elements) = projection {
        assert_eq!(elements.len(), vocabulary * width, "elements of the matrix");
    }
    x.chunks(ROWS * width).flat_map(|x| survey_rows(isa, team, x, projection, bias, count)).collect()
}

/// Surveys at most [`ROWS`] rows.
fn survey_rows(
    isa: Isa,
    team: &Team,
    x: &[f32],
    projection: Projection<'_>,
    bias: Option<&[f32]>,
    count: usize,
) -> Vec<Survey> {
    let [vocabulary, width] = projection.shape();
    let rows = x.len() / width;
    let (int8, elements) = match projection {
        Projection::Packed(_) => (None, None),
        Projection::Int8(matrix) => (Some(matrix), None),
        Projection::Int8ThenF32(matrix, elements) => (Some(matrix), Some(elements)),
    };
    let int8 = int8.map(|matrix| (matrix, Int8Rows::new(isa, x, width)));
    let surveyed = count + if elements.is_some() { SPARE } else { 0 };
    let mut surveys = vec![RunningSurvey::new(surveyed); rows];
    // One piece per thread; its lock is never contended.
    let piece = rows.div_ceil(team.threads());
    let each = LOGITS / rows / PART * PART;
    let mut logits = kept_memory::take(rows * each.min(vocabulary)).unwrap_or_default();
    for first in (0..vocabulary).step_by(each) {
        let columns = first..(first + each).min(vocabulary);
        let across = columns.len();
        logits.resize(rows * across, 0.0);
        match (&int8, projection) {
            (Some((matrix, x)), _) => int8::product_of_columns(isa, team, x, (matrix, bias), columns, &mut logits),
            (None, Projection::Packed(matrix)) => {
                panels::product_of_columns(isa, team, x, (matrix, bias), columns, &mut logits);
            }
            (None, _) => unreachable!("a matrix in 8 bits has its rows"),
        }
        let pieces = surveys.chunks_mut(piece).zip(logits.chunks(piece * across));
        let pieces: Vec<_> = pieces.map(Mutex::new).collect();
        team.run(pieces.len(), |at| {
            let mut piece = pieces[at].lock().unwrap_or_else(PoisonError::into_inner);
            let (surveys, logits) = &mut *piece;
            for (survey, logits) in surveys.iter_mut().zip(logits.chunks_exact(across)) {
                logits.chunks(PART).for_each(|part| survey.add(isa, part));
            }
        });
    }
    kept_memory::keep(logits);
    let found = surveys.into_iter().map(RunningSurvey::finish);
    let Some(elements) = elements else { return found.collect() };
    let again = |survey: Survey, x: &[f32]| {
        recomputed(survey, count, |column| {
            let logit = pass::run(isa, Dot { x, w: &elements[column * width..][..width] });
            bias.map_or(logit, |bias| logit + bias[column])
        })
    };
    found.zip(x.chunks_exact(width)).map(|(survey, x)| again(survey, x)).collect()
}

/// A survey whose highest logits are replaced by other values of them, and of these the `count` highest. The
/// log-sum-exp changes with them.
fn recomputed(mut survey: Survey, count: usize, logit: impl Fn(usize) -> f32) -> Survey {
    let log_sum_exp = survey.log_sum_exp;
    let share = |best: &[(u32, f32)]| best.iter().map(|&(_, x)| f64::from(x - log_sum_exp).exp()).sum::<f64>();
    let before = share(&survey.best);
    for (column, x) in &mut survey.best {
        *x = logit(*column as usize);
    }
    if survey.is_finite && !survey.best.is_empty() {
        // The others' share is not below zero, which rounding could make it.
        survey.log_sum_exp += ((1.0 - before).max(0.0) + share(&survey.best)).ln() as f32;
    }
    survey.best.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    survey.best.truncate(count);
    survey
}

/// A dot product whose steps are not fused, so that every instruction set computes the same bits.
struct Dot<'a> {
    x: &'a [f32],
    w: &'a [f32],
}

/// Number of partial sums of a dot product.
const LANES: usize = 64;

impl Pass for Dot<'_> {
    type Output = f32;

    #[inline(always)]
    fn run(self) -> f32 {
        let ((x, x_rest), (w, w_rest)) = (self.x.as_chunks::<LANES>(), self.w.as_chunks::<LANES>());
        let mut sums = [0.0f32; LANES];
        for (x, w) in x.iter().zip(w) {
            for l in 0..LANES {
                sums[l] += x[l] * w[l];
            }
        }
        let mut half = LANES / 2;
        while half > 0 {
            for l in 0..half {
                sums[l] += sums[l + half];
            }
            half /= 2;
        }
        x_rest.iter().zip(w_rest).fold(sums[0], |sum, (x, w)| sum + x * w)
    }
}

#[cfg(test)]
mod tests {
    use super::super::survey;
    use super::*;
    use crate::finish::Finish;

    fn noise(count: usize, salt: usize) -> Vec<f32> {
        (0..count).map(|at| ((at + salt) * 2_654_435_761 % 1021) as f32 / 512.0 - 1.0).collect()
    }

    /// Rows, and those of a second block of them; columns of one part, of several, and not of whole panels.
    const SHAPES: [(usize, usize, usize); 4] = [(1, 20, 7), (5, 700, 64), (ROWS + 3, PART + 70, 9), (20, 2 * PART, 33)];

    #[test]
    fn a_survey_of_products_is_that_of_the_logits() {
        for isa in Isa::available() {
            for (rows, vocabulary, width) in SHAPES {
                let (weights, x, bias) = (noise(vocabulary * width, 3), noise(rows * width, 5), noise(vocabulary, 7));
                let (packed, int8) =
                    (PackedMatrix::new(&weights, width), Int8Matrix::new(isa, &weights, width).unwrap());
                for bias in [None, Some(&bias[..])] {
                    let finish = Finish { bias, ..Finish::default() };
                    let (mut exact, mut rounded) = (vec![0.0; rows * vocabulary], vec![0.0; rows * vocabulary]);
                    panels::products(isa, &Team::new(1), &x, &mut [(&packed, &mut exact, finish)]);
                    let codes = Int8Rows::new(isa, &x, width);
                    int8::products(isa, &Team::new(1), &codes, &mut [(&int8, &mut rounded, finish)]);
                    for (projection, logits) in
                        [(Projection::Packed(&packed), exact), (Projection::Int8(&int8), rounded)]
                    {
                        let expected: Vec<Survey> = logits.chunks(vocabulary).map(|row| survey(isa, row, 4)).collect();
                        for threads in [1, 3] {
                            let found = survey_products(isa, &Team::new(threads), &x, projection, bias, 4);
                            assert_eq!(found, expected, "{isa} {rows} {vocabulary} {width} {threads}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn the_highest_logits_in_8_bits_are_those_of_f32() {
        let team = Team::new(2);
        for (rows, vocabulary, width) in SHAPES {
            let (weights, x, bias) = (noise(vocabulary * width, 3), noise(rows * width, 5), noise(vocabulary, 7));
            let (packed, int8) =
                (PackedMatrix::new(&weights, width), Int8Matrix::new(Isa::best(), &weights, width).unwrap());
            let run = |isa, x: &[f32], projection| survey_products(isa, &team, x, projection, Some(&bias), 4);
            let projection = Projection::Int8ThenF32(&int8, &weights);
            let found = run(Isa::best(), &x, projection);
            for isa in Isa::available() {
                assert_eq!(found, run(isa, &x, projection), "{isa}: the same bits everywhere");
            }
            let [exact, rounded] = [Projection::Packed(&packed), Projection::Int8(&int8)]
                .map(|projection| run(Isa::best(), &x, projection));
            for (row, found) in found.iter().enumerate() {
                let alone = run(Isa::best(), &x[row * width..][..width], projection);
                assert_eq!(*found, alone[0], "a row's bits are its own");
                for ((column, logit), (expected_column, expected)) in found.best.iter().zip(&exact[row].best) {
                    assert_eq!(column, expected_column, "{rows} {vocabulary} {width}: {row}");
                    assert!((logit - expected).abs() < 1e-5, "{rows} {vocabulary} {width}: {row}");
                }
                // The share of the highest is exact, that of the others as good as 8 bits.
                let error = |survey: &Survey| (survey.log_sum_exp - exact[row].log_sum_exp).abs();
                assert!(error(found) <= error(&rounded[row]).max(0.02), "{rows} {vocabulary} {width}: {row}");
            }
        }
    }

    #[test]
    fn a_row_that_is_not_finite_is_reported() {
        let (weights, mut x) = (noise(600 * 8, 3), noise(3 * 8, 5));
        x[9] = f32::NAN;
        let (packed, int8) = (PackedMatrix::new(&weights, 8), Int8Matrix::new(Isa::best(), &weights, 8).unwrap());
        for projection in
            [Projection::Packed(&packed), Projection::Int8(&int8), Projection::Int8ThenF32(&int8, &weights)]
        {
            let found = survey_products(Isa::best(), &Team::new(1), &x, projection, None, 2);
            let finite: Vec<bool> = found.iter().map(|survey| survey.is_finite).collect();
            assert_eq!(finite, [true, false, true], "{projection:?}");
        }
    }
}
