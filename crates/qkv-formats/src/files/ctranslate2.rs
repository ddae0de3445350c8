//! `model.bin` of CTranslate2, version 6: named tensors of any type, and aliases of some of them. Everything is `f32`
//! in memory; 8-bit rows are divided by their scales.

use super::cursor::Cursor;
use super::input;
use crate::{Error, Result};
use qkv_simd::blocks::BlockType;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The supported version.
const VERSION: u32 = 6;
/// The largest number of axes.
const MOST_AXES: u8 = 8;

/// Number types, by their code in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    F32,
    I8,
    I16,
    I32,
    F16,
    Bf16,
}

impl Kind {
    fn of(number: u8) -> Option<Kind> {
        [Kind::F32, Kind::I8, Kind::I16, Kind::I32, Kind::F16, Kind::Bf16].get(usize::from(number)).copied()
    }

    fn bytes(self) -> usize {
        match self {
            Kind::I8 => 1,
            Kind::I16 | Kind::F16 | Kind::Bf16 => 2,
            Kind::F32 | Kind::I32 => 4,
        }
    }
}

#[derive(Clone, Debug)]
struct Entry {
    shape: Vec<usize>,
    kind: Kind,
    from: usize,
    len: usize,
}

/// A file whose names and sizes have been checked.
#[derive(Clone, Debug)]
pub struct CTranslate2 {
    path: PathBuf,
    bytes: Vec<u8>,
    /// The model specification that the file names: `WhisperSpec`.
    spec: String,
    entries: BTreeMap<String, Entry>,
}

impl Cursor<'_> {
    /// A string after its length; a zero byte at its end is dropped.
    fn name(&mut self) -> Result<String> {
        let length = self.u16()?;
        let bytes = self.take(u64::from(length))?;
        let bytes = bytes.strip_suffix(&[0]).unwrap_or(bytes);
        String::from_utf8(bytes.to_vec()).map_err(|_| self.wrong("a name is not UTF-8"))
    }
}

impl CTranslate2 {
    /// Opens and checks a file.
    ///
    /// # Errors
    /// Names the file, and the tensor that is wrong.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        CTranslate2::from_bytes(input::read(path, u64::MAX)?, path)
    }

    /// Checks the bytes of a file; `path` is for errors.
    ///
    /// ```
    /// use qkv_formats::files::ctranslate2::CTranslate2;
    /// let error = CTranslate2::from_bytes(vec![9, 0, 0, 0], "model.bin").unwrap_err();
    /// assert_eq!(error.to_string(), "`model.bin`: header: version 9, expected 6");
    /// ```
    ///
    /// # Errors
    /// As [`open`](CTranslate2::open).
    pub fn from_bytes(bytes: Vec<u8>, path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let mut cursor = Cursor::new(&bytes, path);
        match cursor.u32()? {
            VERSION => {}
            other => return Err(cursor.wrong(format!("version {other}, expected {VERSION}"))),
        }
        let spec = cursor.name()?;
        cursor.u32()?; // the specification's own revision
        let count = cursor.u32()?;
        let mut entries = BTreeMap::new();
        for at in 0..count {
            cursor.part = format!("tensor {at}");
            let name = cursor.name()?;
            cursor.part = format!("tensor `{name}`");
            let axes = cursor.u8()?;
            if axes > MOST_AXES {
                return Err(cursor.wrong(format!("it has {axes} axes")));
            }
            let mut shape = Vec::new();
            for _ in 0..axes {
                shape.push(cursor.u32()? as usize);
            }
            let kind = cursor.u8()?;
            let kind = Kind::of(kind).ok_or_else(|| cursor.wrong(format!("numbers of type {kind}")))?;
            let len = cursor.u32()?;
            let numbers = shape.iter().try_fold(1usize, |count, &axis| count.checked_mul(axis));
            if numbers.and_then(|numbers| numbers.checked_mul(kind.bytes())) != Some(len as usize) {
                return Err(cursor.wrong(format!("{len} bytes for shape {shape:?} in {kind:?}")));
            }
            cursor.take(u64::from(len))?;
            let entry = Entry { shape, kind, from: cursor.at - len as usize, len: len as usize };
            if entries.insert(name, entry).is_some() {
                return Err(cursor.wrong("it is there twice"));
            }
        }
        cursor.part = "other names".into();
        let aliases = if cursor.at_end() { 0 } else { cursor.u32()? };
        for _ in 0..aliases {
            let (alias, name) = (cursor.name()?, cursor.name()?);
            let Some(entry) = entries.get(&name).cloned() else {
                return Err(cursor.wrong(format!("`{alias}` is `{name}`, which is missing")));
            };
            entries.insert(alias, entry);
        }
        Ok(CTranslate2 { path: path.to_owned(), bytes, spec, entries })
    }

    /// The path it was opened with.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The model specification that the file names, such as `WhisperSpec`.
    pub fn spec(&self) -> &str {
        &self.spec
    }

    /// Names of all tensors, in alphabetical order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// The shape of a tensor.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.entries.get(name).map(|entry| &entry.shape[..])
    }

    fn wrong(&self, name: &str, what: impl Into<String>) -> Error {
        Error::format(&self.path, format!("tensor `{name}`"), what)
    }

    /// Reads a tensor, row-major.
    ///
    /// # Errors
    /// If it or the scales of its rows are missing.
    pub fn read(&self, name: &str) -> Result<Vec<f32>> {
        let Some(Entry { shape, kind, from, len }) = self.entries.get(name) else {
            return Err(self.wrong(name, "it is missing"));
        };
        let bytes = &self.bytes[*from..from + len];
        let pairs = || bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
        let fours = || bytes.chunks_exact(4).map(|b| [b[0], b[1], b[2], b[3]]);
        Ok(match kind {
            Kind::F32 => BlockType::F32.widen(bytes),
            Kind::F16 => BlockType::F16.widen(bytes),
            Kind::Bf16 => BlockType::Bf16.widen(bytes),
            Kind::I16 => pairs().map(|b| f32::from(i16::from_le_bytes(b))).collect(),
            Kind::I32 => fours().map(|b| i32::from_le_bytes(b) as f32).collect(),
            Kind::I8 => {
                let values = bytes.iter().map(|&b| f32::from(b as i8));
                let scale = format!("{name}_scale");
                match (&shape[..], self.entries.get(&scale)) {
                    (&[rows, width], Some(entry)) if entry.shape == [rows] && entry.kind != Kind::I8 => {
                        let scales = self.read(&scale)?;
                        values.enumerate().map(|(at, x)| x / scales[at / width]).collect()
                    }
                    (&[_, _], _) => return Err(self.wrong(name, "the scales of its rows are missing")),
                    _ => values.collect(),
                }
            }
        })
    }
}
