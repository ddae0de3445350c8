//! Where what a command has to say goes: to stdout, or to a file that was named instead.

use crate::failure::Failure;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Writes to stdout, and tells whether anyone reads on.
pub(crate) type Say<'a> = &'a mut (dyn FnMut(&str) -> Result<bool, Failure> + Send);

/// Writes to stdout, and tells whether anyone reads on. A reader that has gone away has seen enough, which is no failure.
pub(crate) fn say(words: &str) -> Result<bool, Failure> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(words.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::new(format!("the report could not be written: {error}")))
        }
        written => Ok(written.is_ok()),
    }
}

/// Where lines go.
pub(crate) enum Sink<'a> {
    Stdout(Say<'a>),
    File(PathBuf, File),
}

impl<'a> Sink<'a> {
    /// The file that was named, which must not be the one that is read, or stdout.
    pub fn new(output: Option<&Path>, input: Option<&Path>, say: Say<'a>) -> Result<Sink<'a>, Failure> {
        let Some(path) = output else { return Ok(Sink::Stdout(say)) };
        let same =
            |input: &Path| fs::canonicalize(input).ok().is_some_and(|real| fs::canonicalize(path).ok() == Some(real));
        if input.is_some_and(same) {
            return Err(Failure::in_file(path, "it is read from, and would be lost").hint("name another `--output`"));
        }
        let file = File::create(path).map_err(|error| Failure::in_file(path, format!("cannot be written: {error}")))?;
        Ok(Sink::File(path.to_owned(), file))
    }

    /// Writes, and tells whether anyone reads on.
    pub fn put(&mut self, words: &str) -> Result<bool, Failure> {
        match self {
            Sink::Stdout(say) => say(words),
            Sink::File(path, file) => match file.write_all(words.as_bytes()) {
                Ok(()) => Ok(true),
                Err(error) => Err(Failure::in_file(path, format!("cannot be written: {error}"))),
            },
        }
    }

    /// All is written.
    pub fn done(self) -> Result<(), Failure> {
        match self {
            Sink::Stdout(_) => Ok(()),
            Sink::File(path, file) => {
                file.sync_all().or_else(|error| match error.kind() {
                    // A pipe or a device has no disk to bring it to.
                    io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported => Ok(()),
                    _ => Err(Failure::in_file(&path, format!("cannot be written: {error}"))),
                })
            }
        }
    }
}
