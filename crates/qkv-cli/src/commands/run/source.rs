//! The input file of `qkv run`: [`Reader`] of `qkv-models` checks its header and reads tensors; this module words its
//! errors for the command line. What the numbers mean is left to `tensors`.

use crate::failure::Failure;
use qkv_models::files::safetensors::{Dtype, Reader, TensorInfo};
use std::path::Path;

/// A file of tensors whose header has been checked.
#[derive(Debug)]
pub(crate) struct Source(Reader);

/// The bytes of a tensor, not converted yet.
#[derive(Debug)]
pub(crate) struct RawTensor {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

impl Source {
    pub fn open(path: &Path) -> Result<Source, Failure> {
        Reader::open(path).map(Source).map_err(|error| {
            let failure = Failure::from(error);
            match path.is_file() {
                true => failure
                    .hint("`safetensors.torch.save_file` and `safetensors.numpy.save_file` write such files in Python"),
                false => failure,
            }
        })
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// The names of all tensors, in alphabetical order.
    pub fn names(&self) -> Vec<String> {
        self.0.names().map(str::to_owned).collect()
    }

    /// Type and shape of a tensor.
    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.0.info(name)
    }

    /// A tensor, if there is one of that name.
    pub fn read(&mut self, name: &str) -> Result<Option<RawTensor>, Failure> {
        let Some(TensorInfo { dtype, shape, .. }) = self.0.info(name).cloned() else { return Ok(None) };
        let bytes = self.0.read(name)?;
        Ok(Some(RawTensor { dtype, shape, bytes }))
    }

    /// An error about one of its tensors.
    pub fn refuse(&self, name: &str, why: impl std::fmt::Display) -> Failure {
        Failure::in_file(self.path(), format!("`{name}` {why}"))
    }
}
