//! Attention by heads: cuts out the parts of this rank's heads from inputs that are passed in full, and sums the
//! gradients of parameters, of which every rank has a part.

use super::rows::{Slabs, from_heads, heads_of, to_heads};
use super::{ContextAttention, Sizes};
use crate::error::Result;
use crate::number::Number;
use crate::ranks::Ranks;
use qkv::{Element, Gradients, Inputs, Output, Scratch, Select, Tensor, Upstream, View};
use std::ops::Range;

/// Some of a view's heads, or its only head if it has one for all.
fn of_heads<E: Copy + Default>(view: View<'_, E>, heads: &Range<usize>) -> Result<Tensor<E, 4>> {
    let [b, h, n, m] = view.shape();
    let first = if h == 1 { 0..1 } else { heads.clone() };
    let shape = [b, first.len(), n, m];
    Ok(Tensor::from_fn(shape, |[b, h, i, j]| view.at(b, first.start + h, i, j)))
}

/// The inputs of this rank's heads that are not q, k or v.
struct HeadInputs<T> {
    w: Option<Tensor<T, 4>>,
    w_q: Option<Tensor<T, 4>>,
    w_k: Option<Tensor<T, 4>>,
    bias: Option<Tensor<T, 4>>,
    table: Option<Tensor<T, 4>>,
    bits: Option<Tensor<u8, 4>>,
    buckets: Option<[Tensor<i32, 4>; 2]>,
    center: Option<Vec<T>>,
    query_heads: Range<usize>,
}

impl<T: Element + Number> HeadInputs<T> {
    fn new(
        inputs: &Inputs<'_, T>,
        of: Sizes,
        n: usize,
        query_heads: Range<usize>,
        key_heads: &Range<usize>,
    ) -> Result<Self> {
        let cut = |view: Option<View<'_, T>>, heads: &Range<usize>| view.map(|view| of_heads(view, heads)).transpose();
        let table = inputs.table.map(|table| {
            let [_, _, rows, entries] = table.shape();
            let rows = if rows == 1 { 0..1 } else { query_heads.clone() };
            Tensor::from_fn([1, 1, rows.len(), entries], |[_, _, r, x]| table.at(0, 0, rows.start + r, x))
        });
        let center = inputs.center.map(|center| {
            let head = |at: usize| &center[at * n..][..n];
            let own = (0..of.b).flat_map(|b| query_heads.clone().map(move |h| b * of.hq + h));
            own.flat_map(head).copied().collect()
        });
        let buckets = inputs
            .buckets
            .map(|(queries, keys)| -> Result<_> { Ok([of_heads(queries, &query_heads)?, of_heads(keys, key_heads)?]) });
        Ok(HeadInputs {
            w: cut(inputs.w, &query_heads)?,
            w_q: cut(inputs.w_q, &query_heads)?,
            w_k: cut(inputs.w_k, key_heads)?,
            bias: cut(inputs.bias, &query_heads)?,
            table,
            bits: inputs.bits.map(|bits| of_heads(bits, &query_heads)).transpose()?,
            buckets: buckets.transpose()?,
            center,
            query_heads,
        })
    }

    /// The call of this rank's heads.
    fn inputs<'a>(&'a self, whole: &Inputs<'a, T>, [q, k, v]: &'a [Tensor<T, 4>; 3]) -> Inputs<'a, T> {
        let mut inputs = super::with(*whole, q, k, v);
        inputs.w = self.w.as_ref().map(View::from);
        inputs.w_q = self.w_q.as_ref().map(View::from);
        inputs.w_k = self.w_k.as_ref().map(View::from);
        inputs.bias = self.bias.as_ref().map(View::from);
        inputs.table = self.table.as_ref().map(View::from);
        inputs.bits = self.bits.as_ref().map(View::from);
        inputs.buckets = self.buckets.as_ref().map(|[queries, keys]| (View::from(queries), View::from(keys)));
        inputs.center = self.center.as_deref();
        let own = self.query_heads.clone();
        inputs.scale = whole.scale.map(|scale| if scale.len() == 1 { scale } else { &scale[own.clone()] });
        inputs.sinks = whole.sinks.map(|sinks| &sinks[own]);
        inputs
    }
}

impl ContextAttention<'_> {
    fn own_heads(&self, of: Sizes) -> (Range<usize>, Range<usize>) {
        let keys = heads_of(of.hk, self.ranks, self.ranks.rank());
        let group = of.hq / of.hk;
        (keys.start * group..keys.end * group, keys)
    }

    /// All rows of this rank's heads of q, k and v.
    fn whole_heads<T: Element + Number>(&self, inputs: &Inputs<'_, T>, of: Sizes) -> Result<[Tensor<T, 4>; 3]> {
        let (queries, keys) = self.own_heads(of);
        let (n, m) = (self.queries.len(), self.keys.len());
        let q = to_heads(self.ranks, self.queries, &inputs.q.to_vec(), of.slabs(of.hq, of.d), of.hk)?;
        let k = to_heads(self.ranks, self.keys, &inputs.k.to_vec(), of.slabs(of.hk, of.dk), of.hk)?;
        let v = to_heads(self.ranks, self.keys, &inputs.v.to_vec(), of.slabs(of.hk, of.dv), of.hk)?;
        Ok([
            Tensor::new(q, [of.b, queries.len(), n, of.d])?,
            Tensor::new(k, [of.b, keys.len(), m, of.dk])?,
            Tensor::new(v, [of.b, keys.len(), m, of.dv])?,
        ])
    }

    pub(super) fn forward_by_heads<T>(&self, inputs: Inputs<'_, T>, of: Sizes) -> Result<Output<T>>
    where
        T: Element<Acc: Number> + Number,
    {
        let whole = self.whole_heads(&inputs, of)?;
        let (queries, keys) = self.own_heads(of);
        let more = HeadInputs::new(&inputs, of, self.queries.len(), queries, &keys)?;
        let found = self.attention.forward_with(more.inputs(&inputs, &whole), &Scratch::new(), self.threads)?;
        let rows = self.queries.rows(self.ranks.rank());
        let mut out = Output::of_lse(self.column(&found.lse, of)?, 0, self.attention.place)?;
        let values = self.rows_of(found.values.data(), of.slabs(of.hq, of.dv), of)?;
        out.values = Tensor::new(values, [of.b, of.hq, rows, of.dv])?;
        out.threshold = found.threshold.as_ref().map(|column| self.column(column, of)).transpose()?;
        out.entropy = found.entropy.as_ref().map(|column| self.column(column, of)).transpose()?;
        out.log_prob = found.log_prob.as_ref().map(|column| self.column(column, of)).transpose()?;
        if let Some(chosen) = &found.chosen {
            let width = chosen.shape()[3];
            let chosen = self.rows_of(chosen.data(), of.slabs(of.hq, width), of)?;
            out.chosen = Some(Tensor::new(chosen, [of.b, of.hq, rows, width])?);
        }
        Ok(out)
    }

    fn rows_of<E: Number>(&self, whole: &[E], slabs: Slabs, of: Sizes) -> Result<Vec<E>> {
        from_heads(self.ranks, self.queries, whole, slabs, of.hk)
    }

    fn column<A: Number>(&self, whole: &Tensor<A, 3>, of: Sizes) -> Result<Tensor<A, 3>> {
        if whole.shape() == [0; 3] {
            return Ok(whole.clone());
        }
        let rows = self.rows_of(whole.data(), of.slabs(of.hq, 1), of)?;
        Ok(Tensor::new(rows, [of.b, of.hq, self.queries.rows(self.ranks.rank())])?)
    }

    pub(super) fn backward_by_heads<T>(
        &self,
        inputs: Inputs<'_, T>,
        out: &Output<T>,
        upstream: Upstream<'_, T>,
        of: Sizes,
    ) -> Result<Gradients<T>>
    where
        T: Element<Acc: Number> + Number,
    {
        let (ranks, rank) = (self.ranks, self.ranks.rank());
        let whole = self.whole_heads(&inputs, of)?;
        let (queries, keys) = self.own_heads(of);
        let (n, own) = (self.queries.len(), queries.len());
        let more = HeadInputs::new(&inputs, of, n, queries.clone(), &keys)?;
        let call = more.inputs(&inputs, &whole);
        let heads = |local: &[T], width: usize| -> Result<Tensor<T, 4>> {
            let all = to_heads(ranks, self.queries, local, of.slabs(of.hq, width), of.hk)?;
            Ok(Tensor::new(all, [of.b, own, n, width])?)
        };
        let column = |local: &[T::Acc]| to_heads(ranks, self.queries, local, of.slabs(of.hq, 1), of.hk);
        let scratch = Scratch::new();
        let saved = if self.attention.select == Select::Soft {
            let lse = Tensor::new(column(out.lse.data())?, [of.b, own, n])?;
            let mut saved = Output::of_lse(lse, 0, self.attention.place)?;
            saved.values = heads(out.values.data(), of.dv)?;
            if let Some(entropy) = &out.entropy {
                saved.entropy = Some(Tensor::new(column(entropy.data())?, [of.b, own, n])?);
            }
            saved
        } else {
            self.attention.forward_with(call, &scratch, self.threads)?
        };
        let d_out = heads(&upstream.values.to_vec(), of.dv)?;
        let columns = |of: Option<&[T::Acc]>| of.map(column).transpose();
        let (d_lse, d_entropy) = (columns(upstream.lse)?, columns(upstream.entropy)?);
        let d_log_prob = columns(upstream.log_prob)?;
        let mut above = Upstream::new(&d_out);
        (above.lse, above.entropy, above.log_prob) = (d_lse.as_deref(), d_entropy.as_deref(), d_log_prob.as_deref());
        above.for_bias = upstream.for_bias;
        let found = self.attention.backward_with(call, &saved, above, &scratch, self.threads)?;

        let back = |whole: &[T], shards, heads: usize, width: usize, rows: usize| -> Result<Tensor<T, 4>> {
            let own = from_heads(ranks, shards, whole, of.slabs(heads, width), of.hk)?;
            Ok(Tensor::new(own, [of.b, heads, rows, width])?)
        };
        let (rows, columns) = (self.queries.rows(rank), self.keys.rows(rank));
        let d_q = back(found.q.data(), self.queries, of.hq, of.d, rows)?;
        let d_k = back(found.k.data(), self.keys, of.hk, of.dk, columns)?;
        let d_v = back(found.v.data(), self.keys, of.hk, of.dv, columns)?;
        let placed = spread(&inputs, found, of, n, &queries, &keys)?;
        summed(ranks, Gradients::new(d_q, d_k, d_v), placed)
    }
}

/// The gradients of parameters in the shape of all heads, with 0 for the heads of other ranks.
fn spread<T: Element>(
    inputs: &Inputs<'_, T>,
    found: Gradients<T>,
    of: Sizes,
    n: usize,
    query_heads: &Range<usize>,
    key_heads: &Range<usize>,
) -> Result<Gradients<T>> {
    let tensor = |own: Option<Tensor<T, 4>>, whole: Option<View<'_, T>>, heads: &Range<usize>| match (own, whole) {
        (Some(own), Some(whole)) if whole.shape()[1] > 1 => Some(Tensor::from_fn(whole.shape(), |[b, h, i, j]| {
            if heads.contains(&h) { own[[b, h - heads.start, i, j]] } else { T::default() }
        })),
        (own, _) => own,
    };
    let vector = |own: Option<Vec<T>>, whole: Option<&[T]>| match (own, whole) {
        (Some(own), Some(whole)) if whole.len() > own.len() => {
            let mut all = vec![T::default(); whole.len()];
            all[query_heads.clone()].copy_from_slice(&own);
            Some(all)
        }
        (own, _) => own,
    };
    let mut all = Gradients::new(found.q, found.k, found.v);
    all.w = tensor(found.w, inputs.w, query_heads);
    all.w_q = tensor(found.w_q, inputs.w_q, query_heads);
    all.w_k = tensor(found.w_k, inputs.w_k, key_heads);
    all.bias = tensor(found.bias, inputs.bias, query_heads);
    all.v_score = found.v_score;
    all.scale = vector(found.scale, inputs.scale);
    all.sinks = vector(found.sinks, inputs.sinks);
    all.table = match (found.table, inputs.table) {
        (Some(own), Some(whole)) if whole.shape()[2] > 1 => Some(Tensor::from_fn(whole.shape(), |[_, _, h, x]| {
            if query_heads.contains(&h) { own[[0, 0, h - query_heads.start, x]] } else { T::default() }
        })),
        (own, _) => own,
    };
    all.center = found.center.map(|own| {
        let mut whole = vec![T::default(); of.b * of.hq * n];
        for (at, row) in own.chunks_exact(n.max(1)).enumerate() {
            let to = at / query_heads.len() * of.hq + query_heads.start + at % query_heads.len();
            whole[to * n..][..n].copy_from_slice(row);
        }
        whole
    });
    Ok(all)
}

/// Sums the parameters' gradients of all ranks in order, in f64, and returns them with `own`, the gradients of q, k and
/// v.
pub(super) fn summed<T: Element + Number>(
    ranks: &Ranks,
    own: Gradients<T>,
    parts: Gradients<T>,
) -> Result<Gradients<T>> {
    let sum = |values: &[T]| -> Result<Vec<T>> {
        let all = ranks.all_gather(&T::to_bytes(values))?;
        let mut sums = vec![0.0; values.len()];
        for bytes in &all {
            let part = T::from_bytes(bytes);
            sums.iter_mut().zip(&part).for_each(|(sum, x)| *sum += x.to_f64());
        }
        Ok(sums.into_iter().map(T::of_f64).collect())
    };
    let vector = |values: Option<Vec<T>>| values.map(|values| sum(&values)).transpose();
    let tensor = |values: Option<Tensor<T, 4>>| -> Result<Option<Tensor<T, 4>>> {
        values.map(|values| Ok(Tensor::new(sum(values.data())?, values.shape())?)).transpose()
    };
    let mut all = own;
    all.w = tensor(parts.w)?;
    all.w_q = tensor(parts.w_q)?;
    all.w_k = tensor(parts.w_k)?;
    all.v_score = vector(parts.v_score)?;
    all.scale = vector(parts.scale)?;
    all.bias = tensor(parts.bias)?;
    all.table = tensor(parts.table)?;
    all.sinks = vector(parts.sinks)?;
    all.center = vector(parts.center)?;
    Ok(all)
}
