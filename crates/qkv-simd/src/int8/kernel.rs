//! The inner loops of 8-bit products: a register tile of sums for some rows and panels. Four bytes of a row are
//! multiplied with four of each column at a time: with `VPDPBUSD`, which does not saturate, if the CPU has VNNI, and as
//! 16-bit pairs otherwise. Sixteen rows or more are left to `amx` if the CPU has it.

// SAFETY, for the whole module: every method requires the instruction set of its intrinsics, and a load requires the
// bytes that it names.
#![allow(unsafe_op_in_unsafe_fn, clippy::missing_safety_doc)]

#[cfg(target_arch = "x86_64")]
mod amx;

#[cfg(target_arch = "x86_64")]
use super::{FINER, LARGEST, SHIFT, SMALLEST};
use super::{Int8Matrix, Int8Rows, LANES, QUAD};
use crate::finish::Finish;
use crate::isa::{Isa, Level};
use crate::lanes::{Lanes, portable};
#[cfg(target_arch = "x86_64")]
use crate::lanes::{avx2, avx512};
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// Bytes of a quad of every column of a panel.
const LINE: usize = LANES * QUAD;

/// How four bytes are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dots {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Vnni,
    /// Tiles for sixteen rows and more, VNNI for fewer.
    #[cfg(target_arch = "x86_64")]
    Amx,
}

impl Dots {
    /// The fastest of an instruction set.
    pub fn of(isa: Isa) -> Dots {
        match isa.level() {
            Level::Portable => Dots::Portable,
            // The compiler vectorizes the portable loops as far as it can.
            #[cfg(target_arch = "aarch64")]
            Level::Neon => Dots::Portable,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => Dots::Avx2,
            #[cfg(target_arch = "x86_64")]
            _ if is_x86_feature_detected!("avx512vnni") => match isa.has_amx() && crate::amx::has_int8() {
                true => Dots::Amx,
                false => Dots::Vnni,
            },
            #[cfg(target_arch = "x86_64")]
            _ => Dots::Avx512,
        }
    }

    /// All variants of this CPU.
    #[cfg(test)]
    pub fn available() -> Vec<Dots> {
        let mut found: Vec<Dots> = Isa::available().into_iter().map(Dots::of).collect();
        #[cfg(target_arch = "x86_64")]
        match found.contains(&Dots::Vnni) {
            true => found.push(Dots::Avx512),
            false => eprintln!("skipped: 8-bit products with VNNI (this CPU has none)"),
        }
        found.dedup();
        found
    }
}

/// Some rows of the result in some panels.
pub(super) struct Job<'a> {
    pub matrix: &'a Int8Matrix,
    pub finish: Finish<'a>,
    pub x: &'a Int8Rows,
    pub rows: std::ops::Range<usize>,
    pub panels: std::ops::Range<usize>,
    /// Where column 0 of row 0 is.
    pub out: *mut f32,
    /// The distance between rows of the result.
    pub stride: usize,
}

/// Runs a job.
///
/// # Safety
/// The CPU has the instructions, rows and matrix have one width, and the rows of `out` may be written in the panels.
pub(super) unsafe fn run(dots: Dots, job: Job<'_>) {
    match dots {
        Dots::Portable => job.run::<PortableTotals>(),
        #[cfg(target_arch = "x86_64")]
        Dots::Avx2 => by_avx2(job),
        #[cfg(target_arch = "x86_64")]
        Dots::Avx512 => by_avx512(job),
        #[cfg(target_arch = "x86_64")]
        Dots::Vnni => by_vnni(job),
        #[cfg(target_arch = "x86_64")]
        Dots::Amx if amx::takes(&job) => amx::run(&job),
        #[cfg(target_arch = "x86_64")]
        Dots::Amx => by_vnni(job),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn by_avx2(job: Job<'_>) {
    job.run::<Avx2Totals>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn by_avx512(job: Job<'_>) {
    job.run::<Avx512Totals>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn by_vnni(job: Job<'_>) {
    job.run::<VnniTotals>()
}

/// Rounds rows as [`Int8Rows`] describes, and the remainders into `rest`. Returns `false`, with nothing done, if only
/// the general pass can do that.
#[cfg(target_arch = "x86_64")]
pub(super) fn round(isa: Isa, x: &[f32], into: &mut Int8Rows, mut rest: Option<&mut Int8Rows>) -> bool {
    if isa.level() <= Level::Avx2 {
        return false;
    }
    for (at, x) in x.chunks_exact(into.width).enumerate() {
        let codes = &mut into.codes[at * into.row..][..into.width];
        let left = rest.as_mut().map(|rest| &mut rest.codes[at * into.row..][..into.width]);
        // SAFETY: an `Isa` above AVX2 exists only where the CPU has AVX-512.
        let (scale, [excess, of_rest]) = unsafe { round_by_avx512(x, codes, left) };
        (into.scales[at], into.excess[at]) = (scale, excess);
        if let Some(rest) = &mut rest {
            (rest.scales[at], rest.excess[at]) = (scale / FINER, of_rest);
        }
    }
    true
}

/// Only the general pass rounds on this architecture.
#[cfg(not(target_arch = "x86_64"))]
pub(super) fn round(_: Isa, _: &[f32], _: &mut Int8Rows, _: Option<&mut Int8Rows>) -> bool {
    false
}

/// Rounds a row, and its remainder into `rest`. Returns the scale, and what the shift of a matrix adds to the sums of
/// both.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn round_by_avx512(x: &[f32], codes: &mut [i8], mut rest: Option<&mut [i8]>) -> (f32, [i32; 2]) {
    // Magnitudes compare as integers; those of ∞ and NaN are the largest.
    let (magnitude, zero) = (_mm512_set1_epi32(i32::MAX), _mm512_setzero_si512());
    let mut most = [zero; 2];
    for at in (0..x.len()).step_by(LANES) {
        let lanes = _mm512_castps_si512(load_lanes(x, at));
        most = [most[1], _mm512_max_epi32(most[0], _mm512_and_si512(lanes, magnitude))];
    }
    let largest = f32::from_bits(_mm512_reduce_max_epi32(_mm512_max_epi32(most[0], most[1])) as u32);
    if !largest.is_finite() || largest <= SMALLEST {
        codes.fill(0);
        if let Some(rest) = rest {
            rest.fill(0);
        }
        return (if largest.is_finite() { 0.0 } else { f32::NAN }, [0, 0]);
    }
    let (inverse, mut sums) = (_mm512_set1_ps(LARGEST / largest), [zero; 2]);
    for at in (0..x.len()).step_by(LANES) {
        let scaled = _mm512_mul_ps(load_lanes(x, at), inverse);
        let whole = _mm512_cvtps_epi32(scaled);
        sums[0] = _mm512_add_epi32(sums[0], whole);
        store_bytes(codes, at, whole);
        if let Some(rest) = &mut rest {
            let left = _mm512_mul_ps(_mm512_sub_ps(scaled, _mm512_cvtepi32_ps(whole)), _mm512_set1_ps(FINER));
            let whole = _mm512_cvtps_epi32(left);
            sums[1] = _mm512_add_epi32(sums[1], whole);
            store_bytes(rest, at, whole);
        }
    }
    let [excess, of_rest] = [_mm512_reduce_add_epi32(sums[0]), _mm512_reduce_add_epi32(sums[1])];
    (largest / LARGEST, [SHIFT * excess, SHIFT * of_rest])
}

/// Sixteen elements of a row from `at` on, zeros past its end.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn load_lanes(x: &[f32], at: usize) -> __m512 {
    match x.len() - at {
        LANES.. => _mm512_loadu_ps(x.as_ptr().add(at)),
        left => _mm512_maskz_loadu_ps(first_lanes(left), x.as_ptr().add(at)),
    }
}

/// Stores sixteen numbers as bytes from `at` on, as far as the row goes.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn store_bytes(codes: &mut [i8], at: usize, numbers: __m512i) {
    let to = codes.as_mut_ptr().add(at);
    match codes.len() - at {
        LANES.. => _mm_storeu_si128(to.cast(), _mm512_cvtepi32_epi8(numbers)),
        left => _mm512_mask_cvtepi32_storeu_epi8(to, first_lanes(left), numbers),
    }
}

/// The bits of the first `count` lanes, of fewer than sixteen.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn first_lanes(count: usize) -> u16 {
    (1 << count) - 1
}

impl Job<'_> {
    #[inline(always)]
    unsafe fn run<S: Totals>(&self) {
        let mut panel = self.panels.start;
        while panel < self.panels.end {
            if S::PANELS >= 4 && self.panels.end - panel >= 4 {
                self.column::<S, 4>(panel);
                panel += 4;
            } else {
                self.column::<S, 1>(panel);
                panel += 1;
            }
        }
    }

    #[inline(always)]
    unsafe fn column<S: Totals, const PANELS: usize>(&self, panel: usize) {
        let mut row = self.rows.start;
        while row < self.rows.end {
            let left = self.rows.end - row;
            if S::ROWS >= 6 && left >= 6 {
                self.tile::<S, 6, PANELS>(row, panel);
                row += 6;
            } else if left >= 2 {
                self.tile::<S, 2, PANELS>(row, panel);
                row += 2;
            } else {
                self.tile::<S, 1, PANELS>(row, panel);
                row += 1;
            }
        }
    }

    /// One register tile over the whole width.
    #[allow(clippy::needless_range_loop)]
    #[inline(always)]
    unsafe fn tile<S: Totals, const ROWS: usize, const PANELS: usize>(&self, row: usize, panel: usize) {
        // Through memory, in loops small enough to be unrolled: otherwise the sums would always be in memory.
        let mut lanes = [[[0.0f32; LANES]; PANELS]; ROWS];
        self.sums::<S, ROWS, PANELS>(self.x, row, panel, &mut lanes);
        if let Some(rest) = &self.x.rest {
            let mut of_rest = [[[0.0f32; LANES]; PANELS]; ROWS];
            self.sums::<S, ROWS, PANELS>(rest, row, panel, &mut of_rest);
            for r in 0..ROWS {
                for p in 0..PANELS {
                    let sum = S::Lanes::load(lanes[r][p].as_ptr()).add(S::Lanes::load(of_rest[r][p].as_ptr()));
                    sum.store(lanes[r][p].as_mut_ptr());
                }
            }
        }
        let width = self.matrix.rows;
        for (r, lanes) in lanes.iter().enumerate() {
            for (p, lanes) in lanes.iter().enumerate() {
                let first = (panel + p) * LANES;
                let (out, left) = (self.out.wrapping_add((row + r) * self.stride + first), LANES.min(width - first));
                let y = self.finish.apply(S::Lanes::load(lanes.as_ptr()), [row + r, width], [first, left]);
                if left == LANES { y.store(out) } else { y.store_first(out, left) }
            }
        }
    }

    /// The scaled sums of one part of the rows.
    #[allow(clippy::needless_range_loop)]
    #[inline(always)]
    unsafe fn sums<S: Totals, const ROWS: usize, const PANELS: usize>(
        &self,
        rows: &Int8Rows,
        row: usize,
        panel: usize,
        lanes: &mut [[[f32; LANES]; PANELS]; ROWS],
    ) {
        let (each, depth) = (rows.row, rows.row / QUAD);
        let mut x = rows.codes.as_ptr().add(row * each);
        let mut w = self.matrix.panels.as_ptr().add(panel * depth * LINE);
        let mut sums = [[S::zero(); PANELS]; ROWS];
        for _ in 0..depth {
            let mut columns = [S::columns(w); PANELS];
            for (p, column) in columns.iter_mut().enumerate().skip(1) {
                *column = S::columns(w.add(p * depth * LINE));
            }
            for r in 0..ROWS {
                let quad = S::quad(x.add(r * each));
                for p in 0..PANELS {
                    sums[r][p] = sums[r][p].add(columns[p], quad);
                }
            }
            x = x.add(QUAD);
            w = w.add(LINE);
        }
        for r in 0..ROWS {
            for p in 0..PANELS {
                sums[r][p].minus(rows.excess[row + r]).store(lanes[r][p].as_mut_ptr());
            }
        }
        for (r, lanes) in lanes.iter_mut().enumerate() {
            let own = S::Lanes::splat(rows.scales[row + r]);
            for (p, lanes) in lanes.iter_mut().enumerate() {
                let scales = S::Lanes::load(self.matrix.scales.as_ptr().add((panel + p) * LANES));
                S::Lanes::load(lanes.as_ptr()).mul(scales.mul(own)).store(lanes.as_mut_ptr());
            }
        }
    }
}

/// Sixteen 32-bit sums. All arithmetic is exact, so every instruction set computes the same bits.
///
/// # Safety
/// Every method may be called only where the CPU has the instruction set of the implementing type.
trait Totals: Copy {
    /// The `f32` lanes of this instruction set.
    type Lanes: Lanes<Scalar = f32>;
    /// Four unsigned bytes of each of sixteen columns.
    type Columns: Copy;
    /// Four signed bytes of a row, for every column.
    type Quad: Copy;
    /// Rows of a register tile.
    const ROWS: usize;
    /// Panels of a register tile.
    const PANELS: usize;

    unsafe fn zero() -> Self;
    unsafe fn columns(from: *const u8) -> Self::Columns;
    unsafe fn quad(from: *const i8) -> Self::Quad;
    /// `self + Σ columns · quad`.
    unsafe fn add(self, columns: Self::Columns, quad: Self::Quad) -> Self;
    /// `self − x`, rounded to nearest even.
    unsafe fn minus(self, x: i32) -> Self::Lanes;
}

/// Plain arrays: any architecture.
#[derive(Clone, Copy)]
struct PortableTotals([i32; LANES]);

impl Totals for PortableTotals {
    type Lanes = portable::F32x16;
    type Columns = [u8; LINE];
    type Quad = [i8; QUAD];
    const ROWS: usize = 2;
    const PANELS: usize = 1;

    #[inline(always)]
    unsafe fn zero() -> Self {
        PortableTotals([0; LANES])
    }
    #[inline(always)]
    unsafe fn columns(from: *const u8) -> Self::Columns {
        from.cast::<[u8; LINE]>().read()
    }
    #[inline(always)]
    unsafe fn quad(from: *const i8) -> Self::Quad {
        from.cast::<[i8; QUAD]>().read()
    }
    #[inline(always)]
    unsafe fn add(mut self, columns: Self::Columns, quad: Self::Quad) -> Self {
        for (sum, column) in self.0.iter_mut().zip(columns.as_chunks::<QUAD>().0) {
            for (&w, x) in column.iter().zip(quad) {
                *sum += i32::from(w) * i32::from(x);
            }
        }
        self
    }
    #[inline(always)]
    unsafe fn minus(self, x: i32) -> Self::Lanes {
        Lanes::load(self.0.map(|sum| (sum - x) as f32).as_ptr())
    }
}

/// Two 256-bit registers: columns 0 to 7 and 8 to 15. Bytes are widened to 16 bits, the even ones and the odd ones.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
struct Avx2Totals([__m256i; 2]);

#[cfg(target_arch = "x86_64")]
impl Totals for Avx2Totals {
    type Lanes = avx2::F32x16;
    type Columns = [[__m256i; 2]; 2];
    type Quad = [__m256i; 2];
    const ROWS: usize = 2;
    const PANELS: usize = 1;

    #[inline(always)]
    unsafe fn zero() -> Self {
        Avx2Totals([_mm256_setzero_si256(); 2])
    }
    #[inline(always)]
    unsafe fn columns(from: *const u8) -> Self::Columns {
        let low = _mm256_set1_epi16(0xff);
        let first = _mm256_loadu_si256(from.cast());
        let second = _mm256_loadu_si256(from.add(LINE / 2).cast());
        [
            [_mm256_and_si256(first, low), _mm256_srli_epi16::<8>(first)],
            [_mm256_and_si256(second, low), _mm256_srli_epi16::<8>(second)],
        ]
    }
    #[inline(always)]
    unsafe fn quad(from: *const i8) -> Self::Quad {
        let x = _mm256_set1_epi32(from.cast::<i32>().read_unaligned());
        [_mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(x)), _mm256_srai_epi16::<8>(x)]
    }
    #[inline(always)]
    unsafe fn add(mut self, columns: Self::Columns, quad: Self::Quad) -> Self {
        for (sum, [even, odd]) in self.0.iter_mut().zip(columns) {
            let pairs = _mm256_add_epi32(_mm256_madd_epi16(even, quad[0]), _mm256_madd_epi16(odd, quad[1]));
            *sum = _mm256_add_epi32(*sum, pairs);
        }
        self
    }
    #[inline(always)]
    unsafe fn minus(self, x: i32) -> Self::Lanes {
        let x = _mm256_set1_epi32(x);
        avx2::F32x16(
            _mm256_cvtepi32_ps(_mm256_sub_epi32(self.0[0], x)),
            _mm256_cvtepi32_ps(_mm256_sub_epi32(self.0[1], x)),
        )
    }
}

/// One 512-bit register; bytes as with AVX2.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
struct Avx512Totals(__m512i);

#[cfg(target_arch = "x86_64")]
impl Totals for Avx512Totals {
    type Lanes = avx512::F32x16;
    type Columns = [__m512i; 2];
    type Quad = [__m512i; 2];
    const ROWS: usize = 2;
    const PANELS: usize = 4;

    #[inline(always)]
    unsafe fn zero() -> Self {
        Avx512Totals(_mm512_setzero_si512())
    }
    #[inline(always)]
    unsafe fn columns(from: *const u8) -> Self::Columns {
        let bytes = _mm512_loadu_si512(from.cast());
        [_mm512_and_si512(bytes, _mm512_set1_epi16(0xff)), _mm512_srli_epi16::<8>(bytes)]
    }
    #[inline(always)]
    unsafe fn quad(from: *const i8) -> Self::Quad {
        let x = _mm512_set1_epi32(from.cast::<i32>().read_unaligned());
        [_mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(x)), _mm512_srai_epi16::<8>(x)]
    }
    #[inline(always)]
    unsafe fn add(self, [even, odd]: Self::Columns, quad: Self::Quad) -> Self {
        let pairs = _mm512_add_epi32(_mm512_madd_epi16(even, quad[0]), _mm512_madd_epi16(odd, quad[1]));
        Avx512Totals(_mm512_add_epi32(self.0, pairs))
    }
    #[inline(always)]
    unsafe fn minus(self, x: i32) -> Self::Lanes {
        avx512::F32x16(_mm512_cvtepi32_ps(_mm512_sub_epi32(self.0, _mm512_set1_epi32(x))))
    }
}

/// One 512-bit register, with the VNNI instruction.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
struct VnniTotals(__m512i);

#[cfg(target_arch = "x86_64")]
impl Totals for VnniTotals {
    type Lanes = avx512::F32x16;
    type Columns = __m512i;
    type Quad = __m512i;
    const ROWS: usize = 6;
    const PANELS: usize = 4;

    #[inline(always)]
    unsafe fn zero() -> Self {
        VnniTotals(_mm512_setzero_si512())
    }
    #[inline(always)]
    unsafe fn columns(from: *const u8) -> Self::Columns {
        _mm512_loadu_si512(from.cast())
    }
    #[inline(always)]
    unsafe fn quad(from: *const i8) -> Self::Quad {
        _mm512_set1_epi32(from.cast::<i32>().read_unaligned())
    }
    #[inline(always)]
    unsafe fn add(self, columns: Self::Columns, quad: Self::Quad) -> Self {
        VnniTotals(_mm512_dpbusd_epi32(self.0, columns, quad))
    }
    #[inline(always)]
    unsafe fn minus(self, x: i32) -> Self::Lanes {
        avx512::F32x16(_mm512_cvtepi32_ps(_mm512_sub_epi32(self.0, _mm512_set1_epi32(x))))
    }
}
