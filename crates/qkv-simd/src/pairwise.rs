//! Scores that are not dot products: additive, `vᵀ tanh(a + b)`, and the negative squared distance `−Σ (q − k)²`, which
//! is computed without expanding the square, since that would cancel.
//!
//! Keys come as packed panels, as for the product. Each score is one chain over the width, in ascending order. A
//! gradient of exactly 0 marks an absent pair, whose key has no effect.

use crate::isa::Isa;
use crate::kernel::{Kernel, dispatch};
use crate::lanes::Lanes;
use crate::math;
use crate::number::Real;
use crate::span;

/// The kind of pairwise score.
#[derive(Clone, Copy, Debug)]
pub enum Pairwise<'a, A> {
    /// `Σ vₓ · tanh(qₓ + kₓ)`.
    Additive(&'a [A]),
    /// `−Σ (qₓ − kₓ)²`.
    Distance,
}

/// The operands of a tile: queries as rows, keys as packed panels, `depth` wide.
#[derive(Clone, Copy, Debug)]
pub struct Sides<'a, A> {
    /// Query rows.
    pub queries: &'a [A],
    /// The distance between query rows.
    pub query_row: usize,
    /// Packed key panels of `depth` rows.
    pub keys: &'a [A],
    /// The number of queries.
    pub rows: usize,
    /// The number of panels of keys.
    pub panels: usize,
    /// The width of both.
    pub depth: usize,
}

impl<A: Real> Sides<'_, A> {
    fn check(&self, of: &Pairwise<'_, A>) {
        assert!(self.queries.len() >= span(self.rows, self.query_row, self.depth));
        assert!(self.keys.len() >= self.keys_len());
        if let Pairwise::Additive(v) = of {
            assert!(v.len() >= self.depth);
        }
    }

    /// Elements of all keys.
    fn keys_len(&self) -> usize {
        self.panels.saturating_mul(self.depth).saturating_mul(A::LANES)
    }
}

struct Scores<'a, A> {
    of: Pairwise<'a, A>,
    sides: Sides<'a, A>,
    tile: &'a mut [A],
    row: usize,
}

/// Writes the scores of a tile.
///
/// # Panics
/// If a slice is too short.
pub fn scores<A: Real>(isa: Isa, of: Pairwise<'_, A>, sides: Sides<'_, A>, tile: &mut [A], row: usize) {
    sides.check(&of);
    assert!(tile.len() >= span(sides.rows, row, sides.panels.saturating_mul(A::LANES)));
    dispatch(isa, Scores { of, sides, tile, row });
}

impl<A: Real> Kernel<A> for Scores<'_, A> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes<Scalar = A>>(self) {
        let Sides { queries, query_row, keys, rows, panels, depth } = self.sides;
        for r in 0..rows {
            let q = &queries[r * query_row..][..depth];
            for p in 0..panels {
                let k = &keys[p * depth * A::LANES..][..depth * A::LANES];
                let to = &mut self.tile[r * self.row + p * A::LANES..][..A::LANES];
                // SAFETY: the slices hold `depth` panels of keys and one panel of scores; the caller guarantees the
                // instruction set.
                unsafe {
                    let mut sum = V::splat(A::ZERO);
                    match self.of {
                        Pairwise::Additive(v) => {
                            for x in 0..depth {
                                let t = math::tanh(V::splat(q[x]).add(V::load(k.as_ptr().add(x * A::LANES))));
                                sum = V::splat(v[x]).mul_add(t, sum);
                            }
                        }
                        Pairwise::Distance => {
                            for (x, &q) in q.iter().enumerate() {
                                let apart = V::splat(q).sub(V::load(k.as_ptr().add(x * A::LANES)));
                                sum = apart.mul_add(V::splat(A::ZERO).sub(apart), sum);
                            }
                        }
                    }
                    sum.store(to.as_mut_ptr());
                }
            }
        }
    }
}

/// The gradients that a tile of pairwise scores adds to.
#[derive(Debug)]
pub struct Into<'a, A> {
    /// Query gradients, rows like the queries.
    pub queries: &'a mut [A],
    /// Key gradients, packed panels like the keys.
    pub keys: &'a mut [A],
    /// The gradient of the additive score's `v`; untouched for the distance.
    pub v: &'a mut [A],
}

struct Gradients<'a, A> {
    of: Pairwise<'a, A>,
    sides: Sides<'a, A>,
    grads: &'a [A],
    row: usize,
    into: Into<'a, A>,
}

/// Adds the gradients of a tile of scores to those of its queries, its keys and `v`.
///
/// # Panics
/// If a slice is too short.
pub fn gradients<A: Real>(
    isa: Isa,
    of: Pairwise<'_, A>,
    sides: Sides<'_, A>,
    grads: &[A],
    row: usize,
    into: Into<'_, A>,
) {
    sides.check(&of);
    assert!(grads.len() >= span(sides.rows, row, sides.panels.saturating_mul(A::LANES)));
    assert!(into.queries.len() >= span(sides.rows, sides.query_row, sides.depth));
    assert!(into.keys.len() >= sides.keys_len());
    assert!(matches!(of, Pairwise::Distance) || into.v.len() >= sides.depth);
    dispatch(isa, Gradients { of, sides, grads, row, into });
}

impl<A: Real> Kernel<A> for Gradients<'_, A> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes<Scalar = A>>(self) {
        let Sides { queries, query_row, keys, rows, panels, depth } = self.sides;
        let Into { queries: to_queries, keys: to_keys, v: to_v } = self.into;
        for r in 0..rows {
            let grads = &self.grads[r * self.row..][..panels * A::LANES];
            for x in 0..depth {
                // SAFETY: every panel of keys, of their gradients and of the tile lies inside the slices that were
                // checked; the caller guarantees the instruction set.
                unsafe {
                    let (zero, one) = (V::splat(A::ZERO), V::splat(A::ONE));
                    let q = V::splat(queries[r * query_row + x]);
                    let (mut for_query, mut for_v) = (zero, zero);
                    for p in 0..panels {
                        let at = (p * depth + x) * A::LANES;
                        let k = V::load(keys.as_ptr().add(at));
                        let g = V::load(grads.as_ptr().add(p * A::LANES));
                        let for_key = to_keys.as_mut_ptr().add(at);
                        match self.of {
                            Pairwise::Additive(v) => {
                                let t = math::tanh(q.add(k));
                                let part = g.mul(V::splat(v[x])).mul(one.sub(t.mul(t)));
                                let part = g.where_equal(zero, zero, part);
                                for_query = for_query.add(part);
                                V::load(for_key).add(part).store(for_key);
                                for_v = for_v.add(g.where_equal(zero, zero, g.mul(t)));
                            }
                            Pairwise::Distance => {
                                let twice = g.add(g);
                                let part = g.where_equal(zero, zero, twice.mul(k.sub(q)));
                                for_query = for_query.add(part);
                                V::load(for_key).sub(part).store(for_key);
                            }
                        }
                    }
                    to_queries[r * query_row + x] += for_query.sum();
                    if let Pairwise::Additive(_) = self.of {
                        to_v[x] += for_v.sum();
                    }
                }
            }
        }
    }
}
