//! A `.safetensors` file to be written: its header, and its tensors in the order of the file. Values are narrowed in
//! chunks as they are written, so that writing a model takes no copy of its tensors; only 8-bit rows are quantized
//! beforehand.

use super::{NamedTensor, SCALE, Storage, rows};
use crate::{Error, Result};
use qkv_simd::blocks::BlockType;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use std::collections::{BTreeMap, HashMap};
use std::io::Write;

/// A file to be written.
pub struct NewFile<'a> {
    header: Vec<u8>,
    tensors: Vec<StoredTensor<'a>>,
}

/// A tensor with the type that it has in the file.
struct StoredTensor<'a> {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    values: Values<'a>,
}

enum Values<'a> {
    /// Rounded when they are written.
    Plain(&'a [f32]),
    Bytes(Vec<u8>),
}

impl StoredTensor<'_> {
    fn len(&self) -> usize {
        match (&self.values, self.dtype) {
            (Values::Bytes(bytes), _) => bytes.len(),
            (Values::Plain(values), Dtype::F32) => 4 * values.len(),
            (Values::Plain(values), _) => 2 * values.len(),
        }
    }

    fn write(&self, to: &mut impl Write) -> std::io::Result<()> {
        let values = match &self.values {
            Values::Plain(values) => values,
            Values::Bytes(bytes) => return to.write_all(bytes),
        };
        let stored = match self.dtype {
            Dtype::F16 => BlockType::F16,
            Dtype::BF16 => BlockType::Bf16,
            _ => BlockType::F32,
        };
        values.chunks(CHUNK).try_for_each(|values| to.write_all(&stored.narrow(values).expect("a plain type")))
    }
}

/// Number of values that are rounded and written at a time.
const CHUNK: usize = 1 << 14;

/// The length of the header is a multiple of this, and is itself stored in as many bytes.
const WORD: usize = 8;

impl<'a> NewFile<'a> {
    /// A file with these tensors. Their order does not change it.
    pub fn of(tensors: &[NamedTensor<'a>], storage: Storage) -> Result<NewFile<'a>> {
        let mut parts: BTreeMap<String, StoredTensor<'a>> = BTreeMap::new();
        let mut put = |name: String, dtype: Dtype, shape: &[usize], values: Values<'a>| {
            let tensor = StoredTensor { name: name.clone(), dtype, shape: shape.to_vec(), values };
            match parts.insert(name.clone(), tensor) {
                Some(_) => Err(Error::invalid(format!("tensor `{name}` is there twice"))),
                None => Ok(()),
            }
        };
        for &NamedTensor { name, shape, values } in tensors {
            let wrong = |what: String| Error::invalid(format!("tensor `{name}` {what}"));
            let size = shape.iter().try_fold(1usize, |size, &axis| size.checked_mul(axis));
            if size != Some(values.len()) {
                return Err(wrong(format!("has shape {shape:?} and {} values", values.len())));
            }
            let (dtype, stored) = match (storage, shape) {
                (Storage::F16, _) => (Dtype::F16, Values::Plain(values)),
                (Storage::Bf16, _) => (Dtype::BF16, Values::Plain(values)),
                (Storage::Rows8, &[count, width]) => {
                    let (bytes, scales) = rows::narrow(values, count, width)
                        .map_err(|row| wrong(format!("has a value in row {row} that is not finite")))?;
                    let scales = scales.iter().flat_map(|x| x.to_le_bytes()).collect();
                    put(format!("{name}{SCALE}"), Dtype::F32, &[count], Values::Bytes(scales))?;
                    (Dtype::I8, Values::Bytes(bytes))
                }
                (Storage::F32 | Storage::Rows8, _) => (Dtype::F32, Values::Plain(values)),
            };
            put(name.to_owned(), dtype, shape, stored)?;
        }
        // As the format's own library orders them: the widest type first, then by name.
        let mut tensors: Vec<StoredTensor<'a>> = parts.into_values().collect();
        tensors.sort_by(|a, b| b.dtype.cmp(&a.dtype).then(a.name.cmp(&b.name)));
        let header = header(&tensors)?;
        Ok(NewFile { header, tensors })
    }

    /// Size of the file in bytes.
    pub fn byte_len(&self) -> usize {
        WORD + self.header.len() + self.tensors.iter().map(StoredTensor::len).sum::<usize>()
    }

    /// Writes the file.
    pub fn write(&self, to: &mut impl Write) -> std::io::Result<()> {
        to.write_all(&(self.header.len() as u64).to_le_bytes())?;
        to.write_all(&self.header)?;
        self.tensors.iter().try_for_each(|tensor| tensor.write(to))?;
        to.flush()
    }
}

/// Names, types, shapes and offsets of the tensors, in JSON, padded with spaces.
fn header(tensors: &[StoredTensor<'_>]) -> Result<Vec<u8>> {
    let broken = |what: String| Error::invalid(format!("the tensors cannot be written: {what}"));
    let mut end = 0;
    let mut infos = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        let start = end;
        end += tensor.len();
        let info = TensorInfo { dtype: tensor.dtype, shape: tensor.shape.clone(), data_offsets: (start, end) };
        infos.push((tensor.name.clone(), info));
    }
    // A map with more entries would be written in a different order each time.
    let format = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let metadata = Metadata::new(Some(format), infos).map_err(|e| broken(e.to_string()))?;
    let mut json = serde_json::to_vec(&metadata).map_err(|e| broken(e.to_string()))?;
    json.resize(json.len().next_multiple_of(WORD), b' ');
    Ok(json)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::tensors::to_bytes;
    use half::{bf16, f16};
    use safetensors::tensor::TensorView;

    #[test]
    fn the_bytes_are_those_of_the_formats_own_library() {
        let long: Vec<f32> = (0..CHUNK + 3).map(|at| at as f32 / 7.0 - 900.0).collect();
        let named = [
            NamedTensor { name: "b", shape: &[1, 3], values: &[0.5, -2.0, 8.0] },
            NamedTensor { name: "a", shape: &[long.len()], values: &long },
            NamedTensor { name: "none", shape: &[0, 4], values: &[] },
        ];
        type Narrow = fn(f32) -> Vec<u8>;
        let kinds: [(Storage, Dtype, Narrow); 3] = [
            (Storage::F32, Dtype::F32, |x| x.to_le_bytes().to_vec()),
            (Storage::F16, Dtype::F16, |x| f16::from_f32(x).to_le_bytes().to_vec()),
            (Storage::Bf16, Dtype::BF16, |x| bf16::from_f32(x).to_le_bytes().to_vec()),
        ];
        for (storage, dtype, narrow) in kinds {
            let bytes = named.map(|tensor| tensor.values.iter().flat_map(|&x| narrow(x)).collect::<Vec<u8>>());
            let views = named.iter().zip(&bytes);
            let views: Vec<_> = views
                .map(|(tensor, bytes)| {
                    (tensor.name, TensorView::new(dtype, tensor.shape.to_vec(), bytes).expect("a view"))
                })
                .collect();
            let format = HashMap::from([("format".to_owned(), "pt".to_owned())]);
            let expected = safetensors::serialize(views, Some(format)).expect("bytes");
            assert!(to_bytes(&named, storage).expect("bytes") == expected, "{storage:?}");
        }
    }
}
