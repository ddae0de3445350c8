//! Huge pages for large buffers.
//!
//! The operating system maps memory on first touch, one 4 KiB page at a time, each cleared and each a page fault. A
//! call that writes some megabytes of results can spend a quarter of its time there. Pages of 2 MiB fault 512 times
//! less often and need 512 times fewer TLB entries. On systems without them, or that decide by themselves, the advice
//! has no effect.

/// The size of a huge page.
const PAGE: usize = 2 << 20;

/// Advises the operating system to back a vector's capacity with huge pages; best called before the memory is touched.
/// The contents do not change. A page at either end is included if at least half of it belongs to the vector, so that
/// neighboring vectors cover all pages between them.
///
/// ```
/// let mut zeros = vec![0.0f32; 3 << 20];
/// qkv_simd::huge_pages::advise_huge_pages(&mut zeros);
/// assert!(zeros.iter().all(|&x| x == 0.0));
/// ```
pub fn advise_huge_pages<T>(memory: &mut Vec<T>) {
    let nearest = |address: usize| (address + PAGE / 2) / PAGE * PAGE;
    let first = memory.as_mut_ptr() as usize;
    let (start, end) = (nearest(first), nearest(first + memory.capacity() * size_of::<T>()));
    if start < end {
        advise(start, end - start);
    }
}

#[cfg(all(target_os = "linux", not(miri)))]
fn advise(start: usize, bytes: usize) {
    // SAFETY: this advice changes no contents, of this memory or any other. The result does not matter: it is only
    // advice.
    unsafe { libc::madvise(start as *mut libc::c_void, bytes, libc::MADV_HUGEPAGE) };
}

#[cfg(not(all(target_os = "linux", not(miri))))]
fn advise(_: usize, _: usize) {}
