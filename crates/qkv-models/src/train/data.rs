//! The data of a run: pairs from files or from a task, cut into tokens once.

use crate::recipe::{Data, Pieces};
use crate::text::batches::Lengths;
use crate::text::corpus::{Corpus, Pair};
use crate::text::tokenizer::Tokenizer;
use crate::{Recipe, Result};

/// Data that is ready to be trained on.
pub(super) struct Prepared {
    /// Source and target tokens of each training pair.
    pub train: Vec<(Vec<u32>, Vec<u32>)>,
    /// Their lengths, as the model sees them.
    pub lengths: Vec<Lengths>,
    /// Pairs to measure on.
    pub dev: Vec<Pair>,
    longest: usize,
}

/// What the pairs of a task are drawn from, besides the seed.
const TASK: u64 = 0x7461_736b;

impl Prepared {
    /// Reads or makes the pairs, and finds the tokenizer unless one is given.
    pub fn new(recipe: &Recipe, tokenizer: Option<Tokenizer>) -> Result<(Prepared, Tokenizer)> {
        let (train, dev) = match &recipe.data {
            Data::Files { train, dev } => (Corpus::read(train)?, Corpus::read(dev)?),
            Data::Task { task, pairs, dev_pairs } => task.split(recipe.seed ^ TASK, *pairs, *dev_pairs),
        };
        let tokenizer = match (tokenizer, &recipe.tokenizer) {
            (Some(tokenizer), _) => tokenizer,
            (None, Pieces::File { file }) => Tokenizer::open(file)?,
            (None, Pieces::Train(kind)) => {
                Tokenizer::train(train.iter().flat_map(|pair| [&pair.source, &pair.target]), *kind)?
            }
        };
        let train: Vec<_> =
            train.iter().map(|pair| (tokenizer.encode(&pair.source), tokenizer.encode(&pair.target))).collect();
        let lengths =
            |(source, target): &(Vec<u32>, Vec<u32>)| Lengths { source: source.len() + 1, target: target.len() + 1 };
        let lengths = train.iter().map(lengths).collect();
        Ok((Prepared { train, lengths, dev, longest: recipe.train.longest }, tokenizer))
    }

    /// In words.
    pub fn summary(&self, vocabulary: usize) -> String {
        let longest = |lengths: &&Lengths| lengths.source.max(lengths.target) > self.longest;
        let long = self.lengths.iter().filter(longest).count();
        let left_out = if long > 0 { format!(" ({long} too long are left out)") } else { String::new() };
        let tokens: usize = self.lengths.iter().map(|lengths| lengths.target).sum();
        format!(
            "{} training pairs{left_out} with {tokens} target tokens, {} to measure on, {vocabulary} pieces",
            self.train.len(),
            self.dev.len()
        )
    }
}
