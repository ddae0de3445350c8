//! The gradients that the pieces of a plan produce, and their sum in the natural order.

use crate::exact::plan::order::Places;
use crate::problem::Problem;
use crate::scratch::{Buffer, Scratch};
use crate::tuning::QUERIES;
use qkv_simd::shared::{Rows, for_each_task};
use qkv_simd::{Element, Real, View, ViewMut, padded};

/// The gradients of a piece: those of its queries, keys and values in its own order, and the small sums of its tasks.
pub(super) struct PieceGradients<'s, A: Real> {
    pub query_places: Places,
    pub key_places: Places,
    /// Tiles of queries, each of [`QUERIES`] padded rows.
    pub queries: Buffer<'s, A>,
    pub query_tiles: usize,
    pub query_row: usize,
    /// Padded rows, one per key of the piece.
    pub keys: Buffer<'s, A>,
    pub values: Buffer<'s, A>,
    pub key_count: usize,
    /// Per task: the gradient of the additive vector, then that of the scale of each head of the group.
    pub small: Buffer<'s, A>,
    pub small_len: usize,
    /// The gradients of centers, one per query of each tile; empty if there are none.
    pub centers: Buffer<'s, A>,
}

/// The gradients of centers in the natural order, `[B, Hq, N]`, summed over the pieces.
pub(super) fn center_gradient<T: Element>(
    problem: &Problem<'_, T>,
    parts: &[PieceGradients<'_, T::Acc>],
) -> Vec<T::Acc> {
    let (heads, n) = (problem.heads.query, problem.n);
    let of = |at: usize| {
        let (b, h, i) = (at / (heads * n), at / n % heads, at % n);
        let part = |part: &PieceGradients<'_, T::Acc>| {
            let place = part.query_places.of(b, h, i)?;
            Some(part.centers[(b * heads + h) * part.query_tiles * QUERIES + place])
        };
        parts.iter().filter_map(part).sum()
    };
    (0..problem.b * heads * n).map(of).collect()
}

/// Which gradient is summed over the pieces.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum GradientOf {
    Queries,
    Keys,
    Values,
}

/// A gradient in the natural order: the memory of the only piece, or the sum of several.
pub(super) struct GatheredGradient<'a, A: Real> {
    one: Option<&'a [A]>,
    sum: Buffer<'a, A>,
    shape: [usize; 4],
    strides: [isize; 4],
}

impl<A: Real> GatheredGradient<'_, A> {
    pub fn view(&self) -> View<'_, A> {
        View::strided(self.one.unwrap_or(&self.sum), 0, self.shape, self.strides).expect("as long as its shape")
    }

    /// Writes it some rows at a time, so that even a single head is work for all threads.
    pub fn write<T: Element<Acc = A>>(&self, to: ViewMut<'_, T>, threads: usize) {
        let out = Rows::new(to);
        let ([_, heads, len, _], [of_b, of_h, row, _]) = (self.shape, self.strides.map(|stride| stride as usize));
        let (data, blocks) = (self.one.unwrap_or(&self.sum), len.div_ceil(QUERIES));
        for_each_task(
            threads,
            self.shape[0] * heads * blocks,
            || (),
            |(), task| {
                let (b, h, first) = (task / (heads * blocks), task / blocks % heads, task % blocks * QUERIES);
                let from = &data[b * of_b + h * of_h + first * row..];
                out.write_all(b, h, first, QUERIES.min(len - first), from, row);
            },
        );
    }
}

/// Adds up a gradient over the pieces, row by row, in their order.
pub(super) fn gather_gradient<'a, T: Element>(
    problem: &Problem<'_, T>,
    parts: &'a [PieceGradients<'_, T::Acc>],
    which: GradientOf,
    scratch: &'a Scratch<T::Acc>,
    threads: usize,
) -> GatheredGradient<'a, T::Acc> {
    let heads = if which == GradientOf::Queries { problem.heads.query } else { problem.heads.key };
    let len = if which == GradientOf::Queries { problem.n } else { problem.m };
    let width = if which == GradientOf::Values { problem.dv } else { problem.width };
    let row = padded::<T::Acc>(width);
    let shape = [problem.b, heads, len, width];
    // The rows per head of a piece, their memory, and their order.
    let of = |part: &'a PieceGradients<'_, T::Acc>| match which {
        GradientOf::Queries => (part.query_tiles * QUERIES, &part.queries[..], &part.query_places),
        GradientOf::Keys => (part.key_count, &part.keys[..], &part.key_places),
        GradientOf::Values => (part.key_count, &part.values[..], &part.key_places),
    };
    let strides = |per_head: usize| [heads * per_head * row, per_head * row, row, 1].map(|x| x as isize);
    // The gradients of a single piece in the natural order are already in place.
    if let [part] = parts
        && let (per_head, data, Places::Range(_)) = of(part)
    {
        debug_assert!(which != GradientOf::Queries || part.query_row == row);
        return GatheredGradient { one: Some(data), sum: scratch.take(0), shape, strides: strides(per_head) };
    }
    let mut sum = scratch.zeros(problem.b * heads * len * row);
    {
        let padded_shape = [problem.b, heads, len, row];
        let out = Rows::new(ViewMut::new(&mut sum, padded_shape).expect("as long as its shape"));
        for_each_task(
            threads,
            problem.b * heads,
            || scratch.take(row),
            |total, task| {
                for i in 0..len {
                    total.fill(T::Acc::ZERO);
                    for (per_head, data, places) in parts.iter().map(of) {
                        if let Some(place) = places.of(task / heads, task % heads, i) {
                            let from = &data[(task * per_head + place) * row..][..row];
                            total.iter_mut().zip(from).for_each(|(total, &x)| *total += x);
                        }
                    }
                    out.write(task / heads, task % heads, i, total);
                }
            },
        );
    }
    GatheredGradient { one: None, sum, shape, strides: strides(len) }
}
