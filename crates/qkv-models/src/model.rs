//! A model of any kind that makes text, behind one face: what training and search need of it.

use crate::batch::{Batch, Rows, Specials};
use crate::encoder::EncoderConfig;
use crate::gpt::{Gpt, GptConfig, GptState};
use crate::han::HanConfig;
use crate::recurrent::{Recurrent, RecurrentConfig, RecurrentState};
use crate::transformer::{Transformer, TransformerConfig, TransformerState};
use crate::vit::VitConfig;
use crate::{Error, Result};
use qkv_nn::layers::{Builder, PositionKind};
use qkv_nn::{Activation, Captured, Float, Loss, Parameters, Tape, Target, Tensor, Var};
use serde::{Deserialize, Serialize};

/// What kind of model, with its sizes: the table `[model]` of a recipe.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
// One of them exists in a process, and is read by everyone: a box would be in everyone's way.
#[allow(clippy::large_enum_variant)]
pub enum Architecture {
    /// See [`Transformer`].
    Transformer(TransformerConfig),
    /// See [`Recurrent`].
    Recurrent(RecurrentConfig),
    /// See [`Gpt`].
    Gpt(GptConfig),
    /// See [`Encoder`](crate::Encoder): it reads text and makes none.
    Encoder(EncoderConfig),
    /// See [`Han`](crate::Han): it reads documents and makes no text.
    Han(HanConfig),
    /// See [`Vit`](crate::Vit): it sees, and makes no text.
    Vit(VitConfig),
}

impl Architecture {
    /// Its name in a recipe.
    pub fn name(&self) -> &'static str {
        match self {
            Architecture::Transformer(_) => "transformer",
            Architecture::Recurrent(_) => "recurrent",
            Architecture::Gpt(_) => "gpt",
            Architecture::Encoder(_) => "encoder",
            Architecture::Han(_) => "han",
            Architecture::Vit(_) => "vit",
        }
    }
}

/// All that is needed to make a model: its `config.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelConfig {
    /// Who reads it: always `qkv`.
    pub model_type: String,
    /// The number of tokens.
    pub vocab_size: usize,
    /// Fills up a shorter sentence.
    pub pad_token_id: u32,
    /// Starts a translation.
    pub bos_token_id: u32,
    /// Ends a sentence.
    pub eos_token_id: u32,
    /// What is built.
    pub architecture: Architecture,
}

impl ModelConfig {
    /// Of an architecture over a vocabulary.
    pub fn new(architecture: Architecture, vocab_size: usize, specials: Specials) -> Self {
        let Specials { pad, bos, eos } = specials;
        let (pad_token_id, bos_token_id, eos_token_id) = (pad, bos, eos);
        ModelConfig { model_type: "qkv".into(), vocab_size, pad_token_id, bos_token_id, eos_token_id, architecture }
    }

    /// The special tokens.
    pub fn specials(&self) -> Specials {
        Specials { pad: self.pad_token_id, bos: self.bos_token_id, eos: self.eos_token_id }
    }

    /// Refuses a model whose table of tokens alone would be larger than a file of so many numbers.
    pub(crate) fn check_size(&self, numbers: usize) -> Result<()> {
        let (width, layers) = match &self.architecture {
            Architecture::Transformer(config) => (config.d_model, config.encoder_layers + config.decoder_layers),
            Architecture::Recurrent(config) => (config.d_model, config.layers),
            Architecture::Gpt(config) => (config.d_model, config.layers),
            Architecture::Encoder(config) => (config.d_model, config.layers),
            Architecture::Han(config) => (config.d_model, 0),
            Architecture::Vit(config) => (config.d_model, config.layers),
        };
        let least =
            self.vocab_size.saturating_mul(width).saturating_add(layers.saturating_mul(width).saturating_mul(width));
        if least > numbers {
            return Err(Error::invalid(format!(
                "the configuration asks for {least} numbers or more, the file has {numbers}"
            )));
        }
        Ok(())
    }

    /// Why it is no [`Model`].
    fn makes_none(&self) -> Error {
        Error::invalid(format!("a model of kind `{}` makes no text", self.architecture.name()))
    }

    /// Refuses numbers that make no model, or one that no machine could hold.
    fn check(&self) -> Result<()> {
        let sizes: Vec<(&str, usize, usize)> = match &self.architecture {
            Architecture::Transformer(config) => vec![
                ("d_model", config.d_model, 1 << 16),
                ("ffn_dim", config.ffn_dim, 1 << 18),
                ("heads", config.heads, 1 << 10),
                ("encoder_layers", config.encoder_layers, 1 << 10),
                ("decoder_layers", config.decoder_layers, 1 << 10),
                ("max_positions", config.max_positions, 1 << 22),
            ],
            Architecture::Recurrent(config) => vec![
                ("d_model", config.d_model, 1 << 16),
                ("hidden", config.hidden, 1 << 16),
                ("layers", config.layers, 1 << 10),
                ("attention_width", config.attention_width, 1 << 16),
            ],
            Architecture::Gpt(config) => vec![
                ("d_model", config.d_model, 1 << 16),
                ("ffn_dim", config.ffn_dim, 1 << 18),
                ("heads", config.heads, 1 << 10),
                ("key_heads", config.key_heads(), 1 << 10),
                ("head_width", config.head_width(), 1 << 16),
                ("layers", config.layers, 1 << 10),
                ("max_positions", config.max_positions, 1 << 22),
            ],
            Architecture::Encoder(_) | Architecture::Han(_) | Architecture::Vit(_) => return Err(self.makes_none()),
        };
        for (name, found, most) in sizes.into_iter().chain([("vocab_size", self.vocab_size, 1 << 24)]) {
            if found == 0 || found > most {
                return Err(Error::invalid(format!("`{name}` is {found}, expected between 1 and {most}")));
            }
        }
        let parts = match &self.architecture {
            Architecture::Transformer(c) => {
                vec![("dropout", c.dropout), ("attention_dropout", c.attention_dropout), ("ffn_dropout", c.ffn_dropout)]
            }
            Architecture::Recurrent(c) => vec![("dropout", c.dropout)],
            Architecture::Gpt(c) => vec![("dropout", c.dropout), ("attention_dropout", c.attention_dropout)],
            Architecture::Encoder(_) | Architecture::Han(_) | Architecture::Vit(_) => Vec::new(),
        };
        for (name, found) in parts {
            if !(0.0..1.0).contains(&found) {
                return Err(Error::invalid(format!("`{name}` is {found}, expected at least 0 and less than 1")));
            }
        }
        if matches!(&self.architecture, Architecture::Transformer(c) if c.positions == PositionKind::Rotary) {
            return Err(Error::invalid("`positions` is rotary, which only `kind = \"gpt\"` has"));
        }
        let specials = [self.pad_token_id, self.bos_token_id, self.eos_token_id];
        if specials.iter().any(|&id| id as usize >= self.vocab_size) {
            return Err(Error::invalid(format!(
                "special tokens {specials:?} go beyond `vocab_size` {}",
                self.vocab_size
            )));
        }
        Ok(())
    }
}

/// Which part of a model an attention belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// The source to itself.
    Encoder,
    /// The target to what came before.
    Decoder,
    /// The target to the source.
    Cross,
    /// Each sentence of a document to its words.
    Words,
    /// A document to its sentences.
    Sentences,
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
        }
    }
}

/// An attention of a model, with the label under which a pass captures it: once, or once a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Site {
    pub group: Group,
    pub layer: usize,
    pub label: String,
}

impl Site {
    /// The captured calls of this attention, in order.
    pub fn calls<'c>(&self, captured: &'c [Captured<f32>]) -> Vec<&'c Captured<f32>> {
        captured.iter().filter(|call| call.label() == self.label).collect()
    }
}

/// A model: handles to parameters, and what to do with them.
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

/// What step-by-step decoding remembers.
#[derive(Clone, Debug)]
pub struct State<T: Float>(Inner<T>);

#[derive(Clone, Debug)]
enum Inner<T: Float> {
    Transformer(TransformerState<T>),
    Recurrent(RecurrentState<T>),
    Gpt(GptState<T>),
}

impl Model {
    /// A new model and its parameters, drawn from the seed.
    ///
    /// # Errors
    /// Where sizes and choices do not fit.
    pub fn new<T: Float>(config: &ModelConfig, seed: u64) -> Result<(Model, Parameters<T>)> {
        let mut parameters = Parameters::new();
        let model = Model::build(config, &mut Builder::new(&mut parameters, seed))?;
        Ok((model, parameters))
    }

    /// The same with parameters that are all zero, to be read from a file.
    ///
    /// # Errors
    /// As [`new`](Model::new).
    pub fn blank<T: Float>(config: &ModelConfig) -> Result<(Model, Parameters<T>)> {
        let mut parameters = Parameters::new();
        let model = Model::build(config, &mut Builder::blank(&mut parameters))?;
        Ok((model, parameters))
    }

    fn build<T: Float>(config: &ModelConfig, at: &mut Builder<'_, T>) -> Result<Model> {
        config.check()?;
        let built = match &config.architecture {
            Architecture::Transformer(sizes) => {
                Built::Transformer(Box::new(Transformer::new(at, sizes, config.vocab_size)?))
            }
            Architecture::Recurrent(sizes) => Built::Recurrent(Box::new(Recurrent::new(at, sizes, config.vocab_size)?)),
            Architecture::Gpt(sizes) => Built::Gpt(Box::new(Gpt::new(at, sizes, config.vocab_size)?)),
            Architecture::Encoder(_) | Architecture::Han(_) | Architecture::Vit(_) => return Err(config.makes_none()),
        };
        Ok(Model { config: config.clone(), built })
    }

    /// What it was made from.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The longest sequence it takes, ends included.
    pub fn most(&self) -> usize {
        match &self.built {
            Built::Transformer(model) => model.most(),
            Built::Recurrent(_) => usize::MAX,
            Built::Gpt(model) => model.most(),
        }
    }

    /// How many target tokens, the start included, it takes after a source of so many, its end included.
    pub fn room(&self, source: usize) -> usize {
        match &self.built {
            Built::Gpt(model) => model.most().saturating_sub(source),
            _ => self.most(),
        }
    }

    /// Whether it takes a source and a target of so many tokens, ends and start included.
    pub fn takes(&self, source: usize, target: usize) -> bool {
        match &self.built {
            Built::Gpt(model) => source.saturating_add(target) <= model.most(),
            _ => source.max(target) <= self.most(),
        }
    }

    /// The model, where it is a decoder alone: source and target are one sequence to it.
    pub fn gpt(&self) -> Option<&Gpt> {
        match &self.built {
            Built::Gpt(model) => Some(model),
            _ => None,
        }
    }

    /// Reads the source. A decoder alone has nothing to read it with, and gives no rows: it reads when it
    /// [starts](Model::start).
    ///
    /// # Errors
    /// What `qkv` refuses.
    pub fn encode<T: Float>(&self, tape: &mut Tape<'_, T>, source: &Rows) -> Result<Var<T>> {
        match &self.built {
            Built::Transformer(model) => model.encode(tape, source),
            Built::Recurrent(model) => Ok(model.encode(tape, source)),
            Built::Gpt(_) => Ok(tape.constant(Tensor::new(Vec::new(), &[source.len(), 0, 1]))),
        }
    }

    /// What the decoder gives at every position at once, `[B, N, C]`; a decoder alone is shown both sides as one, `[B, S + N, C]`.
    pub(crate) fn given<T: Float>(&self, tape: &mut Tape<'_, T>, source: &Rows, shown: &Rows) -> Result<Var<T>> {
        let memory = self.encode(tape, source)?;
        match &self.built {
            Built::Transformer(model) => model.decode(tape, &memory, source, shown),
            Built::Recurrent(model) => model.decode(tape, &memory, source, shown),
            Built::Gpt(model) => model.forward(tape, &source.joined(shown, self.config.pad_token_id)),
        }
    }

    fn output(&self) -> qkv_nn::Param {
        match &self.built {
            Built::Transformer(model) => model.output(),
            Built::Recurrent(model) => model.output(),
            Built::Gpt(model) => model.output(),
        }
    }

    /// Scores for every next token at every position, `[B, N, V]`: the parallel pass, for inference.
    ///
    /// # Errors
    /// What `qkv` refuses.
    pub fn scores<T: Float>(&self, tape: &mut Tape<'_, T>, source: &Rows, shown: &Rows) -> Result<Var<T>> {
        let mut given = self.given(tape, source, shown)?;
        if self.gpt().is_some() && source.length > 0 {
            // Only what stands behind the source is asked for.
            let (length, width) = (given.shape()[1], given.value().width());
            let row = |b: usize, n: usize| (b * length + (source.lengths[b] + n).min(length - 1)) * width;
            let rows = (0..shown.len()).flat_map(|b| (0..shown.length).map(move |n| (b, n)));
            let kept = rows.flat_map(|(b, n)| given.value().data()[row(b, n)..][..width].to_vec()).collect();
            given = tape.constant(Tensor::new(kept, &[shown.len(), shown.length, width]));
        }
        Ok(tape.linear(&given, self.output(), None, Activation::None, 0.0))
    }

    /// The loss of a batch; `scale` is what each token's gradient is multiplied by.
    ///
    /// # Errors
    /// What `qkv` refuses.
    pub fn loss<T: Float>(&self, tape: &mut Tape<'_, T>, batch: &Batch, smoothing: f64, scale: f64) -> Result<Loss> {
        let given = self.given(tape, &batch.source, &batch.shown)?;
        let pad = self.config.pad_token_id;
        // Nothing is wanted of a source.
        let joined = (self.gpt().is_some() && batch.source.length > 0).then(|| batch.wanted_behind_source(pad));
        let ids = joined.as_deref().unwrap_or(&batch.wanted);
        let target = Target { ids, ignore: Some(pad), smoothing, scale };
        Ok(tape.cross_entropy(&given, self.output(), None, target))
    }

    /// The attentions of the model, in a reader's order: encoder, decoder, cross.
    pub(crate) fn sites(&self) -> Vec<Site> {
        let stack = |group, layers: usize, prefix: &'static str, name: &'static str| {
            (0..layers).map(move |layer| Site { group, layer, label: format!("{prefix}layers.{layer}.{name}") })
        };
        match &self.config.architecture {
            Architecture::Transformer(config) => stack(Group::Encoder, config.encoder_layers, "encoder.", "self_attn")
                .chain(stack(Group::Decoder, config.decoder_layers, "decoder.", "self_attn"))
                .chain(stack(Group::Cross, config.decoder_layers, "decoder.", "encoder_attn"))
                .collect(),
            Architecture::Recurrent(_) => {
                vec![Site { group: Group::Cross, layer: 0, label: "decoder.attention".into() }]
            }
            Architecture::Gpt(config) => stack(Group::Decoder, config.layers, "", "self_attn").collect(),
            Architecture::Encoder(_) | Architecture::Han(_) | Architecture::Vit(_) => Vec::new(),
        }
    }

    /// The layer whose attention from the target to the source is the best alignment: the last but one, where there are
    /// several.
    pub fn alignment_layer(&self) -> usize {
        match &self.config.architecture {
            Architecture::Transformer(config) => config.decoder_layers.saturating_sub(2),
            Architecture::Recurrent(_) => 0,
            // Both sides are one sequence to it.
            Architecture::Gpt(config) => config.layers / 2,
            Architecture::Encoder(_) | Architecture::Han(_) | Architecture::Vit(_) => 0,
        }
    }

    /// Ready for the first step after `memory`, which [`encode`](Model::encode) gave.
    ///
    /// # Errors
    /// What `qkv` refuses.
    pub fn start<T: Float>(&self, tape: &mut Tape<'_, T>, memory: &Var<T>, source: &Rows) -> Result<State<T>> {
        Ok(State(match &self.built {
            Built::Transformer(model) => Inner::Transformer(model.start(tape, memory, source)?),
            Built::Recurrent(model) => Inner::Recurrent(model.start(tape, memory, source)),
            Built::Gpt(model) => {
                if source.ragged().is_some() {
                    return Err(Error::invalid("a decoder alone starts from sources of one length"));
                }
                let mut state = model.start(tape, source.len())?;
                if source.length > 0 {
                    model.step(tape, &source.ids, source.length, &mut state)?;
                }
                Inner::Gpt(state)
            }
        }))
    }

    /// Scores for the token after `last [B]`, `[B, 1, V]`.
    ///
    /// # Errors
    /// What `qkv` refuses.
    pub fn step<T: Float>(&self, tape: &mut Tape<'_, T>, last: &[u32], state: &mut State<T>) -> Result<Var<T>> {
        let given = match (&self.built, &mut state.0) {
            (Built::Transformer(model), Inner::Transformer(state)) => model.step(tape, last, state)?,
            (Built::Recurrent(model), Inner::Recurrent(state)) => model.step(tape, last, state)?,
            (Built::Gpt(model), Inner::Gpt(state)) => model.step(tape, last, 1, state)?,
            _ => return Err(Error::invalid("this state belongs to a model of another kind")),
        };
        Ok(tape.linear(&given, self.output(), None, Activation::None, 0.0))
    }
}

impl<T: Float> State<T> {
    /// Takes the sequences in another order; one may be taken several times. With `same_sources` each only changes places with
    /// others of the same source, which costs less.
    pub fn select(&mut self, tape: &Tape<'_, T>, sequences: &[usize], same_sources: bool) {
        match &mut self.0 {
            Inner::Transformer(state) => state.select(sequences, same_sources),
            Inner::Recurrent(state) => state.select(tape, sequences, same_sources),
            Inner::Gpt(state) => state.select(sequences),
        }
    }
}
