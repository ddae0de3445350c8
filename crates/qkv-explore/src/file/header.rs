//! A `.safetensors` file, read a tensor at a time: a recording of a hundred thousand tokens is hundreds of megabytes, and is in
//! memory once. The header is checked before anything that it claims is believed.

use half::{bf16, f16};
use qkv::Tensor;
use qkv_models::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// The largest header that is read.
const MOST: u64 = 100 << 20;

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: [u64; 2],
}

/// A file whose header has been read.
#[derive(Debug)]
pub(super) struct File {
    path: PathBuf,
    file: std::fs::File,
    start: u64,
    entries: BTreeMap<String, Entry>,
    metadata: BTreeMap<String, String>,
}

fn size_of(dtype: &str) -> Option<u64> {
    match dtype {
        "F64" | "I64" => Some(8),
        "F32" | "I32" => Some(4),
        "F16" | "BF16" => Some(2),
        "U8" | "BOOL" => Some(1),
        _ => None,
    }
}

impl File {
    pub fn open(path: &Path) -> Result<File> {
        let wrong = |what: String| Error::format(path, "header", what);
        let mut file = std::fs::File::open(path).map_err(|e| Error::file("open", path, e))?;
        let length = file.metadata().map_err(|e| Error::file("read", path, e))?.len();
        let mut count = [0; 8];
        file.read_exact(&mut count).map_err(|_| wrong("it has fewer than 8 bytes".into()))?;
        let count = u64::from_le_bytes(count);
        if count > MOST || count > length - 8 {
            return Err(wrong(format!("it claims {count} bytes, the file has {}", length - 8)));
        }
        let mut json = vec![0; count as usize];
        file.read_exact(&mut json).map_err(|e| Error::file("read", path, e))?;
        let mut all: BTreeMap<String, serde_json::Value> =
            serde_json::from_slice(&json).map_err(|e| wrong(e.to_string()))?;
        let metadata = match all.remove("__metadata__") {
            Some(found) => serde_json::from_value(found).map_err(|e| wrong(format!("`__metadata__`: {e}")))?,
            None => BTreeMap::new(),
        };
        let (start, mut entries) = (8 + count, BTreeMap::new());
        for (name, value) in all {
            let wrong = |what: String| Error::format(path, format!("tensor `{name}`"), what);
            let entry: Entry = serde_json::from_value(value).map_err(|e| wrong(e.to_string()))?;
            let [from, to] = entry.data_offsets;
            let each = size_of(&entry.dtype).ok_or_else(|| wrong(format!("its type is {}", entry.dtype)))?;
            let numbers = entry.shape.iter().try_fold(1u64, |n, &axis| n.checked_mul(axis as u64));
            let bytes = numbers.and_then(|n| n.checked_mul(each));
            if from > to || to > length - start || bytes != Some(to - from) {
                return Err(wrong(format!("bytes {from}..{to} do not hold {:?} of {}", entry.shape, entry.dtype)));
            }
            entries.insert(name, entry);
        }
        let mut places: Vec<([u64; 2], &String)> =
            entries.iter().map(|(name, entry)| (entry.data_offsets, name)).collect();
        places.sort();
        let shared = places.windows(2).find(|two| two[1].0[0] < two[0].0[1]);
        if let Some([(_, one), (_, other)]) = shared {
            return Err(wrong(format!("`{one}` and `{other}` share bytes")));
        }
        Ok(File { path: path.to_owned(), file, start, entries, metadata })
    }

    pub fn metadata(&self, key: &str) -> Option<String> {
        self.metadata.get(key).cloned()
    }

    pub fn has(&self, name: &str) -> bool {
        self.entries.contains_key(name)
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    pub fn shape(&self, name: &str) -> Result<&[usize]> {
        let missing = || Error::format(&self.path, format!("tensor `{name}`"), "it is missing");
        Ok(&self.entries.get(name).ok_or_else(missing)?.shape)
    }

    pub fn wrong(&self, part: &str, what: impl Into<String>) -> Error {
        Error::format(&self.path, part, what)
    }

    fn wrong_tensor(&self, name: &str, what: impl Into<String>) -> Error {
        self.wrong(&format!("tensor `{name}`"), what)
    }

    /// The shape with axes of 1 in front, up to four.
    pub fn axes(&self, name: &str) -> Result<[usize; 4]> {
        let shape = self.shape(name)?;
        if shape.len() > 4 {
            return Err(self.wrong_tensor(name, format!("its shape is {shape:?}, expected at most four axes")));
        }
        let mut axes = [1; 4];
        axes[4 - shape.len()..].copy_from_slice(shape);
        Ok(axes)
    }

    /// Part of a tensor's numbers, in order, each as what `number` makes of its bytes.
    fn numbers<N>(
        &mut self,
        name: &str,
        range: std::ops::Range<u64>,
        number: fn(&str, &[u8]) -> Option<N>,
    ) -> Result<Vec<N>> {
        self.shape(name)?;
        let entry = self.entries[name].clone();
        let each = size_of(&entry.dtype).expect("checked");
        let mut out = Vec::with_capacity((range.end - range.start) as usize);
        let from = self.start + entry.data_offsets[0] + range.start * each;
        let refused = |e| Error::file("read", &self.path, e);
        self.file.seek(SeekFrom::Start(from)).map_err(refused)?;
        let mut part = vec![0; 1 << 20];
        let mut left = (range.end - range.start) * each;
        while left > 0 {
            let some = left.min(part.len() as u64) as usize;
            self.file.read_exact(&mut part[..some]).map_err(refused)?;
            for bytes in part[..some].chunks_exact(each as usize) {
                let what = || format!("its type is {}, which is not what stands there", entry.dtype);
                out.push(number(&entry.dtype, bytes).ok_or_else(|| self.wrong_tensor(name, what()))?);
            }
            left -= some as u64;
        }
        Ok(out)
    }

    fn count(&self, name: &str) -> Result<u64> {
        Ok(self.shape(name)?.iter().map(|&axis| axis as u64).product())
    }

    pub fn floats(&mut self, name: &str) -> Result<Vec<f32>> {
        let all = 0..self.count(name)?;
        self.numbers(name, all, float)
    }

    pub fn integers(&mut self, name: &str) -> Result<Vec<i64>> {
        let all = 0..self.count(name)?;
        self.numbers(name, all, integer)
    }

    /// One entry of the first of four axes; `usize::MAX` for all of them.
    fn entry(&mut self, name: &str, at: usize) -> Result<(Vec<f32>, [usize; 4])> {
        let [batch, heads, length, width] = self.axes(name)?;
        // Only values may have no width: where weights alone are wanted.
        let is_values = name == "v" || name.ends_with(".v") || name.ends_with("/v");
        if [batch, heads, length].contains(&0) || (width == 0 && !is_values) {
            return Err(self.wrong_tensor(name, format!("its shape is {:?}, with nothing in it", self.shape(name)?)));
        }
        if at == usize::MAX {
            return Ok((self.floats(name)?, [batch, heads, length, width]));
        }
        if at >= batch {
            return Err(self.wrong_tensor(name, format!("it has {batch} sequences, none has number {at}")));
        }
        let each = self.count(name)? / batch as u64;
        let numbers = self.numbers(name, at as u64 * each..(at as u64 + 1) * each, float)?;
        Ok((numbers, [1, heads, length, width]))
    }

    /// One sequence of a tensor with up to four axes, `[1, H, L, D]`; `usize::MAX` for the whole.
    pub fn four(&mut self, name: &str, sequence: usize) -> Result<Tensor<f32, 4>> {
        let (data, shape) = self.entry(name, sequence)?;
        Ok(Tensor::new(data, shape)?)
    }

    /// One sequence of weights or of a log-sum-exp, `[H, N, M]`, from up to four axes.
    pub fn three(&mut self, name: &str, sequence: usize) -> Result<Tensor<f32, 3>> {
        let (data, [_, heads, n, m]) = self.entry(name, sequence)?;
        Ok(Tensor::new(data, [heads, n, m])?)
    }

    /// One sequence of a tensor `[B, H, N]`, `[H, N]` or `[N]`.
    pub fn rows(&mut self, name: &str, sequence: usize) -> Result<Vec<f32>> {
        let shape = self.shape(name)?;
        if shape.len() > 3 {
            return Err(self.wrong_tensor(name, format!("its shape is {shape:?}, expected [B, H, N]")));
        }
        let batch = if shape.len() == 3 { shape[0] } else { 1 };
        if sequence >= batch {
            return Err(self.wrong_tensor(name, format!("it has {batch} sequences, none has number {sequence}")));
        }
        let each = self.count(name)? / batch as u64;
        self.numbers(name, sequence as u64 * each..(sequence as u64 + 1) * each, float)
    }
}

fn float(dtype: &str, bytes: &[u8]) -> Option<f32> {
    Some(match dtype {
        "F32" => f32::from_le_bytes(bytes.try_into().ok()?),
        "F64" => f64::from_le_bytes(bytes.try_into().ok()?) as f32,
        "F16" => f16::from_le_bytes(bytes.try_into().ok()?).to_f32(),
        "BF16" => bf16::from_le_bytes(bytes.try_into().ok()?).to_f32(),
        _ => return None,
    })
}

fn integer(dtype: &str, bytes: &[u8]) -> Option<i64> {
    Some(match dtype {
        "I64" => i64::from_le_bytes(bytes.try_into().ok()?),
        "I32" => i64::from(i32::from_le_bytes(bytes.try_into().ok()?)),
        "U8" | "BOOL" => i64::from(*bytes.first()?),
        _ => return None,
    })
}

/// Collects tensors to write: the same give the same bytes, which the crate `safetensors` does not promise of metadata.
#[derive(Default)]
pub(crate) struct Writer {
    entries: BTreeMap<String, Entry>,
    data: Vec<u8>,
}

impl Writer {
    fn entry(&mut self, name: String, dtype: &str, shape: &[usize], bytes: impl Iterator<Item = u8>) {
        let from = self.data.len() as u64;
        self.data.extend(bytes);
        let data_offsets = [from, self.data.len() as u64];
        self.entries.insert(name, Entry { dtype: dtype.into(), shape: shape.to_vec(), data_offsets });
    }

    pub fn floats(&mut self, name: String, shape: &[usize], values: &[f32]) {
        self.entry(name, "F32", shape, values.iter().flat_map(|x| x.to_le_bytes()));
    }

    pub fn integers(&mut self, name: String, shape: &[usize], values: impl Iterator<Item = i64>) {
        self.entry(name, "I64", shape, values.flat_map(i64::to_le_bytes));
    }

    pub fn bytes(self, metadata: &[(&str, &str)]) -> Vec<u8> {
        let mut header = serde_json::Map::new();
        let metadata: BTreeMap<_, _> = metadata.iter().copied().collect();
        header.insert("__metadata__".into(), serde_json::to_value(metadata).expect("plain values"));
        for (name, entry) in self.entries {
            header.insert(name, serde_json::to_value(entry).expect("plain values"));
        }
        let mut json = serde_json::to_vec(&header).expect("plain values");
        // Data starts at a multiple of eight.
        json.resize(json.len().next_multiple_of(8), b' ');
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend(json);
        bytes.extend(self.data);
        bytes
    }
}
