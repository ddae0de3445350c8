//! What is read next, asked for before: a line, or the next page while this one is read.
//!
//! A processor that sees memory read in order fetches what comes next by itself, but not beyond a page of 4 KiB: at the beginning of
//! each it waits for a few lines from far away before it sees the order again. Asked for its first lines while the page before is
//! read, it has begun by then.

/// What the processor fetches ahead within.
const PAGE: usize = 4096;

/// A line of the cache, and how many of them are asked for.
const LINE: usize = 64;
const LINES: usize = 4;

/// Says that so many numbers from here on are read now, as part of more that is read in order. Where they begin a page, the first lines
/// of the next are asked for. That reads nothing: there need not be anything.
#[inline(always)]
pub(crate) fn prefetch_next_page<T>(from: *const T, count: usize) {
    let at = from as usize;
    if at % PAGE < count * size_of::<T>() {
        let next = at - at % PAGE + PAGE;
        (0..LINES).for_each(|line| prefetch((next + line * LINE) as *const u8));
    }
}

/// Asks for the line of an address, which need not be one that can be read.
#[inline(always)]
pub(crate) fn prefetch<T>(from: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: fetching reads nothing, faults nowhere, and is in every x86-64.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(from.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = from;
}
