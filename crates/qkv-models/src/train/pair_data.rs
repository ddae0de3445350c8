//! Pairs of texts, tokenized once; a batch may have them in another segmentation, or with words hidden.

use super::augmentation::Augmentation;
use crate::batch::{Batch, SpecialTokens};
use crate::draws::Draws;
use crate::text::batches::{Batching, Lengths};
use crate::text::corpus::Pair;
use crate::text::tokenizer::Tokenizer;
use crate::text::tokenizer::merges::Merges;
use crate::{Error, Recipe, Result};

/// Source and target tokens of a pair.
type PairTokens = (Vec<u32>, Vec<u32>);

pub(super) struct PairData {
    /// The training pairs.
    pub train: Vec<PairTokens>,
    /// Their lengths, special tokens included.
    pub lengths: Vec<Lengths>,
    /// Validation pairs.
    pub dev: Vec<Pair>,
    pub batching: Batching,
    specials: SpecialTokens,
    /// The token that replaces a hidden word.
    unknown: u32,
    /// The merges that a batch may skip.
    merges: Option<Merges>,
    /// Whether both sides are one sequence.
    one: bool,
}

impl PairData {
    /// Tokenizes pairs. `one` means that the model reads both sides as one sequence.
    ///
    /// # Errors
    /// If merges are to be skipped and the tokenizer has none.
    pub fn new(recipe: &Recipe, tokenizer: &Tokenizer, train: &[Pair], dev: Vec<Pair>, one: bool) -> Result<Self> {
        let merges = if recipe.train.bpe_dropout > 0.0 { Merges::of(tokenizer) } else { None };
        if recipe.train.bpe_dropout > 0.0 && merges.is_none() {
            return Err(Error::invalid("`train.bpe_dropout` leaves out merges, and the tokenizer has none")
                .with_hint("set `tokenizer.kind` to `bpe`"));
        }
        let train: Vec<PairTokens> =
            train.iter().map(|pair| (tokenizer.encode(&pair.source), tokenizer.encode(&pair.target))).collect();
        let lengths = train.iter().map(|pair| lengths(pair, one)).collect();
        let batching = Batching { tokens: recipe.train.tokens, longest: recipe.train.longest };
        let unknown = tokenizer.unk().unwrap_or(tokenizer.pad());
        Ok(PairData { train, lengths, dev, batching, specials: SpecialTokens::of(tokenizer), unknown, merges, one })
    }

    /// Builds a batch.
    pub fn batch(&self, entries: &[usize], mut augmentation: Augmentation) -> Batch {
        if self.merges.is_none() && augmentation.words <= 0.0 {
            return Batch::new(entries.iter().map(|&at| sides(&self.train[at])), self.specials);
        }
        let pairs = augmentation.each(entries, |how, at, draws| self.cut_again(at, how, draws));
        let mut batch = Batch::new(pairs.iter().map(sides), self.specials);
        let hidden = |id: &mut u32| {
            let SpecialTokens { pad, bos, eos } = self.specials;
            // Start, end and padding are not words.
            if ![pad, bos, eos].contains(id) && augmentation.draws.unit() < augmentation.words {
                *id = self.unknown;
            }
        };
        if augmentation.words > 0.0 {
            batch.source.ids.iter_mut().chain(&mut batch.decoder_input.ids).for_each(hidden);
        }
        batch
    }

    /// A pair with merges skipped, or unchanged if that would be too long.
    fn cut_again(&self, at: usize, how: &Augmentation, draws: &mut Draws) -> PairTokens {
        let pair = &self.train[at];
        let Some(merges) = &self.merges else { return pair.clone() };
        let mut cut = |ids: &[u32]| merges.dropout(ids, how.merges, draws);
        let again = (cut(&pair.0), cut(&pair.1));
        let Lengths { source, target } = lengths(&again, self.one);
        if source.max(target) <= self.batching.longest { again } else { pair.clone() }
    }
}

/// Both sides, as slices for a batch.
fn sides((source, target): &PairTokens) -> (&[u32], &[u32]) {
    (source, target)
}

/// The lengths of a pair, special tokens included.
fn lengths((source, target): &PairTokens, one: bool) -> Lengths {
    let (source, target) = (source.len() + 1, target.len() + 1);
    Lengths { source, target: if one { source + target } else { target } }
}
