//! Models of TensorFlow.js: a `model.json` with the layers and a list of tensors, and files beside it that hold their
//! values one after the other. Only f32 is read.

use super::{folder, input};
use crate::{Error, Result};
use qkv_simd::huge_pages::advise_huge_pages;
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::Read;
use std::ops::Range;
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
    /// The values of each group of files.
    groups: Vec<Vec<f32>>,
    tensors: BTreeMap<String, Place>,
}

/// Where the values of a tensor are.
#[derive(Clone, Debug)]
struct Place {
    shape: Vec<usize>,
    group: usize,
    values: Range<usize>,
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

/// Reads files that together have `count` values, one after the other, straight into the result; `model` is for errors.
fn read_values(paths: &[PathBuf], count: usize, model: &Path) -> Result<Vec<f32>> {
    let mut lengths = Vec::with_capacity(paths.len());
    for path in paths {
        let about = input::open(path)?.metadata().map_err(|error| Error::file("read", path, error))?;
        lengths.push(usize::try_from(about.len()).unwrap_or(usize::MAX));
    }
    let found = lengths.iter().fold(0usize, |all, &length| all.saturating_add(length));
    if found != 4 * count {
        let what = format!("its tensors take {} bytes, the files have {found}", 4 * count);
        return Err(Error::format(model, "field `weightsManifest`", what));
    }
    let mut values = vec![0.0f32; count];
    advise_huge_pages(&mut values);
    let mut rest: &mut [u8] = bytemuck::cast_slice_mut(&mut values);
    for (path, length) in paths.iter().zip(lengths) {
        let (to, after) = rest.split_at_mut(length);
        input::open(path)?.read_exact(to).map_err(|error| Error::file("read", path, error))?;
        rest = after;
    }
    if cfg!(target_endian = "big") {
        values.iter_mut().for_each(|x| *x = f32::from_bits(x.to_bits().swap_bytes()));
    }
    Ok(values)
}

impl TfjsModel {
    /// Reads the model in a folder.
    ///
    /// # Errors
    /// Names the file, and the tensor that is wrong.
    pub fn open(folder: &Path) -> Result<TfjsModel> {
        let path = folder.join(MODEL);
        let Description { topology, manifest } = folder::parse_json(&input::read(&path, input::SETTINGS_MAX)?, &path)?;
        let (mut groups, mut tensors, mut files, mut all) = (Vec::new(), BTreeMap::new(), 0, 0usize);
        for Group { paths, weights } in manifest {
            // The size of the tensors is known before a file is read.
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
            for name in &paths {
                if !matches!(Path::new(name).components().collect::<Vec<_>>()[..], [Component::Normal(_)]) {
                    let what = format!("`{name}` is no file beside it");
                    return Err(Error::format(&path, "field `paths`", what));
                }
            }
            let paths: Vec<PathBuf> = paths.iter().map(|name| folder.join(name)).collect();
            let values = read_values(&paths, sizes.iter().sum(), &path)?;
            let mut from = 0;
            for (Described { name, shape, .. }, size) in weights.into_iter().zip(sizes) {
                let place = Place { shape, group: groups.len(), values: from..from + size };
                from += size;
                if tensors.insert(name.clone(), place).is_some() {
                    return Err(Error::format(&path, format!("tensor `{name}`"), "it is there twice"));
                }
            }
            groups.push(values);
        }
        Ok(TfjsModel { path, topology, groups, tensors })
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
    /// If there is none of that name.
    pub fn tensor(&self, name: &str) -> Result<(&[usize], &[f32])> {
        match self.tensors.get(name) {
            Some(Place { shape, group, values }) => Ok((shape, &self.groups[*group][values.clone()])),
            None => Err(Error::format(&self.path, format!("tensor `{name}`"), "it is missing")),
        }
    }

    /// The values of a tensor that must have this shape.
    ///
    /// # Errors
    /// If it is missing, or has another shape.
    pub fn expect(&self, name: &str, expected: &[usize]) -> Result<&[f32]> {
        let (shape, values) = self.tensor(name)?;
        if shape != expected {
            let what = format!("it is {shape:?}, expected {expected:?}");
            return Err(Error::format(&self.path, format!("tensor `{name}`"), what));
        }
        Ok(values)
    }
}
