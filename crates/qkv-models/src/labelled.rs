//! Labelled texts: with a class, with a tag per word, or with questions and their answers. Files may be plain or `.gz`;
//! errors name the line or field.
//!
//! | kind | file |
//! | --- | --- |
//! | classes | lines of `label ⇥ text` |
//! | tags | CoNLL columns: a word per line, its text first, its tag last; an empty line between sentences |
//! | answers | SQuAD's JSON |
//! | boxes in images | COCO's JSON |
//! | texts about images | lines of `image ⇥ text` |

mod coco;
mod squad;

pub use coco::{BoxedImage, boxes};
pub use squad::Question;

use crate::encoder::Head;
use crate::files::packed;
use crate::image::Image;
use crate::pictures::Pictures;
use crate::text::corpus::Corpus;
use crate::{Error, Result};
use std::path::Path;

/// A text and its class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LabelledText {
    /// The class.
    pub label: String,
    /// The text.
    pub text: String,
}

/// A sentence with a tag per word.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TaggedSentence {
    /// The words.
    pub words: Vec<String>,
    /// Their tags: `O`, or `B-` and `I-` before the kind of an entity.
    pub tags: Vec<String>,
}

/// Reads lines of `label ⇥ text`.
///
/// # Errors
/// Names the file and the line.
pub fn classes(path: &Path) -> Result<Vec<LabelledText>> {
    let pairs = Corpus::read(path)?;
    let blank = pairs.iter().position(|pair| pair.source.trim().is_empty());
    if let Some(at) = blank {
        return Err(Error::line(path, at + 1, "the label is empty"));
    }
    Ok(pairs.into_iter().map(|pair| LabelledText { label: pair.source.trim().to_owned(), text: pair.target }).collect())
}

/// Reads CoNLL columns.
///
/// ```
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path().join("a.conll");
/// std::fs::write(&path, "Ada\tB-person\nsleeps\tO\n\nOslo\tB-location\n").unwrap();
/// let sentences = qkv_models::labelled::tags(&path)?;
/// assert_eq!((sentences.len(), &sentences[0].words[..]), (2, &["Ada".to_owned(), "sleeps".to_owned()][..]));
/// # Ok::<(), qkv_models::Error>(())
/// ```
///
/// # Errors
/// Names the file and the line.
pub fn tags(path: &Path) -> Result<Vec<TaggedSentence>> {
    let text = packed::text(path)?;
    let (mut sentences, mut sentence) = (Vec::new(), TaggedSentence::default());
    for (at, line) in text.lines().enumerate() {
        if line.trim().is_empty() || line.starts_with("-DOCSTART-") {
            if !sentence.words.is_empty() {
                sentences.push(std::mem::take(&mut sentence));
            }
            continue;
        }
        let mut columns = line.split([' ', '\t']).filter(|column| !column.is_empty());
        match (columns.next(), columns.next_back()) {
            (Some(word), Some(tag)) => {
                sentence.words.push(word.to_owned());
                sentence.tags.push(tag.to_owned());
            }
            _ => {
                return Err(Error::line(path, at + 1, "the line has one column")
                    .with_hint("a word is followed by its tag, `O` where it has none"));
            }
        }
    }
    if !sentence.words.is_empty() {
        sentences.push(sentence);
    }
    Ok(sentences)
}

/// Reads questions in SQuAD's JSON.
///
/// # Errors
/// Names the file and what is wrong with it.
pub fn answers(path: &Path) -> Result<Vec<Question>> {
    squad::read(path)
}

/// Labelled texts of one kind.
#[derive(Clone, Debug)]
pub(crate) enum LabelledTexts {
    Classes(Vec<LabelledText>),
    Tags(Vec<TaggedSentence>),
    Answers(Vec<Question>),
}

impl LabelledTexts {
    /// The head that predicts their labels.
    pub fn head(&self) -> Head {
        match self {
            LabelledTexts::Classes(_) => Head::Classes,
            LabelledTexts::Tags(_) => Head::Tags,
            LabelledTexts::Answers(_) => Head::Span,
        }
    }

    /// Names of all classes or tags, sorted.
    pub fn labels(&self) -> Vec<String> {
        match self {
            LabelledTexts::Classes(texts) => names(texts.iter().map(|text| &text.label)),
            LabelledTexts::Tags(sentences) => names(sentences.iter().flat_map(|sentence| &sentence.tags)),
            LabelledTexts::Answers(_) => Vec::new(),
        }
    }

    /// The texts, for training a tokenizer.
    pub fn texts(&self) -> Vec<String> {
        match self {
            LabelledTexts::Classes(texts) => texts.iter().map(|text| text.text.clone()).collect(),
            LabelledTexts::Tags(sentences) => sentences.iter().map(|sentence| sentence.words.join(" ")).collect(),
            LabelledTexts::Answers(asked) => {
                let mut texts: Vec<String> = asked.iter().map(|asked| asked.question.clone()).collect();
                texts.extend(names(asked.iter().map(|asked| &asked.context)));
                texts
            }
        }
    }

    /// Number of texts.
    pub fn len(&self) -> usize {
        match self {
            LabelledTexts::Classes(texts) => texts.len(),
            LabelledTexts::Tags(sentences) => sentences.len(),
            LabelledTexts::Answers(asked) => asked.len(),
        }
    }
}

/// The distinct images of a list, and for each line the index of its image and the text.
#[derive(Clone, Debug)]
pub struct Captions {
    /// The images.
    pub images: Vec<Image>,
    /// The index of an image, and its text.
    pub lines: Vec<(usize, String)>,
}

/// Reads a list of lines `image ⇥ text`, with paths relative to its folder.
///
/// # Errors
/// Names the file and the line.
pub fn captions(path: &Path) -> Result<Captions> {
    let found = Pictures::<1>::read(path, |image| Ok(image.clone()))?;
    let lines = found.lines.into_iter().map(|(image, [text])| (image, text)).collect();
    Ok(Captions { images: found.images, lines })
}

/// Distinct names, sorted.
fn names<'a>(all: impl Iterator<Item = &'a String>) -> Vec<String> {
    let all: std::collections::BTreeSet<&String> = all.collect();
    all.into_iter().cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_that_are_missing_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.conll");
        std::fs::write(&path, "-DOCSTART- -X- O\n\nAda NNP B-NP B-PER\nsleeps\n").unwrap();
        assert!(tags(&path).unwrap_err().to_string().ends_with("a.conll:4: the line has one column"));
        std::fs::write(&path, "Ada NNP B-NP B-PER\n\t\n\nOslo NNP B-NP B-LOC").unwrap();
        let found = tags(&path).unwrap();
        assert_eq!((found.len(), &found[1].tags[0][..]), (2, "B-LOC"));
        std::fs::write(&path, "pos\tgood\n\tbad\n").unwrap();
        assert!(classes(&path).unwrap_err().to_string().contains(":2"));
    }
}
