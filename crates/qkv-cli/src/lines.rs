//! Text line by line, from arguments, a file or stdin. A batch never waits for a second line, so that a line written to
//! a pipe is answered at once. A bad line is reported with its number and skipped; the others are processed.

use crate::failure::Failure;
use crate::input;
use crate::output::note;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

/// The longest line in bytes. A longer one is not a sentence, and would be held in memory as a whole.
const LONGEST: u64 = 1 << 20;
/// The most bytes skipped in search of the end of a longer line.
const SKIPPED: u64 = 64 << 20;
/// The size of a pipe's buffer.
const BUFFER: usize = 1 << 16;

/// A line and where it came from.
#[derive(Debug)]
pub(crate) struct Line {
    pub text: String,
    /// Counted from 1.
    pub number: usize,
    /// The file, or `stdin`; none for an argument.
    file: Option<String>,
}

impl Line {
    /// A failure that names this line.
    pub fn failure(&self, failure: Failure) -> Failure {
        failure.at(&place(self.file.as_deref(), self.number))
    }
}

fn place(file: Option<&str>, number: usize) -> String {
    match file {
        Some(file) => format!("{file}:{number}"),
        None => format!("text {number}"),
    }
}

/// A source of lines.
pub(crate) struct Lines {
    reader: BufReader<Box<dyn Read>>,
    /// Texts of the command line.
    texts: std::vec::IntoIter<String>,
    /// The file, or `stdin`; none for texts of the command line.
    name: Option<String>,
    number: usize,
}

impl Lines {
    /// Texts of the command line, a file, or else stdin.
    pub fn new(texts: &[String], file: Option<&Path>) -> Result<Lines, Failure> {
        match (texts, file) {
            ([], None) => Ok(Lines::stdin()),
            ([], Some(path)) => Ok(Lines::reader(Box::new(input::open(path)?), path.display().to_string())),
            (texts, _) => {
                let (reader, texts) = (BufReader::new(Box::new(io::empty()) as Box<dyn Read>), texts.to_vec());
                Ok(Lines { reader, texts: texts.into_iter(), name: None, number: 0 })
            }
        }
    }

    pub fn stdin() -> Lines {
        Lines::reader(Box::new(io::stdin()), "stdin".into())
    }

    fn reader(reader: Box<dyn Read>, name: String) -> Lines {
        let reader = BufReader::with_capacity(BUFFER, reader);
        Lines { reader, texts: Vec::new().into_iter(), name: Some(name), number: 0 }
    }

    /// The next lines, at most `most`: waits for the first, then takes only those already buffered. Empty at the end. A
    /// line that is not text is an error among the others.
    pub fn next(&mut self, most: usize) -> Result<Vec<Result<Line, Failure>>, Failure> {
        let mut lines = Vec::new();
        while lines.len() < most && (lines.is_empty() || self.name.is_none() || self.reader.buffer().contains(&b'\n')) {
            let Some(line) = self.read()? else { break };
            lines.push(line);
        }
        Ok(lines)
    }

    /// Whether the input is a single text from the command line: its failure is then the command's.
    fn is_single(&self) -> bool {
        self.name.is_none() && self.texts.len() == 1
    }

    /// All lines; the first bad one is the error.
    pub fn all(mut self) -> Result<Vec<Line>, Failure> {
        let mut all = Vec::new();
        while let Some(line) = self.read()? {
            all.push(line?);
        }
        Ok(all)
    }

    /// The outer error means that the source cannot be read any further.
    fn read(&mut self) -> Result<Option<Result<Line, Failure>>, Failure> {
        self.number += 1;
        let number = self.number;
        let Some(name) = self.name.clone() else {
            return Ok(self.texts.next().map(|text| Ok(Line { text, number, file: None })));
        };
        let wrong = |what: String| Failure::new(what).at(&place(Some(&name), number));
        let mut bytes = Vec::new();
        let read = (&mut self.reader).take(LONGEST + 1).read_until(b'\n', &mut bytes);
        read.map_err(|error| wrong(format!("cannot be read: {error}")))?;
        if bytes.is_empty() {
            return Ok(None);
        }
        if bytes.len() as u64 > LONGEST {
            let what = format!("the line is longer than {LONGEST} bytes");
            let failure = wrong(what).hint("split it into sentences");
            return if bytes.ends_with(b"\n") || self.skip_line()? { Ok(Some(Err(failure))) } else { Err(failure) };
        }
        let end = bytes.strip_suffix(b"\n").map_or(bytes.len(), |line| line.strip_suffix(b"\r").unwrap_or(line).len());
        bytes.truncate(end);
        Ok(Some(match String::from_utf8(bytes) {
            Ok(text) => Ok(Line { text, number, file: Some(name) }),
            Err(error) => {
                let at = error.utf8_error().valid_up_to() + 1;
                Err(wrong(format!("byte {at} of the line is not UTF-8")))
            }
        }))
    }

    /// Skips the rest of a line; `false` if it does not end within `SKIPPED` bytes.
    fn skip_line(&mut self) -> Result<bool, Failure> {
        let mut skipped = 0;
        while skipped < SKIPPED {
            let buffer = self.reader.fill_buf().map_err(|error| Failure::new(format!("cannot be read: {error}")))?;
            if buffer.is_empty() {
                return Ok(true);
            }
            let end = buffer.iter().position(|&byte| byte == b'\n').map(|at| at + 1);
            let count = end.unwrap_or(buffer.len());
            self.reader.consume(count);
            skipped += count as u64;
            if end.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// The result of each line of a batch; the outer error concerns all lines, such as a damaged model.
pub(crate) type BatchResult<T> = Result<Vec<Result<T, Failure>>, Failure>;

/// Runs all lines through `work` in batches and hands the results to `done`, which returns whether to continue. A line
/// that fails is reported on stderr and passed as `None`; the others are not affected, and the command fails at the
/// end.
pub(crate) fn for_each_line<T>(
    mut lines: Lines,
    batch: usize,
    mut work: impl FnMut(&[Line]) -> BatchResult<T>,
    mut done: impl FnMut(Vec<Option<T>>) -> Result<bool, Failure>,
) -> Result<(), Failure> {
    let single = lines.is_single();
    let (mut count, mut failed) = (0, 0);
    loop {
        let portion = lines.next(batch)?;
        if portion.is_empty() {
            break;
        }
        count += portion.len();
        let mut good = Vec::new();
        let places: Vec<Result<(), Failure>> =
            portion.into_iter().map(|line| line.map(|line| good.push(line))).collect();
        let mut results = batch_or_singly(&good, &mut work)?.into_iter();
        let mut outcomes = Vec::with_capacity(places.len());
        for place in places {
            match place.and_then(|()| results.next().expect("a result for each line")) {
                Ok(result) => outcomes.push(Some(result)),
                Err(failure) if single => return Err(failure),
                Err(failure) => {
                    failed += 1;
                    report(&failure);
                    outcomes.push(None);
                }
            }
        }
        if !done(outcomes)? {
            break;
        }
    }
    if failed == 0 { Ok(()) } else { Err(Failure::new(format!("{failed} of {count} lines failed"))) }
}

/// The results of a batch. If a model refuses a batch of several lines, each is tried alone to find the one at fault;
/// if all of them fail alike, no single line is at fault.
fn batch_or_singly<T>(lines: &[Line], work: &mut impl FnMut(&[Line]) -> BatchResult<T>) -> BatchResult<T> {
    if lines.is_empty() {
        return Ok(Vec::new());
    }
    let refused = match work(lines) {
        Err(failure) if lines.len() > 1 => failure,
        Err(failure) => return Ok(vec![Err(lines[0].failure(failure))]),
        results => return results,
    };
    let (mut results, mut alike) = (Vec::with_capacity(lines.len()), true);
    for line in lines {
        match work(std::slice::from_ref(line)) {
            Ok(one) => {
                alike = false;
                results.extend(one);
            }
            Err(failure) => {
                alike &= failure.message() == refused.message();
                results.push(Err(line.failure(failure)));
            }
        }
    }
    if alike { Err(refused) } else { Ok(results) }
}

/// Reports a failure that does not end the command.
pub(crate) fn report(failure: &Failure) {
    note(failure.to_string().trim_end());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &'static [u8]) -> Lines {
        Lines::reader(Box::new(text), "in.txt".into())
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
            found.extend(portion.into_iter().map(|line| line.unwrap()).map(|line| (line.text, line.number)));
        }
        assert_eq!(found, [("a".into(), 1), (String::new(), 2), ("b".into(), 3), ("c".into(), 4)]);
    }

    #[test]
    fn a_line_that_is_not_utf8_is_named_and_the_next_one_is_read() {
        let found = lines(b"a\nb\xff\nc\n").next(9).unwrap();
        let failure = found[1].as_ref().unwrap_err().to_string();
        assert!(failure.starts_with("error: in.txt:2: byte 2 of the line is not UTF-8"), "{failure}");
        assert_eq!(found[2].as_ref().unwrap().text, "c");
    }

    #[test]
    fn a_line_that_is_too_long_is_skipped_and_one_without_an_end_is_fatal() {
        let long = [vec![b'a'; LONGEST as usize + 5], b"\nb\n".to_vec()].concat();
        let mut some = Lines::reader(Box::new(io::Cursor::new(long)), "in.txt".into());
        assert!(some.next(1).unwrap()[0].as_ref().unwrap_err().to_string().contains("longer than 1048576 bytes"));
        assert_eq!(some.next(1).unwrap()[0].as_ref().unwrap().text, "b");
        let mut endless = Lines::reader(Box::new(io::repeat(b'a')), "in.txt".into());
        assert!(endless.next(1).unwrap_err().to_string().contains("longer than 1048576 bytes"));
    }

    #[test]
    fn one_bad_line_does_not_cost_the_others() {
        let shout = |lines: &[Line]| -> BatchResult<String> {
            if lines.iter().any(|line| line.text == "bad") {
                return Err(Failure::new("a word that nobody knows"));
            }
            Ok(lines.iter().map(|line| Ok(line.text.to_uppercase())).collect())
        };
        let mut all = Vec::new();
        let ended = for_each_line(lines(b"a\nbad\n\xff\nb\n"), 9, shout, |results| {
            all.extend(results);
            Ok(true)
        });
        assert_eq!(all, [Some("A".into()), None, None, Some("B".into())]);
        assert_eq!(ended.unwrap_err().message(), "2 of 4 lines failed");
    }

    #[test]
    fn a_fault_of_every_line_is_told_once() {
        let work = |_: &[Line]| -> BatchResult<()> { Err(Failure::new("the model is not finite")) };
        let ended = for_each_line(lines(b"a\nb\n"), 9, work, |_| Ok(true));
        assert_eq!(ended.unwrap_err().message(), "the model is not finite");
    }
}
