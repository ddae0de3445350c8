//! Memory that is reused from call to call, so that the hot path allocates none.

use qkv_simd::Real;
use qkv_simd::huge_pages::advise_huge_pages;
use std::fmt;
use std::ops::{Deref, DerefMut, Range};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

/// A pool of buffers. Keep one and pass it to every call: after the first, calls of the same shape find what they need.
///
/// It may be shared between threads; dropping it returns everything to the system.
pub struct Scratch<A> {
    /// Free buffers. Each thread has its own list, so that the workers of a call do not wait for one another, and
    /// searches the other lists if its own has nothing.
    lists: [Mutex<Vec<Vec<A>>>; LISTS],
    /// Bytes in the lists.
    kept: AtomicUsize,
    /// Bytes beyond which a buffer is returned to the system.
    most: usize,
}

/// Lists of free buffers; more threads than that share them.
const LISTS: usize = 32;

thread_local! {
    /// The list of this thread.
    static OWN_LIST: usize = {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        NEXT.fetch_add(1, Ordering::Relaxed) % LISTS
    };
}

/// Bytes that the scratch of the process keeps, for calls that bring none: the buffers of 16 workers, several times.
const MAX_KEPT: usize = 64 << 20;

/// The scratch of the process for f32, and for f64.
pub(crate) static OF_PROCESS: (Scratch<f32>, Scratch<f64>) = (Scratch::keeping(MAX_KEPT), Scratch::keeping(MAX_KEPT));

impl<A> Default for Scratch<A> {
    fn default() -> Self {
        Scratch::keeping(usize::MAX)
    }
}

impl<A> fmt::Debug for Scratch<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Scratch({} bytes free)", self.kept.load(Ordering::Relaxed))
    }
}

impl<A> Scratch<A> {
    /// An empty pool.
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty pool that keeps at most this many bytes.
    ///
    /// ```
    /// static SHARED: qkv::Scratch<f32> = qkv::Scratch::keeping(64 << 20);
    /// ```
    pub const fn keeping(most: usize) -> Self {
        Scratch { lists: [const { Mutex::new(Vec::new()) }; LISTS], kept: AtomicUsize::new(0), most }
    }

    fn list(&self, at: usize) -> MutexGuard<'_, Vec<Vec<A>>> {
        // A panic elsewhere leaves the list as it is: whole vectors, nothing half done.
        self.lists[at].lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The smallest free buffer of a list with room for this many numbers.
    fn take_from(&self, at: usize, room: usize) -> Option<Vec<A>> {
        let mut list = self.list(at);
        let best = (0..list.len()).filter(|&at| list[at].len() >= room).min_by_key(|&at| list[at].len())?;
        Some(list.swap_remove(best))
    }

    /// The list other than `own` with the smallest free buffer that has enough room.
    fn elsewhere(&self, own: usize, room: usize) -> Option<usize> {
        let smallest = |at: usize| self.list(at).iter().map(Vec::len).filter(|&len| len >= room).min();
        let others = (0..LISTS).filter(|&at| at != own);
        others.filter_map(|at| Some((smallest(at)?, at))).min().map(|(_, at)| at)
    }
}

/// Bytes to which buffers are aligned: a cache line, so that no vector and no row of a tile straddles two.
const LINE: usize = 64;

impl<A: Real> Scratch<A> {
    /// A buffer of `len` arbitrary numbers.
    pub(crate) fn take(&self, len: usize) -> Buffer<'_, A> {
        let room = if len == 0 { 0 } else { len + LINE / size_of::<A>() };
        let own = OWN_LIST.with(|&own| own);
        let found = self.take_from(own, room).or_else(|| self.take_from(self.elsewhere(own, room)?, room));
        let mut data = found.unwrap_or_default();
        self.kept.fetch_sub(size_of::<A>() * data.len(), Ordering::Relaxed);
        if data.len() < room {
            data = vec![A::ZERO; room];
            advise_huge_pages(&mut data);
        }
        let start = if len == 0 { 0 } else { data.as_ptr().align_offset(LINE) };
        Buffer { data, used: start..start + len, pool: self }
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
    used: Range<usize>,
    pool: &'a Scratch<A>,
}

impl<A> Deref for Buffer<'_, A> {
    type Target = [A];
    fn deref(&self) -> &[A] {
        &self.data[self.used.clone()]
    }
}

impl<A> DerefMut for Buffer<'_, A> {
    fn deref_mut(&mut self) -> &mut [A] {
        &mut self.data[self.used.clone()]
    }
}

impl<A> Drop for Buffer<'_, A> {
    fn drop(&mut self) {
        let data = std::mem::take(&mut self.data);
        let bytes = size_of::<A>() * data.len();
        if self.pool.kept.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes) <= self.pool.most {
            self.pool.list(OWN_LIST.with(|&own| own)).push(data);
        } else {
            self.pool.kept.fetch_sub(bytes, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_and_used_again() {
        let scratch = Scratch::<f32>::new();
        for len in [0, 1, 7, 1000] {
            let buffer = scratch.take(len);
            assert_eq!(buffer.len(), len);
            assert!(len == 0 || (buffer.as_ptr() as usize).is_multiple_of(LINE));
        }
        let first = scratch.take(1000).as_ptr();
        assert_eq!(scratch.take(1000).as_ptr(), first);
        assert!(scratch.zeros(1000).iter().all(|&x| x == 0.0));
    }

    #[test]
    fn a_thread_finds_what_another_gave_back() {
        let scratch = Scratch::<f32>::new();
        let small = std::thread::scope(|threads| {
            let both = || [5000, 1000].map(|len| scratch.take(len)).map(|buffer| buffer.as_ptr() as usize)[1];
            threads.spawn(both).join().unwrap()
        });
        assert_eq!(scratch.take(900).as_ptr() as usize, small);
        assert_eq!(format!("{scratch:?}"), format!("Scratch({} bytes free)", 4 * (5000 + 1000 + 2 * LINE / 4)));
    }

    #[test]
    fn the_scratch_of_the_process_keeps_no_more_than_its_bound() {
        let scratch = Scratch::<f32>::keeping(5000);
        let buffers = [500, 500, 500].map(|len| scratch.take(len));
        drop(buffers);
        let kept = || (scratch.kept.load(Ordering::Relaxed), (0..LISTS).map(|at| scratch.list(at).len()).sum());
        let two = (2 * size_of::<f32>() * (500 + LINE / size_of::<f32>()), 2);
        assert_eq!(kept(), two);
        drop(scratch.take(10_000));
        assert_eq!(kept(), two);
    }
}
