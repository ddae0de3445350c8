//! Batches of token sequences: padded rows, and the three sequences that training needs for each pair.

use crate::text::tokenizer::Tokenizer;

/// Ids of the special tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpecialTokens {
    /// Pads shorter sequences.
    pub pad: u32,
    /// Starts a target sequence.
    pub bos: u32,
    /// Ends a sequence.
    pub eos: u32,
}

impl SpecialTokens {
    /// The special tokens of a tokenizer.
    pub fn of(tokenizer: &Tokenizer) -> Self {
        SpecialTokens { pad: tokenizer.pad(), bos: tokenizer.bos(), eos: tokenizer.eos() }
    }
}

/// Token ids in rows of equal length, `[B, N]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Row by row, padded.
    pub ids: Vec<u32>,
    /// Number of tokens in each row, without padding.
    pub lengths: Vec<usize>,
    /// The length of every row, with padding.
    pub length: usize,
}

impl Rows {
    /// Pads rows to the longest.
    pub fn new(rows: &[Vec<u32>], pad: u32) -> Self {
        let length = rows.iter().map(Vec::len).max().unwrap_or(0).max(1);
        let mut ids = Vec::with_capacity(rows.len() * length);
        for row in rows {
            ids.extend_from_slice(row);
            ids.resize(ids.len() + length - row.len(), pad);
        }
        Rows { ids, lengths: rows.iter().map(Vec::len).collect(), length }
    }

    /// `count` empty rows.
    pub fn none(count: usize) -> Self {
        Rows { ids: Vec::new(), lengths: vec![0; count], length: 0 }
    }

    /// The tokens of a row, without padding.
    pub fn row(&self, at: usize) -> &[u32] {
        &self.ids[at * self.length..][..self.lengths[at]]
    }

    /// Concatenates each row with the row of `others` at the same place.
    pub fn joined(&self, others: &Rows, pad: u32) -> Rows {
        if self.length == 0 {
            return others.clone();
        }
        let rows: Vec<Vec<u32>> = (0..self.len()).map(|at| [self.row(at), others.row(at)].concat()).collect();
        Rows::new(&rows, pad)
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.lengths.len()
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.lengths.is_empty()
    }

    /// The lengths, if any row is padded.
    pub fn ragged(&self) -> Option<&[usize]> {
        self.lengths.iter().any(|&length| length != self.length).then_some(&self.lengths)
    }
}

/// A target that the loss ignores.
pub const IGNORE: u32 = u32::MAX;

/// Pairs of sequences for training and teacher forcing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Source tokens, each row with its end token.
    pub source: Rows,
    /// Input of the decoder: a start token, then the target.
    pub decoder_input: Rows,
    /// Tokens to predict: the target, then its end token, padded with [`IGNORE`].
    pub targets: Vec<u32>,
    /// Lengths of the sequences packed in the single row of `decoder_input`; empty if each row is a sequence.
    pub packed: Vec<usize>,
}

impl Batch {
    /// From the tokens of both sides, without special tokens.
    pub fn new<'a>(pairs: impl IntoIterator<Item = (&'a [u32], &'a [u32])>, specials: SpecialTokens) -> Self {
        let SpecialTokens { pad, bos, eos } = specials;
        let (mut source, mut decoder_input, mut targets) = (Vec::new(), Vec::new(), Vec::new());
        for (from, to) in pairs {
            source.push(with_eos(from, eos));
            decoder_input.push([&[bos], to].concat());
            targets.push(with_eos(to, eos));
        }
        Batch {
            source: Rows::new(&source, pad),
            decoder_input: Rows::new(&decoder_input, pad),
            targets: Rows::new(&targets, IGNORE).ids,
            packed: Vec::new(),
        }
    }

    /// Rows of tokens, some of which are to be predicted, each from the tokens before it.
    ///
    /// # Panics
    /// If a row has fewer than two tokens.
    pub fn of_answers<'a>(rows: impl IntoIterator<Item = (&'a [u32], &'a [bool])>, pad: u32) -> Self {
        let (mut decoder_input, mut targets) = (Vec::new(), Vec::new());
        for (ids, answers) in rows {
            assert!(ids.len() > 1 && ids.len() == answers.len(), "a row has two tokens or more");
            decoder_input.push(ids[..ids.len() - 1].to_vec());
            let target = |(&id, &answer): (&u32, &bool)| if answer { id } else { IGNORE };
            targets.push(ids.iter().zip(answers).skip(1).map(target).collect());
        }
        Batch {
            source: Rows::none(decoder_input.len()),
            decoder_input: Rows::new(&decoder_input, pad),
            targets: Rows::new(&targets, IGNORE).ids,
            packed: Vec::new(),
        }
    }

    /// Concatenates the rows into one, without padding; attention stays within each sequence.
    pub fn in_one_row(self) -> Self {
        let Batch { decoder_input, targets, .. } = self;
        let rows = 0..decoder_input.len();
        let ids: Vec<u32> = rows.clone().flat_map(|at| decoder_input.row(at).to_vec()).collect();
        let target = |at: usize| targets[at * decoder_input.length..][..decoder_input.lengths[at]].to_vec();
        let targets = rows.flat_map(target).collect();
        let length = ids.len();
        Batch {
            source: Rows::none(1),
            decoder_input: Rows { ids, lengths: vec![length], length },
            targets,
            packed: decoder_input.lengths,
        }
    }

    /// Rows of plain text: every token predicts the next, and there is no source.
    ///
    /// # Panics
    /// If a row has fewer than two tokens, or rows differ in length.
    pub fn of_text<'a>(rows: impl IntoIterator<Item = &'a [u32]>) -> Self {
        let (mut decoder_input, mut targets, mut count, mut length) = (Vec::new(), Vec::new(), 0, 0);
        for row in rows {
            let (_, after) = row.split_first().expect("a row has tokens");
            assert!(!after.is_empty() && (count == 0 || after.len() == length), "rows of one length");
            (count, length) = (count + 1, after.len());
            decoder_input.extend_from_slice(&row[..length]);
            targets.extend_from_slice(after);
        }
        Batch {
            source: Rows::none(count),
            decoder_input: Rows { ids: decoder_input, lengths: vec![length; count], length },
            targets,
            packed: Vec::new(),
        }
    }

    /// Targets of a source and target joined in one sequence: ignored over the source, then the target and its end
    /// token.
    pub(crate) fn targets_after_source(&self) -> Vec<u32> {
        let row = |at: usize| {
            let targets = &self.targets[at * self.decoder_input.length..][..self.decoder_input.lengths[at]];
            [&vec![IGNORE; self.source.lengths[at]][..], targets].concat()
        };
        Rows::new(&(0..self.decoder_input.len()).map(row).collect::<Vec<_>>(), IGNORE).ids
    }

    /// Number of tokens to predict.
    pub fn tokens(&self) -> usize {
        self.targets.iter().filter(|&&id| id != IGNORE).count()
    }
}

/// Tokens with an end token.
pub(crate) fn with_eos(tokens: &[u32], eos: u32) -> Vec<u32> {
    [tokens, &[eos]].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_filled_up_and_the_decoder_is_shown_what_came_before() {
        let specials = SpecialTokens { pad: 0, bos: 1, eos: 2 };
        let batch = Batch::new([(&[7u32, 8][..], &[5u32][..]), (&[9][..], &[5, 6, 4][..])], specials);
        assert_eq!(batch.source.ids, [7, 8, 2, 9, 2, 0]);
        assert_eq!(batch.source.lengths, [3, 2]);
        assert_eq!(batch.decoder_input.ids, [1, 5, 0, 0, 1, 5, 6, 4]);
        assert_eq!(batch.targets, [5, 2, IGNORE, IGNORE, 5, 6, 4, 2]);
        assert_eq!(batch.tokens(), 6);
        assert_eq!(batch.source.ragged(), Some(&[3, 2][..]));
    }

    #[test]
    fn a_source_and_its_target_as_one_row_want_the_target_alone() {
        let specials = SpecialTokens { pad: 0, bos: 1, eos: 2 };
        let batch = Batch::new([(&[7u32, 8][..], &[5u32][..]), (&[9][..], &[5, 6, 4][..])], specials);
        let joined = batch.source.joined(&batch.decoder_input, 0);
        assert_eq!(joined.ids, [7, 8, 2, 1, 5, 0, 9, 2, 1, 5, 6, 4]);
        assert_eq!(joined.lengths, [5, 6]);
        let none = IGNORE;
        assert_eq!(batch.targets_after_source(), [none, none, none, 5, 2, none, none, none, 5, 6, 4, 2]);
    }

    #[test]
    fn answers_alone_are_wanted_and_a_row_may_hold_several_sequences() {
        let none = IGNORE;
        let (first, second) = ([3, 4, 5, 6], [7, 8]);
        let rows = [(&first[..], &[false, false, true, true][..]), (&second[..], &[false, true][..])];
        let batch = Batch::of_answers(rows, 0);
        assert_eq!(batch.decoder_input.ids, [3, 4, 5, 7, 0, 0]);
        assert_eq!((&batch.targets[..], batch.tokens()), (&[none, 5, 6, 8, none, none][..], 3));
        let packed = batch.in_one_row();
        assert_eq!((&packed.decoder_input.ids[..], &packed.packed[..]), (&[3, 4, 5, 7][..], &[3, 1][..]));
        assert_eq!((&packed.targets[..], packed.tokens()), (&[none, 5, 6, 8][..], 3));
    }

    #[test]
    fn in_a_text_each_token_is_wanted_after_the_one_before() {
        let batch = Batch::of_text([&[3u32, 4, 5][..], &[6, 7, 8][..]]);
        assert_eq!((batch.decoder_input.ids, batch.targets), (vec![3, 4, 6, 7], vec![4, 5, 7, 8]));
        assert_eq!(batch.source.joined(&Rows::new(&[vec![1]], 0), 0).ids, [1]);
    }

    #[test]
    fn an_empty_row_is_all_filling() {
        let rows = Rows::new(&[vec![], vec![4, 5], vec![]], 9);
        assert_eq!(rows.ids, [9, 9, 4, 5, 9, 9]);
        assert_eq!(Rows::new(&[vec![]], 9).ids, [9]);
    }
}
