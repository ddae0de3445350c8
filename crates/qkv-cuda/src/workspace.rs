//! Device memory that a pass needs beside its tensors: how it is laid out, so that it can be asked for before and handed
//! out after.

use crate::error::{Error, Result};

/// Hands out parts of one stretch of memory, each at a multiple of 256 bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    start: u64,
    used: u64,
}

impl Layout {
    /// Memory from `start` on; 0 to find out how much is needed.
    pub fn new(start: u64) -> Layout {
        Layout { start, used: 0 }
    }

    /// So many numbers of so many bytes.
    pub fn take(&mut self, count: usize, size: usize) -> u64 {
        let at = self.start + self.used;
        self.used = (self.used + count as u64 * size as u64).next_multiple_of(256);
        at
    }

    /// Bytes so far.
    pub fn bytes(&self) -> usize {
        self.used as usize
    }
}

/// Device memory of the caller's for a pass. Its content is lost; it must not be used by two passes at once.
#[derive(Clone, Copy, Debug)]
pub struct Workspace {
    /// Where it begins: a multiple of 256.
    pub at: u64,
    /// Its size.
    pub bytes: usize,
}

impl Workspace {
    /// Checks that it will do.
    pub(crate) fn check(&self, needed: usize) -> Result<()> {
        if self.bytes < needed {
            return Err(Error::memory("workspace", format!("has {} bytes, and {needed} are needed", self.bytes)));
        }
        if needed > 0 && !self.at.is_multiple_of(256) {
            return Err(Error::memory("workspace", "does not begin at a multiple of 256 bytes"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_do_not_overlap_and_begin_where_copies_can() {
        let mut layout = Layout::new(512);
        let (a, b) = (layout.take(3, 4), layout.take(100, 8));
        assert_eq!((a, b, layout.bytes()), (512, 768, 256 + 1024));
    }

    #[test]
    fn a_workspace_that_is_too_small_is_refused_with_both_sizes() {
        let small = Workspace { at: 256, bytes: 10 }.check(11).unwrap_err();
        assert!(small.to_string().contains("10 bytes, and 11"), "{small}");
        assert!(Workspace { at: 100, bytes: 1000 }.check(500).is_err());
        assert!(Workspace { at: 0, bytes: 0 }.check(0).is_ok());
    }
}
