//! Device memory that a pass needs besides its tensors. A [`Layout`] assigns regions when a plan is made; the size that
//! the plan reports and the pointers that its launches use come from the same regions.

use crate::error::{Error, Result};

/// Every region begins at a multiple of this many bytes.
const ALIGNMENT: u64 = 256;

/// Part of a workspace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Region {
    offset: u64,
    bytes: u64,
}

impl Region {
    /// Its address in the workspace that begins at `base`.
    pub fn ptr(self, base: u64) -> u64 {
        base + self.offset
    }

    pub fn bytes(self) -> usize {
        self.bytes as usize
    }
}

/// Assigns regions one after another.
#[derive(Debug, Default)]
pub(crate) struct Layout {
    used: u64,
}

impl Layout {
    /// A region of `count` elements of `size` bytes.
    pub fn region(&mut self, count: usize, size: usize) -> Region {
        let (offset, bytes) = (self.used, count as u64 * size as u64);
        self.used = (offset + bytes).next_multiple_of(ALIGNMENT);
        Region { offset, bytes }
    }

    /// A region of f32, i32 or u32.
    pub fn words(&mut self, count: usize) -> Region {
        self.region(count, 4)
    }

    /// The size of the workspace.
    pub fn bytes(&self) -> usize {
        self.used as usize
    }
}

/// Device memory that the caller provides for a pass. Its contents are overwritten; two passes at once need two.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Workspace {
    /// The address of the first byte, a multiple of 256.
    pub ptr: u64,
    /// The size.
    pub bytes: usize,
}

impl Workspace {
    /// `bytes` of device memory from `ptr` on.
    pub fn new(ptr: u64, bytes: usize) -> Workspace {
        Workspace { ptr, bytes }
    }

    /// Checks that it is large enough and aligned.
    pub(crate) fn check(&self, needed: usize) -> Result<()> {
        if self.bytes < needed {
            return Err(Error::memory("workspace", format!("has {} bytes, and {needed} are needed", self.bytes)));
        }
        if needed > 0 && !self.ptr.is_multiple_of(ALIGNMENT) {
            return Err(Error::memory("workspace", format!("does not begin at a multiple of {ALIGNMENT} bytes")));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_do_not_overlap_and_are_aligned() {
        let mut layout = Layout::default();
        let (a, b) = (layout.words(3), layout.region(100, 8));
        assert_eq!((a.ptr(512), b.ptr(512), a.bytes(), b.bytes()), (512, 768, 12, 800));
        assert_eq!(layout.bytes(), 256 + 1024);
    }

    #[test]
    fn a_workspace_that_is_too_small_is_refused_with_both_sizes() {
        let small = Workspace::new(256, 10).check(11).unwrap_err();
        assert!(small.to_string().contains("10 bytes, and 11"), "{small}");
        assert!(Workspace::new(100, 1000).check(500).is_err());
        assert!(Workspace::new(0, 0).check(0).is_ok());
    }
}
