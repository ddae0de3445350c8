//! How GGUF stores numbers: as they are, or in blocks of 32 with a scale and, in some, a smallest value.

use half::{bf16, f16};
use std::fmt;

/// Numbers of a block.
const BLOCK: usize = 32;

/// The ways that are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Storage {
    F32,
    F16,
    Bf16,
    /// Four bits from −8 to 7, times a scale.
    Q4Scaled,
    /// Four bits from 0 to 15, times a scale, above a smallest value.
    Q4Above,
    /// Eight bits, times a scale.
    Q8,
}

impl Storage {
    /// By its number in a file.
    pub fn of(kind: u32) -> Option<Storage> {
        Some(match kind {
            0 => Storage::F32,
            1 => Storage::F16,
            2 => Storage::Q4Scaled,
            3 => Storage::Q4Above,
            8 => Storage::Q8,
            30 => Storage::Bf16,
            _ => return None,
        })
    }

    /// Numbers that are stored together: a row has a multiple of them.
    pub fn together(self) -> usize {
        match self {
            Storage::F32 | Storage::F16 | Storage::Bf16 => 1,
            Storage::Q4Scaled | Storage::Q4Above | Storage::Q8 => BLOCK,
        }
    }

    /// Bytes that they take.
    fn each(self) -> usize {
        match self {
            Storage::F32 => 4,
            Storage::F16 | Storage::Bf16 => 2,
            Storage::Q4Scaled => 2 + BLOCK / 2,
            Storage::Q4Above => 4 + BLOCK / 2,
            Storage::Q8 => 2 + BLOCK,
        }
    }

    /// Bytes that so many numbers take.
    pub fn bytes(self, numbers: usize) -> Option<usize> {
        (numbers / self.together()).checked_mul(self.each())
    }

    /// The numbers behind bytes.
    pub fn widen(self, bytes: &[u8]) -> Vec<f32> {
        let half = |b: &[u8]| f16::from_le_bytes([b[0], b[1]]).to_f32();
        let blocks = bytes.chunks_exact(self.each());
        let mut out = Vec::with_capacity(blocks.len() * self.together());
        for block in blocks {
            match self {
                Storage::F32 => out.push(f32::from_le_bytes([block[0], block[1], block[2], block[3]])),
                Storage::F16 => out.push(half(block)),
                Storage::Bf16 => out.push(bf16::from_le_bytes([block[0], block[1]]).to_f32()),
                Storage::Q4Scaled => {
                    let scale = half(block);
                    out.extend(nibbles(&block[2..]).map(|x| f32::from(x as i8 - 8) * scale));
                }
                Storage::Q4Above => {
                    let (scale, least) = (half(block), half(&block[2..]));
                    out.extend(nibbles(&block[4..]).map(|x| f32::from(x) * scale + least));
                }
                Storage::Q8 => {
                    let scale = half(block);
                    out.extend(block[2..].iter().map(|&x| f32::from(x as i8) * scale));
                }
            }
        }
        out
    }
}

/// The low halves of all bytes, then the high ones.
fn nibbles(bytes: &[u8]) -> impl Iterator<Item = u8> {
    bytes.iter().map(|b| b & 15).chain(bytes.iter().map(|b| b >> 4))
}

impl fmt::Display for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Storage::F32 => "F32",
            Storage::F16 => "F16",
            Storage::Bf16 => "BF16",
            Storage::Q4Scaled => "Q4_0",
            Storage::Q4Above => "Q4_1",
            Storage::Q8 => "Q8_0",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_widened_low_halves_first() {
        let scale = f16::from_f32(0.5).to_le_bytes();
        let least = f16::from_f32(-2.0).to_le_bytes();
        let nibbles: Vec<u8> = (0..16).map(|x| x | (15 - x) << 4).collect();
        let above = Storage::Q4Above.widen(&[&scale[..], &least, &nibbles].concat());
        assert_eq!(above[..3], [-2.0, -1.5, -1.0]);
        assert_eq!(above[16..18], [5.5, 5.0]);
        let scaled = Storage::Q4Scaled.widen(&[&scale[..], &nibbles].concat());
        assert_eq!((scaled[0], scaled[15], scaled[16]), (-4.0, 3.5, 3.5));
        let bytes: Vec<u8> = (0..32).map(|x| (x as i8 - 16) as u8).collect();
        let eight = Storage::Q8.widen(&[&scale[..], &bytes].concat());
        assert_eq!((eight[0], eight[31], eight.len()), (-8.0, 7.5, 32));
    }
}
