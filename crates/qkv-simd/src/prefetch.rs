//! Software prefetching: single cache lines, and the start of the next page in a sequential read.
//!
//! Hardware prefetchers follow a sequential read, but not across a 4 KiB page boundary: at the start of each page they
//! miss a few lines before they see the pattern again. Prefetching the first lines of the next page hides those misses.

/// The page size that bounds hardware prefetching.
const PAGE: usize = 4096;

/// The size of a cache line, and the number of lines to prefetch.
const LINE: usize = 64;
const LINES: usize = 4;

/// Called as `count` elements of a sequential read are loaded: if they start a page, prefetches the first lines of the
/// next one. Nothing is read, so there need not be a next page.
#[inline(always)]
pub(crate) fn prefetch_next_page<T>(from: *const T, count: usize) {
    let at = from as usize;
    if at % PAGE < count * size_of::<T>() {
        let next = at - at % PAGE + PAGE;
        (0..LINES).for_each(|line| prefetch((next + line * LINE) as *const u8));
    }
}

/// Prefetches the cache line of an address, which need not be readable.
#[inline(always)]
pub(crate) fn prefetch<T>(from: *const T) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a prefetch reads nothing and cannot fault, and every x86-64 has it.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(from.cast());
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = from;
}

/// Prefetches into the second-level cache, no closer.
#[inline(always)]
pub(crate) fn prefetch_second<T>(from: *const T) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: as in `prefetch`.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(from.cast());
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = from;
}
