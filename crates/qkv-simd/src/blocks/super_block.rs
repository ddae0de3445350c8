//! Super-blocks of 256 values, the "K" types of GGUF: parts of 16 or 32 values have quantized scales, which are
//! multiplied by one scale of the block. The bits of a value may be stored in two places: low bits in one list, high
//! bits in another.

use super::{BlockType, half};
use crate::quantized::Blocks;
use half::f16;

/// Values per super-block.
pub(super) const SUPER: usize = 256;

/// Q2_K: parts of 16, each with a scale (low nibble) and a minimum (high nibble).
pub(super) fn two(block: &[u8], out: &mut Vec<f32>) {
    let (parts, rest) = block.split_at(SUPER / 16);
    let (bits, ends) = rest.split_at(SUPER / 4);
    let (scale, least) = (half(ends), half(&ends[2..]));
    for (at, &part) in parts.iter().enumerate() {
        let (scale, least) = (scale * f32::from(part & 15), least * f32::from(part >> 4));
        out.extend(quarters(bits, at).map(|x| scale * f32::from(x) - least));
    }
}

/// Q3_K: the third bits are stored apart (cleared: minus four); parts of 16 with scales of 6 bits from −32 to 31.
pub(super) fn three(block: &[u8], out: &mut Vec<f32>) {
    let (high_bits, rest) = block.split_at(SUPER / 8);
    let (bits, rest) = rest.split_at(SUPER / 4);
    let (parts, scale) = rest.split_at(12);
    let scale = half(scale);
    for at in 0..SUPER / 16 {
        // The low four bits of the sixteen scales are in eight bytes, their high two in the next four.
        let low = parts[at % 8] >> (at / 8 * 4) & 15;
        let high = parts[8 + at % 4] >> (at / 4 * 2) & 3;
        let scale = scale * f32::from((low | high << 4) as i8 - 32);
        let high_bits = high_bits[at % 2 * 16..][..16].iter().map(|b| b >> (at / 2) & 1);
        out.extend(quarters(bits, at).zip(high_bits).map(|(x, high)| scale * f32::from((x | high << 2) as i8 - 4)));
    }
}

/// Q4_K: parts of 32 with scales and minimums of 6 bits.
pub(super) fn four(block: &[u8], out: &mut Vec<f32>) {
    let (scale, least) = (half(block), half(&block[2..]));
    for at in 0..SUPER / 32 {
        let (part, below) = sixes(&block[4..16], at);
        let (scale, least) = (scale * f32::from(part), least * f32::from(below));
        out.extend(halves(&block[16..], at).map(|x| scale * f32::from(x) - least));
    }
}

/// Q5_K: the same with the fifth bits stored apart.
pub(super) fn five(block: &[u8], out: &mut Vec<f32>) {
    let (scale, least) = (half(block), half(&block[2..]));
    let fifths = &block[16..48];
    for at in 0..SUPER / 32 {
        let (part, below) = sixes(&block[4..16], at);
        let (scale, least) = (scale * f32::from(part), least * f32::from(below));
        let fifths = fifths.iter().map(|b| b >> at & 1);
        out.extend(halves(&block[48..], at).zip(fifths).map(|(x, fifth)| scale * f32::from(x | fifth << 4) - least));
    }
}

/// Q6_K: values from −32 to 31, the high two bits stored apart; parts of 16 with scales of 8 bits.
pub(super) fn six(block: &[u8], out: &mut Vec<f32>) {
    let (parts, scale) = block[SUPER / 2 + SUPER / 4..].split_at(SUPER / 16);
    let scale = half(scale);
    for (at, &part) in parts.iter().enumerate() {
        let scale = scale * f32::from(part as i8);
        out.extend(six_codes(block, at).map(|code| scale * f32::from(code as i8 - 32)));
    }
}

/// Q8_K: one scale in full precision. The sums after the values are for dot products and not needed here.
pub(super) fn eight(block: &[u8], out: &mut Vec<f32>) {
    let scale = f32::from_le_bytes([block[0], block[1], block[2], block[3]]);
    out.extend(block[4..4 + SUPER].iter().map(|&x| scale * f32::from(x as i8)));
}

/// Appends the codes and scales of a super-block of Q4_K, Q5_K or Q6_K.
pub(super) fn codes(kind: BlockType, block: &[u8], to: &mut Blocks) {
    let number = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]);
    if kind == BlockType::Q6K {
        to.codes.extend((0..SUPER / 16).flat_map(|at| six_codes(block, at)));
        to.parts.extend_from_slice(&block[SUPER / 2 + SUPER / 4..][..SUPER / 16]);
        to.scales.push(number(block.len() - 2));
        return;
    }
    to.scales.push(number(0));
    to.least.push(number(2));
    for at in 0..SUPER / 32 {
        let (part, below) = sixes(&block[4..16], at);
        to.parts.push(part);
        to.least_parts.push(below);
        match kind {
            BlockType::Q5K => {
                let fifths = block[16..48].iter().map(|b| (b >> at & 1) << 4);
                to.codes.extend(halves(&block[48..], at).zip(fifths).map(|(x, fifth)| x | fifth));
            }
            _ => to.codes.extend(halves(&block[16..], at)),
        }
    }
}

/// The sixteen codes of a part of Q6_K. In each half of the block: 32 values in low nibbles, 32 more, then the high
/// nibbles of the same bytes.
fn six_codes(block: &[u8], part: usize) -> impl Iterator<Item = u8> {
    let (lows, highs) = block.split_at(SUPER / 2);
    let (side, eighth, from) = (part / 8, part % 8 / 2, part % 2 * 16);
    let lows = lows[side * 64 + eighth % 2 * 32 + from..][..16].iter().map(move |b| b >> (eighth / 2 * 4) & 15);
    let highs = highs[side * 32 + from..][..16].iter().map(move |b| b >> (eighth * 2) & 3);
    lows.zip(highs).map(|(low, high)| low | high << 4)
}

/// The sixteen 2-bit values of a part: 32 bytes hold 128 values, the first 32 in their lowest bits.
fn quarters(bits: &[u8], part: usize) -> impl Iterator<Item = u8> {
    let (side, eighth, from) = (part / 8, part % 8 / 2, part % 2 * 16);
    bits[side * 32 + from..][..16].iter().map(move |b| b >> (eighth * 2) & 3)
}

/// The 32 4-bit values of a part: 32 bytes hold two parts, the first in their low nibbles.
fn halves(bits: &[u8], part: usize) -> impl Iterator<Item = u8> {
    bits[part / 2 * 32..][..32].iter().map(move |b| b >> (part % 2 * 4) & 15)
}

/// Scale and minimum of one of eight parts, 6 bits each, in twelve bytes: those of parts 0–3 are the low bits of the
/// first eight bytes; parts 4–7 have their low bits in the last four bytes and their high bits above those of parts
/// 0–3.
fn sixes(bytes: &[u8], part: usize) -> (u8, u8) {
    if part < 4 {
        return (bytes[part] & 63, bytes[part + 4] & 63);
    }
    let (low, first, second) = (bytes[part + 4], bytes[part - 4] >> 6, bytes[part] >> 6);
    (low & 15 | first << 4, low >> 4 | second << 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_has_its_own_six_bits() {
        let bytes: Vec<u8> = (0..12).map(|x| x * 21 + 3).collect();
        let found: Vec<(u8, u8)> = (0..8).map(|part| sixes(&bytes, part)).collect();
        assert!(found.iter().all(|&(scale, least)| scale < 64 && least < 64), "{found:?}");
        assert_eq!(found[0], (3 & 63, (4 * 21 + 3) & 63));
    }
}
