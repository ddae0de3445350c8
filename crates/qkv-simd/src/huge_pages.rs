//! Large pages for large memory.
//!
//! The system hands out memory when it is first touched, 4 KiB at a time, each cleared and each an interruption. A call that
//! writes some megabytes of results can spend a quarter of its time there. With pages of 2 MiB there are 512 times fewer
//! interruptions, and the processor has as many fewer addresses to translate. Where the system decides by itself, or has no
//! such pages, asking changes nothing.

/// A large page. Those of other sizes are multiples of it or are not asked for.
const PAGE: usize = 2 << 20;

/// Asks for large pages under the memory of a vector: best before it is touched. What it holds stays what it is. A page at either
/// end is asked for if at least half of it is the vector's: of vectors that lie one after the other, none is left out.
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

#[cfg(target_os = "linux")]
fn advise(start: usize, bytes: usize) {
    use std::ffi::{c_int, c_void};
    unsafe extern "C" {
        fn madvise(start: *mut c_void, bytes: usize, advice: c_int) -> c_int;
    }
    const HUGE: c_int = 14;
    // SAFETY: this advice changes nothing that can be read, in memory of ours or of others. Whether it is taken is of no concern.
    unsafe { madvise(start as *mut c_void, bytes, HUGE) };
}

#[cfg(not(target_os = "linux"))]
fn advise(_: usize, _: usize) {}
