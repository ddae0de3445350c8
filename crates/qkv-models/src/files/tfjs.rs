//! Models of TensorFlow.js: a `model.json` with the layers and a list of tensors, and files beside it that hold their
//! values one after the other. Only f32 is read.

use super::{folder, input};
use crate::{Error, Result};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

/// The file that describes a model.
pub const MODEL: &str = "model.json";
/// The largest number of values in a model, of files and of axes.
const MOST_VALUES: usize = 1 << 28;
const MOST_FILES: usize = 4096;
const MOST_AXES: usize = 8;

/// The tensors of a model, with its layers.
#[derive(Clone, Debug)]
pub struct TfjsModel {
    path: PathBuf,
    /// `modelTopology`.
    pub topology: Value,
    tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
}

#[derive(Deserialize)]
struct Description {
    #[serde(rename = "modelTopology", default)]
    topology: Value,
    #[serde(rename = "weightsManifest")]
    manifest: Vec<Group>,
}

#[derive(Deserialize)]
struct Group {
    paths: Vec<String>,
    weights: Vec<Described>,
}

#[derive(Deserialize)]
struct Described {
    name: String,
    shape: Vec<usize>,
    dtype: String,
    #[serde(default)]
    quantization: Value,
}

impl TfjsModel {
    /// Reads the model in a folder.
    ///
    /// # Errors
    /// Names the file, and the tensor that is wrong.
    pub fn open(folder: &Path) -> Result<TfjsModel> {
        let path = folder.join(MODEL);
        let Description { topology, manifest } = folder::parse_json(&input::read(&path, input::SETTINGS_MAX)?, &path)?;
        let (mut tensors, mut files, mut all) = (BTreeMap::new(), 0, 0usize);
        for Group { paths, weights } in manifest {
            // What the tensors take is known before a file is read.
            let mut sizes = Vec::with_capacity(weights.len());
            for Described { name, shape, dtype, quantization } in &weights {
                let wrong = |what: String| Error::format(&path, format!("tensor `{name}`"), what);
                if dtype != "float32" || !quantization.is_null() {
                    return Err(wrong(format!("it is stored as {dtype}, quantized or not, expected plain float32")));
                }
                let size = shape.iter().try_fold(1usize, |all, &axis| all.checked_mul(axis));
                let size = size.filter(|&size| shape.len() <= MOST_AXES && size <= MOST_VALUES);
                let size = size.ok_or_else(|| wrong(format!("its shape {shape:?} is larger than any that is read")))?;
                all = all.saturating_add(size);
                sizes.push(size);
            }
            files += paths.len();
            if all > MOST_VALUES || files > MOST_FILES {
                let what = format!("it has {all} values in {files} files, more than {MOST_VALUES} in {MOST_FILES}");
                return Err(Error::format(&path, "field `weightsManifest`", what));
            }
            let expected = 4 * sizes.iter().sum::<usize>();
            let mut bytes = Vec::new();
            for name in &paths {
                if !matches!(Path::new(name).components().collect::<Vec<_>>()[..], [Component::Normal(_)]) {
                    let what = format!("`{name}` is no file beside it");
                    return Err(Error::format(&path, "field `paths`", what));
                }
                bytes.extend(input::read(&folder.join(name), (expected - bytes.len().min(expected)) as u64)?);
            }
            if bytes.len() != expected {
                let what = format!("its tensors take {expected} bytes, the files have {}", bytes.len());
                return Err(Error::format(&path, "field `weightsManifest`", what));
            }
            let mut from = 0;
            for (Described { name, shape, .. }, size) in weights.into_iter().zip(sizes) {
                let values = bytes[from..from + 4 * size].chunks_exact(4);
                let values = values.map(|four| f32::from_le_bytes([four[0], four[1], four[2], four[3]])).collect();
                from += 4 * size;
                if tensors.insert(name.clone(), (shape, values)).is_some() {
                    return Err(Error::format(&path, format!("tensor `{name}`"), "it is there twice"));
                }
            }
        }
        Ok(TfjsModel { path, topology, tensors })
    }

    /// The file that describes it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Names of its tensors, in alphabetical order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Shape and values of a tensor.
    ///
    /// # Errors
    /// Where there is none of that name.
    pub fn tensor(&self, name: &str) -> Result<(&[usize], &[f32])> {
        match self.tensors.get(name) {
            Some((shape, values)) => Ok((shape, values)),
            None => Err(Error::format(&self.path, format!("tensor `{name}`"), "it is missing")),
        }
    }

    /// A tensor of known shape.
    ///
    /// # Errors
    /// Where it is missing, or of another shape.
    pub fn expect(&self, name: &str, expected: &[usize]) -> Result<&[f32]> {
        let (shape, values) = self.tensor(name)?;
        if shape != expected {
            let what = format!("it is {shape:?}, expected {expected:?}");
            return Err(Error::format(&self.path, format!("tensor `{name}`"), what));
        }
        Ok(values)
    }
}
