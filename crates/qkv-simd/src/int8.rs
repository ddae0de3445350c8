//! Matrices and rows rounded to 8 bits, for inference: a scale for every row of the matrix, found once, and one for
//! every row that it is multiplied with, found for each product. All sums over the width are integers, and exact, so
//! that a result has the same bits on every instruction set, for any number of threads and whatever else is in the
//! batch.
//!
//! The inner loops are left to `kernel`.

mod kernel;

use crate::isa::Isa;
use crate::pass::{self, Pass};
use crate::team::Team;
use kernel::{Dots, Job};

/// Columns of a panel.
const LANES: usize = 16;
/// Elements that are multiplied at a time: four bytes of a 32-bit lane.
const QUAD: usize = 4;
/// Panels that are multiplied at a time, by one task.
const PANELS: usize = 4;
/// Bytes of the rows of one task: a panel is loaded for as many as stay in the second-level cache beside it.
const ROW_BYTES: usize = 256 << 10;
/// The largest code.
const LARGEST: f32 = 127.0;
/// What is added to the codes of a matrix, because the instruction multiplies unsigned with signed bytes.
const SHIFT: i32 = 128;
/// The widest matrix: sums of its products stay within 31 bits.
const MAX_WIDTH: usize = 1 << 15;
/// Below this a row counts as zeros: the inverse of its scale would overflow.
const SMALLEST: f32 = 1e-30;
/// 1.5 · 2²³: adding it rounds to a whole number, which the low bits then hold.
const MAGIC: f32 = 12_582_912.0;

/// A matrix `W [O, I]` rounded to 8 bits and packed for `x · Wᵀ`.
///
/// ```
/// use qkv_simd::int8::{Int8Matrix, Int8Rows, products};
/// use qkv_simd::{Isa, team::Team};
/// let matrix = Int8Matrix::new(Isa::best(), &[127.0, 2.0, -254.0, 4.0], 2).unwrap();
/// let x = Int8Rows::new(Isa::best(), &[127.0, 1.0], 2);
/// let mut y = [0.0; 2];
/// products(Isa::best(), &Team::new(1), &x, &mut [(&matrix, &mut y)]);
/// assert_eq!(y, [127.0 * 127.0 + 2.0, -254.0 * 127.0 + 4.0]);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Int8Matrix {
    rows: usize,
    width: usize,
    /// `[⌈O/16⌉, ⌈I/4⌉, 16, 4]`, codes plus 128; those that are missing are zeros.
    panels: Vec<u8>,
    /// One for every row; zeros up to whole panels.
    scales: Vec<f32>,
}

impl Int8Matrix {
    /// Rounds and packs rows of `width` elements; `None` if an element is not finite or rows are wider than 32,768.
    ///
    /// # Panics
    /// If the elements are no whole rows.
    pub fn new(isa: Isa, elements: &[f32], width: usize) -> Option<Self> {
        assert!(width > 0 && elements.len().is_multiple_of(width), "whole rows of {width} elements");
        if width > MAX_WIDTH {
            return None;
        }
        let rounded = Int8Rows::new(isa, elements, width);
        if rounded.scales.iter().any(|scale| scale.is_nan()) {
            return None;
        }
        let (rows, depth) = (rounded.count, rounded.row / QUAD);
        let across = rows.div_ceil(LANES);
        let mut panels = vec![SHIFT as u8; across * LANES * rounded.row];
        for (at, codes) in rounded.codes.chunks_exact(rounded.row).enumerate() {
            let panel = &mut panels[at / LANES * LANES * rounded.row..];
            for k in 0..depth {
                for (to, &code) in panel[(k * LANES + at % LANES) * QUAD..].iter_mut().zip(&codes[k * QUAD..][..QUAD]) {
                    *to = (i32::from(code) + SHIFT) as u8;
                }
            }
        }
        let mut scales = rounded.scales;
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

/// Rows rounded to 8 bits, each with its scale.
#[derive(Clone, Debug, PartialEq)]
pub struct Int8Rows {
    width: usize,
    count: usize,
    /// Codes of a row: its width up to whole quads.
    row: usize,
    codes: Vec<i8>,
    scales: Vec<f32>,
    /// What the shift of the matrix adds to a sum: 128 times the sum of the codes.
    excess: Vec<i32>,
}

impl Int8Rows {
    /// Rounds the rows of `x [R, width]`. A row with an element that is not finite becomes NaN.
    ///
    /// # Panics
    /// If `x` does not hold whole rows.
    pub fn new(isa: Isa, x: &[f32], width: usize) -> Int8Rows {
        assert!(width > 0 && x.len().is_multiple_of(width), "whole rows of {width} elements");
        let (count, row) = (x.len() / width, width.next_multiple_of(QUAD));
        let codes = vec![0; count * row];
        let mut rows = Int8Rows { width, count, row, codes, scales: vec![0.0; count], excess: vec![0; count] };
        // The compiler does not vectorize the narrowing to bytes.
        if !kernel::round(isa, x, &mut rows) {
            pass::run(isa, Round { x, into: &mut rows });
        }
        rows
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
                    // 0 for a finite number, otherwise NaN.
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

/// The nearest whole number, the even one of two, of a number within ±2²².
#[inline(always)]
fn round(x: f32) -> i32 {
    ((x + MAGIC).to_bits() as i32).wrapping_sub(MAGIC.to_bits() as i32)
}

/// Where tasks write.
struct Outputs(Vec<*mut f32>);

// SAFETY: tasks write the rows and panels of their own, which no other task has.
unsafe impl Sync for Outputs {}

/// `y [R, O] = x · Wᵀ` for several matrices that share the rows `x [R, I]`, as one piece of work for the team.
///
/// # Panics
/// If a matrix has another width, or an output another length.
pub fn products(isa: Isa, team: &Team, x: &Int8Rows, outputs: &mut [(&Int8Matrix, &mut [f32])]) {
    products_by(Dots::of(isa), team, x, outputs);
}

fn products_by(dots: Dots, team: &Team, x: &Int8Rows, outputs: &mut [(&Int8Matrix, &mut [f32])]) {
    let pointers = Outputs(outputs.iter_mut().map(|(_, y)| y.as_mut_ptr()).collect());
    let matrices: Vec<&Int8Matrix> = outputs.iter().map(|(matrix, _)| *matrix).collect();
    let mut ends = Vec::with_capacity(matrices.len());
    let mut total = 0;
    for (matrix, (_, y)) in matrices.iter().zip(outputs.iter()) {
        assert!(matrix.width == x.width && y.len() == x.count * matrix.rows, "the product does not fit");
        total += matrix.rows.div_ceil(PANELS * LANES);
        ends.push(total);
    }
    let rows = (ROW_BYTES / x.row).max(1);
    team.run(total * x.count.div_ceil(rows), |task| {
        let (block, column) = (task / total, task % total);
        let at = ends.partition_point(|&end| end <= column);
        let panel = (column - if at == 0 { 0 } else { ends[at - 1] }) * PANELS;
        let pointers = &pointers;
        let job = Job {
            matrix: matrices[at],
            x,
            rows: block * rows..x.count.min((block + 1) * rows),
            panels: panel..(panel + PANELS).min(matrices[at].rows.div_ceil(LANES)),
            out: pointers.0[at],
        };
        // SAFETY: every length was checked above, and this task alone writes its rows and panels.
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
        products_by(dots, team, &Int8Rows::new(Isa::best(), x, matrix.width), &mut [(matrix, &mut y)]);
        y
    }

    #[test]
    fn a_result_is_the_exact_sum_of_rounded_elements_on_every_instruction_set_and_in_every_batch() {
        let (alone, together) = (Team::new(1), Team::new(3));
        for (out, width) in [(1, 1), (16, 7), (40, 64), (129, 33), (70, 256)] {
            let weights = noise(out * width, 3);
            let matrix = Int8Matrix::new(Isa::best(), &weights, width).unwrap();
            for rows in [1, 2, 5, 13, 200] {
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
    fn several_matrices_share_the_rows() {
        let matrices: Vec<Int8Matrix> =
            [3, 70, 16].map(|out| Int8Matrix::new(Isa::best(), &noise(out * 20, out), 20).unwrap()).into();
        let (x, team) = (noise(5 * 20, 1), Team::new(2));
        let mut outputs: Vec<Vec<f32>> = matrices.iter().map(|matrix| vec![0.0; 5 * matrix.rows]).collect();
        let mut pairs: Vec<_> = matrices.iter().zip(outputs.iter_mut().map(|y| &mut y[..])).collect();
        products(Isa::best(), &team, &Int8Rows::new(Isa::best(), &x, 20), &mut pairs);
        for (matrix, y) in matrices.iter().zip(&outputs) {
            assert_eq!(*y, product(Dots::of(Isa::best()), &team, matrix, &x));
        }
    }
}
