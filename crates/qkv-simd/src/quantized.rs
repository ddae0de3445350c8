//! Quantized matrices times a few vectors: the matrix products of generating one token at a time. They are bound by
//! reading the matrix, so a matrix of 4 bits takes a sixth of the time of one of `f32`.
//!
//! Vectors are rounded once to 16 bits with a scale for every 32 elements ([`Vectors`]), which costs 2⁻¹⁶ of the
//! block's largest element and allows integer products. Matrices are packed when they are loaded: the codes of sixteen
//! rows side by side, in the order in which `kernel` reads them. Block types and the meaning of their codes are those
//! of GGUF; reading files is left to others.

mod kernel;
mod rounding;
mod widening;
mod words;

use crate::isa::Isa;
use crate::pass::{self, MAGIC, Pass};
use crate::team::Team;
use half::f16;
use kernel::{Job, VectorRef, code_bytes};
pub use widening::Block;

/// Elements of a block.
pub const BLOCK: usize = 32;
/// Blocks of a super-block.
pub const SUPER_BLOCKS: usize = 8;
/// Rows that are packed side by side.
const GROUP: usize = 16;
/// Tasks per thread of a product: enough that a thread that starts late still finds some.
const TASKS_EACH: usize = 8;

/// How the scales of blocks are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ScaleKind {
    /// A scale for every block.
    Plain = 0,
    /// A scale and a minimum for every block.
    Least = 1,
    /// A scale and a minimum for every super-block, times a byte each for every block.
    SuperLeast = 2,
    /// A scale for every super-block, times a signed byte for every half block.
    SuperHalves = 3,
}

/// A GGUF block type that products support.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// `scale · (code − 8)`, codes of 4 bits.
    Q4_0,
    /// `scale · code + minimum`, codes of 4 bits.
    Q4_1,
    /// `scale · (code − 16)`, codes of 5 bits.
    Q5_0,
    /// `scale · code + minimum`, codes of 5 bits.
    Q5_1,
    /// `scale · code`, signed codes of 8 bits.
    Q8_0,
    /// `scale · part · code − minimum · part`, codes of 4 bits, super-blocks.
    Q4K,
    /// The same with codes of 5 bits.
    Q5K,
    /// `scale · part · (code − 32)`, codes of 6 bits, super-blocks of half blocks.
    Q6K,
}

impl Format {
    fn bits(self) -> u32 {
        match self {
            Format::Q4_0 | Format::Q4_1 | Format::Q4K => 4,
            Format::Q5_0 | Format::Q5_1 | Format::Q5K => 5,
            Format::Q6K => 6,
            Format::Q8_0 => 8,
        }
    }

    /// The zero point that is subtracted from a code. Codes of 8 bits are signed.
    pub fn zero(self) -> i32 {
        match self {
            Format::Q4_0 => 8,
            Format::Q5_0 => 16,
            Format::Q6K => 32,
            _ => 0,
        }
    }

    fn kind(self) -> ScaleKind {
        match self {
            Format::Q4_0 | Format::Q5_0 | Format::Q8_0 => ScaleKind::Plain,
            Format::Q4_1 | Format::Q5_1 => ScaleKind::Least,
            Format::Q4K | Format::Q5K => ScaleKind::SuperLeast,
            Format::Q6K => ScaleKind::SuperHalves,
        }
    }

    /// Elements that share a 16-bit scale: the width is a multiple of it.
    pub fn together(self) -> usize {
        match self.kind() {
            ScaleKind::Plain | ScaleKind::Least => BLOCK,
            ScaleKind::SuperLeast | ScaleKind::SuperHalves => BLOCK * SUPER_BLOCKS,
        }
    }
}

/// The elements of a quantized matrix, row-major, before they are packed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Blocks {
    /// One byte per code, even if codes have fewer than 8 bits.
    pub codes: Vec<u8>,
    /// One scale for every [`Format::together`] elements.
    pub scales: Vec<f16>,
    /// One minimum for as many elements, if the format has minima.
    pub least: Vec<f16>,
    /// In super-blocks, the factor of the scale for each block or half block.
    pub parts: Vec<u8>,
    /// In super-blocks with minima, the factor of the minimum for each block.
    pub least_parts: Vec<u8>,
}

/// 64 bytes in one cache line.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// A quantized matrix, packed for products with a few vectors.
///
/// ```
/// use qkv_simd::quantized::{Blocks, Format, QuantizedMatrix, Vectors};
/// use qkv_simd::{Isa, team::Team};
/// // One row of 32 numbers, 0.5·3 − 1.
/// let [scales, least] = [0.5, -1.0].map(|x| vec![half::f16::from_f32(x)]);
/// let blocks = Blocks { codes: vec![3; 32], scales, least, ..Blocks::default() };
/// let matrix = QuantizedMatrix::new(Format::Q4_1, 32, &blocks, |row| row).unwrap();
/// let mut y = [0.0];
/// let x = Vectors::new(Isa::best(), &[1.0; 32], 32);
/// qkv_simd::quantized::products(Isa::best(), &Team::new(1), &x, &mut [(&matrix, &mut y)]);
/// assert_eq!(y, [16.0]);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct QuantizedMatrix {
    format: Format,
    rows: usize,
    width: usize,
    codes: Vec<Line>,
    scales: Vec<u8>,
}

impl QuantizedMatrix {
    /// Packs a matrix of rows of `width`, whose row `r` is row `order(r)` of the blocks; `None` if the lengths do not
    /// fit.
    ///
    /// # Panics
    /// If the order names a row that does not exist.
    pub fn new(format: Format, width: usize, blocks: &Blocks, order: impl Fn(usize) -> usize) -> Option<Self> {
        let (kind, together) = (format.kind(), format.together());
        if width == 0 || !width.is_multiple_of(together) || !blocks.codes.len().is_multiple_of(width) {
            return None;
        }
        let (numbers, rows) = (blocks.codes.len(), blocks.codes.len() / width);
        let [least, parts, least_parts] = match kind {
            ScaleKind::Plain => [0, 0, 0],
            ScaleKind::Least => [numbers / together, 0, 0],
            ScaleKind::SuperLeast => [numbers / together, numbers / BLOCK, numbers / BLOCK],
            ScaleKind::SuperHalves => [0, numbers / BLOCK * 2, 0],
        };
        let found = [blocks.scales.len(), blocks.least.len(), blocks.parts.len(), blocks.least_parts.len()];
        let largest = blocks.codes.iter().copied().max().unwrap_or(0);
        if found != [numbers / together, least, parts, least_parts] || u32::from(largest) >= 1 << format.bits() {
            return None;
        }
        let order: Vec<usize> = (0..rows).map(order).collect();
        assert!(order.iter().all(|&row| row < rows), "the order names a row beyond the {rows} there are");
        let mut packed = QuantizedMatrix { format, rows, width, codes: Vec::new(), scales: Vec::new() };
        let mut group = vec![0; width / BLOCK * code_bytes(format.bits())];
        for rows in order.chunks(GROUP) {
            packed.pack_codes(blocks, rows, &mut group);
            packed.codes.extend(group.as_chunks::<64>().0.iter().map(|line| Line(*line)));
            packed.pack_scales(blocks, rows);
        }
        Some(packed)
    }

    /// Packs the codes of up to sixteen rows side by side, two neighbors of a row in 32 bits. Nibbles hold the low
    /// bits, planes after the nibbles the others. Missing rows are zeros.
    fn pack_codes(&self, blocks: &Blocks, rows: &[usize], to: &mut [u8]) {
        let bits = self.format.bits();
        to.fill(0);
        for (block, to) in to.chunks_exact_mut(code_bytes(bits)).enumerate() {
            for (r, &row) in rows.iter().enumerate() {
                let codes = &blocks.codes[row * self.width + block * BLOCK..][..BLOCK];
                if bits == 8 {
                    for (pair, both) in codes.as_chunks::<2>().0.iter().enumerate() {
                        to[(pair * GROUP + r) * 2..][..2].copy_from_slice(both);
                    }
                    continue;
                }
                // `byte(side, half)` of a line holds the codes of two pairs on that side.
                for (line, codes) in codes.as_chunks::<8>().0.iter().enumerate() {
                    let byte = |side: usize, half: usize| codes[4 * half + side] & 15 | codes[4 * half + 2 + side] << 4;
                    let bytes = [byte(0, 0), byte(0, 1), byte(1, 0), byte(1, 1)];
                    to[line * 64 + 4 * r..][..4].copy_from_slice(&bytes);
                }
                let high = |pair: usize, side: usize| codes[2 * pair + side] >> 4;
                if bits == 5 {
                    let byte =
                        |side, half: usize| (0..8usize).fold(0, |byte, at| byte | high(8 * half + at, side) << at);
                    let bytes = [byte(0, 0), byte(0, 1), byte(1, 0), byte(1, 1)];
                    to[256 + 4 * r..][..4].copy_from_slice(&bytes);
                }
                for plane in 0..if bits == 6 { 2 } else { 0 } {
                    let byte = |side, half: usize| {
                        (0..4usize).fold(0, |byte, at| byte | high(8 * plane + 4 * half + at, side) << (2 * at))
                    };
                    let bytes = [byte(0, 0), byte(0, 1), byte(1, 0), byte(1, 1)];
                    to[256 + plane * 64 + 4 * r..][..4].copy_from_slice(&bytes);
                }
            }
        }
    }

    /// Packs the scales of up to sixteen rows, block by block; those of a super-block precede the factors of its
    /// blocks.
    fn pack_scales(&mut self, blocks: &Blocks, rows: &[usize]) {
        let kind = self.format.kind();
        let (each, parts) = (self.width / self.format.together(), self.width / BLOCK);
        for at in 0..each {
            push(&mut self.scales, rows, |row| blocks.scales[row * each + at].to_le_bytes());
            if matches!(kind, ScaleKind::Least | ScaleKind::SuperLeast) {
                push(&mut self.scales, rows, |row| blocks.least[row * each + at].to_le_bytes());
            }
            if matches!(kind, ScaleKind::Plain | ScaleKind::Least) {
                continue;
            }
            for part in at * SUPER_BLOCKS..(at + 1) * SUPER_BLOCKS {
                for second in 0..2 {
                    push(&mut self.scales, rows, |row| match (kind, second) {
                        (ScaleKind::SuperHalves, second) => [blocks.parts[(row * parts + part) * 2 + second]],
                        (_, 0) => [blocks.parts[row * parts + part]],
                        _ => [blocks.least_parts[row * parts + part]],
                    });
                }
            }
        }
    }

    /// The block type.
    pub fn format(&self) -> Format {
        self.format
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
        self.codes.len() * 64 + self.scales.len()
    }
}

/// Appends the bytes of sixteen rows, with zeros for missing rows.
fn push<const N: usize>(to: &mut Vec<u8>, rows: &[usize], bytes: impl Fn(usize) -> [u8; N]) {
    (0..GROUP).for_each(|r| to.extend(rows.get(r).map_or([0; N], |&row| bytes(row))));
}

/// Vectors of one width, rounded to 16 bits with a scale for every block.
#[derive(Clone, Debug, PartialEq)]
pub struct Vectors {
    width: usize,
    count: usize,
    pairs: Vec<[i16; 2]>,
    scales: Vec<f32>,
    halves: Vec<[i32; 2]>,
    sums: Vec<f32>,
}

impl Vectors {
    /// Rounds the rows of `x [R, width]`. A block with a non-finite number becomes NaN.
    ///
    /// # Panics
    /// If the width is not a multiple of [`BLOCK`], or `x` does not hold whole rows.
    pub fn new(isa: Isa, x: &[f32], width: usize) -> Vectors {
        assert!(width > 0 && width.is_multiple_of(BLOCK) && x.len().is_multiple_of(width), "rows of whole blocks");
        let blocks = x.len() / BLOCK;
        let mut found = Vectors {
            width,
            count: x.len() / width,
            pairs: vec![[0; 2]; x.len() / 2],
            scales: vec![0.0; blocks],
            halves: vec![[0; 2]; blocks],
            sums: vec![0.0; blocks],
        };
        pass::run(isa, Round { x, into: &mut found });
        found
    }

    fn vector(&self, at: usize) -> VectorRef {
        let blocks = self.width / BLOCK;
        VectorRef {
            pairs: self.pairs[at * self.width / 2..].as_ptr(),
            scales: self.scales[at * blocks..].as_ptr(),
            halves: self.halves[at * blocks..].as_ptr(),
            sums: self.sums[at * blocks..].as_ptr(),
        }
    }
}

struct Round<'a> {
    x: &'a [f32],
    into: &'a mut Vectors,
}

/// The largest code of a block.
const LARGEST: f32 = 32767.0;
/// A block whose elements do not exceed this rounds to zeros: the inverse of its scale would overflow.
const SMALLEST: f32 = 1e-30;

impl Pass for Round<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Vectors { pairs, scales, halves, sums, .. } = self.into;
        let out = pairs.as_chunks_mut::<{ BLOCK / 2 }>().0.iter_mut().zip(scales).zip(halves).zip(sums);
        for (x, (((pairs, scale), halves), sum)) in self.x.as_chunks::<BLOCK>().0.iter().zip(out) {
            let (mut largest, mut finite) = ([0.0f32; 16], 0.0f32);
            for l in 0..16 {
                let (a, b) = (x[l].abs(), x[l + 16].abs());
                let larger = if a > b { a } else { b };
                largest[l] = larger;
            }
            for &x in x {
                // 0 for a finite number, NaN otherwise.
                finite += x * 0.0;
            }
            let mut half = 8;
            while half > 0 {
                for l in 0..half {
                    largest[l] = if largest[l] > largest[l + half] { largest[l] } else { largest[l + half] };
                }
                half /= 2;
            }
            let inverse = if largest[0] > SMALLEST { LARGEST / largest[0] } else { 0.0 };
            let mut whole = [0i32; BLOCK];
            for l in 0..BLOCK {
                let shifted = x[l] * inverse + MAGIC;
                whole[l] = (shifted.to_bits() as i32).wrapping_sub(MAGIC.to_bits() as i32);
            }
            if finite.is_nan() {
                whole = [0; BLOCK];
            }
            for (pair, whole) in pairs.iter_mut().zip(whole.as_chunks::<2>().0) {
                *pair = [whole[0] as i16, whole[1] as i16];
            }
            let (mut low, mut high) = (0, 0);
            for l in 0..BLOCK / 2 {
                low += whole[l];
                high += whole[l + BLOCK / 2];
            }
            *scale = if largest[0] > SMALLEST { largest[0] / LARGEST } else { 0.0 } + finite;
            *halves = [low, high];
            *sum = *scale * (low + high) as f32;
        }
    }
}

/// The outputs that tasks write to.
struct Outputs<'a>(&'a [*mut f32]);

// SAFETY: each task writes the rows of its own groups, which no other task accesses.
unsafe impl Sync for Outputs<'_> {}

/// `y [R, O] = x · Wᵀ` for several matrices that share the vectors, as one piece of work for the team.
///
/// # Panics
/// If a matrix has a different width, or an output the wrong length.
pub fn products(isa: Isa, team: &Team, x: &Vectors, outputs: &mut [(&QuantizedMatrix, &mut [f32])]) {
    let vectors: Vec<VectorRef> = (0..x.count).map(|at| x.vector(at)).collect();
    let vectors = SharedVectors(&vectors);
    let mut pointers = Vec::with_capacity(outputs.len() * x.count);
    // Groups are numbered through all matrices, one after another.
    let mut ends = Vec::with_capacity(outputs.len());
    let mut total = 0;
    for (matrix, y) in outputs.iter_mut() {
        assert!(matrix.width == x.width && y.len() == x.count * matrix.rows, "the product does not fit");
        let first = y.as_mut_ptr();
        pointers.extend((0..x.count).map(|at| first.wrapping_add(at * matrix.rows)));
        total += matrix.rows.div_ceil(GROUP);
        ends.push(total);
    }
    let matrices: Vec<&QuantizedMatrix> = outputs.iter().map(|(matrix, _)| *matrix).collect();
    let pointers = Outputs(&pointers);
    let each = total.div_ceil(TASKS_EACH * team.threads()).max(1);
    team.run(total.div_ceil(each), |task| {
        let (vectors, pointers) = (&vectors, &pointers);
        let (mut from, to) = (task * each, total.min((task + 1) * each));
        while from < to {
            let at = ends.partition_point(|&end| end <= from);
            let (start, end) = (if at == 0 { 0 } else { ends[at - 1] }, ends[at].min(to));
            let matrix = matrices[at];
            let job = Job {
                bits: matrix.format.bits(),
                kind: matrix.format.kind(),
                zero: matrix.format.zero(),
                blocks: matrix.width / BLOCK,
                codes: bytes(&matrix.codes),
                scales: &matrix.scales,
                vectors: vectors.0,
                out: &pointers.0[at * vectors.0.len()..][..vectors.0.len()],
                rows: matrix.rows,
                groups: from - start..end - start,
            };
            // SAFETY: `new` packed every group, the vectors have the matrix's width, and every output has its rows,
            // of which this task alone writes those of its groups.
            unsafe { kernel::run(isa, job) };
            from = end;
        }
    });
}

struct SharedVectors<'a>(&'a [VectorRef]);

// SAFETY: the vectors are read only, and outlive the team's work.
unsafe impl Sync for SharedVectors<'_> {}

/// The bytes of lines.
fn bytes(lines: &[Line]) -> &[u8] {
    // SAFETY: a line is 64 bytes without padding.
    unsafe { std::slice::from_raw_parts(lines.as_ptr().cast(), lines.len() * 64) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORMATS: [Format; 8] =
        [Format::Q4_0, Format::Q4_1, Format::Q5_0, Format::Q5_1, Format::Q8_0, Format::Q4K, Format::Q5K, Format::Q6K];

    /// Blocks of any codes and scales.
    fn blocks(format: Format, numbers: usize) -> Blocks {
        let noise = |at: usize, salt: usize| (((at + 7) * 2_654_435_761 + salt * 40_503) >> 7) % 256;
        let scale = |salt: usize| move |at: usize| f16::from_f32(0.01 + noise(at, salt) as f32 / 4096.0);
        let codes = (0..numbers).map(|at| (noise(at, 1) >> (8 - format.bits())) as u8).collect();
        let (together, kind) = (format.together(), format.kind());
        let bytes = |count: usize, salt: usize| (0..count).map(|at| noise(at, salt) as u8).collect::<Vec<u8>>();
        let scales = (0..numbers / together).map(scale(2)).collect();
        let least = (0..numbers / together).map(scale(3)).map(|x| if kind == ScaleKind::Least { -x } else { x });
        let has_least = matches!(kind, ScaleKind::Least | ScaleKind::SuperLeast);
        let (parts, least_parts) = match kind {
            ScaleKind::Plain | ScaleKind::Least => (0, 0),
            ScaleKind::SuperLeast => (numbers / BLOCK, numbers / BLOCK),
            ScaleKind::SuperHalves => (numbers / BLOCK * 2, 0),
        };
        Blocks {
            codes,
            scales,
            least: if has_least { least.collect() } else { Vec::new() },
            parts: bytes(parts, 4),
            least_parts: bytes(least_parts, 5),
        }
    }

    /// The element that the format's definition gives.
    fn element(format: Format, blocks: &Blocks, at: usize) -> f64 {
        let wide = |x: f16| f64::from(x.to_f32());
        let code = f64::from(blocks.codes[at]) - f64::from(format.zero());
        let scale = wide(blocks.scales[at / format.together()]);
        let least = || wide(blocks.least[at / format.together()]);
        match format.kind() {
            ScaleKind::Plain if format == Format::Q8_0 => scale * f64::from(blocks.codes[at] as i8),
            ScaleKind::Plain => scale * code,
            ScaleKind::Least => scale * code + least(),
            ScaleKind::SuperLeast => {
                let [part, below] = [&blocks.parts, &blocks.least_parts].map(|bytes| f64::from(bytes[at / BLOCK]));
                scale * part * code - least() * below
            }
            ScaleKind::SuperHalves => scale * f64::from(blocks.parts[at / (BLOCK / 2)] as i8) * code,
        }
    }

    fn vectors(count: usize, width: usize) -> Vec<f32> {
        (0..count * width).map(|at| ((at * 37 + at / 5) % 191) as f32 / 63.0 - 1.5).collect()
    }

    fn product(isa: Isa, team: &Team, matrix: &QuantizedMatrix, x: &[f32]) -> Vec<f32> {
        let mut y = vec![f32::NAN; x.len() / matrix.width * matrix.rows];
        products(isa, team, &Vectors::new(isa, x, matrix.width), &mut [(matrix, &mut y)]);
        y
    }

    #[test]
    fn a_product_is_that_of_the_widened_elements() {
        let (rows, width) = (21, 512);
        let team = Team::new(1);
        for format in FORMATS {
            let blocks = blocks(format, rows * width);
            let matrix = QuantizedMatrix::new(format, width, &blocks, |row| row).unwrap();
            let turned = QuantizedMatrix::new(format, width, &blocks, |row| rows - 1 - row).unwrap();
            let mut widened = vec![0.0; rows * width];
            matrix.widen(0, &mut widened);
            let close = |(at, &x): (usize, &f32)| (f64::from(x) - element(format, &blocks, at)).abs() <= 2e-4;
            assert!(widened.iter().enumerate().all(close), "{format:?} widened");
            let x = vectors(3, width);
            let y = product(Isa::best(), &team, &matrix, &x);
            let back = product(Isa::best(), &team, &turned, &x);
            for (at, &found) in y.iter().enumerate() {
                let (m, r) = (at / rows, at % rows);
                let terms = (0..width).map(|c| element(format, &blocks, r * width + c) * f64::from(x[m * width + c]));
                let (truth, size) = terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
                assert!((f64::from(found) - truth).abs() <= size * 3e-5, "{format:?} {m} {r}: {found} {truth}");
                assert_eq!(found, back[m * rows + rows - 1 - r], "{format:?}: rows in another order");
            }
        }
    }

    #[test]
    fn a_result_has_the_same_bits_on_every_instruction_set_in_every_batch_and_team() {
        let (rows, width) = (37, 512);
        let (alone, together) = (Team::new(1), Team::new(3));
        for format in FORMATS {
            let matrix = QuantizedMatrix::new(format, width, &blocks(format, rows * width), |row| row).unwrap();
            let x = vectors(6, width);
            let portable = product(Isa::named("portable").unwrap(), &alone, &matrix, &x);
            for isa in Isa::available() {
                for team in [&alone, &together] {
                    assert_eq!(product(isa, team, &matrix, &x), portable, "{format:?} {isa}");
                }
                for (m, own) in x.chunks_exact(width).enumerate() {
                    assert_eq!(product(isa, &together, &matrix, own), portable[m * rows..][..rows], "{format:?} {isa}");
                }
            }
            #[cfg(target_arch = "x86_64")]
            if is_x86_feature_detected!("avx512vnni") {
                // `run` used VNNI; this is the same without it.
                let rounded = Vectors::new(Isa::best(), &x[..width], width);
                let mut y = vec![f32::NAN; rows];
                let job = Job {
                    bits: format.bits(),
                    kind: format.kind(),
                    zero: format.zero(),
                    blocks: width / BLOCK,
                    codes: bytes(&matrix.codes),
                    scales: &matrix.scales,
                    vectors: &[rounded.vector(0)],
                    out: &[y.as_mut_ptr()],
                    rows,
                    groups: 0..rows.div_ceil(GROUP),
                };
                // SAFETY: a CPU with VNNI has AVX-512, and everything has the matrix's sizes.
                unsafe { kernel::avx512(job) };
                assert_eq!(y, portable[..rows], "{format:?} without VNNI");
            }
        }
        #[cfg(target_arch = "x86_64")]
        if !is_x86_feature_detected!("avx512vnni") {
            eprintln!("skipped: products with VNNI (this CPU has none)");
        }
    }

    #[test]
    fn several_matrices_share_the_vectors() {
        let (width, team) = (256, Team::new(2));
        let matrices: Vec<QuantizedMatrix> = [(Format::Q4_1, 5), (Format::Q6K, 64), (Format::Q8_0, 17)]
            .map(|(format, rows)| QuantizedMatrix::new(format, width, &blocks(format, rows * width), |r| r).unwrap())
            .into();
        let x = vectors(2, width);
        let mut outputs: Vec<Vec<f32>> = matrices.iter().map(|matrix| vec![0.0; 2 * matrix.rows]).collect();
        let mut pairs: Vec<_> = matrices.iter().zip(outputs.iter_mut().map(|y| &mut y[..])).collect();
        products(Isa::best(), &team, &Vectors::new(Isa::best(), &x, width), &mut pairs);
        for (matrix, y) in matrices.iter().zip(&outputs) {
            assert_eq!(*y, product(Isa::best(), &team, matrix, &x));
        }
    }

    #[test]
    fn a_vector_is_rounded_to_16_bits_and_nan_stays_nan() {
        let mut x: Vec<f32> = (0..96).map(|at| (at as f32 - 40.0) * 0.37).collect();
        x[64..].fill(1e-33);
        for isa in Isa::available() {
            let rounded = Vectors::new(isa, &x, 96);
            for (at, &x) in x.iter().enumerate() {
                let found = f32::from(rounded.pairs[at / 2][at % 2]) * rounded.scales[at / 32];
                assert!((found - x).abs() <= 18.9 / 65534.0 * 1.001, "{isa} {at}: {found} {x}");
            }
            assert_eq!(rounded, Vectors::new(Isa::named("portable").unwrap(), &x, 96), "{isa}");
        }
        let matrix = QuantizedMatrix::new(Format::Q8_0, 96, &blocks(Format::Q8_0, 96), |row| row).unwrap();
        for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            x[50] = odd;
            assert!(product(Isa::best(), &Team::new(1), &matrix, &x)[0].is_nan(), "{odd}");
        }
    }

    #[test]
    fn blocks_that_do_not_fit_are_refused() {
        let good = blocks(Format::Q4_1, 64);
        let new = |width: usize, blocks: &Blocks| QuantizedMatrix::new(Format::Q4_1, width, blocks, |row| row);
        assert_eq!(new(32, &good).unwrap().rows(), 2);
        assert!(new(0, &good).is_none() && new(33, &good).is_none() && new(96, &good).is_none());
        assert!(new(32, &Blocks { least: Vec::new(), ..good.clone() }).is_none());
        assert!(new(32, &Blocks { codes: vec![16; 64], ..good.clone() }).is_none(), "a code of five bits");
        assert!(QuantizedMatrix::new(Format::Q4K, 64, &good, |row| row).is_none());
    }
}
