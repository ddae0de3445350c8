//! Parallel text: a pair per line, source and target separated by a tab, UTF-8. The file is streamed. A line that is
//! not a pair is an error that names the line, because a corpus that is silently shorter trains a model that is
//! silently worse.

use crate::files::packed;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::io::{BufRead, Read};
use std::path::{Path, PathBuf};

/// The longest line in bytes: a longer one is not a sentence, and would be held in memory whole.
const LONGEST_LINE: u64 = 1 << 20;

/// A source sentence and its target.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Pair {
    /// The source.
    pub source: String,
    /// The target.
    pub target: String,
}

impl Pair {
    /// A pair of two texts.
    pub fn new(source: impl Into<String>, target: impl Into<String>) -> Self {
        Pair { source: source.into(), target: target.into() }
    }
}

/// Iterates over the pairs of a file.
///
/// ```
/// use qkv_formats::text::corpus::{Corpus, Pair};
///
/// let corpus = Corpus::new("很久\ta long time\n".as_bytes(), "pairs.tsv");
/// let pairs = corpus.collect::<Result<Vec<Pair>, _>>()?;
/// assert_eq!(pairs, [Pair::new("很久", "a long time")]);
///
/// let mut corpus = Corpus::new("no tab here\n".as_bytes(), "pairs.tsv");
/// let error = corpus.next().expect("a line").expect_err("it is no pair");
/// assert_eq!(error.to_string(), "pairs.tsv:1: the line has no tab");
/// # Ok::<(), qkv_formats::Error>(())
/// ```
pub struct Corpus<R> {
    reader: R,
    path: PathBuf,
    line: usize,
    bytes: Vec<u8>,
    over: bool,
}

impl Corpus<Box<dyn BufRead>> {
    /// Opens a tab-separated file, plain or `.gz`.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        Ok(Corpus::new(packed::open(path)?, path))
    }

    /// Reads a whole tab-separated file.
    ///
    /// ```
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let path = folder.path().join("pairs.tsv");
    /// std::fs::write(&path, "eins\tone\nzwei\ttwo\n").unwrap();
    /// let pairs = qkv_formats::text::corpus::Corpus::read(&path)?;
    /// assert_eq!(pairs[1].target, "two");
    /// # Ok::<(), qkv_formats::Error>(())
    /// ```
    pub fn read(path: impl AsRef<Path>) -> Result<Vec<Pair>> {
        Corpus::open(path)?.collect()
    }
}

impl<R> std::fmt::Debug for Corpus<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Corpus").field("path", &self.path).field("line", &self.line).finish_non_exhaustive()
    }
}

impl<R: BufRead> Corpus<R> {
    /// Pairs of any reader; `path` is only for error messages.
    pub fn new(reader: R, path: impl AsRef<Path>) -> Self {
        Corpus { reader, path: path.as_ref().to_owned(), line: 0, bytes: Vec::new(), over: false }
    }

    fn next_pair(&mut self) -> Result<Option<Pair>> {
        self.bytes.clear();
        let mut limited = (&mut self.reader).take(LONGEST_LINE + 1);
        limited.read_until(b'\n', &mut self.bytes).map_err(|e| Error::file("read", &self.path, e))?;
        if self.bytes.is_empty() {
            return match self.line {
                0 => Err(Error::line(&self.path, 1, "the file is empty")),
                _ => Ok(None),
            };
        }
        self.line += 1;
        let wrong = |what: String| Error::line(&self.path, self.line, what);
        if self.bytes.len() as u64 > LONGEST_LINE {
            return Err(wrong(format!("the line is longer than {LONGEST_LINE} bytes")));
        }
        let mut bytes = &self.bytes[..];
        if self.line == 1 {
            bytes = bytes.strip_prefix("\u{feff}".as_bytes()).unwrap_or(bytes);
        }
        bytes = bytes.strip_suffix(b"\n").unwrap_or(bytes);
        bytes = bytes.strip_suffix(b"\r").unwrap_or(bytes);
        let text = std::str::from_utf8(bytes)
            .map_err(|e| wrong(format!("byte {} of the line is not UTF-8", e.valid_up_to() + 1)))?;
        let sides: Vec<&str> = text.splitn(3, '\t').collect();
        let pair = match sides[..] {
            [source, target] => Pair::new(source.trim(), target.trim()),
            [_] => {
                let what = if text.trim().is_empty() { "the line is empty" } else { "the line has no tab" };
                return Err(wrong(what.into()).with_hint("each line is a source, a tab and a target"));
            }
            _ => {
                let tabs = text.matches('\t').count();
                return Err(wrong(format!("the line has {tabs} tabs, expected one"))
                    .with_hint("keep the source and the target, with `cut -f1,2`, say"));
            }
        };
        for (side, name) in [(&pair.source, "source"), (&pair.target, "target")] {
            if side.is_empty() {
                return Err(wrong(format!("the {name} is empty")));
            }
        }
        Ok(Some(pair))
    }
}

/// The iterator ends after an error.
impl<R: BufRead> Iterator for Corpus<R> {
    type Item = Result<Pair>;

    fn next(&mut self) -> Option<Result<Pair>> {
        if self.over {
            return None;
        }
        let next = self.next_pair().transpose();
        self.over = !matches!(next, Some(Ok(_)));
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// The text, compressed with gzip.
    fn pack(text: &[u8]) -> Vec<u8> {
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        packed.write_all(text).unwrap();
        packed.finish().unwrap()
    }
    use proptest::prelude::*;

    fn read(bytes: &[u8]) -> Result<Vec<Pair>> {
        Corpus::new(bytes, "c.tsv").collect()
    }

    fn refused(bytes: &[u8]) -> String {
        read(bytes).expect_err("it is refused").to_string()
    }

    #[test]
    fn a_mark_at_the_start_and_either_line_end_are_no_part_of_the_text() {
        let pairs = read("\u{feff}a b\tc\r\nd\te".as_bytes()).expect("two pairs");
        assert_eq!(pairs, [Pair::new("a b", "c"), Pair::new("d", "e")]);
    }

    #[test]
    fn a_line_that_is_no_pair_is_named() {
        assert_eq!(refused(b""), "c.tsv:1: the file is empty");
        assert_eq!(refused(b"a\tb\nc\n"), "c.tsv:2: the line has no tab");
        assert_eq!(refused(b"a\tb\n\nc\td\n"), "c.tsv:2: the line is empty");
        assert_eq!(refused(b"a\tb\tc\td\n"), "c.tsv:1: the line has 3 tabs, expected one");
        assert_eq!(refused(b"a\tb\n \tc\n"), "c.tsv:2: the source is empty");
        assert_eq!(refused(b"a\t\n"), "c.tsv:1: the target is empty");
        assert_eq!(refused(b"a\tb\nc\xff\td\n"), "c.tsv:2: byte 2 of the line is not UTF-8");
    }

    #[test]
    fn a_line_without_an_end_is_refused_before_it_is_read() {
        let endless = std::io::BufReader::new(std::io::repeat(b'a'));
        let error = Corpus::new(endless, "c.tsv").next().expect("a line").expect_err("it never ends");
        assert_eq!(error.to_string(), "c.tsv:1: the line is longer than 1048576 bytes");
    }

    #[test]
    fn a_packed_file_is_read_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.tsv.gz");
        std::fs::write(&path, pack("a\tb\n好\td\n".as_bytes())).unwrap();
        assert_eq!(Corpus::read(&path).unwrap(), [Pair::new("a", "b"), Pair::new("好", "d")]);
        std::fs::write(&path, &pack("a\tb\n".repeat(999).as_bytes())[..30]).unwrap();
        assert!(Corpus::read(&path).unwrap_err().to_string().contains("a.tsv.gz"));
    }

    proptest! {
        #[test]
        fn any_bytes_are_pairs_or_an_error_with_a_line(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            match read(&bytes) {
                Ok(pairs) => prop_assert!(pairs.iter().all(|p| !p.source.is_empty() && !p.target.is_empty())),
                Err(error) => prop_assert!(error.to_string().starts_with("c.tsv:")),
            }
        }

        #[test]
        fn pairs_that_are_written_are_read(
            texts in proptest::collection::vec(("[^\t\r\n\u{feff}]*[a-z好]", "[a-z好]"), 1..9),
        ) {
            let pairs: Vec<Pair> = texts.iter().map(|(s, t)| Pair::new(s.trim(), t.trim())).collect();
            let file: String = pairs.iter().map(|p| format!("{}\t{}\n", p.source, p.target)).collect();
            prop_assert_eq!(read(file.as_bytes()).expect("pairs"), pairs);
        }
    }
}
