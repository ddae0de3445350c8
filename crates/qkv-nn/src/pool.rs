//! Memory that is used again: a tensor that nobody holds any more gives its numbers back, and the next one of about that
//! size takes them.

use crate::float::Float;
use qkv_simd::huge_pages::advise_huge_pages;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What a pool holds, in numbers of `T`.
struct Held<T> {
    /// Buffers that wait, by their length.
    free: BTreeMap<usize, Vec<Vec<T>>>,
    waiting: usize,
    used: usize,
    /// The most that was ever used at a time.
    most: usize,
}

/// A pool of buffers, shared by all that is made from it. Batches of many shapes would each leave buffers of their own behind, so
/// what it holds stays within a quarter of the most that was in use at a time.
#[derive(Clone)]
pub struct Pool<T> {
    held: Arc<Mutex<Held<T>>>,
}

impl<T> Default for Pool<T> {
    fn default() -> Self {
        Pool { held: Arc::new(Mutex::new(Held { free: BTreeMap::new(), waiting: 0, used: 0, most: 0 })) }
    }
}

/// A pool holds at most the most that was in use, and one part in so many more.
const SPARE: usize = 4;

impl<T> fmt::Debug for Pool<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pool({} bytes free)", self.held().waiting * size_of::<T>())
    }
}

impl<T> Pool<T> {
    /// An empty pool.
    pub fn new() -> Self {
        Self::default()
    }

    fn held(&self) -> MutexGuard<'_, Held<T>> {
        // A panic elsewhere leaves whole vectors, nothing half done.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes back what was taken or adopted.
    pub(crate) fn give(&self, buffer: Vec<T>) {
        let mut held = self.held();
        held.used -= buffer.len();
        held.waiting += buffer.len();
        if !buffer.is_empty() {
            held.free.entry(buffer.len()).or_default().push(buffer);
        }
    }

    /// Counts numbers that come from elsewhere and will be given.
    pub(crate) fn adopt(&self, len: usize) {
        let mut held = self.held();
        held.used += len;
        held.most = held.most.max(held.used);
    }
}

impl<T> Held<T> {
    /// A buffer that waits, of a length within these.
    fn take(&mut self, lengths: RangeInclusive<usize>) -> Option<Vec<T>> {
        let (&len, buffers) = self.free.range_mut(lengths).next()?;
        let buffer = buffers.pop().expect("no empty list is kept");
        if buffers.is_empty() {
            self.free.remove(&len);
        }
        self.waiting -= len;
        Some(buffer)
    }
}

/// `len` rounded up to one of eight sizes between two powers of two, so that batches of slightly different shapes share
/// their memory.
fn class(len: usize) -> usize {
    let step = (len.next_power_of_two() / 16).max(64);
    len.div_ceil(step) * step
}

impl<T: Float> Pool<T> {
    /// At least `len` numbers, whatever they are.
    pub(crate) fn take(&self, len: usize) -> Vec<T> {
        let len = class(len);
        let mut held = self.held();
        // A little more than needed will do; much more would be missed elsewhere.
        let found = held.take(len..=len + len / 4);
        held.used += found.as_ref().map_or(len, Vec::len);
        held.most = held.most.max(held.used);
        if let Some(buffer) = found {
            return buffer;
        }
        // Before the system is asked for more, it gets back what waits for shapes that may not come again.
        let mut gone = Vec::new();
        while held.used + held.waiting > held.most + held.most / SPARE {
            let Some(largest) = held.free.keys().next_back().copied() else { break };
            gone.extend(held.take(largest..=largest));
        }
        drop(held);
        drop(gone);
        let mut data = vec![T::ZERO; len];
        advise_huge_pages(&mut data);
        data
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_given_is_taken_again() {
        let pool = Pool::<f32>::new();
        let first = pool.take(1000);
        let at = first.as_ptr();
        pool.give(first);
        let (small, large) = (pool.take(10), pool.take(990));
        assert_ne!(small.as_ptr(), at, "far too large for ten numbers");
        assert_eq!(large.as_ptr(), at);
    }

    #[test]
    fn what_waits_stays_within_a_part_of_what_was_used() {
        let pool = Pool::<f32>::new();
        for len in (1..60).map(|x| 1000 * x) {
            let both = [pool.take(len), pool.take(len / 2)];
            both.into_iter().for_each(|buffer| pool.give(buffer));
            let held = pool.held();
            assert_eq!(held.used, 0);
            assert!(held.waiting <= held.most + held.most / SPARE, "{} of {}", held.waiting, held.most);
        }
    }

    #[test]
    fn sizes_waste_at_most_an_eighth() {
        for len in (1000..100_000).step_by(77) {
            assert!(class(len) >= len && class(len) <= len + len / 8 + 64, "{len}");
        }
    }
}
