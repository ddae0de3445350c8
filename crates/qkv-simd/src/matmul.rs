//! Products of whole matrices, for the layers of a model: in f32 or f64 with the kernels of the `gemm` crate, or
//! rounded to bf16 and accumulated in f32 with [`bf16_gemm`](crate::bf16_gemm). The bits do not depend on the number of
//! threads.

use crate::bf16_gemm::{Bf16Gemm, DEPTH, PackedA, PackedB, SIDE, packed_b_len, padded_depth};
use crate::isa::Isa;
use crate::number::Real;
use crate::pass::{self, Pass};
use crate::product::Target;
use crate::shared::for_each_task;
use crate::span;
use gemm_common::Parallelism;
use half::bf16;
use rayon::prelude::*;
use std::any::Any;

/// A matrix in memory: rows one after the other, or the transpose of such rows.
#[derive(Clone, Copy, Debug)]
pub struct Operand<'a, T> {
    data: &'a [T],
    /// The distance between stored rows.
    pitch: usize,
    rows: usize,
    columns: usize,
    transposed: bool,
}

impl<'a, T> Operand<'a, T> {
    /// Dense rows of `columns` elements.
    ///
    /// # Panics
    /// If the slice is too short.
    pub fn rows(data: &'a [T], rows: usize, columns: usize) -> Self {
        Operand::pitched(data, rows, columns, columns)
    }

    /// Rows of `columns` elements at distance `pitch`.
    ///
    /// # Panics
    /// If the slice is too short, or rows overlap.
    pub fn pitched(data: &'a [T], rows: usize, columns: usize, pitch: usize) -> Self {
        assert!(
            pitch >= columns && data.len() >= span(rows, pitch, columns),
            "{rows} × {columns} at {pitch} of {} elements",
            data.len()
        );
        Operand { data, pitch, rows, columns, transposed: false }
    }

    /// The transpose.
    pub fn transposed(self) -> Self {
        Operand { rows: self.columns, columns: self.rows, transposed: !self.transposed, ..self }
    }

    /// The row stride and the column stride.
    fn strides(&self) -> (isize, isize) {
        let pitch = self.pitch as isize;
        if self.transposed { (1, pitch) } else { (pitch, 1) }
    }
}

/// `C = A · B` or, with `add`, `C += A · B`, where `C` has dense rows.
///
/// ```
/// use qkv_simd::matmul::{Operand, matmul};
/// let (a, b) = ([1.0f32, 2.0], [10.0f32, 20.0]);
/// let mut c = [0.0];
/// matmul(&mut c, Operand::rows(&a, 1, 2), Operand::rows(&b, 1, 2).transposed(), false, 1);
/// assert_eq!(c, [50.0]);
/// ```
///
/// # Panics
/// If the shapes do not fit.
pub fn matmul<T: Real>(c: &mut [T], a: Operand<'_, T>, b: Operand<'_, T>, add: bool, threads: usize) {
    let (m, n, k) = check(c.len(), &a, &b);
    if m == 0 || n == 0 {
        return;
    }
    let ((a_row, a_column), (b_row, b_column)) = (a.strides(), b.strides());
    // Below this size, waking another thread costs more than it saves.
    let parallel = if threads > 1 && m * n * k > 1 << 18 { Parallelism::Rayon(threads) } else { Parallelism::None };
    let beta = T::ONE;
    let alpha = if add { T::ONE } else { T::ZERO };
    // The kernels write columns and `C` has rows: Cᵀ = Bᵀ · Aᵀ is the same memory with the strides swapped.
    // SAFETY: `check` verified that the shapes fit and that C has m × n elements; operands are checked on construction.
    unsafe {
        gemm_kernel::<T>()(
            n,
            m,
            k,
            c.as_mut_ptr(),
            n as isize,
            1,
            add,
            b.data.as_ptr(),
            b_row,
            b_column,
            a.data.as_ptr(),
            a_row,
            a_column,
            alpha,
            beta,
            false,
            false,
            false,
            parallel,
        );
    }
}

/// A kernel of the `gemm` crate. Its arguments: the shape; `C` with its column and row strides, and whether it is read;
/// the two operands with theirs; α and β; which operands are conjugated; the number of threads.
type GemmKernel<T> = unsafe fn(
    usize,
    usize,
    usize,
    *mut T,
    isize,
    isize,
    bool,
    *const T,
    isize,
    isize,
    *const T,
    isize,
    isize,
    T,
    T,
    bool,
    bool,
    bool,
    Parallelism,
);

/// The kernel of an accumulator type, which is `f32` or `f64`.
fn gemm_kernel<T: Real>() -> GemmKernel<T> {
    let f32: GemmKernel<f32> = gemm_f32::gemm::f32::get_gemm_fn();
    let f64: GemmKernel<f64> = gemm_f64::gemm::f64::get_gemm_fn();
    let kernels: [&dyn Any; 2] = [&f32, &f64];
    *kernels.iter().find_map(|kernel| kernel.downcast_ref()).expect("an accumulator is f32 or f64")
}

fn check<T>(c: usize, a: &Operand<'_, T>, b: &Operand<'_, T>) -> (usize, usize, usize) {
    assert_eq!(a.columns, b.rows, "A is {} × {}, B {} × {}", a.rows, a.columns, b.rows, b.columns);
    assert_eq!(c, a.rows.saturating_mul(b.columns), "C is not {} × {}", a.rows, b.columns);
    (a.rows, b.columns, a.columns)
}

/// Rows of `C` in one task, so that a panel of `B` is loaded for many rows.
const ROWS: usize = 8 * SIDE;

/// Panels of `B` that a task multiplies at a time: 64 KiB at a depth of 256, which stay in the second-level cache.
const PANELS: usize = 8;

/// The packed operands of [`matmul_bf16`], kept so that their memory is reused.
#[derive(Debug, Default)]
pub struct PackBuffers {
    left: Vec<bf16>,
    right: Vec<bf16>,
}

/// [`matmul`] with operands rounded to bf16, accumulated in f32. Returns `false`, and does nothing, if this CPU has no
/// bf16 products.
///
/// # Panics
/// If the shapes do not fit.
pub fn matmul_bf16(
    isa: Isa,
    c: &mut [f32],
    a: Operand<'_, f32>,
    b: Operand<'_, f32>,
    add: bool,
    packed: &mut PackBuffers,
    threads: usize,
) -> bool {
    if !Bf16Gemm::available(isa) {
        return false;
    }
    let (m, n, k) = check(c.len(), &a, &b);
    if m == 0 || n == 0 {
        return true;
    }
    if k == 0 {
        if !add {
            c.fill(0.0);
        }
        return true;
    }
    let threads = if m * n * k > 1 << 20 { threads } else { 1 };
    pack_b(isa, &b, &mut packed.right, threads);
    pack_a(isa, &a, &mut packed.left, threads);
    let (chunks, panels) = (padded_depth(k) / DEPTH, n.div_ceil(SIDE));
    let left = PackedA { data: &packed.left, row: padded_depth(k) };
    let right = PackedB { data: &packed.right[..packed_b_len(k, n)], chunks, non_temporal: false };
    // Tasks are whole rows of blocks if there are enough of them for all threads; otherwise columns are divided as
    // well.
    let row_blocks = m.div_ceil(ROWS);
    let across = (3 * threads).div_ceil(row_blocks).clamp(1, panels.div_ceil(PANELS));
    let wide = panels.div_ceil(across).div_ceil(PANELS) * PANELS;
    let across = panels.div_ceil(wide);
    let c = Shared::new(c);
    for_each_task(threads, row_blocks * across, Vec::new, |tile: &mut Vec<f32>, task| {
        let (row, from) = (task / across * ROWS, task % across * wide);
        let count = ROWS.min(m - row);
        let gemm = Bf16Gemm::new(isa).expect("just checked to be available");
        let left = PackedA { data: &left.data[row * left.row..], ..left };
        for from in (from..(from + wide).min(panels)).step_by(PANELS) {
            let to = (from + PANELS).min((task % across + 1) * wide).min(panels);
            let (width, kept) = ((to - from) * SIDE, ((to - from) * SIDE).min(n - from * SIDE));
            let right = PackedB { data: &right.data[from * chunks * DEPTH * SIDE..], chunks, non_temporal: false };
            if !add && across == 1 && n % SIDE == 0 && count % SIDE == 0 {
                // SAFETY: whole rows belong to this task alone.
                let out = unsafe { c.part(row * n, count * n) };
                let out = Target::overwrite(&mut out[from * SIDE..], n);
                gemm.product(out, left, right, count, 0..to - from, 0..chunks);
                continue;
            }
            // Through a tile that stays in the cache, since rows of C may end anywhere.
            tile.resize(ROWS * width, 0.0);
            gemm.product(Target::overwrite(tile, width), left, right, count, 0..to - from, 0..chunks);
            for (r, tile) in tile.chunks_exact(width).take(count).enumerate() {
                // SAFETY: the columns `from ..` of the rows `row ..` belong to this task alone.
                let out = unsafe { c.part((row + r) * n + from * SIDE, kept) };
                if add {
                    out.iter_mut().zip(tile).for_each(|(c, x)| *c += x);
                } else {
                    out.copy_from_slice(&tile[..kept]);
                }
            }
        }
    });
    true
}

/// A slice whose parts are written by several threads.
struct Shared<'a> {
    data: *mut f32,
    len: usize,
    borrowed: std::marker::PhantomData<&'a mut [f32]>,
}

// SAFETY: whoever takes a part guarantees that it is the only one.
unsafe impl Sync for Shared<'_> {}

impl<'a> Shared<'a> {
    fn new(data: &'a mut [f32]) -> Self {
        Shared { data: data.as_mut_ptr(), len: data.len(), borrowed: std::marker::PhantomData }
    }

    /// # Safety
    /// No other part that is in use overlaps this one.
    #[allow(clippy::mut_from_ref)]
    unsafe fn part(&self, from: usize, count: usize) -> &mut [f32] {
        assert!(from.saturating_add(count) <= self.len);
        // SAFETY: inside the slice, as just checked, and exclusive, as the caller guarantees.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(from), count) }
    }
}

/// Packs all of A: rows of whole chunks, in blocks of whole rows.
fn pack_a(isa: Isa, a: &Operand<'_, f32>, out: &mut Vec<bf16>, threads: usize) {
    let (m, k) = (a.rows, a.columns);
    let len = m.div_ceil(SIDE) * SIDE * padded_depth(k);
    if out.len() < len {
        out.resize(len, bf16::ZERO);
    }
    let block = |(at, out): (usize, &mut [bf16])| {
        let (start, count) = (at * ROWS, ROWS.min(m - at * ROWS));
        if !a.transposed {
            for (r, row) in out.chunks_exact_mut(padded_depth(k)).take(count).enumerate() {
                pass::run(isa, RoundToBf16(&a.data[(start + r) * a.pitch..][..k], row));
            }
            return;
        }
        let panels = count.div_ceil(SIDE);
        let gemm = Bf16Gemm::new(isa).expect("checked to be available");
        let mut narrow = vec![bf16::ZERO; k * panels * SIDE];
        for (x, row) in narrow.chunks_exact_mut(panels * SIDE).enumerate() {
            pass::run(isa, RoundToBf16(&a.data[x * a.pitch + start..][..count], row));
        }
        gemm.pack_a_transposed(&narrow, panels * SIDE, k, panels, out, padded_depth(k) / DEPTH);
    };
    let blocks = out[..len].chunks_mut(ROWS * padded_depth(k)).enumerate();
    if threads > 1 {
        blocks.collect::<Vec<_>>().into_par_iter().with_max_len(1).for_each(block);
    } else {
        blocks.for_each(block);
    }
}

/// Packs all of B.
fn pack_b(isa: Isa, b: &Operand<'_, f32>, out: &mut Vec<bf16>, threads: usize) {
    let (k, n) = (b.rows, b.columns);
    let chunks = padded_depth(k) / DEPTH;
    if out.len() < packed_b_len(k, n) {
        out.resize(packed_b_len(k, n), bf16::ZERO);
    }
    // Fewer panels at a time if there are few, so that every thread gets some.
    let each = (n.div_ceil(SIDE) / (2 * threads)).clamp(1, PANELS);
    let group = |(at, out): (usize, &mut [bf16])| {
        let (from, panels) = (at * each * SIDE, out.len() / (padded_depth(k) * SIDE));
        let gemm = Bf16Gemm::new(isa).expect("checked to be available");
        let count = (panels * SIDE).min(n - from);
        if b.transposed {
            // The columns of B are rows in memory.
            let mut narrow = vec![bf16::ZERO; count * padded_depth(k)];
            for (j, row) in narrow.chunks_exact_mut(padded_depth(k)).enumerate() {
                pass::run(isa, RoundToBf16(&b.data[(from + j) * b.pitch..][..k], row));
            }
            gemm.pack_b_transposed(&narrow, padded_depth(k), count, chunks, out);
        } else {
            let mut narrow = vec![bf16::ZERO; k * panels * SIDE];
            for (x, row) in narrow.chunks_exact_mut(panels * SIDE).enumerate() {
                pass::run(isa, RoundToBf16(&b.data[x * b.pitch + from..][..count], row));
            }
            gemm.pack_b(&narrow, panels * SIDE, k, panels, out);
        }
    };
    let groups = out[..packed_b_len(k, n)].chunks_mut(each * SIDE * padded_depth(k)).enumerate();
    if threads > 1 {
        groups.collect::<Vec<_>>().into_par_iter().with_max_len(1).for_each(group);
    } else {
        groups.for_each(group);
    }
}

/// Rounds a row to bf16 and pads it with zeros.
struct RoundToBf16<'a>(&'a [f32], &'a mut [bf16]);

impl Pass for RoundToBf16<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let (row, rest) = self.1.split_at_mut(self.0.len());
        for (to, x) in row.iter_mut().zip(self.0) {
            let bits = x.to_bits();
            let rounded = (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16;
            let quiet = (bits >> 16) as u16 | 0x40;
            *to = bf16::from_bits(if bits & 0x7fff_ffff > 0x7f80_0000 { quiet } else { rounded });
        }
        rest.fill(bf16::ZERO);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(count: usize, seed: usize) -> Vec<f32> {
        (0..count).map(|x| ((x * 37 + seed * 101) % 127) as f32 / 32.0 - 2.0).collect()
    }

    fn expected(a: &Operand<'_, f32>, b: &Operand<'_, f32>, i: usize, j: usize) -> f32 {
        let at = |m: &Operand<'_, f32>, i: usize, j: usize| {
            let (row, column) = m.strides();
            m.data[i * row as usize + j * column as usize]
        };
        (0..a.columns).map(|x| at(a, i, x) * at(b, x, j)).sum()
    }

    #[test]
    fn products_are_correct_for_any_shape_transposition_and_number_of_threads() {
        for (m, n, k) in
            [(1, 1, 1), (3, 5, 7), (16, 16, 32), (33, 70, 65), (130, 48, 100), (300, 200, 64), (5, 0, 3), (4, 4, 0)]
        {
            for transposed in 0..4 {
                let (a, b) = (numbers(m * k, 1), numbers(k * n, 2));
                let a =
                    if transposed & 1 == 0 { Operand::rows(&a, m, k) } else { Operand::rows(&a, k, m).transposed() };
                let b =
                    if transposed & 2 == 0 { Operand::rows(&b, k, n) } else { Operand::rows(&b, n, k).transposed() };
                let before = numbers(m * n, 3);
                for add in [false, true] {
                    let right = |c: &[f32], what: &str| {
                        for (at, &found) in c.iter().enumerate() {
                            let x = expected(&a, &b, at / n, at % n) + if add { before[at] } else { 0.0 };
                            assert!(
                                (found - x).abs() <= 1e-4 * (k as f32 + 1.0),
                                "{what} {m} {n} {k} {transposed} {add}: {found} {x}"
                            );
                        }
                    };
                    let mut c = before.clone();
                    matmul(&mut c, a, b, add, 2);
                    right(&c, "gemm");
                    for isa in Isa::available() {
                        let mut c = before.clone();
                        // These elements are exact in bf16, so the bound is the same.
                        if matmul_bf16(isa, &mut c, a, b, add, &mut PackBuffers::default(), 1) {
                            right(&c, isa.name());
                            let mut other = before.clone();
                            matmul_bf16(isa, &mut other, a, b, add, &mut PackBuffers::default(), 3);
                            assert_eq!(c, other, "threads change nothing");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn vectorized_rounding_to_bf16_equals_scalar_rounding() {
        let mut numbers: Vec<f32> = (0..70_000u32).map(|x| f32::from_bits(x.wrapping_mul(61_681) ^ x << 13)).collect();
        numbers.extend([f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -0.0, f32::MAX]);
        for isa in Isa::available() {
            let mut out = vec![bf16::ONE; numbers.len() + 3];
            pass::run(isa, RoundToBf16(&numbers, &mut out));
            for (x, found) in numbers.iter().zip(&out) {
                let expected = bf16::from_f32(*x);
                assert!(found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan(), "{x}");
            }
            assert_eq!(out[numbers.len()..], [bf16::ZERO; 3]);
        }
    }
}
