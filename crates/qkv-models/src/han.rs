//! Hierarchical attention (Yang et al. 2016, "Hierarchical attention networks for document classification"): a
//! bidirectional GRU reads the words of a sentence and attention pools them to one row; a second level does the same
//! with the sentences of a document. Both attentions have a learned query, and additive scores unless the recipe says
//! otherwise.
//!
//! | module | owns |
//! | --- | --- |
//! | `document` | a text split into sentences of words, within the model's limits |
//! | `reader` | the model with its parameters and tokenizer, and its folder |

mod document;
mod reader;

pub use document::Document;
pub(crate) use reader::inspect;
pub use reader::{Han, ReadSentence, ReadWord, Reading};

use crate::batch::Rows;
use crate::sizes::check_sizes;
use crate::{Error, Result};
use qkv::Attention;
use qkv_nn::layers::{AttentionPool, Builder, Embedding, Gru, Linear, PositionKind};
use qkv_nn::{Float, Tape, Var};
use serde::{Deserialize, Serialize};

/// Sizes and settings of a HAN.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HanConfig {
    /// Width of word embeddings.
    pub d_model: usize,
    /// Width of the GRU states, each direction, of both levels.
    pub hidden: usize,
    /// Width of queries and keys.
    pub attention_width: usize,
    /// Words per sentence; longer sentences are split.
    pub words: usize,
    /// Sentences per document; further ones are not read.
    pub sentences: usize,
    /// The attention of both levels.
    pub attention: Attention,
    /// Weight of the mean attention entropy in the loss, on both levels: positive values concentrate attention.
    pub entropy: f64,
    /// Dropout of words, sentences and documents.
    pub dropout: f64,
    /// Names of the classes.
    pub labels: Vec<String>,
}

impl Default for HanConfig {
    fn default() -> Self {
        HanConfig {
            d_model: 100,
            hidden: 50,
            attention_width: 100,
            words: 60,
            sentences: 100,
            attention: Attention::additive(),
            entropy: 0.0,
            dropout: 0.5,
            labels: Vec::new(),
        }
    }
}

impl HanConfig {
    /// Refuses sizes that are zero or that no machine could hold.
    pub(crate) fn check(&self) -> Result<()> {
        let sizes = [
            ("d_model", self.d_model, 1 << 16),
            ("hidden", self.hidden, 1 << 16),
            ("attention_width", self.attention_width, 1 << 16),
            ("words", self.words, 1 << 16),
            ("sentences", self.sentences, 1 << 16),
        ];
        check_sizes(&sizes)?;
        if !(0.0..1.0).contains(&self.dropout) {
            let what = format!("`dropout` is {}, expected at least 0 and less than 1", self.dropout);
            return Err(Error::invalid(what));
        }
        if !self.entropy.is_finite() {
            return Err(Error::invalid(format!("`entropy` is {}, expected a number", self.entropy)));
        }
        if self.labels.is_empty() {
            return Err(Error::invalid("there are no labels to choose from"));
        }
        Ok(())
    }
}

/// One level: a GRU and attention pooling.
#[derive(Clone, Debug)]
struct Level {
    rnn: Gru,
    pool: AttentionPool,
}

impl Level {
    fn new<T: Float>(at: &mut Builder<'_, T>, config: &HanConfig, inputs: usize) -> Result<Level> {
        let rnn = Gru::new(&mut at.at("rnn"), inputs, config.hidden, 1, true, 0.0);
        let place = &mut at.at("attention");
        let pool = AttentionPool::new(place, &config.attention, 2 * config.hidden, config.attention_width)?;
        Ok(Level { rnn, pool: pool.penalized(config.entropy) })
    }

    /// Pools sequences `x [B, N, C]` of these lengths to one row each, `[B, 1, 2H]`.
    fn forward<T: Float>(&self, tape: &mut Tape<'_, T>, x: Var<T>, lengths: Option<&[usize]>) -> Result<Var<T>> {
        let zeros = self.rnn.zeros(tape, x.shape()[0]);
        let states = self.rnn.forward(tape, x, &zeros, lengths); // (B, N, 2H)
        Ok(self.pool.forward(tape, &states, lengths)?)
    }
}

/// Words per group of sentences: enough to keep the cores busy.
const WORDS: usize = 4096;

/// A HAN: handles to its parameters.
#[derive(Clone, Debug)]
pub(crate) struct HanNetwork {
    tokens: Embedding,
    words: Level,
    sentences: Level,
    head: Linear,
    dropout: f64,
}

impl HanNetwork {
    /// Adds its parameters: `tokens`, `words`, `sentences`, `head`.
    pub fn new<T: Float>(at: &mut Builder<'_, T>, config: &HanConfig, vocabulary: usize) -> Result<HanNetwork> {
        config.check()?;
        let tokens = Embedding::new(&mut at.at("tokens"), vocabulary, config.d_model, PositionKind::None, 0).unscaled();
        let words = Level::new(&mut at.at("words"), config, config.d_model)?;
        let sentences = Level::new(&mut at.at("sentences"), config, 2 * config.hidden)?;
        let head = Linear::new(&mut at.at("head"), 2 * config.hidden, config.labels.len(), true);
        Ok(HanNetwork { tokens, words, sentences, head, dropout: config.dropout })
    }

    /// The linear layer of the head.
    pub fn head(&self) -> Linear {
        self.head
    }

    /// A row per document, `[D, 1, 2H]`, zeros for one without words. Sentences of similar length are computed
    /// together, whatever document they belong to.
    pub fn forward<T: Float>(&self, tape: &mut Tape<'_, T>, documents: &[&Document], pad: u32) -> Result<Var<T>> {
        let lengths: Vec<usize> = documents.iter().map(|document| document.sentences.len()).collect();
        let all: Vec<&Vec<u32>> = documents.iter().flat_map(|document| &document.sentences).collect();
        let mut rows = Vec::new();
        let mut places = vec![0; all.len()];
        let groups = grouped(&all);
        for (at, &sentence) in groups.iter().flatten().enumerate() {
            places[sentence] = at;
        }
        for group in &groups {
            let ids: Vec<Vec<u32>> = group.iter().map(|&sentence| all[sentence].clone()).collect();
            let ids = Rows::new(&ids, pad);
            let x = self.tokens.forward(tape, &ids.ids, ids.length, 0); // (S, N, C)
            let x = tape.dropout(x, self.dropout);
            rows.push(self.words.forward(tape, x, ids.ragged())?); // (S, 1, 2H)
        }
        let longest = lengths.iter().copied().max().unwrap_or(0).max(1);
        if rows.is_empty() {
            rows.push(self.nothing(tape));
        }
        let mut from = 0;
        let mut put = Vec::with_capacity(documents.len() * longest);
        for &length in &lengths {
            put.extend((0..longest).map(|at| (at < length).then(|| places[from + at])));
            from += length;
        }
        let x = tape.gather(&rows.iter().collect::<Vec<_>>(), &put, [documents.len(), longest]); // (D, S, 2H)
        drop(rows);
        let x = tape.dropout(x, self.dropout);
        let ragged = lengths.iter().any(|&length| length != longest);
        let x = self.sentences.forward(tape, x, ragged.then_some(&lengths))?; // (D, 1, 2H)
        Ok(tape.dropout(x, self.dropout))
    }

    /// A placeholder row, for when no document has a word.
    fn nothing<T: Float>(&self, tape: &Tape<'_, T>) -> Var<T> {
        let states = self.words.rnn.zeros(tape, 1).remove(0); // (1, 1, H)
        let width = 2 * states.value().width();
        tape.constant(qkv_nn::Tensor::new(vec![T::ZERO; width], &[1, 1, width]))
    }
}

/// Indices of sentences in groups of similar length.
pub(crate) fn grouped(sentences: &[&Vec<u32>]) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..sentences.len()).collect();
    order.sort_by_key(|&at| (sentences[at].len(), at));
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for at in order {
        match groups.last_mut() {
            Some(group) if (group.len() + 1) * sentences[at].len() <= WORDS => group.push(at),
            _ => groups.push(vec![at]),
        }
    }
    groups
}
