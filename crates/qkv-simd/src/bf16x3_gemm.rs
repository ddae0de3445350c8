//! Products of f32 on the unit that multiplies bf16: a number of 24 bits is the sum of three of 8, its *thirds*.
//!
//! Of the nine products of two numbers' thirds six count. The three that are left out, those of a last third with a last or a middle
//! one, are at most 2⁻²⁴ of the whole, one rounding to f32, and mostly less than 2⁻²⁷. The tile unit sums 32 products before it adds
//! them to what is there, so a sum is rounded far less often than in a chain of multiply-adds: over 64 numbers its error is half as
//! large. And the unit is sixteen times as fast as multiply-adds, so six products on it take less than half the time of one of theirs.
//!
//! Both operands have *chunks* of [`DEPTH`] numbers of the depth, in which the numbers 0 and 16, 1 and 17 and so on are side by side:
//! that is how two vectors of f32 fall into pairs with no shuffle. A chunk of a left operand's row is its first thirds and then its middle
//! ones, which take as much room as the numbers took; the last thirds lie elsewhere. A chunk of a right operand is three blocks.
//!
//! What is not finite has no thirds, and is packed so that [`Bf16x3Gemm::reconstruct_a`] still tells what it was. Products of very large numbers overflow,
//! and since thirds have signs of their own, a sum of such may be NaN where it should be ∞, or even finite. Whoever packs is told where
//! that may be: see [`Bf16x3Gemm::pack_a`].

pub use crate::bf16_gemm::{BLOCK, DEPTH, SIDE, padded_depth};
use crate::bf16_gemm::{Bf16Gemm, packed_b_len as bf16_packed_b_len};
use crate::isa::{Isa, Level};
use crate::product::{Target, Update};
use crate::span;
use half::bf16;
use std::ops::Range;

#[cfg(target_arch = "x86_64")]
mod x86;

/// Bf16x3Gemm of a number.
const TERMS: usize = 3;

/// The bf16 that a row of `width` numbers takes as a left operand, its last thirds after the others.
pub const fn packed_a_len(width: usize) -> usize {
    padded_depth(width).saturating_mul(TERMS)
}

/// The bf16 that a right operand of that depth and width takes.
pub const fn packed_b_len(depth: usize, width: usize) -> usize {
    bf16_packed_b_len(depth, width).saturating_mul(TERMS)
}

/// Rows of first and middle thirds, and those of last thirds, at their distances.
#[derive(Clone, Copy, Debug)]
pub struct SplitA<'a> {
    /// The first and the middle thirds, chunk by chunk.
    pub high: &'a [bf16],
    /// From one row of them to the next.
    pub row: usize,
    /// The last thirds.
    pub low: &'a [bf16],
    /// From one row of them to the next.
    pub low_row: usize,
}

impl<'a> SplitA<'a> {
    /// Rows of `width` numbers whose last thirds come after the others.
    pub fn rows(data: &'a [bf16], width: usize) -> Self {
        let row = packed_a_len(width);
        SplitA { high: data, row, low: data.get(2 * padded_depth(width)..).unwrap_or_default(), low_row: row }
    }
}

/// Chunks of three blocks, all of the first panel and then of the next.
#[derive(Clone, Copy, Debug)]
pub struct SplitB<'a> {
    /// The numbers.
    pub data: &'a [bf16],
    /// Chunks in a panel.
    pub chunks: usize,
}

/// The tile unit, ready on this thread for as long as this lives, to multiply f32.
#[derive(Debug)]
pub struct Bf16x3Gemm {
    /// Holds the unit.
    _unit: Bf16Gemm,
}

/// The thirds of a number. What is not finite is its own first third, and a number that would round to no finite one is cut instead.
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

/// Where a number of the depth lies in its chunk of a row.
const fn position_in_chunk(k: usize) -> usize {
    k % SIDE * 2 + k % DEPTH / SIDE
}

/// Where the thirds of a number lie in its row of a left operand.
fn a_positions(width: usize, k: usize) -> [usize; TERMS] {
    let chunk = k / DEPTH * DEPTH;
    [2 * chunk, 2 * chunk + DEPTH, 2 * padded_depth(width) + chunk].map(|at| at + position_in_chunk(k))
}

fn set_a(row: &mut [bf16], width: usize, k: usize, parts: [bf16; TERMS]) {
    a_positions(width, k).into_iter().zip(parts).for_each(|(at, part)| row[at] = part);
}

impl Bf16x3Gemm {
    /// Whether the instruction set has the unit.
    pub fn available(isa: Isa) -> bool {
        isa.level() == Level::Amx
    }

    /// Makes the unit ready on this thread, if there is one.
    pub fn new(isa: Isa) -> Option<Bf16x3Gemm> {
        if !Bf16x3Gemm::available(isa) {
            return None;
        }
        Some(Bf16x3Gemm { _unit: Bf16Gemm::new(isa)? })
    }

    /// `C = A · B`, or a sum that begins from zero added to `C`, over some panels of `C` and some chunks of the depth. Rows are computed
    /// in whole [`SIDE`]s: `A` and `C` have memory for these, and what `C` holds beyond the last row that is asked for may be
    /// overwritten with anything.
    ///
    /// An element of `C` is a function of its row of `A`, its column of `B` and the chunks alone.
    ///
    /// # Panics
    /// Where a slice is too short for what is asked, or the sum is to begin with what is there.
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
        assert!(c.update != Update::Accumulate, "sums of thirds begin anew");
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
        // SAFETY: every row, panel and chunk lies inside its slice, as just checked; `self` exists only where the unit does,
        // and is set up on this thread, which it cannot leave.
        unsafe {
            x86::product(c, a, b, rows, panels, chunks);
        }
    }

    /// The left operand whose rows are these: `count` rows at distance `row`, of `width` numbers and zeros to the end of the panel.
    /// Says whether all of them are so small that no sum of products of such numbers overflows; else what is not finite in a product has to be
    /// made again by other means. What is not finite here is its own first third, and the other two are zero.
    ///
    /// # Panics
    /// Where a slice is too short.
    pub fn pack_a(&self, rows: &[f32], row: usize, count: usize, width: usize, out: &mut [bf16]) -> bool {
        assert!(
            long_enough(rows, row, count, width) && out.len() >= count.saturating_mul(packed_a_len(width)),
            "too short"
        );
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the lengths were checked; `self` exists only where the instruction set does.
        if unsafe { x86::pack_a(rows, row, count, width.div_ceil(SIDE), out) } {
            return true;
        }
        for_each_large(rows, row, count, width, |r, k, x| {
            set_a(&mut out[r * packed_a_len(width)..], width, k, split(x));
        });
        false
    }

    /// The right operand whose columns are these rows. Says whether all are small, as [`pack_a`](Bf16x3Gemm::pack_a).
    ///
    /// # Panics
    /// Where a slice is too short.
    pub fn pack_b_transposed(&self, rows: &[f32], row: usize, count: usize, width: usize, out: &mut [bf16]) -> bool {
        assert!(long_enough(rows, row, count, width) && out.len() >= packed_b_len(width, count), "too short");
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the lengths were checked; `self` exists only where the instruction set does.
        if unsafe { x86::pack_b_transposed(rows, row, count, width.div_ceil(SIDE), out) } {
            return true;
        }
        let chunks = padded_depth(width) / DEPTH;
        for_each_large(rows, row, count, width, |j, k, x| set_b(out, chunks, (k, j), split(x)));
        false
    }

    /// The right operand whose rows are these, `panels` panels wide. Says whether all are small, as [`pack_a`](Bf16x3Gemm::pack_a).
    ///
    /// # Panics
    /// Where a slice is too short.
    pub fn pack_b(&self, rows: &[f32], row: usize, count: usize, panels: usize, out: &mut [bf16]) -> bool {
        let width = panels.saturating_mul(SIDE);
        assert!(long_enough(rows, row, count, width) && out.len() >= packed_b_len(count, width), "too short");
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the lengths were checked; `self` exists only where the instruction set does.
        if unsafe { x86::pack_b(rows, row, count, panels, out) } {
            return true;
        }
        let chunks = padded_depth(count) / DEPTH;
        for_each_large(rows, row, count, width, |k, j, x| set_b(out, chunks, (k, j), split(x)));
        false
    }

    /// Rows of `width` f32 become a left operand where they lie, but for their last thirds, which go to `low`, at distance
    /// `low_row`. They are small enough to have thirds, or NaN.
    ///
    /// # Panics
    /// Where a slice is too short, or the width is not whole panels.
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
        let room = low_row >= padded_depth(width) && low.len() >= rows.saturating_mul(low_row);
        assert!(room, "no room for the last thirds");
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the lengths were checked; `self` exists only where the instruction set does.
        unsafe {
            x86::split_rows(tile, row, rows, width / SIDE, low, low_row);
        }
    }

    /// The number of a row of a left operand, made from its thirds.
    pub fn reconstruct_a(row: &[bf16], width: usize, k: usize) -> f32 {
        let [first, middle, last] = a_positions(width, k).map(|at| row[at].to_f32());
        first + (middle + last)
    }

    /// The first third of a number of a left operand's row: zero where the number is.
    pub fn leading_term(row: &[bf16], k: usize) -> bf16 {
        row[a_positions(0, k)[0]]
    }

    /// The number of a right operand, made from its thirds.
    pub fn reconstruct_b(right: SplitB<'_>, k: usize, column: usize) -> f32 {
        let at = b_position(right.chunks, (k, column));
        let [first, middle, last] = [0, 1, 2].map(|third| right.data[at + third * BLOCK].to_f32());
        first + (middle + last)
    }
}

/// Whether rows at that distance hold `width` numbers to the end of the panel.
fn long_enough(rows: &[f32], row: usize, count: usize, width: usize) -> bool {
    let width = width.div_ceil(SIDE).saturating_mul(SIDE);
    count == 0 || row >= width && rows.len() >= span(count, row, width)
}

/// Where the first third of a number of a right operand lies.
const fn b_position(chunks: usize, (k, column): (usize, usize)) -> usize {
    (column / SIDE * chunks + k / DEPTH) * TERMS * BLOCK + k % SIDE * DEPTH + column % SIDE * 2 + k % DEPTH / SIDE
}

fn set_b(out: &mut [bf16], chunks: usize, at: (usize, usize), parts: [bf16; TERMS]) {
    let at = b_position(chunks, at);
    parts.into_iter().enumerate().for_each(|(third, part)| out[at + third * BLOCK] = part);
}

/// Sums of up to 2¹⁵ products of numbers below this are finite. And all of these have thirds.
const LARGE: f32 = (1u64 << 56) as f32;

/// Calls `found` for every number that is not small: its row, its place there, and what it is.
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

    /// Without a tile unit there is nothing of this module to test: [`Bf16x3Gemm::new`] gives none, and nobody calls the rest.
    fn unit() -> Option<Bf16x3Gemm> {
        Isa::available().into_iter().find_map(Bf16x3Gemm::new)
    }

    /// Numbers of either sign and many sizes, with all bits of an f32.
    fn number(i: usize, j: usize) -> f32 {
        let bits = (i as u64 * 0x9e37_79b9 + j as u64 * 0x85eb_ca6b + 12345).wrapping_mul(0x2545_f491_4f6c_dd1d);
        let size = f32::from_bits(0x3f80_0000 | (bits >> 41) as u32) * [0.25, 1.0, 0.5, 0.03][(bits >> 9) as usize % 4];
        if bits & 1 == 0 { size } else { -size }
    }

    /// Rows of `width` numbers at distance `row`, zeros between.
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
    fn every_way_to_an_operand_gives_the_same_product_and_it_is_that_of_f32() {
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
                    // Within a chunk chains of 16, then six additions for each chunk, all of them no larger than the size.
                    let bound = size * f64::from(f32::EPSILON) * (1.0 + 0.5 * (16.0 + 6.0 * chunks as f64));
                    let found = whole[i * c_row + j];
                    assert!((f64::from(found) - truth).abs() <= bound, "{m} {n} {k}: {found} {truth}");
                    assert_eq!(c[i * c_row + j], 1.0 + found, "{m} {n} {k}");
                }
                assert_eq!(c[i * c_row + side(n)..(i + 1) * c_row], [1.0; 16]);
            }
            // Panel by panel and in other heights, the bits are the same.
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
    fn an_error_is_half_of_that_of_a_chain() {
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
    fn numbers_are_the_sum_of_their_thirds_and_what_is_not_finite_is_found_again() {
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
    fn what_is_too_large_to_count_is_refused() {
        let Some(unit) = unit() else { return };
        let (rows, huge) = ([0.0f32; 64], usize::MAX / 16 + 2);
        // By our own check, not by that of an operation, which a release build does not make.
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
