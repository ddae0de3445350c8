//! Attention on the tape: `qkv` itself, over heads that lie side by side in a row.

use crate::float::Float;
use crate::machine::Machine;
use crate::parameters::{Gradients, Param, Parameters};
use crate::tape::{Back, Backward, Tape, Var};
use crate::tensor::Tensor;
use qkv::{Attention, Cache, Choice, Decode, Dropout, Inputs, Mask, Output, Owned, Select, Upstream, View};
use std::sync::{Arc, OnceLock};

/// How many heads the queries have, and how many the keys and values that they share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Of the queries.
    pub query: usize,
    /// Of the keys and values.
    pub key: usize,
}

/// The parameters that a description asks for.
#[derive(Clone, Copy, Debug, Default)]
pub struct Scoring {
    /// The general score's matrix, `[D, Dk]`.
    pub w: Option<Param>,
    /// The additive score's vector, `[A]`; queries and keys count as projected.
    pub v: Option<Param>,
    /// The learned scale, `[1]`.
    pub scale: Option<Param>,
    /// The relative table, `[H, 2·reach + 1]`.
    pub table: Option<Param>,
    /// The sinks, `[H]`.
    pub sinks: Option<Param>,
}

/// One use of attention: the description, and what comes with this call.
#[derive(Clone, Copy, Debug)]
pub struct Attend<'a> {
    /// What is computed. Its dropout and its sampled choices draw from the tape while it trains, and are off elsewhere.
    pub attention: &'a Attention,
    /// The heads.
    pub heads: Heads,
    /// The parameters.
    pub scoring: Scoring,
    /// How many keys each sequence has, `[B]`.
    pub lengths: Option<&'a [usize]>,
    /// How many queries each sequence has, `[B]`: the penalty leaves out the others.
    pub queries: Option<&'a [usize]>,
    /// Added to the loss: this times the mean entropy of the rows of weights. Above 0 it keeps attention from spreading, below
    /// 0 from collapsing.
    pub entropy: f64,
    /// The place of the first query among the keys, where that is not the first key.
    pub from: usize,
}

impl<'a> Attend<'a> {
    /// With one head and nothing besides.
    pub fn new(attention: &'a Attention) -> Self {
        let heads = Heads { query: 1, key: 1 };
        Attend { attention, heads, scoring: Scoring::default(), lengths: None, queries: None, entropy: 0.0, from: 0 }
    }
}

/// Heads side by side in a row, `[B, L, H·D]`, as `[B, H, L, D]`.
pub(crate) fn heads_of<T: Float>(tensor: &Tensor<T>, heads: usize) -> View<'_, T> {
    let &[batch, length, width] = tensor.shape() else {
        panic!("attention takes [B, L, H·D], not {:?}", tensor.shape())
    };
    assert!(width.is_multiple_of(heads), "{heads} heads cannot share a width of {width}");
    let (d, shape) = (width / heads, [batch, heads, length, width / heads]);
    let strides = [length * width, d, width, 1].map(|stride| stride as isize);
    View::strided(tensor.data(), 0, shape, strides).expect("a tensor holds its shape")
}

/// `[B, H, L, D]` back to heads side by side.
fn side_by_side<T: Float>(pool: &crate::Pool<T>, machine: &Machine, from: &qkv::Tensor<T, 4>) -> Tensor<T> {
    let [batch, heads, length, d] = from.shape();
    let mut to = Tensor::unwritten(pool, &[batch, length, heads * d]);
    put_side_by_side(machine, to.data_mut(), from);
    to
}

/// The same into memory that is there.
pub(super) fn put_side_by_side<T: Float>(machine: &Machine, to: &mut [T], from: &qkv::Tensor<T, 4>) {
    let [batch, heads, length, d] = from.shape();
    let (each, size) = (machine.rows_each(batch, length * heads * d), length * heads * d);
    let parts = to.chunks_mut((each * size).max(1)).zip(from.data().chunks((each * size).max(1))).collect();
    machine.each(parts, |_, (to, from): (&mut [T], &[T])| {
        for (to, from) in to.chunks_exact_mut(size).zip(from.chunks_exact(size)) {
            for (at, row) in from.chunks_exact(d).enumerate() {
                let (h, i) = (at / length, at % length);
                to[(i * heads + h) * d..][..d].copy_from_slice(row);
            }
        }
    });
}

/// What a call keeps.
pub(super) struct Call<T: Float> {
    pub(super) attention: Attention,
    heads: Heads,
    scoring: Scoring,
    lengths: Option<Arc<[usize]>>,
    positions: Option<Vec<i64>>,
    q: Tensor<T>,
    k: Tensor<T>,
    v: Tensor<T>,
    center: Option<Tensor<T>>,
    pub(super) buckets: Option<[qkv::Tensor<i32, 4>; 2]>,
}

impl<T: Float> Call<T> {
    fn inputs<'c>(&'c self, parameters: &'c Parameters<T>) -> Inputs<'c, T> {
        let (k, v) = (heads_of(&self.k, self.heads.key), heads_of(&self.v, self.heads.key));
        self.inputs_over(parameters, [heads_of(&self.q, self.heads.query), k, v])
    }

    pub(super) fn inputs_over<'c>(
        &'c self,
        parameters: &'c Parameters<T>,
        [q, k, v]: [View<'c, T>; 3],
    ) -> Inputs<'c, T> {
        let mut inputs = Inputs::new(q, k, v);
        let view = |param: Param| {
            let &[rows, columns] = parameters.shape(param) else { panic!("`{}` is no matrix", parameters.name(param)) };
            View::new(parameters.get(param), [1, 1, rows, columns]).expect("a parameter holds its shape")
        };
        if let Some(w) = self.scoring.w {
            inputs = inputs.w(view(w));
        }
        if let Some(v) = self.scoring.v {
            inputs = inputs.v_score(parameters.get(v));
        }
        if let Some(scale) = self.scoring.scale {
            inputs = inputs.scale(parameters.get(scale));
        }
        if let Some(table) = self.scoring.table {
            inputs = inputs.table(view(table));
        }
        if let Some(sinks) = self.scoring.sinks {
            inputs = inputs.sinks(parameters.get(sinks));
        }
        if let Some(lengths) = &self.lengths {
            inputs = inputs.lengths(lengths);
        }
        if let Some(center) = &self.center {
            inputs = inputs.center(center.data());
        }
        if let Some([q, k]) = &self.buckets {
            inputs = inputs.buckets(q, k);
        }
        if let Some(positions) = &self.positions {
            inputs = inputs.positions(positions);
        }
        inputs
    }
}

/// One attention of a run, with what is needed to look at its weights later: nothing as large as the weights themselves.
#[derive(Clone)]
pub struct Captured<T: Float> {
    call: Arc<Call<T>>,
    out: Output<T>,
    gates: Gates,
}

/// The gradient of the loss with respect to a gate of 1 on what each head gives: known after the way back.
type Gates = Arc<OnceLock<Vec<f64>>>;

impl<T: Float> std::fmt::Debug for Captured<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Captured({:?})", self.call.attention)
    }
}

impl<T: Float> Captured<T> {
    /// What was computed, with the lengths in its mask and without its noise.
    pub fn attention(&self) -> &Attention {
        &self.call.attention
    }

    /// Sequences, heads, queries and keys.
    pub fn shape(&self) -> [usize; 4] {
        let [batch, heads, queries, _] = self.out.values.shape();
        [batch, heads, queries, self.call.k.shape()[1]]
    }

    /// The weights of one head for some queries, `[queries, M]`, recomputed exactly.
    ///
    /// # Errors
    /// Where there is no such sequence, head or query.
    pub fn weights(
        &self,
        parameters: &Parameters<T>,
        sequence: usize,
        head: usize,
        queries: std::ops::Range<usize>,
    ) -> qkv::Result<qkv::Tensor<T, 2>> {
        self.call.attention.weights(self.call.inputs(parameters), &self.out)?.rows(sequence, head, queries)
    }

    /// The tensors of the call, to keep beyond this run and its parameters.
    pub fn inputs(&self, parameters: &Parameters<T>) -> Owned<T> {
        Owned::of(self.call.inputs(parameters))
    }

    /// What it gave, `values [B, H, N, Dv]` and the log-sum-exp with them.
    pub fn output(&self) -> &Output<T> {
        &self.out
    }

    /// The gradient of the loss with respect to a gate of 1 on what each head gives, over the whole batch: how much the loss
    /// would change if the head were turned down (Michel et al. 2019, arXiv:1905.10650). `None` before the way back.
    pub fn gates(&self) -> Option<&[f64]> {
        self.gates.get().map(Vec::as_slice)
    }
}

struct AttendBack<T: Float> {
    call: Arc<Call<T>>,
    slots: [Option<usize>; 3],
    center: Option<usize>,
    out: Output<T>,
    /// The gradient of each row's entropy.
    d_entropy: Option<Vec<T>>,
    /// Where someone looks.
    gates: Option<Gates>,
}

impl<T: Float> Tape<'_, T> {
    /// The call, with noise from this tape or none.
    pub(super) fn call(
        &mut self,
        q: &Var<T>,
        k: &Tensor<T>,
        v: &Tensor<T>,
        center: Option<&Var<T>>,
        how: &Attend<'_>,
    ) -> Call<T> {
        let mut attention = how.attention.clone();
        let training = self.has_noise();
        attention.dropout =
            attention.dropout.filter(|_| training).map(|dropout| Dropout { seed: self.stream(), ..dropout });
        if let Select::Hard(choice) = attention.select {
            let sample = choice.sample.filter(|_| training).map(|_| self.stream());
            attention.select = Select::Hard(Choice { sample, ..choice });
        }
        if how.lengths.is_some() {
            attention.mask = attention.mask & Mask::lengths();
        }
        attention.entropy = self.is_training() && how.entropy != 0.0;
        let &[batch, length, _] = q.shape() else { panic!("attention takes [B, L, H·D], not {:?}", q.shape()) };
        let positions = (how.from > 0).then(|| {
            attention.place = qkv::Place::Given;
            (0..batch).flat_map(|_| (0..length).map(|i| (how.from + i) as i64)).collect()
        });
        Call {
            attention,
            heads: how.heads,
            scoring: how.scoring,
            lengths: how.lengths.map(Into::into),
            positions,
            q: q.value.clone(),
            k: k.clone(),
            v: v.clone(),
            center: center.map(|center| center.value.clone()),
            buckets: None,
        }
    }

    /// Attention from `q [B, N, Hq·D]` to `k [B, M, Hk·Dk]` and `v [B, M, Hk·Dv]`: a tensor `[B, N, Hq·Dv]`. `center [B, N, Hq]`
    /// is for predictive local attention.
    ///
    /// # Errors
    /// What `qkv` refuses: shapes, choices that exclude each other, data that the description asks for and a model has not.
    pub fn attend(
        &mut self,
        q: &Var<T>,
        k: &Var<T>,
        v: &Var<T>,
        center: Option<&Var<T>>,
        how: &Attend<'_>,
    ) -> qkv::Result<Var<T>> {
        let mut call = self.call(q, &k.value, &v.value, center, how);
        if let Some(lsh) = call.attention.mask.hash() {
            let (q, k) = (heads_of(&call.q, how.heads.query), heads_of(&call.k, how.heads.key));
            call.buckets = Some([lsh.hash(q)?, lsh.hash(k)?]);
        }
        let out = call.attention.forward(call.inputs(self.parameters))?;
        let values = side_by_side(self.pool, self.machine, &out.values);
        let d_entropy = out.entropy.as_ref().map(|entropy| {
            let [_, heads, length] = entropy.shape();
            let live = |row: usize| how.queries.is_none_or(|queries| row % length < queries[row / (heads * length)]);
            let rows = (0..entropy.data().len()).filter(|&row| live(row)).count().max(1);
            let total: f64 = entropy.data().iter().enumerate().filter(|(r, _)| live(*r)).map(|(_, e)| e.to_f64()).sum();
            self.add_penalty(how.entropy * total / rows as f64);
            let each = T::of_f64(how.entropy / rows as f64);
            (0..entropy.data().len()).map(|row| if live(row) { each } else { T::ZERO }).collect()
        });
        let call = Arc::new(call);
        let gates = self.captured.as_mut().map(|captured| {
            let gates = Gates::default();
            captured.push(Captured { call: call.clone(), out: out.clone(), gates: gates.clone() });
            gates
        });
        let slots = [q.slot, k.slot, v.slot];
        let center = center.and_then(|center| center.slot);
        Ok(self.record(values, || AttendBack { call, slots, center, out, d_entropy, gates }))
    }

    /// Attention from new queries, which stand at the end, to a cache: for inference, without a way back.
    ///
    /// # Errors
    /// As [`attend`](Tape::attend).
    pub fn attend_cached(&mut self, q: &Var<T>, cache: &Cache<T>, how: &Attend<'_>) -> qkv::Result<Var<T>> {
        let empty = Tensor::new(Vec::new(), &[0]);
        let mut call = self.call(q, &empty, &empty, None, how);
        if let Some(lsh) = call.attention.mask.hash() {
            call.buckets = Some([lsh.hash(heads_of(&call.q, how.heads.query))?, lsh.hash(cache.keys())?]);
        }
        let q = heads_of(&call.q, how.heads.query);
        let inputs = call.inputs_over(self.parameters, [q, cache.keys(), cache.values()]);
        let out = call.attention.decode(inputs, Decode::Fast)?;
        let value = side_by_side(self.pool, self.machine, &out.values);
        Ok(self.constant(value))
    }
}

fn add_to<T: Float>(gradients: &mut Gradients<T>, param: Option<Param>, found: Option<&[T]>) {
    if let (Some(param), Some(found)) = (param, found) {
        gradients.get_mut(param).iter_mut().zip(found).for_each(|(sum, &x)| *sum += x);
    }
}

impl<T: Float> Backward<T> for AttendBack<T> {
    fn backward(self: Box<Self>, upstream: Tensor<T>, back: &mut Back<'_, T>) {
        let AttendBack { call, slots, center, out, d_entropy, gates } = *self;
        let [batch, heads, length, d] = out.values.shape();
        let upstream = upstream.reshaped(&[batch, length, heads * d]);
        if let Some(gates) = gates {
            let view = heads_of(&upstream, heads);
            let mut of_heads = vec![0.0; heads];
            for (at, value) in out.values.data().iter().enumerate() {
                let (row, x) = (at / d, at % d);
                let (b, h, i) = (row / (heads * length), row / length % heads, row % length);
                of_heads[h] += value.to_f64() * view.at(b, h, i, x).to_f64();
            }
            gates.set(of_heads).expect("the way back is walked once");
        }
        let mut from_above = Upstream::new(heads_of(&upstream, heads));
        if let Some(d_entropy) = &d_entropy {
            from_above = from_above.entropy(d_entropy);
        }
        let inputs = call.inputs(back.parameters);
        let found = call.attention.backward_with(inputs, &out, from_above, back.scratch, back.machine.threads());
        let found = found.expect("what forward took, backward takes");
        for (slot, gradient) in slots.into_iter().zip([&found.q, &found.k, &found.v]) {
            if slot.is_some() {
                back.add(slot, side_by_side(back.pool, back.machine, gradient));
            }
        }
        if let (Some(slot), Some(gradient)) = (center, found.center) {
            let shape = call.center.as_ref().expect("there was a centre").shape().to_vec();
            back.add(Some(slot), Tensor::adopted(back.pool, gradient, &shape));
        }
        let Scoring { w, v, scale, table, sinks } = call.scoring;
        add_to(back.gradients, w, found.w.as_ref().map(qkv::Tensor::data));
        add_to(back.gradients, v, found.v_score.as_deref());
        add_to(back.gradients, scale, found.scale.as_deref());
        add_to(back.gradients, table, found.table.as_ref().map(qkv::Tensor::data));
        add_to(back.gradients, sinks, found.sinks.as_deref());
    }
}
