//! One pass of a model over a sentence and its translation, kept for looking at: every attention, and what the model expected
//! next at each step.

use crate::batch::{Rows, ended};
use crate::classifier::probabilities;
use crate::model::{Group, Site};
use crate::{Batch, Document, Encoder, Error, Generator, Han, Result, Translator, han};
use qkv::{Attention, Mask, Output, OwnedInputs, Place, Tensor};
use qkv_nn::{Captured, Gradients, Machine, Parameters, Pool, Tape};

/// What was kept of one pass. Nothing in it is as large as the weights.
#[derive(Clone, Debug)]
pub struct Observed {
    /// The source, cut; its end last.
    pub source: Vec<u32>,
    /// What the decoder was shown: a start, then the target; to a model without an encoder, after the source.
    pub read: Vec<u32>,
    /// What it wrote at each of those steps: the target, then its end.
    pub written: Vec<u32>,
    /// Every attention: encoder, decoder, cross.
    pub attentions: Vec<Attended>,
    /// The log-probability of every token at every step, `[steps, V]`.
    pub log_probabilities: Tensor<f32, 2>,
}

/// One attention of a pass.
#[derive(Clone, Debug)]
pub struct Attended {
    /// Which part of the model it belongs to.
    pub group: Group,
    /// Which layer of that part.
    pub layer: usize,
    /// What was computed.
    pub attention: Attention,
    /// From what.
    pub inputs: OwnedInputs<f32>,
    /// And what came out.
    pub output: Output<f32>,
}

impl Attended {
    /// The weights of one head, `[N, M]`, recomputed exactly.
    ///
    /// # Errors
    /// Where there is no such head.
    pub fn weights(&self, head: usize) -> Result<Tensor<f32, 2>> {
        let rows = 0..self.inputs.q.shape()[2];
        Ok(self.attention.weights(self.inputs.inputs(), &self.output)?.rows(0, head, rows)?)
    }
}

/// Which source tokens each target token looked at.
#[derive(Clone, Debug, PartialEq)]
pub struct Alignment {
    /// The source, cut; its end last.
    pub source: Vec<u32>,
    /// The target, cut; its end last.
    pub target: Vec<u32>,
    /// One row for each target token, one weight for each source token.
    pub weights: Vec<Vec<f32>>,
}

impl Translator {
    fn observed_batch(&self, source: &[u32], target: &[u32]) -> Result<Batch> {
        let batch = Batch::new([(source, target)], self.model.config().specials());
        if !self.model.takes(batch.source.length, batch.shown.length) {
            let (source, shown, most) = (batch.source.length, batch.shown.length, self.model.most());
            let what = format!("the source has {source} tokens and the target {shown}, the model takes at most {most}");
            return Err(Error::invalid(what));
        }
        Ok(batch)
    }

    /// Runs the model over a source and a target, without special tokens, and keeps what it attended to.
    ///
    /// # Errors
    /// Where a side is longer than the model takes.
    pub fn observe(&self, source: &[u32], target: &[u32], machine: &Machine) -> Result<Observed> {
        let batch = self.observed_batch(source, target)?;
        let pool = Pool::new();
        let mut tape = Tape::inference(&self.parameters, &pool, machine);
        tape.capture();
        let scores = self.model.scores(&mut tape, &batch.source, &batch.shown)?;
        let captured = tape.captured();
        let sites = self.model.sites();
        let attentions = sites.iter().map(|site| attended(site, &site.calls(&captured), &self.parameters));
        let specials = self.model.config().specials();
        let shown = [&[specials.bos], target].concat();
        let source = ended(source, specials.eos);
        Ok(Observed {
            read: if self.model.gpt().is_some() { [&source[..], &shown].concat() } else { shown },
            source,
            written: ended(target, specials.eos),
            attentions: attentions.collect::<Result<_>>()?,
            log_probabilities: log_softmax(scores.value().data(), batch.shown.length)?,
        })
    }

    /// How much the loss of a target depends on each head of each attention, in the order of [`observe`](Translator::observe):
    /// the size of the gradient of the mean loss with respect to a gate on the head (Michel et al. 2019, arXiv:1905.10650).
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
        let gates = |site: Site| {
            let calls = site.calls(&captured);
            let gate = |call: &&Captured<f32>, head: usize| call.gates().map_or(0.0, |gates| gates[head]);
            let heads = calls.first().map_or(0, |call| call.shape()[1]);
            (0..heads).map(|head| calls.iter().map(|call| gate(call, head)).sum::<f64>().abs()).collect()
        };
        Ok(self.model.sites().into_iter().map(gates).collect())
    }

    /// Where each token of a target looked in its source: the weights of the decoder's attention to the encoder, averaged over
    /// the heads of the layer that aligns best (the last but one where there are several).
    ///
    /// # Errors
    /// As [`observe`](Translator::observe).
    pub fn align(&self, source: &[u32], target: &[u32], machine: &Machine) -> Result<Alignment> {
        // A decoder-only model sees both sides as one sequence: the target's rows, the source's columns.
        let group = if self.model.gpt().is_some() { Group::Decoder } else { Group::Cross };
        let layer = self.model.alignment_layer();
        let site = self.model.sites().into_iter().find(|site| (site.group, site.layer) == (group, layer));
        let site = site.ok_or_else(|| Error::invalid("the model has no attention to its source"))?;
        let batch = self.observed_batch(source, target)?;
        let pool = Pool::new();
        let mut tape = Tape::inference(&self.parameters, &pool, machine);
        let label = site.label.clone();
        tape.capture_where(move |captured| captured == label);
        self.model.given(&mut tape, &batch.source, &batch.shown)?;
        let captured = tape.captured();
        let attentions = [attended(&site, &site.calls(&captured), &self.parameters)?];
        let eos = self.model.config().specials().eos;
        let (source, written) = (ended(source, eos), ended(target, eos));
        let first = if group == Group::Decoder { source.len() } else { 0 };
        let mut weights = vec![vec![0.0f32; source.len()]; written.len()];
        for seen in &attentions {
            let [_, heads, _, _] = seen.inputs.q.shape();
            let keys = seen.inputs.k.shape()[2];
            for head in 0..heads {
                let of_head = seen.weights(head)?;
                for (sums, row) in weights.iter_mut().zip(of_head.data().chunks_exact(keys).skip(first)) {
                    sums.iter_mut().zip(row).for_each(|(sum, &w)| *sum += w / heads as f32);
                }
            }
        }
        Ok(Alignment { source, target: written, weights })
    }
}

/// Every attention of a stack of layers that attend to their own sequence.
pub(crate) fn stacked(group: Group, captured: &[Captured<f32>], parameters: &Parameters<f32>) -> Result<Vec<Attended>> {
    let site = |layer: usize| Site { group, layer, label: format!("layers.{layer}.self_attn") };
    (0..captured.len()).map(site).map(|site| attended(&site, &site.calls(captured), parameters)).collect()
}

impl Generator {
    /// Runs the model over tokens, and keeps what each attended to. The last step writes what the model holds likeliest.
    ///
    /// # Errors
    /// Where there are none, or more than the model takes.
    pub fn observe(&self, tokens: &[u32], machine: &Machine) -> Result<Observed> {
        let most = self.model.most();
        if tokens.is_empty() || tokens.len() > most {
            return Err(Error::invalid(format!("the text has {} tokens, the model takes 1 to {most}", tokens.len())));
        }
        let pool = Pool::new();
        let mut tape = Tape::inference(&self.parameters, &pool, machine);
        tape.capture();
        let shown = Rows::new(&[tokens.to_vec()], self.model.config().pad_token_id);
        let scores = self.model.scores(&mut tape, &Rows::none(1), &shown)?;
        let log_probabilities = log_softmax(scores.value().data(), tokens.len())?;
        let width = log_probabilities.shape()[1];
        let last = &log_probabilities.data()[(tokens.len() - 1) * width..];
        let likeliest = (0..width).reduce(|most, at| if last[at] > last[most] { at } else { most }).unwrap_or(0);
        Ok(Observed {
            source: Vec::new(),
            read: tokens.to_vec(),
            written: [&tokens[1..], &[likeliest as u32]].concat(),
            attentions: stacked(Group::Decoder, &tape.captured(), &self.parameters)?,
            log_probabilities,
        })
    }
}

impl Encoder {
    /// Runs the model over a text, or two, and keeps what each token attended to; nothing is written.
    ///
    /// # Errors
    /// What `qkv` refuses.
    pub fn observe(&self, first: &str, second: Option<&str>, machine: &Machine) -> Result<Observed> {
        let (tokens, segments) = self.tokens(first, second, usize::MAX);
        let pool = Pool::new();
        let mut tape = Tape::inference(&self.parameters, &pool, machine);
        tape.capture();
        self.model.forward(
            &mut tape,
            &Rows::new(std::slice::from_ref(&tokens), self.config.pad_token_id),
            &segments,
        )?;
        Ok(Observed {
            source: tokens,
            read: Vec::new(),
            written: Vec::new(),
            attentions: stacked(Group::Encoder, &tape.captured(), &self.parameters)?,
            log_probabilities: Tensor::new(Vec::new(), [0, 0])?,
        })
    }
}

/// What was kept of a document that was read.
#[derive(Clone, Debug)]
pub struct ObservedDocument {
    /// The text, cut.
    pub document: Document,
    /// The probability of each class.
    pub probabilities: Vec<f32>,
    /// The attention of each sentence to its words, all words of the document side by side, and that of the document to its
    /// sentences; nothing where it has no words.
    pub attentions: Option<[Attended; 2]>,
}

impl Han {
    /// Runs the model over a text, and keeps what was attended to on both levels.
    ///
    /// # Errors
    /// What `qkv` refuses.
    pub fn observe(&self, text: &str, machine: &Machine) -> Result<ObservedDocument> {
        let document = self.cut(text);
        let pool = Pool::new();
        let mut tape = Tape::inference(&self.parameters, &pool, machine);
        tape.capture();
        let x = self.model.forward(&mut tape, &[&document], self.tokenizer.pad())?;
        let captured = tape.captured();
        let scores = self.model.head().forward(&mut tape, &x);
        let probabilities = probabilities(scores.value().data(), scores.value().width()).remove(0);
        let site = |group, label: &str| Site { group, layer: 0, label: label.into() };
        let (words, sentences) = (site(Group::Words, "words.attention"), site(Group::Sentences, "sentences.attention"));
        let of_words = words.calls(&captured);
        let attentions = if of_words.is_empty() {
            None
        } else {
            let of_sentences = attended(&sentences, &sentences.calls(&captured), &self.parameters)?;
            Some([words_side_by_side(&document, &of_words, &self.parameters)?, of_sentences])
        };
        Ok(ObservedDocument { document, probabilities, attentions })
    }
}

/// The attention of sentences to their words, which was computed for groups of sentences of about one length, as one: a query
/// for each sentence, all words as keys, and of those each sees its own.
fn words_side_by_side(
    document: &Document,
    captured: &[&Captured<f32>],
    parameters: &Parameters<f32>,
) -> Result<Attended> {
    let all: Vec<&Vec<u32>> = document.sentences.iter().collect();
    let groups: Vec<OwnedInputs<f32>> = captured.iter().map(|group| group.inputs(parameters)).collect();
    // Where each sentence was computed: the group, and its place there.
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
    Ok(Attended { group: Group::Words, layer: 0, attention, inputs, output })
}

/// The attention of a site: as it was captured, or, for a model that decodes step by step, the steps as queries of one call.
fn attended(site: &Site, calls: &[&Captured<f32>], parameters: &Parameters<f32>) -> Result<Attended> {
    let &Site { group, layer, .. } = site;
    let first = calls.first().ok_or_else(|| Error::invalid(format!("`{}` was not computed", site.label)))?;
    let (mut attention, mut inputs) = (first.attention().clone(), first.inputs(parameters));
    if calls.len() == 1 {
        return Ok(Attended { group, layer, attention, inputs, output: first.output().clone() });
    }
    // The queries of the steps side by side, [1, H, steps, D], each at its own position.
    let steps: Vec<OwnedInputs<f32>> = calls.iter().map(|step| step.inputs(parameters)).collect();
    let [_, heads, _, width] = inputs.q.shape();
    inputs.q = Tensor::from_fn([1, heads, steps.len(), width], |[_, h, step, x]| steps[step].q[[0, h, 0, x]]);
    inputs.positions = Some((0..steps.len() as i64).collect());
    let places = (0..heads).flat_map(|h| (0..steps.len()).map(move |step| (h, step)));
    inputs.center = places.map(|(h, step)| steps[step].center.as_ref().map(|center| center[h])).collect();
    attention.place = Place::Given;
    let output = attention.forward(inputs.inputs())?;
    Ok(Attended { group, layer, attention, inputs, output })
}

/// Scores as log-probabilities, `[steps, V]`.
fn log_softmax(scores: &[f32], steps: usize) -> Result<Tensor<f32, 2>> {
    let width = scores.len() / steps.max(1);
    let mut rows = scores.to_vec();
    for row in rows.chunks_exact_mut(width.max(1)) {
        let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = row.iter().map(|&x| f64::from(x - most).exp()).sum();
        let lse = most + sum.ln() as f32;
        row.iter_mut().for_each(|x| *x -= lse);
    }
    Ok(Tensor::new(rows, [steps, width])?)
}
