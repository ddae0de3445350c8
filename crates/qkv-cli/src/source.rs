//! A file of tensors to be read. Its header is read and checked first, and nothing in it is believed: after
//! [`Source::open`] every tensor lies inside the file and is as large as its shape says. Only tensors that are asked
//! for are then read. What their numbers mean is `given`'s.

use crate::failure::Failure;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, SafeTensorError, TensorInfo};
use serde_json::{Map, Value};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// No header of attention's tensors comes near this, and what is read of one takes some twenty times its size.
const LONGEST_HEADER: u64 = 16 << 20;

/// A file of tensors whose header has been checked.
#[derive(Debug)]
pub(crate) struct Source {
    path: PathBuf,
    file: File,
    /// Where the tensors begin.
    start: u64,
    metadata: Metadata,
}

/// A tensor as it lies in a file.
#[derive(Debug)]
pub(crate) struct Raw {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

impl Source {
    pub fn open(path: &Path) -> Result<Source, Failure> {
        let broken = |why: String| {
            Failure::in_file(path, format!("not a safetensors file: {why}"))
                .hint("`safetensors.torch.save_file` and `safetensors.numpy.save_file` write them in Python")
        };
        let unreadable = |error: std::io::Error| Failure::in_file(path, format!("cannot be read: {error}"));
        let mut file = File::open(path).map_err(unreadable)?;
        let about = file.metadata().map_err(unreadable)?;
        if !about.is_file() {
            return Err(Failure::in_file(path, "cannot be read: it is not a regular file"));
        }
        let Some(after_length) = about.len().checked_sub(8) else {
            return Err(broken(format!("{} bytes are too few", about.len())));
        };
        let mut length = [0; 8];
        file.read_exact(&mut length).map_err(unreadable)?;
        let length = u64::from_le_bytes(length);
        if length > after_length {
            return Err(broken(format!("its header should have {length} bytes, and {after_length} are there")));
        }
        if length > LONGEST_HEADER {
            return Err(broken(format!("its header has {length} bytes, expected at most {LONGEST_HEADER}")));
        }
        let mut header = vec![0; length as usize];
        file.read_exact(&mut header).map_err(unreadable)?;
        let metadata = checked(&header).map_err(broken)?;
        let (expected, found) = (metadata.data_len() as u64, after_length - length);
        if expected != found {
            return Err(broken(format!("its tensors should have {expected} bytes, and {found} are there")));
        }
        Ok(Source { path: path.into(), file, start: 8 + length, metadata })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The names of all tensors, in alphabetical order.
    pub fn names(&self) -> Vec<String> {
        let mut names = self.metadata.offset_keys();
        names.sort_unstable();
        names
    }

    /// Type and shape of a tensor.
    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.metadata.info(name)
    }

    /// A tensor, if there is one of that name.
    pub fn read(&mut self, name: &str) -> Result<Option<Raw>, Failure> {
        let Some(TensorInfo { dtype, shape, data_offsets: (from, to) }) = self.metadata.info(name).cloned() else {
            return Ok(None);
        };
        let mut bytes = vec![0; to - from]; // which the file has
        let place = SeekFrom::Start(self.start + from as u64);
        match self.file.seek(place).and_then(|_| self.file.read_exact(&mut bytes)) {
            Ok(()) => Ok(Some(Raw { dtype, shape, bytes })),
            Err(error) => Err(self.refuse(name, format!("cannot be read: {error}"))),
        }
    }

    /// What is wrong with one of its tensors.
    pub fn refuse(&self, name: &str, why: impl std::fmt::Display) -> Failure {
        Failure::in_file(&self.path, format!("`{name}` {why}"))
    }
}

/// The header, if it can be true. Each entry is read by itself, so that what is wrong with it has a name.
fn checked(header: &[u8]) -> Result<Metadata, String> {
    let entries: Map<String, Value> =
        serde_json::from_slice(header).map_err(|error| format!("its header is not a JSON object ({error})"))?;
    let mut tensors = Vec::new();
    for (name, entry) in entries {
        if name == "__metadata__" {
            continue; // words of whoever wrote the file
        }
        let info: TensorInfo = serde_json::from_value(entry)
            .map_err(|error| format!("its entry for `{name}` is not a tensor ({error})"))?;
        let bits = info.shape.iter().try_fold(info.dtype.bitsize(), |bits, &axis| bits.checked_mul(axis));
        let Some(bits) = bits else {
            return Err(format!("the shape {:?} of `{name}` overflows", info.shape));
        };
        let (from, to) = info.data_offsets;
        if to.checked_sub(from) != Some(bits.div_ceil(8)) {
            let shape = &info.shape;
            return Err(format!("`{name}` should have {} bytes for its shape {shape:?}, not {from} to {to}", bits / 8));
        }
        tensors.push((name, info));
    }
    tensors.sort_by_key(|(_, info)| info.data_offsets);
    Metadata::new(None, tensors).map_err(|error| match error {
        SafeTensorError::InvalidOffset(name) => format!("`{name}` overlaps another tensor, or a gap lies before it"),
        other => other.to_string(),
    })
}
