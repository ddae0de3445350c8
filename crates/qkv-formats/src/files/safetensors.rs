//! The one reader of `.safetensors` files, for weights, recordings and the tensors of `qkv run`.
//!
//! A header is validated before it is used: every tensor is inside the file and has as many bytes as its type and shape
//! need, the tensors cover the data without gaps or overlaps, and every name occurs once. [`Reader`] then reads tensors
//! on request, one at a time. Converting bytes to numbers is left to the caller: [`tensors`] does it for weights.
//!
//! [`tensors`]: super::tensors

use super::input;
use crate::{Error, Result};
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

pub use safetensors::Dtype;

/// The largest header that is read, the same limit as in the `safetensors` crate.
const HEADER_MAX: u64 = 100_000_000;
/// Bytes before the header, which hold its length.
const PREFIX: u64 = 8;
/// The entry of the header that is not a tensor.
const METADATA: &str = "__metadata__";

/// Type, shape and byte range of a tensor in a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorInfo {
    /// The type of its numbers.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Where its bytes begin and end, counted from the end of the header.
    pub data_offsets: (u64, u64),
}

impl TensorInfo {
    /// Its size in bytes.
    pub fn byte_len(&self) -> u64 {
        self.data_offsets.1 - self.data_offsets.0
    }

    /// Its size in bits by type and shape; `None` on overflow.
    fn bits(&self) -> Option<u64> {
        let bits = self.dtype.bitsize() as u64;
        self.shape.iter().try_fold(bits, |bits, &axis| bits.checked_mul(axis as u64))
    }
}

/// A header that is consistent with itself and with the length of its file.
#[derive(Clone, Debug)]
pub struct Header {
    tensors: BTreeMap<String, TensorInfo>,
    metadata: BTreeMap<String, String>,
    data_start: u64,
}

impl Header {
    /// Reads and checks the header of a file of `file_len` bytes; `path` is for errors.
    ///
    /// # Errors
    /// Names the file, and the tensor if one is wrong.
    pub fn read(from: &mut dyn Read, file_len: u64, path: &Path) -> Result<Header> {
        let wrong = |what: String| Error::format(path, "safetensors header", what);
        let Some(after_prefix) = file_len.checked_sub(PREFIX) else {
            return Err(wrong(format!(
                "the file has {file_len} bytes, fewer than the {PREFIX} of the header's length"
            )));
        };
        let mut prefix = [0; PREFIX as usize];
        from.read_exact(&mut prefix).map_err(|e| Error::file("read", path, e))?;
        let header_len = u64::from_le_bytes(prefix);
        if header_len > after_prefix {
            return Err(wrong(format!("it claims {header_len} bytes, the file has {after_prefix}")));
        }
        if header_len > HEADER_MAX {
            return Err(wrong(format!("it has {header_len} bytes, expected at most {HEADER_MAX}")));
        }
        let mut json = vec![0; header_len as usize];
        from.read_exact(&mut json).map_err(|e| Error::file("read", path, e))?;
        let Entries { tensors, metadata } = serde_json::from_slice(&json).map_err(|e| wrong(e.to_string()))?;
        let header = Header { tensors, metadata, data_start: PREFIX + header_len };
        header.check(after_prefix - header_len, path)?;
        Ok(header)
    }

    /// Checks that the sizes of tensors match their shapes and that the tensors cover the data without gaps or
    /// overlaps.
    fn check(&self, data_len: u64, path: &Path) -> Result<()> {
        let wrong = |name: &str, what: String| Err(Error::format(path, format!("tensor `{name}`"), what));
        for (name, info) in &self.tensors {
            let (from, to) = info.data_offsets;
            let TensorInfo { dtype, shape, .. } = info;
            let Some(bits) = info.bits() else {
                return wrong(name, format!("its shape {shape:?} overflows"));
            };
            if bits % 8 != 0 {
                return wrong(name, format!("its shape {shape:?} of {dtype} does not fill whole bytes"));
            }
            if to.checked_sub(from) != Some(bits / 8) {
                let needed = bits / 8;
                return wrong(name, format!("its shape {shape:?} of {dtype} needs {needed} bytes, not {from} to {to}"));
            }
            if to > data_len {
                return wrong(name, format!("its bytes end at {to}, the data at {data_len}"));
            }
        }
        let mut in_order: Vec<(&String, (u64, u64))> =
            self.tensors.iter().map(|(name, info)| (name, info.data_offsets)).collect();
        in_order.sort_by_key(|&(_, offsets)| offsets);
        let mut end = 0;
        for (name, (from, to)) in in_order {
            if from < end {
                return wrong(name, format!("its bytes begin at {from}, inside another tensor that ends at {end}"));
            }
            if from > end {
                return wrong(name, format!("its bytes begin at {from}, after a gap that begins at {end}"));
            }
            end = to;
        }
        if end != data_len {
            let what = format!("the tensors have {end} bytes, {data_len} follow the header");
            return Err(Error::format(path, "safetensors header", what));
        }
        Ok(())
    }

    /// All tensors, by name.
    pub fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.tensors
    }

    /// The metadata of the file under a key.
    pub fn metadata(&self, key: &str) -> Option<&str> {
        self.metadata.get(key).map(String::as_str)
    }

    /// The byte range of a tensor in the file, if there is one of that name.
    pub fn range(&self, name: &str) -> Option<Range<u64>> {
        let (from, to) = self.tensors.get(name)?.data_offsets;
        Some(self.data_start + from..self.data_start + to)
    }
}

/// The entries of a header. A duplicate name is an error: readers would disagree about which entry counts.
#[derive(Default)]
struct Entries {
    tensors: BTreeMap<String, TensorInfo>,
    metadata: BTreeMap<String, String>,
}

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct EntriesVisitor;

        impl<'de> Visitor<'de> for EntriesVisitor {
            type Value = Entries;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let (mut entries, mut has_metadata) = (Entries::default(), false);
                while let Some(name) = map.next_key::<String>()? {
                    if name == METADATA {
                        if std::mem::replace(&mut has_metadata, true) {
                            return Err(A::Error::custom(format!("`{METADATA}` is there twice")));
                        }
                        entries.metadata =
                            map.next_value().map_err(|e| A::Error::custom(format!("`{METADATA}`: {e}")))?;
                        continue;
                    }
                    let info = map.next_value();
                    let info = info.map_err(|e| A::Error::custom(format!("`{name}` is not a tensor: {e}")))?;
                    match entries.tensors.entry(name) {
                        Entry::Vacant(free) => drop(free.insert(info)),
                        Entry::Occupied(taken) => {
                            return Err(A::Error::custom(format!("`{}` is there twice", taken.key())));
                        }
                    }
                }
                Ok(entries)
            }
        }

        deserializer.deserialize_map(EntriesVisitor)
    }
}

/// A file whose header has been checked and whose tensors are read one at a time.
///
/// ```
/// # use qkv_formats::files::tensors::{NamedTensor, Storage, write};
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path().join("a.safetensors");
/// # write(&path, &[NamedTensor { name: "bias", shape: &[2], values: &[0.5, 1.5] }], Storage::F32)?;
/// use qkv_formats::files::safetensors::{Dtype, Reader};
///
/// let mut file = Reader::open(&path)?;
/// assert_eq!(file.info("bias").map(|info| info.dtype), Some(Dtype::F32));
/// assert_eq!(file.read("bias")?, [0.5f32.to_le_bytes(), 1.5f32.to_le_bytes()].concat());
/// # Ok::<(), qkv_formats::Error>(())
/// ```
#[derive(Debug)]
pub struct Reader {
    path: PathBuf,
    file: File,
    header: Header,
}

impl Reader {
    /// Opens a file and checks its header.
    ///
    /// # Errors
    /// Names the file, and the tensor if one is wrong.
    pub fn open(path: &Path) -> Result<Reader> {
        let mut file = input::open(path)?;
        let file_len = file.metadata().map_err(|e| Error::file("read", path, e))?.len();
        let header = Header::read(&mut file, file_len, path)?;
        Ok(Reader { path: path.to_owned(), file, header })
    }

    /// The header of the file.
    pub(crate) fn header(&self) -> &Header {
        &self.header
    }

    /// The path it was opened with.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The names of all tensors, in alphabetical order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.header.tensors.keys().map(String::as_str)
    }

    /// Type, shape and byte range of a tensor.
    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.header.tensors.get(name)
    }

    /// The metadata of the file under a key.
    pub fn metadata(&self, key: &str) -> Option<&str> {
        self.header.metadata(key)
    }

    /// All bytes of a tensor.
    ///
    /// # Errors
    /// If there is no such tensor, or the file cannot be read.
    pub fn read(&mut self, name: &str) -> Result<Vec<u8>> {
        let len = self.info(name).map_or(0, TensorInfo::byte_len);
        self.read_range(name, 0..len)
    }

    /// A range of bytes of a tensor, counted from its first.
    ///
    /// # Errors
    /// As [`read`](Reader::read), or if the range is not within the tensor.
    pub fn read_range(&mut self, name: &str, range: Range<u64>) -> Result<Vec<u8>> {
        let wrong = |what: String| Error::format(&self.path, format!("tensor `{name}`"), what);
        let Some(place) = self.header.range(name) else { return Err(wrong("it is missing".into())) };
        if range.start > range.end || range.end > place.end - place.start {
            return Err(wrong(format!("it has no bytes {} to {}", range.start, range.end)));
        }
        let mut bytes = vec![0; (range.end - range.start) as usize];
        let found = self.file.seek(SeekFrom::Start(place.start + range.start));
        found.and_then(|_| self.file.read_exact(&mut bytes)).map_err(|e| Error::file("read", &self.path, e))?;
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(json: &str, data_len: u64) -> Result<Header> {
        let bytes = [&(json.len() as u64).to_le_bytes(), json.as_bytes()].concat();
        Header::read(&mut &bytes[..], bytes.len() as u64 + data_len, Path::new("a"))
    }

    #[test]
    fn a_name_that_is_there_twice_is_refused() {
        let q = r#""q":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#;
        assert!(header(&format!("{{{q}}}"), 4).is_ok());
        let twice = header(&format!("{{{q},{q}}}"), 4).unwrap_err().to_string();
        assert!(twice.starts_with("`a`: safetensors header: `q` is there twice"), "{twice}");
        // The second spelling is the same name, escaped.
        let escaped = header(&format!("{{{q},{}}}", q.replace("\"q\"", "\"\\u0071\"")), 4).unwrap_err().to_string();
        assert!(escaped.contains("`q` is there twice"), "{escaped}");
        let metadata = header(r#"{"__metadata__":{},"__metadata__":{}}"#, 0).unwrap_err().to_string();
        assert!(metadata.contains("`__metadata__` is there twice"), "{metadata}");
    }

    #[test]
    fn empty_tensors_share_a_place_and_metadata_is_read() {
        let json = r#"{"__metadata__":{"format":"pt"},
            "a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},
            "b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},
            "c":{"dtype":"F32","shape":[3,0],"data_offsets":[4,4]}}"#;
        let header = header(json, 4).unwrap();
        assert_eq!(header.metadata("format"), Some("pt"));
        assert_eq!(header.tensors().len(), 3);
    }
}
