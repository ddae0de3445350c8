//! The tensors of a checkpoint: one `.safetensors` file, several with an index, a GGUF file, or a PyTorch checkpoint.

use super::folder::{self, WEIGHTS, WEIGHTS_INDEX};
use super::gguf::Gguf;
use super::input;
use super::tensors::TensorFile;
use super::torch::TorchFile;
use crate::{Error, Result};
use qkv_simd::quantized::QuantizedMatrix;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Component, Path};

/// The largest number of files in a checkpoint.
const MOST_FILES: usize = 4096;

/// The tensors of a checkpoint.
#[derive(Clone, Debug)]
pub enum Weights {
    /// In one file.
    File(TensorFile),
    /// In several files; each tensor with the index of its file.
    Shards(Vec<TensorFile>, BTreeMap<String, usize>),
    /// In a GGUF file.
    Gguf(Gguf),
    /// In a PyTorch checkpoint.
    Torch(TorchFile),
}

#[derive(Deserialize)]
struct ShardIndex {
    weight_map: BTreeMap<String, String>,
}

impl Weights {
    /// Opens the weights of a folder: its one file, or the files that its index names.
    ///
    /// # Errors
    /// Names the file, and the tensor that is missing or wrong.
    pub fn of_folder(folder: &Path) -> Result<Weights> {
        let index = folder.join(WEIGHTS_INDEX);
        if folder.join(WEIGHTS).exists() || !index.exists() {
            return Ok(Weights::File(TensorFile::open(folder.join(WEIGHTS))?));
        }
        let bytes = input::read(&index, input::TOKENIZER_MAX)?;
        let ShardIndex { weight_map } = folder::parse_json(&bytes, &index)?;
        let (mut files, mut opened, mut places) = (Vec::new(), BTreeMap::new(), BTreeMap::new());
        for (tensor, name) in weight_map {
            let wrong = |what: String| Error::format(&index, format!("tensor `{tensor}`"), what);
            // A path into another folder, or a file of another kind, is not part of this checkpoint.
            let plain = matches!(Path::new(&name).components().collect::<Vec<_>>()[..], [Component::Normal(_)]);
            if !plain || !name.ends_with(".safetensors") {
                return Err(wrong(format!("it lies in `{name}`, which is no `.safetensors` file beside the index")));
            }
            let at = match opened.get(&name) {
                Some(&at) => at,
                None if files.len() >= MOST_FILES => return Err(wrong(format!("more than {MOST_FILES} files"))),
                None => {
                    let path = folder.join(&name);
                    if !path.is_file() {
                        return Err(wrong(format!("its file `{name}` is missing")));
                    }
                    files.push(TensorFile::open(path)?);
                    opened.insert(name.clone(), files.len() - 1);
                    files.len() - 1
                }
            };
            if files[at].shape(&tensor).is_none() {
                return Err(wrong(format!("`{name}` does not have it")));
            }
            places.insert(tensor, at);
        }
        if places.is_empty() {
            return Err(Error::format(&index, "field `weight_map`", "it names no tensor"));
        }
        Ok(Weights::Shards(files, places))
    }

    /// Names of all tensors, in alphabetical order.
    pub fn names(&self) -> Vec<&str> {
        match self {
            Weights::File(file) => file.names().collect(),
            Weights::Shards(_, places) => places.keys().map(String::as_str).collect(),
            Weights::Gguf(file) => file.names().collect(),
            Weights::Torch(file) => file.names().collect(),
        }
    }

    /// The file of a tensor, or the first file.
    fn file(&self, name: &str) -> Option<&TensorFile> {
        match self {
            Weights::File(file) => Some(file),
            Weights::Shards(files, places) => places.get(name).map(|&at| &files[at]).or(files.first()),
            Weights::Gguf(_) | Weights::Torch(_) => None,
        }
    }

    /// Whether there is a tensor of that name.
    pub fn has(&self, name: &str) -> bool {
        self.shape(name).is_some()
    }

    /// The shape of a tensor.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        match self {
            Weights::Gguf(file) => file.shape(name),
            Weights::Torch(file) => file.shape(name),
            _ => self.file(name).and_then(|file| file.shape(name)),
        }
    }

    /// The storage type of a tensor.
    pub fn storage(&self, name: &str) -> Option<String> {
        match self {
            Weights::Gguf(file) => file.storage(name),
            Weights::Torch(file) => file.storage(name),
            _ => self.file(name).and_then(|file| file.storage(name)),
        }
    }

    /// Reads a tensor that must have this shape.
    ///
    /// # Errors
    /// Names the file and the tensor.
    pub fn read_shaped(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        if let Some(found) = self.shape(name)
            && found != shape
        {
            return Err(self.wrong(name, format!("its shape is {found:?}, expected {shape:?}")));
        }
        match self {
            Weights::Gguf(file) => file.read(name),
            Weights::Torch(file) => file.read(name),
            _ => self.file(name).map_or_else(|| Err(self.wrong(name, "it is missing")), |file| file.read(name)),
        }
    }

    /// A matrix in its quantized blocks, with its rows permuted, if it is stored in blocks that products of a few rows
    /// can read.
    pub fn quantized(&self, name: &str, order: impl Fn(usize) -> usize) -> Option<QuantizedMatrix> {
        match self {
            Weights::Gguf(file) => file.quantized(name, order),
            _ => None,
        }
    }

    /// An error about a tensor.
    pub fn wrong(&self, name: &str, what: impl Into<String>) -> Error {
        let path = match self {
            Weights::Gguf(file) => file.path(),
            Weights::Torch(file) => file.path(),
            _ => self.file(name).map_or(Path::new(WEIGHTS_INDEX), TensorFile::path),
        };
        Error::format(path, format!("tensor `{name}`"), what)
    }

    /// Number of values in all tensors.
    pub fn numbers(&self) -> usize {
        let count = |name: &str| self.shape(name).map_or(0, |shape| shape.iter().product::<usize>());
        self.names().into_iter().map(count).sum()
    }
}
