//! The matrix products of a tile, in one of three arithmetics: native, in the accumulator type; bf16, if the inputs are
//! bf16 and the CPU has bf16 products; and bf16x3, if the accumulators are f32 and the CPU has AMX.
//!
//! A tile of scores is rows of f32 (or f64) in all of them, so the passes between two products do not depend on the
//! arithmetic.

pub(crate) mod by_key;
mod nonfinite;

use crate::compiled::tile::TileKeys;
use crate::exact::pack::Operand;
use crate::exact::scores::visible::VisiblePanels;
use crate::problem::Problem;
use crate::score::Score;
use crate::scratch::{Buffer, Scratch};
use crate::select::Select;
use crate::tuning::{BF16_ROWS, KEYS, QUERIES, QUERY_TILES_PACKED};
use half::bf16;
use nonfinite::{recompute_nonfinite, zero_nonfinite};
use qkv_simd::bf16_gemm::{
    self, Bf16Gemm, DEPTH, PackedA, PackedB, SIDE, as_bf16, as_bf16_mut, as_f32, as_f32_mut, padded_depth,
};
use qkv_simd::bf16x3_gemm::{self, Bf16x3Gemm};
use qkv_simd::tile::{Exponential, Running, dots, pack_panels, softmax};
use qkv_simd::{Element, Isa, Matrix, Panels, Real, Target, padded, product, product_skipping_zeros};

/// How products are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arithmetic {
    /// In the accumulator type, f32 or f64.
    Native,
    /// bf16 operands accumulated in f32.
    Bf16,
    /// Each f32 split into three bf16 terms, accumulated in f32.
    Bf16x3,
}

impl Arithmetic {
    /// bf16 and bf16x3 need scores without a projection, and a softmax: projected rows are not rounded again, and other
    /// selections read the values themselves.
    pub fn of<T: Element>(problem: &Problem<'_, T>, isa: Isa) -> Arithmetic {
        let as_they_are = matches!(problem.attention.score, Score::Dot | Score::ScaledDot);
        let single = size_of::<T::Acc>() == size_of::<f32>();
        if !as_they_are || problem.attention.select != Select::Soft {
            Arithmetic::Native
        } else if T::IS_BF16 && Bf16Gemm::available(isa) {
            Arithmetic::Bf16
        } else if single && Bf16x3Gemm::available(isa) {
            Arithmetic::Bf16x3
        } else {
            Arithmetic::Native
        }
    }

    /// The arithmetic of gradients, given that of the scores. AMX throughput varies on shared hosts, and the backward
    /// pass has five products for the two of the forward pass: in bf16x3 only the scores use AMX.
    pub fn of_gradients(self) -> Arithmetic {
        if self == Arithmetic::Bf16x3 { Arithmetic::Native } else { self }
    }

    /// Accumulators that a packed row of a left operand takes.
    pub fn packed_a_row<A: Real>(self, width: usize) -> usize {
        match self {
            Arithmetic::Native => padded::<A>(width),
            Arithmetic::Bf16 => padded_depth(width) / 2,
            Arithmetic::Bf16x3 => bf16x3_gemm::packed_a_len(width) / 2,
        }
    }

    /// Accumulators that `rows` rows take as the columns of a right operand.
    pub fn packed_b_transposed_len<A: Real>(self, rows: usize, width: usize) -> usize {
        match self {
            Arithmetic::Native => padded::<A>(rows) * width,
            Arithmetic::Bf16 => bf16_gemm::packed_b_len(width, rows) / 2,
            Arithmetic::Bf16x3 => bf16x3_gemm::packed_b_len(width, rows) / 2,
        }
    }

    /// Accumulators that `rows` rows take as the rows of a right operand.
    pub fn packed_b_len<A: Real>(self, rows: usize, width: usize) -> usize {
        match self {
            Arithmetic::Native => rows * padded::<A>(width),
            Arithmetic::Bf16 => bf16_gemm::packed_b_len(rows, width) / 2,
            Arithmetic::Bf16x3 => bf16x3_gemm::packed_b_len(rows, width) / 2,
        }
    }

    /// Tiles of queries that are packed together for the backward pass.
    pub fn query_tiles_packed(self) -> usize {
        match self {
            Arithmetic::Native | Arithmetic::Bf16x3 => 1,
            Arithmetic::Bf16 => QUERY_TILES_PACKED,
        }
    }

    /// Rows of a tile that go through all of its passes together.
    pub fn rows_at_once(self) -> usize {
        match self {
            Arithmetic::Native => QUERIES,
            Arithmetic::Bf16 | Arithmetic::Bf16x3 => BF16_ROWS,
        }
    }
}

/// The matrix products of a worker: its arithmetic, its AMX tiles and its packing buffers.
pub(crate) struct TileGemm<'s, A: Real> {
    pub(super) isa: Isa,
    pub arithmetic: Arithmetic,
    pub(super) bf16: Option<Bf16Gemm>,
    pub(super) bf16x3: Option<Bf16x3Gemm>,
    /// Rows of a tile before they are packed.
    pub(super) stage: Buffer<'s, A>,
    /// The low terms of the most recently split weights.
    low: Buffer<'s, A>,
}

impl<'s, A: Real> TileGemm<'s, A> {
    /// For operands of up to `width` elements per row.
    pub fn new(scratch: &'s Scratch<A>, isa: Isa, arithmetic: Arithmetic, width: usize) -> Self {
        let bf16 = if arithmetic == Arithmetic::Bf16 { Bf16Gemm::new(isa) } else { None };
        let bf16x3 = if arithmetic == Arithmetic::Bf16x3 { Bf16x3Gemm::new(isa) } else { None };
        let low = scratch.take(if bf16x3.is_some() { QUERIES * KEYS / 2 } else { 0 });
        // The rows of a tile, or its rounded weights.
        let rows = KEYS.max(QUERIES) * arithmetic.packed_a_row::<A>(width);
        let stage = scratch.take(rows.max(bf16_gemm::packed_b_len(QUERIES, KEYS) / 2));
        TileGemm { isa, arithmetic, bf16, bf16x3, stage, low }
    }

    /// The bf16 products; only in that arithmetic.
    pub(super) fn bf16(&self) -> &Bf16Gemm {
        self.bf16.as_ref().expect("made with the gemm of this arithmetic")
    }

    /// The bf16x3 products; only in that arithmetic.
    pub(super) fn bf16x3(&self) -> &Bf16x3Gemm {
        self.bf16x3.as_ref().expect("made with the gemm of this arithmetic")
    }

    /// Packs rows as a left operand. Returns whether all are finite; in bf16x3, whether their
    /// [`matmul_qk`](TileGemm::matmul_qk) cannot overflow.
    pub fn pack_a<T: Element<Acc = A>>(
        &mut self,
        from: Operand<'_, T>,
        rows: impl Iterator<Item = (usize, usize, usize)> + Clone,
        out: &mut [A],
    ) -> bool {
        if self.arithmetic != Arithmetic::Bf16x3 {
            return pack_a_rows(self.arithmetic, self.bf16.as_ref(), from, rows, out);
        }
        let (width, row, count) = (from.width(), padded::<A>(from.width()), rows.clone().count());
        load_rows(Arithmetic::Native, from, rows, &mut self.stage);
        self.bf16x3().pack_a(as_f32(&self.stage), row, count, width, as_bf16_mut(out))
    }

    /// Dot products of up to [`QUERIES`] pairs of rows, the first of which are packed as a left operand, with the
    /// summation order of [`matmul_qk`](TileGemm::matmul_qk): sums that are equal term by term have equal bits.
    pub fn row_dots<T: Element<Acc = A>>(
        &mut self,
        loaded: &[A],
        of: Operand<'_, T>,
        rows: impl Iterator<Item = (usize, usize, usize)> + Clone,
        out: &mut [A],
    ) {
        let row = self.arithmetic.packed_a_row::<A>(of.width());
        let (right, rest) = self.stage.split_at_mut(QUERIES * row);
        pack_a_rows(self.arithmetic, self.bf16.as_ref(), of, rows, right);
        match &self.bf16 {
            None => dots(self.isa, loaded, right, row, out),
            Some(gemm) => {
                let (columns, sums) = rest.split_at_mut(SIDE * row);
                let chunks = 2 * row / DEPTH;
                for (at, out) in out.chunks_mut(SIDE).enumerate() {
                    let right = &as_bf16(right)[at * SIDE * 2 * row..];
                    gemm.pack_b_transposed(right, 2 * row, out.len(), chunks, as_bf16_mut(columns));
                    let left = PackedA { data: &as_bf16(loaded)[at * SIDE * 2 * row..], row: 2 * row };
                    let right = PackedB { data: as_bf16(columns), chunks, non_temporal: false };
                    gemm.product(Target::overwrite(as_f32_mut(sums), SIDE), left, right, SIDE, 0..1, 0..chunks);
                    out.iter_mut().enumerate().for_each(|(r, out)| *out = sums[r * SIDE + r]);
                }
            }
        }
    }

    /// Packs keys as the columns of a right operand. Returns whether their [`matmul_qk`](TileGemm::matmul_qk) cannot
    /// overflow.
    pub fn pack_b_transposed<T: Element<Acc = A>>(
        &mut self,
        from: Operand<'_, T>,
        (b, h): (usize, usize),
        keys: &TileKeys<'_>,
        out: &mut [A],
    ) -> bool {
        let width = from.width();
        let row = self.arithmetic.packed_a_row::<A>(width);
        match self.arithmetic {
            Arithmetic::Native => {
                self.stage_rows(from, (b, h), keys);
                pack_panels(self.isa, &self.stage, row, keys.len, width, out);
            }
            Arithmetic::Bf16 => {
                let (chunks, out) = (padded_depth(width) / DEPTH, as_bf16_mut(out));
                // Contiguous rows of whole chunks are packed in place.
                if let Some((rows, row)) = contiguous_keys(&from, (b, h), keys).filter(|_| width == padded_depth(width))
                {
                    self.bf16().pack_b_transposed(rows, row, keys.len, chunks, out);
                } else {
                    self.stage_rows(from, (b, h), keys);
                    self.bf16().pack_b_transposed(as_bf16(&self.stage), 2 * row, keys.len, chunks, out);
                }
            }
            Arithmetic::Bf16x3 => {
                self.stage_rows(from, (b, h), keys);
                let rows = as_f32(&self.stage);
                return self.bf16x3().pack_b_transposed(rows, padded::<A>(width), keys.len, width, as_bf16_mut(out));
            }
        }
        true
    }

    /// Packs keys as the rows of a right operand. Returns whether all are finite. In bf16 and bf16x3 non-finite
    /// elements become zero, and [`matmul_pv`](TileGemm::matmul_pv) adds them afterwards.
    pub fn pack_b<T: Element<Acc = A>>(
        &mut self,
        from: Operand<'_, T>,
        (b, h): (usize, usize),
        keys: &TileKeys<'_>,
        out: &mut [A],
    ) -> bool {
        match self.arithmetic {
            Arithmetic::Native => self.pack_a(from, (0..keys.len).map(|at| (b, h, keys.index(at))), out),
            Arithmetic::Bf16 => {
                let (panels, out) = (from.width().div_ceil(SIDE), as_bf16_mut(out));
                if let Some((rows, row)) =
                    contiguous_keys(&from, (b, h), keys).filter(|_| from.width() == panels * SIDE)
                    && self.bf16().pack_b(rows, row, keys.len, panels, out)
                {
                    return true;
                }
                let row = 2 * self.arithmetic.packed_a_row::<A>(from.width());
                let finite = self.stage_rows(from, (b, h), keys);
                if !finite {
                    zero_nonfinite(&mut as_bf16_mut(&mut self.stage)[..keys.len * row]);
                }
                self.bf16().pack_b(as_bf16(&self.stage), row, keys.len, panels, out);
                finite
            }
            Arithmetic::Bf16x3 => {
                let row = padded::<A>(from.width());
                let finite = self.stage_rows(from, (b, h), keys);
                if !finite {
                    zero_nonfinite(&mut self.stage[..keys.len * row]);
                }
                self.bf16x3().pack_b(as_f32(&self.stage), row, keys.len, row / SIDE, as_bf16_mut(out));
                finite
            }
        }
    }

    /// Packs keys as the columns of one right operand and as the rows of another. Returns whether all are finite.
    pub fn pack_b_both<T: Element<Acc = A>>(
        &mut self,
        from: Operand<'_, T>,
        at: (usize, usize),
        keys: &TileKeys<'_>,
        (columns, rows): (&mut [A], &mut [A]),
    ) -> bool {
        let finite = self.pack_b(from, at, keys, rows);
        match self.arithmetic {
            // Native rows are already what the panels are packed from.
            Arithmetic::Native => {
                pack_panels(self.isa, rows, padded::<A>(from.width()), keys.len, from.width(), columns)
            }
            Arithmetic::Bf16 | Arithmetic::Bf16x3 => {
                self.pack_b_transposed(from, at, keys, columns);
            }
        }
        finite
    }

    fn stage_rows<T: Element<Acc = A>>(
        &mut self,
        from: Operand<'_, T>,
        (b, h): (usize, usize),
        keys: &TileKeys<'_>,
    ) -> bool {
        let arithmetic = if self.arithmetic == Arithmetic::Bf16 { Arithmetic::Bf16 } else { Arithmetic::Native };
        load_rows(arithmetic, from, (0..keys.len).map(|at| (b, h, keys.index(at))), &mut self.stage)
    }

    /// Raw scores `Q · Kᵀ`, rows of [`KEYS`], in the panels that the rows see. `no_overflow`: packing proved that the
    /// products cannot overflow.
    #[allow(clippy::too_many_arguments)]
    pub fn matmul_qk(
        &self,
        left: &[A],
        rows: usize,
        columns: &[A],
        width: usize,
        visible: VisiblePanels<'_>,
        no_overflow: bool,
        out: &mut [A],
    ) {
        let row = self.arithmetic.packed_a_row::<A>(width);
        for (strip, span) in visible.row_strips(rows, self.arithmetic) {
            let (left, out) = (&left[strip.start * row..], &mut out[strip.start * KEYS..]);
            let (start, panels) = (span.start as usize, span.start as usize..span.end as usize);
            match self.arithmetic {
                Arithmetic::Native => {
                    let columns = Panels::packed(&columns[start * width * A::LANES..], width);
                    let out = Target::overwrite(&mut out[start * A::LANES..], KEYS);
                    product(self.isa, out, Matrix::rows(left, row), columns, strip.len(), panels.len(), width);
                }
                Arithmetic::Bf16 => {
                    let chunks = padded_depth(width) / DEPTH;
                    let (left, right) = (
                        PackedA { data: as_bf16(left), row: 2 * row },
                        PackedB { data: as_bf16(columns), chunks, non_temporal: true },
                    );
                    self.bf16().product(
                        Target::overwrite(as_f32_mut(out), KEYS),
                        left,
                        right,
                        strip.len(),
                        panels,
                        0..chunks,
                    );
                }
                Arithmetic::Bf16x3 => {
                    let chunks = padded_depth(width) / DEPTH;
                    let (left, right) = (as_bf16(left), bf16x3_gemm::SplitB { data: as_bf16(columns), chunks });
                    let (to, of) = (Target::overwrite(as_f32_mut(out), KEYS), bf16x3_gemm::SplitA::rows(left, width));
                    self.bf16x3().product(to, of, right, strip.len(), panels.clone(), 0..chunks);
                    if !no_overflow {
                        recompute_nonfinite(left, right, width, strip.len(), panels, as_f32_mut(out));
                    }
                }
            }
        }
    }

    /// Turns finished scores, rows of [`KEYS`], into weights for [`matmul_pv`](TileGemm::matmul_pv), and updates the
    /// running softmax state of their rows; `modulate` changes the weights before they are rounded.
    #[inline(always)]
    #[allow(clippy::too_many_arguments)]
    pub fn softmax_tile(
        &mut self,
        scores: &mut [A],
        rows: usize,
        keys: usize,
        how: Exponential<'_, A>,
        running: Running<'_, A>,
        modulate: Option<impl FnOnce(&mut [A])>,
    ) {
        let width = padded::<A>(keys);
        match (self.arithmetic, modulate) {
            (Arithmetic::Bf16, None) => {
                let Running { max, sum, entropy_acc, factor } = running;
                let how =
                    Exponential { scale: how.scale.to_f64() as f32, spans: how.spans, accurate_exp: how.accurate_exp };
                let [max, sum, entropy_acc, factor] = [max, sum, entropy_acc, factor].map(|of| as_f32_mut(of));
                let running = Running { max, sum, entropy_acc, factor };
                self.bf16().softmax(as_f32_mut(scores), KEYS, rows, width, how, running);
            }
            (_, modulate) => {
                softmax(self.isa, scores, KEYS, rows, width, how, running);
                if let Some(modulate) = modulate {
                    modulate(scores);
                }
                self.round_weights(scores, rows, keys);
            }
        }
    }

    /// Rounds or splits weights, rows of [`KEYS`], in place, for [`matmul_pv`](TileGemm::matmul_pv).
    pub fn round_weights(&mut self, weights: &mut [A], rows: usize, keys: usize) {
        let (weights, width) = (&mut weights[..], padded::<A>(keys));
        match self.arithmetic {
            Arithmetic::Native => {}
            Arithmetic::Bf16 => self.bf16().narrow_rows(as_f32_mut(weights), KEYS, rows, width),
            Arithmetic::Bf16x3 => {
                let TileGemm { bf16x3, low, .. } = self;
                let gemm = bf16x3.as_ref().expect("made with the gemm of this arithmetic");
                gemm.split_rows(as_f32_mut(weights), KEYS, rows, width, as_bf16_mut(low), KEYS);
            }
        }
    }

    /// `out = P · V` or `out += P · V`, for weights in rows of [`KEYS`] and the packed rows of a tile of keys; `dS · K`
    /// in the backward pass. In bf16 the weights are already rounded; in bf16x3 they are the most recently split ones.
    ///
    /// A weight of zero marks an absent pair, whose row has no effect.
    pub fn matmul_pv<T: Element<Acc = A>>(
        &mut self,
        weights: &[A],
        rows: usize,
        of: PackedRows<'_, T>,
        visible: VisiblePanels<'_>,
        out: &mut [A],
        overwrite: bool,
    ) {
        let row = padded::<A>(of.from.width());
        let panels = row / A::LANES;
        for (strip, span) in visible.row_strips(rows, self.arithmetic) {
            let (weights, out) = (&weights[strip.start * KEYS..], &mut out[strip.start * row..]);
            match self.arithmetic {
                Arithmetic::Native => {
                    let (start, end) =
                        (span.start as usize * A::LANES, (span.end as usize * A::LANES).min(of.keys.len));
                    let multiply = if of.finite { product } else { product_skipping_zeros };
                    let (weights, rows) =
                        (Matrix::rows(&weights[start..], KEYS), Panels::rows(&of.rows[start * row..], row));
                    let out = if overwrite { Target::overwrite(out, row) } else { Target::add_partial(out, row) };
                    multiply(self.isa, out, weights, rows, strip.len(), panels, end - start);
                }
                Arithmetic::Bf16 => {
                    let chunks = of.keys.len.div_ceil(DEPTH);
                    let live_chunks = span.start as usize * SIDE / DEPTH..(span.end as usize * SIDE).div_ceil(DEPTH);
                    let right = PackedB { data: as_bf16(of.rows), chunks, non_temporal: true };
                    let left = PackedA { data: as_bf16(weights), row: 2 * KEYS };
                    let sums = as_f32_mut(out);
                    let sums = if overwrite { Target::overwrite(sums, row) } else { Target::accumulate(sums, row) };
                    self.bf16().product(sums, left, right, strip.len(), 0..panels, live_chunks);
                    if !of.finite {
                        self.add_nonfinite(weights, strip.len(), &of, out);
                    }
                }
                Arithmetic::Bf16x3 => {
                    let chunks = of.keys.len.div_ceil(DEPTH);
                    let live_chunks = span.start as usize * SIDE / DEPTH..(span.end as usize * SIDE).div_ceil(DEPTH);
                    let right = bf16x3_gemm::SplitB { data: as_bf16(of.rows), chunks };
                    let low = &as_bf16(&self.low)[strip.start * KEYS..];
                    let left = bf16x3_gemm::SplitA { high: as_bf16(weights), row: 2 * KEYS, low, low_row: KEYS };
                    let sums = as_f32_mut(out);
                    let sums = if overwrite { Target::overwrite(sums, row) } else { Target::add_partial(sums, row) };
                    self.bf16x3().product(sums, left, right, strip.len(), 0..panels, live_chunks);
                    if !of.finite {
                        self.add_nonfinite(weights, strip.len(), &of, out);
                    }
                }
            }
        }
    }
}

/// The keys of a tile as bf16 in place: one slice, and the row stride.
fn contiguous_keys<'b, T: Element>(
    from: &'b Operand<'_, T>,
    (b, h): (usize, usize),
    keys: &TileKeys<'_>,
) -> Option<(&'b [bf16], usize)> {
    let Operand::Input(source) = from else { return None };
    let (rows, row) = source.slab(b, h, keys.natural()?, keys.len)?;
    Some((T::as_bf16(rows)?, row))
}

/// The first of some rows and their number, if they are consecutive rows of one head.
fn consecutive(mut rows: impl Iterator<Item = (usize, usize, usize)>) -> Option<((usize, usize, usize), usize)> {
    let (b, h, first) = rows.next()?;
    let mut count = 1;
    for row in rows {
        if row != (b, h, first + count) {
            return None;
        }
        count += 1;
    }
    Some(((b, h, first), count))
}

/// Consecutive rows of whole chunks as bf16 in place: one slice, the row stride, and the number of rows.
fn contiguous_rows<'b, T: Element>(
    from: &'b Operand<'_, T>,
    rows: impl Iterator<Item = (usize, usize, usize)>,
) -> Option<(&'b [bf16], usize, usize)> {
    let Operand::Input(source) = from else { return None };
    let ((b, h, first), count) = consecutive(rows).filter(|_| from.width() == padded_depth(from.width()))?;
    let (rows, row) = source.slab(b, h, first, count)?;
    Some((T::as_bf16(rows)?, row, count))
}

/// Packs rows as a left operand. Returns whether all are finite.
fn pack_a_rows<T: Element>(
    arithmetic: Arithmetic,
    gemm: Option<&Bf16Gemm>,
    from: Operand<'_, T>,
    rows: impl Iterator<Item = (usize, usize, usize)> + Clone,
    out: &mut [T::Acc],
) -> bool {
    let Some((gemm, (contiguous, row, count))) = gemm.zip(contiguous_rows(&from, rows.clone())) else {
        return load_rows(arithmetic, from, rows, out);
    };
    let (width, out) = (from.width(), as_bf16_mut(out));
    if row == width {
        return gemm.copy_checking_finite(contiguous, &mut out[..count * width]);
    }
    let rows = out.chunks_exact_mut(width).zip(contiguous.chunks(row));
    rows.fold(true, |finite, (to, from)| gemm.copy_checking_finite(&from[..width], to) && finite)
}

/// Loads dense rows. Returns whether all are finite.
fn load_rows<T: Element>(
    arithmetic: Arithmetic,
    from: Operand<'_, T>,
    rows: impl Iterator<Item = (usize, usize, usize)> + Clone,
    out: &mut [T::Acc],
) -> bool {
    let row = arithmetic.packed_a_row::<T::Acc>(from.width());
    match (arithmetic, consecutive(rows.clone())) {
        (Arithmetic::Native, Some(((b, h, first), count))) => from.load_rows(b, h, first, &mut out[..count * row], row),
        (Arithmetic::Native, None) => load_each(rows, row, out, |(b, h, i), out| from.load_row(b, h, i, out)),
        (Arithmetic::Bf16, _) => load_each(rows, row, out, |(b, h, i), out| from.load_bf16(b, h, i, as_bf16_mut(out))),
        (Arithmetic::Bf16x3, _) => unreachable!("rows are taken apart after they were loaded"),
    }
}

/// Loads rows one by one. Returns whether all are finite.
fn load_each<A>(
    rows: impl Iterator<Item = (usize, usize, usize)>,
    row: usize,
    out: &mut [A],
    load: impl Fn((usize, usize, usize), &mut [A]) -> bool,
) -> bool {
    rows.zip(out.chunks_exact_mut(row.max(1))).fold(true, |finite, (at, out)| load(at, out) && finite)
}

/// The packed rows of a tile of keys or values, and where they came from.
#[derive(Clone, Copy)]
pub(crate) struct PackedRows<'a, T: Element> {
    pub rows: &'a [T::Acc],
    pub finite: bool,
    pub from: Operand<'a, T>,
    pub b: usize,
    pub h: usize,
    pub keys: &'a TileKeys<'a>,
}
