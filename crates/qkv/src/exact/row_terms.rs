//! What the gradient of the softmax needs to know of every row, made once before the backward pass.

use super::operand::Operand;
use super::products::Desk;
use super::tile::TileOps;
use crate::attention::Output;
use crate::inputs::Upstream;
use crate::problem::Problem;
use crate::scratch::{Buffer, Scratch};
use crate::select::Select;
use crate::tuning::QUERIES;
use qkv_simd::shared::{Rows, for_each_task};
use qkv_simd::{Element, Real, View, ViewMut};

/// What the gradient needs to know of every row, one number each, `[B, Hq, N]`.
pub(super) struct RowTerms<'s, A: Real> {
    pub lse: Vec<A>,
    /// Subtracted from the gradient of each weight.
    pub delta: Buffer<'s, A>,
    /// The gradient of the entropy; empty where there is none.
    pub entropy: Vec<A>,
    /// `delta` without what only kept pairs feel: the gradient of a sink's share.
    sink: Buffer<'s, A>,
}

impl<'s, A: Real> RowTerms<'s, A> {
    pub fn new<T: Element<Acc = A>>(
        ops: &TileOps<'_, T>,
        out: &Output<T>,
        upstream: &Upstream<'_, T>,
        scratch: &'s Scratch<A>,
        threads: usize,
    ) -> Self {
        let problem = ops.problem;
        let (heads, n) = (problem.heads.query, problem.n);
        let count = problem.b * heads * n;
        let (mut delta, mut sink) = (scratch.take(count), scratch.take(count));
        let given = Operand::Given(upstream.values.into());
        let made = match (problem.attention.select, &out.kept) {
            (_, Some(kept)) => Some(Operand::Made(View::from(kept))),
            (Select::Hard(_), None) => None,
            _ => Some(Operand::Given(View::from(&out.values).into())),
        };
        {
            let shape = [problem.b, heads, n, 1];
            let to_delta = Rows::new(ViewMut::new(&mut delta, shape).expect("one number a row"));
            let to_sink = Rows::new(ViewMut::new(&mut sink, shape).expect("one number a row"));
            let blocks = n.div_ceil(QUERIES);
            let arithmetic = ops.arithmetic;
            let worker = || {
                let room = Desk::<A>::dots_len(arithmetic, problem.dv);
                (Desk::new(scratch, ops.isa, arithmetic, problem.dv), scratch.take(room), scratch.take(QUERIES))
            };
            for_each_task(threads, problem.b * heads * blocks, worker, |(desk, room, shares), task| {
                let (b, h, block) = (task / (heads * blocks), task / blocks % heads, task % blocks);
                let range = block * QUERIES..((block + 1) * QUERIES).min(n);
                let logit = problem.inputs.sinks.map_or(A::NEG_INFINITY, |sinks| sinks[h].widen());
                let shares = &mut shares[..range.len()];
                // What the gradients of weights are relative to: the output that they made, if they did.
                match made {
                    Some(made) => desk.dots(given, made, range.clone().map(|i| (b, h, i)), room, shares),
                    None => shares.fill(A::ZERO),
                }
                for (i, &mut mut share) in range.zip(shares) {
                    let at = (b * heads + h) * n + i;
                    let lse = out.lse.data()[at];
                    if lse == A::NEG_INFINITY {
                        to_delta.write(b, h, i, &[A::ZERO]);
                        to_sink.write(b, h, i, &[A::ZERO]);
                        continue;
                    }
                    share = share - upstream.lse.map_or(A::ZERO, |d| d[at]);
                    share += upstream.log_prob.map_or(A::ZERO, |d| d[at]);
                    let mut delta = share;
                    if let (Some(d), Some(entropy)) = (upstream.entropy, &out.entropy) {
                        let mass = A::ONE - if logit == A::NEG_INFINITY { A::ZERO } else { (logit - lse).exp() };
                        share += d[at] * (entropy.data()[at] - mass);
                        delta = share + d[at];
                    }
                    to_delta.write(b, h, i, &[delta]);
                    to_sink.write(b, h, i, &[share]);
                }
            });
        }
        let entropy = upstream.entropy.map_or(Vec::new(), |d| d.to_vec());
        RowTerms { lse: out.lse.data().to_vec(), delta, entropy, sink }
    }

    /// `−Σ p_sink · share` over the rows of each head.
    pub fn sink_gradient<T: Element<Acc = A>>(&self, problem: &Problem<'_, T>, sinks: &[T]) -> Vec<A> {
        let (heads, n) = (problem.heads.query, problem.n);
        let of_head = |h: usize| -> A {
            let rows = (0..problem.b).flat_map(|b| (0..n).map(move |i| (b * heads + h) * n + i));
            let seen = rows.filter(|&at| self.lse[at] != A::NEG_INFINITY && sinks[h].widen() != A::NEG_INFINITY);
            seen.map(|at| -((sinks[h].widen() - self.lse[at]).exp() * self.sink[at])).sum()
        };
        (0..heads).map(of_head).collect()
    }
}
