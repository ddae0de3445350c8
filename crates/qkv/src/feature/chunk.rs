//! A chunk of rows and the state that chunks are summed into.
//!
//! A [`Block`] is up to [`CHUNK`] rows: features with their logs, each with a payload. The payload of a key is its
//! value and a 1, so that the denominator is one more column of the numerator; that of a query, in the backward pass,
//! is its upstream gradient. A [`State`] is the sum over rows of features times payload, relative to the largest log so
//! far and rescaled as in the online softmax.

use super::map::Map;
use crate::scratch::{Buffer, Scratch};
use crate::source::Source;
use crate::tuning::CHUNK;
use qkv_simd::features::blend;
use qkv_simd::tile::{RowOp, row_op, weights};
use qkv_simd::{Element, Matrix, Panels, Real, Target, padded, product};

/// The sizes of a pass: its feature map, and the width of the payload.
#[derive(Clone, Debug)]
pub(crate) struct Sizes<A: Real> {
    pub map: Map<A>,
    pub dv: usize,
    /// The width of a padded row of values with their 1.
    pub v_row: usize,
}

impl<A: Real> Sizes<A> {
    pub fn new(map: Map<A>, dv: usize) -> Self {
        Sizes { map, dv, v_row: padded::<A>(dv + 1) }
    }
}

/// Up to [`CHUNK`] rows with their features and their payload.
pub(super) struct Block<'s, A: Real> {
    pub len: usize,
    /// `[CHUNK, d_row]`, if the map needs it
    pub x: Buffer<'s, A>,
    /// `[CHUNK, row]`
    pub features: Buffer<'s, A>,
    /// `[CHUNK]`
    pub logs: Buffer<'s, A>,
    /// `[CHUNK, v_row]`
    pub values: Buffer<'s, A>,
    /// Whether all of `x`, and all of `values`, is finite.
    pub finite: [bool; 2],
}

impl<'s, A: Real> Block<'s, A> {
    pub fn new(sizes: &Sizes<A>, scratch: &'s Scratch<A>) -> Self {
        Block {
            len: 0,
            x: scratch.take(CHUNK * sizes.map.d_row),
            features: scratch.take(CHUNK * sizes.map.row),
            logs: scratch.take(CHUNK),
            values: scratch.take(CHUNK * sizes.v_row),
            finite: [true; 2],
        }
    }

    /// Loads rows and their features.
    pub fn load<T: Element<Acc = A>>(
        &mut self,
        sizes: &Sizes<A>,
        from: Source<'_, T>,
        head: [usize; 2],
        indices: impl ExactSizeIterator<Item = usize>,
    ) {
        self.len = indices.len();
        self.finite[0] = sizes.map.load(from, head, indices, &mut self.x, &mut self.features, &mut self.logs);
        self.logs[self.len..].fill(A::ZERO); // they are read in whole panels
    }

    /// Loads the payload of the rows, with a 1 at the end of each.
    pub fn load_values<T: Element<Acc = A>>(
        &mut self,
        sizes: &Sizes<A>,
        from: Source<'_, T>,
        [b, h]: [usize; 2],
        indices: impl Iterator<Item = usize>,
    ) {
        self.finite[1] = true;
        for (i, row) in indices.zip(self.values.chunks_exact_mut(sizes.v_row)) {
            self.finite[1] &= from.load_row(b, h, i, row);
            row[sizes.dv] = A::ONE;
        }
    }
}

/// Rows packed in panels of `LANES`, depth by depth; the last panel is padded with zeros.
pub(super) fn pack<A: Real>(rows: &[A], row: usize, len: usize, depth: usize, out: &mut [A]) {
    for (panel, out) in out.chunks_exact_mut((depth * A::LANES).max(1)).take(len.div_ceil(A::LANES)).enumerate() {
        let first = panel * A::LANES;
        let lanes = A::LANES.min(len - first);
        if lanes < A::LANES {
            out.fill(A::ZERO);
        }
        for lane in 0..lanes {
            let row = &rows[(first + lane) * row..][..depth];
            for (x, &value) in row.iter().enumerate() {
                out[x * A::LANES + lane] = value;
            }
        }
    }
}

/// The layout of a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Facing {
    /// `[F, v_row]`: features times the state give values.
    Values,
    /// `[Dv + 1, row]`: values times the state give features.
    Features,
}

/// States as slices of `size` elements: the sums, and the log that they are relative to.
#[derive(Clone, Copy, Debug)]
pub(super) struct State {
    facing: Facing,
    rows: usize,
    row: usize,
}

impl State {
    pub fn new<A: Real>(sizes: &Sizes<A>, facing: Facing) -> State {
        let (rows, row) = match facing {
            Facing::Values => (sizes.map.count, sizes.v_row),
            Facing::Features => (sizes.dv + 1, sizes.map.row),
        };
        State { facing, rows, row }
    }

    pub fn size(&self) -> usize {
        self.rows * self.row + 1
    }

    /// The state of no rows.
    pub fn clear<A: Real>(&self, state: &mut [A]) {
        let (log, sums) = state.split_last_mut().expect("at least its log");
        sums.fill(A::ZERO);
        *log = A::NEG_INFINITY;
    }

    /// The log that a state is relative to; −∞ for no rows.
    pub fn log<A: Real>(&self, state: &[A]) -> A {
        state[self.rows * self.row]
    }

    /// Adds the rows of a block, overwriting its values.
    pub fn absorb<A: Real>(&self, sizes: &Sizes<A>, state: &mut [A], block: &mut Block<'_, A>) {
        let (map, len) = (&sizes.map, block.len);
        let (log, sums) = state.split_last_mut().expect("at least its log");
        let top = block.logs[..len].iter().fold(*log, |top, &log| larger(top, log));
        if top == A::NEG_INFINITY {
            return;
        }
        if *log != top {
            row_op(map.isa, sums, RowOp::Scale(shrink(*log, top)));
            *log = top;
        }
        let mut factors = [A::NEG_INFINITY; CHUNK];
        factors[..len].copy_from_slice(&block.logs[..len]);
        weights(map.isa, &mut factors, top);
        for (row, &factor) in block.values.chunks_exact_mut(sizes.v_row).zip(&factors[..len]) {
            if factor != A::ONE {
                row_op(map.isa, row, RowOp::Scale(factor));
            }
        }
        let (features, values) = (&block.features, &block.values);
        let (a, b) = match self.facing {
            Facing::Values => (Matrix::transposed(features, map.row), Panels::rows(values, sizes.v_row)),
            Facing::Features => (Matrix::transposed(values, sizes.v_row), Panels::rows(features, map.row)),
        };
        product(map.isa, Target::accumulate(sums, self.row), a, b, self.rows, self.row / A::LANES, len);
    }

    /// `out = a + b`; `a` comes first in the sequence. The order matters in the last bit.
    pub fn combine<A: Real>(&self, sizes: &Sizes<A>, out: &mut [A], a: &[A], b: &[A]) {
        let numbers = self.rows * self.row;
        let (log_a, log_b) = (self.log(a), self.log(b));
        let top = larger(log_a, log_b);
        let factors = [log_a, log_b].map(|log| shrink(log, top));
        blend(sizes.map.isa, &mut out[..numbers], (&a[..numbers], factors[0]), (&b[..numbers], factors[1]));
        out[numbers] = top;
    }
}

/// The larger of two, or NaN.
pub(super) fn larger<A: Real>(a: A, b: A) -> A {
    if b > a || b.is_nan() { b } else { a }
}

/// The factor that rescales sums relative to `log` to be relative to `top`.
pub(super) fn shrink<A: Real>(log: A, top: A) -> A {
    if log == top { A::ONE } else { (log - top).exp() }
}
