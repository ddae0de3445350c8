//! A pool of buffers: the memory of a dropped tensor is reused for the next one of about its size.

use crate::float::Float;
use qkv_simd::huge_pages::advise_huge_pages;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A pool's free buffers and counters, in elements of `T`.
struct PoolState<T> {
    /// Free buffers by length.
    free: BTreeMap<usize, Vec<Vec<T>>>,
    /// Elements of the free buffers.
    free_len: usize,
    used: usize,
    /// The largest `used` so far.
    peak: usize,
}

/// A pool of buffers, shared by its clones. Because batches of many shapes would each leave buffers behind, the pool's
/// total size is limited to the peak use plus a quarter.
#[derive(Clone)]
pub struct Pool<T> {
    state: Arc<Mutex<PoolState<T>>>,
}

impl<T> Default for Pool<T> {
    fn default() -> Self {
        Pool { state: Arc::new(Mutex::new(PoolState { free: BTreeMap::new(), free_len: 0, used: 0, peak: 0 })) }
    }
}

/// The total size is limited to the peak use plus one `SPARE`th of it.
const SPARE: usize = 4;

impl<T> fmt::Debug for Pool<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pool({} bytes free)", self.state().free_len * size_of::<T>())
    }
}

impl<T> Pool<T> {
    /// An empty pool.
    pub fn new() -> Self {
        Self::default()
    }

    fn state(&self) -> MutexGuard<'_, PoolState<T>> {
        // A panic elsewhere cannot leave the lists half updated.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a buffer that was taken or adopted.
    pub(crate) fn give(&self, buffer: Vec<T>) {
        let mut state = self.state();
        state.used -= buffer.len();
        state.free_len += buffer.len();
        if !buffer.is_empty() {
            state.free.entry(buffer.len()).or_default().push(buffer);
        }
    }

    /// Counts a buffer that was allocated elsewhere and will be given to the pool.
    pub(crate) fn adopt(&self, len: usize) {
        let mut state = self.state();
        state.used += len;
        state.peak = state.peak.max(state.used);
    }
}

impl<T> PoolState<T> {
    /// Takes a free buffer whose length is in this range.
    fn take(&mut self, lengths: RangeInclusive<usize>) -> Option<Vec<T>> {
        let (&len, buffers) = self.free.range_mut(lengths).next()?;
        let buffer = buffers.pop().expect("no empty list is kept");
        if buffers.is_empty() {
            self.free.remove(&len);
        }
        self.free_len -= len;
        Some(buffer)
    }
}

/// `len` rounded up to one of eight sizes per power of two, so that batches of slightly different shapes share their
/// memory.
fn class(len: usize) -> usize {
    let step = (len.next_power_of_two() / 16).max(64);
    len.div_ceil(step) * step
}

impl<T: Float> Pool<T> {
    /// Takes a buffer of at least `len` elements with arbitrary values.
    pub(crate) fn take(&self, len: usize) -> Vec<T> {
        let len = class(len);
        let mut state = self.state();
        // A slightly larger buffer will do; a much larger one is left to larger tensors.
        let found = state.take(len..=len + len / 4);
        state.used += found.as_ref().map_or(len, Vec::len);
        state.peak = state.peak.max(state.used);
        if let Some(buffer) = found {
            return buffer;
        }
        // Before allocating more, free buffers of shapes that may not occur again.
        let mut freed = Vec::new();
        while state.used + state.free_len > state.peak + state.peak / SPARE {
            let Some(largest) = state.free.keys().next_back().copied() else { break };
            freed.extend(state.take(largest..=largest));
        }
        drop(state);
        drop(freed);
        let mut data = vec![T::ZERO; len];
        advise_huge_pages(&mut data);
        data
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_returned_buffer_is_reused() {
        let pool = Pool::<f32>::new();
        let first = pool.take(1000);
        let at = first.as_ptr();
        pool.give(first);
        let (small, large) = (pool.take(10), pool.take(990));
        assert_ne!(small.as_ptr(), at, "far too large for ten elements");
        assert_eq!(large.as_ptr(), at);
    }

    #[test]
    fn free_buffers_are_limited_by_the_peak_use() {
        let pool = Pool::<f32>::new();
        for len in (1..60).map(|x| 1000 * x) {
            let both = [pool.take(len), pool.take(len / 2)];
            both.into_iter().for_each(|buffer| pool.give(buffer));
            let state = pool.state();
            assert_eq!(state.used, 0);
            assert!(state.free_len <= state.peak + state.peak / SPARE, "{} of {}", state.free_len, state.peak);
        }
    }

    #[test]
    fn sizes_waste_at_most_an_eighth() {
        for len in (1000..100_000).step_by(77) {
            assert!(class(len) >= len && class(len) <= len + len / 8 + 64, "{len}");
        }
    }
}
