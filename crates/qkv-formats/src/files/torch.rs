//! PyTorch checkpoints (`.pt`, `.pth`): a zip archive with a pickle that describes the tensors, and files with their
//! values. A pickle is a program; this reader runs none of it. It interprets the pickle far enough to see dictionaries,
//! lists, numbers, text and tensors. Functions that the pickle names are never called; the few that rebuild tensors and
//! ordered dictionaries are recognized by their names.

mod pickle;
mod zip;

use super::input;
use crate::{Error, Result};
use half::{bf16, f16};
use pickle::{Number, StoredTensor};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use zip::Archive;

/// The largest file.
const LARGEST: u64 = 1 << 36;
/// The largest number of values of a tensor, and of axes.
const MOST_VALUES: usize = 1 << 32;
const MOST_AXES: usize = 8;

/// The tensors of a checkpoint. The name of one in nested dictionaries is their keys joined by dots.
#[derive(Clone, Debug)]
pub struct TorchFile {
    path: PathBuf,
    archive: Archive,
    tensors: BTreeMap<String, StoredTensor>,
}

impl TorchFile {
    /// Opens a file and reads what its pickle says about tensors.
    ///
    /// # Errors
    /// Names the file and what is wrong with it.
    pub fn open(path: impl AsRef<Path>) -> Result<TorchFile> {
        let path = path.as_ref();
        TorchFile::from_bytes(input::read(path, LARGEST)?, path)
    }

    /// The same for the bytes of a file; `path` is for errors.
    ///
    /// # Errors
    /// As [`open`](TorchFile::open).
    pub fn from_bytes(bytes: Vec<u8>, path: impl AsRef<Path>) -> Result<TorchFile> {
        let path = path.as_ref();
        let archive = Archive::read(bytes, path)?;
        let Some(description) = archive.find("data.pkl") else {
            return Err(Error::format(path, "archive", "it has no `data.pkl`, it is no checkpoint of PyTorch"));
        };
        if archive.find("byteorder").is_some_and(|order| order != b"little") {
            return Err(Error::format(path, "archive", "its numbers are big-endian, expected little-endian"));
        }
        let tensors = pickle::tensors(description, path)?;
        Ok(TorchFile { path: path.to_owned(), archive, tensors })
    }

    /// The path it was opened with.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Names of all tensors, in alphabetical order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The shape of a tensor.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|tensor| &tensor.shape[..])
    }

    /// The storage type of a tensor.
    pub fn storage(&self, name: &str) -> Option<String> {
        self.tensors.get(name).map(|tensor| tensor.number.name().to_owned())
    }

    /// Keeps only the tensors of one of its dictionaries, and drops the dictionary from their names.
    pub fn under(mut self, dictionary: &str) -> TorchFile {
        let prefix = format!("{dictionary}.");
        let own = |(name, tensor): (String, StoredTensor)| Some((name.strip_prefix(&prefix)?.to_owned(), tensor));
        self.tensors = self.tensors.into_iter().filter_map(own).collect();
        self
    }

    /// Reads a tensor, row-major. Half precision is widened.
    ///
    /// # Errors
    /// Names the tensor that is missing, of another type, or not within its file.
    pub fn read(&self, name: &str) -> Result<Vec<f32>> {
        let wrong = |what: String| Error::format(&self.path, format!("tensor `{name}`"), what);
        let tensor = self.tensors.get(name).ok_or_else(|| wrong("it is missing".into()))?;
        let StoredTensor { number, key, offset, shape, strides } = tensor;
        if shape.len() != strides.len() || shape.len() > MOST_AXES {
            return Err(wrong(format!("its shape is {shape:?}, its strides are {strides:?}")));
        }
        let size = shape.iter().try_fold(1usize, |all, &axis| all.checked_mul(axis));
        let size = size.filter(|&size| size <= MOST_VALUES).ok_or_else(|| wrong(format!("its shape is {shape:?}")))?;
        let bytes = self.archive.find(&format!("data/{key}"));
        let bytes = bytes.ok_or_else(|| wrong(format!("its values, `data/{key}`, are missing")))?;
        let there = bytes.len() / number.bytes();
        let steps = shape.iter().zip(strides).map(|(&axis, &stride)| axis.saturating_sub(1).saturating_mul(stride));
        let last = steps.fold(*offset, usize::saturating_add);
        if size > 0 && (last >= there || size > there) {
            let what = format!("value {last} is asked for where there are {there}, in {shape:?} by {strides:?}");
            return Err(wrong(what));
        }
        let value = |at: usize| {
            let at = at * number.bytes();
            match number {
                Number::F32 => f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]),
                Number::F16 => f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32(),
                Number::Bf16 => bf16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32(),
                Number::F64 => {
                    let eight: [u8; 8] = bytes[at..at + 8].try_into().expect("eight bytes");
                    f64::from_le_bytes(eight) as f32
                }
                Number::Other(_) => f32::NAN,
            }
        };
        if let Number::Other(name) = number {
            return Err(wrong(format!("it is stored as {name}, expected floating point")));
        }
        let mut values = Vec::with_capacity(size);
        let mut place = vec![0usize; shape.len()];
        for _ in 0..size {
            values.push(value(offset + place.iter().zip(strides).map(|(&at, &stride)| at * stride).sum::<usize>()));
            for axis in (0..shape.len()).rev() {
                place[axis] += 1;
                if place[axis] < shape[axis] {
                    break;
                }
                place[axis] = 0;
            }
        }
        Ok(values)
    }
}
