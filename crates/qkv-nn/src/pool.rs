//! Memory that is used again: a tensor that nobody holds any more gives its numbers back, and the next one of about that
//! size takes them.

use crate::float::Float;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

type Free<T> = BTreeMap<usize, Vec<Vec<T>>>;

/// A pool of buffers, shared by all that is made from it.
#[derive(Clone)]
pub struct Pool<T> {
    free: Arc<Mutex<Free<T>>>,
}

impl<T> Default for Pool<T> {
    fn default() -> Self {
        Pool { free: Arc::default() }
    }
}

impl<T> fmt::Debug for Pool<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let held: usize = self.list().iter().map(|(len, buffers)| len * buffers.len() * size_of::<T>()).sum();
        write!(f, "Pool({held} bytes free)")
    }
}

impl<T> Pool<T> {
    /// An empty pool.
    pub fn new() -> Self {
        Self::default()
    }

    fn list(&self) -> MutexGuard<'_, Free<T>> {
        // A panic elsewhere leaves whole vectors, nothing half done.
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn give(&self, buffer: Vec<T>) {
        if !buffer.is_empty() {
            self.list().entry(buffer.len()).or_default().push(buffer);
        }
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
        let mut list = self.list();
        // A little more than needed will do; much more would be missed elsewhere.
        if let Some((&found, buffers)) = list.range_mut(len..=len + len / 4).next() {
            let buffer = buffers.pop().expect("no empty list is kept");
            if buffers.is_empty() {
                list.remove(&found);
            }
            return buffer;
        }
        drop(list);
        vec![T::ZERO; len]
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
    fn sizes_waste_at_most_an_eighth() {
        for len in (1000..100_000).step_by(77) {
            assert!(class(len) >= len && class(len) <= len + len / 8 + 64, "{len}");
        }
    }
}
