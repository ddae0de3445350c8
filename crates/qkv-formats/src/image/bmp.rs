//! BMP files: Windows's device-independent bitmaps of 1 to 32 bits per pixel, with palettes, masks and run lengths, and
//! OS/2's first version. Implemented here because the crate that was used before (zune-bmp 0.5) decoded rows of 1, 2
//! and 4 bits incorrectly, accepted truncated files, and refused files with fewer than 12 bytes of pixels.

use super::Image;

/// Bytes of the file header, which precedes the image header.
const FILE_HEADER: usize = 14;
/// How pixels are stored: plain, in run lengths of 8 or 4 bits, or by masks.
const PLAIN: u32 = 0;
const RUNS_OF_8: u32 = 1;
const RUNS_OF_4: u32 = 2;
const MASKS: u32 = 3;
const MASKS_AND_ALPHA: u32 = 6;

/// Pixels row by row from the top: gray, RGB, or RGB with alpha.
pub(super) struct Pixels {
    pub width: usize,
    pub height: usize,
    /// 1, 3 or 4.
    pub channels: usize,
    pub points: Vec<u8>,
}

struct Header {
    width: usize,
    height: usize,
    /// Rows are stored from the bottom up.
    rises: bool,
    /// Bits per pixel.
    bits: usize,
    stored: u32,
    /// Offset of the pixels.
    start: usize,
    /// Blue, green and red of each color.
    palette: Vec<[u8; 3]>,
    /// Masks of red, green, blue and alpha.
    masks: [u32; 4],
}

fn short(bytes: &[u8], at: usize) -> Result<u16, String> {
    let two = bytes.get(at..at + 2).ok_or("it is cut off")?;
    Ok(u16::from_le_bytes([two[0], two[1]]))
}

fn long(bytes: &[u8], at: usize) -> Result<u32, String> {
    Ok(u32::from(short(bytes, at)?) | u32::from(short(bytes, at + 2)?) << 16)
}

impl Header {
    fn read(bytes: &[u8]) -> Result<Header, String> {
        let (start, size) = (long(bytes, 10)? as usize, long(bytes, FILE_HEADER)? as usize);
        let is_old = size == 12;
        if !matches!(size, 12 | 16 | 40 | 52 | 56 | 64 | 108 | 124) || bytes.len() < FILE_HEADER + size {
            return Err(format!("its header has {size} bytes"));
        }
        // Fields that a shorter header lacks are 0.
        let field = |at: usize| if at + 4 <= size { long(bytes, FILE_HEADER + at) } else { Ok(0) };
        let (width, height, bits) = match is_old {
            true => (i32::from(short(bytes, 18)?), i32::from(short(bytes, 20)?), short(bytes, 24)?),
            false => (field(4)? as i32, field(8)? as i32, short(bytes, 28)?),
        };
        let (stored, colors) = if is_old { (PLAIN, 0) } else { (field(16)?, field(32)? as usize) };
        let bits = usize::from(bits);
        let fits = match stored {
            PLAIN => matches!(bits, 1 | 2 | 4 | 8 | 16 | 24 | 32),
            RUNS_OF_8 => bits == 8,
            RUNS_OF_4 => bits == 4,
            MASKS | MASKS_AND_ALPHA => matches!(bits, 16 | 32) && size != 64,
            _ => false,
        };
        if !fits {
            return Err(format!("pixels of {bits} bits, stored in way {stored}, are not read"));
        }
        let mut after = FILE_HEADER + size;
        let mut masks = match bits {
            16 => [0x7c00, 0x3e0, 0x1f, 0],
            _ => [0xff_0000, 0xff00, 0xff, 0],
        };
        if stored != PLAIN && bits > 8 {
            // Masks follow the first version of the header, and are part of later versions.
            let count = if stored == MASKS_AND_ALPHA || size >= 56 { 4 } else { 3 };
            for (at, mask) in masks.iter_mut().enumerate().take(count) {
                *mask = long(bytes, FILE_HEADER + 40 + 4 * at)?;
            }
            after = after.max(FILE_HEADER + 40 + 4 * count);
        }
        let width = usize::try_from(width).unwrap_or(0);
        let (rises, height) = (height >= 0, height.unsigned_abs() as usize);
        Image::fits(width, height)?;
        if start < after || start > bytes.len() {
            return Err(format!("its pixels start at byte {start} of {}", bytes.len()));
        }
        let mut palette = Vec::new();
        if bits <= 8 {
            let (most, each) = (1 << bits, if is_old { 3 } else { 4 });
            let count = if colors == 0 || colors > most { most } else { colors };
            let found = bytes[after..start].chunks_exact(each).take(count);
            palette.extend(found.map(|color| [color[0], color[1], color[2]]));
        }
        Ok(Header { width, height, rises, bits, stored, start, palette, masks })
    }
}

/// Decodes a file; the error says what is wrong with the bytes.
pub(super) fn decode(bytes: &[u8]) -> Result<Pixels, String> {
    let header = Header::read(bytes)?;
    let Header { width, height, bits, .. } = header;
    let packed = &bytes[header.start..];
    // Rows are padded to four bytes; the last one may end with its last pixel.
    let (row, pitch) = ((width * bits).div_ceil(8), (width * bits).div_ceil(32) * 4);
    let is_run = matches!(header.stored, RUNS_OF_8 | RUNS_OF_4);
    if !is_run && packed.len() < pitch * (height - 1) + row {
        return Err("it is cut off".into());
    }
    let runs = if is_run { runs(&header, packed)? } else { Vec::new() };
    let has_alpha = header.masks[3] != 0 && bits > 8;
    let channels = match (bits, header.palette.is_empty()) {
        (8, true) => 1,
        _ if has_alpha => 4,
        _ => 3,
    };
    let mut points = Vec::with_capacity(width * height * channels);
    for y in 0..height {
        let from = if header.rises { height - 1 - y } else { y };
        if is_run {
            header.look_up(&runs[from * width..][..width], 8, &mut points)?;
            continue;
        }
        let row = &packed[from * pitch..][..row];
        match bits {
            8 if channels == 1 => points.extend_from_slice(row),
            1..=8 => header.look_up(row, bits, &mut points)?,
            24 => row.chunks_exact(3).for_each(|color| points.extend([color[2], color[1], color[0]])),
            _ => {
                for pixel in row.chunks_exact(bits / 8) {
                    let value = pixel.iter().rev().fold(0, |value, &byte| value << 8 | u32::from(byte));
                    points.extend(header.masks.iter().take(channels).map(|&mask| masked(value, mask)));
                }
            }
        }
    }
    Ok(Pixels { width, height, channels, points })
}

/// The part of a pixel that a mask selects, scaled to 0 to 255.
fn masked(value: u32, mask: u32) -> u8 {
    if mask == 0 {
        return 0;
    }
    let [value, most] = [value & mask, mask].map(|x| u64::from(x >> mask.trailing_zeros()));
    ((255 * value + most / 2) / most) as u8
}

impl Header {
    /// Appends the colors of a row of palette indices of `bits` bits each, the first in the highest bits.
    fn look_up(&self, row: &[u8], bits: usize, points: &mut Vec<u8>) -> Result<(), String> {
        for x in 0..self.width {
            let at = x * bits;
            let place = usize::from(row[at / 8] >> (8 - bits - at % 8)) & ((1 << bits) - 1);
            let [b, g, r] = *self.palette.get(place).ok_or_else(|| {
                format!("a pixel has color {place}, and the palette has {} of them", self.palette.len())
            })?;
            points.extend([r, g, b]);
        }
        Ok(())
    }
}

/// The palette indices of a run-length encoded image, in the order of its rows.
fn runs(header: &Header, packed: &[u8]) -> Result<Vec<u8>, String> {
    let &Header { width, height, bits, .. } = header;
    let mut places = vec![0; width * height];
    let (mut x, mut y, mut at) = (0, 0, 0);
    // The palette index of pixel `n` of a run: a whole byte, or its two halves in turn.
    let place = |byte: u8, n: usize| match (bits, n % 2) {
        (8, _) => byte,
        (_, 0) => byte >> 4,
        _ => byte & 15,
    };
    let mut write = |x: usize, y: usize, value: u8| match (x < width && y < height).then(|| y * width + x) {
        Some(at) => {
            places[at] = value;
            Ok(())
        }
        None => Err("a run of pixels goes beyond its row".to_owned()),
    };
    loop {
        let &[count, code] = packed.get(at..at + 2).ok_or("it is cut off")? else { unreachable!("two bytes") };
        at += 2;
        match (count, code) {
            (0, 0) => (x, y) = (0, y + 1),
            (0, 1) => return Ok(places),
            (0, 2) => {
                let &[right, up] = packed.get(at..at + 2).ok_or("it is cut off")? else { unreachable!("two bytes") };
                (x, y, at) = (x + usize::from(right), y + usize::from(up), at + 2);
            }
            (0, count) => {
                let (count, each) = (usize::from(count), 8 / bits);
                let bytes = packed.get(at..at + count.div_ceil(each)).ok_or("it is cut off")?;
                (0..count).try_for_each(|n| write(x + n, y, place(bytes[n / each], n)))?;
                // Padded to two bytes.
                (x, at) = (x + count, at + bytes.len().next_multiple_of(2));
            }
            (count, code) => {
                let count = usize::from(count);
                (0..count).try_for_each(|n| write(x + n, y, place(code, n)))?;
                x += count;
            }
        }
    }
}
