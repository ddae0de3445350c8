//! Freed memory that the allocator keeps.
//!
//! Loading a model leaves holes: each tensor as it was in the file, and matrices that were widened before they were
//! rounded to fewer bits. glibc keeps them for later allocations, which may not fit, so a process can hold hundreds of
//! megabytes that it does not use. Other allocators return large blocks by themselves.

/// Returns free memory to the operating system. This takes milliseconds: call it after loading a model, not in a loop.
///
/// ```
/// let read = vec![1.0f32; 1 << 20];
/// drop(read);
/// qkv_simd::free_memory::give_back();
/// ```
pub fn give_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu", not(miri)))]
    // SAFETY: `malloc_trim` may be called at any time, on any thread; memory in use does not change.
    unsafe {
        libc::malloc_trim(0);
    }
}
