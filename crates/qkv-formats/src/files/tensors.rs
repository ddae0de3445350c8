//! Weights in `.safetensors` files. Everything is `f32` in memory: half precision is widened and 8-bit rows are
//! dequantized when they are read.
//!
//! **8-bit rows** ([`Storage::Rows8`]): a matrix `name` of `[rows, cols]` is stored as integers from −127 to 127 with
//! `name.scale` of `[rows]` beside it; a value is its integer times the scale of its row. Other tensors stay `f32`. The
//! error of a value is at most half the scale of its row, 0.4 % of the row's largest value.
//!
//! [`safetensors`](super::safetensors) checks a file before any tensor is read. Allocations are bounded by the bytes
//! that exist, not by what the header claims.

mod new_file;
mod rows;

use super::atomic;
use super::safetensors::{Header, Reader, TensorInfo};
use crate::{Error, Result};
pub use new_file::NewFile;
use qkv_simd::blocks::BlockType;
use safetensors::tensor::Dtype;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Appended to the name of a matrix for its scales.
const SCALE: &str = ".scale";

/// Storage types for writing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Storage {
    /// 32 bits; values are read back bit for bit.
    #[default]
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// Matrices in 8-bit rows, the rest as `f32`.
    Rows8,
}

/// A tensor to write.
#[derive(Clone, Copy, Debug)]
pub struct NamedTensor<'a> {
    /// Its name in the file.
    pub name: &'a str,
    /// Its shape.
    pub shape: &'a [usize],
    /// Its values, row-major.
    pub values: &'a [f32],
}

/// The bytes of a file with these tensors. Their order does not change the bytes.
///
/// ```
/// use qkv_formats::files::tensors::{NamedTensor, Storage, TensorFile, to_bytes};
///
/// let weight = NamedTensor { name: "weight", shape: &[2, 2], values: &[1.0, -0.5, 0.0, 8.0] };
/// let bytes = to_bytes(&[weight], Storage::Rows8)?;
/// let file = TensorFile::from_bytes(bytes, "model.safetensors")?;
/// assert_eq!(file.read("weight")?, [1.0, -64.0 / 127.0, 0.0, 8.0]);
/// # Ok::<(), qkv_formats::Error>(())
/// ```
pub fn to_bytes(tensors: &[NamedTensor], storage: Storage) -> Result<Vec<u8>> {
    let file = NewFile::of(tensors, storage)?;
    let mut bytes = Vec::with_capacity(file.byte_len());
    file.write(&mut bytes).map_err(|e| Error::invalid(format!("the tensors cannot be written: {e}")))?;
    Ok(bytes)
}

/// Writes a file with these tensors atomically, one after the other, so that it is never in memory as a whole.
pub fn write(path: impl AsRef<Path>, tensors: &[NamedTensor], storage: Storage) -> Result<()> {
    let file = NewFile::of(tensors, storage)?;
    atomic::write_with(path, |to| file.write(&mut BufWriter::new(to)))
}

/// A file whose header has been checked. Its tensors are read and converted one at a time: it is never in memory as a
/// whole, unless it was given as bytes.
#[derive(Clone, Debug)]
pub struct TensorFile {
    path: PathBuf,
    header: Header,
    contents: Contents,
}

/// Where the bytes of a file are.
#[derive(Clone, Debug)]
enum Contents {
    Memory(Cow<'static, [u8]>),
    Disk(Arc<Mutex<Reader>>),
}

impl TensorFile {
    /// Opens and checks a file.
    ///
    /// ```
    /// # use qkv_formats::files::tensors::{NamedTensor, Storage, TensorFile, write};
    /// # let folder = tempfile::tempdir().unwrap();
    /// let path = folder.path().join("model.safetensors");
    /// write(&path, &[NamedTensor { name: "bias", shape: &[2], values: &[0.5, 1.5] }], Storage::F32)?;
    /// let file = TensorFile::open(&path)?;
    /// assert_eq!(file.shape("bias"), Some(&[2][..]));
    /// assert_eq!(file.read_shaped("bias", &[2])?, [0.5, 1.5]);
    /// # Ok::<(), qkv_formats::Error>(())
    /// ```
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::open_at(path.as_ref())
    }

    fn open_at(path: &Path) -> Result<Self> {
        let reader = Reader::open(path)?;
        let header = reader.header().clone();
        Ok(TensorFile { path: path.to_owned(), header, contents: Contents::Disk(Arc::new(Mutex::new(reader))) })
    }

    /// Checks the bytes of a file; `path` is for errors.
    pub fn from_bytes(bytes: impl Into<Cow<'static, [u8]>>, path: impl AsRef<Path>) -> Result<Self> {
        let (bytes, path) = (bytes.into(), path.as_ref().to_owned());
        let header = Header::read(&mut &bytes[..], bytes.len() as u64, &path)?;
        Ok(TensorFile { path, header, contents: Contents::Memory(bytes) })
    }

    /// Names of all tensors, in alphabetical order. Scales of 8-bit rows belong to their matrix and are not listed.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.header.tensors().keys().map(String::as_str).filter(|name| !self.is_scale(name))
    }

    fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.header.tensors().get(name)
    }

    fn is_scale(&self, name: &str) -> bool {
        let matrix = name.strip_suffix(SCALE).and_then(|matrix| self.info(matrix));
        matrix.is_some_and(|matrix| matrix.dtype == Dtype::I8)
    }

    /// The shape of a tensor.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.info(name).map(|info| &info.shape[..])
    }

    /// The storage type of a tensor.
    pub fn storage(&self, name: &str) -> Option<String> {
        self.info(name).map(|info| info.dtype.to_string())
    }

    /// The path it was opened with.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn wrong(&self, name: &str, what: impl Into<String>) -> Error {
        Error::format(&self.path, format!("tensor `{name}`"), what)
    }

    /// Reads a tensor, row-major.
    pub fn read(&self, name: &str) -> Result<Vec<f32>> {
        let (Some(info), Some(place)) = (self.info(name), self.header.range(name)) else {
            return Err(self.wrong(name, "it is missing"));
        };
        let bytes: Cow<'_, [u8]> = match &self.contents {
            Contents::Memory(bytes) => bytes[place.start as usize..place.end as usize].into(),
            Contents::Disk(reader) => reader.lock().unwrap_or_else(PoisonError::into_inner).read(name)?.into(),
        };
        match info.dtype {
            Dtype::F32 => Ok(BlockType::F32.widen(&bytes)),
            Dtype::F16 => Ok(BlockType::F16.widen(&bytes)),
            Dtype::BF16 => Ok(BlockType::Bf16.widen(&bytes)),
            Dtype::I8 => {
                let [count, width] = info.shape[..] else {
                    return Err(
                        self.wrong(name, format!("its 8-bit rows have shape {:?}, expected a matrix", info.shape))
                    );
                };
                let scale = format!("{name}{SCALE}");
                if self.info(&scale).is_some_and(|info| info.dtype == Dtype::I8) {
                    return Err(self.wrong(&scale, "it is I8, expected F32, F16 or BF16"));
                }
                Ok(rows::widen(&bytes, &self.read_shaped(&scale, &[count])?, width))
            }
            other => Err(self.wrong(name, format!("it is {other}, expected F32, F16, BF16 or 8-bit rows"))),
        }
    }

    /// Reads a tensor that must have this shape.
    pub fn read_shaped(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        match self.shape(name) {
            Some(found) if found != shape => {
                Err(self.wrong(name, format!("its shape is {found:?}, expected {shape:?}")))
            }
            _ => self.read(name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_cut_off_after_it_was_opened_is_an_error_that_names_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let tensors = ["a", "b"].map(|name| NamedTensor { name, shape: &[2], values: &[1.0, 2.0] });
        write(&path, &tensors, Storage::F32).unwrap();
        let opened = TensorFile::open(&path).unwrap();
        let length = std::fs::metadata(&path).unwrap().len();
        std::fs::File::options().write(true).open(&path).unwrap().set_len(length - 1).unwrap();
        assert_eq!(opened.read("a").unwrap(), [1.0, 2.0]);
        let error = opened.read("b").unwrap_err().to_string();
        assert!(error.contains("model.safetensors"), "{error}");
    }

    #[test]
    fn threads_read_different_tensors_of_one_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let values: Vec<Vec<f32>> = (0..8).map(|at| vec![at as f32; 1000 * (at + 1)]).collect();
        let names: Vec<String> = (0..8).map(|at| format!("tensor.{at}")).collect();
        let shapes: Vec<[usize; 1]> = values.iter().map(|values| [values.len()]).collect();
        let tensors: Vec<NamedTensor<'_>> =
            (0..8).map(|at| NamedTensor { name: &names[at], shape: &shapes[at], values: &values[at] }).collect();
        write(&path, &tensors, Storage::F32).unwrap();
        let file = TensorFile::open(&path).unwrap();
        std::thread::scope(|scope| {
            for (name, expected) in names.iter().zip(&values) {
                scope.spawn(|| (0..50).for_each(|_| assert_eq!(file.read(name).unwrap(), *expected)));
            }
        });
    }
}
