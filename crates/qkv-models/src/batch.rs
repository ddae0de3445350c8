//! Sentences side by side: what a model takes in one step.

use crate::text::tokenizer::Tokenizer;

/// The token numbers that stand for no text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Specials {
    /// Fills up a shorter sentence.
    pub pad: u32,
    /// Starts a translation.
    pub bos: u32,
    /// Ends a sentence.
    pub eos: u32,
}

impl Specials {
    /// Those of a tokenizer.
    pub fn of(tokenizer: &Tokenizer) -> Self {
        Specials { pad: tokenizer.pad(), bos: tokenizer.bos(), eos: tokenizer.eos() }
    }
}

/// Token numbers in rows of one length, `[B, N]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Row by row, filled up.
    pub ids: Vec<u32>,
    /// How many tokens of each row count.
    pub lengths: Vec<usize>,
    /// The length of every row.
    pub length: usize,
}

impl Rows {
    /// Fills up to the longest.
    pub fn new(rows: &[Vec<u32>], pad: u32) -> Self {
        let length = rows.iter().map(Vec::len).max().unwrap_or(0).max(1);
        let mut ids = Vec::with_capacity(rows.len() * length);
        for row in rows {
            ids.extend_from_slice(row);
            ids.resize(ids.len() + length - row.len(), pad);
        }
        Rows { ids, lengths: rows.iter().map(Vec::len).collect(), length }
    }

    /// How many rows.
    pub fn len(&self) -> usize {
        self.lengths.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.lengths.is_empty()
    }

    /// The lengths, where they differ from the length of the rows.
    pub fn ragged(&self) -> Option<&[usize]> {
        self.lengths.iter().any(|&length| length != self.length).then_some(&self.lengths)
    }
}

/// Source sentences and, to train on, what should come out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Source tokens, each row with its end.
    pub source: Rows,
    /// What the decoder is shown: a start, then the target.
    pub shown: Rows,
    /// What it should say: the target, then its end. Filled up with `pad`.
    pub wanted: Vec<u32>,
}

impl Batch {
    /// From the tokens of both sides, without special tokens.
    pub fn new<'a>(pairs: impl IntoIterator<Item = (&'a [u32], &'a [u32])>, specials: Specials) -> Self {
        let Specials { pad, bos, eos } = specials;
        let (mut source, mut shown, mut wanted) = (Vec::new(), Vec::new(), Vec::new());
        for (from, to) in pairs {
            source.push(ended(from, eos));
            shown.push([&[bos], to].concat());
            wanted.push(ended(to, eos));
        }
        Batch { source: Rows::new(&source, pad), shown: Rows::new(&shown, pad), wanted: Rows::new(&wanted, pad).ids }
    }

    /// How many target tokens count.
    pub fn tokens(&self) -> usize {
        self.shown.lengths.iter().sum()
    }
}

/// A sentence with its end.
pub(crate) fn ended(tokens: &[u32], eos: u32) -> Vec<u32> {
    [tokens, &[eos]].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_filled_up_and_the_decoder_is_shown_what_came_before() {
        let specials = Specials { pad: 0, bos: 1, eos: 2 };
        let batch = Batch::new([(&[7u32, 8][..], &[5u32][..]), (&[9][..], &[5, 6, 4][..])], specials);
        assert_eq!(batch.source.ids, [7, 8, 2, 9, 2, 0]);
        assert_eq!(batch.source.lengths, [3, 2]);
        assert_eq!(batch.shown.ids, [1, 5, 0, 0, 1, 5, 6, 4]);
        assert_eq!(batch.wanted, [5, 2, 0, 0, 5, 6, 4, 2]);
        assert_eq!(batch.tokens(), 6);
        assert_eq!(batch.source.ragged(), Some(&[3, 2][..]));
    }

    #[test]
    fn an_empty_row_is_all_filling() {
        let rows = Rows::new(&[vec![], vec![4, 5], vec![]], 9);
        assert_eq!(rows.ids, [9, 9, 4, 5, 9, 9]);
        assert_eq!(Rows::new(&[vec![]], 9).ids, [9]);
    }
}
