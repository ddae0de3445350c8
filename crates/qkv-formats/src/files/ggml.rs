//! The ggml files of Whisper: sizes, mel filters, the vocabulary and all tensors in one file, plain or in quantized
//! blocks. Everything is `f32` in memory.

use super::cursor::Cursor;
use super::input;
use crate::{Error, Result};
use qkv_simd::blocks::BlockType;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The first four bytes, as a number.
pub const MAGIC: u32 = 0x6767_6d6c;
/// The largest number of axes.
const MOST_AXES: u32 = 4;

/// The sizes in the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GgmlSizes {
    /// Tokens of the vocabulary, special ones included.
    pub vocabulary: usize,
    /// Positions of the encoder.
    pub audio_positions: usize,
    /// Width of the encoder.
    pub audio_width: usize,
    /// Heads of the encoder.
    pub audio_heads: usize,
    /// Layers of the encoder.
    pub audio_layers: usize,
    /// Positions of the decoder.
    pub text_positions: usize,
    /// Width of the decoder.
    pub text_width: usize,
    /// Heads of the decoder.
    pub text_heads: usize,
    /// Layers of the decoder.
    pub text_layers: usize,
    /// Mel bands.
    pub bands: usize,
}

#[derive(Clone, Debug)]
struct Entry {
    shape: Vec<usize>,
    storage: BlockType,
    from: usize,
    len: usize,
}

/// A file whose sizes have been checked.
#[derive(Clone, Debug)]
pub struct Ggml {
    path: PathBuf,
    bytes: Vec<u8>,
    sizes: GgmlSizes,
    filters: Vec<f32>,
    tokens: Vec<Vec<u8>>,
    entries: BTreeMap<String, Entry>,
}

impl Cursor<'_> {
    fn size(&mut self) -> Result<usize> {
        Ok(self.u32()? as usize)
    }
}

impl Ggml {
    /// Opens and checks a file.
    ///
    /// # Errors
    /// Names the file, and the part that is wrong.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        Ggml::from_bytes(input::read(path, u64::MAX)?, path)
    }

    /// Checks the bytes of a file; `path` is for errors.
    ///
    /// ```
    /// let error = qkv_formats::files::ggml::Ggml::from_bytes(b"GGUF".to_vec(), "m.bin").unwrap_err();
    /// assert_eq!(error.to_string(), "`m.bin`: header: it does not begin with `lmgg`");
    /// ```
    ///
    /// # Errors
    /// As [`open`](Ggml::open).
    pub fn from_bytes(bytes: Vec<u8>, path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let mut cursor = Cursor::new(&bytes, path);
        if cursor.u32()? != MAGIC {
            return Err(cursor.wrong("it does not begin with `lmgg`"));
        }
        let sizes = GgmlSizes {
            vocabulary: cursor.size()?,
            audio_positions: cursor.size()?,
            audio_width: cursor.size()?,
            audio_heads: cursor.size()?,
            audio_layers: cursor.size()?,
            text_positions: cursor.size()?,
            text_width: cursor.size()?,
            text_heads: cursor.size()?,
            text_layers: cursor.size()?,
            bands: cursor.size()?,
        };
        cursor.u32()?; // the type of most tensors; each has its own
        cursor.part = "mel filters".into();
        let (bands, frequencies) = (u64::from(cursor.u32()?), u64::from(cursor.u32()?));
        let filters = cursor.take((bands * frequencies).saturating_mul(4))?;
        let filters = filters.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        cursor.part = "vocabulary".into();
        let count = cursor.u32()?;
        let mut tokens = Vec::new();
        for _ in 0..count {
            let length = cursor.u32()?;
            tokens.push(cursor.take(u64::from(length))?.to_vec());
        }
        let mut entries = BTreeMap::new();
        while !cursor.at_end() {
            cursor.part = format!("tensor {}", entries.len());
            let (axes, name, kind) = (cursor.u32()?, cursor.u32()?, cursor.u32()?);
            if axes > MOST_AXES {
                return Err(cursor.wrong(format!("it has {axes} axes")));
            }
            let mut shape = Vec::new();
            for _ in 0..axes {
                shape.push(cursor.size()?);
            }
            let name = String::from_utf8_lossy(cursor.take(u64::from(name))?).into_owned();
            cursor.part = format!("tensor `{name}`");
            let Some(storage) = BlockType::of(kind) else {
                return Err(cursor.wrong(format!("it is stored as type {kind}, which is not known")));
            };
            let width = shape.first().copied().unwrap_or(1);
            let numbers = shape.iter().try_fold(1usize, |count, &axis| count.checked_mul(axis));
            let len = numbers.filter(|_| width.is_multiple_of(storage.together())).and_then(|n| storage.bytes(n));
            let Some(len) = len else {
                return Err(cursor.wrong(format!("its shape {shape:?} cannot be stored as {storage}")));
            };
            cursor.take(len as u64)?;
            shape.reverse();
            if entries.insert(name, Entry { shape, storage, from: cursor.at - len, len }).is_some() {
                return Err(cursor.wrong("it is there twice"));
            }
        }
        Ok(Ggml { path: path.to_owned(), bytes, sizes, filters, tokens, entries })
    }

    /// The path it was opened with.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The sizes in the header.
    pub fn sizes(&self) -> GgmlSizes {
        self.sizes
    }

    /// The stored mel filters, `[bands, 201]`.
    pub fn filters(&self) -> &[f32] {
        &self.filters
    }

    /// The bytes of each text token.
    pub fn tokens(&self) -> &[Vec<u8>] {
        &self.tokens
    }

    /// Names of all tensors, in alphabetical order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// The shape of a tensor, row-major.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.entries.get(name).map(|entry| &entry.shape[..])
    }

    /// Reads a tensor, row-major.
    ///
    /// # Errors
    /// If there is no tensor of that name.
    pub fn read(&self, name: &str) -> Result<Vec<f32>> {
        match self.entries.get(name) {
            Some(entry) => Ok(entry.storage.widen(&self.bytes[entry.from..][..entry.len])),
            None => Err(Error::format(&self.path, format!("tensor `{name}`"), "it is missing")),
        }
    }
}
