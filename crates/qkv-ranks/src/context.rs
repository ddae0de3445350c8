//! Context parallel attention: one long sequence divided over ranks, each of which holds some of its rows. A rank
//! computes part of what one process would compute, in the same order, so that the bits are the same.
//!
//! | way | what travels | what a rank computes |
//! | --- | --- | --- |
//! | [`Way::Heads`] (Ulysses) | every row, to the rank of its head and back | all rows of some heads |
//! | [`Way::Gathered`] | keys and values, to all ranks | some rows of all heads; the gradients of some keys |
//! | [`Way::Ring`] | keys and values, from rank to rank | some rows over the keys of one rank after another |
//!
//! In the second way, a rank's part is a rectangle of the mask: tiles outside are empty and cost nothing, and every row
//! and key keeps its number in the sequence. The gradients of keys and values are sums over all queries, so a rank
//! computes them for whole tiles of keys, over all queries in their order. The third way merges partial results, so it
//! equals one process up to rounding.

mod heads;
mod ring;
mod rows;

use crate::error::{Error, Result};
use crate::number::Number;
use crate::ranks::Ranks;
use crate::shards::Shards;
use qkv::{Attention, Blocks, Element, Gradients, Inputs, Mask, Output, Score, Scratch, Select, Tensor, Upstream};
use rows::{Slabs, gather, place, reshard, take};
use std::ops::Range;

/// How attention is divided over ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Heads are divided, by all-to-all (DeepSpeed-Ulysses, arXiv:2309.14509). Needs a key head per rank.
    Heads,
    /// Rows are divided, and every rank has all keys and values while it computes.
    Gathered,
    /// Rows are divided, and keys and values travel around (ring attention, arXiv:2310.01889): for those that do not
    /// fit on one rank. Equal to one process up to rounding, and reproducible from run to run. Used only on request.
    Ring,
}

/// Attention over the ranks of a group: see [`Ranks::attention`].
#[derive(Clone, Debug)]
pub struct ContextAttention<'a> {
    ranks: &'a Ranks,
    attention: &'a Attention,
    queries: &'a Shards,
    keys: &'a Shards,
    way: Option<Way>,
    threads: usize,
}

/// The shape of the whole call.
#[derive(Clone, Copy)]
struct Sizes {
    b: usize,
    hq: usize,
    hk: usize,
    d: usize,
    dk: usize,
    dv: usize,
}

impl Sizes {
    fn slabs(self, heads: usize, width: usize) -> Slabs {
        Slabs { batch: self.b, heads, width }
    }
}

/// Rows in a block of the rectangle that a rank computes: a multiple of the engine's tile of keys, and large enough
/// that no side has more than 1,024 blocks.
fn block(len: usize) -> usize {
    KEYS * len.div_ceil(KEYS * 1024).max(1)
}

/// Keys in a tile of the engine.
const KEYS: usize = 128;

impl Ranks {
    /// Attention over one sequence whose rows these ranks hold. Each rank passes its own rows of `q`, `k`, `v` and of
    /// the upstream gradients, and gets its own rows of the output and of their gradients; everything else (lengths,
    /// segments, bits, biases, positions, parameters) is passed in full on every rank. The output, the log-sum-exp and
    /// the gradients of q, k and v have the bits of one process, except with a [ring](Way::Ring). For masks whose keys
    /// the engine gathers (dilated or strided, where that pays), the gradients equal those of one process only up to
    /// rounding when rows are divided.
    ///
    /// ```
    /// use qkv::{Attention, Inputs, Mask, Tensor};
    /// use qkv_ranks::{Shards, run_in_process};
    /// let x = Tensor::<f32, 4>::randn([1, 2, 8, 4], 1); // [B, H, N, D]
    /// let causal = Attention::scaled_dot().mask(Mask::causal());
    /// let whole = causal.forward(Inputs::new(&x, &x, &x))?;
    /// let shards = Shards::even(8, 2);
    /// let parts = run_in_process(2, |ranks| {
    ///     let from = 4 * ranks.rank();
    ///     let own = Tensor::from_fn([1, 2, 4, 4], |[b, h, i, x_]| x[[b, h, from + i, x_]]);
    ///     ranks.attention(&causal, &shards, &shards).forward(Inputs::new(&own, &own, &own))
    /// });
    /// for (rank, part) in parts.into_iter().enumerate() {
    ///     let part = part.unwrap();
    ///     assert_eq!(part.values[[0, 1, 3, 2]].to_bits(), whole.values[[0, 1, 4 * rank + 3, 2]].to_bits());
    /// }
    /// # Ok::<(), qkv::Error>(())
    /// ```
    pub fn attention<'a>(
        &'a self,
        attention: &'a Attention,
        queries: &'a Shards,
        keys: &'a Shards,
    ) -> ContextAttention<'a> {
        let threads = 1;
        ContextAttention { ranks: self, attention, queries, keys, way: None, threads }
    }

    /// Gathers the whole tensor `[B, H, rows, W]` on the first rank, from every rank's rows; the others get no rows.
    ///
    /// # Errors
    /// If the rows are not those of the shards, or a rank is gone.
    pub fn gather_to_first<E: Number>(&self, shards: &Shards, own: &Tensor<E, 4>) -> Result<Tensor<E, 4>> {
        let [batch, heads, rows, width] = own.shape();
        if shards.size() != self.size() || shards.rows(self.rank()) != rows {
            return Err(Error::Invalid(format!("{rows} rows, which are not those of their shards")));
        }
        let first = Shards::all_on(0, shards.len(), self.size());
        let all = reshard(self, shards, &first, own.data(), Slabs { batch, heads, width })?;
        Ok(Tensor::new(all, [batch, heads, first.rows(self.rank()), width])?)
    }
}

impl ContextAttention<'_> {
    /// Divides attention this way, instead of choosing a way that suits the call.
    pub fn way(mut self, way: Way) -> Self {
        self.way = Some(way);
        self
    }

    /// With this many threads on each rank, instead of one.
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = threads.max(1);
        self
    }

    /// The way used for this many key heads: unless one was requested, by heads if every rank gets one and nothing
    /// depends on a head's number (as ALiBi, dropout and sampling do).
    ///
    /// # Errors
    /// If the requested way is not possible.
    pub fn taken(&self, key_heads: usize) -> Result<Way> {
        let numbered = self.attention.bias.has_alibi() || self.attention.draws();
        let by_heads = key_heads >= self.ranks.size() && !numbered;
        let by_rows = !matches!(self.attention.score, Score::Linear(_));
        match self.way {
            None if by_heads => Ok(Way::Heads),
            None if by_rows => Ok(Way::Gathered),
            None => Err(Error::Invalid(format!(
                "linear attention is divided by heads: {key_heads} key heads on {} ranks",
                self.ranks.size()
            ))),
            Some(Way::Heads) if numbered => {
                Err(Error::Invalid("ALiBi, dropout and sampling depend on a head's number: divide rows instead".into()))
            }
            Some(Way::Heads) if !by_heads => {
                Err(Error::Invalid(format!("{key_heads} key heads cannot be divided over {} ranks", self.ranks.size())))
            }
            Some(Way::Gathered | Way::Ring) if !by_rows => {
                Err(Error::Invalid("linear attention is divided by heads".into()))
            }
            Some(Way::Ring) => ring::check(self.attention).map(|()| Way::Ring),
            Some(way) => Ok(way),
        }
    }

    fn sizes<T: Element>(&self, inputs: &Inputs<'_, T>) -> Result<Sizes> {
        let ([b, hq, n, d], [_, hk, m, dk]) = (inputs.q.shape(), inputs.k.shape());
        let (rank, size) = (self.ranks.rank(), self.ranks.size());
        for (tensor, shards, rows) in [("q", self.queries, n), ("k", self.keys, m)] {
            if shards.size() != size || shards.rows(rank) != rows {
                return Err(Error::Invalid(format!("`{tensor}` has {rows} rows, which are not those of its shards")));
            }
        }
        Ok(Sizes { b, hq, hk, d, dk, dv: inputs.v.shape()[3] })
    }

    /// This rank's rows of the output.
    ///
    /// # Errors
    /// If `qkv` rejects the call, the rows are not those of the shards, or a rank is gone.
    pub fn forward<T>(&self, inputs: Inputs<'_, T>) -> Result<Output<T>>
    where
        T: Element + Number,
        T::Acc: Element<Acc = T::Acc> + Number,
    {
        let of = self.sizes(&inputs)?;
        match self.taken(of.hk)? {
            Way::Heads => self.forward_by_heads(inputs, of),
            Way::Gathered => self.forward_gathered(inputs, of),
            Way::Ring => self.forward_ring(inputs, of),
        }
    }

    /// This rank's rows of the gradients of q, k and v. Every rank gets the full gradients of parameters: they are
    /// summed over the ranks in order, so they equal those of one process up to rounding.
    ///
    /// # Errors
    /// As for [`forward`](ContextAttention::forward).
    pub fn backward<T>(&self, inputs: Inputs<'_, T>, out: &Output<T>, upstream: Upstream<'_, T>) -> Result<Gradients<T>>
    where
        T: Element + Number,
        T::Acc: Element<Acc = T::Acc> + Number,
    {
        let of = self.sizes(&inputs)?;
        match self.taken(of.hk)? {
            Way::Heads => self.backward_by_heads(inputs, out, upstream, of),
            Way::Gathered => self.backward_gathered(inputs, out, upstream, of),
            Way::Ring => self.backward_ring(inputs, out, upstream, of),
        }
    }

    /// Exact rows of weights, recomputed from this rank's queries and all keys: `rows` are indices among this rank's
    /// own. All ranks must call it together, each for a head and rows of its choice.
    ///
    /// # Errors
    /// As for [`forward`](ContextAttention::forward).
    pub fn weights<T>(
        &self,
        inputs: Inputs<'_, T>,
        out: &Output<T>,
        (b, h): (usize, usize),
        rows: &[usize],
    ) -> Result<Tensor<T::Acc, 2>>
    where
        T: Element<Acc: Number> + Number,
    {
        let of = self.sizes(&inputs)?;
        let (n, own) = (self.queries.len(), self.queries.of(self.ranks.rank()));
        let [k, v] = self.gathered_keys(&inputs, of)?;
        let q = scattered(&inputs.q.to_vec(), n, own, of.slabs(of.hq, of.d));
        let q = Tensor::new(q, [of.b, of.hq, n, of.d])?;
        let column = |x: &Tensor<T::Acc, 3>| match x.data().is_empty() {
            true => Ok(x.clone()),
            false => Tensor::new(scattered(x.data(), n, own, of.slabs(of.hq, 1)), [of.b, of.hq, n]),
        };
        let mut whole = Output::of_lse(column(&out.lse)?, of.dv, self.attention.place)?;
        whole.threshold = out.threshold.as_ref().map(column).transpose()?;
        whole.chosen = out
            .chosen
            .as_ref()
            .map(|chosen| {
                let width = chosen.shape()[3];
                Tensor::new(scattered(chosen.data(), n, own, of.slabs(of.hq, width)), [of.b, of.hq, n, width])
            })
            .transpose()?;
        let numbers: Vec<usize> = own.iter().cloned().flatten().collect();
        let wanted: Option<Vec<usize>> = rows.iter().map(|&row| numbers.get(row).copied()).collect();
        let wanted = wanted.ok_or_else(|| Error::Invalid("a row that this rank does not hold".into()))?;
        Ok(self.attention.weights(with(inputs, &q, &k, &v), &whole)?.rows_at(b, h, &wanted)?)
    }

    fn gathered_keys<T: Element + Number>(&self, inputs: &Inputs<'_, T>, of: Sizes) -> Result<[Tensor<T, 4>; 2]> {
        let m = self.keys.len();
        let k = gather(self.ranks, self.keys, &inputs.k.to_vec(), of.slabs(of.hk, of.dk))?;
        let v = gather(self.ranks, self.keys, &inputs.v.to_vec(), of.slabs(of.hk, of.dv))?;
        Ok([Tensor::new(k, [of.b, of.hk, m, of.dk])?, Tensor::new(v, [of.b, of.hk, m, of.dv])?])
    }

    /// The attention, with a mask that keeps only a rectangle of these rows and keys.
    fn within(&self, rows: &[Range<usize>], keys: &[Range<usize>]) -> Attention {
        let (n, m) = (self.queries.len(), self.keys.len());
        let size = block(n.max(m));
        let inside = |of: &[Range<usize>], at: usize| of.iter().any(|range| range.contains(&(at * size)));
        let columns: Vec<bool> = (0..m.div_ceil(size)).map(|at| inside(keys, at)).collect();
        let row = |at: usize| if inside(rows, at) { columns.clone() } else { vec![false; columns.len()] };
        let seen = (0..n.div_ceil(size)).map(row).collect();
        self.attention.clone().mask(Mask::blocks(Blocks { size, seen }))
    }

    fn forward_gathered<T>(&self, inputs: Inputs<'_, T>, of: Sizes) -> Result<Output<T>>
    where
        T: Element<Acc: Number> + Number,
    {
        let (n, m, rank) = (self.queries.len(), self.keys.len(), self.ranks.rank());
        let [k, v] = self.gathered_keys(&inputs, of)?;
        let owners = self.queries.in_blocks(block(n.max(m)));
        let q = reshard(self.ranks, self.queries, &owners, &inputs.q.to_vec(), of.slabs(of.hq, of.d))?;
        let q = Tensor::new(scattered(&q, n, owners.of(rank), of.slabs(of.hq, of.d)), [of.b, of.hq, n, of.d])?;
        let own = self.within(owners.of(rank), std::slice::from_ref(&(0..m)));
        let whole = own.forward_with(with(inputs, &q, &k, &v), &Scratch::new(), self.threads)?;
        let mut moved = Moved { of: self, owners: &owners, sizes: of };
        moved.output(&whole)
    }

    fn backward_gathered<T>(
        &self,
        inputs: Inputs<'_, T>,
        out: &Output<T>,
        upstream: Upstream<'_, T>,
        of: Sizes,
    ) -> Result<Gradients<T>>
    where
        T: Element<Acc: Number> + Number,
    {
        let (n, m, rank, ranks) = (self.queries.len(), self.keys.len(), self.ranks.rank(), self.ranks);
        let [k, v] = self.gathered_keys(&inputs, of)?;
        let all = |local: &[T], width: usize| -> Result<Tensor<T, 4>> {
            let whole = gather(ranks, self.queries, local, of.slabs(of.hq, width))?;
            Ok(Tensor::new(whole, [of.b, of.hq, n, width])?)
        };
        let column = |local: &[T::Acc]| gather(ranks, self.queries, local, of.slabs(of.hq, 1));
        let q = all(&inputs.q.to_vec(), of.d)?;
        let d_out = all(&upstream.values.to_vec(), of.dv)?;
        let inputs = with(inputs, &q, &k, &v);
        // What other selections save for their backward pass is recomputed on every rank.
        let whole = if self.attention.select == Select::Soft {
            let lse = Tensor::new(column(out.lse.data())?, [of.b, of.hq, n])?;
            let mut whole = Output::of_lse(lse, of.dv, self.attention.place)?;
            whole.values = all(out.values.data(), of.dv)?;
            if let Some(entropy) = &out.entropy {
                whole.entropy = Some(Tensor::new(column(entropy.data())?, [of.b, of.hq, n])?);
            }
            whole
        } else {
            self.attention.forward_with(inputs, &Scratch::new(), self.threads)?
        };
        let [d_lse, d_entropy, d_log_prob] = [upstream.lse, upstream.entropy, upstream.log_prob];
        let columns = |of: Option<&[T::Acc]>| of.map(column).transpose();
        let (d_lse, d_entropy, d_log_prob) = (columns(d_lse)?, columns(d_entropy)?, columns(d_log_prob)?);
        let mut above = Upstream::new(&d_out);
        (above.lse, above.entropy, above.log_prob) = (d_lse.as_deref(), d_entropy.as_deref(), d_log_prob.as_deref());
        above.for_bias = upstream.for_bias;

        let size = block(n.max(m));
        let scratch = Scratch::new();
        let rows = self.queries.in_blocks(size);
        let of_rows = self.within(rows.of(rank), std::slice::from_ref(&(0..m)));
        let mut found = of_rows.backward_with(inputs, &whole, above.only_queries(), &scratch, self.threads)?;
        let d_q = take(found.q.data(), n, rows.of(rank), of.slabs(of.hq, of.d));
        let d_q = reshard(ranks, &rows, self.queries, &d_q, of.slabs(of.hq, of.d))?;
        let columns = self.keys.in_blocks(size);
        let of_keys = self.within(std::slice::from_ref(&(0..n)), columns.of(rank));
        let of_keys = of_keys.backward_with(inputs, &whole, above.only_keys(), &scratch, self.threads)?;
        let back = |whole: &[T], width: usize| -> Result<Tensor<T, 4>> {
            let own = take(whole, m, columns.of(rank), of.slabs(of.hk, width));
            let own = reshard(ranks, &columns, self.keys, &own, of.slabs(of.hk, width))?;
            Ok(Tensor::new(own, [of.b, of.hk, self.keys.rows(rank), width])?)
        };
        let (d_k, d_v) = (back(of_keys.k.data(), of.dk)?, back(of_keys.v.data(), of.dv)?);
        let d_q = Tensor::new(d_q, [of.b, of.hq, self.queries.rows(rank), of.d])?;
        // A sink belongs to rows and not to pairs, so every rank has its whole gradient. Pairs are divided by rows, so
        // each is in the sum of one rank.
        let sinks = found.sinks.take();
        let mut all = heads::summed(ranks, Gradients::new(d_q, d_k, d_v), found)?;
        all.sinks = sinks;
        Ok(all)
    }
}

/// The inputs of a call with other queries, keys and values.
fn with<'a, T: Element>(
    inputs: Inputs<'a, T>,
    q: &'a Tensor<T, 4>,
    k: &'a Tensor<T, 4>,
    v: &'a Tensor<T, 4>,
) -> Inputs<'a, T> {
    let plain = Inputs::new(q, k, v);
    let mut inputs = inputs;
    (inputs.q, inputs.k, inputs.v) = (plain.q, plain.k, plain.v);
    inputs
}

/// Some rows of a tensor that is 0 elsewhere.
fn scattered<E: Number>(local: &[E], len: usize, ranges: &[Range<usize>], of: Slabs) -> Vec<E> {
    let mut whole = vec![E::default(); of.batch * of.heads * len * of.width];
    place(&mut whole, len, ranges, local, of);
    whole
}

/// Moves results from the rank that computed them to the one that holds their rows.
struct Moved<'a> {
    of: &'a ContextAttention<'a>,
    owners: &'a Shards,
    sizes: Sizes,
}

impl Moved<'_> {
    fn rows<E: Number>(&mut self, whole: &[E], width: usize) -> Result<Vec<E>> {
        let (ranks, slabs) = (self.of.ranks, self.sizes.slabs(self.sizes.hq, width));
        let own = take(whole, self.of.queries.len(), self.owners.of(ranks.rank()), slabs);
        reshard(ranks, self.owners, self.of.queries, &own, slabs)
    }

    fn column<A: Number>(&mut self, whole: &Tensor<A, 3>) -> Result<Tensor<A, 3>> {
        let shape = [self.sizes.b, self.sizes.hq, self.of.queries.rows(self.of.ranks.rank())];
        match whole.data().is_empty() {
            true => Ok(whole.clone()),
            false => Ok(Tensor::new(self.rows(whole.data(), 1)?, shape)?),
        }
    }

    fn tensor<E: Number>(&mut self, whole: &Tensor<E, 4>) -> Result<Tensor<E, 4>> {
        let width = whole.shape()[3];
        let shape = [self.sizes.b, self.sizes.hq, self.of.queries.rows(self.of.ranks.rank()), width];
        Ok(Tensor::new(self.rows(whole.data(), width)?, shape)?)
    }

    fn output<T>(&mut self, whole: &Output<T>) -> Result<Output<T>>
    where
        T: Element<Acc: Number> + Number,
    {
        let mut out = Output::of_lse(self.column(&whole.lse)?, 0, self.of.attention.place)?;
        out.values = self.tensor(&whole.values)?;
        out.threshold = whole.threshold.as_ref().map(|column| self.column(column)).transpose()?;
        out.entropy = whole.entropy.as_ref().map(|column| self.column(column)).transpose()?;
        out.log_prob = whole.log_prob.as_ref().map(|column| self.column(column)).transpose()?;
        out.chosen = whole.chosen.as_ref().map(|chosen| self.tensor(chosen)).transpose()?;
        Ok(out)
    }
}
