//! Documents as sentences of words, within the limits of a model: long sentences are split, and excess sentences are
//! left out and counted.

use crate::text::sentences::sentences;
use crate::text::tokenizer::{PlacedToken, Tokenizer};
use std::ops::Range;

/// A tokenized document. No sentence is empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Document {
    /// Word ids of each sentence.
    pub(crate) sentences: Vec<Vec<u32>>,
    /// Their positions in the text.
    pub(crate) places: Vec<Vec<PlacedToken>>,
    /// Number of sentences left out.
    pub left_out: usize,
}

impl Document {
    /// Tokenizes a text into at most `most` sentences of at most `longest` words.
    pub fn new(text: &str, tokenizer: &Tokenizer, longest: usize, most: usize) -> Document {
        let mut document = Document::default();
        for range in sentences(text) {
            let mut words = tokenizer.encode_placed(&text[range.clone()]);
            for word in &mut words {
                word.place = word.place.start + range.start..word.place.end + range.start;
            }
            for part in words.chunks(longest.max(1)) {
                if document.sentences.len() == most {
                    document.left_out += 1;
                    continue;
                }
                document.sentences.push(part.iter().map(|word| word.id).collect());
                document.places.push(part.to_vec());
            }
        }
        document
    }

    /// Number of words.
    pub fn words(&self) -> usize {
        self.sentences.iter().map(Vec::len).sum()
    }

    /// Number of words in each sentence.
    pub fn lengths(&self) -> Vec<usize> {
        self.sentences.iter().map(Vec::len).collect()
    }

    /// Byte range of each sentence.
    pub fn sentence_ranges(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        (0..self.sentences.len()).map(|at| self.sentence(at))
    }

    /// Every token with the index of its sentence.
    pub fn pieces(&self) -> impl Iterator<Item = (usize, &PlacedToken)> + '_ {
        self.places.iter().enumerate().flat_map(|(at, pieces)| pieces.iter().map(move |piece| (at, piece)))
    }

    /// Byte range of a sentence.
    pub(crate) fn sentence(&self, at: usize) -> Range<usize> {
        let places = &self.places[at];
        let start = places.iter().map(|word| word.place.start).min().unwrap_or(0);
        start..places.iter().map(|word| word.place.end).max().unwrap_or(start)
    }

    /// The words of a sentence, with their tokens merged: the byte range and the token range of each.
    pub(crate) fn whole_words(&self, at: usize) -> Vec<(Range<usize>, Range<usize>)> {
        let mut words: Vec<(Range<usize>, Range<usize>, usize)> = Vec::new();
        for (piece, placed) in self.places[at].iter().enumerate() {
            match words.last_mut() {
                Some((bytes, pieces, word)) if *word == placed.word => {
                    (bytes.end, pieces.end) = (placed.place.end.max(bytes.end), piece + 1);
                }
                _ => words.push((placed.place.clone(), piece..piece + 1, placed.word)),
            }
        }
        words.into_iter().map(|(bytes, pieces, _)| (bytes, pieces)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::tokenizer::Kind;

    #[test]
    fn what_is_too_long_goes_on_and_what_is_too_much_is_counted() {
        let text = "good film , good plot . <s> bad <s> good";
        let tokenizer = Tokenizer::train([text, text], Kind::Words { size: 50 }).unwrap();
        let document = Document::new(text, &tokenizer, 4, 3);
        assert_eq!(document.sentences.iter().map(Vec::len).collect::<Vec<_>>(), [4, 2, 1]);
        assert_eq!((document.words(), document.left_out), (7, 1));
        let said: Vec<&str> = (0..3).map(|at| &text[document.sentence(at)]).collect();
        assert_eq!(said, ["good film , good", "plot .", "bad"]);
        assert_eq!(Document::new(" \n", &tokenizer, 4, 3), Document::default());
    }

    #[test]
    fn pieces_of_a_word_are_put_together() {
        let tokenizer = Tokenizer::train(["abc abd xyz"; 3], Kind::Bpe { size: 300 }).unwrap();
        let text = "abc zzz";
        let document = Document::new(text, &tokenizer, 50, 3);
        let words = document.whole_words(0);
        assert_eq!(words.iter().map(|(bytes, _)| text[bytes.clone()].trim()).collect::<Vec<_>>(), ["abc", "zzz"]);
        assert_eq!(words.last().unwrap().1.end, document.sentences[0].len());
    }
}
