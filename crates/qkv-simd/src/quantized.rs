//! Quantized matrices times a vector: the matrix products of generating one token at a time. They are as fast as the
//! matrix can be read, so a 4-bit matrix is read eight times as fast as one of `f32`. The blocks are dequantized in
//! registers; nothing is rounded beyond the quantization itself.

mod rounding;

use crate::isa::Isa;
use crate::pass::{self, Pass};

/// Elements of a block.
pub const BLOCK: usize = 32;
/// Bytes of a block of 4-bit elements.
const HALVES: usize = BLOCK / 2;
/// Independent partial sums.
const SIDE: usize = 16;

/// A matrix in blocks of 32 elements, each with a scale.
///
/// ```
/// use qkv_simd::{Isa, quantized::QuantizedMatrix};
/// // One row of 32 numbers, 0.5·q − 1 with q = 3.
/// let matrix = QuantizedMatrix::q4(32, vec![0x33; 16], vec![[0.5, -1.0]]).unwrap();
/// let (x, mut y) = (vec![1.0; 32], [0.0]);
/// matrix.times(Isa::best(), 0, &x, &matrix.sums(&x), &mut y);
/// assert_eq!(y, [16.0]);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct QuantizedMatrix {
    rows: usize,
    width: usize,
    blocks: Blocks,
}

#[derive(Clone, Debug, PartialEq)]
enum Blocks {
    /// 4-bit elements 0 to 15: the first half of a block in the low nibbles of its bytes, the second half in the high
    /// ones. An element is the scale of its block times the bits, plus the minimum of its block.
    Q4(Vec<u8>, Vec<[f32; 2]>),
    /// 8-bit elements −128 to 127, times the scale of their block.
    Q8(Vec<i8>, Vec<f32>),
}

impl QuantizedMatrix {
    /// Rows of `width` 4-bit elements; `None` if the lengths do not fit.
    pub fn q4(width: usize, bits: Vec<u8>, scales: Vec<[f32; 2]>) -> Option<QuantizedMatrix> {
        let rows = fitting(width, scales.len()).filter(|_| bits.len() == scales.len() * HALVES)?;
        Some(QuantizedMatrix { rows, width, blocks: Blocks::Q4(bits, scales) })
    }

    /// Rows of `width` 8-bit elements; `None` if the lengths do not fit.
    pub fn q8(width: usize, bits: Vec<i8>, scales: Vec<f32>) -> Option<QuantizedMatrix> {
        let rows = fitting(width, scales.len()).filter(|_| bits.len() == scales.len() * BLOCK)?;
        Some(QuantizedMatrix { rows, width, blocks: Blocks::Q8(bits, scales) })
    }

    /// The number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The number of columns.
    pub fn width(&self) -> usize {
        self.width
    }

    /// The matrix with permuted rows: row `r` is row `from(r)` of this one.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn reordered(&self, from: impl Fn(usize) -> usize) -> QuantizedMatrix {
        let each = self.width / BLOCK;
        fn take<A: Copy>(all: &[A], each: usize, rows: usize, from: impl Fn(usize) -> usize) -> Vec<A> {
            (0..rows).flat_map(|row| all[from(row) * each..][..each].iter().copied()).collect()
        }
        let blocks = match &self.blocks {
            Blocks::Q4(bits, scales) => {
                Blocks::Q4(take(bits, each * HALVES, self.rows, &from), take(scales, each, self.rows, &from))
            }
            Blocks::Q8(bits, scales) => {
                Blocks::Q8(take(bits, each * BLOCK, self.rows, &from), take(scales, each, self.rows, &from))
            }
        };
        QuantizedMatrix { blocks, ..*self }
    }

    /// The sum of each block of a vector, which is multiplied by the minima of 4-bit blocks.
    pub fn sums(&self, x: &[f32]) -> Vec<f32> {
        x.chunks_exact(BLOCK).map(|block| block.iter().sum()).collect()
    }

    /// `y[r] = Σ row[from + r] · x`, for as many rows as `y` has; `sums` are the block sums of `x`.
    ///
    /// # Panics
    /// If the lengths do not fit.
    pub fn times(&self, isa: Isa, from: usize, x: &[f32], sums: &[f32], y: &mut [f32]) {
        let each = self.width / BLOCK;
        assert!(
            x.len() == self.width && sums.len() == each && from.saturating_add(y.len()) <= self.rows,
            "the product does not fit"
        );
        match &self.blocks {
            Blocks::Q4(bits, scales) => {
                let (bits, scales) = (&bits[from * each * HALVES..], &scales[from * each..]);
                pass::run(isa, Q4Gemv { bits, scales, x, sums, y });
            }
            Blocks::Q8(bits, scales) => {
                let (bits, scales) = (&bits[from * each * BLOCK..], &scales[from * each..]);
                pass::run(isa, Q8Gemv { bits, scales, x, y });
            }
        }
    }
}

/// The number of rows of this many blocks.
fn fitting(width: usize, blocks: usize) -> Option<usize> {
    let each = (width > 0 && width.is_multiple_of(BLOCK)).then_some(width / BLOCK)?;
    blocks.is_multiple_of(each).then_some(blocks / each)
}

struct Q4Gemv<'a> {
    bits: &'a [u8],
    scales: &'a [[f32; 2]],
    x: &'a [f32],
    sums: &'a [f32],
    y: &'a mut [f32],
}

impl Pass for Q4Gemv<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let each = self.sums.len();
        let rows = self.bits.chunks_exact(each * HALVES).zip(self.scales.chunks_exact(each));
        for (y, (bits, scales)) in self.y.iter_mut().zip(rows) {
            let (mut wide, mut below) = ([0.0f32; SIDE], 0.0f32);
            let (bits, x) = (bits.as_chunks::<HALVES>().0, self.x.as_chunks::<BLOCK>().0);
            for (((bits, &[scale, least]), x), sum) in bits.iter().zip(scales).zip(x).zip(self.sums) {
                // Separate loops vectorize; one loop for both does not.
                let (mut lows, mut highs) = ([0.0f32; SIDE], [0.0f32; SIDE]);
                for l in 0..SIDE {
                    lows[l] = f32::from(bits[l] & 15);
                }
                for l in 0..SIDE {
                    highs[l] = f32::from(bits[l] >> 4);
                }
                for l in 0..SIDE {
                    wide[l] += (lows[l] * x[l] + highs[l] * x[l + SIDE]) * scale;
                }
                below += least * sum;
            }
            *y = added(wide) + below;
        }
    }
}

struct Q8Gemv<'a> {
    bits: &'a [i8],
    scales: &'a [f32],
    x: &'a [f32],
    y: &'a mut [f32],
}

impl Pass for Q8Gemv<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let each = self.x.len() / BLOCK;
        let rows = self.bits.chunks_exact(each * BLOCK).zip(self.scales.chunks_exact(each));
        for (y, (bits, scales)) in self.y.iter_mut().zip(rows) {
            let mut wide = [0.0f32; SIDE];
            let (bits, x) = (bits.as_chunks::<BLOCK>().0, self.x.as_chunks::<BLOCK>().0);
            for ((bits, &scale), x) in bits.iter().zip(scales).zip(x) {
                let mut numbers = [0.0f32; BLOCK];
                for l in 0..BLOCK {
                    numbers[l] = f32::from(bits[l]);
                }
                for l in 0..SIDE {
                    wide[l] += (numbers[l] * x[l] + numbers[l + SIDE] * x[l + SIDE]) * scale;
                }
            }
            *y = added(wide);
        }
    }
}

#[inline(always)]
fn added(mut wide: [f32; SIDE]) -> f32 {
    let mut half = SIDE / 2;
    while half > 0 {
        for l in 0..half {
            wide[l] += wide[l + half];
        }
        half /= 2;
    }
    wide[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_product_is_that_of_the_widened_numbers_on_every_instruction_set() {
        let (rows, width) = (7, 96);
        let blocks = rows * width / BLOCK;
        let byte = |at: usize| (at * 89 + at / 7) as u8;
        let bits: Vec<u8> = (0..blocks * HALVES).map(byte).collect();
        let scales: Vec<[f32; 2]> = (0..blocks).map(|at| [0.01 * (at as f32 + 1.0), -0.1 * (at % 5) as f32]).collect();
        let x: Vec<f32> = (0..width).map(|at| ((at * 37) % 19) as f32 / 9.0 - 1.0).collect();
        let four = QuantizedMatrix::q4(width, bits.clone(), scales.clone()).unwrap();
        let signed: Vec<i8> = (0..blocks * BLOCK).map(|at| byte(at) as i8).collect();
        let eight = QuantizedMatrix::q8(width, signed.clone(), scales.iter().map(|s| s[0]).collect()).unwrap();
        let number_of_four = |r: usize, c: usize| {
            let (block, at) = (r * width / BLOCK + c / BLOCK, c % BLOCK);
            let byte = bits[block * HALVES + at % HALVES];
            let q = if at < HALVES { byte & 15 } else { byte >> 4 };
            f32::from(q) * scales[block][0] + scales[block][1]
        };
        let number_of_eight =
            |r: usize, c: usize| f32::from(signed[r * width + c]) * scales[r * width / BLOCK + c / BLOCK][0];
        let dot = |number: &dyn Fn(usize, usize) -> f32, r: usize| -> f64 {
            (0..width).map(|c| f64::from(number(r, c)) * f64::from(x[c])).sum()
        };
        for isa in Isa::available() {
            for (matrix, number) in
                [(&four, &number_of_four as &dyn Fn(usize, usize) -> f32), (&eight, &number_of_eight)]
            {
                let mut y = vec![0.0; rows - 2];
                matrix.times(isa, 2, &x, &matrix.sums(&x), &mut y);
                for (r, &found) in y.iter().enumerate() {
                    let expected = dot(number, r + 2);
                    assert!((f64::from(found) - expected).abs() < 1e-4, "{} {r}: {found} {expected}", isa.name());
                }
                let mut turned = vec![0.0; rows];
                let back = matrix.reordered(|r| rows - 1 - r);
                back.times(isa, 0, &x, &back.sums(&x), &mut turned);
                assert_eq!(turned[0], y[rows - 3], "the first row of the one is the last of the other");
            }
        }
    }

    #[test]
    fn lists_that_do_not_fit_are_refused() {
        assert!(QuantizedMatrix::q4(33, vec![0; 16], vec![[0.0; 2]]).is_none());
        assert!(QuantizedMatrix::q4(64, vec![0; 16], vec![[0.0; 2]]).is_none());
        assert!(QuantizedMatrix::q4(32, vec![0; 17], vec![[0.0; 2]]).is_none());
        assert!(QuantizedMatrix::q8(0, Vec::new(), Vec::new()).is_none());
        assert_eq!(QuantizedMatrix::q8(32, vec![0; 64], vec![0.0; 2]).unwrap().rows(), 2);
    }
}
