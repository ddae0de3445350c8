//! Matrices and rows rounded to 8 bits, for inference: every row of the matrix has a scale, computed once, and every
//! row that it is multiplied with has one, computed for each product. All sums over the width are exact integers, so a
//! result has the same bits on every instruction set, for any number of threads and whatever else is in the batch.
//!
//! The inner loops are left to `kernel`.

mod kernel;

use crate::aligned::Aligned;
use crate::finish::Finish;
use crate::isa::Isa;
use crate::pass::{self, MAGIC, Pass};
use crate::team::Team;
use kernel::{Dots, Job};
use std::ops::Range;

/// Columns of a panel.
const LANES: usize = 16;
/// Elements multiplied at a time: the four bytes of a 32-bit lane.
const QUAD: usize = 4;
/// Panels multiplied at a time, by one task.
const PANELS: usize = 4;
/// Bytes of the rows of one task: a loaded panel serves as many rows as fit beside it in the second-level cache.
const ROW_BYTES: usize = 256 << 10;
/// The largest code.
const LARGEST: f32 = 127.0;
/// The offset added to the codes of a matrix, because the instruction multiplies unsigned with signed bytes.
const SHIFT: i32 = 128;
/// The widest matrix: sums of its products stay within 31 bits.
const MAX_WIDTH: usize = 1 << 15;
/// A row whose elements do not exceed this rounds to zeros: the inverse of its scale would overflow.
const SMALLEST: f32 = 1e-30;

/// A matrix `W [O, I]` rounded to 8 bits and packed for `x · Wᵀ`.
///
/// ```
/// use qkv_simd::int8::{Int8Matrix, Int8Rows, products};
/// use qkv_simd::{Isa, finish::Finish, team::Team};
/// let matrix = Int8Matrix::new(Isa::best(), &[127.0, 2.0, -254.0, 4.0], 2).unwrap();
/// let x = Int8Rows::new(Isa::best(), &[127.0, 1.0], 2);
/// let mut y = [0.0; 2];
/// products(Isa::best(), &Team::new(1), &x, &mut [(&matrix, &mut y, Finish::default())]);
/// assert_eq!(y, [127.0 * 127.0 + 2.0, -254.0 * 127.0 + 4.0]);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Int8Matrix {
    rows: usize,
    width: usize,
    /// `[⌈O/16⌉, ⌈I/4⌉, 16, 4]`, codes plus 128, padded with codes of zero.
    panels: Aligned<u8>,
    /// One for every row; zeros up to whole panels.
    scales: Vec<f32>,
}

impl Int8Matrix {
    /// Rounds and packs rows of `width` elements; `None` if an element is not finite or rows are wider than 32,768.
    ///
    /// # Panics
    /// If the elements are not whole rows.
    pub fn new(isa: Isa, elements: &[f32], width: usize) -> Option<Self> {
        assert!(width > 0 && elements.len().is_multiple_of(width), "whole rows of {width} elements");
        if width > MAX_WIDTH {
            return None;
        }
        let mut rounded = Int8Rows::new(isa, elements, width);
        if rounded.scales.iter().any(|scale| scale.is_nan()) {
            return None;
        }
        let (rows, depth) = (rounded.count, rounded.row / QUAD);
        let across = rows.div_ceil(LANES);
        let mut panels = Aligned::new(across * LANES * rounded.row, SHIFT as u8);
        for (at, codes) in rounded.codes.chunks_exact(rounded.row).enumerate() {
            let panel = &mut panels[at / LANES * LANES * rounded.row..];
            for k in 0..depth {
                for (to, &code) in panel[(k * LANES + at % LANES) * QUAD..].iter_mut().zip(&codes[k * QUAD..][..QUAD]) {
                    *to = (i32::from(code) + SHIFT) as u8;
                }
            }
        }
        let mut scales = std::mem::take(&mut rounded.scales);
        scales.resize(across * LANES, 0.0);
        Some(Int8Matrix { rows, width, panels, scales })
    }

    /// The number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The number of columns.
    pub fn width(&self) -> usize {
        self.width
    }

    /// The bytes that a product reads.
    pub fn bytes(&self) -> usize {
        self.panels.len() + size_of_val(&self.scales[..])
    }
}

/// Rows rounded to 8 bits, each with its scale; the remainder of that rounding may be kept in another 8 bits.
#[derive(Clone, Debug, PartialEq)]
pub struct Int8Rows {
    width: usize,
    count: usize,
    /// Codes in a row: its width rounded up to whole quads.
    row: usize,
    codes: Aligned<i8>,
    scales: Vec<f32>,
    /// What the shift of the matrix adds to a sum: 128 times the sum of the codes.
    excess: Vec<i32>,
    /// The remainder of the rounding.
    rest: Option<Box<Int8Rows>>,
}

/// How many times finer the steps of the remainder are: half a step of the first rounding is again the largest code.
const FINER: f32 = 2.0 * LARGEST;

impl Int8Rows {
    /// Rounds the rows of `x [R, width]`. A row with an element that is not finite becomes NaN.
    ///
    /// # Panics
    /// If `x` does not hold whole rows.
    pub fn new(isa: Isa, x: &[f32], width: usize) -> Int8Rows {
        let mut rows = Int8Rows::blank(x, width);
        // The compiler does not vectorize the narrowing to bytes.
        if !kernel::round(isa, x, &mut rows, None) {
            pass::run(isa, Round { x, into: &mut rows });
        }
        rows
    }

    /// The same in 16 bits, as two parts: products take twice as long.
    ///
    /// # Panics
    /// As [`new`](Int8Rows::new).
    pub fn fine(isa: Isa, x: &[f32], width: usize) -> Int8Rows {
        let (mut rows, mut rest) = (Int8Rows::blank(x, width), Int8Rows::blank(x, width));
        if !kernel::round(isa, x, &mut rows, Some(&mut rest)) {
            pass::run(isa, Round { x, into: &mut rows });
            pass::run(isa, Remainder { x, rows: &rows, into: &mut rest });
        }
        rows.rest = Some(Box::new(rest));
        rows
    }

    fn blank(x: &[f32], width: usize) -> Int8Rows {
        assert!(width > 0 && x.len().is_multiple_of(width), "whole rows of {width} elements");
        let (count, row) = (x.len() / width, width.next_multiple_of(QUAD));
        let (codes, scales, excess) = (Aligned::reused(count * row, 0), vec![0.0; count], vec![0; count]);
        Int8Rows { width, count, row, codes, scales, excess, rest: None }
    }
}

impl Drop for Int8Rows {
    fn drop(&mut self) {
        std::mem::take(&mut self.codes).keep();
    }
}

struct Round<'a> {
    x: &'a [f32],
    into: &'a mut Int8Rows,
}

impl Pass for Round<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Int8Rows { width, row, codes, scales, excess, .. } = self.into;
        let out = codes.chunks_exact_mut(*row).zip(scales).zip(excess);
        for (x, ((codes, scale), excess)) in self.x.chunks_exact(*width).zip(out) {
            let (chunks, rest) = x.as_chunks::<LANES>();
            let (mut most, mut finite) = ([0.0f32; LANES], [0.0f32; LANES]);
            for chunk in chunks {
                for l in 0..LANES {
                    let size = chunk[l].abs();
                    most[l] = if size > most[l] { size } else { most[l] };
                    // 0 for a finite number, NaN otherwise.
                    finite[l] += chunk[l] * 0.0;
                }
            }
            for (l, x) in rest.iter().enumerate() {
                most[l] = if x.abs() > most[l] { x.abs() } else { most[l] };
                finite[l] += x * 0.0;
            }
            let (mut largest, mut odd) = (0.0f32, 0.0f32);
            for l in 0..LANES {
                largest = if most[l] > largest { most[l] } else { largest };
                odd += finite[l];
            }
            let usable = largest > SMALLEST && odd == 0.0;
            let inverse = if usable { LARGEST / largest } else { 0.0 };
            *scale = if usable { largest / LARGEST } else { 0.0 } + odd;
            *excess = 0;
            if !usable {
                codes.fill(0);
                continue;
            }
            let mut sums = [0i32; LANES];
            let (to, to_rest) = codes.split_at_mut(chunks.len() * LANES);
            for (to, chunk) in to.as_chunks_mut::<LANES>().0.iter_mut().zip(chunks) {
                for l in 0..LANES {
                    let whole = round(chunk[l] * inverse);
                    sums[l] += whole;
                    to[l] = whole as i8;
                }
            }
            for (l, (to, x)) in to_rest.iter_mut().zip(rest).enumerate() {
                let whole = round(x * inverse);
                sums[l] += whole;
                *to = whole as i8;
            }
            for sum in sums {
                *excess += SHIFT * sum;
            }
        }
    }
}

/// Rounds the remainder of the first rounding.
struct Remainder<'a> {
    x: &'a [f32],
    rows: &'a Int8Rows,
    into: &'a mut Int8Rows,
}

impl Pass for Remainder<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Int8Rows { width, row, codes, scales, excess, .. } = self.into;
        let (width, row) = (*width, *row);
        for (r, x) in self.x.chunks_exact(width).enumerate() {
            let scale = self.rows.scales[r];
            let (from, to) = (&self.rows.codes[r * row..][..width], &mut codes[r * row..][..width]);
            if scale == 0.0 || scale.is_nan() {
                (scales[r], excess[r]) = (scale / FINER, 0);
                to.fill(0);
                continue;
            }
            // The same scaling as in the first rounding: the difference is exact.
            let mut largest = 0.0f32;
            for x in x {
                largest = if x.abs() > largest { x.abs() } else { largest };
            }
            let inverse = LARGEST / largest;
            let mut sum = 0;
            for ((to, &code), x) in to.iter_mut().zip(from).zip(x) {
                let left = x * inverse - f32::from(code);
                let whole = round(left * FINER);
                sum += whole;
                *to = whole as i8;
            }
            scales[r] = scale / FINER;
            excess[r] = SHIFT * sum;
        }
    }
}

/// Rounds a number within ±2²² to the nearest integer, ties to even.
#[inline(always)]
fn round(x: f32) -> i32 {
    ((x + MAGIC).to_bits() as i32).wrapping_sub(MAGIC.to_bits() as i32)
}

/// The outputs that tasks write to.
struct Outputs(Vec<*mut f32>);

// SAFETY: each task writes its own rows and panels, which no other task accesses.
unsafe impl Sync for Outputs {}

impl Outputs {
    fn pointer(&self, at: usize) -> *mut f32 {
        self.0[at]
    }
}

/// `y [R, O] = x · Wᵀ`, [finished](Finish), for several matrices that share the rows `x [R, I]`, as one piece of work
/// for the team.
///
/// # Panics
/// If a matrix has a different width, or an output, a bias or a residual has the wrong length.
pub fn products(isa: Isa, team: &Team, x: &Int8Rows, outputs: &mut [(&Int8Matrix, &mut [f32], Finish<'_>)]) {
    products_by(Dots::of(isa), team, x, outputs);
}

fn products_by(dots: Dots, team: &Team, x: &Int8Rows, outputs: &mut [(&Int8Matrix, &mut [f32], Finish<'_>)]) {
    let pointers = Outputs(outputs.iter_mut().map(|(_, y, _)| y.as_mut_ptr()).collect());
    let matrices: Vec<(&Int8Matrix, Finish<'_>)> = outputs.iter().map(|(matrix, _, how)| (*matrix, *how)).collect();
    let mut ends = Vec::with_capacity(matrices.len());
    let mut total = 0;
    for (matrix, y, finish) in outputs.iter() {
        let fits = y.len() == x.count * matrix.rows && finish.fits(x.count, matrix.rows);
        assert!(matrix.width == x.width && fits, "the product does not fit");
        total += matrix.rows.div_ceil(PANELS * LANES);
        ends.push(total);
    }
    run_tasks(dots, team, x, total, |rows, column| {
        let at = ends.partition_point(|&end| end <= column);
        let (matrix, finish) = matrices[at];
        let panel = (column - if at == 0 { 0 } else { ends[at - 1] }) * PANELS;
        let panels = panel..(panel + PANELS).min(matrix.rows.div_ceil(LANES));
        Job { matrix, finish, x, rows, panels, out: pointers.pointer(at), stride: matrix.rows }
    });
}

/// Some columns of [`products`] of one matrix: `y [R, columns] = x · Wᵀ + b`. The first column starts a panel, and the
/// last one ends a panel or the matrix.
///
/// # Panics
/// If the matrix has a different width or no such columns, or the output or the bias has the wrong length.
pub fn product_of_columns(
    isa: Isa,
    team: &Team,
    x: &Int8Rows,
    (matrix, bias): (&Int8Matrix, Option<&[f32]>),
    columns: Range<usize>,
    y: &mut [f32],
) {
    let stride = columns.len();
    let whole =
        columns.start.is_multiple_of(LANES) && (columns.end == matrix.rows || columns.end.is_multiple_of(LANES));
    let fits = y.len() == x.count * stride && bias.is_none_or(|bias| bias.len() == matrix.rows);
    assert!(matrix.width == x.width && whole && columns.end <= matrix.rows && fits, "the product does not fit");
    let finish = Finish { bias, ..Finish::default() };
    let (first, last) = (columns.start / LANES, columns.end.div_ceil(LANES));
    // The kernel counts columns from the start of the matrix.
    let pointers = Outputs(vec![y.as_mut_ptr().wrapping_sub(columns.start)]);
    run_tasks(Dots::of(isa), team, x, (last - first).div_ceil(PANELS), |rows, column| {
        let panel = first + column * PANELS;
        let panels = panel..(panel + PANELS).min(last);
        Job { matrix, finish, x, rows, panels, out: pointers.pointer(0), stride }
    });
}

/// Runs a job for each block of rows and each of `columns` groups of panels.
fn run_tasks<'a>(
    dots: Dots,
    team: &Team,
    x: &Int8Rows,
    columns: usize,
    job: impl Fn(Range<usize>, usize) -> Job<'a> + Sync,
) {
    let rows = (ROW_BYTES / x.row).max(1);
    // Tiles stay configured from task to task.
    #[cfg(target_arch = "x86_64")]
    // SAFETY: only a CPU with AMX has these products.
    let _tiles = (dots == Dots::Amx).then(|| unsafe { crate::amx::Tiles::new() });
    team.run(columns * x.count.div_ceil(rows), |task| {
        let block = task / columns;
        let job = job(block * rows..x.count.min((block + 1) * rows), task % columns);
        // SAFETY: the callers checked every length, and this task alone writes its rows and panels.
        unsafe { kernel::run(dots, job) };
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(count: usize, salt: usize) -> Vec<f32> {
        (0..count).map(|at| ((at + salt) * 2_654_435_761 % 1021) as f32 / 512.0 - 1.0).collect()
    }

    fn product(dots: Dots, team: &Team, matrix: &Int8Matrix, x: &[f32]) -> Vec<f32> {
        let mut y = vec![f32::NAN; x.len() / matrix.width * matrix.rows];
        products_by(
            dots,
            team,
            &Int8Rows::new(Isa::best(), x, matrix.width),
            &mut [(matrix, &mut y, Finish::default())],
        );
        y
    }

    #[test]
    fn a_result_is_the_exact_sum_of_rounded_elements_on_every_instruction_set_and_in_every_batch() {
        let (alone, together) = (Team::new(1), Team::new(3));
        for (out, width) in [(1, 1), (16, 7), (40, 64), (129, 33), (70, 256)] {
            let weights = noise(out * width, 3);
            let matrix = Int8Matrix::new(Isa::best(), &weights, width).unwrap();
            for rows in [1, 2, 5, 13, 16, 17, 33, 200] {
                let x = noise(rows * width, 5);
                let [w8, x8] = [&weights, &x].map(|x| Int8Rows::new(Isa::best(), x, width));
                let expected: Vec<f32> = (0..rows * out)
                    .map(|at| {
                        let (r, o) = (at / out, at % out);
                        let term = |k| i32::from(x8.codes[r * x8.row + k]) * i32::from(w8.codes[o * w8.row + k]);
                        (0..width).map(term).sum::<i32>() as f32 * (w8.scales[o] * x8.scales[r])
                    })
                    .collect();
                for dots in Dots::available() {
                    assert_eq!(product(dots, &alone, &matrix, &x), expected, "{dots:?} {out} {width} {rows}");
                    assert_eq!(product(dots, &together, &matrix, &x), expected, "{dots:?}: a team changes nothing");
                    for r in [0, rows / 2, rows - 1] {
                        let own = product(dots, &alone, &matrix, &x[r * width..][..width]);
                        assert_eq!(own, expected[r * out..][..out], "{dots:?}: a row's bits are its own");
                    }
                }
            }
        }
    }

    #[test]
    fn rounding_errs_by_half_a_step_with_the_same_bits_everywhere() {
        for width in [1, 15, 16, 50, 256] {
            let x = noise(3 * width, 1);
            let portable = Int8Rows::new(Isa::named("portable").unwrap(), &x, width);
            for (r, row) in x.chunks_exact(width).enumerate() {
                let (scale, codes) = (portable.scales[r], &portable.codes[r * portable.row..]);
                assert!(row.iter().zip(codes).all(|(x, &code)| (x - f32::from(code) * scale).abs() <= 0.501 * scale));
                let sum: i32 = codes[..width].iter().map(|&code| i32::from(code)).sum();
                assert_eq!(portable.excess[r], SHIFT * sum);
            }
            for isa in Isa::available() {
                assert_eq!(Int8Rows::new(isa, &x, width), portable, "{isa} {width}");
            }
        }
    }

    #[test]
    fn rows_in_two_parts_err_by_a_254th_of_a_step_with_the_same_bits_everywhere() {
        let (rows, out, width) = (40, 37, 192);
        let (weights, x) = (noise(out * width, 3), noise(rows * width, 5));
        let matrix = Int8Matrix::new(Isa::best(), &weights, width).unwrap();
        let rounded = Int8Rows::new(Isa::best(), &weights, width);
        let fine = Int8Rows::fine(Isa::best(), &x, width);
        for isa in Isa::available() {
            assert_eq!(Int8Rows::fine(isa, &x, width), fine, "{isa}");
        }
        let mut found = Vec::new();
        for dots in Dots::available() {
            let mut y = vec![f32::NAN; rows * out];
            products_by(dots, &Team::new(2), &fine, &mut [(&matrix, &mut y, Finish::default())]);
            for (at, y) in y.iter().enumerate() {
                let (r, o) = (at / out, at % out);
                let weight = |k: usize| f64::from(rounded.codes[o * rounded.row + k]) * f64::from(rounded.scales[o]);
                let truth: f64 = (0..width).map(|k| f64::from(x[r * width + k]) * weight(k)).sum();
                let bound: f64 = (0..width).map(|k| weight(k).abs()).sum::<f64>() * f64::from(fine.scales[r]) / 500.0;
                assert!((f64::from(*y) - truth).abs() <= bound + 1e-5, "{dots:?}: {y} {truth} {bound}");
            }
            found.push(y);
        }
        assert!(found.windows(2).all(|pair| pair[0] == pair[1]));
        let mut odd = noise(2 * 20, 3);
        odd[25] = f32::NAN;
        let small = Int8Matrix::new(Isa::best(), &noise(3 * 20, 2), 20).unwrap();
        let mut y = vec![0.0; 6];
        let finish = Finish::default();
        products(Isa::best(), &Team::new(1), &Int8Rows::fine(Isa::best(), &odd, 20), &mut [(&small, &mut y, finish)]);
        assert!(y[..3].iter().all(|y| y.is_finite()) && y[3..].iter().all(|y| y.is_nan()));
    }

    #[test]
    fn the_largest_codes_do_not_saturate() {
        let (weights, x) = ([1.0, -1.0].repeat(512), [1.0, -1.0].repeat(512));
        let matrix = Int8Matrix::new(Isa::best(), &weights, 1024).unwrap();
        let negative: Vec<f32> = x.iter().map(|x| -x).collect();
        for dots in Dots::available() {
            for (x, sign) in [(&x, 1.0), (&negative, -1.0)] {
                let found = product(dots, &Team::new(1), &matrix, x)[0];
                assert!((found - sign * 1024.0).abs() < 1e-3, "{dots:?}: {found}");
            }
        }
    }

    #[test]
    fn what_is_not_finite_stays_so_and_zeros_stay_zeros() {
        let matrix = Int8Matrix::new(Isa::best(), &noise(3 * 20, 2), 20).unwrap();
        for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = noise(2 * 20, 3);
            x[25] = odd;
            let y = product(Dots::of(Isa::best()), &Team::new(1), &matrix, &x);
            assert!(y[..3].iter().all(|y| y.is_finite()) && y[3..].iter().all(|y| y.is_nan()), "{odd}");
            assert!(Int8Matrix::new(Isa::best(), &x, 20).is_none());
        }
        assert_eq!(product(Dots::of(Isa::best()), &Team::new(1), &matrix, &[0.0; 20]), [0.0; 3]);
        assert!(Int8Matrix::new(Isa::best(), &vec![0.0; MAX_WIDTH + 1], MAX_WIDTH + 1).is_none());
    }

    #[test]
    fn a_finished_product_has_the_bits_of_separate_passes() {
        let (rows, out, width) = (45, 70, 128);
        let matrix = Int8Matrix::new(Isa::best(), &noise(out * width, 3), width).unwrap();
        let [x, bias, residual] = [rows * width, out, rows * out].map(|count| noise(count, count));
        for dots in Dots::available() {
            let plain = product(dots, &Team::new(1), &matrix, &x);
            let expected = plain.iter().enumerate().map(|(at, y)| {
                let sum = y + bias[at % out];
                (if sum > 0.0 { sum } else { 0.0 }) + residual[at]
            });
            let finish = Finish { bias: Some(&bias), relu: true, residual: Some(&residual), ..Finish::default() };
            let mut y = vec![0.0; rows * out];
            products_by(dots, &Team::new(1), &Int8Rows::new(Isa::best(), &x, width), &mut [(&matrix, &mut y, finish)]);
            assert!(y.into_iter().eq(expected), "{dots:?}");
        }
    }

    #[test]
    fn several_matrices_share_the_rows() {
        let matrices: Vec<Int8Matrix> =
            [3, 70, 16].map(|out| Int8Matrix::new(Isa::best(), &noise(out * 20, out), 20).unwrap()).into();
        let (x, team) = (noise(5 * 20, 1), Team::new(2));
        let mut outputs: Vec<Vec<f32>> = matrices.iter().map(|matrix| vec![0.0; 5 * matrix.rows]).collect();
        let pairs = matrices.iter().zip(&mut outputs);
        let mut pairs: Vec<_> = pairs.map(|(matrix, y)| (matrix, &mut y[..], Finish::default())).collect();
        products(Isa::best(), &team, &Int8Rows::new(Isa::best(), &x, 20), &mut pairs);
        for (matrix, y) in matrices.iter().zip(&outputs) {
            assert_eq!(*y, product(Dots::of(Isa::best()), &team, matrix, &x));
        }
    }
}
