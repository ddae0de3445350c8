//! Values to blocks: rounding a matrix to 8 or 4 bits.

use super::{BLOCK, Blocks, Format, QuantizedMatrix};
use half::f16;

impl QuantizedMatrix {
    /// Rounds rows of `width` values to blocks of 8 bits (Q8_0); `None` if the width is not a multiple of a block, the
    /// lengths do not fit, or a value is not finite. The error is at most half a step: about the largest value of a
    /// block over 254.
    ///
    /// ```
    /// use qkv_simd::quantized::QuantizedMatrix;
    /// let values: Vec<f32> = (0..32).map(|x| x as f32 / 8.0 - 2.0).collect();
    /// let mut widened = [0.0; 32];
    /// QuantizedMatrix::rounded8(32, &values).unwrap().widen(0, &mut widened);
    /// assert!(values.iter().zip(&widened).all(|(x, y)| (x - y).abs() <= 2.01 / 254.0));
    /// ```
    pub fn rounded8(width: usize, values: &[f32]) -> Option<QuantizedMatrix> {
        fits(width, values)?;
        let mut blocks = Blocks::default();
        for block in values.chunks_exact(BLOCK) {
            let most = block.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
            let (scale, inverse) = step(most / 127.0);
            blocks.codes.extend(block.iter().map(|x| (x * inverse).round().clamp(-127.0, 127.0) as i8 as u8));
            blocks.scales.push(scale);
        }
        QuantizedMatrix::new(Format::Q8_0, width, &blocks, |row| row)
    }

    /// Rounds rows of `width` values to blocks of 4 bits with a minimum (Q4_1); `None` as
    /// [`rounded8`](Self::rounded8). The error is at most half a step: about the range of a block over 30.
    pub fn rounded4(width: usize, values: &[f32]) -> Option<QuantizedMatrix> {
        fits(width, values)?;
        let mut blocks = Blocks::default();
        for block in values.chunks_exact(BLOCK) {
            let least = f16::from_f32(block.iter().fold(f32::INFINITY, |least, x| least.min(*x)));
            let most = block.iter().fold(f32::NEG_INFINITY, |most, x| most.max(*x));
            let (scale, inverse) = step((most - least.to_f32()) / 15.0);
            let round = |x: &f32| ((x - least.to_f32()) * inverse).round().clamp(0.0, 15.0) as u8;
            blocks.codes.extend(block.iter().map(round));
            blocks.scales.push(scale);
            blocks.least.push(least);
        }
        QuantizedMatrix::new(Format::Q4_1, width, &blocks, |row| row)
    }
}

/// A step rounded to 16 bits, and its inverse, which is 0 if the step is.
fn step(step: f32) -> (f16, f32) {
    let rounded = f16::from_f32(step);
    (rounded, if rounded > f16::ZERO { 1.0 / rounded.to_f32() } else { 0.0 })
}

/// Whether values are whole rows of whole blocks, and finite.
fn fits(width: usize, values: &[f32]) -> Option<()> {
    let whole = width > 0 && width.is_multiple_of(BLOCK) && values.len().is_multiple_of(width);
    (whole && values.iter().all(|x| x.is_finite())).then_some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_errs_by_half_a_step_and_rounds_its_own_values_to_themselves() {
        let values: Vec<f32> = (0..4 * 64).map(|at| ((at * 37 % 101) as f32 - 50.0) * 0.03).collect();
        for (four, step) in [(false, 1.5 / 127.0), (true, 3.0 / 15.0)] {
            let round = |values: &[f32]| match four {
                true => QuantizedMatrix::rounded4(64, values).unwrap(),
                false => QuantizedMatrix::rounded8(64, values).unwrap(),
            };
            let matrix = round(&values);
            let mut widened = vec![0.0; values.len()];
            matrix.widen(0, &mut widened);
            assert!(values.iter().zip(&widened).all(|(x, y)| (x - y).abs() <= 0.51 * step));
            let mut again = vec![0.0; values.len()];
            round(&widened).widen(0, &mut again);
            assert!(widened.iter().zip(&again).all(|(x, y)| (x - y).abs() <= 1e-6));
            let mut third = vec![0.0; 64];
            matrix.widen(2, &mut third);
            assert_eq!(third, widened[128..192]);
        }
        assert!(QuantizedMatrix::rounded8(48, &[0.0; 48]).is_none());
        assert!(QuantizedMatrix::rounded4(32, &[f32::NAN; 32]).is_none());
    }
}
