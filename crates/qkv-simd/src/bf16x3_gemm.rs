//! f32 matrix products with AMX in bf16x3 arithmetic: an f32 has 24 significant bits, so it is the sum of three bf16
//! terms of 8 bits each.
//!
//! Six of the nine products of two numbers' terms are computed. The three products of a low term with a low or a middle
//! one are left out: together they are at most 2⁻²⁴ of the product, one rounding to f32, and mostly less than 2⁻²⁷. AMX
//! sums 32 products before it adds them to the accumulator, so a sum is rounded far less often than in a chain of
//! multiply-adds: over 64 elements its error is half as large. AMX has sixteen times the throughput of f32
//! multiply-adds, so six products take less than half the time of one.
//!
//! Operands are packed in *chunks* of [`DEPTH`] elements of the depth, in which elements 0 and 16, 1 and 17 and so on
//! are interleaved: two vectors of f32 then become pairs without a shuffle. A chunk of a row of the left operand is its
//! high terms followed by its middle terms, which take as much memory as the f32 did; the low terms are stored apart. A
//! chunk of the right operand is three blocks.
//!
//! Non-finite values cannot be split; they are packed so that [`Bf16x3Gemm::reconstruct_a`] still returns them.
//! Products of very large numbers overflow, and since each term has its own sign, their sum may be NaN or even finite
//! where it should be ∞. Packing reports whether that may happen: see [`Bf16x3Gemm::pack_a`].

pub use crate::bf16_gemm::{BLOCK, DEPTH, SIDE, padded_depth};
use crate::bf16_gemm::{Bf16Gemm, packed_b_len as bf16_packed_b_len};
use crate::isa::Isa;
use crate::product::{Target, Update};
use crate::span;
use half::bf16;
use std::ops::Range;

#[cfg(target_arch = "x86_64")]
mod x86;

/// bf16 terms of an f32.
const TERMS: usize = 3;

/// bf16 elements of a packed row of the left operand of this width: the low terms follow the others.
pub const fn packed_a_len(width: usize) -> usize {
    padded_depth(width).saturating_mul(TERMS)
}

/// bf16 elements of a packed right operand of this depth and width.
pub const fn packed_b_len(depth: usize, width: usize) -> usize {
    bf16_packed_b_len(depth, width).saturating_mul(TERMS)
}

/// The left operand: rows of high and middle terms, and rows of low terms.
#[derive(Clone, Copy, Debug)]
pub struct SplitA<'a> {
    /// The high and middle terms, chunk by chunk.
    pub high: &'a [bf16],
    /// The distance between rows of `high`.
    pub row: usize,
    /// The low terms.
    pub low: &'a [bf16],
    /// The distance between rows of `low`.
    pub low_row: usize,
}

impl<'a> SplitA<'a> {
    /// Rows of `width` elements whose low terms follow the others.
    pub fn rows(data: &'a [bf16], width: usize) -> Self {
        let row = packed_a_len(width);
        SplitA { high: data, row, low: data.get(2 * padded_depth(width)..).unwrap_or_default(), low_row: row }
    }
}

/// The right operand: chunks of three blocks, panel by panel.
#[derive(Clone, Copy, Debug)]
pub struct SplitB<'a> {
    /// The elements.
    pub data: &'a [bf16],
    /// Chunks in a panel.
    pub chunks: usize,
}

/// f32 matrix products in bf16x3 arithmetic on this thread. Holds the thread's tile configuration for as long as it
/// lives.
#[derive(Debug)]
pub struct Bf16x3Gemm {
    /// Holds the tile configuration.
    _unit: Bf16Gemm,
}

/// Splits an f32 into its three terms. A non-finite value is its own high term; a value that would round to infinity is
/// truncated instead.
fn split(x: f32) -> [bf16; TERMS] {
    if !x.is_finite() {
        return [bf16::from_f32(x), bf16::ZERO, bf16::ZERO];
    }
    let rounded = bf16::from_f32(x);
    let first = if rounded.is_finite() { rounded } else { bf16::from_bits((x.to_bits() >> 16) as u16) };
    let rest = x - first.to_f32();
    let middle = bf16::from_f32(rest);
    [first, middle, bf16::from_f32(rest - middle.to_f32())]
}

/// The position of an element of the depth in its chunk of a row.
const fn position_in_chunk(k: usize) -> usize {
    k % SIDE * 2 + k % DEPTH / SIDE
}

/// The positions of an element's terms in its row of the left operand.
fn a_positions(width: usize, k: usize) -> [usize; TERMS] {
    let chunk = k / DEPTH * DEPTH;
    [2 * chunk, 2 * chunk + DEPTH, 2 * padded_depth(width) + chunk].map(|at| at + position_in_chunk(k))
}

fn set_a(row: &mut [bf16], width: usize, k: usize, parts: [bf16; TERMS]) {
    a_positions(width, k).into_iter().zip(parts).for_each(|(at, part)| row[at] = part);
}

impl Bf16x3Gemm {
    /// Whether the instruction set has AMX.
    pub fn available(isa: Isa) -> bool {
        isa.has_amx()
    }

    /// Configures AMX on this thread, if the instruction set has it.
    pub fn new(isa: Isa) -> Option<Bf16x3Gemm> {
        if !Bf16x3Gemm::available(isa) {
            return None;
        }
        Some(Bf16x3Gemm { _unit: Bf16Gemm::new(isa)? })
    }

    /// `C = A · B`, or `C` plus a sum that starts from zero, over a range of panels of `C` and a range of chunks of the
    /// depth. Rows are computed in multiples of [`SIDE`]: `A` and `C` must have memory for these, and the rows of `C`
    /// beyond `rows` may be overwritten with anything.
    ///
    /// An element of `C` is a pure function of its row of `A`, its column of `B` and the chunks.
    ///
    /// # Panics
    /// If a slice is too short, or the update is [`Update::Accumulate`].
    pub fn product(
        &self,
        c: Target<'_, f32>,
        a: SplitA<'_>,
        b: SplitB<'_>,
        rows: usize,
        panels: Range<usize>,
        chunks: Range<usize>,
    ) {
        if rows == 0 || panels.is_empty() {
            return;
        }
        let whole = matches!(c.update, Update::Overwrite | Update::AddPartial { every: usize::MAX });
        assert!(whole, "bf16x3 products overwrite or add one partial sum");
        let rows = rows.div_ceil(SIDE).saturating_mul(SIDE);
        let (depth, width) = (chunks.end.saturating_mul(DEPTH), panels.end.saturating_mul(SIDE));
        assert!(c.row >= width && c.data.len() >= span(rows, c.row, width), "C is too short");
        let long = |data: &[bf16], row: usize, len: usize| row >= len && data.len() >= span(rows, row, len);
        assert!(long(a.high, a.row, depth.saturating_mul(2)) && long(a.low, a.low_row, depth), "A is too short");
        let blocks = panels.end.saturating_mul(b.chunks);
        assert!(chunks.end <= b.chunks && b.data.len() >= blocks.saturating_mul(TERMS * BLOCK), "B is too short");
        if chunks.is_empty() {
            if c.update == Update::Overwrite {
                (0..rows).for_each(|r| c.data[r * c.row + panels.start * SIDE..r * c.row + width].fill(0.0));
            }
            return;
        }
        #[cfg(target_arch = "x86_64")]
        // SAFETY: every row, panel and chunk lies inside its slice, as just checked; `self` exists only where the CPU
        // has AMX, and the tiles are configured on this thread, which it cannot leave.
        unsafe {
            x86::product(c, a, b, rows, panels, chunks);
        }
        #[cfg(not(target_arch = "x86_64"))]
        unreachable!("no AMX on this architecture");
    }

    /// Packs `A = rows`: `count` rows with stride `row`, of `width` elements with zeros to the end of the panel.
    /// Returns whether all of them are small enough that no sum of their products overflows. If not, non-finite
    /// products must be recomputed by other means. A non-finite element is stored as its own high term, with two zeros.
    ///
    /// # Panics
    /// If a slice is too short.
    pub fn pack_a(&self, rows: &[f32], row: usize, count: usize, width: usize, out: &mut [bf16]) -> bool {
        assert!(
            long_enough(rows, row, count, width) && out.len() >= count.saturating_mul(packed_a_len(width)),
            "too short"
        );
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the lengths were checked; `self` exists only where the CPU has the instructions.
        if unsafe { x86::pack_a(rows, row, count, width.div_ceil(SIDE), out) } {
            return true;
        }
        for_each_large(rows, row, count, width, |r, k, x| {
            set_a(&mut out[r * packed_a_len(width)..], width, k, split(x));
        });
        false
    }

    /// Packs `B = rowsᵀ`. Returns whether no sum of products overflows, as [`pack_a`](Bf16x3Gemm::pack_a).
    ///
    /// # Panics
    /// If a slice is too short.
    pub fn pack_b_transposed(&self, rows: &[f32], row: usize, count: usize, width: usize, out: &mut [bf16]) -> bool {
        assert!(long_enough(rows, row, count, width) && out.len() >= packed_b_len(width, count), "too short");
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the lengths were checked; `self` exists only where the CPU has the instructions.
        if unsafe { x86::pack_b_transposed(rows, row, count, width.div_ceil(SIDE), out) } {
            return true;
        }
        let chunks = padded_depth(width) / DEPTH;
        for_each_large(rows, row, count, width, |j, k, x| set_b(out, chunks, (k, j), split(x)));
        false
    }

    /// Packs `B = rows`, `panels` panels wide. Returns whether no sum of products overflows, as
    /// [`pack_a`](Bf16x3Gemm::pack_a).
    ///
    /// # Panics
    /// If a slice is too short.
    pub fn pack_b(&self, rows: &[f32], row: usize, count: usize, panels: usize, out: &mut [bf16]) -> bool {
        let width = panels.saturating_mul(SIDE);
        assert!(long_enough(rows, row, count, width) && out.len() >= packed_b_len(count, width), "too short");
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the lengths were checked; `self` exists only where the CPU has the instructions.
        if unsafe { x86::pack_b(rows, row, count, panels, out) } {
            return true;
        }
        let chunks = padded_depth(count) / DEPTH;
        for_each_large(rows, row, count, width, |k, j, x| set_b(out, chunks, (k, j), split(x)));
        false
    }

    /// Splits rows of `width` f32 in place into a left operand, except for the low terms, which go to `low` at distance
    /// `low_row`. The elements must be small enough to split, or NaN.
    ///
    /// # Panics
    /// If a slice is too short, or the width is not whole panels.
    pub fn split_rows(
        &self,
        tile: &mut [f32],
        row: usize,
        rows: usize,
        width: usize,
        low: &mut [bf16],
        low_row: usize,
    ) {
        let (long, wide) = (tile.len() >= rows.saturating_mul(row), row >= padded_depth(width));
        assert!(width.is_multiple_of(SIDE) && wide && long, "the tile is too short");
        let fits = low_row >= padded_depth(width) && low.len() >= rows.saturating_mul(low_row);
        assert!(fits, "too little memory for the low terms");
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the lengths were checked; `self` exists only where the CPU has the instructions.
        unsafe {
            x86::split_rows(tile, row, rows, width / SIDE, low, low_row);
        }
    }

    /// Reconstructs an element of a row of the left operand from its terms.
    pub fn reconstruct_a(row: &[bf16], width: usize, k: usize) -> f32 {
        let [high, middle, low] = a_positions(width, k).map(|at| row[at].to_f32());
        high + (middle + low)
    }

    /// The high term of an element of a row of the left operand: zero if the element is zero.
    pub fn leading_term(row: &[bf16], k: usize) -> bf16 {
        row[a_positions(0, k)[0]]
    }

    /// Reconstructs an element of the right operand from its terms.
    pub fn reconstruct_b(right: SplitB<'_>, k: usize, column: usize) -> f32 {
        let at = b_position(right.chunks, (k, column));
        let [high, middle, low] = [0, 1, 2].map(|term| right.data[at + term * BLOCK].to_f32());
        high + (middle + low)
    }
}

/// Whether rows at this distance hold `width` elements up to the end of the panel.
fn long_enough(rows: &[f32], row: usize, count: usize, width: usize) -> bool {
    let width = width.div_ceil(SIDE).saturating_mul(SIDE);
    count == 0 || row >= width && rows.len() >= span(count, row, width)
}

/// The position of an element's high term in the right operand.
const fn b_position(chunks: usize, (k, column): (usize, usize)) -> usize {
    (column / SIDE * chunks + k / DEPTH) * TERMS * BLOCK + k % SIDE * DEPTH + column % SIDE * 2 + k % DEPTH / SIDE
}

fn set_b(out: &mut [bf16], chunks: usize, at: (usize, usize), parts: [bf16; TERMS]) {
    let at = b_position(chunks, at);
    parts.into_iter().enumerate().for_each(|(term, part)| out[at + term * BLOCK] = part);
}

/// A sum of up to 2¹⁵ products of numbers below this bound is finite, and every such number can be split.
const LARGE: f32 = (1u64 << 56) as f32;

/// Calls `found` with the row, the column and the value of every element that is not below [`LARGE`].
fn for_each_large(rows: &[f32], row: usize, count: usize, width: usize, mut found: impl FnMut(usize, usize, f32)) {
    for r in 0..count {
        for (k, &x) in rows[r * row..][..width].iter().enumerate() {
            let small = x.abs() < LARGE;
            if !small {
                found(r, k, x);
            }
        }
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    /// AMX, or `None` with a line that says that the test is skipped.
    fn unit() -> Option<Bf16x3Gemm> {
        let unit = Isa::available().into_iter().find_map(Bf16x3Gemm::new);
        if unit.is_none() {
            println!("skipped: no AMX on this CPU");
        }
        unit
    }

    /// Numbers of either sign and many magnitudes, using all bits of an f32.
    fn number(i: usize, j: usize) -> f32 {
        let bits = (i as u64 * 0x9e37_79b9 + j as u64 * 0x85eb_ca6b + 12345).wrapping_mul(0x2545_f491_4f6c_dd1d);
        let size = f32::from_bits(0x3f80_0000 | (bits >> 41) as u32) * [0.25, 1.0, 0.5, 0.03][(bits >> 9) as usize % 4];
        if bits & 1 == 0 { size } else { -size }
    }

    /// Rows of `width` elements with stride `row`, with zeros between.
    fn rows(count: usize, width: usize, row: usize, seed: usize) -> Vec<f32> {
        (0..count * row).map(|x| if x % row < width { number(x / row + seed, x % row) } else { 0.0 }).collect()
    }

    fn side(x: usize) -> usize {
        x.div_ceil(SIDE) * SIDE
    }

    fn across(rows: &[f32], row: usize, count: usize, width: usize) -> Vec<f32> {
        (0..width * side(count))
            .map(|x| if x % side(count) < count { rows[x % side(count) * row + x / side(count)] } else { 0.0 })
            .collect()
    }

    #[test]
    fn every_way_to_pack_an_operand_gives_the_same_product_to_f32_accuracy() {
        let Some(unit) = unit() else { return };
        for (m, n, k) in
            [(1, 1, 1), (16, 16, 32), (5, 40, 64), (64, 128, 20), (33, 17, 130), (48, 96, 96), (32, 80, 256)]
        {
            let (a, b) = (rows(side(m), k, side(k), 7), rows(n, k, side(k), 9));
            let (panels, chunks) = (side(n) / SIDE, padded_depth(k) / DEPTH);
            let mut left = vec![bf16::NAN; side(m) * packed_a_len(k)];
            assert!(unit.pack_a(&a, side(k), side(m), k, &mut left));
            let mut columns = vec![bf16::NAN; packed_b_len(k, n)];
            assert!(unit.pack_b_transposed(&b, side(k), n, k, &mut columns));
            let mut straight = vec![bf16::NAN; packed_b_len(k, n)];
            assert!(unit.pack_b(&across(&b, side(k), n, k), side(n), k, panels, &mut straight));
            assert_eq!(columns, straight, "{m} {n} {k}");
            let (row, low_row) = (padded_depth(k) + 32, padded_depth(k) + 16);
            let mut tile = vec![f32::NAN; side(m) * row];
            (0..side(m)).for_each(|r| tile[r * row..][..side(k)].copy_from_slice(&a[r * side(k)..][..side(k)]));
            let mut low = vec![bf16::NAN; side(m) * low_row];
            unit.split_rows(&mut tile, row, side(m), side(k), &mut low, low_row);

            let right = SplitB { data: &columns, chunks };
            let in_place = SplitA { high: crate::bf16_gemm::as_bf16(&tile), row: 2 * row, low: &low, low_row };
            let c_row = side(n) + 16;
            let mut c = vec![1.0f32; side(m) * c_row];
            unit.product(Target::add_partial(&mut c, c_row), in_place, right, m, 0..panels, 0..chunks);
            let mut whole = vec![f32::NAN; side(m) * c_row];
            unit.product(Target::overwrite(&mut whole, c_row), SplitA::rows(&left, k), right, m, 0..panels, 0..chunks);
            for i in 0..m {
                for j in 0..n {
                    let products = (0..k).map(|x| f64::from(a[i * side(k) + x]) * f64::from(b[j * side(k) + x]));
                    let (truth, size): (f64, f64) =
                        products.fold((0.0, 0.0), |(sum, size), x| (sum + x, size + x.abs()));
                    // Chains of 16 within a chunk, then six additions per chunk, each no larger than the sum of
                    // magnitudes.
                    let bound = size * f64::from(f32::EPSILON) * (1.0 + 0.5 * (16.0 + 6.0 * chunks as f64));
                    let found = whole[i * c_row + j];
                    assert!((f64::from(found) - truth).abs() <= bound, "{m} {n} {k}: {found} {truth}");
                    assert_eq!(c[i * c_row + j], 1.0 + found, "{m} {n} {k}");
                }
                assert_eq!(c[i * c_row + side(n)..(i + 1) * c_row], [1.0; 16]);
            }
            // The bits are the same panel by panel and for other numbers of rows.
            for tall in [SIDE, 2 * SIDE] {
                let mut parts = vec![7.0f32; side(m) * c_row];
                for first in (0..side(m)).step_by(tall) {
                    let left = SplitA::rows(&left[first * packed_a_len(k)..], k);
                    for panel in 0..panels {
                        let c = Target::overwrite(&mut parts[first * c_row..], c_row);
                        unit.product(c, left, right, tall.min(side(m) - first), panel..panel + 1, 0..chunks);
                    }
                }
                (0..m).for_each(|i| assert_eq!(whole[i * c_row..][..n], parts[i * c_row..][..n], "{m} {n} {k}"));
            }
        }
    }

    #[test]
    fn errors_are_about_half_of_those_of_a_chain_of_multiply_adds() {
        let Some(unit) = unit() else { return };
        for k in [64, 128] {
            let (a, b) = (rows(64, k, k, 3), rows(64, k, k, 1000));
            let (mut left, mut right) = (vec![bf16::ZERO; 64 * packed_a_len(k)], vec![bf16::ZERO; packed_b_len(k, 64)]);
            unit.pack_a(&a, k, 64, k, &mut left);
            unit.pack_b_transposed(&b, k, 64, k, &mut right);
            let (mut c, chunks) = (vec![0.0f32; 64 * 64], k / DEPTH);
            let right = SplitB { data: &right, chunks };
            unit.product(Target::overwrite(&mut c, 64), SplitA::rows(&left, k), right, 64, 0..4, 0..chunks);
            let (mut ours, mut chains) = (0.0, 0.0);
            for (at, &found) in c.iter().enumerate() {
                let (a, b) = (&a[at / 64 * k..][..k], &b[at % 64 * k..][..k]);
                let truth: f64 = a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
                let chain = a.iter().zip(b).fold(0.0f32, |sum, (a, &b)| a.mul_add(b, sum));
                ours += (f64::from(found) - truth).powi(2);
                chains += (f64::from(chain) - truth).powi(2);
            }
            assert!(ours < 0.6 * 0.6 * chains, "{k}: {ours} {chains}");
        }
    }

    #[test]
    fn elements_are_the_sum_of_their_terms_and_non_finite_ones_are_reconstructed() {
        let Some(unit) = unit() else { return };
        let (large, huge) = (f32::from_bits(0x7f7f_ffff), f32::from_bits(0xff12_3456));
        let mut x = rows(2, 40, 48, 5);
        for (at, special) in
            [(3, large), (20, f32::INFINITY), (39, huge), (48 + 17, f32::NAN), (48 + 35, f32::NEG_INFINITY)]
        {
            x[at] = special;
        }
        let mut left = vec![bf16::ZERO; 2 * packed_a_len(40)];
        assert!(!unit.pack_a(&x, 48, 2, 40, &mut left));
        let mut right = vec![bf16::ZERO; packed_b_len(40, 2)];
        assert!(!unit.pack_b_transposed(&x, 48, 2, 40, &mut right));
        let mut rows = vec![bf16::ZERO; packed_b_len(2, 48)];
        assert!(!unit.pack_b(&x, 48, 2, 3, &mut rows));
        for (r, k) in (0..2).flat_map(|r| (0..40).map(move |k| (r, k))) {
            let (is, row) = (x[r * 48 + k], &left[r * packed_a_len(40)..]);
            let same = |found: f32, is: f32| found.to_bits() == is.to_bits() || found.is_nan() && is.is_nan();
            assert!(same(Bf16x3Gemm::reconstruct_a(row, 40, k), is), "{r} {k}: {is}");
            assert!(same(Bf16x3Gemm::reconstruct_b(SplitB { data: &right, chunks: 2 }, k, r), is), "{r} {k}: {is}");
            assert!(same(Bf16x3Gemm::reconstruct_b(SplitB { data: &rows, chunks: 1 }, r, k), is), "{r} {k}: {is}");
            assert_eq!(Bf16x3Gemm::leading_term(row, k) == bf16::ZERO, is == 0.0);
        }
    }

    #[test]
    fn sizes_that_overflow_are_refused() {
        let Some(unit) = unit() else { return };
        let (rows, huge) = ([0.0f32; 64], usize::MAX / 16 + 2);
        // By our own check, not by the overflow check of an operation, which release builds omit.
        let refused = |call: &mut dyn FnMut()| {
            let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).unwrap_err();
            let words = panic.downcast_ref::<&str>().copied().unwrap_or_default();
            assert!(words.contains("too short"), "{words}");
        };
        // Products of these wrap around to small numbers.
        refused(&mut || _ = unit.pack_a(&rows, huge, 17, 16, &mut [bf16::ZERO; 17 * packed_a_len(16)]));
        refused(&mut || _ = unit.pack_b(&rows, 16, 1, huge, &mut [bf16::ZERO; 3 * BLOCK]));
        refused(&mut || unit.split_rows(&mut [0.0; 64], huge & !15, 16, 16, &mut [bf16::ZERO; 64], 32));
        let (data, mut c) = ([bf16::ZERO; 3 * BLOCK], [0.0; 256]);
        let (left, right) = (SplitA::rows(&data, 32), SplitB { data: &data, chunks: huge });
        refused(&mut || unit.product(Target::overwrite(&mut c, 16), left, right, 16, 0..1, 0..1));
    }
}
