//! Values to blocks and back: rounding a matrix to 8 or 4 bits, and widening rows for products that need them as they
//! are.

use super::kernel::{code_bytes, header_bytes, scale_bytes};
use super::{BLOCK, Blocks, Format, GROUP, QuantizedMatrix, SUPER_BLOCKS, ScaleKind, bytes};
use half::f16;

impl QuantizedMatrix {
    /// Rounds rows of `width` values to blocks of 8 bits (Q8_0); `None` if the width is no multiple of a block, the
    /// lengths do not fit, or a value is not finite. An error is at most half a step: about the largest value of a
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
    /// [`rounded8`](Self::rounded8). An error is at most half a step: about the range of a block over 30.
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

    /// Widens rows, the first at `row`, as many as `out` holds.
    ///
    /// # Panics
    /// If there are not as many.
    pub fn widen(&self, row: usize, out: &mut [f32]) {
        for (r, out) in out.chunks_exact_mut(self.width).enumerate() {
            assert!(row + r < self.rows, "row {} of {}", row + r, self.rows);
            for (block, out) in out.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
                self.widen_block(row + r, block, out);
            }
        }
    }

    /// The elements of a block: codes and scales are where `new` packed them.
    fn widen_block(&self, row: usize, block: usize, out: &mut [f32; BLOCK]) {
        let (bits, kind, zero) = (self.format.bits(), self.format.kind(), self.format.zero());
        let (group, r, blocks) = (row / GROUP, row % GROUP, self.width / BLOCK);
        let codes = &bytes(&self.codes)[(group * blocks + block) * code_bytes(bits)..][..code_bytes(bits)];
        for (at, out) in out.iter_mut().enumerate() {
            let (pair, side) = (at / 2, at % 2);
            let (line, nibble, byte) = (pair / 4, pair % 4, 4 * r + 2 * side);
            let low = || codes[line * 64 + byte + nibble / 2] >> (nibble % 2 * 4) & 15;
            let code = match bits {
                8 => i32::from(codes[pair * 2 * GROUP + 2 * r + side] as i8),
                4 => i32::from(low()),
                5 => i32::from(low() | (codes[256 + byte + pair / 8] >> (pair % 8) & 1) << 4),
                _ => {
                    let high = codes[256 + line / 2 * 64 + byte + pair % 8 / 4] >> (pair % 4 * 2) & 3;
                    i32::from(low() | high << 4)
                }
            };
            *out = (code - zero) as f32;
        }
        let supers = block / SUPER_BLOCKS + 1;
        let group_bytes = blocks * scale_bytes(kind) + blocks / SUPER_BLOCKS * header_bytes(kind);
        let headers = if header_bytes(kind) == 0 { 0 } else { supers * header_bytes(kind) };
        let from = group * group_bytes + headers + block * scale_bytes(kind);
        let number = |at: usize| f16::from_le_bytes([self.scales[at], self.scales[at + 1]]).to_f32();
        // Of a super-block: before the scales of its first block.
        let header = (from - block % SUPER_BLOCKS * scale_bytes(kind)).saturating_sub(header_bytes(kind));
        match kind {
            ScaleKind::Plain => out.iter_mut().for_each(|x| *x *= number(from + 2 * r)),
            ScaleKind::Least => {
                let (scale, least) = (number(from + 2 * r), number(from + 2 * GROUP + 2 * r));
                out.iter_mut().for_each(|x| *x = *x * scale + least);
            }
            ScaleKind::SuperLeast => {
                let [part, below] = [0, GROUP].map(|at| f32::from(self.scales[from + at + r]));
                let (scale, least) = (number(header + 2 * r) * part, number(header + 2 * GROUP + 2 * r) * below);
                out.iter_mut().for_each(|x| *x = *x * scale - least);
            }
            ScaleKind::SuperHalves => {
                for (half, out) in out.chunks_exact_mut(BLOCK / 2).enumerate() {
                    let part = f32::from(self.scales[from + half * GROUP + r] as i8);
                    out.iter_mut().for_each(|x| *x *= number(header + 2 * r) * part);
                }
            }
        }
    }
}

/// A step in 16 bits, and its inverse; 0 where it vanishes.
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
