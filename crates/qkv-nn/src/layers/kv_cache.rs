//! The keys and values of a layer during decoding. Rows are appended and never moved: a table maps each sequence to its
//! rows, so reordering the hypotheses of a beam search permutes row numbers and copies no keys.
//!
//! On a device the rows of a sequence are contiguous, with room for more, and reordering copies them.

use super::half_rows::HalfRows;
use crate::float::Float;
use crate::heads::{Heads, head_strides};
use crate::ops::rotary::Angles;
use crate::tensor::Tensor;
use qkv::{Pages, Source, View};
use qkv_cuda::operations::{Array, CacheEnd, DecodeBatch, Kind, Operations};
use std::borrow::Cow;

/// The cached keys and values of a layer.
#[derive(Clone, Debug)]
pub struct KvCache<T> {
    heads: usize,
    /// Width of a key, and of a value.
    widths: [usize; 2],
    /// Rows of all heads, `[pages, size, Hk·D]`: keys, then values.
    rows: [Vec<T>; 2],
    /// Tokens per page: 1 in a cache that grows, or all tokens of a fixed memory.
    size: usize,
    pages: usize,
    /// The pages of each sequence, `[B, room]`.
    table: Vec<u32>,
    room: usize,
    batch: usize,
    length: usize,
    /// Whether there is a single sequence whose rows are in order.
    in_order: bool,
    /// The rows in f16, if [`keep_half`](KvCache::keep_half) was called; `rows` is then unused.
    half: Option<HalfRows>,
    /// The rows in device memory, if they are computed there; `rows` is then unused.
    device: Option<DeviceRows>,
}

/// Keys and values on a device.
#[derive(Clone, Debug)]
struct DeviceRows {
    operations: Operations,
    /// `[B, room, Hk·D]`: keys, then values.
    arrays: [Array; 2],
    /// Capacity in tokens.
    room: usize,
    /// The sequences, if the device tracks their positions.
    batch: Option<DecodeBatch>,
    /// The number of rows of each sequence, i32, if kept on the device.
    lengths: Option<Array>,
}

/// Initial capacity, in tokens, of a cache on a device.
const FIRST_ROOM: usize = 64;

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
            half: None,
            device: None,
        }
    }

    /// A cache for sequences whose positions are tracked on a device: a new row is written at its sequence's position.
    pub fn counted(operations: &Operations, batch: &DecodeBatch, heads: Heads, widths: [usize; 2]) -> Self {
        let (sequences, room) = (batch.len(), batch.room());
        let zeros = |width| operations.zeros(operations.activation_kind(), sequences * room * width, "a cache");
        let arrays = widths.map(|width| zeros(heads.key * width));
        let device = Some(DeviceRows {
            operations: operations.clone(),
            arrays,
            room,
            batch: Some(batch.clone()),
            lengths: None,
        });
        KvCache { device, ..KvCache::new(sequences, heads, widths) }
    }

    /// Copies the first `tokens` rows of sequence `from` of another cache into sequence `sequence` of this
    /// [counted](KvCache::counted) one.
    ///
    /// # Panics
    /// If this cache is not counted, the other is not on a device or has fewer rows, or there is not enough room.
    pub fn put(&mut self, sequence: usize, other: &KvCache<T>, from: usize, tokens: usize) {
        let (Some(to), Some(rows)) = (&self.device, &other.device) else { panic!("both caches are on a device") };
        assert!(to.batch.is_some() && tokens <= other.length && tokens <= to.room, "a sequence into a counted cache");
        for at in [0, 1] {
            let width = self.heads * self.widths[at];
            let (start, first, len) = (sequence * to.room * width, from * rows.room * width, tokens * width);
            to.operations.copy(&to.arrays[at].slice(start..start + len), &rows.arrays[at].slice(first..first + len));
        }
    }

    /// Number of cached tokens; 0 if positions are tracked on a device.
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

    /// Whether the keys and values of a token have these widths, over all heads.
    pub(crate) fn has_widths(&self, widths: [usize; 2]) -> bool {
        self.widths.map(|width| self.heads * width) == widths
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
    /// If the shapes differ, or the cache is too large.
    pub fn append(&mut self, k: &Tensor<T>, v: &Tensor<T>) -> qkv::Result<()> {
        let new = self.check(k, v)?;
        if let Some(operations) = k.operations().filter(|_| self.pages == 0) {
            self.append_on_device(operations, [k, v], new);
            return Ok(());
        }
        if let Some(half) = &mut self.half {
            if half.append(self.length, [&T::to_floats(k.data()), &T::to_floats(v.data())]) {
                self.length += new;
                return Ok(());
            }
            self.widen();
        }
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

    /// Stores rows in f16 from now on, if the cache is empty, on the host and of one sequence; a number that overflows
    /// f16 switches back to `T`.
    pub fn keep_half(&mut self) {
        if self.batch == 1 && self.length == 0 && self.half.is_none() && self.device.is_none() {
            self.half = Some(HalfRows::new(self.heads, self.widths));
        }
    }

    /// The rows in f16, if that is how they are stored.
    pub(crate) fn half(&self) -> Option<&HalfRows> {
        self.half.as_ref()
    }

    /// Converts rows in f16 back to `T`.
    fn widen(&mut self) {
        if let Some(half) = self.half.take() {
            self.rows = half.widened(self.length).map(T::from_floats);
            self.pages = self.length;
            self.reserve(self.length);
            (0..self.length).for_each(|i| self.table[i] = i as u32);
        }
    }

    /// Appends the keys and values of the next token of each sequence, `[B, 1, Hk·D]`, to a [counted](KvCache::counted)
    /// cache, with keys rotated by the angles of their positions, and returns the queries, rotated likewise. Returns
    /// `None` and does nothing if the cache is not counted.
    ///
    /// # Errors
    /// If the shapes differ.
    pub(crate) fn append_counted(
        &mut self,
        q: &Tensor<T>,
        k: &Tensor<T>,
        v: &Tensor<T>,
        angles: Option<&Angles<T>>,
    ) -> qkv::Result<Option<Tensor<T>>> {
        let Some((operations, end)) = self.counted_end(angles) else { return Ok(None) };
        self.check(k, v)?;
        let mut q = q.clone();
        let new = [&q.array_mut(operations), &k.array(operations), &v.array(operations)].map(Clone::clone);
        operations.append_at(new.each_ref(), end);
        Ok(Some(q))
    }

    /// The slots for the next token of each sequence in a [counted](KvCache::counted) cache.
    pub(crate) fn counted_end<'a>(&'a self, angles: Option<&'a Angles<T>>) -> Option<(&'a Operations, CacheEnd<'a>)> {
        let DeviceRows { operations, arrays, batch: Some(batch), .. } = self.device.as_ref()? else { return None };
        let angles = angles.and_then(Angles::on_device).map(|tables| tables.each_ref());
        Some((operations, CacheEnd { caches: arrays.each_ref(), angles, batch }))
    }

    /// Fills an empty cache with a memory of fixed length. On the host, sequences that [`select`](KvCache::select)
    /// repeats share its rows.
    ///
    /// # Errors
    /// As [`append`](KvCache::append).
    pub fn fill(&mut self, k: &Tensor<T>, v: &Tensor<T>) -> qkv::Result<()> {
        self.length = self.check(k, v)?;
        if let Some(operations) = k.operations() {
            let (operations, arrays) = (operations.clone(), [k.array(operations), v.array(operations)]);
            self.device = Some(DeviceRows { operations, arrays, room: self.length, batch: None, lengths: None });
            return Ok(());
        }
        self.size = self.length.max(1);
        self.pages = self.batch;
        self.rows = [k.data().to_vec(), v.data().to_vec()];
        self.room = 1;
        self.table = (0..self.batch as u32).collect();
        Ok(())
    }

    /// Keeps the lengths of a memory's sequences on its device, so that attention to it copies nothing there. Without
    /// `lengths`, every sequence has the full length.
    pub fn keep_lengths(&mut self, lengths: Option<&[usize]>) {
        let (batch, length) = (self.batch, self.length);
        if let Some(DeviceRows { operations, lengths: kept, .. }) = &mut self.device {
            let of = |b: usize| lengths.map_or(length, |lengths| lengths[b].min(length)) as i32;
            *kept = Some(operations.upload(Kind::U32, &(0..batch).map(of).collect::<Vec<_>>(), "lengths"));
        }
    }

    /// The lengths kept on a device.
    pub(crate) fn kept_lengths(&self) -> Option<&Array> {
        self.device.as_ref()?.lengths.as_ref()
    }

    /// The keys and values of a [counted](KvCache::counted) cache.
    pub(crate) fn counted_rows(&self) -> Option<&[Array; 2]> {
        self.device.as_ref().filter(|rows| rows.batch.is_some()).map(|rows| &rows.arrays)
    }

    /// Copies new rows after those of each sequence.
    fn append_on_device(&mut self, operations: &Operations, new_rows: [&Tensor<T>; 2], new: usize) {
        let widths = self.widths.map(|width| self.heads * width);
        let (batch, needed) = (self.batch, self.length + new);
        let rows = self.device.take().unwrap_or_else(|| DeviceRows {
            operations: operations.clone(),
            arrays: [0, 1].map(|_| operations.activations(0)),
            room: 0,
            batch: None,
            lengths: None,
        });
        let room = if needed <= rows.room { rows.room } else { needed.max(2 * rows.room).max(FIRST_ROOM) };
        let mut at = 0;
        let arrays = rows.arrays.map(|mut array| {
            let (width, fresh) = (widths[at], new_rows[at].array(operations));
            at += 1;
            // Arrays shared with a clone of the cache must not change.
            if room > rows.room || !array.is_unshared() {
                let larger = operations.zeros(operations.activation_kind(), batch * room * width, "a cache");
                let there = [batch, self.length * width];
                let (from, to) = ((&array, rows.room * width, 0), (&larger, room * width, 0));
                operations.copy_columns(from, to, there, false);
                array = larger;
            }
            let to = (&array, room * width, self.length * width);
            operations.copy_columns((&fresh, new * width, 0), to, [batch, new * width], false);
            array
        });
        self.device = Some(DeviceRows { operations: operations.clone(), arrays, room, batch: None, lengths: None });
        self.length = needed;
    }

    /// The sequences, if a device tracks their positions.
    pub(crate) fn decode_batch(&self) -> Option<&DecodeBatch> {
        self.device.as_ref()?.batch.as_ref()
    }

    /// The rows on a device, `[B, room, Hk·D]`, and the capacity `room`.
    pub(crate) fn on_device(&self) -> Option<([Array; 2], usize)> {
        self.device.as_ref().map(|rows| (rows.arrays.clone(), rows.room))
    }

    /// The cache with its rows on the host, as `T`.
    pub(crate) fn on_host(&self) -> Cow<'_, KvCache<T>> {
        if self.half.is_some() {
            let mut widened = self.clone();
            widened.widen();
            return Cow::Owned(widened);
        }
        let Some(DeviceRows { operations, arrays, room, .. }) = &self.device else { return Cow::Borrowed(self) };
        let rows = arrays.each_ref().map(|array| T::from_floats(operations.read(array)));
        let (size, pages) = ((*room).max(1), self.batch);
        let table = (0..self.batch as u32).collect();
        Cow::Owned(KvCache { rows, size, pages, table, room: 1, in_order: false, device: None, ..self.clone() })
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

    /// Keeps these sequences in this order; one may be repeated, as in beam search. On the host, no key is copied
    /// unless the rows are in f16.
    ///
    /// # Panics
    /// If there is no such sequence.
    pub fn select(&mut self, sequences: &[usize]) {
        if sequences.iter().copied().eq(0..self.batch) {
            return;
        }
        assert!(sequences.iter().all(|&b| b < self.batch), "a sequence beyond the {} there are", self.batch);
        self.widen();
        if let Some(DeviceRows { operations, arrays, room, lengths, .. }) = &mut self.device {
            *lengths = None;
            let index: Vec<u32> = sequences.iter().map(|&b| b as u32).collect();
            let index = operations.upload(Kind::U32, &index, "numbers of sequences");
            for (array, width) in arrays.iter_mut().zip(self.widths) {
                let each = *room * self.heads * width;
                let selected = operations.activations(sequences.len() * each);
                operations.gather(array, &index, &selected, each);
                *array = selected;
            }
            self.batch = sequences.len();
            return;
        }
        let rows = sequences.iter().flat_map(|&b| &self.table[b * self.room..][..self.room]);
        self.table = rows.copied().collect();
        self.batch = sequences.len();
        self.in_order = false;
    }

    /// The keys, `[B, Hk, length, D]`, borrowed in place.
    pub(crate) fn keys(&self) -> qkv::Result<Source<'_, T>> {
        self.source(0)
    }

    /// The values, `[B, Hk, length, Dv]`, borrowed in place.
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
