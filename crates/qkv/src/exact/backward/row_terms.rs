//! The row statistics of the softmax gradient.
//!
//! Most of the work is delta, Σ out · d_out. It is computed when a tile of upstream gradients is packed, so that these
//! are read from memory only once.

use crate::exact::gemm::TileGemm;
use crate::exact::pack::Operand;
use crate::exact::scores::TileOps;
use crate::inputs::Upstream;
use crate::output::OutputRef;
use crate::scratch::Scratch;
use crate::select::Select;
use crate::tuning::QUERIES;
use qkv_simd::shared::{Rows, for_each_task};
use qkv_simd::{Element, Real, View, ViewMut};

/// The statistics of each row: delta, and the other gradients that flow into it.
pub(in crate::exact) struct RowTerms<'a, T: Element> {
    /// The log-sum-exp of each row, `[B, Hq, N]`.
    pub lse: &'a [T::Acc],
    /// The gradient of the entropy of each row; empty if there is none.
    pub entropy: &'a [T::Acc],
    pub upstream: Operand<'a, T>,
    /// The output of the softmax; hard attention without straight-through has none.
    output: Option<Operand<'a, T>>,
    d_lse: &'a [T::Acc],
    d_log_prob: &'a [T::Acc],
    entropies: &'a [T::Acc],
    sinks: &'a [T],
    /// The numbers of query heads and of queries.
    heads: usize,
    n: usize,
}

impl<'a, T: Element> RowTerms<'a, T> {
    pub fn new(ops: &TileOps<'a, T>, out: OutputRef<'a, T>, upstream: &Upstream<'a, T>) -> Self {
        let problem = ops.problem;
        let entropies = out.entropy.unwrap_or_default();
        RowTerms {
            lse: out.row_statistic,
            entropy: upstream.entropy.filter(|_| !entropies.is_empty()).unwrap_or_default(),
            upstream: Operand::Input(upstream.values.into()),
            output: match (problem.attention.select, out.saved) {
                (_, Some(kept)) => Some(Operand::Computed(View::from(kept))),
                (Select::Hard(_), None) => None,
                _ => Some(Operand::Input(out.values.into())),
            },
            d_lse: upstream.lse.unwrap_or_default(),
            d_log_prob: upstream.log_prob.unwrap_or_default(),
            entropies,
            sinks: problem.inputs.sinks.unwrap_or_default(),
            heads: problem.heads.query,
            n: problem.n,
        }
    }

    fn at(&self, (b, h, i): (usize, usize, usize)) -> usize {
        (b * self.heads + h) * self.n + i
    }

    /// The deltas of up to [`QUERIES`] rows whose upstream gradients are packed as a left operand.
    pub fn deltas(
        &self,
        gemm: &mut TileGemm<'_, T::Acc>,
        loaded: &[T::Acc],
        rows: impl Iterator<Item = (usize, usize, usize)> + Clone,
        out: &mut [T::Acc],
    ) {
        self.deltas_without_entropy(gemm, loaded, rows.clone(), out);
        for (row, out) in rows.zip(out) {
            let at = self.at(row);
            if let Some(&d) = self.entropy.get(at).filter(|_| self.lse[at] != T::Acc::NEG_INFINITY) {
                *out += d;
            }
        }
    }

    /// The deltas without the entropy term of visible pairs, which is not part of a sink's gradient.
    fn deltas_without_entropy(
        &self,
        gemm: &mut TileGemm<'_, T::Acc>,
        loaded: &[T::Acc],
        rows: impl Iterator<Item = (usize, usize, usize)> + Clone,
        out: &mut [T::Acc],
    ) {
        match self.output {
            Some(output) => gemm.row_dots(loaded, output, rows.clone(), out),
            None => out.fill(T::Acc::ZERO),
        }
        for (row, share) in rows.zip(out) {
            let at = self.at(row);
            let lse = self.lse[at];
            if lse == T::Acc::NEG_INFINITY {
                *share = T::Acc::ZERO;
                continue;
            }
            *share = *share - self.d_lse.get(at).copied().unwrap_or(T::Acc::ZERO);
            *share += self.d_log_prob.get(at).copied().unwrap_or(T::Acc::ZERO);
            if let Some(&d) = self.entropy.get(at) {
                let logit = self.sinks.get(row.1).map_or(T::Acc::NEG_INFINITY, |sink| sink.widen());
                let sink = if logit == T::Acc::NEG_INFINITY { T::Acc::ZERO } else { (logit - lse).exp() };
                *share += d * (self.entropies[at] - (T::Acc::ONE - sink));
            }
        }
    }

    /// `−Σ p_sink · delta` over the rows of each head.
    pub fn sink_gradient(&self, ops: &TileOps<'_, T>, scratch: &Scratch<T::Acc>, threads: usize) -> Vec<T::Acc> {
        let (problem, n, heads) = (ops.problem, self.n, self.heads);
        let (blocks, row) = (n.div_ceil(QUERIES), ops.arithmetic.packed_a_row::<T::Acc>(problem.dv));
        let mut shares = scratch.take(problem.b * heads * n);
        {
            let shape = [problem.b, heads, n, 1];
            let to = Rows::new(ViewMut::new(&mut shares, shape).expect("one number a row"));
            let worker = || (ops.tile_gemm(scratch), scratch.take(QUERIES * row), [T::Acc::ZERO; QUERIES]);
            for_each_task(threads, problem.b * heads * blocks, worker, |(gemm, loaded, shares), task| {
                let (b, h, block) = (task / (heads * blocks), task / blocks % heads, task % blocks);
                let range = block * QUERIES..((block + 1) * QUERIES).min(n);
                let (start, count, rows) = (range.start, range.len(), range.map(|i| (b, h, i)));
                gemm.pack_a(self.upstream, rows.clone(), loaded);
                self.deltas_without_entropy(gemm, loaded, rows, &mut shares[..count]);
                to.write_all(b, h, start, count, &shares[..], 1);
            });
        }
        let of_head = |h: usize| -> T::Acc {
            let sink = self.sinks[h].widen();
            let rows = (0..problem.b).flat_map(|b| (0..n).map(move |i| (b, h, i))).map(|row| self.at(row));
            let seen = rows.filter(|&at| self.lse[at] != T::Acc::NEG_INFINITY && sink != T::Acc::NEG_INFINITY);
            seen.map(|at| -((sink - self.lse[at]).exp() * shares[at])).sum()
        };
        (0..heads).map(of_head).collect()
    }
}
