//! The inner loops of quantized products: sixteen rows of the matrix with one or four vectors. Codes are unpacked to 16
//! bits in registers, multiplied by the vector's 16-bit numbers and summed over a block exactly; a block's sum is then
//! scaled and added in `f32`, without fused multiply-adds. So a result has the same bits on every instruction set,
//! whatever else is computed with it.

#[cfg(target_arch = "aarch64")]
use super::words::NeonWords;
#[cfg(target_arch = "x86_64")]
use super::words::{Avx2Words, Avx512Words};
use super::words::{PortableWords, Words};
use super::{BLOCK, GROUP, SUPER_BLOCKS, ScaleKind};
use crate::isa::{Isa, Level};
use crate::lanes::Lanes;
use crate::prefetch::prefetch;
use half::f16;

/// How far ahead codes are prefetched, in bytes.
const AHEAD: usize = 2048;

/// Bytes of the codes of a block of sixteen rows.
pub(super) const fn code_bytes(bits: u32) -> usize {
    GROUP * BLOCK * bits as usize / 8
}

/// Bytes of the scales of a block of sixteen rows; those of super-blocks add [`header_bytes`].
pub(super) const fn scale_bytes(kind: ScaleKind) -> usize {
    match kind {
        ScaleKind::Plain => 2 * GROUP,
        ScaleKind::Least => 4 * GROUP,
        ScaleKind::SuperLeast | ScaleKind::SuperHalves => 2 * GROUP,
    }
}

/// Bytes before the scales of a super-block of sixteen rows.
pub(super) const fn header_bytes(kind: ScaleKind) -> usize {
    match kind {
        ScaleKind::Plain | ScaleKind::Least => 0,
        ScaleKind::SuperLeast => 4 * GROUP,
        ScaleKind::SuperHalves => 2 * GROUP,
    }
}

/// One vector: 16-bit numbers in pairs, and for each block the scale, the sums of its halves and its sum in `f32`.
#[derive(Clone, Copy)]
pub(super) struct VectorRef {
    pub pairs: *const [i16; 2],
    pub scales: *const f32,
    pub halves: *const [i32; 2],
    pub sums: *const f32,
}

/// A range of groups of one matrix times some vectors. `out` holds a pointer to the first element of each vector's
/// result.
pub(super) struct Job<'a> {
    pub bits: u32,
    pub kind: ScaleKind,
    pub zero: i32,
    pub blocks: usize,
    pub codes: &'a [u8],
    pub scales: &'a [u8],
    pub vectors: &'a [VectorRef],
    pub out: &'a [*mut f32],
    pub rows: usize,
    pub groups: std::ops::Range<usize>,
}

/// Runs a job with the instructions of `isa`.
///
/// # Safety
/// Codes and scales hold every group, vectors every block, and `out` may be written for the rows of the groups.
pub(super) unsafe fn run(isa: Isa, job: Job<'_>) {
    match isa.level() {
        // SAFETY: passed on to the caller; the portable words run anywhere.
        Level::Portable => unsafe { job.run::<PortableWords>() },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: as above, and every aarch64 has NEON.
        Level::Neon => unsafe { job.run::<NeonWords>() },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above, and an `Isa` of this level exists only where the CPU has it.
        Level::Avx2 => unsafe { avx2(job) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        _ if is_x86_feature_detected!("avx512vnni") => unsafe { avx512_vnni(job) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        _ => unsafe { avx512(job) },
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2(job: Job<'_>) {
    // SAFETY: this function's own target features are those of the words.
    unsafe { job.run::<Avx2Words>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(super) unsafe fn avx512(job: Job<'_>) {
    // SAFETY: as above.
    unsafe { job.run::<Avx512Words<false>>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn avx512_vnni(job: Job<'_>) {
    // SAFETY: as above.
    unsafe { job.run::<Avx512Words<true>>() }
}

const PLAIN: u8 = ScaleKind::Plain as u8;
const LEAST: u8 = ScaleKind::Least as u8;
const SUPER_LEAST: u8 = ScaleKind::SuperLeast as u8;
const SUPER_HALVES: u8 = ScaleKind::SuperHalves as u8;

impl Job<'_> {
    #[inline(always)]
    unsafe fn run<W: Words>(self) {
        // SAFETY: passed on to the caller.
        unsafe {
            match (self.bits, self.kind) {
                (4, ScaleKind::Plain) => self.groups::<W, 4, PLAIN>(),
                (4, ScaleKind::Least) => self.groups::<W, 4, LEAST>(),
                (4, ScaleKind::SuperLeast) => self.groups::<W, 4, SUPER_LEAST>(),
                (5, ScaleKind::Plain) => self.groups::<W, 5, PLAIN>(),
                (5, ScaleKind::Least) => self.groups::<W, 5, LEAST>(),
                (5, ScaleKind::SuperLeast) => self.groups::<W, 5, SUPER_LEAST>(),
                (6, ScaleKind::SuperHalves) => self.groups::<W, 6, SUPER_HALVES>(),
                (8, ScaleKind::Plain) => self.groups::<W, 8, PLAIN>(),
                _ => unreachable!("no format has these bits and scales"),
            }
        }
    }

    #[inline(always)]
    unsafe fn groups<W: Words, const BITS: u32, const KIND: u8>(&self) {
        let kind = self.kind;
        let (codes, scales) = (self.blocks * code_bytes(BITS), self.blocks * scale_bytes(kind));
        let scales = scales + self.blocks / SUPER_BLOCKS * header_bytes(kind);
        for group in self.groups.clone() {
            // SAFETY: the caller's slices hold every group.
            let from = unsafe { (self.codes.as_ptr().add(group * codes), self.scales.as_ptr().add(group * scales)) };
            let live = GROUP.min(self.rows - group * GROUP);
            let mut first = 0;
            while first < self.vectors.len() {
                // SAFETY: as above, and there are that many vectors.
                unsafe {
                    if self.vectors.len() - first >= 4 {
                        self.group::<W, BITS, KIND, 4>(from, first, group * GROUP, live);
                        first += 4;
                    } else {
                        self.group::<W, BITS, KIND, 1>(from, first, group * GROUP, live);
                        first += 1;
                    }
                }
            }
        }
    }

    /// One group of rows with `M` vectors from `first` on.
    #[inline(always)]
    unsafe fn group<W: Words, const BITS: u32, const KIND: u8, const M: usize>(
        &self,
        (mut codes, mut scales): (*const u8, *const u8),
        first: usize,
        row: usize,
        live: usize,
    ) {
        // SAFETY: the caller guarantees the instruction set and every length.
        unsafe {
            let vectors: [VectorRef; M] = std::array::from_fn(|m| self.vectors[first + m]);
            let zero = W::Lanes::splat(0.0);
            let (mut sums, mut scale, mut least) = ([zero; M], zero, zero);
            for block in 0..self.blocks {
                for line in 0..code_bytes(BITS) / 64 {
                    prefetch(codes.wrapping_add(AHEAD + line * 64));
                }
                if KIND >= SUPER_LEAST && block % SUPER_BLOCKS == 0 {
                    scale = W::Lanes::load_f16(scales.cast::<f16>(), GROUP);
                    scales = scales.add(2 * GROUP);
                    if KIND == SUPER_LEAST {
                        least = W::Lanes::load_f16(scales.cast::<f16>(), GROUP);
                        scales = scales.add(2 * GROUP);
                    }
                }
                // The second sum is for the second half, if halves have their own scales.
                let mut exact = [[W::splat(0); 2]; M];
                for m in 0..M {
                    let [low, high] = *vectors[m].halves.add(block);
                    exact[m] = match KIND {
                        SUPER_HALVES => [W::splat(-self.zero * low), W::splat(-self.zero * high)],
                        _ => [W::splat(-self.zero * (low + high)), W::splat(0)],
                    };
                }
                macro_rules! add_pair {
                    ($pair:expr, $w:expr) => {{
                        let part = if KIND == SUPER_HALVES { $pair / 8 } else { 0 };
                        for m in 0..M {
                            let pair = vectors[m].pairs.add(block * (BLOCK / 2) + $pair);
                            exact[m][part] = exact[m][part].add_products($w, pair);
                        }
                    }};
                }
                macro_rules! add_nibbles {
                    ($($line:literal)*) => {$({
                        let low = W::load(codes.add($line * 64));
                        add_nibbles!($line, low, 0);
                        add_nibbles!($line, low, 1);
                        add_nibbles!($line, low, 2);
                        add_nibbles!($line, low, 3);
                    })*};
                    ($line:literal, $low:ident, $nibble:literal) => {{
                        let mut w = $low.bits(4 * $nibble, 15);
                        if BITS == 5 {
                            w = w.with_high(W::load(codes.add(256)), 4 - (4 * $line + $nibble), 0x10);
                        }
                        if BITS == 6 {
                            let high = W::load(codes.add(256 + $line / 2 * 64));
                            w = w.with_high(high, 4 - 2 * ($line % 2 * 4 + $nibble), 0x30);
                        }
                        add_pair!(4 * $line + $nibble, w);
                    }};
                }
                if BITS == 8 {
                    for pair in 0..BLOCK / 2 {
                        let w = W::load_i8(codes.add(pair * 2 * GROUP));
                        add_pair!(pair, w);
                    }
                } else {
                    add_nibbles!(0 1 2 3);
                }
                codes = codes.add(code_bytes(BITS));

                let (first, second) = match KIND {
                    PLAIN => (W::Lanes::load_f16(scales.cast(), GROUP), zero),
                    LEAST => (
                        W::Lanes::load_f16(scales.cast(), GROUP),
                        W::Lanes::load_f16(scales.add(2 * GROUP).cast(), GROUP),
                    ),
                    SUPER_LEAST => {
                        let part = scale.mul(W::load_u8_as_f32(scales));
                        (part, zero.sub(least.mul(W::load_u8_as_f32(scales.add(GROUP)))))
                    }
                    _ => {
                        let half = |at: usize| scale.mul(W::load_i8_as_f32(scales.add(at)));
                        (half(0), half(GROUP))
                    }
                };
                scales = scales.add(scale_bytes(self.kind));
                for m in 0..M {
                    let own = W::Lanes::splat(*vectors[m].scales.add(block));
                    sums[m] = sums[m].add(exact[m][0].to_f32().mul(first.mul(own)));
                    if KIND == SUPER_HALVES {
                        sums[m] = sums[m].add(exact[m][1].to_f32().mul(second.mul(own)));
                    }
                    if KIND == LEAST || KIND == SUPER_LEAST {
                        sums[m] = sums[m].add(second.mul(W::Lanes::splat(*vectors[m].sums.add(block))));
                    }
                }
            }
            for (sums, out) in sums.into_iter().zip(&self.out[first..]) {
                let out = out.add(row);
                if live == GROUP { sums.store(out) } else { sums.store_first(out, live) }
            }
        }
    }
}
