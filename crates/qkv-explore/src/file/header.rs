//! Tensors of a recording as the explorer needs them, on top of [`Reader`] of `qkv-models`, which checks the header. A
//! tensor is read in pieces: a recording of a hundred thousand tokens takes hundreds of megabytes, and is held in
//! memory only once.

use half::{bf16, f16};
use qkv::Tensor;
use qkv_models::files::safetensors::{Dtype, Reader, TensorInfo};
use qkv_models::{Error, Result};
use std::collections::BTreeMap;
use std::path::Path;

/// A file whose header has been checked.
#[derive(Debug)]
pub(super) struct File(Reader);

/// Bytes of a tensor that are converted at a time.
const PIECE: u64 = 1 << 20;

impl File {
    pub fn open(path: &Path) -> Result<File> {
        Ok(Reader::open(path).map(File)?)
    }

    pub fn metadata(&self, key: &str) -> Option<String> {
        self.0.metadata(key).map(str::to_owned)
    }

    pub fn has(&self, name: &str) -> bool {
        self.0.info(name).is_some()
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.names()
    }

    pub fn shape(&self, name: &str) -> Result<&[usize]> {
        Ok(&self.info(name)?.shape)
    }

    fn info(&self, name: &str) -> Result<&TensorInfo> {
        self.0.info(name).ok_or_else(|| self.wrong_tensor(name, "it is missing"))
    }

    pub fn wrong(&self, part: &str, what: impl Into<String>) -> Error {
        Error::format(self.0.path(), part, what)
    }

    fn wrong_tensor(&self, name: &str, what: impl Into<String>) -> Error {
        self.wrong(&format!("tensor `{name}`"), what)
    }

    /// The shape, padded to four axes by leading axes of 1.
    pub fn axes(&self, name: &str) -> Result<[usize; 4]> {
        let shape = self.shape(name)?;
        if shape.len() > 4 {
            return Err(self.wrong_tensor(name, format!("its shape is {shape:?}, expected at most four axes")));
        }
        let mut axes = [1; 4];
        axes[4 - shape.len()..].copy_from_slice(shape);
        Ok(axes)
    }

    /// Part of a tensor's numbers, in order, each converted from its bytes by `number`.
    fn numbers<N>(
        &mut self,
        name: &str,
        range: std::ops::Range<u64>,
        number: fn(Dtype, &[u8]) -> Option<N>,
    ) -> Result<Vec<N>> {
        let dtype = self.info(name)?.dtype;
        let wrong_type = format!("its type is {dtype}, which does not fit here");
        let each = (dtype.bitsize() / 8).max(1) as u64;
        let mut out = Vec::with_capacity((range.end - range.start) as usize);
        let (mut from, end) = (range.start * each, range.end * each);
        while from < end {
            let to = end.min(from + PIECE);
            for bytes in self.0.read_range(name, from..to)?.chunks_exact(each as usize) {
                out.push(number(dtype, bytes).ok_or_else(|| self.wrong_tensor(name, wrong_type.as_str()))?);
            }
            from = to;
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

    /// One entry along the first of four axes; all of them for `usize::MAX`.
    fn entry(&mut self, name: &str, at: usize) -> Result<(Vec<f32>, [usize; 4])> {
        let [batch, heads, length, width] = self.axes(name)?;
        // Only values may have no width: a caller that wants only weights needs no values.
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

fn float(dtype: Dtype, bytes: &[u8]) -> Option<f32> {
    Some(match dtype {
        Dtype::F32 => f32::from_le_bytes(bytes.try_into().ok()?),
        Dtype::F64 => f64::from_le_bytes(bytes.try_into().ok()?) as f32,
        Dtype::F16 => f16::from_le_bytes(bytes.try_into().ok()?).to_f32(),
        Dtype::BF16 => bf16::from_le_bytes(bytes.try_into().ok()?).to_f32(),
        _ => return None,
    })
}

fn integer(dtype: Dtype, bytes: &[u8]) -> Option<i64> {
    Some(match dtype {
        Dtype::I64 => i64::from_le_bytes(bytes.try_into().ok()?),
        Dtype::I32 => i64::from(i32::from_le_bytes(bytes.try_into().ok()?)),
        Dtype::U8 | Dtype::BOOL => i64::from(*bytes.first()?),
        _ => return None,
    })
}

/// Collects tensors to write. The same tensors give the same bytes; the crate `safetensors` does not promise that for
/// metadata.
#[derive(Default)]
pub(crate) struct Writer {
    entries: BTreeMap<String, TensorInfo>,
    data: Vec<u8>,
}

impl Writer {
    fn entry(&mut self, name: String, dtype: Dtype, shape: &[usize], bytes: impl Iterator<Item = u8>) {
        let from = self.data.len() as u64;
        self.data.extend(bytes);
        let data_offsets = (from, self.data.len() as u64);
        self.entries.insert(name, TensorInfo { dtype, shape: shape.to_vec(), data_offsets });
    }

    pub fn floats(&mut self, name: String, shape: &[usize], values: &[f32]) {
        self.entry(name, Dtype::F32, shape, values.iter().flat_map(|x| x.to_le_bytes()));
    }

    pub fn integers(&mut self, name: String, shape: &[usize], values: impl Iterator<Item = i64>) {
        self.entry(name, Dtype::I64, shape, values.flat_map(i64::to_le_bytes));
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
