//! Linear attention as a recurrence (Katharopoulos et al. 2020, "Transformers are RNNs"): the past
//! is a state of fixed size, whatever the length.
//!
//! It holds the state at the last span boundary, the state of the chunks since, and the keys and values of the current
//! chunk. These are the partial results of the full causal pass, so its rows are reproduced bit for bit.

use super::check;
use super::chunk::{Block, Facing, Sizes, State};
use super::forward::{Attend, KeyChunk};
use super::map::Map;
use crate::attention::Attention;
use crate::error::{Error, Result};
use crate::heads::Heads;
use crate::mask::Mask;
use crate::output::Output;
use crate::place::Place;
use crate::score::Score;
use crate::scratch::Scratch;
use crate::tensor::{Tensor, checked_len};
use crate::tuning::{CHUNK, SPAN};
use qkv_simd::{Element, View};

/// The state of causal linear attention while decoding: tokens are appended, and queries at the end attend to all
/// tokens so far. Memory does not grow with the length. Results are equal, bit for bit, to the same rows of
/// [`forward`](Attention::forward) over all tokens.
///
/// ```
/// use qkv::{Attention, Features, Inputs, LinearState, Mask, Tensor};
/// let causal = Attention::linear(Features::Elu).mask(Mask::causal());
/// let [q, k, v] = [1, 2, 3].map(|seed| Tensor::<f32, 4>::randn([1, 2, 200, 16], seed));
/// let full = causal.forward(Inputs::new(&q, &k, &v))?;
///
/// let mut state = LinearState::<f32>::new(&causal, 1, 2, 2, 16, 16)?; // B, Hq, Hk, D, Dv
/// for i in 0..200 {
///     let token = |t: &Tensor<f32, 4>| Tensor::from_fn([1, 2, 1, 16], |[b, h, _, x]| t[[b, h, i, x]]);
///     state.append(&token(&k), &token(&v))?;
///     let out = state.attend(&token(&q))?;
///     assert_eq!(out.values[[0, 1, 0, 5]], full.values[[0, 1, i, 5]]);
/// }
/// assert_eq!(state.len(), 200);
/// # Ok::<(), qkv::Error>(())
/// ```
#[derive(Debug)]
pub struct LinearState<T: Element> {
    sizes: Sizes<T::Acc>,
    shape: State,
    batch: usize,
    heads: Heads,
    length: usize,
    /// For each key head of each sequence: the state before the current span, and that of its chunks so far.
    before: Vec<T::Acc>,
    local: Vec<T::Acc>,
    /// Complete chunks in the states.
    chunks: usize,
    /// The tokens of the current chunk, `[B, Hk, CHUNK, width]`, of which `pending` are present.
    keys: Vec<T>,
    values: Vec<T>,
    pending: usize,
    scratch: Scratch<T::Acc>,
}

impl<T: Element> LinearState<T> {
    /// An empty state for `batch` sequences of `query_heads` and `key_heads`, keys of `d` and values of `dv`. The
    /// attention has to be linear and causal.
    pub fn new(
        attention: &Attention,
        batch: usize,
        query_heads: usize,
        key_heads: usize,
        d: usize,
        dv: usize,
    ) -> Result<Self> {
        let Score::Linear(features) = attention.score else {
            return Err(Error::Conflict {
                first: "a recurrence",
                second: "a score that is not linear",
                reason: "only sums of features have a state of fixed size",
            });
        };
        check(attention, d, dv)?;
        if attention.mask != Mask::Causal {
            return Err(Error::Conflict {
                first: "a recurrence",
                second: "a mask other than causal",
                reason: "it sees what went in so far, all of it and nothing else",
            });
        }
        let heads = Heads::new(query_heads, key_heads)?;
        let sizes = Sizes::new(Map::new(features, attention.scale, d), dv);
        let shape = State::new(&sizes, Facing::Values);
        let count = |width: usize| checked_len::<f64>("state", &[batch, key_heads, width]);
        let (states, keys, values) = (count(shape.size())?, count(CHUNK * d)?, count(CHUNK * dv)?);
        let mut empty = vec![T::Acc::of_f64(0.0); states];
        empty.chunks_exact_mut(shape.size()).for_each(|state| shape.clear(state));
        Ok(LinearState {
            sizes,
            shape,
            batch,
            heads,
            length: 0,
            before: empty.clone(),
            local: empty,
            chunks: 0,
            keys: vec![T::default(); keys],
            values: vec![T::default(); values],
            pending: 0,
            scratch: Scratch::new(),
        })
    }

    /// The number of tokens.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Adds the keys `[B, Hk, new, D]` and values `[B, Hk, new, Dv]` of new tokens.
    pub fn append<'a>(&mut self, k: impl Into<View<'a, T>>, v: impl Into<View<'a, T>>) -> Result<()>
    where
        T: 'a,
    {
        let (k, v) = (k.into(), v.into());
        self.check_tokens(k, v)?;
        self.extend(k, v, 0..k.shape()[2]);
        Ok(())
    }

    /// Attends from queries `[B, Hq, new, D]` that stand at the last tokens, the last query at the last token. With
    /// several, all must stand in the current chunk of 64 tokens; [`step`](LinearState::step) takes any
    /// number.
    pub fn attend<'a>(&self, q: impl Into<View<'a, T>>) -> Result<Output<T>>
    where
        T: 'a,
    {
        let q = q.into();
        self.check_queries(q)?;
        let n = q.shape()[2];
        if n > self.pending {
            let expected = format!("at most {} queries, the tokens since the last whole chunk", self.pending);
            return Err(Error::shape("q", &q.shape(), expected));
        }
        let mut out = self.output(n)?;
        self.attend_into(q, 0..n, &mut out);
        Ok(out)
    }

    /// Adds tokens and attends from each, like [`append`](LinearState::append) and [`attend`](LinearState::attend)
    /// token by token, for any number of tokens at a time.
    ///
    /// ```
    /// # use qkv::*;
    /// let causal = Attention::linear(Features::Favor { count: 32, seed: 1 }).mask(Mask::causal());
    /// let [q, k, v] = [1, 2, 3].map(|seed| Tensor::<f32, 4>::randn([1, 2, 300, 16], seed));
    /// let mut state = LinearState::<f32>::new(&causal, 1, 2, 2, 16, 16)?;
    /// let prompt = state.step(&q, &k, &v)?; // all at once
    /// assert_eq!(prompt, causal.forward(Inputs::new(&q, &k, &v))?);
    /// # Ok::<(), qkv::Error>(())
    /// ```
    pub fn step<'a>(
        &mut self,
        q: impl Into<View<'a, T>>,
        k: impl Into<View<'a, T>>,
        v: impl Into<View<'a, T>>,
    ) -> Result<Output<T>>
    where
        T: 'a,
    {
        let (q, k, v) = (q.into(), k.into(), v.into());
        self.check_tokens(k, v)?;
        self.check_queries(q)?;
        let n = k.shape()[2];
        if q.shape()[2] != n {
            return Err(Error::shape("q", &q.shape(), format!("{n} queries, one for each new token")));
        }
        let mut out = self.output(n)?;
        let mut start = 0;
        while start < n {
            let end = n.min(start + CHUNK - self.pending % CHUNK);
            self.extend(k, v, start..end);
            self.attend_into(q, start..end, &mut out);
            start = end;
        }
        Ok(out)
    }

    fn check_tokens(&self, k: View<'_, T>, v: View<'_, T>) -> Result<()> {
        let new = k.shape()[2];
        for (name, view, width) in [("k", k, self.sizes.map.d), ("v", v, self.sizes.dv)] {
            let expected = [self.batch, self.heads.key, new, width];
            if view.shape() != expected {
                return Err(Error::shape(name, &view.shape(), format!("{expected:?}, to be appended")));
            }
        }
        Ok(())
    }

    fn check_queries(&self, q: View<'_, T>) -> Result<()> {
        let expected = [self.batch, self.heads.query, q.shape()[2], self.sizes.map.d];
        if q.shape() != expected {
            return Err(Error::shape("q", &q.shape(), format!("{expected:?}")));
        }
        Ok(())
    }

    fn output(&self, n: usize) -> Result<Output<T>> {
        let values = Tensor::allocate("out", [self.batch, self.heads.query, n, self.sizes.dv])?;
        Ok(Output::new(values, Tensor::allocate("lse", [self.batch, self.heads.query, n])?, Place::End))
    }

    /// Adds tokens to the current chunk. A complete chunk is added to the state only with the next token, so that a
    /// query at its last token still attends to it as a chunk.
    fn extend(&mut self, k: View<'_, T>, v: View<'_, T>, tokens: std::ops::Range<usize>) {
        for i in tokens {
            if self.pending == CHUNK {
                self.fold();
            }
            let pending = self.pending;
            for (store, view) in [(&mut self.keys, k), (&mut self.values, v)] {
                let width = view.shape()[3];
                for head in 0..self.batch * self.heads.key {
                    let (b, h) = (head / self.heads.key, head % self.heads.key);
                    for (x, to) in store[(head * CHUNK + pending) * width..][..width].iter_mut().enumerate() {
                        *to = view.at(b, h, i, x);
                    }
                }
            }
            self.pending += 1;
            self.length += 1;
        }
    }

    /// The current chunk of one key head.
    fn load(&self, head: usize, block: &mut Block<'_, T::Acc>) {
        let (at, heads) = ([head / self.heads.key, head % self.heads.key], [self.batch, self.heads.key]);
        let view = |store, width| View::new(store, [heads[0], heads[1], CHUNK, width]).expect("as long as its shape");
        block.load(&self.sizes, view(&self.keys, self.sizes.map.d).into(), at, 0..self.pending);
        block.load_values(&self.sizes, view(&self.values, self.sizes.dv).into(), at, 0..self.pending);
    }

    /// Adds the current chunk, which is complete, to the state.
    fn fold(&mut self) {
        let (size, shape) = (self.shape.size(), self.shape);
        self.chunks += 1;
        let mut block = Block::new(&self.sizes, &self.scratch);
        let mut sum = self.scratch.take(size);
        for head in 0..self.batch * self.heads.key {
            self.load(head, &mut block);
            let local = &mut self.local[head * size..][..size];
            shape.absorb(&self.sizes, local, &mut block);
            if self.chunks.is_multiple_of(SPAN) {
                let before = &mut self.before[head * size..][..size];
                shape.combine(&self.sizes, &mut sum, before, local);
                before.copy_from_slice(&sum);
                shape.clear(local);
            }
        }
        self.pending = 0;
    }

    /// Attends from queries, the last of which stands at the last token.
    fn attend_into(&self, q: View<'_, T>, queries: std::ops::Range<usize>, out: &mut Output<T>) {
        let size = self.shape.size();
        let mut state = self.scratch.take(size);
        let mut chunk = KeyChunk { first: 0, block: Block::new(&self.sizes, &self.scratch) };
        let mut attend = Attend::new(&self.sizes, &self.scratch);
        for head in 0..self.batch * self.heads.key {
            let (b, key_head) = (head / self.heads.key, head % self.heads.key);
            let [before, local] = [&self.before, &self.local].map(|states| &states[head * size..][..size]);
            self.shape.combine(&self.sizes, &mut state, before, local);
            self.load(head, &mut chunk.block);
            attend.see(&self.sizes, &state, Some(&chunk));
            for h in key_head * self.heads.group..(key_head + 1) * self.heads.group {
                attend.queries.load(&self.sizes, q.into(), [b, h], queries.clone());
                let seen = |r: usize| self.pending - queries.len() + r + 1;
                attend.run(&self.sizes, &state, Some(&chunk), seen, |r, row, lse| {
                    let i = queries.start + r;
                    for (x, &value) in row[..self.sizes.dv].iter().enumerate() {
                        out.values[[b, h, i, x]] = T::narrow(value);
                    }
                    out.lse[[b, h, i]] = lse;
                });
            }
        }
    }
}
