//! Values to blocks and back: rounding a matrix to 8 or 4 bits, and widening rows for products that need them as they
//! are.

use super::{BLOCK, Blocks, HALVES, QuantizedMatrix};

impl QuantizedMatrix {
    /// Rounds rows of `width` values to blocks of 8 bits; `None` if the width is no multiple of a block, the lengths do
    /// not fit, or a value is not finite. An error is at most half a step: the largest value of a block over 254.
    ///
    /// ```
    /// use qkv_simd::quantized::QuantizedMatrix;
    /// let values: Vec<f32> = (0..32).map(|x| x as f32 / 8.0 - 2.0).collect();
    /// let mut widened = [0.0; 32];
    /// QuantizedMatrix::rounded8(32, &values).unwrap().widen(0, &mut widened);
    /// assert!(values.iter().zip(&widened).all(|(x, y)| (x - y).abs() <= 2.0 / 254.0));
    /// ```
    pub fn rounded8(width: usize, values: &[f32]) -> Option<QuantizedMatrix> {
        fits(width, values)?;
        let (mut bits, mut scales) = (Vec::with_capacity(values.len()), Vec::with_capacity(values.len() / BLOCK));
        for block in values.chunks_exact(BLOCK) {
            let most = block.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
            let scale = most / 127.0;
            let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
            bits.extend(block.iter().map(|x| (x * inverse).round().clamp(-127.0, 127.0) as i8));
            scales.push(scale);
        }
        QuantizedMatrix::q8(width, bits, scales)
    }

    /// Rounds rows of `width` values to blocks of 4 bits with a minimum; `None` as [`rounded8`](Self::rounded8). An
    /// error is at most half a step: the range of a block over 30.
    pub fn rounded4(width: usize, values: &[f32]) -> Option<QuantizedMatrix> {
        fits(width, values)?;
        let (mut bits, mut scales) = (Vec::with_capacity(values.len() / 2), Vec::with_capacity(values.len() / BLOCK));
        for block in values.chunks_exact(BLOCK) {
            let least = block.iter().fold(f32::INFINITY, |least, x| least.min(*x));
            let most = block.iter().fold(f32::NEG_INFINITY, |most, x| most.max(*x));
            let scale = (most - least) / 15.0;
            let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
            let round = |x: f32| ((x - least) * inverse).round().clamp(0.0, 15.0) as u8;
            bits.extend((0..HALVES).map(|at| round(block[at]) | round(block[at + HALVES]) << 4));
            scales.push([scale, least]);
        }
        QuantizedMatrix::q4(width, bits, scales)
    }

    /// Widens rows, the first at `row`, as many as `out` holds.
    ///
    /// # Panics
    /// If there are not as many.
    pub fn widen(&self, row: usize, out: &mut [f32]) {
        let from = row * self.width / BLOCK;
        let blocks = out.len() / BLOCK;
        match &self.blocks {
            Blocks::Q4(bits, scales) => {
                let blocks = bits[from * HALVES..].chunks_exact(HALVES).zip(&scales[from..][..blocks]);
                for (out, (bits, [scale, least])) in out.chunks_exact_mut(BLOCK).zip(blocks) {
                    for (at, byte) in bits.iter().enumerate() {
                        out[at] = f32::from(byte & 15) * scale + least;
                        out[at + HALVES] = f32::from(byte >> 4) * scale + least;
                    }
                }
            }
            Blocks::Q8(bits, scales) => {
                let blocks = bits[from * BLOCK..].chunks_exact(BLOCK).zip(&scales[from..][..blocks]);
                for (out, (bits, scale)) in out.chunks_exact_mut(BLOCK).zip(blocks) {
                    out.iter_mut().zip(bits).for_each(|(out, &x)| *out = f32::from(x) * scale);
                }
            }
        }
    }
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
