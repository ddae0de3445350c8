//! Memory that was freed and that the allocator keeps.
//!
//! A model that is read leaves holes: each tensor as it was in the file, and matrices that were widened before they
//! were rounded to fewer bits. glibc keeps them for later allocations, which may not fit, so that a process can hold
//! hundreds of megabytes that it does not use. Other allocators give large blocks back by themselves.

/// Gives free memory back to the operating system. It takes milliseconds: call it after a model is read, not in a loop.
///
/// ```
/// let read = vec![1.0f32; 1 << 20];
/// drop(read);
/// qkv_simd::free_memory::give_back();
/// ```
pub fn give_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu", not(miri)))]
    // SAFETY: the allocator may be asked at any time, on any thread; memory in use does not change.
    unsafe {
        libc::malloc_trim(0);
    }
}
