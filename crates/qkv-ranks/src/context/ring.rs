//! Ring attention (Liu et al. 2023, arXiv:2310.01889): keys and values travel from rank to rank, so that no rank ever
//! holds more than two ranks' rows. Each step yields partial results over some keys, which are merged by their
//! log-sum-exp in the accumulator type: `f32`, even for 16-bit inputs, so the error does not grow with the number of
//! ranks.
//!
//! A step sees the rows of two ranks, numbered from 0, so a query's place is shifted by where both start. The ring
//! therefore supports whatever depends on the distance of query and key or comes as data, and rejects whatever depends
//! on their absolute numbers.

use super::{ContextAttention, Sizes, heads};
use crate::error::{Error, Result};
use crate::number::Number;
use crate::ranks::{Pending, RING_KEYS, RING_SUMS};
use qkv::{Attention, Element, Gradients, Inputs, Mask, Output, Place, Scratch, Select, Tensor, Upstream, View};
use std::ops::Range;

/// The part of a mask that depends on the absolute numbers of queries or keys, if any.
fn numbered(mask: &Mask) -> Option<&'static str> {
    match mask {
        Mask::Fixed { .. } => Some("a fixed pattern"),
        Mask::Longformer { .. } => Some("global positions"),
        Mask::BigBird(_) => Some("BigBird's blocks"),
        Mask::Blocks(_) => Some("a mask of blocks"),
        Mask::And(left, right) | Mask::Or(left, right) => numbered(left).or_else(|| numbered(right)),
        Mask::Not(of) => numbered(of),
        _ => None,
    }
}

/// Why a ring cannot compute an attention.
pub(super) fn refusal(attention: &Attention) -> Option<&'static str> {
    match attention {
        _ if attention.draws() => Some("dropout and sampling"),
        _ if attention.select != Select::Soft => Some("a selection other than softmax"),
        _ if attention.local.is_some() => Some("predicted centers"),
        _ if attention.entropy => Some("the entropy of rows"),
        _ => numbered(&attention.mask),
    }
}

/// Consecutive rows of a rank's tensor `[B, H, rows, W]`: where they start in it, and their numbers in the sequence.
struct Piece {
    at: usize,
    rows: Range<usize>,
}

fn pieces(ranges: &[Range<usize>]) -> Vec<Piece> {
    let mut at = 0;
    let piece = |rows: &Range<usize>| {
        at += rows.len();
        Piece { at: at - rows.len(), rows: rows.clone() }
    };
    ranges.iter().map(piece).filter(|piece| !piece.rows.is_empty()).collect()
}

/// A piece of a tensor `[B, H, rows, W]`.
fn view<'a, E>(data: &'a [E], [b, h, rows, w]: [usize; 4], piece: &Piece) -> Result<View<'a, E>> {
    let strides = [h * rows * w, rows * w, w, 1].map(usize::cast_signed);
    Ok(View::strided(data, piece.at * w, [b, h, piece.rows.len(), w], strides).map_err(qkv::Error::from)?)
}

/// The part that belongs to these rows and keys of a tensor that broadcasts to `[B, H, N, M]`.
fn part<E: Copy + Default, F>(
    of: View<'_, E>,
    rows: &Range<usize>,
    keys: &Range<usize>,
    to: impl Fn(E) -> F,
) -> Tensor<F, 4> {
    let [b, h, n, m] = of.shape();
    let (rows, keys) = (if n == 1 { 0..1 } else { rows.clone() }, if m == 1 { 0..1 } else { keys.clone() });
    let at = |[b, h, i, j]: [usize; 4]| to(of.at(b, h, rows.start + i, keys.start + j));
    Tensor::from_fn([b, h, rows.len(), keys.len()], at)
}

fn cut<E: Copy>(of: &[E], len: usize, range: &Range<usize>) -> Vec<E> {
    of.chunks_exact(len.max(1)).flat_map(|row| &row[range.clone()]).copied().collect()
}

fn widened<T: Element>(values: &[T]) -> Vec<T::Acc> {
    values.iter().map(|x| x.widen()).collect()
}

fn wide<T: Element>(view: Option<View<'_, T>>) -> Option<Tensor<T::Acc, 4>> {
    view.map(|view| Tensor::from_fn(view.shape(), |[b, h, i, j]| view.at(b, h, i, j).widen()))
}

/// What every step needs besides queries, keys and values: parameters, in the accumulator type.
struct Parameters<A> {
    w: Option<Tensor<A, 4>>,
    w_q: Option<Tensor<A, 4>>,
    w_k: Option<Tensor<A, 4>>,
    table: Option<Tensor<A, 4>>,
    v_score: Option<Vec<A>>,
    scale: Option<Vec<A>>,
}

/// The data of one step, limited to its rows and keys.
struct StepData<A> {
    bias: Option<Tensor<A, 4>>,
    bits: Option<Tensor<u8, 4>>,
    lengths: Option<Vec<usize>>,
    segments: Option<[Vec<i32>; 2]>,
    positions: Option<Vec<i64>>,
    buckets: Option<[Tensor<i32, 4>; 2]>,
}

impl<A: Element> Parameters<A> {
    fn new<T: Element<Acc = A>>(inputs: &Inputs<'_, T>) -> Self {
        Parameters {
            w: wide(inputs.w),
            w_q: wide(inputs.w_q),
            w_k: wide(inputs.w_k),
            table: wide(inputs.table),
            v_score: inputs.v_score.map(widened),
            scale: inputs.scale.map(widened),
        }
    }

    fn inputs<'a>(&'a self, [q, k, v]: [View<'a, A>; 3], data: &'a StepData<A>) -> Inputs<'a, A> {
        let mut inputs = Inputs::new(q, k, v);
        inputs.w = self.w.as_ref().map(View::from);
        inputs.w_q = self.w_q.as_ref().map(View::from);
        inputs.w_k = self.w_k.as_ref().map(View::from);
        inputs.table = self.table.as_ref().map(View::from);
        inputs.v_score = self.v_score.as_deref();
        inputs.scale = self.scale.as_deref();
        inputs.bias = data.bias.as_ref().map(View::from);
        inputs.bits = data.bits.as_ref().map(View::from);
        inputs.lengths = data.lengths.as_deref();
        inputs.segments = data.segments.as_ref().map(|[queries, keys]| (&queries[..], &keys[..]));
        inputs.positions = data.positions.as_deref();
        inputs.buckets = data.buckets.as_ref().map(|[queries, keys]| (View::from(queries), View::from(keys)));
        inputs
    }
}

/// The output of a rank's rows so far, `[B, Hq, rows, Dv]` and `[B, Hq, rows]`.
struct Merged<A> {
    values: Vec<A>,
    lse: Vec<A>,
    rows: usize,
    width: usize,
}

impl<A: Element<Acc = A>> Merged<A> {
    fn new(slabs: usize, rows: usize, width: usize) -> Self {
        let lse = vec![A::of_f64(f64::NEG_INFINITY); slabs * rows];
        Merged { values: vec![A::default(); slabs * rows * width], lse, rows, width }
    }

    /// Merges into a row its result over other keys, or its sink, which has no values.
    fn add_row(&mut self, row: usize, lse: A, values: Option<&[A]>) {
        let (old, other) = (self.lse[row].to_f64(), lse.to_f64());
        if other == f64::NEG_INFINITY {
            return;
        }
        let greater = old.max(other);
        let sum = greater + ((old - greater).exp() + (other - greater).exp()).ln();
        let (keep, add) = ((old - sum).exp(), (other - sum).exp());
        let to = &mut self.values[row * self.width..][..self.width];
        for (at, to) in to.iter_mut().enumerate() {
            let other = values.map_or(0.0, |values| add * values[at].to_f64());
            *to = A::of_f64(keep * to.to_f64() + other);
        }
        self.lse[row] = A::of_f64(sum);
    }

    fn add(&mut self, piece: &Piece, out: &Output<A>) {
        let count = piece.rows.len();
        for (at, &lse) in out.lse.data().iter().enumerate() {
            let row = at / count * self.rows + piece.at + at % count;
            self.add_row(row, lse, Some(&out.values.data()[at * self.width..][..self.width]));
        }
    }
}

/// Adds a piece's gradients to those of all rows, `[B, H, rows, W]`.
fn add_piece<A: Element>(all: &mut [A], rows: usize, piece: &Piece, part: &Tensor<A, 4>) {
    let [_, _, count, w] = part.shape();
    for (slab, from) in part.data().chunks_exact((count * w).max(1)).enumerate() {
        let to = &mut all[(slab * rows + piece.at) * w..][..count * w];
        add(to, from);
    }
}

fn add<A: Element>(to: &mut [A], from: &[A]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to = A::of_f64(to.to_f64() + from.to_f64()));
}

/// Adds the gradients of parameters, except that of the bias, of which a step has only a part.
fn add_parameters<A: Element>(all: &mut Gradients<A>, part: Gradients<A>) {
    let tensor = |all: &mut Option<Tensor<A, 4>>, part: Option<Tensor<A, 4>>| match (all, part) {
        (Some(all), Some(part)) => add(all.data_mut(), part.data()),
        (all, part) => *all = all.take().or(part),
    };
    let vector = |all: &mut Option<Vec<A>>, part: Option<Vec<A>>| match (all, part) {
        (Some(all), Some(part)) => add(all, &part),
        (all, part) => *all = all.take().or(part),
    };
    tensor(&mut all.w, part.w);
    tensor(&mut all.w_q, part.w_q);
    tensor(&mut all.w_k, part.w_k);
    tensor(&mut all.table, part.table);
    vector(&mut all.v_score, part.v_score);
    vector(&mut all.scale, part.scale);
}

/// Adds a step's gradient of the bias to the whole one.
fn add_bias<A: Element>(all: &mut Tensor<A, 4>, part: &Tensor<A, 4>, rows: &Range<usize>, keys: &Range<usize>) {
    let [_, _, n, m] = all.shape();
    let (first, start) = (if n == 1 { 0 } else { rows.start }, if m == 1 { 0 } else { keys.start });
    let [b, h, count, width] = part.shape();
    for (b, h, i) in (0..b).flat_map(|b| (0..h).flat_map(move |h| (0..count).map(move |i| (b, h, i)))) {
        for j in 0..width {
            let to = &mut all[[b, h, first + i, start + j]];
            *to = A::of_f64(to.to_f64() + part[[b, h, i, j]].to_f64());
        }
    }
}

impl ContextAttention<'_> {
    /// The attention of a step, without sinks, which belong to rows and not to keys.
    fn of_step(&self, first: usize, key: usize) -> Attention {
        let (n, m) = (self.queries.len() as i64, self.keys.len() as i64);
        let moved = |offset: i64| Place::Offset(offset + first as i64 - key as i64);
        let mut attention = self.attention.clone();
        attention.sinks = false;
        attention.place = match attention.place {
            Place::Start => moved(0),
            Place::End => moved(m - n),
            Place::Offset(offset) => moved(offset),
            Place::Given => Place::Given,
        };
        attention
    }

    fn step_data<T: Element>(
        &self,
        inputs: &Inputs<'_, T>,
        of: Sizes,
        rows: &Range<usize>,
        keys: &Range<usize>,
    ) -> StepData<T::Acc> {
        let (n, m) = (self.queries.len(), self.keys.len());
        let length = |&length: &usize| length.saturating_sub(keys.start).min(keys.len());
        StepData {
            bias: inputs.bias.map(|bias| part(bias, rows, keys, T::widen)),
            bits: inputs.bits.map(|bits| part(bits, rows, keys, |bit| bit)),
            lengths: inputs.lengths.map(|lengths| lengths.iter().map(length).collect()),
            segments: inputs.segments.map(|(queries, of_keys)| [cut(queries, n, rows), cut(of_keys, m, keys)]),
            positions: inputs.positions.map(|of| cut(of, n, rows).iter().map(|p| p - keys.start as i64).collect()),
            buckets: inputs.buckets.map(|(queries, of_keys)| {
                let rounds = 0..queries.shape()[3];
                [part_of_rows(queries, of.hq, rows, &rounds), part_of_rows(of_keys, of.hk, keys, &rounds)]
            }),
        }
    }

    /// Starts to pass keys and values on to the next rank, and to receive those of the previous one.
    fn pass_keys<T: Number>(&self, block: &[Vec<T>; 2], next: usize, of: Sizes) -> Result<[Pending; 2]> {
        let (rank, size) = (self.ranks.rank(), self.ranks.size());
        let bytes = [T::to_bytes(&block[0]), T::to_bytes(&block[1])].concat();
        let len = of.b * of.hk * self.keys.rows(next) * (of.dk + of.dv) * size_of::<T>();
        let coming = self.ranks.receive((rank + size - 1) % size, RING_KEYS, len)?;
        Ok([coming, self.ranks.send((rank + 1) % size, RING_KEYS, bytes)?])
    }

    fn received<T: Number>(&self, [coming, going]: [Pending; 2], from: usize, of: Sizes) -> Result<[Vec<T>; 2]> {
        let bytes = coming.wait()?;
        going.wait()?;
        let (k, v) = bytes.split_at(of.b * of.hk * self.keys.rows(from) * of.dk * size_of::<T>());
        Ok([T::from_bytes(k), T::from_bytes(v)])
    }

    /// Calls `step` with the keys and values of every rank in turn, this one's first, while the next ones are in
    /// flight.
    fn around<T, A>(
        &self,
        inputs: &Inputs<'_, T>,
        of: Sizes,
        mut step: impl FnMut(usize, &[Vec<A>; 2]) -> Result<()>,
    ) -> Result<()>
    where
        T: Element<Acc = A> + Number,
    {
        let (rank, size) = (self.ranks.rank(), self.ranks.size());
        let mut block = [inputs.k.to_vec(), inputs.v.to_vec()];
        for at in 0..size {
            let (from, next) = ((rank + size - at) % size, (rank + 2 * size - at - 1) % size);
            let travelling = (at + 1 < size).then(|| self.pass_keys(&block, next, of)).transpose()?;
            step(from, &[widened(&block[0]), widened(&block[1])])?;
            if let Some(travelling) = travelling {
                block = self.received(travelling, next, of)?;
            }
        }
        Ok(())
    }

    pub(super) fn forward_ring<T>(&self, inputs: Inputs<'_, T>, of: Sizes) -> Result<Output<T>>
    where
        T: Element + Number,
        T::Acc: Element<Acc = T::Acc> + Number,
    {
        let rank = self.ranks.rank();
        let (rows, parameters) = (self.queries.rows(rank), Parameters::new(&inputs));
        let q = widened(&inputs.q.to_vec());
        let mut merged = Merged::<T::Acc>::new(of.b * of.hq, rows, of.dv);
        let scratch = Scratch::new();
        self.around(&inputs, of, |from, [k, v]| {
            let count = self.keys.rows(from);
            for queries in pieces(self.queries.of(rank)) {
                for keys in pieces(self.keys.of(from)) {
                    let data = self.step_data(&inputs, of, &queries.rows, &keys.rows);
                    let tensors = [
                        view(&q, [of.b, of.hq, rows, of.d], &queries)?,
                        view(k, [of.b, of.hk, count, of.dk], &keys)?,
                        view(v, [of.b, of.hk, count, of.dv], &keys)?,
                    ];
                    let attention = self.of_step(queries.rows.start, keys.rows.start);
                    let out = attention.forward_with(parameters.inputs(tensors, &data), &scratch, self.threads)?;
                    merged.add(&queries, &out);
                }
            }
            Ok(())
        })?;
        if let Some(sinks) = inputs.sinks.filter(|_| self.attention.sinks) {
            for row in 0..merged.lse.len() {
                merged.add_row(row, sinks[row / rows % of.hq].widen(), None);
            }
        }
        let lse = Tensor::new(merged.lse, [of.b, of.hq, rows])?;
        let mut out = Output::of_lse(lse, 0, self.attention.place)?;
        let values = merged.values.into_iter().map(T::narrow).collect();
        out.values = Tensor::new(values, [of.b, of.hq, rows, of.dv])?;
        Ok(out)
    }

    pub(super) fn backward_ring<T>(
        &self,
        inputs: Inputs<'_, T>,
        out: &Output<T>,
        upstream: Upstream<'_, T>,
        of: Sizes,
    ) -> Result<Gradients<T>>
    where
        T: Element + Number,
        T::Acc: Element<Acc = T::Acc> + Number,
    {
        let (rank, size) = (self.ranks.rank(), self.ranks.size());
        let (rows, own) = (self.queries.rows(rank), self.keys.rows(rank));
        let parameters = Parameters::new(&inputs);
        let q = widened(&inputs.q.to_vec());
        let values = widened(out.values.data());
        let d_out = widened(&upstream.values.to_vec());
        let zeros = |shape| Tensor::<T::Acc, 4>::zeros(shape);
        let mut d_q = zeros([of.b, of.hq, rows, of.d])?;
        let mut found = Gradients::new(zeros([0; 4])?, zeros([0; 4])?, zeros([0; 4])?);
        found.bias = inputs.bias.filter(|_| upstream.for_bias).map(|bias| zeros(bias.shape())).transpose()?;
        let mut sums = Vec::new();
        let mut going = Vec::new();
        let scratch = Scratch::new();
        self.around(&inputs, of, |from, [k, v]| {
            let count = self.keys.rows(from);
            let (k_shape, v_shape) = ([of.b, of.hk, count, of.dk], [of.b, of.hk, count, of.dv]);
            let (mut d_k, mut d_v) = (zeros(k_shape)?, zeros(v_shape)?);
            for queries in pieces(self.queries.of(rank)) {
                let shape = [of.b, of.hq, rows, of.dv];
                let lse = view(out.lse.data(), [of.b, of.hq, rows, 1], &queries)?.to_vec();
                let lse = Tensor::new(lse, [of.b, of.hq, queries.rows.len()])?;
                let d_lse = upstream.lse.map(|d_lse| view(d_lse, [of.b, of.hq, rows, 1], &queries)).transpose()?;
                let d_lse = d_lse.map(|d_lse| d_lse.to_vec());
                for keys in pieces(self.keys.of(from)) {
                    let data = self.step_data(&inputs, of, &queries.rows, &keys.rows);
                    let tensors = [
                        view(&q, [of.b, of.hq, rows, of.d], &queries)?,
                        view(k, k_shape, &keys)?,
                        view(v, v_shape, &keys)?,
                    ];
                    let attention = self.of_step(queries.rows.start, keys.rows.start);
                    let mut whole = Output::of_lse(lse.clone(), 0, attention.place)?;
                    let own = view(&values, shape, &queries)?.to_vec();
                    whole.values = Tensor::new(own, [of.b, of.hq, queries.rows.len(), of.dv])?;
                    let mut above = Upstream::new(view(&d_out, shape, &queries)?);
                    (above.lse, above.for_bias) = (d_lse.as_deref(), upstream.for_bias);
                    let call = parameters.inputs(tensors, &data);
                    let mut part = attention.backward_with(call, &whole, above, &scratch, self.threads)?;
                    add_piece(d_q.data_mut(), rows, &queries, &part.q);
                    add_piece(d_k.data_mut(), count, &keys, &part.k);
                    add_piece(d_v.data_mut(), count, &keys, &part.v);
                    if let (Some(all), Some(part)) = (&mut found.bias, part.bias.take()) {
                        add_bias(all, &part, &queries.rows, &keys.rows);
                    }
                    add_parameters(&mut found, part);
                }
            }
            // The sums of a rank's keys start there, follow its keys around the ring, and come back.
            let mut all = [d_k.into_data(), d_v.into_data()].concat();
            if from != rank {
                let so_far = self.ranks.receive((rank + size - 1) % size, RING_SUMS, size_of_val(&all[..]))?.wait()?;
                let mut so_far = T::Acc::from_bytes(&so_far);
                add(&mut so_far, &all);
                all = so_far;
            }
            if size > 1 {
                going.push(self.ranks.send((rank + 1) % size, RING_SUMS, T::Acc::to_bytes(&all))?);
            } else {
                sums = all;
            }
            Ok(())
        })?;
        if size > 1 {
            let len = of.b * of.hk * own * (of.dk + of.dv) * size_of::<T::Acc>();
            let bytes = self.ranks.receive((rank + size - 1) % size, RING_SUMS, len)?.wait()?;
            sums = T::Acc::from_bytes(&bytes);
            going.into_iter().try_for_each(|message| message.wait().map(drop))?;
        }
        if let Some(sinks) = inputs.sinks.filter(|_| self.attention.sinks) {
            let terms = RowTerms { values: &values, d_out: &d_out, lse: out.lse.data(), d_lse: upstream.lse };
            found.sinks = Some(terms.of_sinks(&widened(sinks), rows));
        }
        let d_v = sums.split_off(of.b * of.hk * own * of.dk);
        let d_k = Tensor::new(sums, [of.b, of.hk, own, of.dk])?;
        let d_v = Tensor::new(d_v, [of.b, of.hk, own, of.dv])?;
        Ok(heads::summed(self.ranks, Gradients::new(d_q, d_k, d_v), found)?.rounded())
    }
}

/// The terms of a sink's gradient, `[B, Hq, rows, Dv]` and `[B, Hq, rows]`.
struct RowTerms<'a, A> {
    values: &'a [A],
    d_out: &'a [A],
    lse: &'a [A],
    d_lse: Option<&'a [A]>,
}

impl<A: Element> RowTerms<'_, A> {
    /// `Σ p_sink · (d_lse − out · d_out)` over the rows of each head.
    fn of_sinks(&self, sinks: &[A], rows: usize) -> Vec<A> {
        let mut sums = vec![0.0; sinks.len()];
        let width = self.values.len() / self.lse.len().max(1);
        for (row, lse) in self.lse.iter().enumerate() {
            let h = row / rows % sinks.len();
            let products = self.values[row * width..].iter().zip(&self.d_out[row * width..]).take(width);
            let delta: f64 = products.map(|(out, d_out)| out.to_f64() * d_out.to_f64()).sum();
            let d_lse = self.d_lse.map_or(0.0, |d_lse| d_lse[row].to_f64());
            sums[h] += (sinks[h].to_f64() - lse.to_f64()).exp() * (d_lse - delta);
        }
        sums.into_iter().map(A::of_f64).collect()
    }
}

/// Some rows of a view `[B, H, rows, W]`, or of one head for all.
fn part_of_rows(of: View<'_, i32>, heads: usize, rows: &Range<usize>, width: &Range<usize>) -> Tensor<i32, 4> {
    let [b, h, _, _] = of.shape();
    debug_assert!(h == heads || h == 1, "checked by the library");
    Tensor::from_fn([b, h, rows.len(), width.len()], |[b, h, i, x]| of.at(b, h, rows.start + i, x))
}

/// Rejects what a ring does not support.
pub(super) fn check(attention: &Attention) -> Result<()> {
    match refusal(attention) {
        None => Ok(()),
        Some(what) => Err(Error::Invalid(format!("a ring does not know {what}: gather keys and values instead"))),
    }
}
