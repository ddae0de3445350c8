//! Products by key in the backward pass: transposed weights and gradients of scores, times rows of queries.
//!
//! Native operands can be read in either orientation. In bf16 a transpose is a separate operand: queries are packed
//! both ways once, several tiles together, and the weights are rounded two rows at a time.

use super::nonfinite::zero_nonfinite;
use super::{Arithmetic, TileGemm};
use crate::exact::pack::Operand;
use crate::exact::scores::visible::VisiblePanels;
use crate::mask::RowAt;
use crate::tuning::{KEYS, QUERIES};
use qkv_simd::bf16_gemm::{
    self, DEPTH, GradientOperands, PackedA, PackedB, SIDE, as_bf16, as_bf16_mut, as_f32, as_f32_mut, padded_depth,
};
use qkv_simd::tile::{Exponential, RowGradient, Span, transpose};
use qkv_simd::{Element, Matrix, Panels, Real, Target, padded, product, product_skipping_zeros};
use std::ops::Range;

/// The rows of a tile of queries, packed both ways together with neighboring tiles.
#[derive(Clone, Copy)]
pub(crate) struct PackedQueries<'a, A> {
    /// The rows of the tile as a left operand.
    pub rows: &'a [A],
    /// All packed rows as the columns of a left operand, in bf16.
    pub transposed: &'a [A],
    /// The number of rows packed together, and the first row of the tile among them.
    pub packed_rows: usize,
    pub first: usize,
    /// Whether all of them are finite, and their scores cannot overflow.
    pub finite: bool,
    /// The rows of the tile as a left operand of scores, if scores use another arithmetic.
    pub scored: Option<&'a [A]>,
}

/// The right-hand side of a transposed product: packed rows of queries, and where they came from.
#[derive(Clone, Copy)]
pub(crate) struct TransposedProduct<'a, T: Element> {
    pub packed: PackedQueries<'a, T::Acc>,
    pub from: Operand<'a, T>,
    pub rows: &'a [RowAt],
    /// Keys in the tile.
    pub keys: usize,
    /// Rows accumulated in a fresh partial sum before they are added.
    pub partial_sum: usize,
}

impl<A: Real> TileGemm<'_, A> {
    /// Packs the rows of some tiles of queries for the backward pass: as a left operand, and in bf16 as the columns of
    /// another, in which non-finite elements are zero. Returns whether all are finite.
    pub fn pack_both<T: Element<Acc = A>>(
        &mut self,
        from: Operand<'_, T>,
        rows: impl ExactSizeIterator<Item = (usize, usize, usize)> + Clone,
        out: &mut [A],
    ) -> bool {
        let (count, row) = (rows.len(), self.arithmetic.packed_a_row::<A>(from.width()));
        let (to, transposed) = out.split_at_mut(self.arithmetic.query_tiles_packed() * QUERIES * row);
        let finite = self.pack_a(from, rows, to);
        if self.arithmetic == Arithmetic::Bf16 {
            let (panels, chunks) = (from.width().div_ceil(SIDE), count.div_ceil(DEPTH));
            for start in (0..count).step_by(QUERIES) {
                let (count, mut rows) = (QUERIES.min(count - start), &to[start * row..][..QUERIES * row]);
                if !finite {
                    self.stage[..rows.len()].copy_from_slice(rows);
                    zero_nonfinite(&mut as_bf16_mut(&mut self.stage)[..count * 2 * row]);
                    rows = &self.stage[..rows.len()];
                }
                let out = &mut as_bf16_mut(transposed)[start..];
                self.bf16().pack_a_transposed(as_bf16(rows), 2 * row, count, panels, out, chunks);
            }
        }
        finite
    }

    /// The length of the output of [`pack_both`](TileGemm::pack_both).
    pub fn pack_both_len(arithmetic: Arithmetic, width: usize) -> usize {
        let rows = arithmetic.query_tiles_packed() * QUERIES;
        let transposed = if arithmetic == Arithmetic::Bf16 { bf16_gemm::packed_b_len(rows, width) / 2 } else { 0 };
        rows * arithmetic.packed_a_row::<A>(width) + transposed
    }

    /// Turns finished scores and gradients of weights, up to [`BF16_ROWS`] rows of [`KEYS`], into the operands of the
    /// remaining products: both by key, as [`pack_transposed`](TileGemm::pack_transposed) would, with their first row
    /// at `first` of the rows packed together; and the gradients as [`round_weights`](TileGemm::round_weights) would.
    #[allow(clippy::too_many_arguments)]
    pub fn softmax_gradient_tile(
        &self,
        scores: &[A],
        grads: &mut [A],
        (rows, keys): (usize, usize),
        how: Exponential<'_, A>,
        of: RowGradient<'_, A>,
        (first, packed_rows): (usize, usize),
        [weights, transposed]: [&mut [A]; 2],
    ) {
        let single = |x: A| x.to_f64() as f32;
        let how = Exponential { scale: single(how.scale), spans: how.spans, accurate_exp: how.accurate_exp };
        let of = RowGradient {
            lse: as_f32(of.lse),
            delta: as_f32(of.delta),
            entropy: as_f32(of.entropy),
            scale: single(of.scale),
        };
        let (chunks, chunk) = (packed_rows.div_ceil(DEPTH), first / DEPTH);
        let into = GradientOperands { weights: as_bf16_mut(weights), grads: as_bf16_mut(transposed), chunks, chunk };
        let width = padded::<A>(keys);
        self.bf16().softmax_gradient(as_f32(scores), as_f32_mut(grads), KEYS, rows, width, how, of, into);
    }

    /// The length of the output of [`pack_transposed`](TileGemm::pack_transposed).
    pub fn transposed_len(arithmetic: Arithmetic) -> usize {
        let rows = arithmetic.query_tiles_packed() * QUERIES;
        if arithmetic == Arithmetic::Bf16 { bf16_gemm::packed_b_len(rows, KEYS) / 2 } else { 0 }
    }

    /// Packs weights, rows of [`KEYS`], by key and rounded to bf16, for
    /// [`matmul_transposed`](TileGemm::matmul_transposed); their first row is row `first` of the rows packed together.
    pub fn pack_transposed(
        &self,
        weights: &[A],
        rows: usize,
        visible: VisiblePanels<'_>,
        (first, packed_rows): (usize, usize),
        out: &mut [A],
    ) {
        if self.arithmetic == Arithmetic::Bf16 {
            let (panels, chunks) = (visible.union(rows).end as usize, packed_rows.div_ceil(DEPTH));
            let out = &mut as_bf16_mut(out)[first * SIDE..];
            self.bf16().narrow_pack_b(as_f32(weights), KEYS, rows, panels, out, chunks);
        }
    }

    /// Adds `weightsᵀ · queries` to the sums of each key, for weights in rows of [`KEYS`]. In bf16 the weights are
    /// taken from `transposed`, and the sums stay transposed until [`unpack_key_rows`](TileGemm::unpack_key_rows).
    ///
    /// A weight of zero marks an absent pair, whose query has no effect.
    pub fn matmul_transposed<T: Element<Acc = A>>(
        &mut self,
        (weights, transposed): (&[A], &[A]),
        of: TransposedProduct<'_, T>,
        visible: VisiblePanels<'_>,
        out: &mut [A],
    ) {
        let (width, count) = (of.from.width(), of.rows.len());
        let row = padded::<A>(width);
        match self.arithmetic {
            Arithmetic::Bf16x3 => unreachable!("gradients do not use bf16x3"),
            Arithmetic::Native => {
                let multiply = if of.packed.finite { product } else { product_skipping_zeros };
                for (keys, queries) in visible.key_strips::<A>(count, of.keys) {
                    // Partial sums end at multiples of their length, wherever the rows begin.
                    let aligned = queries.start.next_multiple_of(of.partial_sum).min(queries.end);
                    for rows in
                        [queries.start..aligned, aligned..queries.end].into_iter().filter(|rows| !rows.is_empty())
                    {
                        let weights = Matrix::transposed(&weights[rows.start * KEYS + keys.start..], KEYS);
                        let right = Panels::rows(&of.packed.rows[rows.start * row..], row);
                        let out = Target::add_partials(&mut out[keys.start * row..], row, of.partial_sum);
                        multiply(self.isa, out, weights, right, keys.len(), row / A::LANES, rows.len());
                    }
                }
            }
            Arithmetic::Bf16 => {
                for (strip, span) in visible.row_strips(count, self.arithmetic) {
                    let rows = of.packed.first + strip.start..of.packed.first + strip.end;
                    self.matmul_transposed_rows(transposed, of.packed, rows, span, width, out);
                }
                if !of.packed.finite {
                    self.add_nonfinite_transposed(weights, &of, out);
                }
            }
        }
    }

    /// [`matmul_transposed`](TileGemm::matmul_transposed) of a range of the rows packed together, in bf16 and whole
    /// chunks.
    pub fn matmul_transposed_rows(
        &self,
        transposed: &[A],
        packed: PackedQueries<'_, A>,
        rows: Range<usize>,
        span: Span,
        width: usize,
        out: &mut [A],
    ) {
        let left = PackedA { data: as_bf16(packed.transposed), row: padded_depth(packed.packed_rows) };
        let right =
            PackedB { data: as_bf16(transposed), chunks: packed.packed_rows.div_ceil(DEPTH), non_temporal: false };
        let (panels, chunks) = (span.start as usize..span.end as usize, rows.start / DEPTH..rows.end.div_ceil(DEPTH));
        self.bf16().product(Target::accumulate(as_f32_mut(out), KEYS), left, right, width, panels, chunks);
    }

    /// Adds the non-finite elements that [`pack_both`](TileGemm::pack_both) left out.
    fn add_nonfinite_transposed<T: Element<Acc = A>>(
        &mut self,
        weights: &[A],
        of: &TransposedProduct<'_, T>,
        out: &mut [A],
    ) {
        let row = padded::<A>(of.from.width());
        for (r, at) in of.rows.iter().enumerate() {
            if of.from.load_row(at.b, at.h, at.i, &mut self.stage[..row]) {
                continue;
            }
            for (x, &value) in self.stage[..row].iter().enumerate().filter(|(_, x)| !x.is_finite()) {
                for key in (0..of.keys).filter(|key| weights[r * KEYS + key] != A::ZERO) {
                    out[x * KEYS + key] += weights[r * KEYS + key] * value;
                }
            }
        }
    }

    /// The sums by key as padded rows, one per key.
    pub fn unpack_key_rows<'b>(&self, gathered: &'b [A], width: usize, room: &'b mut [A]) -> &'b [A] {
        match self.arithmetic {
            Arithmetic::Native | Arithmetic::Bf16x3 => gathered,
            Arithmetic::Bf16 => {
                let row = padded::<A>(width);
                transpose(self.isa, gathered, KEYS, row, KEYS / A::LANES, room, row);
                room
            }
        }
    }
}
