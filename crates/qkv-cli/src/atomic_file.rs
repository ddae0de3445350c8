//! Output files: written under a temporary name in the same folder, then renamed. Readers see the old file or the new
//! one, never a partial one, and a failure or a kill leaves the old one untouched.

use crate::failure::Failure;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// A path to write to, checked before anything is computed.
#[derive(Debug)]
pub(crate) struct OutputPath {
    /// As it was typed.
    path: PathBuf,
    /// The path with links resolved.
    real: PathBuf,
}

impl OutputPath {
    /// Checks that the folder exists, and that the file is neither a folder nor the input.
    pub fn new(path: &Path, input: Option<&Path>) -> Result<OutputPath, Failure> {
        let real = fs::canonicalize(path).unwrap_or_else(|_| path.into());
        let output = OutputPath { path: path.into(), real };
        if output.real.is_dir() {
            return Err(output.refuse("it is a folder"));
        }
        if !output.folder().is_dir() {
            return Err(output.refuse(format!("there is no folder `{}`", output.folder().display())));
        }
        if input.is_some_and(|input| fs::canonicalize(input).is_ok_and(|input| input == output.real)) {
            return Err(output.refuse("it is the input").hint("choose another `--output`"));
        }
        Ok(output)
    }

    /// As it was typed.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Creates the file. A pipe or a device is written to directly: it has no half-written state, and must not be
    /// replaced.
    pub fn create(&self) -> Result<AtomicFile, Failure> {
        let device = fs::metadata(&self.real).is_ok_and(|about| !about.is_file());
        let temporary = (!device).then(|| {
            let name = self.real.file_name().unwrap_or_default().to_string_lossy();
            self.folder().join(format!(".{name}.{}.tmp", std::process::id()))
        });
        let created = match &temporary {
            Some(temporary) => File::create(temporary),
            None => File::options().write(true).open(&self.real),
        };
        let file = created.map_err(|error| self.refuse(error))?;
        if let (Some(_), Ok(old)) = (&temporary, fs::metadata(&self.real)) {
            let _ = file.set_permissions(old.permissions()); // like the old file's, if the system allows
        }
        let (path, real) = (self.path.clone(), self.real.clone());
        Ok(AtomicFile { path, real, temporary, writer: BufWriter::new(file) })
    }

    /// Writes the whole file.
    pub fn write(&self, bytes: &[u8]) -> Result<(), Failure> {
        let mut file = self.create()?;
        file.put(bytes)?;
        file.commit()
    }

    fn folder(&self) -> &Path {
        self.real.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
    }

    fn refuse(&self, why: impl std::fmt::Display) -> Failure {
        unwritable(&self.path, why)
    }
}

/// A file that gets its name only once it is complete. Dropped before that, it leaves nothing behind.
#[derive(Debug)]
pub(crate) struct AtomicFile {
    path: PathBuf,
    real: PathBuf,
    /// None for a pipe or a device.
    temporary: Option<PathBuf>,
    writer: BufWriter<File>,
}

impl AtomicFile {
    /// Appends bytes.
    pub fn put(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.writer.write_all(bytes).map_err(|error| unwritable(&self.path, error))
    }

    /// Gives the file its name.
    pub fn commit(mut self) -> Result<(), Failure> {
        let done = self.writer.flush().and_then(|()| match &self.temporary {
            None => Ok(()),
            Some(temporary) => {
                self.writer.get_ref().sync_all()?;
                fs::rename(temporary, &self.real)
            }
        });
        match done {
            Ok(()) => {
                self.temporary = None;
                Ok(())
            }
            Err(error) => Err(unwritable(&self.path, error)),
        }
    }
}

impl Write for AtomicFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.writer.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary {
            let _ = fs::remove_file(temporary);
        }
    }
}

/// The failure of a file that cannot be written.
pub(crate) fn unwritable(path: &Path, why: impl std::fmt::Display) -> Failure {
    Failure::in_file(path, format!("cannot be written: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn a_file_that_is_dropped_leaves_the_old_one_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out.txt");
        fs::write(&path, "old").unwrap();
        let mut file = OutputPath::new(&path, None).unwrap().create().unwrap();
        file.put(b"half of the new").unwrap();
        file.flush().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"old");
        drop(file);
        assert_eq!((fs::read(&path).unwrap(), names(folder.path())), (b"old".to_vec(), vec!["out.txt".to_owned()]));
    }

    #[test]
    fn a_committed_file_replaces_the_old_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out.txt");
        fs::write(&path, "old").unwrap();
        OutputPath::new(&path, None).unwrap().write(b"new").unwrap();
        assert_eq!((fs::read(&path).unwrap(), names(folder.path())), (b"new".to_vec(), vec!["out.txt".to_owned()]));
    }
}
