//! The kernels of [`bf16_gemm`](super) for x86-64.

// SAFETY, for the whole module: every function requires the instruction set that it uses, and slices of the lengths
// that the parent module checks before it calls.
#![allow(unsafe_op_in_unsafe_fn, clippy::missing_safety_doc)]

use super::{BLOCK, DEPTH, PackedA, PackedB, RawTarget, SIDE};
use crate::lanes::avx512::transpose;
use crate::prefetch::prefetch_next_page;
use half::bf16;
use std::arch::asm;
use std::arch::x86_64::*;
use std::ops::Range;

/// The exponent bits of a bf16, all set if it is not finite.
const EXPONENT: i16 = 0x7f80;

/// Bytes in a block.
const BYTES: usize = 2 * BLOCK;

/// `C += A · B` with AMX, two by two tiles at a time.
pub(super) unsafe fn amx(
    c: RawTarget,
    a: PackedA<'_>,
    b: PackedB<'_>,
    rows: usize,
    panels: Range<usize>,
    chunks: Range<usize>,
) {
    let (steps, add) = (chunks.len(), c.add);
    let (c_row, a_row) = (c.row * 4, a.row * 2);
    for row in (0..rows).step_by(2 * SIDE) {
        let two_rows = row + SIDE < rows;
        let left = a.data.as_ptr().cast::<u8>().add(row * a_row + chunks.start * 2 * DEPTH);
        if two_rows && steps == 2 && !add {
            let to = c.data.cast::<u8>().add(row * c_row + panels.start * 4 * SIDE);
            let right = b.data.as_ptr().cast::<u8>().add((panels.start * b.chunks + chunks.start) * BYTES);
            let panel = b.chunks * BYTES;
            let at = Bf16Tile { to, c_row, left, a_row, right, panel, steps, add: false, non_temporal: b.non_temporal };
            at.shallow(panels.len());
            continue;
        }
        for panel in panels.clone().step_by(2) {
            let two_panels = panel + 1 < panels.end;
            let to = c.data.cast::<u8>().add(row * c_row + panel * 4 * SIDE);
            let right = b.data.as_ptr().cast::<u8>().add((panel * b.chunks + chunks.start) * BYTES);
            let panel = b.chunks * BYTES;
            let at = Bf16Tile { to, c_row, left, a_row, right, panel, steps, add, non_temporal: b.non_temporal };
            match (two_rows, two_panels) {
                (true, true) => at.two_by_two(),
                (true, false) => at.two_by_one(),
                (false, true) => at.one_by_two(),
                (false, false) => at.one_by_one(),
            }
        }
    }
}

/// The addresses of up to two by two tiles of `C` and of their operands, with distances in bytes.
struct Bf16Tile {
    to: *mut u8,
    c_row: usize,
    left: *const u8,
    a_row: usize,
    right: *const u8,
    /// The distance between panels of B.
    panel: usize,
    steps: usize,
    add: bool,
    non_temporal: bool,
}

/// Calls a macro with the instruction that loads a tile of B: the `t1` hint keeps it out of the first-level cache.
macro_rules! with_load_of_b {
    ($self:ident, $product:ident) => {
        if $self.non_temporal { $product!("tileloaddt1") } else { $product!("tileloadd") }
    };
}

/// Loads or clears the tiles of C, loops over the depth, and stores them.
macro_rules! walk {
    (
        $self:ident, load: $($load:literal)*; clear: $($clear:literal)*;
        step: $($step:expr),*; store: $($store:literal)*
    ) => {
        asm!(
            "/* one tile high needs no {c2} */",
            "test {add:e}, {add:e}",
            "jz 2f",
            $($load,)*
            "jmp 3f",
            "2:",
            $($clear,)*
            "3:",
            "test {steps}, {steps}",
            "jz 5f",
            "4:",
            $($step,)*
            "add {a}, 64",
            "add {a2}, 64",
            "add {b}, 1024",
            "add {b2}, 1024",
            "dec {steps}",
            "jnz 4b",
            "5:",
            $($store,)*
            add = in(reg) $self.add as u32,
            c = in(reg) $self.to,
            c2 = in(reg) $self.to.wrapping_add(SIDE * $self.c_row),
            cs = in(reg) $self.c_row,
            a = inout(reg) $self.left => _,
            a2 = inout(reg) $self.left.wrapping_add(SIDE * $self.a_row) => _,
            as_ = in(reg) $self.a_row,
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

impl Bf16Tile {
    /// Two tiles of rows over a depth of two chunks. All of A stays in registers while the panels of B are loaded, so a
    /// product costs half a load instead of one.
    #[inline(always)]
    unsafe fn shallow(self, panels: usize) {
        macro_rules! product {
            ($load:literal) => {
                asm!(
                    "tileloadd tmm4, [{a} + {as_}]", "tileloadd tmm5, [{a} + {as_} + 64]",
                    "tileloadd tmm6, [{a2} + {as_}]", "tileloadd tmm7, [{a2} + {as_} + 64]",
                    "2:",
                    "tilezero tmm0", "tilezero tmm1",
                    concat!($load, " tmm2, [{b} + {bs}]"), "tdpbf16ps tmm0, tmm4, tmm2", "tdpbf16ps tmm1, tmm6, tmm2",
                    concat!($load, " tmm3, [{b} + {bs} + 1024]"),
                    "tdpbf16ps tmm0, tmm5, tmm3", "tdpbf16ps tmm1, tmm7, tmm3",
                    "tilestored [{c} + {cs}], tmm0", "tilestored [{c2} + {cs}], tmm1",
                    "add {c}, 64", "add {c2}, 64", "add {b}, {panel}",
                    "dec {panels}",
                    "jnz 2b",
                    a = in(reg) self.left,
                    a2 = in(reg) self.left.wrapping_add(SIDE * self.a_row),
                    as_ = in(reg) self.a_row,
                    b = inout(reg) self.right => _,
                    bs = in(reg) 64usize,
                    panel = in(reg) self.panel,
                    c = inout(reg) self.to => _,
                    c2 = inout(reg) self.to.wrapping_add(SIDE * self.c_row) => _,
                    cs = in(reg) self.c_row,
                    panels = inout(reg) panels => _,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                )
            };
        }
        with_load_of_b!(self, product)
    }

    #[inline(always)]
    unsafe fn two_by_two(self) {
        macro_rules! product {
            ($load:literal) => {
                walk!(self,
                    load: "tileloadd tmm0, [{c} + {cs}]" "tileloadd tmm1, [{c} + {cs} + 64]"
                          "tileloadd tmm2, [{c2} + {cs}]" "tileloadd tmm3, [{c2} + {cs} + 64]";
                    clear: "tilezero tmm0" "tilezero tmm1" "tilezero tmm2" "tilezero tmm3";
                    step: "tileloadd tmm4, [{a} + {as_}]",
                          concat!($load, " tmm6, [{b} + {bs}]"), "tdpbf16ps tmm0, tmm4, tmm6",
                          concat!($load, " tmm7, [{b2} + {bs}]"), "tdpbf16ps tmm1, tmm4, tmm7",
                          "tileloadd tmm5, [{a2} + {as_}]", "tdpbf16ps tmm2, tmm5, tmm6", "tdpbf16ps tmm3, tmm5, tmm7";
                    store: "tilestored [{c} + {cs}], tmm0" "tilestored [{c} + {cs} + 64], tmm1"
                           "tilestored [{c2} + {cs}], tmm2" "tilestored [{c2} + {cs} + 64], tmm3")
            };
        }
        with_load_of_b!(self, product)
    }

    #[inline(always)]
    unsafe fn two_by_one(self) {
        macro_rules! product {
            ($load:literal) => {
                walk!(self,
                    load: "tileloadd tmm0, [{c} + {cs}]" "tileloadd tmm2, [{c2} + {cs}]";
                    clear: "tilezero tmm0" "tilezero tmm2";
                    step: "tileloadd tmm4, [{a} + {as_}]",
                          concat!($load, " tmm6, [{b} + {bs}]"), "tdpbf16ps tmm0, tmm4, tmm6",
                          "tileloadd tmm5, [{a2} + {as_}]", "tdpbf16ps tmm2, tmm5, tmm6";
                    store: "tilestored [{c} + {cs}], tmm0" "tilestored [{c2} + {cs}], tmm2")
            };
        }
        with_load_of_b!(self, product)
    }

    #[inline(always)]
    unsafe fn one_by_two(self) {
        macro_rules! product {
            ($load:literal) => {
                walk!(self,
                    load: "tileloadd tmm0, [{c} + {cs}]" "tileloadd tmm1, [{c} + {cs} + 64]";
                    clear: "tilezero tmm0" "tilezero tmm1";
                    step: "tileloadd tmm4, [{a} + {as_}]",
                          concat!($load, " tmm6, [{b} + {bs}]"), "tdpbf16ps tmm0, tmm4, tmm6",
                          concat!($load, " tmm7, [{b2} + {bs}]"), "tdpbf16ps tmm1, tmm4, tmm7";
                    store: "tilestored [{c} + {cs}], tmm0" "tilestored [{c} + {cs} + 64], tmm1")
            };
        }
        with_load_of_b!(self, product)
    }

    #[inline(always)]
    unsafe fn one_by_one(self) {
        macro_rules! product {
            ($load:literal) => {
                walk!(self,
                    load: "tileloadd tmm0, [{c} + {cs}]";
                    clear: "tilezero tmm0";
                    step: "tileloadd tmm4, [{a} + {as_}]",
                          concat!($load, " tmm6, [{b} + {bs}]"), "tdpbf16ps tmm0, tmm4, tmm6";
                    store: "tilestored [{c} + {cs}], tmm0")
            };
        }
        with_load_of_b!(self, product)
    }
}

/// `C += A · B` with `VDPBF16PS`, six rows and four panels at a time.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn dots(
    c: RawTarget,
    a: PackedA<'_>,
    b: PackedB<'_>,
    rows: usize,
    panels: Range<usize>,
    chunks: Range<usize>,
) {
    let mut row = 0;
    while row < rows {
        let count = (rows - row).min(6);
        let mut panel = panels.start;
        while panel < panels.end {
            let wide = (panels.end - panel).min(4);
            let at = (row, panel);
            match (count, wide) {
                (6, 4) => dot_tile::<6, 4>(c, a, b, at, &chunks),
                (6, _) => (0..wide).for_each(|p| dot_tile::<6, 1>(c, a, b, (row, panel + p), &chunks)),
                (_, 4) => (0..count).for_each(|r| dot_tile::<1, 4>(c, a, b, (row + r, panel), &chunks)),
                _ => (0..count).for_each(|r| {
                    (0..wide).for_each(|p| dot_tile::<1, 1>(c, a, b, (row + r, panel + p), &chunks));
                }),
            }
            panel += wide;
        }
        row += count;
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn dot_tile<const ROWS: usize, const PANELS: usize>(
    c: RawTarget,
    a: PackedA<'_>,
    b: PackedB<'_>,
    (row, panel): (usize, usize),
    chunks: &Range<usize>,
) {
    let to = c.data.add(row * c.row + panel * SIDE);
    let left = a.data.as_ptr().add(row * a.row).cast::<i32>();
    let right = b.data.as_ptr().add(panel * b.chunks * BLOCK).cast::<i32>();
    let mut acc = [[_mm512_setzero_ps(); PANELS]; ROWS];
    if c.add {
        for (r, acc) in acc.iter_mut().enumerate() {
            for (p, acc) in acc.iter_mut().enumerate() {
                *acc = _mm512_loadu_ps(to.add(r * c.row + p * SIDE));
            }
        }
    }
    for pair in chunks.start * SIDE..chunks.end * SIDE {
        let mut columns = [_mm512_setzero_si512(); PANELS];
        for (p, column) in columns.iter_mut().enumerate() {
            *column = _mm512_loadu_si512(right.add((p * b.chunks * DEPTH / 2 + pair) * SIDE).cast());
        }
        for (r, acc) in acc.iter_mut().enumerate() {
            let x = _mm512_set1_epi32(left.add(r * a.row / 2 + pair).read_unaligned());
            for (acc, &column) in acc.iter_mut().zip(&columns) {
                *acc = _mm512_dpbf16_ps(*acc, as_bf16_lanes(x), as_bf16_lanes(column));
            }
        }
    }
    for (r, acc) in acc.iter().enumerate() {
        for (p, acc) in acc.iter().enumerate() {
            _mm512_storeu_ps(to.add(r * c.row + p * SIDE), *acc);
        }
    }
}

#[inline(always)]
unsafe fn as_bf16_lanes(x: __m512i) -> __m512bh {
    std::mem::transmute(x)
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn pack_b_transposed(rows: &[bf16], row: usize, count: usize, chunks: usize, out: &mut [bf16]) {
    let zero = _mm512_setzero_si512();
    for panel in 0..count.div_ceil(SIDE) {
        for chunk in 0..chunks {
            let mut columns = [zero; SIDE];
            for (at, column) in columns.iter_mut().enumerate().take(count - panel * SIDE) {
                let from = rows.as_ptr().add((panel * SIDE + at) * row + chunk * DEPTH);
                prefetch_next_page(from, DEPTH);
                *column = _mm512_loadu_si512(from.cast());
            }
            let to = out.as_mut_ptr().add((panel * chunks + chunk) * BLOCK);
            for (pair, x) in transpose(columns).into_iter().enumerate() {
                _mm512_storeu_si512(to.add(pair * DEPTH).cast(), x);
            }
        }
    }
}

/// Copies a slice and returns whether all elements are finite.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn copy_checking_finite(from: &[bf16], to: &mut [bf16]) -> bool {
    let exponent = _mm512_set1_epi16(EXPONENT);
    let mut full = 0;
    let (mut from, mut to) = (from.chunks_exact(DEPTH), to.chunks_exact_mut(DEPTH));
    for (from, to) in (&mut from).zip(&mut to) {
        prefetch_next_page(from.as_ptr(), DEPTH);
        let x = _mm512_loadu_si512(from.as_ptr().cast());
        _mm512_storeu_si512(to.as_mut_ptr().cast(), x);
        full |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(x, exponent), exponent);
    }
    to.into_remainder().copy_from_slice(from.remainder());
    full == 0 && from.remainder().iter().all(|x| x.is_finite())
}

/// One row of a block: two rows interleaved.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn interleave(first: __m256i, second: __m256i) -> __m512i {
    let low = _mm512_cvtepu16_epi32(first);
    let high = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(second));
    _mm512_or_si512(low, high)
}

/// The rows `at` and `at + 1` interleaved; rows from `count` on are zero.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn interleave_rows(from: *const bf16, row: usize, at: usize, count: usize) -> __m512i {
    let none = _mm256_setzero_si256();
    let first = if at < count { _mm256_loadu_si256(from.add(at * row).cast()) } else { none };
    let second = if at + 1 < count { _mm256_loadu_si256(from.add((at + 1) * row).cast()) } else { none };
    interleave(first, second)
}

/// The block of [`SIDE`] columns of up to [`DEPTH`] rows; rows from `count` on are zero.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn block_of_rows(from: *const bf16, row: usize, count: usize) -> [__m512i; SIDE] {
    let mut block = [_mm512_setzero_si512(); SIDE];
    for (pair, to) in block.iter_mut().enumerate() {
        *to = interleave_rows(from, row, 2 * pair, count);
    }
    block
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn pack_b(rows: &[bf16], row: usize, count: usize, panels: usize, out: &mut [bf16]) -> bool {
    let chunks = count.div_ceil(DEPTH);
    let (exponent, mut full) = (_mm512_set1_epi16(EXPONENT), 0);
    for chunk in 0..chunks {
        for panel in 0..panels {
            let from = rows.as_ptr().add(chunk * DEPTH * row + panel * SIDE);
            let to = out.as_mut_ptr().add((panel * chunks + chunk) * BLOCK);
            for pair in 0..SIDE {
                prefetch_next_page(from.wrapping_add(2 * pair * row), 2 * row);
                let x = interleave_rows(from, row, 2 * pair, count - chunk * DEPTH);
                full |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(x, exponent), exponent);
                _mm512_storeu_si512(to.add(pair * DEPTH).cast(), x);
            }
        }
    }
    full == 0
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn pack_a_transposed(
    rows: &[bf16],
    row: usize,
    count: usize,
    panels: usize,
    out: &mut [bf16],
    chunks: usize,
) {
    for chunk in 0..count.div_ceil(DEPTH) {
        for panel in 0..panels {
            let from = rows.as_ptr().add(chunk * DEPTH * row + panel * SIDE);
            let block = transpose(block_of_rows(from, row, count - chunk * DEPTH));
            for (x, pairs) in block.into_iter().enumerate() {
                let to = out.as_mut_ptr().add((panel * SIDE + x) * chunks * DEPTH + chunk * DEPTH);
                _mm512_storeu_si512(to.cast(), pairs);
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn narrow_rows(tile: &mut [f32], row: usize, rows: usize, width: usize) {
    for r in 0..rows {
        let from = tile.as_mut_ptr().add(r * row);
        let to = from.cast::<bf16>();
        let mut at = 0;
        while at < width {
            let low = _mm512_loadu_ps(from.add(at));
            let high = if at + SIDE < width { _mm512_loadu_ps(from.add(at + SIDE)) } else { _mm512_setzero_ps() };
            let both: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(high, low));
            _mm512_storeu_si512(to.add(at).cast(), both);
            at += DEPTH;
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn narrow_pack_b(
    tile: &[f32],
    row: usize,
    rows: usize,
    panels: usize,
    out: &mut [bf16],
    chunks: usize,
) {
    // The permutation that interleaves two rows.
    let mut order = [0u16; DEPTH];
    for (at, x) in order.iter_mut().enumerate() {
        *x = (at / 2 + at % 2 * SIDE) as u16;
    }
    let order = _mm512_loadu_si512(order.as_ptr().cast());
    for pair in 0..rows.div_ceil(DEPTH) * DEPTH / 2 {
        let from = tile.as_ptr().add(2 * pair * row);
        let to = out.as_mut_ptr().add(pair / SIDE * BLOCK + pair % SIDE * DEPTH);
        for panel in 0..panels {
            let load = |r: usize| {
                let there = 2 * pair + r < rows;
                if there { _mm512_loadu_ps(from.add(r * row + panel * SIDE)) } else { _mm512_setzero_ps() }
            };
            let both: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(load(1), load(0)));
            let mixed = _mm512_permutexvar_epi16(order, both);
            _mm512_storeu_si512(to.add(panel * chunks * BLOCK).cast(), mixed);
        }
    }
}
