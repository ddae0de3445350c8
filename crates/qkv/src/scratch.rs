//! Memory that is used again from call to call, so that the hot path asks the system for none.

use qkv_simd::Real;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Mutex;

/// A pool of buffers. Keep one and pass it to every call: after the first, calls of the same shape find what they need.
///
/// It may be shared between threads; dropping it gives everything back to the system.
pub struct Scratch<A> {
    free: Mutex<Vec<Vec<A>>>,
}

impl<A> Default for Scratch<A> {
    fn default() -> Self {
        Scratch { free: Mutex::new(Vec::new()) }
    }
}

impl<A> fmt::Debug for Scratch<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let held: usize = self.list().iter().map(|buffer| buffer.capacity() * size_of::<A>()).sum();
        write!(f, "Scratch({held} bytes free)")
    }
}

impl<A> Scratch<A> {
    /// An empty pool.
    pub fn new() -> Self {
        Self::default()
    }

    fn list(&self) -> std::sync::MutexGuard<'_, Vec<Vec<A>>> {
        // A panic elsewhere leaves the list as it is: whole vectors, nothing half done.
        self.free.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl<A: Real> Scratch<A> {
    /// A buffer of `len` numbers, whatever they are.
    pub(crate) fn take(&self, len: usize) -> Buffer<'_, A> {
        let mut list = self.list();
        let best = (0..list.len()).filter(|&at| list[at].capacity() >= len).min_by_key(|&at| list[at].capacity());
        let mut data = best.map(|at| list.swap_remove(at)).unwrap_or_default();
        drop(list);
        if data.capacity() < len {
            data = vec![A::ZERO; len];
        }
        data.resize(len, A::ZERO);
        Buffer { data, pool: self }
    }

    /// A buffer of `len` zeros.
    pub(crate) fn zeros(&self, len: usize) -> Buffer<'_, A> {
        let mut buffer = self.take(len);
        buffer.fill(A::ZERO);
        buffer
    }
}

/// A buffer on loan from a [`Scratch`].
pub(crate) struct Buffer<'a, A> {
    data: Vec<A>,
    pool: &'a Scratch<A>,
}

impl<A> Deref for Buffer<'_, A> {
    type Target = [A];
    fn deref(&self) -> &[A] {
        &self.data
    }
}

impl<A> DerefMut for Buffer<'_, A> {
    fn deref_mut(&mut self) -> &mut [A] {
        &mut self.data
    }
}

impl<A> Drop for Buffer<'_, A> {
    fn drop(&mut self) {
        let data = std::mem::take(&mut self.data);
        self.pool.list().push(data);
    }
}
