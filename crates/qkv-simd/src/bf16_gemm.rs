//! bf16 matrix products accumulated in f32: `C += A · B` with AMX (`TDPBF16PS`) or AVX-512 (`VDPBF16PS`).
//!
//! Both instructions consume two elements of the depth at a time, so the right operand is packed into *blocks* that are
//! [`DEPTH`] deep and [`SIDE`] wide, with pairs of rows interleaved. The left operand is plain rows. The functions here
//! pack either operand from rows of bf16 or from a tile of f32, as they are or transposed.
//!
//! An element of `C` is a pure function of its row of `A`, its column of `B` and the range of chunks: its bits do not
//! depend on how rows and panels were blocked. They do depend on the unit, as f32 bits depend on the instruction set.

#[cfg(target_arch = "x86_64")]
use crate::amx::Tiles;
use crate::isa::Isa;
use crate::number::Real;
use crate::product::{Target, Update};
use crate::span;
use crate::tile::{Exponential, RowGradient, Running, check, check_softmax};
use half::bf16;
use std::marker::PhantomData;
use std::ops::Range;

#[cfg(all(target_arch = "x86_64", feature = "matmul"))]
mod pack_f32;
#[cfg(feature = "matmul")]
mod pack_panels;
#[cfg(target_arch = "x86_64")]
mod softmax;
#[cfg(target_arch = "x86_64")]
mod softmax_gradient;
#[cfg(target_arch = "x86_64")]
mod x86;

/// Depth of a block: what AMX consumes in one step.
pub const DEPTH: usize = 32;

/// Columns of a block, and rows of `C` that are computed together.
pub const SIDE: usize = 16;

/// Elements of a block.
pub const BLOCK: usize = DEPTH * SIDE;

/// Accumulator memory viewed as bf16: two per 32 bits.
pub fn as_bf16<A: Real>(data: &[A]) -> &[bf16] {
    // SAFETY: any bits are a bf16, whose alignment is smaller, and the length covers the same bytes.
    unsafe { std::slice::from_raw_parts(data.as_ptr().cast(), size_of_val(data) / 2) }
}

/// Accumulator memory, mutably viewed as bf16.
pub fn as_bf16_mut<A: Real>(data: &mut [A]) -> &mut [bf16] {
    // SAFETY: as in `as_bf16`; any bits that are written are valid accumulators as well.
    unsafe { std::slice::from_raw_parts_mut(data.as_mut_ptr().cast(), size_of_val(data) / 2) }
}

/// Accumulators of type f32, mutably viewed as f32.
///
/// # Panics
/// If the accumulator type is f64.
pub fn as_f32_mut<A: Real>(data: &mut [A]) -> &mut [f32] {
    assert_eq!(size_of::<A>(), size_of::<f32>(), "bf16 products accumulate in f32");
    // SAFETY: of the two accumulator types, f32 is the one of this size.
    unsafe { std::slice::from_raw_parts_mut(data.as_mut_ptr().cast(), data.len()) }
}

/// Accumulators of type f32, viewed as f32.
///
/// # Panics
/// If the accumulator type is f64.
pub fn as_f32<A: Real>(data: &[A]) -> &[f32] {
    assert_eq!(size_of::<A>(), size_of::<f32>(), "bf16 products accumulate in f32");
    // SAFETY: as in `as_f32_mut`.
    unsafe { std::slice::from_raw_parts(data.as_ptr().cast(), data.len()) }
}

/// `depth` rounded up to whole blocks.
pub const fn padded_depth(depth: usize) -> usize {
    depth.div_ceil(DEPTH).saturating_mul(DEPTH)
}

/// Elements of a packed right operand of this depth and width.
pub const fn packed_b_len(depth: usize, width: usize) -> usize {
    padded_depth(depth).saturating_mul(width.div_ceil(SIDE)).saturating_mul(SIDE)
}

/// The left operand: rows with stride `row`, with zeros from the end of the depth to the end of its last chunk.
#[derive(Clone, Copy, Debug)]
pub struct PackedA<'a> {
    /// The elements.
    pub data: &'a [bf16],
    /// The distance between rows.
    pub row: usize,
}

/// The right operand: blocks, panel by panel.
#[derive(Clone, Copy, Debug)]
pub struct PackedB<'a> {
    /// The elements.
    pub data: &'a [bf16],
    /// Blocks in a panel.
    pub chunks: usize,
    /// Whether AMX loads it non-temporally, which keeps the first-level cache for the other operands.
    pub non_temporal: bool,
}

/// The `C` of [`Bf16Gemm::product_raw`]: memory, the distance between rows, and whether the product is added to it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawTarget {
    pub data: *mut f32,
    pub row: usize,
    pub add: bool,
}

/// Rows of f32 that are rounded to bf16 while they are packed.
#[cfg(feature = "matmul")]
#[derive(Clone, Copy, Debug)]
pub(crate) struct F32Rows<'a> {
    data: &'a [f32],
    pitch: usize,
    count: usize,
    width: usize,
}

#[cfg(feature = "matmul")]
impl<'a> F32Rows<'a> {
    /// `count` rows of `width` elements with stride `pitch`.
    ///
    /// # Panics
    /// If the slice is too short.
    pub fn new(data: &'a [f32], pitch: usize, count: usize, width: usize) -> Self {
        assert!(pitch >= width && data.len() >= span(count, pitch, width), "the rows are too short");
        F32Rows { data, pitch, count, width }
    }
}

/// Where [`Bf16Gemm::softmax_gradient`] writes: one chunk of two right operands.
#[derive(Debug)]
pub struct GradientOperands<'a> {
    /// The blocks of the weights.
    pub weights: &'a mut [bf16],
    /// The blocks of the gradients of the scores.
    pub grads: &'a mut [bf16],
    /// Blocks in a panel.
    pub chunks: usize,
    /// The chunk to write.
    pub chunk: usize,
}

/// bf16 matrix products on this thread. With AMX it holds the thread's tile configuration for as long as it lives.
#[derive(Debug)]
pub struct Bf16Gemm {
    unit: Unit,
    /// Tiles are configured for one thread.
    here: PhantomData<*const ()>,
}

/// The unit that computes the products. Only x86-64 has one.
#[derive(Debug)]
enum Unit {
    /// `VDPBF16PS` of AVX-512.
    #[cfg(target_arch = "x86_64")]
    Dots,
    /// `TDPBF16PS` of AMX.
    #[cfg(target_arch = "x86_64")]
    Amx(#[allow(dead_code)] Tiles),
}

impl Unit {
    #[cfg(target_arch = "x86_64")]
    fn of(isa: Isa) -> Option<Unit> {
        if isa.has_amx() {
            // SAFETY: such an `Isa` exists only where the CPU has AMX and the system permitted it.
            return Some(Unit::Amx(unsafe { Tiles::new() }));
        }
        isa.has_bf16_products().then_some(Unit::Dots)
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn of(_: Isa) -> Option<Unit> {
        None
    }
}

impl Bf16Gemm {
    /// Whether the instruction set has bf16 products.
    pub fn available(isa: Isa) -> bool {
        isa.has_bf16_products()
    }

    /// Prepares this thread for bf16 products, if the instruction set has them.
    pub fn new(isa: Isa) -> Option<Bf16Gemm> {
        Unit::of(isa).map(|unit| Bf16Gemm { unit, here: PhantomData })
    }

    /// `C = A · B` or `C += A · B`, over a range of panels of `C` and a range of chunks of the depth. Rows are computed
    /// in multiples of [`SIDE`]: `A` and `C` must have memory for these, and the rows of `C` beyond `rows` may be
    /// overwritten with anything.
    ///
    /// # Panics
    /// If a slice is too short, or the update is [`Update::AddPartial`], which AMX cannot do.
    pub fn product(
        &self,
        c: Target<'_, f32>,
        a: PackedA<'_>,
        b: PackedB<'_>,
        rows: usize,
        panels: Range<usize>,
        chunks: Range<usize>,
    ) {
        if rows == 0 || panels.is_empty() {
            return;
        }
        assert!(!matches!(c.update, Update::AddPartial { .. }), "bf16 products overwrite or accumulate");
        let (tall, width) = (rows.div_ceil(SIDE).saturating_mul(SIDE), panels.end.saturating_mul(SIDE));
        assert!(c.row >= width && c.data.len() >= span(tall, c.row, width), "C is too short");
        let to = RawTarget { data: c.data.as_mut_ptr(), row: c.row, add: c.update == Update::Accumulate };
        // SAFETY: C was just checked, and is borrowed mutably.
        unsafe { self.product_raw(to, a, b, rows, panels, chunks) }
    }

    /// [`Self::product`] into memory of which other threads write other parts at the same time.
    ///
    /// # Safety
    /// The rows and panels of `C` are valid memory, which nothing else accesses at the same time.
    ///
    /// # Panics
    /// If an operand is too short.
    pub(crate) unsafe fn product_raw(
        &self,
        c: RawTarget,
        a: PackedA<'_>,
        b: PackedB<'_>,
        rows: usize,
        panels: Range<usize>,
        chunks: Range<usize>,
    ) {
        let (rows, depth) = (rows.div_ceil(SIDE).saturating_mul(SIDE), chunks.end.saturating_mul(DEPTH));
        assert!(a.row >= depth && a.data.len() >= span(rows, a.row, depth), "A is too short");
        let blocks = panels.end.saturating_mul(b.chunks);
        assert!(chunks.end <= b.chunks && b.data.len() >= blocks.saturating_mul(BLOCK), "B is too short");
        #[cfg(target_arch = "x86_64")]
        // SAFETY: every row, panel and chunk lies inside its slice, as just checked, and those of C inside their
        // memory, as the caller guarantees; `self` exists only where the CPU has the instructions, and AMX tiles are
        // configured on this thread, which `self` cannot leave.
        unsafe {
            match self.unit {
                Unit::Amx(_) => x86::amx(c, a, b, rows, panels, chunks),
                Unit::Dots => x86::dots(c, a, b, rows, panels, chunks),
            }
        }
    }

    /// Packs `B = rowsᵀ`: `count` rows with stride `row` become its columns, and `chunks` chunks of each row its depth.
    /// Columns beyond the last row are zero.
    ///
    /// # Panics
    /// If a slice is too short.
    pub fn pack_b_transposed(&self, rows: &[bf16], row: usize, count: usize, chunks: usize, out: &mut [bf16]) {
        let depth = chunks.saturating_mul(DEPTH);
        assert!(row >= depth && rows.len() >= span(count, row, depth), "the rows are too short");
        assert!(out.len() >= packed_b_len(depth, count), "too little memory for the blocks");
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the lengths were checked; `self` exists only where the CPU has the instructions.
        unsafe {
            x86::pack_b_transposed(rows, row, count, chunks, out);
        }
    }

    /// Copies a slice and returns whether all elements are finite.
    ///
    /// # Panics
    /// If the two differ in length.
    pub fn copy_checking_finite(&self, from: &[bf16], to: &mut [bf16]) -> bool {
        assert_eq!(from.len(), to.len());
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `self` exists only where the CPU has the instructions.
        unsafe {
            x86::copy_checking_finite(from, to)
        }
        #[cfg(not(target_arch = "x86_64"))]
        match self.unit {}
    }

    /// Packs `B = rows`: `count` rows with stride `row` become its depth, and `panels` panels of each row its width.
    /// Returns whether all elements are finite.
    ///
    /// # Panics
    /// If a slice is too short.
    pub fn pack_b(&self, rows: &[bf16], row: usize, count: usize, panels: usize, out: &mut [bf16]) -> bool {
        let width = panels.saturating_mul(SIDE);
        assert!(row >= width && rows.len() >= span(count, row, width), "the rows are too short");
        assert!(out.len() >= packed_b_len(count, width), "too little memory for the blocks");
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the lengths were checked; `self` exists only where the CPU has the instructions.
        unsafe {
            x86::pack_b(rows, row, count, panels, out)
        }
        #[cfg(not(target_arch = "x86_64"))]
        match self.unit {}
    }

    /// Packs `A = rowsᵀ`, or some whole chunks of its depth: `panels` panels of rows of `A`, which lie `chunks` chunks
    /// apart.
    ///
    /// # Panics
    /// If a slice is too short.
    pub fn pack_a_transposed(
        &self,
        rows: &[bf16],
        row: usize,
        count: usize,
        panels: usize,
        out: &mut [bf16],
        chunks: usize,
    ) {
        let (width, apart) = (panels.saturating_mul(SIDE), chunks.saturating_mul(DEPTH));
        assert!(row >= width && rows.len() >= span(count, row, width), "the rows are too short");
        let fits = apart >= padded_depth(count) && out.len() >= span(width, apart, padded_depth(count));
        assert!(fits || panels == 0, "too little memory for the rows");
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the lengths were checked; `self` exists only where the CPU has the instructions.
        unsafe {
            x86::pack_a_transposed(rows, row, count, panels, out, chunks);
        }
    }

    /// Rounds rows of f32 to bf16 in place: each row becomes `width` bf16 at the start of its memory, with zeros to the
    /// end of the chunk.
    ///
    /// # Panics
    /// If the tile is too short, or the width is not a multiple of [`SIDE`].
    pub fn narrow_rows(&self, tile: &mut [f32], row: usize, rows: usize, width: usize) {
        assert!(
            width.is_multiple_of(SIDE) && row >= padded_depth(width) && tile.len() >= rows.saturating_mul(row),
            "the tile is too short"
        );
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the lengths were checked; `self` exists only where the CPU has the instructions.
        unsafe {
            x86::narrow_rows(tile, row, rows, width);
        }
    }

    /// [`softmax`](crate::tile::softmax) of a tile whose weights become a left operand: each row becomes `width` bf16
    /// at the start of its memory, with zeros to the end of the chunk. The exponential is accurate to 18 bits; bf16
    /// keeps 8.
    ///
    /// # Panics
    /// If a slice is too short, the width is not whole panels, or the scale is not positive.
    #[inline(always)]
    #[allow(clippy::too_many_arguments)]
    pub fn softmax(
        &self,
        tile: &mut [f32],
        row: usize,
        rows: usize,
        width: usize,
        how: Exponential<'_, f32>,
        running: Running<'_, f32>,
    ) {
        check_softmax(tile, row, rows, width, &how, &running);
        assert!(row >= padded_depth(width) && how.scale > 0.0, "memory for whole chunks, and a positive scale");
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the lengths were checked; `self` exists only where the CPU has the instructions.
        unsafe {
            match (running.entropy_acc.is_empty(), &self.unit) {
                (true, Unit::Amx(_)) => softmax::softmax::<false, true>(tile, row, rows, width, how, running),
                (true, Unit::Dots) => softmax::softmax::<false, false>(tile, row, rows, width, how, running),
                (false, _) => softmax::softmax::<true, false>(tile, row, rows, width, how, running),
            }
        }
    }

    /// [`softmax_gradient`](crate::tile::softmax_gradient), without an entropy term, of up to [`DEPTH`] rows whose
    /// results become operands: the weights and the gradients of the scores each become one chunk of a right operand,
    /// and each row of gradients becomes `width` bf16 at the start of its memory, with zeros to the end of the chunk.
    ///
    /// # Panics
    /// If a slice is too short, or the width is not whole panels.
    #[allow(clippy::too_many_arguments)]
    pub fn softmax_gradient(
        &self,
        scores: &[f32],
        grads: &mut [f32],
        row: usize,
        rows: usize,
        width: usize,
        how: Exponential<'_, f32>,
        of: RowGradient<'_, f32>,
        into: GradientOperands<'_>,
    ) {
        check(scores, row, rows, width);
        check(grads, row, rows, width);
        assert!(
            rows <= DEPTH && row >= padded_depth(width) && grads.len() >= rows.saturating_mul(row),
            "at most a chunk of rows, with memory for whole chunks"
        );
        assert!(how.spans.is_empty() || how.spans.len() >= rows);
        assert!(of.lse.len() >= rows && of.delta.len() >= rows && of.entropy.is_empty());
        let len = into.chunks.saturating_mul(BLOCK).saturating_mul(width / SIDE);
        assert!(
            into.chunk < into.chunks && into.weights.len() >= len && into.grads.len() >= len,
            "too little memory for the blocks"
        );
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the lengths were checked; `self` exists only where the CPU has the instructions.
        unsafe {
            match self.unit {
                Unit::Amx(_) => {
                    softmax_gradient::softmax_gradient::<true>(scores, grads, row, rows, width, how, of, into)
                }
                Unit::Dots => {
                    softmax_gradient::softmax_gradient::<false>(scores, grads, row, rows, width, how, of, into)
                }
            }
        }
    }

    /// Packs up to [`SIDE`] rows of `A` with stride `pitch`, rounded to bf16 and padded with zeros to whole chunks and
    /// to [`SIDE`] rows.
    ///
    /// # Panics
    /// If there are more rows, or there is too little memory.
    #[cfg(feature = "matmul")]
    pub(crate) fn pack_a_f32(&self, rows: F32Rows<'_>, out: &mut [bf16], pitch: usize) {
        let depth = padded_depth(rows.width);
        assert!(rows.count <= SIDE && pitch >= depth && out.len() >= span(SIDE, pitch, depth), "too little memory");
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the lengths were checked; `self` exists only where the CPU has the instructions.
        unsafe {
            pack_f32::a(rows, out, pitch);
        }
    }

    /// The same for `A = rowsᵀ`, with any number of columns.
    ///
    /// # Panics
    /// If there is too little memory.
    #[cfg(feature = "matmul")]
    pub(crate) fn pack_a_f32_transposed(&self, rows: F32Rows<'_>, out: &mut [bf16], pitch: usize) {
        let depth = padded_depth(rows.count);
        let tall = rows.width.div_ceil(SIDE).saturating_mul(SIDE);
        assert!(pitch >= depth && out.len() >= span(tall, pitch, depth), "too little memory");
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        unsafe {
            pack_f32::a_transposed(rows, out, pitch);
        }
    }

    /// Packs `B = rows`, rounded to bf16 and padded with zeros to whole panels and chunks.
    ///
    /// # Panics
    /// If there is too little memory.
    #[cfg(feature = "matmul")]
    pub(crate) fn pack_b_f32(&self, rows: F32Rows<'_>, out: &mut [bf16]) {
        assert!(out.len() >= packed_b_len(rows.count, rows.width), "too little memory");
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        unsafe {
            pack_f32::b(rows, out);
        }
    }

    /// Packs a panel of `B` from up to [`SIDE`] rows that are its columns.
    ///
    /// # Panics
    /// If there are more rows, or there is too little memory.
    #[cfg(feature = "matmul")]
    pub(crate) fn pack_b_f32_transposed(&self, rows: F32Rows<'_>, out: &mut [bf16]) {
        assert!(rows.count <= SIDE && out.len() >= packed_b_len(rows.width, SIDE), "too little memory");
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        unsafe {
            pack_f32::b_transposed(rows, out);
        }
    }

    /// Packs `B = tile`, or some whole chunks of its depth, from rows of f32 that are rounded to bf16. The panels of
    /// `B` lie `chunks` blocks apart.
    ///
    /// # Panics
    /// If a slice is too short.
    pub fn narrow_pack_b(&self, tile: &[f32], row: usize, rows: usize, panels: usize, out: &mut [bf16], chunks: usize) {
        let long = row >= panels.saturating_mul(SIDE) && tile.len() >= rows.saturating_mul(row);
        assert!(long, "the tile is too short");
        let made = padded_depth(rows) / DEPTH;
        let fits = out.len() >= span(panels, chunks, made).saturating_mul(BLOCK);
        assert!(chunks >= made && fits, "too little memory for the blocks");
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the lengths were checked; `self` exists only where the CPU has the instructions.
        unsafe {
            x86::narrow_pack_b(tile, row, rows, panels, out, chunks);
        }
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests;
