//! A position in the bytes of a binary file, with every length checked against the bytes that are left.

use crate::{Error, Result};
use std::path::Path;

/// A position in the bytes of a file.
pub(super) struct Cursor<'a> {
    pub bytes: &'a [u8],
    pub at: usize,
    pub path: &'a Path,
    /// The part being read, for errors.
    pub part: String,
}

impl<'a> Cursor<'a> {
    pub fn wrong(&self, what: impl Into<String>) -> Error {
        Error::format(self.path, self.part.clone(), what)
    }

    pub fn take(&mut self, count: u64) -> Result<&'a [u8]> {
        let left = self.bytes.len() - self.at;
        match usize::try_from(count).ok().filter(|&count| count <= left) {
            Some(count) => {
                self.at += count;
                Ok(&self.bytes[self.at - count..self.at])
            }
            None => Err(self.wrong(format!("{count} bytes are announced where {left} are left"))),
        }
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        Ok(self.take(N as u64)?.try_into().expect("just so many were taken"))
    }

    pub fn u32(&mut self) -> Result<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> Result<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// Starts at the beginning of a file, with its header.
    pub fn new(bytes: &'a [u8], path: &'a Path) -> Cursor<'a> {
        Cursor { bytes, at: 0, path, part: "header".into() }
    }

    pub fn u8(&mut self) -> Result<u8> {
        Ok(self.array::<1>()?[0])
    }

    pub fn u16(&mut self) -> Result<u16> {
        self.array().map(u16::from_le_bytes)
    }

    /// Whether nothing is left.
    pub fn at_end(&self) -> bool {
        self.at == self.bytes.len()
    }
}
