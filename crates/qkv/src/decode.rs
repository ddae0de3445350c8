//! Decoding: the KV cache, and how attention from a few new queries is split among threads.

use crate::error::{Error, Result};
use crate::tensor::checked_len;
use qkv_simd::{Element, View};
use serde::{Deserialize, Serialize};

/// How decoding splits its work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Decode {
    /// Split-K: a long cache is cut into parts of a fixed size for several threads; their results are merged in order.
    #[default]
    Fast,
    /// Bit-identical to the same rows of a full forward pass, for every mask that is defined by positions. (Strided and
    /// fixed patterns reorder the keys depending on the length of the sequence, and agree up to rounding. Dropout,
    /// block bits and BigBird's random blocks depend on the query's index or the number of keys, and differ.)
    Exact,
}

/// Keys and values that grow by a few tokens at a time, `[B, Hk, length, width]`. Capacity
/// doubles when it runs out, so appending takes amortized time linear in the number of new tokens.
#[derive(Clone, Debug)]
pub struct Cache<T> {
    batch: usize,
    heads: usize,
    length: usize,
    room: usize,
    widths: [usize; 2],
    stores: [Vec<T>; 2],
}

impl<T: Element> Cache<T> {
    /// An empty cache for `batch` sequences of `heads` key heads, with keys of `d` and values of `dv`.
    pub fn new(batch: usize, heads: usize, d: usize, dv: usize) -> Self {
        Cache { batch, heads, length: 0, room: 0, widths: [d, dv], stores: [Vec::new(), Vec::new()] }
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
    pub fn append<'a>(&mut self, k: impl Into<View<'a, T>>, v: impl Into<View<'a, T>>) -> Result<()> {
        let given = [k.into(), v.into()];
        let new = given[0].shape()[2];
        for (x, name) in ["k", "v"].into_iter().enumerate() {
            let expected = [self.batch, self.heads, new, self.widths[x]];
            if given[x].shape() != expected {
                return Err(Error::shape(name, &given[x].shape(), format!("{expected:?}, to be appended")));
            }
        }
        self.reserve(new)?;
        for (x, view) in given.into_iter().enumerate() {
            let width = self.widths[x];
            for b in 0..self.batch {
                for h in 0..self.heads {
                    for i in 0..new {
                        let at = ((b * self.heads + h) * self.room + self.length + i) * width;
                        for (c, to) in self.stores[x][at..at + width].iter_mut().enumerate() {
                            *to = view.at(b, h, i, c);
                        }
                    }
                }
            }
        }
        self.length += new;
        Ok(())
    }

    /// Reserves capacity for `new` more tokens.
    pub fn reserve(&mut self, new: usize) -> Result<()> {
        let too_large = || Error::TooLarge { tensor: "cache", shape: vec![self.batch, self.heads, self.length, new] };
        let needed = self.length.checked_add(new).ok_or_else(too_large)?;
        if needed <= self.room {
            return Ok(());
        }
        let room = needed.max(self.room * 2).max(16);
        for (x, store) in self.stores.iter_mut().enumerate() {
            let width = self.widths[x];
            let len = checked_len::<T>("cache", &[self.batch, self.heads, room, width])?;
            let mut grown = vec![T::default(); len];
            for head in 0..self.batch * self.heads {
                let kept = self.length * width;
                grown[head * room * width..][..kept].copy_from_slice(&store[head * self.room * width..][..kept]);
            }
            *store = grown;
        }
        self.room = room;
        Ok(())
    }

    /// Keeps these sequences, in this order; one may be kept several times, as the beams of a search do.
    ///
    /// ```
    /// # use qkv::*;
    /// let mut cache = Cache::<f32>::new(2, 1, 1, 1);
    /// cache.append(&Tensor::new(vec![1.0, 2.0], [2, 1, 1, 1])?, &Tensor::new(vec![3.0, 4.0], [2, 1, 1, 1])?)?;
    /// cache.select(&[1, 1, 0]);
    /// assert_eq!(cache.keys().shape(), [3, 1, 1, 1]);
    /// assert_eq!(cache.keys().at(1, 0, 0, 0), 2.0);
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Panics
    /// If there is no such sequence.
    pub fn select(&mut self, sequences: &[usize]) {
        assert!(sequences.iter().all(|&b| b < self.batch), "a sequence beyond the {} there are", self.batch);
        if sequences.iter().copied().eq(0..self.batch) {
            return;
        }
        for (x, store) in self.stores.iter_mut().enumerate() {
            let (head, kept) = (self.room * self.widths[x], self.length * self.widths[x]);
            let mut chosen = vec![T::default(); sequences.len() * self.heads * head];
            for (to, &from) in sequences.iter().enumerate() {
                for h in 0..self.heads {
                    let (to, from) = ((to * self.heads + h) * head, (from * self.heads + h) * head);
                    chosen[to..to + kept].copy_from_slice(&store[from..from + kept]);
                }
            }
            *store = chosen;
        }
        self.batch = sequences.len();
    }

    /// Truncates to the first `length` tokens.
    pub fn truncate(&mut self, length: usize) {
        self.length = self.length.min(length);
    }

    /// The keys, `[B, Hk, length, D]`.
    pub fn keys(&self) -> View<'_, T> {
        self.view(0)
    }

    /// The values, `[B, Hk, length, Dv]`.
    pub fn values(&self) -> View<'_, T> {
        self.view(1)
    }

    fn view(&self, x: usize) -> View<'_, T> {
        let shape = [self.batch, self.heads, self.room, self.widths[x]];
        View::new(&self.stores[x], shape).expect("the store has its room").truncate(self.length)
    }
}
