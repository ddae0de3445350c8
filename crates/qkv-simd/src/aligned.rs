//! Buffers aligned to cache lines. Tiles and vectors that straddle two lines load at half the speed, and the system
//! allocator starts large blocks sixteen bytes into a page.

use crate::huge_pages::advise_huge_pages;
use crate::kept_memory;
use std::fmt;
use std::ops::{Deref, DerefMut};

/// Bytes of a cache line.
const LINE: usize = 64;

/// Size in bytes from which huge pages are worth requesting.
const LARGE: usize = 2 << 20;

/// A buffer whose first element starts a cache line.
pub(crate) struct Aligned<T> {
    memory: Vec<T>,
    start: usize,
    len: usize,
}

impl<T: Copy> Aligned<T> {
    /// `len` copies of `value`.
    pub fn new(len: usize, value: T) -> Self {
        let mut memory = vec![value; len + LINE / size_of::<T>()];
        if size_of_val(&memory[..]) >= LARGE {
            advise_huge_pages(&mut memory);
        }
        Aligned::within(memory, len)
    }

    /// The same in memory that was [kept](Aligned::keep), if there is any.
    pub fn reused(len: usize, value: T) -> Self {
        let mut memory = kept_memory::take(len + LINE / size_of::<T>()).unwrap_or_default();
        memory.resize(len + LINE / size_of::<T>(), value);
        Aligned::within(memory, len)
    }

    /// Keeps the memory for later buffers.
    pub fn keep(self) {
        kept_memory::keep(self.memory);
    }

    fn within(memory: Vec<T>, len: usize) -> Self {
        let start = memory.as_ptr().align_offset(LINE).min(LINE / size_of::<T>());
        Aligned { memory, start, len }
    }
}

impl<T> Deref for Aligned<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.memory[self.start..][..self.len]
    }
}

impl<T> DerefMut for Aligned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.memory[self.start..][..self.len]
    }
}

impl<T: Copy + Default> Clone for Aligned<T> {
    fn clone(&self) -> Self {
        let mut copy = Aligned::new(self.len, T::default());
        copy.copy_from_slice(self);
        copy
    }
}

impl<T> Default for Aligned<T> {
    fn default() -> Self {
        Aligned { memory: Vec::new(), start: 0, len: 0 }
    }
}

impl<T: PartialEq> PartialEq for Aligned<T> {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl<T: fmt::Debug> fmt::Debug for Aligned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.deref().fmt(f)
    }
}
