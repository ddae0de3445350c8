//! The archive of a checkpoint: zip, as PyTorch writes it, without compression. Sizes and offsets come from the central
//! directory at its end, including its 64-bit fields.

use super::super::cursor::Cursor;
use crate::{Error, Result};
use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

/// Signatures of the end record, its 64-bit forms, a directory entry, and a file's own header.
const END: u32 = 0x0605_4b50;
const END64: u32 = 0x0606_4b50;
const END64_PLACE: u32 = 0x0706_4b50;
const ENTRY: u32 = 0x0201_4b50;
const FILE: u32 = 0x0403_4b50;
/// Bytes of the end record without its comment, and the longest comment.
const END_BYTES: usize = 22;
const LONGEST_COMMENT: usize = 1 << 16;
const MOST_FILES: u64 = 1 << 20;

/// The files of an archive, by name without the top folder, which all of them share.
#[derive(Clone, Debug)]
pub(super) struct Archive {
    bytes: Vec<u8>,
    files: HashMap<String, Range<usize>>,
}

/// A cursor at an offset of the file.
fn at<'a>(bytes: &'a [u8], place: u64, path: &'a Path, part: &str) -> Result<Cursor<'a>> {
    let mut cursor = Cursor::new(bytes, path);
    cursor.part = part.into();
    cursor.take(place)?;
    Ok(cursor)
}

/// Where the directory begins, and how many entries it has.
fn directory(bytes: &[u8], path: &Path) -> Result<(u64, u64)> {
    let wrong = |what: &str| Error::format(path, "archive", what);
    let first = bytes.len().saturating_sub(END_BYTES + LONGEST_COMMENT);
    let is_end = |&place: &usize| bytes[place..].starts_with(&END.to_le_bytes());
    let end = (first..(bytes.len() + 1).saturating_sub(END_BYTES)).rev().find(is_end);
    let end = end.ok_or_else(|| wrong("it is no zip archive; PyTorch before 1.6 wrote files of another kind"))?;
    let mut cursor = at(bytes, end as u64 + 10, path, "end of the archive")?;
    let (count, _, place) = (u64::from(cursor.u16()?), cursor.u32()?, u64::from(cursor.u32()?));
    if place != u64::from(u32::MAX) && count != u64::from(u16::MAX) {
        return Ok((place, count));
    }
    let Some(before) = end.checked_sub(20) else { return Err(wrong("its 64-bit end is missing")) };
    let mut cursor = at(bytes, before as u64, path, "end of the archive")?;
    if cursor.u32()? != END64_PLACE {
        return Err(wrong("its 64-bit end is missing"));
    }
    cursor.u32()?;
    let mut cursor = at(bytes, cursor.u64()?, path, "end of the archive")?;
    if cursor.u32()? != END64 {
        return Err(wrong("its 64-bit end is not where it says"));
    }
    cursor.take(28)?;
    let (count, _, place) = (cursor.u64()?, cursor.u64()?, cursor.u64()?);
    Ok((place, count))
}

/// Takes sizes and offset of an entry from its 64-bit fields if the 32-bit ones are at their maximum.
fn widened(extra: &[u8], fields: &mut [u64; 3], path: &Path) -> Result<()> {
    let mut cursor = Cursor::new(extra, path);
    cursor.part = "entry of the archive".into();
    while cursor.bytes.len() - cursor.at >= 4 {
        let (kind, length) = (cursor.u16()?, u64::from(cursor.u16()?));
        let inner = cursor.take(length)?;
        if kind != 1 {
            continue;
        }
        let mut wide = Cursor::new(inner, path);
        for field in fields.iter_mut().filter(|field| **field == u64::from(u32::MAX)) {
            *field = wide.u64()?;
        }
    }
    Ok(())
}

impl Archive {
    /// Reads the directory.
    pub fn read(bytes: Vec<u8>, path: &Path) -> Result<Archive> {
        let (place, count) = directory(&bytes, path)?;
        if count > MOST_FILES {
            return Err(Error::format(path, "archive", format!("it has {count} files, at most {MOST_FILES} are read")));
        }
        let mut files = HashMap::new();
        let mut cursor = at(&bytes, place, path, "directory of the archive")?;
        for _ in 0..count {
            if cursor.u32()? != ENTRY {
                return Err(cursor.wrong("an entry is not where it should be"));
            }
            cursor.take(6)?;
            let method = cursor.u16()?;
            cursor.take(8)?;
            let (packed, size) = (u64::from(cursor.u32()?), u64::from(cursor.u32()?));
            let [name, extra, comment] = [cursor.u16()?, cursor.u16()?, cursor.u16()?].map(u64::from);
            cursor.take(8)?;
            let header = u64::from(cursor.u32()?);
            let name = String::from_utf8_lossy(cursor.take(name)?).into_owned();
            let mut fields = [size, packed, header];
            widened(cursor.take(extra)?, &mut fields, path)?;
            cursor.take(comment)?;
            let [size, packed, header] = fields;
            if method != 0 || size != packed {
                return Err(cursor.wrong(format!("`{name}` is compressed, which PyTorch does not do")));
            }
            let mut own = at(&bytes, header, path, "file in the archive")?;
            if own.u32()? != FILE {
                return Err(own.wrong(format!("`{name}` is not where it should be")));
            }
            own.take(22)?;
            let skipped = u64::from(own.u16()?) + u64::from(own.u16()?);
            own.take(skipped)?;
            let start = own.at;
            own.take(size)?;
            let name = name.split_once('/').map_or(name.as_str(), |(_, rest)| rest).to_owned();
            files.insert(name, start..own.at);
        }
        Ok(Archive { bytes, files })
    }

    /// The bytes of a file, if there is one of this name.
    pub fn find(&self, name: &str) -> Option<&[u8]> {
        self.files.get(name).map(|range| &self.bytes[range.clone()])
    }
}
