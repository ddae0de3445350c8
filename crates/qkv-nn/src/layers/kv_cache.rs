//! The keys and values of a layer while it decodes. Rows are appended and never moved: which rows belong to a sequence
//! is said by a table, so reordering the hypotheses of a beam search moves numbers of rows and copies no keys.

use crate::float::Float;
use crate::ops::attention::{Heads, head_strides};
use crate::tensor::Tensor;
use qkv::{Pages, Source, View};

/// The cached keys and values of a layer.
#[derive(Clone, Debug)]
pub struct KvCache<T> {
    heads: usize,
    /// Width of a key, and of a value.
    widths: [usize; 2],
    /// Rows of all heads, `[pages, size, Hk·D]`: keys, then values.
    rows: [Vec<T>; 2],
    /// Tokens of a page: 1 where the cache grows, or all tokens of a memory.
    size: usize,
    pages: usize,
    /// The pages of each sequence, `[B, room]`.
    table: Vec<u32>,
    room: usize,
    batch: usize,
    length: usize,
    /// Whether there is one sequence and its rows lie in order.
    in_order: bool,
}

impl<T: Float> KvCache<T> {
    /// An empty cache for `batch` sequences, with keys of `widths[0]` and values of `widths[1]`.
    pub fn new(batch: usize, heads: Heads, widths: [usize; 2]) -> Self {
        KvCache {
            heads: heads.key,
            widths,
            rows: [Vec::new(), Vec::new()],
            size: 1,
            pages: 0,
            table: Vec::new(),
            room: 0,
            batch,
            length: 0,
            in_order: batch == 1,
        }
    }

    /// Number of cached tokens.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether nothing is cached.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Number of sequences.
    pub fn batch(&self) -> usize {
        self.batch
    }

    fn check(&self, k: &Tensor<T>, v: &Tensor<T>) -> qkv::Result<usize> {
        let new = k.shape().get(1).copied().unwrap_or(0);
        for (name, tensor, width) in [("k", k, self.widths[0]), ("v", v, self.widths[1])] {
            let expected = [self.batch, new, self.heads * width];
            if tensor.shape() != expected {
                let expected = format!("{expected:?}, to be appended");
                return Err(qkv::Error::Shape { tensor: name, found: tensor.shape().to_vec(), expected });
            }
        }
        Ok(new)
    }

    /// Appends the keys `[B, new, Hk·D]` and values `[B, new, Hk·Dv]` of new tokens.
    ///
    /// # Errors
    /// Where the shapes differ, or the cache is too large.
    pub fn append(&mut self, k: &Tensor<T>, v: &Tensor<T>) -> qkv::Result<()> {
        let new = self.check(k, v)?;
        let pages = self.pages + self.batch * new;
        if u32::try_from(pages).is_err() {
            let shape = vec![self.batch, self.heads, self.length + new, self.widths[0]];
            return Err(qkv::Error::TooLarge { tensor: "cache", shape });
        }
        self.reserve(self.length + new);
        for b in 0..self.batch {
            for i in 0..new {
                self.table[b * self.room + self.length + i] = (self.pages + b * new + i) as u32;
            }
        }
        self.rows[0].extend_from_slice(k.data());
        self.rows[1].extend_from_slice(v.data());
        (self.pages, self.length) = (pages, self.length + new);
        Ok(())
    }

    /// Fills an empty cache with a memory that does not grow: sequences that [`select`](KvCache::select) repeats share
    /// its rows.
    ///
    /// # Errors
    /// As [`append`](KvCache::append).
    pub fn fill(&mut self, k: &Tensor<T>, v: &Tensor<T>) -> qkv::Result<()> {
        self.length = self.check(k, v)?;
        self.size = self.length.max(1);
        self.pages = self.batch;
        self.rows = [k.data().to_vec(), v.data().to_vec()];
        self.room = 1;
        self.table = (0..self.batch as u32).collect();
        Ok(())
    }

    /// Makes room for this many pages of each sequence.
    fn reserve(&mut self, needed: usize) {
        if needed <= self.room {
            return;
        }
        let room = needed.max(2 * self.room).max(16);
        let mut table = vec![0; self.batch * room];
        for b in 0..self.batch {
            table[b * room..][..self.room].copy_from_slice(&self.table[b * self.room..][..self.room]);
        }
        (self.table, self.room) = (table, room);
    }

    /// Keeps these sequences, in this order; one may be kept several times, as beam search does. No key is copied.
    ///
    /// # Panics
    /// Where there is no such sequence.
    pub fn select(&mut self, sequences: &[usize]) {
        if sequences.iter().copied().eq(0..self.batch) {
            return;
        }
        assert!(sequences.iter().all(|&b| b < self.batch), "a sequence beyond the {} there are", self.batch);
        let rows = sequences.iter().flat_map(|&b| &self.table[b * self.room..][..self.room]);
        self.table = rows.copied().collect();
        self.batch = sequences.len();
        self.in_order = false;
    }

    /// The keys, `[B, Hk, length, D]`, where they lie.
    pub(crate) fn keys(&self) -> qkv::Result<Source<'_, T>> {
        self.source(0)
    }

    /// The values, `[B, Hk, length, Dv]`, where they lie.
    pub(crate) fn values(&self) -> qkv::Result<Source<'_, T>> {
        self.source(1)
    }

    fn source(&self, x: usize) -> qkv::Result<Source<'_, T>> {
        let (heads, d) = (self.heads, self.widths[x]);
        let view = |[pages, size]: [usize; 2]| {
            View::strided(&self.rows[x], 0, [pages, heads, size, d], head_strides(size, heads, d))
        };
        if self.in_order {
            return Ok(view([1, self.length])?.into());
        }
        Ok(Pages::new(view([self.pages, self.size])?, &self.table, self.batch, self.length)?.into())
    }
}
