//! GGUF files, versions 2 and 3: a model with its metadata and tokenizer in one file, usually quantized. Matrices stay
//! in their quantized blocks if products can read these; other weights are dequantized to `f32` when they are read.
//!
//! Every length is checked against the bytes that are left, every shape against the bytes of its tensor, and lists grow
//! as they are read, so that a header cannot cause large allocations.

use super::cursor::Cursor;
use super::input;
use crate::{Error, Result};
use qkv_simd::blocks::BlockType;
use qkv_simd::quantized::QuantizedMatrix;
use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

/// The first bytes of a file.
const MAGIC: &[u8; 4] = b"GGUF";
/// The largest number of axes.
const MOST_AXES: u32 = 4;
/// Default alignment of tensors.
const ALIGNMENT: u64 = 32;

/// A metadata value.
#[derive(Clone, Debug, PartialEq)]
pub enum MetadataValue {
    /// A number of any type.
    Number(f64),
    /// A boolean.
    Bool(bool),
    /// A string.
    Text(String),
    /// Numbers, or booleans as 1 and 0.
    Numbers(Vec<f64>),
    /// Strings.
    Texts(Vec<String>),
}

#[derive(Clone, Debug)]
struct GgufTensor {
    /// Row-major: the reverse of the order in the file.
    shape: Vec<usize>,
    storage: BlockType,
    from: usize,
    bytes: usize,
}

/// A file whose header has been checked. Tensors are dequantized as they are read.
#[derive(Clone, Debug)]
pub struct Gguf {
    path: PathBuf,
    bytes: Vec<u8>,
    values: BTreeMap<String, MetadataValue>,
    entries: BTreeMap<String, GgufTensor>,
}

impl Cursor<'_> {
    fn text(&mut self) -> Result<String> {
        let length = self.u64()?;
        let bytes = self.take(length)?;
        std::str::from_utf8(bytes).map(str::to_owned).map_err(|_| self.wrong("a text is not UTF-8"))
    }

    /// Reads a number of the given type; `None` if the type is not numeric.
    fn number(&mut self, kind: u32) -> Result<Option<f64>> {
        Ok(Some(match kind {
            0 => f64::from(u8::from_le_bytes(self.array()?)),
            1 => f64::from(i8::from_le_bytes(self.array()?)),
            2 => f64::from(u16::from_le_bytes(self.array()?)),
            3 => f64::from(i16::from_le_bytes(self.array()?)),
            4 => f64::from(self.u32()?),
            5 => f64::from(i32::from_le_bytes(self.array()?)),
            6 => f64::from(f32::from_le_bytes(self.array()?)),
            7 => f64::from(u8::from(u8::from_le_bytes(self.array()?) != 0)),
            10 => self.u64()? as f64,
            11 => i64::from_le_bytes(self.array()?) as f64,
            12 => f64::from_le_bytes(self.array()?),
            _ => return Ok(None),
        }))
    }

    fn value(&mut self) -> Result<MetadataValue> {
        match self.u32()? {
            8 => Ok(MetadataValue::Text(self.text()?)),
            9 => {
                let (kind, count) = (self.u32()?, self.u64()?);
                // Every element takes at least a byte, so a count that is too large ends in an error before it is
                // allocated.
                let (mut numbers, mut texts) = (Vec::new(), Vec::new());
                for _ in 0..count {
                    match kind {
                        8 => texts.push(self.text()?),
                        kind => match self.number(kind)? {
                            Some(number) => numbers.push(number),
                            None => return Err(self.wrong(format!("a list of values of type {kind}"))),
                        },
                    }
                }
                Ok(if kind == 8 { MetadataValue::Texts(texts) } else { MetadataValue::Numbers(numbers) })
            }
            7 => Ok(MetadataValue::Bool(self.array::<1>()? != [0])),
            kind => match self.number(kind)? {
                Some(number) => Ok(MetadataValue::Number(number)),
                None => Err(self.wrong(format!("a value of type {kind}, which there is not"))),
            },
        }
    }
}

impl Gguf {
    /// Opens and checks a file.
    ///
    /// # Errors
    /// Names the file, and the metadata value or tensor that is wrong.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::open_at(path.as_ref())
    }

    fn open_at(path: &Path) -> Result<Self> {
        let file = input::open(path)?;
        let length = file.metadata().map_err(|e| Error::file("read", path, e))?.len();
        let mut bytes = Vec::new();
        file.take(length).read_to_end(&mut bytes).map_err(|e| Error::file("read", path, e))?;
        Gguf::from_bytes(bytes, path)
    }

    /// Checks the bytes of a file; `path` is for errors.
    ///
    /// ```
    /// let error = qkv_formats::files::gguf::Gguf::from_bytes(b"GGUF\x09\0\0\0".to_vec(), "m.gguf").unwrap_err();
    /// assert_eq!(error.to_string(), "`m.gguf`: header: version 9, expected 2 or 3");
    /// ```
    ///
    /// # Errors
    /// As [`open`](Gguf::open).
    pub fn from_bytes(bytes: Vec<u8>, path: impl AsRef<Path>) -> Result<Self> {
        Self::from_bytes_at(bytes, path.as_ref())
    }

    fn from_bytes_at(bytes: Vec<u8>, path: &Path) -> Result<Self> {
        let mut cursor = Cursor::new(&bytes, path);
        if cursor.take(4)? != MAGIC {
            return Err(cursor.wrong("it does not begin with `GGUF`"));
        }
        match cursor.u32()? {
            2 | 3 => {}
            other => return Err(cursor.wrong(format!("version {other}, expected 2 or 3"))),
        }
        let (tensors, count) = (cursor.u64()?, cursor.u64()?);
        let mut values = BTreeMap::new();
        for at in 0..count {
            cursor.part = format!("value {at}");
            let name = cursor.text()?;
            cursor.part = format!("value `{name}`");
            let value = cursor.value()?;
            if values.insert(name, value).is_some() {
                return Err(cursor.wrong("it is there twice"));
            }
        }
        let alignment = match values.get("general.alignment") {
            None => ALIGNMENT,
            Some(&MetadataValue::Number(x)) if (8.0..=65536.0).contains(&x) && (x as u64).is_power_of_two() => x as u64,
            Some(_) => return Err(Error::format(path, "value `general.alignment`", "expected a power of two")),
        };
        let mut listed = Vec::new();
        for at in 0..tensors {
            cursor.part = format!("tensor {at}");
            let name = cursor.text()?;
            cursor.part = format!("tensor `{name}`");
            let axes = cursor.u32()?;
            if axes > MOST_AXES {
                return Err(cursor.wrong(format!("it has {axes} axes")));
            }
            let mut shape = Vec::new();
            for _ in 0..axes {
                let axis = cursor.u64()?;
                shape.push(usize::try_from(axis).map_err(|_| cursor.wrong(format!("an axis of {axis}")))?);
            }
            let kind = cursor.u32()?;
            let Some(storage) = BlockType::of(kind) else {
                let known = "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 or one of Q2_K to Q8_K";
                return Err(cursor.wrong(format!("it is stored as type {kind}, expected {known}")));
            };
            let offset = cursor.u64()?;
            if !offset.is_multiple_of(alignment) {
                return Err(cursor.wrong(format!("it begins at {offset}, which is no multiple of {alignment}")));
            }
            let width = shape.first().copied().unwrap_or(1);
            let numbers = shape.iter().try_fold(1usize, |count, &axis| count.checked_mul(axis));
            let bytes = numbers.filter(|_| width.is_multiple_of(storage.together())).and_then(|n| storage.bytes(n));
            let Some(bytes) = bytes else {
                return Err(cursor.wrong(format!("its shape {shape:?} cannot be stored as {storage}")));
            };
            shape.reverse();
            listed.push((name, shape, storage, offset, bytes));
        }
        let start = (cursor.at as u64).next_multiple_of(alignment);
        let mut entries = BTreeMap::new();
        for (name, shape, storage, offset, size) in listed {
            let part = format!("tensor `{name}`");
            let from = start.checked_add(offset).and_then(|from| usize::try_from(from).ok());
            let from = from.filter(|&from| from.checked_add(size).is_some_and(|end| end <= bytes.len()));
            let Some(from) = from else {
                let what = format!("its {size} bytes at {offset} go beyond the file of {} bytes", bytes.len());
                return Err(Error::format(path, part, what));
            };
            if entries.insert(name, GgufTensor { shape, storage, from, bytes: size }).is_some() {
                return Err(Error::format(path, part, "it is there twice"));
            }
        }
        Ok(Gguf { path: path.to_owned(), values, entries, bytes })
    }

    /// The path it was opened with.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The metadata, by name.
    pub fn values(&self) -> &BTreeMap<String, MetadataValue> {
        &self.values
    }

    /// Names of all tensors, in alphabetical order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// The shape of a tensor, row-major.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.entries.get(name).map(|entry| &entry.shape[..])
    }

    /// The storage type of a tensor.
    pub fn storage(&self, name: &str) -> Option<String> {
        self.entries.get(name).map(|entry| entry.storage.to_string())
    }

    /// Dequantizes a tensor, row-major.
    ///
    /// # Errors
    /// If there is no tensor of that name.
    pub fn read(&self, name: &str) -> Result<Vec<f32>> {
        match self.entries.get(name) {
            Some(entry) => Ok(entry.storage.widen(&self.bytes[entry.from..][..entry.bytes])),
            None => Err(Error::format(&self.path, format!("tensor `{name}`"), "it is missing")),
        }
    }

    /// A matrix in its quantized blocks, with its rows permuted, if products of a few rows can read its type.
    pub fn quantized(&self, name: &str, order: impl Fn(usize) -> usize) -> Option<QuantizedMatrix> {
        let entry = self.entries.get(name)?;
        let &[_, width] = &entry.shape[..] else { return None };
        entry.storage.quantized(&self.bytes[entry.from..][..entry.bytes], width, &order)
    }

    fn missing(&self, name: &str, expected: &str) -> Error {
        let what =
            if self.values.contains_key(name) { format!("it is not {expected}") } else { "it is missing".into() };
        Error::format(&self.path, format!("value `{name}`"), what)
    }

    /// A required whole number.
    ///
    /// # Errors
    /// If it is missing or of another type.
    pub fn whole(&self, name: &str) -> Result<usize> {
        match self.values.get(name) {
            Some(&MetadataValue::Number(x)) if (0.0..=9e15).contains(&x) && x.fract() == 0.0 => Ok(x as usize),
            _ => Err(self.missing(name, "a whole number")),
        }
    }

    /// A required number.
    ///
    /// # Errors
    /// If it is missing or of another type.
    pub fn number(&self, name: &str) -> Result<f64> {
        match self.values.get(name) {
            Some(&MetadataValue::Number(x)) => Ok(x),
            _ => Err(self.missing(name, "a number")),
        }
    }

    /// A required string.
    ///
    /// # Errors
    /// If it is missing or of another type.
    pub fn text(&self, name: &str) -> Result<&str> {
        match self.values.get(name) {
            Some(MetadataValue::Text(text)) => Ok(text),
            _ => Err(self.missing(name, "a text")),
        }
    }

    /// A required list of strings.
    ///
    /// # Errors
    /// If it is missing or of another type.
    pub fn texts(&self, name: &str) -> Result<&[String]> {
        match self.values.get(name) {
            Some(MetadataValue::Texts(texts)) => Ok(texts),
            _ => Err(self.missing(name, "a list of texts")),
        }
    }
}
