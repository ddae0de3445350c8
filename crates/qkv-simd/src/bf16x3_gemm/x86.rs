//! The kernels of [`bf16x3_gemm`](super) for x86-64.

// SAFETY, for the whole module: every function requires the instruction set that it uses, and slices of the lengths
// that the parent module checks before it calls.
#![allow(unsafe_op_in_unsafe_fn, clippy::missing_safety_doc)]

use super::{BLOCK, DEPTH, LARGE, SIDE, SplitA, SplitB, TERMS, packed_a_len};
use crate::lanes::avx512::transpose;
use crate::product::{Target, Update};
use half::bf16;
use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Bytes in a chunk of the right operand.
const CHUNK: usize = TERMS * 2 * BLOCK;

/// Two by two tiles of partial sums, before they are added to C.
#[repr(C, align(64))]
struct PartialTiles([f32; 4 * SIDE * SIDE]);

/// `C = A · B`, or `C` plus it, two by two tiles at a time.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn product(
    c: Target<'_, f32>,
    a: SplitA<'_>,
    b: SplitB<'_>,
    rows: usize,
    panels: Range<usize>,
    chunks: Range<usize>,
) {
    let mut sums = MaybeUninit::<PartialTiles>::uninit();
    let sums = sums.as_mut_ptr().cast::<f32>();
    let (high_row, low_row) = (2 * a.row, 2 * a.low_row);
    for row in (0..rows).step_by(2 * SIDE) {
        let high = a.high.as_ptr().add(row * a.row + chunks.start * 2 * DEPTH).cast();
        let low = a.low.as_ptr().add(row * a.low_row + chunks.start * DEPTH).cast();
        let tall = (rows - row).min(2 * SIDE);
        for panel in panels.clone().step_by(2) {
            let wide = (panels.end - panel).min(2) * SIDE;
            let right = b.data.as_ptr().cast::<u8>().add((panel * b.chunks + chunks.start) * CHUNK);
            let to = c.data.as_mut_ptr().add(row * c.row + panel * SIDE);
            let added = matches!(c.update, Update::AddPartial { .. });
            let (stored, c_row) = if added { (sums, 2 * SIDE) } else { (to, c.row) };
            let tile = SplitTile {
                to: stored.cast(),
                c_row: 4 * c_row,
                high,
                high_row,
                low,
                low_row,
                right,
                panel: b.chunks * CHUNK,
                steps: chunks.len(),
            };
            match (tall > SIDE, wide > SIDE) {
                (true, true) => tile.two_by_two(),
                (true, false) => tile.two_by_one(),
                (false, true) => tile.one_by_two(),
                (false, false) => tile.one_by_one(),
            }
            if added {
                for r in 0..tall {
                    for x in (0..wide).step_by(SIDE) {
                        let to = to.add(r * c.row + x);
                        let sum = _mm512_load_ps(sums.add(r * 2 * SIDE + x));
                        _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), sum));
                    }
                }
            }
        }
    }
}

/// The addresses of up to two by two tiles of `C` and of their operands, with distances in bytes.
struct SplitTile {
    to: *mut u8,
    c_row: usize,
    high: *const u8,
    high_row: usize,
    low: *const u8,
    low_row: usize,
    right: *const u8,
    /// The distance between panels of B.
    panel: usize,
    steps: usize,
}

/// Clears the tiles of C, loops over the depth, and stores them. Every loaded tile is used by all products that need it
/// before its register is reused. The order of the six products is the same in all shapes, so an element's bits do not
/// depend on its neighbors.
macro_rules! walk {
    (
        $self:ident, clear: $($clear:literal)*; step: $($step:literal)*;
        store: $($store:literal)*; lower: $($lower:literal)*
    ) => {
        asm!(
            "/* one tile high needs no {h2}, {l2}, one wide no {b2} */",
            $($clear,)*
            "2:",
            $($step,)*
            "add {h}, 128", "add {h2}, 128",
            "add {l}, 64", "add {l2}, 64",
            "add {b}, 3072", "add {b2}, 3072",
            "dec {steps}",
            "jnz 2b",
            $($store,)*
            "shl {cs}, 4", "add {c}, {cs}", "shr {cs}, 4",
            $($lower,)*
            c = inout(reg) $self.to => _,
            cs = inout(reg) $self.c_row => _,
            h = inout(reg) $self.high => _,
            h2 = inout(reg) $self.high.wrapping_add(SIDE * $self.high_row) => _,
            hs = in(reg) $self.high_row,
            l = inout(reg) $self.low => _,
            l2 = inout(reg) $self.low.wrapping_add(SIDE * $self.low_row) => _,
            ls = in(reg) $self.low_row,
            b = inout(reg) $self.right => _,
            b2 = inout(reg) $self.right.wrapping_add($self.panel) => _,
            bs = in(reg) 64usize,
            steps = inout(reg) $self.steps => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        )
    };
}

impl SplitTile {
    #[inline(always)]
    unsafe fn two_by_two(self) {
        walk!(self,
            clear: "tilezero tmm0" "tilezero tmm1" "tilezero tmm2" "tilezero tmm3";
            // A high × B low, middle and high; then A low and A middle × B high; then A middle × B middle.
            step: "tileloadd tmm4, [{h} + {hs}]"
                  "tileloaddt1 tmm6, [{b} + {bs} + 2048]" "tdpbf16ps tmm0, tmm4, tmm6"
                  "tileloaddt1 tmm7, [{b2} + {bs} + 2048]" "tdpbf16ps tmm1, tmm4, tmm7"
                  "tileloadd tmm5, [{h2} + {hs}]" "tdpbf16ps tmm2, tmm5, tmm6" "tdpbf16ps tmm3, tmm5, tmm7"
                  "tileloaddt1 tmm6, [{b} + {bs} + 1024]" "tdpbf16ps tmm0, tmm4, tmm6" "tdpbf16ps tmm2, tmm5, tmm6"
                  "tileloaddt1 tmm7, [{b2} + {bs} + 1024]" "tdpbf16ps tmm1, tmm4, tmm7" "tdpbf16ps tmm3, tmm5, tmm7"
                  "tileloaddt1 tmm6, [{b} + {bs}]" "tdpbf16ps tmm0, tmm4, tmm6" "tdpbf16ps tmm2, tmm5, tmm6"
                  "tileloaddt1 tmm7, [{b2} + {bs}]" "tdpbf16ps tmm1, tmm4, tmm7" "tdpbf16ps tmm3, tmm5, tmm7"
                  "tileloadd tmm4, [{l} + {ls}]" "tdpbf16ps tmm0, tmm4, tmm6" "tdpbf16ps tmm1, tmm4, tmm7"
                  "tileloadd tmm5, [{l2} + {ls}]" "tdpbf16ps tmm2, tmm5, tmm6" "tdpbf16ps tmm3, tmm5, tmm7"
                  "tileloadd tmm4, [{h} + {hs} + 64]" "tdpbf16ps tmm0, tmm4, tmm6" "tdpbf16ps tmm1, tmm4, tmm7"
                  "tileloadd tmm5, [{h2} + {hs} + 64]" "tdpbf16ps tmm2, tmm5, tmm6" "tdpbf16ps tmm3, tmm5, tmm7"
                  "tileloaddt1 tmm6, [{b} + {bs} + 1024]" "tdpbf16ps tmm0, tmm4, tmm6" "tdpbf16ps tmm2, tmm5, tmm6"
                  "tileloaddt1 tmm7, [{b2} + {bs} + 1024]" "tdpbf16ps tmm1, tmm4, tmm7" "tdpbf16ps tmm3, tmm5, tmm7";
            store: "tilestored [{c} + {cs}], tmm0" "tilestored [{c} + {cs} + 64], tmm1";
            lower: "tilestored [{c} + {cs}], tmm2" "tilestored [{c} + {cs} + 64], tmm3")
    }

    #[inline(always)]
    unsafe fn two_by_one(self) {
        walk!(self,
            clear: "tilezero tmm0" "tilezero tmm2";
            step: "tileloaddt1 tmm6, [{b} + {bs} + 2048]"
                  "tileloadd tmm4, [{h} + {hs}]" "tdpbf16ps tmm0, tmm4, tmm6"
                  "tileloadd tmm5, [{h2} + {hs}]" "tdpbf16ps tmm2, tmm5, tmm6"
                  "tileloaddt1 tmm7, [{b} + {bs} + 1024]" "tdpbf16ps tmm0, tmm4, tmm7" "tdpbf16ps tmm2, tmm5, tmm7"
                  "tileloaddt1 tmm6, [{b} + {bs}]" "tdpbf16ps tmm0, tmm4, tmm6" "tdpbf16ps tmm2, tmm5, tmm6"
                  "tileloadd tmm4, [{l} + {ls}]" "tdpbf16ps tmm0, tmm4, tmm6"
                  "tileloadd tmm5, [{l2} + {ls}]" "tdpbf16ps tmm2, tmm5, tmm6"
                  "tileloadd tmm4, [{h} + {hs} + 64]" "tdpbf16ps tmm0, tmm4, tmm6"
                  "tileloadd tmm5, [{h2} + {hs} + 64]" "tdpbf16ps tmm2, tmm5, tmm6"
                  "tdpbf16ps tmm0, tmm4, tmm7" "tdpbf16ps tmm2, tmm5, tmm7";
            store: "tilestored [{c} + {cs}], tmm0";
            lower: "tilestored [{c} + {cs}], tmm2")
    }

    #[inline(always)]
    unsafe fn one_by_two(self) {
        walk!(self,
            clear: "tilezero tmm0" "tilezero tmm1";
            step: "tileloadd tmm4, [{h} + {hs}]"
                  "tileloaddt1 tmm6, [{b} + {bs} + 2048]" "tdpbf16ps tmm0, tmm4, tmm6"
                  "tileloaddt1 tmm7, [{b2} + {bs} + 2048]" "tdpbf16ps tmm1, tmm4, tmm7"
                  "tileloaddt1 tmm2, [{b} + {bs} + 1024]" "tdpbf16ps tmm0, tmm4, tmm2"
                  "tileloaddt1 tmm3, [{b2} + {bs} + 1024]" "tdpbf16ps tmm1, tmm4, tmm3"
                  "tileloaddt1 tmm6, [{b} + {bs}]" "tdpbf16ps tmm0, tmm4, tmm6"
                  "tileloaddt1 tmm7, [{b2} + {bs}]" "tdpbf16ps tmm1, tmm4, tmm7"
                  "tileloadd tmm5, [{l} + {ls}]" "tdpbf16ps tmm0, tmm5, tmm6" "tdpbf16ps tmm1, tmm5, tmm7"
                  "tileloadd tmm4, [{h} + {hs} + 64]" "tdpbf16ps tmm0, tmm4, tmm6" "tdpbf16ps tmm1, tmm4, tmm7"
                  "tdpbf16ps tmm0, tmm4, tmm2" "tdpbf16ps tmm1, tmm4, tmm3";
            store: "tilestored [{c} + {cs}], tmm0" "tilestored [{c} + {cs} + 64], tmm1";
            lower: )
    }

    #[inline(always)]
    unsafe fn one_by_one(self) {
        walk!(self,
            clear: "tilezero tmm0";
            step: "tileloadd tmm4, [{h} + {hs}]"
                  "tileloaddt1 tmm6, [{b} + {bs} + 2048]" "tdpbf16ps tmm0, tmm4, tmm6"
                  "tileloaddt1 tmm7, [{b} + {bs} + 1024]" "tdpbf16ps tmm0, tmm4, tmm7"
                  "tileloaddt1 tmm6, [{b} + {bs}]" "tdpbf16ps tmm0, tmm4, tmm6"
                  "tileloadd tmm5, [{l} + {ls}]" "tdpbf16ps tmm0, tmm5, tmm6"
                  "tileloadd tmm4, [{h} + {hs} + 64]" "tdpbf16ps tmm0, tmm4, tmm6" "tdpbf16ps tmm0, tmm4, tmm7";
            store: "tilestored [{c} + {cs}], tmm0";
            lower: )
    }
}

/// The high, middle and low terms of two vectors, interleaved lane by lane. Rounds half away from zero, with integer
/// arithmetic.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn split_pair(x: __m512, y: __m512) -> [__m512i; TERMS] {
    const UPPER_HALVES: __mmask32 = 0xaaaa_aaaa;
    let mut both = split_lanes(x);
    for (both, y) in both.iter_mut().zip(split_lanes(y)) {
        *both = _mm512_mask_blend_epi16(UPPER_HALVES, _mm512_srli_epi32::<16>(*both), y);
    }
    both
}

/// The three terms of each lane, in the upper half of the lane; the lower half is arbitrary.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn split_lanes(x: __m512) -> [__m512i; TERMS] {
    let (half, top) = (_mm512_set1_epi32(0x8000), _mm512_set1_epi32(0xffff_0000_u32 as i32));
    let first = _mm512_add_epi32(_mm512_castps_si512(x), half);
    let rest = _mm512_sub_ps(x, _mm512_castsi512_ps(_mm512_and_si512(first, top)));
    let middle = _mm512_add_epi32(_mm512_castps_si512(rest), half);
    let last = _mm512_sub_ps(rest, _mm512_castsi512_ps(_mm512_and_si512(middle, top)));
    [first, middle, _mm512_castps_si512(last)]
}

/// Stores a chunk of a row of the left operand.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn store_a(high: *mut bf16, low: *mut bf16, [first, middle, last]: [__m512i; TERMS]) {
    _mm512_storeu_si512(high.cast(), first);
    _mm512_storeu_si512(high.add(DEPTH).cast(), middle);
    _mm512_storeu_si512(low.cast(), last);
}

/// The largest magnitude so far, compared by its bits.
#[derive(Clone, Copy)]
struct Largest(__m512i);

impl Largest {
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn new() -> Self {
        Largest(_mm512_setzero_si512())
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn see(&mut self, x: __m512) {
        let size = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(i32::MAX));
        self.0 = _mm512_max_epi32(self.0, size);
    }

    /// Whether all are below [`LARGE`].
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn is_small(self) -> bool {
        _mm512_cmplt_epi32_mask(self.0, _mm512_set1_epi32(LARGE.to_bits() as i32)) == u16::MAX
    }
}

/// Panels 2·`chunk` and 2·`chunk` + 1 of a row of `panels`; zeros beyond the last.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn two_panels(row: *const f32, chunk: usize, panels: usize) -> (__m512, __m512) {
    let from = row.add(chunk * DEPTH);
    let there = 2 * chunk + 1 < panels;
    (_mm512_loadu_ps(from), if there { _mm512_loadu_ps(from.add(SIDE)) } else { _mm512_setzero_ps() })
}

#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn pack_a(rows: &[f32], row: usize, count: usize, panels: usize, out: &mut [bf16]) -> bool {
    let mut largest = Largest::new();
    let chunks = panels.div_ceil(2);
    for r in 0..count {
        let from = rows.as_ptr().add(r * row);
        let to = out.as_mut_ptr().add(r * packed_a_len(chunks * DEPTH));
        for chunk in 0..chunks {
            let (x, y) = two_panels(from, chunk, panels);
            largest.see(x);
            largest.see(y);
            store_a(to.add(chunk * 2 * DEPTH), to.add((2 * chunks + chunk) * DEPTH), split_pair(x, y));
        }
    }
    largest.is_small()
}

#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn split_rows(
    tile: &mut [f32],
    row: usize,
    rows: usize,
    panels: usize,
    low: &mut [bf16],
    low_row: usize,
) {
    for r in 0..rows {
        let (at, low) = (tile.as_mut_ptr().add(r * row), low.as_mut_ptr().add(r * low_row));
        for chunk in 0..panels.div_ceil(2) {
            let (x, y) = two_panels(at, chunk, panels);
            store_a(at.add(chunk * DEPTH).cast(), low.add(chunk * DEPTH), split_pair(x, y));
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn pack_b_transposed(
    rows: &[f32],
    row: usize,
    count: usize,
    panels: usize,
    out: &mut [bf16],
) -> bool {
    let mut largest = Largest::new();
    let chunks = panels.div_ceil(2);
    for panel in 0..count.div_ceil(SIDE) {
        for chunk in 0..chunks {
            let mut columns = [[_mm512_setzero_si512(); SIDE]; TERMS];
            for at in 0..SIDE.min(count - panel * SIDE) {
                let (x, y) = two_panels(rows.as_ptr().add((panel * SIDE + at) * row), chunk, panels);
                largest.see(x);
                largest.see(y);
                for (columns, term) in columns.iter_mut().zip(split_pair(x, y)) {
                    columns[at] = term;
                }
            }
            let to = out.as_mut_ptr().add((panel * chunks + chunk) * TERMS * BLOCK);
            for (term, columns) in columns.into_iter().enumerate() {
                for (pair, x) in transpose(columns).into_iter().enumerate() {
                    _mm512_storeu_si512(to.add(term * BLOCK + pair * DEPTH).cast(), x);
                }
            }
        }
    }
    largest.is_small()
}

/// A panel of the rows `at` and `at` + [`SIDE`]; rows from `count` on are zero.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn two_rows(from: *const f32, row: usize, at: usize, count: usize) -> (__m512, __m512) {
    let none = _mm512_setzero_ps();
    let first = if at < count { _mm512_loadu_ps(from.add(at * row)) } else { none };
    let second = if at + SIDE < count { _mm512_loadu_ps(from.add((at + SIDE) * row)) } else { none };
    (first, second)
}

#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn pack_b(rows: &[f32], row: usize, count: usize, panels: usize, out: &mut [bf16]) -> bool {
    let mut largest = Largest::new();
    let chunks = count.div_ceil(DEPTH);
    for chunk in 0..chunks {
        let (first, there) = (chunk * DEPTH, count - chunk * DEPTH);
        for pair in 0..SIDE {
            for panel in 0..panels {
                let (x, y) = two_rows(rows.as_ptr().add(first * row + panel * SIDE), row, pair, there);
                largest.see(x);
                largest.see(y);
                let to = out.as_mut_ptr().add((panel * chunks + chunk) * TERMS * BLOCK + pair * DEPTH);
                for (term, x) in split_pair(x, y).into_iter().enumerate() {
                    _mm512_storeu_si512(to.add(term * BLOCK).cast(), x);
                }
            }
        }
    }
    largest.is_small()
}
