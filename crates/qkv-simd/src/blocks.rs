//! Block types of GGUF: plain numbers; blocks of 32 with a scale and, in some types, a minimum; super-blocks of 256
//! whose parts have quantized scales (`super_block`). A file holds hundreds of millions of numbers, so they are
//! dequantized here, where loops are compiled for speed; finding them in a file is left to the reader of the format.

mod super_block;

use crate::quantized::{Blocks, Format, QuantizedMatrix};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::fmt;
use super_block::SUPER;

/// Values per block.
const BLOCK: usize = 32;

/// Supported block types.
///
/// ```
/// use qkv_simd::blocks::BlockType;
/// // A block of Q8_0: a scale of 0.5 in half precision, then 32 numbers of 8 bits.
/// let bytes = [&half::f16::from_f32(0.5).to_le_bytes()[..], &[3; 32]].concat();
/// let q8 = BlockType::of(8).unwrap();
/// assert_eq!((q8.to_string(), q8.bytes(32), q8.widen(&bytes)), ("Q8_0".into(), Some(34), vec![1.5; 32]));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockType {
    /// Single precision.
    F32,
    /// Half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// Q4_0: 4 bits from −8 to 7, times a scale.
    Q4Scaled,
    /// Q4_1: 4 bits from 0 to 15, times a scale, plus a minimum.
    Q4Above,
    /// Q5_0: 5 bits from −16 to 15, times a scale.
    Q5Scaled,
    /// Q5_1: 5 bits from 0 to 31, times a scale, plus a minimum.
    Q5Above,
    /// Q8_0: 8 bits, times a scale.
    Q8,
    /// Q2_K: 256 values of 2 bits; parts of 16 have a scale and a minimum of 4 bits.
    Q2K,
    /// Q3_K: 256 values of 3 bits; parts of 16 have a scale of 6 bits.
    Q3K,
    /// Q4_K: 256 values of 4 bits; parts of 32 have a scale and a minimum of 6 bits.
    Q4K,
    /// Q5_K: the same with 5 bits.
    Q5K,
    /// Q6_K: 256 values of 6 bits; parts of 16 have a scale of 8 bits.
    Q6K,
    /// Q8_K: 256 values of 8 bits with one scale.
    Q8K,
}

impl BlockType {
    /// The block type with this number in a file.
    pub fn of(kind: u32) -> Option<BlockType> {
        Some(match kind {
            0 => BlockType::F32,
            1 => BlockType::F16,
            2 => BlockType::Q4Scaled,
            3 => BlockType::Q4Above,
            6 => BlockType::Q5Scaled,
            7 => BlockType::Q5Above,
            8 => BlockType::Q8,
            10 => BlockType::Q2K,
            11 => BlockType::Q3K,
            12 => BlockType::Q4K,
            13 => BlockType::Q5K,
            14 => BlockType::Q6K,
            15 => BlockType::Q8K,
            30 => BlockType::Bf16,
            _ => return None,
        })
    }

    /// Values per block: the length of a row is a multiple of it.
    pub fn together(self) -> usize {
        match self {
            BlockType::F32 | BlockType::F16 | BlockType::Bf16 => 1,
            BlockType::Q4Scaled | BlockType::Q4Above | BlockType::Q5Scaled | BlockType::Q5Above | BlockType::Q8 => {
                BLOCK
            }
            _ => SUPER,
        }
    }

    /// Bytes per block.
    fn each(self) -> usize {
        match self {
            BlockType::F32 => 4,
            BlockType::F16 | BlockType::Bf16 => 2,
            BlockType::Q4Scaled => 2 + BLOCK / 2,
            BlockType::Q4Above => 4 + BLOCK / 2,
            BlockType::Q5Scaled => 2 + BLOCK / 8 + BLOCK / 2,
            BlockType::Q5Above => 4 + BLOCK / 8 + BLOCK / 2,
            BlockType::Q8 => 2 + BLOCK,
            BlockType::Q2K => SUPER / 16 + SUPER / 4 + 4,
            BlockType::Q3K => SUPER / 8 + SUPER / 4 + 12 + 2,
            BlockType::Q4K => 4 + 12 + SUPER / 2,
            BlockType::Q5K => 4 + 12 + SUPER / 8 + SUPER / 2,
            BlockType::Q6K => SUPER / 2 + SUPER / 4 + SUPER / 16 + 2,
            BlockType::Q8K => 4 + SUPER + SUPER / 16 * 2,
        }
    }

    /// Bytes of `numbers` values.
    pub fn bytes(self, numbers: usize) -> Option<usize> {
        (numbers / self.together()).checked_mul(self.each())
    }

    /// Packs the blocks of rows of `width` for products with a few vectors, with row `order(r)` as row `r`; `None` for
    /// types that these products do not support, or if the lengths do not fit.
    pub fn quantized(self, bytes: &[u8], width: usize, order: &dyn Fn(usize) -> usize) -> Option<QuantizedMatrix> {
        let format = match self {
            BlockType::Q4Scaled => Format::Q4_0,
            BlockType::Q4Above => Format::Q4_1,
            BlockType::Q5Scaled => Format::Q5_0,
            BlockType::Q5Above => Format::Q5_1,
            BlockType::Q8 => Format::Q8_0,
            BlockType::Q4K => Format::Q4K,
            BlockType::Q5K => Format::Q5K,
            BlockType::Q6K => Format::Q6K,
            _ => return None,
        };
        let mut blocks = Blocks::default();
        blocks.codes.reserve(bytes.len() / self.each() * self.together());
        for block in bytes.chunks_exact(self.each()) {
            match self {
                BlockType::Q4K | BlockType::Q5K | BlockType::Q6K => super_block::codes(self, block, &mut blocks),
                _ => self.codes(block, &mut blocks),
            }
        }
        QuantizedMatrix::new(format, width, &blocks, order)
    }

    /// Appends the codes and scales of a block of 32.
    fn codes(self, block: &[u8], to: &mut Blocks) {
        to.scales.push(f16::from_le_bytes([block[0], block[1]]));
        let rest = match self {
            BlockType::Q4Above | BlockType::Q5Above => {
                to.least.push(f16::from_le_bytes([block[2], block[3]]));
                &block[4..]
            }
            _ => &block[2..],
        };
        match self {
            BlockType::Q8 => to.codes.extend_from_slice(rest),
            BlockType::Q5Scaled | BlockType::Q5Above => to.codes.extend_from_slice(&fives(rest)),
            _ => to.codes.extend_from_slice(&nibbles(rest)),
        }
    }

    /// Rounds values to a plain number type and returns their bytes; `None` for quantized types.
    pub fn narrow(self, values: &[f32]) -> Option<Vec<u8>> {
        let mut bytes = vec![0; self.bytes(values.len())?];
        match self {
            BlockType::F32 => {
                bytes.as_chunks_mut().0.iter_mut().zip(values).for_each(|(to, x)| *to = x.to_le_bytes());
            }
            BlockType::Bf16 => {
                let to = bytes.as_chunks_mut().0.iter_mut();
                to.zip(values).for_each(|(to, &x)| *to = bf16::from_f32(x).to_le_bytes());
            }
            BlockType::F16 => {
                let mut halves = vec![f16::ZERO; values.len()];
                halves.convert_from_f32_slice(values);
                bytes.as_chunks_mut().0.iter_mut().zip(halves).for_each(|(to, x)| *to = x.to_le_bytes());
            }
            _ => return None,
        }
        Some(bytes)
    }

    /// Dequantizes blocks.
    pub fn widen(self, bytes: &[u8]) -> Vec<f32> {
        match self {
            BlockType::F32 => return bytes.as_chunks().0.iter().map(|&x| f32::from_le_bytes(x)).collect(),
            BlockType::Bf16 => return bytes.as_chunks().0.iter().map(|&x| bf16::from_le_bytes(x).to_f32()).collect(),
            BlockType::F16 => {
                let halves: Vec<f16> = bytes.as_chunks().0.iter().map(|&x| f16::from_le_bytes(x)).collect();
                let mut out = vec![0.0; halves.len()];
                halves.convert_to_f32_slice(&mut out);
                return out;
            }
            _ => {}
        }
        let blocks = bytes.chunks_exact(self.each());
        let mut out = Vec::with_capacity(blocks.len() * self.together());
        for block in blocks {
            match self {
                BlockType::F32 | BlockType::F16 | BlockType::Bf16 => unreachable!("widened above"),
                BlockType::Q4Scaled => {
                    let scale = half(block);
                    out.extend_from_slice(&nibbles(&block[2..]).map(|x| f32::from(x as i8 - 8) * scale));
                }
                BlockType::Q4Above => {
                    let (scale, least) = (half(block), half(&block[2..]));
                    out.extend_from_slice(&nibbles(&block[4..]).map(|x| f32::from(x) * scale + least));
                }
                BlockType::Q5Scaled => {
                    let scale = half(block);
                    out.extend_from_slice(&fives(&block[2..]).map(|x| f32::from(x as i8 - 16) * scale));
                }
                BlockType::Q5Above => {
                    let (scale, least) = (half(block), half(&block[2..]));
                    out.extend_from_slice(&fives(&block[4..]).map(|x| f32::from(x) * scale + least));
                }
                BlockType::Q8 => {
                    let scale = half(block);
                    out.extend(block[2..].iter().map(|&x| f32::from(x as i8) * scale));
                }
                BlockType::Q2K => super_block::two(block, &mut out),
                BlockType::Q3K => super_block::three(block, &mut out),
                BlockType::Q4K => super_block::four(block, &mut out),
                BlockType::Q5K => super_block::five(block, &mut out),
                BlockType::Q6K => super_block::six(block, &mut out),
                BlockType::Q8K => super_block::eight(block, &mut out),
            }
        }
        out
    }
}

/// A number in half precision.
fn half(bytes: &[u8]) -> f32 {
    f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
}

/// The 5-bit codes of a block: the fifth bits are stored together before the nibbles, lowest first.
#[inline(always)]
fn fives(bytes: &[u8]) -> [u8; BLOCK] {
    let (fifths, mut codes) = (u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]), nibbles(&bytes[4..]));
    codes.iter_mut().enumerate().for_each(|(at, code)| *code |= ((fifths >> at & 1) << 4) as u8);
    codes
}

/// The low nibbles of all bytes of a block, then the high nibbles.
#[inline(always)]
fn nibbles(bytes: &[u8]) -> [u8; BLOCK] {
    let mut codes = [0; BLOCK];
    let (low, high) = codes.split_at_mut(BLOCK / 2);
    for ((low, high), byte) in low.iter_mut().zip(high).zip(&bytes[..BLOCK / 2]) {
        (*low, *high) = (byte & 15, byte >> 4);
    }
    codes
}

impl fmt::Display for BlockType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            BlockType::F32 => "F32",
            BlockType::F16 => "F16",
            BlockType::Bf16 => "BF16",
            BlockType::Q4Scaled => "Q4_0",
            BlockType::Q4Above => "Q4_1",
            BlockType::Q5Scaled => "Q5_0",
            BlockType::Q5Above => "Q5_1",
            BlockType::Q8 => "Q8_0",
            BlockType::Q2K => "Q2_K",
            BlockType::Q3K => "Q3_K",
            BlockType::Q4K => "Q4_K",
            BlockType::Q5K => "Q5_K",
            BlockType::Q6K => "Q6_K",
            BlockType::Q8K => "Q8_K",
        })
    }
}
