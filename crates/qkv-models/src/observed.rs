//! One pass of a model with its attentions captured, for drawing alignments and for the explorer: inputs and outputs of
//! every attention, and the log-probabilities of every step. Weights are recomputed on demand.

use crate::batch::{Batch, Rows, with_eos};
use crate::model::{AttentionSite, Group};
use crate::observed_attention::{ObservedAttention, observed, stacked};
use crate::probabilities::probabilities;
use crate::{Document, Encoder, Error, Generator, Han, Result, Translator, han};
use qkv::{Mask, OwnedInputs, Tensor};
use qkv_formats::numbers;
use qkv_nn::{Captured, Gradients, Machine, Parameters, Pool, Tape};

/// A captured pass. Attention weights are not stored.
#[derive(Clone, Debug)]
pub struct Observed {
    /// Tokens of the source, its end token last.
    pub source: Vec<u32>,
    /// Input of the decoder: a start token and the target; for a decoder-only model, the source precedes them.
    pub decoder_input: Vec<u32>,
    /// The token predicted at each step: the target and its end token.
    pub targets: Vec<u32>,
    /// Every attention: encoder, decoder, cross.
    pub attentions: Vec<ObservedAttention>,
    /// Log-probability of every token at every step, `[steps, V]`.
    pub log_probabilities: Tensor<f32, 2>,
}

/// How much each target token attended to each source token.
#[derive(Clone, Debug, PartialEq)]
pub struct Alignment {
    /// Tokens of the source, its end token last.
    pub source: Vec<u32>,
    /// Tokens of the target, its end token last.
    pub target: Vec<u32>,
    /// A row for each target token, a weight for each source token.
    pub weights: Vec<Vec<f32>>,
}

impl Translator {
    /// A batch of one pair, if it fits the model.
    fn observed_batch(&self, source: &[u32], target: &[u32]) -> Result<Batch> {
        let batch = Batch::new([(source, target)], self.model.config().specials());
        let (source, target) = (batch.source.length, batch.decoder_input.length);
        if !self.model.fits(source, target) {
            let max_len = self.model.max_len();
            let what = format!("source and target have {source} and {target} tokens, the model takes {max_len}");
            return Err(Error::invalid(what));
        }
        Ok(batch)
    }

    /// Runs the model over a source and a target, both without special tokens, and captures its attentions.
    ///
    /// # Errors
    /// If a side is too long for the model.
    pub fn observe(&self, source: &[u32], target: &[u32], machine: &Machine) -> Result<Observed> {
        let batch = self.observed_batch(source, target)?;
        let pool = Pool::new();
        let mut tape = Tape::inference(&self.parameters, &pool, machine);
        tape.capture();
        let scores = self.model.scores(&mut tape, &batch.source, &batch.decoder_input)?;
        let captured = tape.captured();
        let sites = self.model.sites();
        let attentions = sites.iter().map(|site| observed(site, &site.calls(&captured), &self.parameters));
        let specials = self.model.config().specials();
        let decoder_input = [&[specials.bos], target].concat();
        let source = with_eos(source, specials.eos);
        let joined = self.model.gpt().is_some();
        Ok(Observed {
            decoder_input: if joined { [&source[..], &decoder_input].concat() } else { decoder_input },
            source,
            targets: with_eos(target, specials.eos),
            attentions: attentions.collect::<Result<_>>()?,
            log_probabilities: log_softmax(scores.value().data(), batch.decoder_input.length)?,
        })
    }

    /// How much the loss of a target depends on each head of each attention, ordered as by
    /// [`observe`](Translator::observe): the absolute gradient of the mean loss with respect to a gate on the head's
    /// output (Michel et al. 2019, arXiv:1905.10650).
    ///
    /// # Errors
    /// As [`observe`](Translator::observe).
    pub fn importance(&self, source: &[u32], target: &[u32], machine: &Machine) -> Result<Vec<Vec<f64>>> {
        let batch = self.observed_batch(source, target)?;
        let (pool, mut gradients) = (Pool::new(), Gradients::of(&self.parameters));
        let mut tape = Tape::training(&self.parameters, &mut gradients, &pool, machine, 0).without_noise();
        tape.capture();
        self.model.loss(&mut tape, &batch, 0.0, 1.0 / batch.tokens() as f64)?;
        let captured = tape.captured();
        tape.backward();
        let gates = |site: AttentionSite| {
            let calls = site.calls(&captured);
            let gate = |call: &&Captured<f32>, head: usize| call.gates().map_or(0.0, |gates| gates[head]);
            let heads = calls.first().map_or(0, |call| call.shape()[1]);
            (0..heads).map(|head| calls.iter().map(|call| gate(call, head)).sum::<f64>().abs()).collect()
        };
        Ok(self.model.sites().into_iter().map(gates).collect())
    }

    /// Attention from each target token to the source: the weights of the layer that aligns best, averaged over heads.
    /// Only that layer is captured, and no logits are computed.
    ///
    /// # Errors
    /// As [`observe`](Translator::observe).
    pub fn align(&self, source: &[u32], target: &[u32], machine: &Machine) -> Result<Alignment> {
        let site = self.model.alignment_site();
        let site = site.ok_or_else(|| Error::invalid("the model has no attention to its source"))?;
        let batch = self.observed_batch(source, target)?;
        let pool = Pool::new();
        let mut tape = Tape::inference(&self.parameters, &pool, machine);
        let label = site.label.clone();
        tape.capture_where(move |captured| captured == label);
        self.model.hidden(&mut tape, &batch.source, &batch.decoder_input)?;
        let captured = tape.captured();
        let attention = observed(&site, &site.calls(&captured), &self.parameters)?;
        let eos = self.model.config().specials().eos;
        let (source, target) = (with_eos(source, eos), with_eos(target, eos));
        // In a joined sequence the target's queries follow the source's.
        let first = if site.group == Group::Decoder { source.len() } else { 0 };
        let rows = attention.mean_over_heads()?.into_iter().skip(first).take(target.len());
        let weights = rows.map(|mut row| {
            row.truncate(source.len());
            row
        });
        Ok(Alignment { weights: weights.collect(), source, target })
    }
}

impl Generator {
    /// Runs the model over tokens and captures its attentions. The last step predicts the most probable next token.
    ///
    /// # Errors
    /// If there are no tokens, or too many for the model.
    pub fn observe(&self, tokens: &[u32], machine: &Machine) -> Result<Observed> {
        let max_len = self.model.max_len();
        if tokens.is_empty() || tokens.len() > max_len {
            return Err(Error::invalid(format!(
                "the text has {} tokens, the model takes 1 to {max_len}",
                tokens.len()
            )));
        }
        let pool = Pool::new();
        let mut tape = Tape::inference(&self.parameters, &pool, machine);
        tape.capture();
        let input = Rows::new(&[tokens.to_vec()], self.model.config().pad_token_id);
        let scores = self.model.scores(&mut tape, &Rows::none(1), &input)?;
        let log_probabilities = log_softmax(scores.value().data(), tokens.len())?;
        let width = log_probabilities.shape()[1];
        let last = &log_probabilities.data()[(tokens.len() - 1) * width..];
        let next = (0..width).reduce(|best, at| if last[at] > last[best] { at } else { best }).unwrap_or(0);
        Ok(Observed {
            source: Vec::new(),
            decoder_input: tokens.to_vec(),
            targets: [&tokens[1..], &[next as u32]].concat(),
            attentions: stacked(Group::Decoder, &tape.captured(), &self.parameters)?,
            log_probabilities,
        })
    }
}

impl Encoder {
    /// Runs the model over one text or two and captures its attentions.
    ///
    /// # Errors
    /// Errors from `qkv`.
    pub fn observe(&self, first: &str, second: Option<&str>, machine: &Machine) -> Result<Observed> {
        let (tokens, segments) = self.tokens(first, second, usize::MAX);
        let pool = Pool::new();
        let mut tape = Tape::inference(&self.parameters, &pool, machine);
        tape.capture();
        let rows = Rows::new(std::slice::from_ref(&tokens), self.config.pad_token_id);
        self.model.forward(&mut tape, &rows, &segments)?;
        Ok(Observed {
            source: tokens,
            decoder_input: Vec::new(),
            targets: Vec::new(),
            attentions: stacked(Group::Encoder, &tape.captured(), &self.parameters)?,
            log_probabilities: Tensor::new(Vec::new(), [0, 0])?,
        })
    }
}

/// A captured pass over a document.
#[derive(Clone, Debug)]
pub struct ObservedDocument {
    /// The tokenized document.
    pub document: Document,
    /// The probability of each class.
    pub probabilities: Vec<f32>,
    /// Attention of the sentences to their words, with all words of the document side by side, and attention of the
    /// document to its sentences; `None` for a document without words.
    pub attentions: Option<[ObservedAttention; 2]>,
}

impl Han {
    /// Runs the model over a text and captures both levels of attention.
    ///
    /// # Errors
    /// Errors from `qkv`.
    pub fn observe(&self, text: &str, machine: &Machine) -> Result<ObservedDocument> {
        let document = self.cut(text);
        let pool = Pool::new();
        let mut tape = Tape::inference(&self.parameters, &pool, machine);
        tape.capture();
        let x = self.model.forward(&mut tape, &[&document], self.tokenizer.pad())?;
        let captured = tape.captured();
        let scores = self.model.head().forward(&mut tape, &x);
        let probabilities = probabilities(scores.value().data(), scores.value().width()).remove(0);
        let site = |group, label: &str| AttentionSite { group, layer: 0, label: label.into() };
        let (words, sentences) = (site(Group::Words, "words.attention"), site(Group::Sentences, "sentences.attention"));
        let of_words = words.calls(&captured);
        let attentions = if of_words.is_empty() {
            None
        } else {
            let of_sentences = observed(&sentences, &sentences.calls(&captured), &self.parameters)?;
            Some([words_side_by_side(&document, &of_words, &self.parameters)?, of_sentences])
        };
        Ok(ObservedDocument { document, probabilities, attentions })
    }
}

/// Attention of the sentences to their words as one call: a query for each sentence, all words as keys, and a mask that
/// lets each sentence see its own. The model computed it for groups of sentences of similar length.
fn words_side_by_side(
    document: &Document,
    captured: &[&Captured<f32>],
    parameters: &Parameters<f32>,
) -> Result<ObservedAttention> {
    let all: Vec<&Vec<u32>> = document.sentences.iter().collect();
    let groups: Vec<OwnedInputs<f32>> = captured.iter().map(|group| group.inputs(parameters)).collect();
    // The group that each sentence was computed in, and its row there.
    let mut places = vec![(0, 0); all.len()];
    for (group, members) in han::grouped(&all).iter().enumerate() {
        members.iter().enumerate().for_each(|(at, &sentence)| places[sentence] = (group, at));
    }
    let words: Vec<(usize, usize)> =
        all.iter().enumerate().flat_map(|(sentence, ids)| (0..ids.len()).map(move |word| (sentence, word))).collect();
    let rows = |pick: fn(&OwnedInputs<f32>) -> &Tensor<f32, 4>| {
        let width = pick(&groups[0]).shape()[3];
        Tensor::from_fn([1, 1, words.len(), width], |[_, _, at, x]| {
            let (sentence, word) = words[at];
            let (group, place) = places[sentence];
            pick(&groups[group])[[place, 0, word, x]]
        })
    };
    let mut attention = captured[0].attention().clone();
    attention.mask = Mask::Segments;
    let width = groups[0].q.shape()[3];
    let q = Tensor::from_fn([1, 1, all.len(), width], |[_, _, _, x]| groups[0].q[[0, 0, 0, x]]);
    let mut inputs = groups[0].clone();
    (inputs.q, inputs.k, inputs.v) = (q, rows(|inputs| &inputs.k), rows(|inputs| &inputs.v));
    inputs.lengths = None;
    inputs.segments =
        Some([(0..all.len() as i32).collect(), words.iter().map(|&(sentence, _)| sentence as i32).collect()]);
    let output = attention.forward(inputs.inputs())?;
    Ok(ObservedAttention { group: Group::Words, layer: 0, attention, inputs, output })
}

/// Logits as log-probabilities, `[steps, V]`.
fn log_softmax(scores: &[f32], steps: usize) -> Result<Tensor<f32, 2>> {
    let width = scores.len() / steps.max(1);
    let mut rows = scores.to_vec();
    numbers::log_softmax(&mut rows, width);
    Ok(Tensor::new(rows, [steps, width])?)
}
