//! A counting allocator: the bytes that a process holds, and their peak. Memory claims are tested and reported with it.
//!
//! ```
//! use qkv_simd::counting::Counting;
//! #[global_allocator]
//! static ALLOCATOR: Counting = Counting::new();
//!
//! let before = ALLOCATOR.held();
//! ALLOCATOR.forget_peak();
//! drop(vec![0u8; 1_000_000]);
//! assert!(ALLOCATOR.peak() - before >= 1_000_000);
//! ```

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The system allocator, with counters.
#[derive(Debug)]
pub struct Counting {
    held: AtomicUsize,
    peak: AtomicUsize,
}

impl Counting {
    /// Nothing counted yet.
    #[allow(clippy::new_without_default)] // it is only ever a static
    pub const fn new() -> Self {
        Counting { held: AtomicUsize::new(0), peak: AtomicUsize::new(0) }
    }

    /// Bytes held now.
    pub fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    /// The peak since the start, or since [`forget_peak`](Counting::forget_peak).
    pub fn peak(&self) -> usize {
        self.peak.load(Ordering::Relaxed)
    }

    /// Resets the peak to the bytes held now.
    pub fn forget_peak(&self) {
        self.peak.store(self.held(), Ordering::Relaxed);
    }

    /// Runs `f` and returns its result and the peak of bytes held in the meantime, less those held before and those
    /// that the result holds. Other threads are counted too.
    pub fn beyond<R>(&self, f: impl FnOnce() -> R) -> (R, usize) {
        let before = self.held();
        self.forget_peak();
        let result = f();
        let returned = self.held().saturating_sub(before);
        (result, self.peak().saturating_sub(before + returned))
    }

    fn grown(&self, by: usize) {
        let held = self.held.fetch_add(by, Ordering::Relaxed) + by;
        self.peak.fetch_max(held, Ordering::Relaxed);
    }
}

// SAFETY: every call is forwarded to the system allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.grown(layout.size());
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        self.grown(layout.size());
        // SAFETY: the caller keeps the contract of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        self.held.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(at, layout) }
    }
}
