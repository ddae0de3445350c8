//! Writes output tensors as a safetensors file, one after the other, so that no second copy of them is made.

use crate::atomic_file::{OutputPath, unwritable};
use crate::dtype::Stored;
use crate::failure::Failure;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use std::io::{self, Write};

/// Elements encoded at a time.
const PORTION: usize = 1 << 14;

/// The elements of a tensor, of any type that a file can hold.
pub(crate) trait Elements {
    fn dtype(&self) -> Dtype;
    fn count(&self) -> usize;
    fn write(&self, to: &mut dyn Write) -> io::Result<()>;
}

impl<T: Stored> Elements for Vec<T> {
    fn dtype(&self) -> Dtype {
        T::DTYPE
    }

    fn count(&self) -> usize {
        self.len()
    }

    fn write(&self, to: &mut dyn Write) -> io::Result<()> {
        let mut bytes = Vec::new();
        for portion in self.chunks(PORTION) {
            bytes.clear();
            portion.iter().for_each(|element| element.put(&mut bytes));
            to.write_all(&bytes)?;
        }
        Ok(())
    }
}

/// A tensor to write.
pub(crate) struct OutputTensor {
    pub name: String,
    pub shape: Vec<usize>,
    pub elements: Box<dyn Elements>,
}

/// Writes the file, complete or not at all.
pub(crate) fn write(output: &OutputPath, tensors: Vec<OutputTensor>) -> Result<(), Failure> {
    let mut file = output.create()?;
    serialize(tensors, &mut file).map_err(|error| unwritable(output.path(), error))?;
    file.commit()
}

fn serialize(mut tensors: Vec<OutputTensor>, file: &mut dyn Write) -> io::Result<()> {
    // The order of the format: by decreasing alignment, so that every tensor is aligned, then by name.
    tensors.sort_by(|a, b| b.elements.dtype().cmp(&a.elements.dtype()).then_with(|| a.name.cmp(&b.name)));
    let mut end = 0;
    let entries = tensors.iter().map(|OutputTensor { name, shape, elements }| {
        let start = end;
        end += elements.count() * elements.dtype().bitsize() / 8;
        let info = TensorInfo { dtype: elements.dtype(), shape: shape.clone(), data_offsets: (start, end) };
        (name.clone(), info)
    });
    let metadata = Metadata::new(None, entries.collect()).map_err(io::Error::other)?;
    let mut header = serde_json::to_vec(&metadata)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)?;
    for tensor in &tensors {
        tensor.elements.write(file)?;
    }
    Ok(())
}
