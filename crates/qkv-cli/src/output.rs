//! Where a command's text goes: stdout, or the file of `--output`.

use crate::atomic_file::{AtomicFile, OutputPath, unwritable};
use crate::failure::Failure;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Prints to stdout; `false` once the reader has gone.
pub(crate) type Print<'a> = &'a mut (dyn FnMut(&str) -> Result<bool, Failure> + Send);

/// Prints to stdout; `false` once the reader has gone, which is not a failure: `head` has seen enough.
pub(crate) fn print(text: &str) -> Result<bool, Failure> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::new(format!("cannot write to stdout: {error}")))
        }
        written => Ok(written.is_ok()),
    }
}

/// Prints a line to stderr. A closed stderr is ignored.
pub(crate) fn note(text: impl std::fmt::Display) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Where the lines of a line-wise command go.
pub(crate) enum LineOutput<'a> {
    Stdout(Print<'a>),
    /// Appears only once all lines are written.
    File(AtomicFile),
    /// `--append`: each line goes to the end of the file as it comes.
    Append(PathBuf, File),
}

impl<'a> LineOutput<'a> {
    /// Stdout, or the given file, which must not be the input.
    pub fn new(
        output: Option<&Path>,
        append: bool,
        input: Option<&Path>,
        print: Print<'a>,
    ) -> Result<LineOutput<'a>, Failure> {
        let Some(path) = output else { return Ok(LineOutput::Stdout(print)) };
        let checked = OutputPath::new(path, input)?;
        if !append {
            return Ok(LineOutput::File(checked.create()?));
        }
        let file = File::options().append(true).create(true).open(path).map_err(|error| unwritable(path, error))?;
        Ok(LineOutput::Append(path.into(), file))
    }

    /// Writes text; `false` once the reader has gone.
    pub fn write(&mut self, text: &str) -> Result<bool, Failure> {
        match self {
            LineOutput::Stdout(print) => print(text),
            LineOutput::File(file) => file.put(text.as_bytes()).map(|()| true),
            LineOutput::Append(path, file) => {
                file.write_all(text.as_bytes()).map(|()| true).map_err(|error| unwritable(path, error))
            }
        }
    }

    /// Completes the output after the last line.
    pub fn finish(self) -> Result<(), Failure> {
        match self {
            LineOutput::File(file) => file.commit(),
            LineOutput::Stdout(_) | LineOutput::Append(..) => Ok(()),
        }
    }
}
