//! Gradients of bias tensors and relative tables. Many tiles add to the same elements (an axis of length 1 is shared by
//! all that it is broadcast over), so each region of the gradient is entered in a fixed turn: the sum has one order,
//! whatever the timing.

use crate::mask::RowAt;
use crate::problem::Problem;
use crate::tuning::{KEYS, QUERIES};
use qkv_simd::shared::{Rows, Turnstile};
use qkv_simd::{Element, Real, ViewMut};

/// The position of a tile in the backward pass.
#[derive(Clone, Copy, Debug)]
pub(super) struct TileStep {
    pub b: usize,
    pub key_head: usize,
    pub key_tile: usize,
    /// The query head within its group.
    pub g: usize,
    pub query_tile: usize,
}

/// The number of each of them.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepCounts {
    pub b: usize,
    pub key_heads: usize,
    pub key_tiles: usize,
    pub group: usize,
    pub query_tiles: usize,
}

/// The gradient of a bias tensor, tile by tile: a broadcast axis has one tile of length 1.
pub(super) struct BiasGradient<'a, A> {
    shape: [usize; 4],
    steps: StepCounts,
    regions: Turnstile<'a, A>,
}

impl<'a, A: Real> BiasGradient<'a, A> {
    /// Accumulators that the tiles of a bias of this shape need.
    pub fn buffer_len(shape: [usize; 4]) -> usize {
        let [b, h, ..] = shape;
        let (tiles, size) = Self::tiling(shape);
        b * h * tiles[0] * tiles[1] * size[0] * size[1]
    }

    /// Tiles along queries and keys, and their sizes.
    fn tiling([_, _, n, m]: [usize; 4]) -> ([usize; 2], [usize; 2]) {
        let tile = |len: usize, tile: usize| if len == 1 { 1 } else { tile };
        let (rows, cols) = (tile(n, QUERIES), tile(m, KEYS));
        ([n.div_ceil(rows), m.div_ceil(cols)], [rows, cols])
    }

    /// Over a zeroed buffer for a bias of this shape.
    pub fn new(shape: [usize; 4], steps: StepCounts, buffer: &'a mut [A]) -> Self {
        let (tiles, size) = Self::tiling(shape);
        let regions = Turnstile::new(buffer, shape[0] * shape[1] * tiles[0] * tiles[1], size[0] * size[1], |_| 0);
        BiasGradient { shape, steps, regions }
    }

    /// Adds the gradients of a tile of scores, or skips its turn (`None`).
    pub fn add(&self, step: TileStep, grads: Option<&[A]>, rows: usize, cols: usize) {
        let [b, h, n, m] = self.shape;
        let (tiles, size) = Self::tiling(self.shape);
        let head = step.key_head * self.steps.group + step.g;
        let own = |axis: usize, at: usize| if axis == 1 { 0 } else { at };
        let region = ((own(b, step.b) * h + own(h, head)) * tiles[0] + own(n, step.query_tile)) * tiles[1]
            + own(m, step.key_tile);
        // The turn counts the tiles that share the region, in the order of the backward pass.
        let mut turn = 0u64;
        for (shared, at, of) in [
            (b == 1, step.b, self.steps.b),
            (h == 1, step.key_head, self.steps.key_heads),
            (m == 1, step.key_tile, self.steps.key_tiles),
            (h == 1, step.g, self.steps.group),
            (n == 1, step.query_tile, self.steps.query_tiles),
        ] {
            if shared {
                turn = turn * of as u64 + at as u64;
            }
        }
        let mut to = self.regions.enter(region, turn);
        if let Some(grads) = grads {
            for r in 0..rows {
                let to = &mut to[own(n, r) * size[1]..][..size[1]];
                let from = &grads[r * KEYS..][..cols];
                if m == 1 {
                    to[0] += from.iter().copied().sum();
                } else {
                    to.iter_mut().zip(from).for_each(|(to, &from)| *to += from);
                }
            }
        }
        to.leave(turn + 1);
    }

    /// Copies the tiles into a tensor of the bias's shape.
    pub fn read<T: Element<Acc = A>>(buffer: &[A], to: ViewMut<'_, T>) {
        let shape = to.shape();
        let [batch, heads, n, m] = shape;
        let (tiles, size) = Self::tiling(shape);
        let to = Rows::new(to);
        let mut row = vec![A::ZERO; m];
        for at in 0..batch * heads * n {
            let (bh, i) = (at / n, at % n);
            for (j, x) in row.iter_mut().enumerate() {
                let tile = (bh * tiles[0] + i / size[0]) * tiles[1] + j / size[1];
                *x = buffer[(tile * size[0] + i % size[0]) * size[1] + j % size[1]];
            }
            to.write(bh / heads, bh % heads, i, &row);
        }
    }
}

/// The gradient of a relative table: one sum per task, added in the order of the tasks.
pub(super) struct TableGradient<'a, A> {
    rows: usize,
    steps: StepCounts,
    regions: Turnstile<'a, A>,
}

impl<'a, A: Real> TableGradient<'a, A> {
    /// Over a zeroed buffer for a table of `rows` rows of `entries`.
    pub fn new(rows: usize, entries: usize, steps: StepCounts, buffer: &'a mut [A]) -> Self {
        TableGradient { rows, steps, regions: Turnstile::new(buffer, rows, entries, |_| 0) }
    }

    /// Adds the gradients of a tile to a task's own sum.
    pub fn gather<T: Element<Acc = A>>(
        problem: &Problem<'_, T>,
        rows: &[RowAt],
        keys: &crate::compiled::tile::TileKeys<'_>,
        grads: &[A],
        own: &mut [A],
    ) {
        for (r, row) in rows.iter().enumerate() {
            for (at, &grad) in grads[r * KEYS..][..keys.len].iter().enumerate() {
                own[problem.table_entry(row.p, keys.index(at))] += grad;
            }
        }
    }

    /// Adds a task's sum for one query head, in its turn.
    pub fn add(&self, step: TileStep, own: &[A]) {
        let StepCounts { key_heads, key_tiles, group, .. } = self.steps;
        let (region, turn) = if self.rows == 1 {
            (0, ((step.b * key_heads + step.key_head) * key_tiles + step.key_tile) * group + step.g)
        } else {
            (step.key_head * group + step.g, step.b * key_tiles + step.key_tile)
        };
        let mut to = self.regions.enter(region, turn as u64);
        to.iter_mut().zip(own).for_each(|(to, &own)| *to += own);
        to.leave(turn as u64 + 1);
    }
}
