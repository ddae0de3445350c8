//! A file of tensors to be written: under a temporary name beside the target, then renamed, so that whoever looks sees
//! the old file or the new one and never half of either. Which tensors those are is `results`'.

use crate::failure::Failure;
use crate::number::Stored;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// How many numbers become bytes at a time.
const PORTION: usize = 1 << 14;

/// Numbers of any type that a file can hold.
pub(crate) trait Numbers {
    fn dtype(&self) -> Dtype;
    fn count(&self) -> usize;
    fn write(&self, to: &mut dyn Write) -> io::Result<()>;
}

impl<T: Stored> Numbers for Vec<T> {
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
            portion.iter().for_each(|number| number.put(&mut bytes));
            to.write_all(&bytes)?;
        }
        Ok(())
    }
}

/// A tensor to be written.
pub(crate) struct Named {
    pub name: String,
    pub shape: Vec<usize>,
    pub numbers: Box<dyn Numbers>,
}

/// Where tensors are written to.
#[derive(Debug)]
pub(crate) struct Target {
    /// As it was typed.
    path: PathBuf,
    /// Where it leads, if it is a link.
    real: PathBuf,
}

impl Target {
    /// Checks what can be checked before anything is computed: that there is a folder to write to, and that no input
    /// would be lost.
    pub fn new(path: &Path, input: Option<&Path>) -> Result<Target, Failure> {
        let real = fs::canonicalize(path).unwrap_or_else(|_| path.into());
        let target = Target { path: path.into(), real };
        if target.real.is_dir() {
            return Err(target.refuse("it is a folder"));
        }
        if !target.folder().is_dir() {
            let folder = target.folder().display();
            return Err(target.refuse(format!("there is no folder `{folder}`")));
        }
        if input.is_some_and(|input| fs::canonicalize(input).is_ok_and(|input| input == target.real)) {
            return Err(target.refuse("it is the input").hint("give `--output` another name"));
        }
        Ok(target)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    fn folder(&self) -> &Path {
        self.real.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
    }

    fn refuse(&self, why: impl std::fmt::Display) -> Failure {
        Failure::in_file(&self.path, format!("cannot be written: {why}"))
    }

    /// Writes the tensors.
    pub fn write(&self, tensors: Vec<Named>) -> Result<(), Failure> {
        // A pipe or a device has no half-written state that anyone could see, and must not be replaced.
        let special = fs::metadata(&self.real).is_ok_and(|about| !about.is_file());
        if special {
            return File::options()
                .write(true)
                .open(&self.real)
                .and_then(|file| serialize(tensors, file))
                .map_err(|error| self.refuse(error));
        }
        let name = self.real.file_name().unwrap_or_default().to_string_lossy();
        let temporary = self.folder().join(format!(".{name}.{}.tmp", std::process::id()));
        let written = File::create(&temporary)
            .and_then(|file| serialize(tensors, file))
            .and_then(|()| fs::rename(&temporary, &self.real));
        written.map_err(|error| {
            let _ = fs::remove_file(&temporary); // it may not even be there
            self.refuse(error)
        })
    }
}

/// Writes one tensor after the other, so that no second copy of them all is made.
fn serialize(mut tensors: Vec<Named>, file: File) -> io::Result<()> {
    // The format's own order: by falling alignment, so that every tensor is aligned, then by name.
    tensors.sort_by(|a, b| b.numbers.dtype().cmp(&a.numbers.dtype()).then_with(|| a.name.cmp(&b.name)));
    let mut end = 0;
    let entries = tensors.iter().map(|Named { name, shape, numbers }| {
        let start = end;
        end += numbers.count() * numbers.dtype().bitsize() / 8;
        let info = TensorInfo { dtype: numbers.dtype(), shape: shape.clone(), data_offsets: (start, end) };
        (name.clone(), info)
    });
    let metadata = Metadata::new(None, entries.collect()).map_err(io::Error::other)?;
    let mut header = serde_json::to_vec(&metadata)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut file = BufWriter::new(file);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)?;
    for tensor in &tensors {
        tensor.numbers.write(&mut file)?;
    }
    file.flush()
}
