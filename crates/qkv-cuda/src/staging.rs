//! Page-locked host memory that stages copies between host and device: the device reads and writes it while the host
//! continues. Copies of ordinary memory may wait for all work on the stream, and the driver copies them once more.

use std::ptr::NonNull;

/// Bytes of staging memory, used in two halves.
pub(crate) const STAGING_BYTES: usize = 8 << 20;
/// Bytes of a half, the largest copy.
pub(crate) const HALF: usize = STAGING_BYTES / 2;

/// The staging memory, and where the next copy goes.
#[derive(Debug)]
pub(crate) struct Staging {
    memory: NonNull<u8>,
    next: usize,
}

// SAFETY: this value owns the memory exclusively.
unsafe impl Send for Staging {}

/// Staged bytes that wait to be copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Staged {
    /// The address of the bytes.
    pub ptr: *const u8,
    /// The half it is in.
    pub half: usize,
}

impl Staging {
    /// Over page-locked memory of [`STAGING_BYTES`], which lives as long as the process.
    pub fn new(memory: NonNull<u8>) -> Staging {
        Staging { memory, next: 0 }
    }

    /// The address of a half.
    pub fn half(&self, half: usize) -> *mut u8 {
        assert!(half < 2, "there are two halves");
        // SAFETY: the memory has two halves.
        unsafe { self.memory.as_ptr().add(half * HALF) }
    }

    /// Stages at most [`HALF`] bytes. `wait(half)` is called before a half is reused.
    ///
    /// # Panics
    /// If there are more.
    pub fn put<E>(&mut self, bytes: &[u8], wait: impl FnOnce(usize) -> Result<(), E>) -> Result<Staged, E> {
        assert!(bytes.len() <= HALF, "more bytes than a half has");
        let (half, within) = (self.next / HALF, self.next % HALF);
        let (half, start) = if within + bytes.len() > HALF { ((half + 1) % 2, 0) } else { (half, within) };
        if start == 0 {
            wait(half)?;
        }
        let at = half * HALF + start;
        // SAFETY: `at + len` is within the half.
        let to = unsafe { self.memory.as_ptr().add(at) };
        // SAFETY: the memory is ours, and its previous contents have been copied.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        let end = (start + bytes.len()).next_multiple_of(64);
        self.next = if end >= HALF { (half + 1) % 2 * HALF } else { half * HALF + end };
        Ok(Staged { ptr: to, half })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_half_is_entered_again_only_after_waiting() {
        let mut memory = vec![0u8; STAGING_BYTES];
        let mut staging = Staging::new(NonNull::new(memory.as_mut_ptr()).unwrap());
        let (bytes, mut waits) = (vec![7u8; HALF / 3], Vec::new());
        let mut places = Vec::new();
        for _ in 0..9 {
            let wait = |half| {
                waits.push(half);
                Ok::<_, ()>(())
            };
            let staged = staging.put(&bytes, wait).unwrap();
            places.push(staged.ptr as usize);
        }
        // Three fit a half, rounded up to two.
        assert!(waits.len() >= 4 && waits.windows(2).all(|pair| pair[0] != pair[1]), "{waits:?}");
        for pair in places.windows(2) {
            assert!(pair[0].abs_diff(pair[1]) >= bytes.len());
        }
    }
}
