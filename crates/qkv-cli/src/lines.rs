//! Where lines come from: arguments, a file or stdin, in portions of what is there. A portion never waits for a second line:
//! who writes one and waits for its translation gets it.

use crate::failure::Failure;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

/// Longer lines are no sentences, and would be held in memory whole.
const LONGEST: u64 = 1 << 20;
/// As much as a pipe holds.
const BUFFER: usize = 1 << 16;

/// A line, and where it stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Line {
    pub text: String,
    /// Counted from 1.
    pub number: usize,
    /// The file, where there is one.
    pub file: Option<String>,
}

impl Line {
    /// As an error names it.
    pub fn place(&self) -> String {
        match &self.file {
            Some(file) => format!("{file}:{}: the line", self.number),
            None => format!("text {}", self.number),
        }
    }
}

/// Lines, one portion after the other.
pub(crate) struct Lines {
    reader: BufReader<Box<dyn Read>>,
    /// Lines that are there already.
    given: std::vec::IntoIter<String>,
    name: Option<String>,
    number: usize,
}

impl Lines {
    /// Texts from the command line, each a line.
    pub fn given(texts: &[String]) -> Lines {
        let reader: Box<dyn Read> = Box::new(io::empty());
        Lines { reader: BufReader::new(reader), given: Vec::from(texts).into_iter(), name: None, number: 0 }
    }

    /// What is written to stdin.
    pub fn stdin() -> Lines {
        Lines::new(Box::new(io::stdin()), "stdin".into())
    }

    /// The lines of a file.
    pub fn open(path: &Path) -> Result<Lines, Failure> {
        let file = File::open(path).map_err(|error| qkv_models::Error::file("open", path, error))?;
        Ok(Lines::new(Box::new(file), path.display().to_string()))
    }

    fn new(reader: Box<dyn Read>, name: String) -> Lines {
        let reader = BufReader::with_capacity(BUFFER, reader);
        Lines { reader, given: Vec::new().into_iter(), name: Some(name), number: 0 }
    }

    /// The next lines, at most so many: one that is waited for, and those behind it that have come already. None at the end.
    pub fn next(&mut self, most: usize) -> Result<Vec<Line>, Failure> {
        let mut lines = Vec::new();
        while lines.len() < most && (lines.is_empty() || self.name.is_none() || self.reader.buffer().contains(&b'\n')) {
            let Some(text) = self.read()? else { break };
            lines.push(Line { text, number: self.number, file: self.name.clone() });
        }
        Ok(lines)
    }

    fn read(&mut self) -> Result<Option<String>, Failure> {
        self.number += 1;
        let Some(name) = &self.name else { return Ok(self.given.next()) };
        let wrong = |what: String| Failure::new(format!("{name}:{}: {what}", self.number));
        let mut bytes = Vec::new();
        let read = (&mut self.reader).take(LONGEST + 1).read_until(b'\n', &mut bytes);
        read.map_err(|error| wrong(format!("cannot be read: {error}")))?;
        if bytes.is_empty() {
            return Ok(None);
        }
        if bytes.len() as u64 > LONGEST {
            return Err(wrong(format!("the line is longer than {LONGEST} bytes")).hint("split it into sentences"));
        }
        let end = bytes.strip_suffix(b"\n").map_or(bytes.len(), |line| line.strip_suffix(b"\r").unwrap_or(line).len());
        bytes.truncate(end);
        String::from_utf8(bytes).map(Some).map_err(|error| {
            let at = error.utf8_error().valid_up_to() + 1;
            wrong(format!("byte {at} of the line is not UTF-8"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &'static [u8]) -> Lines {
        Lines::new(Box::new(text), "in.txt".into())
    }

    #[test]
    fn every_line_is_there_once_with_its_number() {
        let mut lines = lines(b"a\n\r\nb\r\nc");
        let mut found = Vec::new();
        loop {
            let portion = lines.next(2).unwrap();
            if portion.is_empty() {
                break;
            }
            found.extend(portion.into_iter().map(|line| (line.text, line.number)));
        }
        assert_eq!(found, [("a".into(), 1), (String::new(), 2), ("b".into(), 3), ("c".into(), 4)]);
    }

    #[test]
    fn a_line_that_is_no_text_is_named() {
        let mut lines = lines(b"a\nb\xff\n");
        let failure = lines.next(9).unwrap_err().to_string();
        assert!(failure.starts_with("error: in.txt:2: byte 2 of the line is not UTF-8"), "{failure}");
    }

    #[test]
    fn a_line_without_an_end_is_refused_before_it_is_read() {
        let mut lines = Lines::new(Box::new(io::repeat(b'a')), "in.txt".into());
        assert!(lines.next(1).unwrap_err().to_string().contains("longer than 1048576 bytes"));
    }
}
