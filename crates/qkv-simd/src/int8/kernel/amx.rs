//! 8-bit products with AMX: 32 rows and two panels at a time. The bytes of a panel already have the layout of a
//! right-hand tile, and rows are read in place. If the number of rows is not a multiple of sixteen, the last tile of
//! rows overlaps the one before it: some sums are computed twice and written once.

// SAFETY, for the whole module: every function requires AMX, AVX-512 and the lengths that the parent module checks.
#![allow(unsafe_op_in_unsafe_fn, clippy::missing_safety_doc)]

use super::{Int8Rows, Job, LANES, LINE};
use crate::amx::Tiles;
use crate::lanes::{Lanes, avx512::F32x16};
use std::arch::asm;
use std::arch::x86_64::*;

/// Rows of a tile.
const SIDE: usize = 16;
/// Bytes of a row that a tile holds.
const DEPTH: usize = 64;

/// Whether a job has enough rows for a tile, and the bytes of a row are whole tiles.
pub(super) fn takes(job: &Job<'_>) -> bool {
    job.rows.len() >= SIDE && job.x.row.is_multiple_of(DEPTH)
}

/// The sums of two by two tiles.
#[repr(C, align(64))]
struct TileTotals([[[i32; LANES]; SIDE]; 4]);

/// Runs a job for which [`takes`] is true.
pub(super) unsafe fn run(job: &Job<'_>) {
    let _tiles = Tiles::new();
    let blank = || TileTotals([[[0; LANES]; SIDE]; 4]);
    let mut sums = [blank(), blank()];
    let panel_bytes = job.x.row / 4 * LINE;
    for panel in job.panels.clone().step_by(2) {
        // With an odd number of panels the last one is computed twice.
        let second = (panel + 1).min(job.panels.end - 1);
        let columns = [panel, second].map(|panel| job.matrix.panels.as_ptr().add(panel * panel_bytes));
        let mut row = job.rows.start;
        while row < job.rows.end {
            // Two tiles of rows, moved up where they would reach past the last row.
            let last = job.rows.end - SIDE;
            let rows = [row.min(last), (row + SIDE).min(last)];
            for (sums, x) in sums.iter_mut().zip([Some(job.x), job.x.rest.as_deref()].into_iter().flatten()) {
                let left = rows.map(|row| x.codes.as_ptr().add(row * x.row));
                if rows[0] == rows[1] {
                    one_by_two(sums, left[0], columns, x.row);
                } else {
                    two_by_two(sums, left, columns, x.row);
                }
            }
            for (at, &first) in rows[..1 + usize::from(rows[0] != rows[1])].iter().enumerate() {
                // Rows that overlap are already written.
                let skipped = row + at * SIDE - first;
                let of_panel = |panel: usize| [&sums[0].0[2 * at + panel], &sums[1].0[2 * at + panel]];
                write(job, of_panel(0), first, skipped, panel);
                if second != panel {
                    write(job, of_panel(1), first, skipped, second);
                }
            }
            row += 2 * SIDE;
        }
    }
}

unsafe fn two_by_two(sums: &mut TileTotals, left: [*const i8; 2], columns: [*const u8; 2], each: usize) {
    asm!(
        "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
        "2:",
        "tileloadd tmm4, [{a} + {each}]",
        "tileloadd tmm6, [{b} + {line}]",
        "tdpbsud tmm0, tmm4, tmm6",
        "tileloadd tmm7, [{b2} + {line}]",
        "tdpbsud tmm1, tmm4, tmm7",
        "tileloadd tmm5, [{a2} + {each}]",
        "tdpbsud tmm2, tmm5, tmm6",
        "tdpbsud tmm3, tmm5, tmm7",
        "add {a}, 64", "add {a2}, 64", "add {b}, 1024", "add {b2}, 1024",
        "dec {steps}",
        "jnz 2b",
        "tilestored [{to} + {line}], tmm0", "tilestored [{to} + {line} + 1024], tmm1",
        "tilestored [{to} + {line} + 2048], tmm2", "tilestored [{to} + {line} + 3072], tmm3",
        a = inout(reg) left[0] => _, a2 = inout(reg) left[1] => _,
        b = inout(reg) columns[0] => _, b2 = inout(reg) columns[1] => _,
        steps = inout(reg) each / DEPTH => _,
        each = in(reg) each, line = in(reg) LINE, to = in(reg) sums.0.as_mut_ptr(),
        out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
        out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
        options(nostack),
    );
}

unsafe fn one_by_two(sums: &mut TileTotals, left: *const i8, columns: [*const u8; 2], each: usize) {
    asm!(
        "tilezero tmm0", "tilezero tmm1",
        "2:",
        "tileloadd tmm4, [{a} + {each}]",
        "tileloadd tmm6, [{b} + {line}]",
        "tdpbsud tmm0, tmm4, tmm6",
        "tileloadd tmm7, [{b2} + {line}]",
        "tdpbsud tmm1, tmm4, tmm7",
        "add {a}, 64", "add {b}, 1024", "add {b2}, 1024",
        "dec {steps}",
        "jnz 2b",
        "tilestored [{to} + {line}], tmm0", "tilestored [{to} + {line} + 1024], tmm1",
        a = inout(reg) left => _, b = inout(reg) columns[0] => _, b2 = inout(reg) columns[1] => _,
        steps = inout(reg) each / DEPTH => _,
        each = in(reg) each, line = in(reg) LINE, to = in(reg) sums.0.as_mut_ptr(),
        out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm6") _, out("tmm7") _,
        options(nostack),
    );
}

/// Scales the sums of a tile whose first row is `row`, those of the rows' remainders too if there are any, finishes
/// them and writes all but the first `skipped` rows.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn write(job: &Job<'_>, sums: [&[[i32; LANES]; SIDE]; 2], row: usize, skipped: usize, panel: usize) {
    let (first, width) = (panel * LANES, job.matrix.rows);
    let left = LANES.min(width - first);
    let scales = F32x16::load(job.matrix.scales.as_ptr().add(first));
    let scaled = |x: &Int8Rows, sums: &[[i32; LANES]; SIDE], r: usize| {
        let sum = _mm512_sub_epi32(_mm512_load_si512(sums[r].as_ptr().cast()), _mm512_set1_epi32(x.excess[row + r]));
        F32x16(_mm512_cvtepi32_ps(sum)).mul(scales.mul(F32x16::splat(x.scales[row + r])))
    };
    for r in skipped..SIDE {
        let mut y = scaled(job.x, sums[0], r);
        if let Some(rest) = &job.x.rest {
            y = y.add(scaled(rest, sums[1], r));
        }
        let out = job.out.wrapping_add((row + r) * job.stride + first);
        let y = job.finish.apply(y, [row + r, width], [first, left]);
        if left == LANES { y.store(out) } else { y.store_first(out, left) }
    }
}
