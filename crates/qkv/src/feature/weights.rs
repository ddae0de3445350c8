//! Weights on demand: `φ(q_i)·φ(k_j)` over the denominator, which is in the log-sum-exp, for rows against a range of
//! keys.

use super::chunk::{Block, Sizes, pack};
use crate::output::OutputRef;
use crate::problem::Problem;
use crate::scratch::{Buffer, Scratch};
use crate::tuning::CHUNK;
use crate::weights::Report;
use qkv_simd::features::{Decay, decay};
use qkv_simd::{Element, Matrix, Panels, Real, Target, product};
use std::ops::Range;

/// What a worker needs to compute weights.
pub(crate) struct Weigher<'a, T: Element> {
    problem: &'a Problem<'a, T>,
    sizes: &'a Sizes<T::Acc>,
    queries: Block<'a, T::Acc>,
    keys: Block<'a, T::Acc>,
    panels: Buffer<'a, T::Acc>,
    tile: Buffer<'a, T::Acc>,
}

impl<'a, T: Element> Weigher<'a, T> {
    pub fn new(problem: &'a Problem<'a, T>, sizes: &'a Sizes<T::Acc>, scratch: &'a Scratch<T::Acc>) -> Self {
        Weigher {
            problem,
            sizes,
            queries: Block::new(sizes, scratch),
            keys: Block::new(sizes, scratch),
            panels: scratch.take(CHUNK * sizes.map.count),
            tile: scratch.take(CHUNK * CHUNK),
        }
    }

    /// Reports the weights of up to [`CHUNK`] rows of one head against `cols`.
    pub fn weigh(
        &mut self,
        out: OutputRef<'_, T>,
        [b, h]: [usize; 2],
        rows: Range<usize>,
        cols: &Range<usize>,
        report: &mut Report<'_, T::Acc>,
    ) {
        let (problem, Sizes { map, .. }) = (self.problem, self.sizes);
        let (mask, mask_data, count) = (&problem.attention.mask, &problem.mask_data, rows.len());
        self.queries.load(self.sizes, problem.inputs.q.into(), [b, h], rows.clone());
        for (log, i) in self.queries.logs.iter_mut().zip(rows.clone()) {
            let lse = out.row_statistic[(b * self.problem.heads.query + h) * self.problem.n + i];
            // A row that sees nothing has no weights.
            *log = if lse == T::Acc::NEG_INFINITY { lse } else { *log - map.divisor_log() - lse };
        }
        for start in cols.clone().step_by(CHUNK) {
            let keys = start..(start + CHUNK).min(cols.end);
            self.keys.load(self.sizes, problem.inputs.k, [b, h / problem.heads.group], keys.clone());
            pack(&self.keys.features, map.row, keys.len(), map.count, &mut self.panels);
            self.tile.fill(T::Acc::ZERO);
            let (a, k) = (Matrix::rows(&self.queries.features, map.row), Panels::packed(&self.panels, map.count));
            product(
                map.isa,
                Target::accumulate(&mut self.tile, CHUNK),
                a,
                k,
                count,
                keys.len().div_ceil(T::Acc::LANES),
                map.count,
            );
            let of = Decay { seen: &[CHUNK; CHUNK], rows: &self.queries.logs, columns: &self.keys.logs };
            decay(map.isa, &mut self.tile, CHUNK, count, CHUNK, of);
            for (r, i) in rows.clone().enumerate() {
                let seen = &mut self.tile[r * CHUNK..][..keys.len()];
                for (weight, j) in seen.iter_mut().zip(keys.clone()) {
                    if !mask.allows_pair(mask_data, b, h, i, j) {
                        *weight = T::Acc::ZERO;
                    }
                }
                report(r, start - cols.start, seen);
            }
        }
    }
}
