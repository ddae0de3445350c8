//! Keeps the memory of dropped large vectors for later vectors of about the same size.
//!
//! An allocator returns large blocks to the operating system, which clears their pages and maps them again one by one
//! at the next call: for results of some megabytes that takes as long as a few threads need to compute them.

use std::alloc::Layout;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Bytes from which memory is kept: allocators keep smaller blocks by themselves.
const LEAST: usize = 64 << 10;

/// Bytes that are kept in total.
const MOST: usize = 64 << 20;

/// A block that no vector owns.
struct Block {
    data: *mut u8,
    layout: Layout,
}

// SAFETY: nothing else has the pointer.
unsafe impl Send for Block {}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: a vector allocated the block with this layout and gave up its ownership.
        unsafe { std::alloc::dealloc(self.data, self.layout) }
    }
}

/// The blocks, oldest first.
static KEPT: Mutex<VecDeque<Block>> = Mutex::new(VecDeque::new());

fn kept() -> MutexGuard<'static, VecDeque<Block>> {
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Drops the elements of a vector and, unless it is too small or too large, keeps its memory for [`take`].
///
/// ```
/// use qkv_simd::kept_memory::{keep, take};
/// let large = vec![1.0f32; 1 << 20];
/// let address = large.as_ptr();
/// keep(large);
/// let again: Vec<f32> = take(1 << 20).unwrap();
/// assert!(again.is_empty() && again.capacity() >= 1 << 20 && again.as_ptr() == address);
/// ```
pub fn keep<T>(mut vector: Vec<T>) {
    vector.clear();
    let Ok(layout) = Layout::array::<T>(vector.capacity()) else { return };
    if (LEAST..=MOST).contains(&layout.size()) {
        let data = std::mem::ManuallyDrop::new(vector).as_mut_ptr().cast();
        let mut kept = kept();
        kept.push_back(Block { data, layout });
        while kept.iter().map(|block| block.layout.size()).sum::<usize>() > MOST {
            drop(kept.pop_front());
        }
    }
}

/// An empty vector with capacity for `len` elements and at most an eighth more, if such memory was kept.
pub fn take<T>(len: usize) -> Option<Vec<T>> {
    let least = Layout::array::<T>(len).ok()?;
    if least.size() < LEAST {
        return None;
    }
    let fits = |block: &Block| {
        let size = block.layout.size();
        block.layout.align() == least.align()
            && size.is_multiple_of(size_of::<T>())
            && (least.size()..=least.size() + least.size() / 8).contains(&size)
    };
    // The newest is the likeliest to be in a cache.
    let mut kept = kept();
    let at = kept.iter().rposition(fits)?;
    let block = std::mem::ManuallyDrop::new(kept.remove(at)?);
    let capacity = block.layout.size() / size_of::<T>();
    // SAFETY: the block is owned, was allocated by a vector with the alignment of `T`, and holds `capacity` elements
    // exactly.
    Some(unsafe { Vec::from_raw_parts(block.data.cast(), 0, capacity) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_goes_to_vectors_of_its_alignment_and_about_its_size() {
        let mine: Vec<u64> = Vec::with_capacity(100_003);
        let (address, bytes) = (mine.as_ptr() as usize, 8 * mine.capacity());
        keep(mine);
        let others = [take::<u64>(50_000), take::<u64>(110_000)];
        assert!(others.iter().flatten().all(|other| other.as_ptr() as usize != address));
        assert!(take::<u32>(2 * 100_003).is_none_or(|other| other.as_ptr() as usize != address));
        let found: Vec<f64> = take(95_000).expect("kept a moment ago");
        assert!(found.is_empty() && found.as_ptr() as usize == address && 8 * found.capacity() == bytes);
    }

    #[test]
    fn small_vectors_and_strings_are_freed() {
        keep(vec![1u16; 10]);
        assert!(take::<u16>(10).is_none());
        let strings: Vec<String> = (0..10_000).map(|x| x.to_string()).collect();
        keep(strings);
        let room: Vec<String> = take(10_000).expect("its memory, without its strings");
        assert!(room.is_empty());
    }
}
