//! One interface to every model that generates text: encoder, decoder and step-by-step decoding, for training and
//! search. Sizes and their checks are in [`architecture`](crate::architecture); models that read text or look at images
//! ([`Encoder`](crate::Encoder), [`Han`](crate::Han), [`Vit`](crate::Vit)) have their own interfaces.

use crate::architecture::{Architecture, Generative, ModelConfig};
use crate::batch::{Batch, IGNORE, Rows};
use crate::describe::DecoderKind;
use crate::gpt::{Gpt, GptState};
use crate::recurrent::{Recurrent, RecurrentState};
use crate::transformer::{Transformer, TransformerState};
use crate::{Error, Result};
use qkv_nn::layers::Builder;
use qkv_nn::{Activation, Captured, Float, Parameters, PendingLoss, Tape, Target, Tensor, Var};
use qkv_simd::logits::Survey;

/// The part of a model that an attention belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// Self-attention of the encoder.
    Encoder,
    /// Self-attention of the decoder.
    Decoder,
    /// Attention from the decoder to the encoder.
    Cross,
    /// Attention of each sentence of a document to its words.
    Words,
    /// Attention of a document to its sentences.
    Sentences,
    /// Attention of a whole question to an image.
    Hops,
}

impl Group {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Group::Encoder => "encoder",
            Group::Decoder => "decoder",
            Group::Cross => "cross",
            Group::Words => "words",
            Group::Sentences => "sentences",
            Group::Hops => "hops",
        }
    }
}

/// One attention of a model, and the label under which a pass captures it, once or once per step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AttentionSite {
    pub group: Group,
    pub layer: usize,
    pub label: String,
}

impl AttentionSite {
    /// The captured calls of this attention, in order.
    pub fn calls<'c>(&self, captured: &'c [Captured<f32>]) -> Vec<&'c Captured<f32>> {
        captured.iter().filter(|call| call.label() == self.label).collect()
    }
}

/// A model that generates text. It holds handles to its parameters.
#[derive(Clone, Debug)]
pub struct Model {
    config: ModelConfig,
    built: Built,
}

#[derive(Clone, Debug)]
enum Built {
    Transformer(Box<Transformer>),
    Recurrent(Box<Recurrent>),
    Gpt(Box<Gpt>),
}

/// State of step-by-step decoding: the cache or hidden state of every sequence.
#[derive(Clone, Debug)]
pub struct State<T: Float>(StateOf<T>);

#[derive(Clone, Debug)]
enum StateOf<T: Float> {
    Transformer(TransformerState<T>),
    Recurrent(RecurrentState<T>),
    Gpt(GptState<T>),
}

impl Model {
    /// A new model with parameters initialized from the seed.
    ///
    /// # Errors
    /// If sizes or attentions are inconsistent.
    pub fn new<T: Float>(config: &ModelConfig, seed: u64) -> Result<(Model, Parameters<T>)> {
        let mut parameters = Parameters::new();
        let model = Model::build(config, &mut Builder::new(&mut parameters, seed))?;
        Ok((model, parameters))
    }

    /// A model with all parameters zero, to be filled from a file.
    ///
    /// # Errors
    /// As [`new`](Model::new).
    pub fn blank<T: Float>(config: &ModelConfig) -> Result<(Model, Parameters<T>)> {
        let mut parameters = Parameters::new();
        let model = Model::build(config, &mut Builder::blank(&mut parameters))?;
        Ok((model, parameters))
    }

    /// The decoder of a model that looks at images: it has no encoder, and the rows of its memory have the model's
    /// width.
    pub(crate) fn decoder<T: Float>(config: &ModelConfig, at: &mut Builder<'_, T>) -> Result<Model> {
        let Architecture::Describe(sizes) = &config.architecture else {
            return Err(Error::invalid(format!("a model of kind `{}` sees nothing", config.architecture.name())));
        };
        let built = match sizes.decoder {
            DecoderKind::Transformer => {
                let sizes = sizes.transformer();
                Built::Transformer(Box::new(Transformer::new(at, &sizes, config.vocab_size)?))
            }
            DecoderKind::Gru => {
                let (width, sizes) = (sizes.d_model, sizes.recurrent());
                Built::Recurrent(Box::new(Recurrent::over(at, &sizes, config.vocab_size, width)?))
            }
        };
        Ok(Model { config: config.clone(), built })
    }

    fn build<T: Float>(config: &ModelConfig, at: &mut Builder<'_, T>) -> Result<Model> {
        let vocab_size = config.vocab_size;
        let built = match config.checked()? {
            Generative::Transformer(sizes) => Built::Transformer(Box::new(Transformer::new(at, sizes, vocab_size)?)),
            Generative::Recurrent(sizes) => Built::Recurrent(Box::new(Recurrent::new(at, sizes, vocab_size)?)),
            Generative::Gpt(sizes) => Built::Gpt(Box::new(Gpt::new(at, sizes, vocab_size)?)),
        };
        Ok(Model { config: config.clone(), built })
    }

    /// The configuration it was built from.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The longest sequence, special tokens included.
    pub fn max_len(&self) -> usize {
        match &self.built {
            Built::Transformer(model) => model.max_len(),
            Built::Recurrent(_) => usize::MAX,
            Built::Gpt(model) => model.max_len(),
        }
    }

    /// The longest target, start token included, after a source of `source` tokens, end token included. Source and
    /// target of a decoder-only model share one sequence.
    pub fn max_target_len(&self, source: usize) -> usize {
        match &self.built {
            Built::Gpt(model) => model.max_len().saturating_sub(source),
            _ => self.max_len(),
        }
    }

    /// Whether a source and a target of these lengths, special tokens included, fit.
    pub fn fits(&self, source: usize, target: usize) -> bool {
        match &self.built {
            Built::Gpt(model) => source.saturating_add(target) <= model.max_len(),
            _ => source.max(target) <= self.max_len(),
        }
    }

    /// The decoder-only model, if it is one: it reads source and target as one sequence.
    pub fn gpt(&self) -> Option<&Gpt> {
        match &self.built {
            Built::Gpt(model) => Some(model),
            _ => None,
        }
    }

    /// Encodes the source, `[B, S, C]`. A decoder-only model has no encoder and returns no rows; it reads the source in
    /// [`start`](Model::start).
    ///
    /// # Errors
    /// Errors from `qkv`.
    pub fn encode<T: Float>(&self, tape: &mut Tape<'_, T>, source: &Rows) -> Result<Var<T>> {
        match &self.built {
            Built::Transformer(model) => model.encode(tape, source),
            Built::Recurrent(model) => Ok(model.encode(tape, source)),
            Built::Gpt(_) => Ok(tape.constant(Tensor::new(Vec::new(), &[source.len(), 0, 1]))),
        }
    }

    /// Hidden states of the decoder at all positions at once, `[B, N, C]`; for a decoder-only model, which reads source
    /// and target as one sequence, `[B, S + N, C]`.
    pub(crate) fn hidden<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        source: &Rows,
        decoder_input: &Rows,
    ) -> Result<Var<T>> {
        let memory = self.encode(tape, source)?;
        self.hidden_over(tape, &memory, source, decoder_input)
    }

    /// The same over an encoded memory, `[B, S, C]`; a model with an encoder uses only the lengths of `source`.
    pub(crate) fn hidden_over<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        memory: &Var<T>,
        source: &Rows,
        decoder_input: &Rows,
    ) -> Result<Var<T>> {
        match &self.built {
            Built::Transformer(model) => model.decode(tape, memory, source, decoder_input),
            Built::Recurrent(model) => model.decode(tape, memory, source, decoder_input),
            Built::Gpt(model) => model.forward(tape, &source.joined(decoder_input, self.config.pad_token_id)),
        }
    }

    /// The loss of a batch over an encoded memory; the gradient of each token is multiplied by `scale`.
    pub(crate) fn loss_over<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        memory: &Var<T>,
        batch: &Batch,
        smoothing: f64,
        scale: f64,
    ) -> Result<PendingLoss> {
        let hidden = self.hidden_over(tape, memory, &batch.source, &batch.decoder_input)?;
        let target = Target { ids: &batch.targets, ignore: Some(IGNORE), smoothing, scale };
        Ok(self.rewarded_loss(tape, &hidden, target, &batch.decoder_input.lengths))
    }

    /// The loss of hidden states `[B, N, C]`. If hard attention made choices, the log-likelihoods of the targets reward
    /// them; the first `lengths[b]` targets of sequence `b` count.
    fn rewarded_loss<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        hidden: &Var<T>,
        target: Target<'_>,
        lengths: &[usize],
    ) -> PendingLoss {
        let (weight, bias) = (self.output(), self.output_bias());
        if !tape.has_chosen() {
            return tape.cross_entropy(hidden, weight, bias, target);
        }
        let (loss, log_likelihoods) = tape.cross_entropy_of_rows(hidden, weight, bias, target);
        tape.reward(&log_likelihoods, lengths, target.scale);
        loss
    }

    /// The Transformer, if it is one whose decoder attends to a memory.
    pub(crate) fn transformer(&self) -> Option<&Transformer> {
        match &self.built {
            Built::Transformer(model) => Some(model),
            Built::Recurrent(_) | Built::Gpt(_) => None,
        }
    }

    fn output(&self) -> qkv_nn::Param {
        match &self.built {
            Built::Transformer(model) => model.output(),
            Built::Recurrent(model) => model.output(),
            Built::Gpt(model) => model.output(),
        }
    }

    fn output_bias(&self) -> Option<qkv_nn::Param> {
        match &self.built {
            Built::Transformer(model) => model.output_bias(),
            Built::Recurrent(_) | Built::Gpt(_) => None,
        }
    }

    /// Logits of the next token at every position, `[B, N, V]`, in one parallel pass, for inference.
    ///
    /// # Errors
    /// Errors from `qkv`.
    pub fn scores<T: Float>(&self, tape: &mut Tape<'_, T>, source: &Rows, decoder_input: &Rows) -> Result<Var<T>> {
        let mut hidden = self.hidden(tape, source, decoder_input)?;
        if self.gpt().is_some() && source.length > 0 {
            // Only the rows after the source predict the target.
            let (length, width) = (hidden.shape()[1], hidden.value().width());
            let row = |b: usize, n: usize| (b * length + (source.lengths[b] + n).min(length - 1)) * width;
            let rows = (0..decoder_input.len()).flat_map(|b| (0..decoder_input.length).map(move |n| (b, n)));
            let target = rows.flat_map(|(b, n)| hidden.value().data()[row(b, n)..][..width].to_vec()).collect();
            hidden = tape.constant(Tensor::new(target, &[decoder_input.len(), decoder_input.length, width]));
        }
        Ok(tape.linear(&hidden, self.output(), self.output_bias(), Activation::None, 0.0))
    }

    /// The loss of a batch; the gradient of each token is multiplied by `scale`.
    ///
    /// # Errors
    /// Errors from `qkv`.
    pub fn loss<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        batch: &Batch,
        smoothing: f64,
        scale: f64,
    ) -> Result<PendingLoss> {
        let hidden = match (&self.built, &batch.packed[..]) {
            (_, []) => self.hidden(tape, &batch.source, &batch.decoder_input)?,
            (Built::Gpt(model), lengths) => model.forward_packed(tape, &batch.decoder_input.ids, lengths)?,
            _ => return Err(Error::invalid("only a decoder-only model takes packed sequences")),
        };
        // The source tokens of a joined sequence have no targets.
        let joined = (self.gpt().is_some() && batch.source.length > 0).then(|| batch.targets_after_source());
        let ids = joined.as_deref().unwrap_or(&batch.targets);
        let ids = &tape.own(ids, ids.len() / batch.decoder_input.len().max(1));
        let target = Target { ids, ignore: Some(IGNORE), smoothing, scale };
        Ok(tape.cross_entropy(&hidden, self.output(), self.output_bias(), target))
    }

    /// The attentions of the model, in the order encoder, decoder, cross.
    pub(crate) fn sites(&self) -> Vec<AttentionSite> {
        let stack = |group, layers: usize, prefix: &'static str, name: &'static str| {
            let label = move |layer| format!("{prefix}layers.{layer}.{name}");
            (0..layers).map(move |layer| AttentionSite { group, layer, label: label(layer) })
        };
        match &self.built {
            Built::Transformer(model) => stack(Group::Encoder, model.encoder_layers(), "encoder.", "self_attn")
                .chain(stack(Group::Decoder, model.decoder_layers(), "decoder.", "self_attn"))
                .chain(stack(Group::Cross, model.decoder_layers(), "decoder.", "encoder_attn"))
                .collect(),
            Built::Recurrent(_) => {
                vec![AttentionSite { group: Group::Cross, layer: 0, label: "decoder.attention".into() }]
            }
            Built::Gpt(model) => stack(Group::Decoder, model.layers(), "", "self_attn").collect(),
        }
    }

    /// The attention from target to source that aligns best: the last layer but one if there are several, the middle
    /// layer of a decoder-only model.
    pub(crate) fn alignment_site(&self) -> Option<AttentionSite> {
        let (group, layer) = match &self.built {
            Built::Transformer(model) => (Group::Cross, model.decoder_layers().saturating_sub(2)),
            Built::Recurrent(_) => (Group::Cross, 0),
            Built::Gpt(model) => (Group::Decoder, model.layers() / 2),
        };
        self.sites().into_iter().find(|site| (site.group, site.layer) == (group, layer))
    }

    /// State for the first decoding step; `memory` is what [`encode`](Model::encode) returned.
    ///
    /// # Errors
    /// Errors from `qkv`.
    pub fn start<T: Float>(&self, tape: &mut Tape<'_, T>, memory: &Var<T>, source: &Rows) -> Result<State<T>> {
        Ok(State(match &self.built {
            Built::Transformer(model) => StateOf::Transformer(model.start(tape, memory, source)?),
            Built::Recurrent(model) => StateOf::Recurrent(model.start(tape, memory, source)),
            Built::Gpt(model) => {
                if source.ragged().is_some() {
                    return Err(Error::invalid("a decoder-only model needs sources of one length"));
                }
                let mut state = model.start(tape, source.len())?;
                if source.length > 0 {
                    model.step(tape, &source.ids, source.length, &mut state)?;
                }
                StateOf::Gpt(state)
            }
        }))
    }

    /// Logits of the token after `last [B]`, `[B, 1, V]`.
    ///
    /// # Errors
    /// Errors from `qkv`.
    pub fn step<T: Float>(&self, tape: &mut Tape<'_, T>, last: &[u32], state: &mut State<T>) -> Result<Var<T>> {
        let hidden = self.step_hidden(tape, last, state)?;
        Ok(tape.linear(&hidden, self.output(), self.output_bias(), Activation::None, 0.0))
    }

    /// Surveys of the logits of [`step`](Model::step) for the `most` highest.
    pub(crate) fn step_survey(
        &self,
        tape: &mut Tape<'_, f32>,
        last: &[u32],
        state: &mut State<f32>,
        most: usize,
    ) -> Result<Vec<Survey>> {
        let hidden = self.step_hidden(tape, last, state)?;
        Ok(tape.survey_linear(&hidden, self.output(), self.output_bias(), most))
    }

    /// Hidden states after one more token of each sequence, `[B, 1, C]`.
    fn step_hidden<T: Float>(&self, tape: &mut Tape<'_, T>, last: &[u32], state: &mut State<T>) -> Result<Var<T>> {
        match (&self.built, &mut state.0) {
            (Built::Transformer(model), StateOf::Transformer(state)) => model.step(tape, last, state),
            (Built::Recurrent(model), StateOf::Recurrent(state)) => model.step(tape, last, state),
            (Built::Gpt(model), StateOf::Gpt(state)) => model.step(tape, last, 1, state),
            _ => Err(Error::invalid("this state belongs to a model of another kind")),
        }
    }
}

impl<T: Float> State<T> {
    /// Reorders the sequences; one may be taken several times. `same_sources` means that each is replaced by another of
    /// the same source, so that the keys and values of the source stay in place.
    pub fn select(&mut self, tape: &Tape<'_, T>, sequences: &[usize], same_sources: bool) {
        match &mut self.0 {
            StateOf::Transformer(state) => state.select(sequences, same_sources),
            StateOf::Recurrent(state) => state.select(tape, sequences, same_sources),
            StateOf::Gpt(state) => state.select(sequences),
        }
    }
}
