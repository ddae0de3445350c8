//! Text to speech as in Transformer TTS (Li et al. 2019, arXiv:1809.08895): convolutions and an encoder read letters; a
//! decoder attends to them, writes the frames of a log-mel spectrogram, several per step, and predicts which step is
//! the last; convolutions refine the frames. A [`Vocoder`](crate::audio::Vocoder) turns them into sound.
//!
//! Attention from sounds to letters aligns them. In training it is guided towards the diagonal ([`Guide`]), positions
//! have trained factors, and the decoder hears its own output through a narrow pre-net with dropout, which stays on in
//! inference: so it has to look at the letters to know what comes next.
//!
//! | module | owns |
//! | --- | --- |
//! | this | configuration and network |
//! | `durations` | how long each letter sounds, and the places of steps in the text |
//! | `reader` | a voice with its parameters and tokenizer: its folder and its loss |
//! | `speech` | speaking, and the alignment of speech with letters |

mod durations;
mod reader;
mod speech;

pub use reader::Speaker;
pub(crate) use reader::{SpokenText, inspect, spelled};
pub use speech::{SpeakOptions, Speech, diagonal_share};

use crate::batch::Rows;
use crate::sizes::check_sizes;
use crate::{Error, Result};
use durations::Durations;
use qkv::{Attention, Dropout, Mask};
use qkv_nn::layers::{
    AttentionConfig, Block, BlockConfig, Builder, Conv1d, Embedding, KvCache, Linear, Norm, NormKind, PositionKind,
    ScaledPositions,
};
use qkv_nn::{Activation, Guide, Heads, Tape, Tensor, Var, Windows};
use serde::{Deserialize, Serialize};

/// Sizes and settings of a voice.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct VoiceConfig {
    /// Mel bands.
    pub bands: usize,
    /// Frames written per step.
    pub reduction: usize,
    /// Model width.
    pub d_model: usize,
    /// Inner width of the feed-forward layers.
    pub ffn_dim: usize,
    /// Number of heads.
    pub heads: usize,
    /// Layers of the encoder.
    pub encoder_layers: usize,
    /// Layers of the decoder.
    pub decoder_layers: usize,
    /// Convolutions over the letters, before the encoder.
    pub conv_layers: usize,
    /// Width of the pre-net, through which the decoder hears the previous frame.
    pub prenet: usize,
    /// Dropout of the pre-net, in training and inference.
    pub prenet_dropout: f64,
    /// Convolutions that refine the spectrogram; 0 leaves it unchanged.
    pub postnet_layers: usize,
    /// Width of these convolutions.
    pub postnet: usize,
    /// Dropout of each residual branch and of convolutions.
    pub dropout: f64,
    /// Dropout of attention weights.
    pub attention_dropout: f64,
    /// Weight of the guidance of cross-attention towards the diagonal; 0 disables it.
    pub guide: f64,
    /// How far from the diagonal attention may be, as a fraction of the length.
    pub guide_width: f64,
    /// Whether the voice learns how long each letter sounds, and each step gets its position in the text.
    pub durations: bool,
    /// Whether each step hears the frame before it; otherwise all steps are written at once.
    pub hears: bool,
    /// Weight in the loss of the stop prediction at the last step.
    pub stop_weight: f64,
    /// The longest text, in letters.
    pub max_letters: usize,
    /// The longest sound, in steps.
    pub max_steps: usize,
}

impl Default for VoiceConfig {
    fn default() -> Self {
        VoiceConfig {
            bands: 80,
            reduction: 4,
            d_model: 128,
            ffn_dim: 512,
            heads: 4,
            encoder_layers: 2,
            decoder_layers: 2,
            conv_layers: 3,
            prenet: 64,
            prenet_dropout: 0.5,
            postnet_layers: 3,
            postnet: 128,
            dropout: 0.1,
            attention_dropout: 0.0,
            guide: 5.0,
            guide_width: 0.2,
            durations: false,
            hears: true,
            stop_weight: 5.0,
            max_letters: 256,
            max_steps: 512,
        }
    }
}

impl VoiceConfig {
    /// Rejects sizes that are zero or that no machine could hold.
    pub(crate) fn check(&self) -> Result<()> {
        check_sizes(&[
            ("bands", self.bands, 512),
            ("reduction", self.reduction, 64),
            ("d_model", self.d_model, 1 << 13),
            ("ffn_dim", self.ffn_dim, 1 << 15),
            ("heads", self.heads, 1 << 8),
            ("encoder_layers", self.encoder_layers, 1 << 8),
            ("decoder_layers", self.decoder_layers, 1 << 8),
            ("prenet", self.prenet, 1 << 13),
            ("postnet", self.postnet, 1 << 13),
            ("max_letters", self.max_letters, 1 << 14),
            ("max_steps", self.max_steps, 1 << 16),
        ])?;
        for (name, found) in [("conv_layers", self.conv_layers), ("postnet_layers", self.postnet_layers)] {
            if found > 32 {
                return Err(Error::invalid(format!("`{name}` is {found}, expected at most 32")));
            }
        }
        if !self.d_model.is_multiple_of(2) {
            return Err(Error::invalid(format!("`d_model` is {}, expected an even number", self.d_model)));
        }
        let dropouts = [
            ("dropout", self.dropout),
            ("attention_dropout", self.attention_dropout),
            ("prenet_dropout", self.prenet_dropout),
        ];
        for (name, found) in dropouts {
            if !(0.0..1.0).contains(&found) {
                return Err(Error::invalid(format!("`{name}` is {found}, expected at least 0 and less than 1")));
            }
        }
        for (name, found) in [("guide", self.guide), ("stop_weight", self.stop_weight)] {
            if !(0.0..=1e6).contains(&found) {
                return Err(Error::invalid(format!("`{name}` is {found}, expected at least 0")));
            }
        }
        if !(0.01..=10.0).contains(&self.guide_width) {
            let what = format!("`guide_width` is {}, expected between 0.01 and 10", self.guide_width);
            return Err(Error::invalid(what));
        }
        if !self.hears && !self.durations {
            return Err(Error::invalid("a voice with `hears = false` does not know where it is without `durations`")
                .with_hint("set `durations = true`, with the letters' times in the data"));
        }
        Ok(())
    }
}

/// A voice. It holds handles to its parameters.
#[derive(Clone, Debug)]
pub(crate) struct VoiceNetwork {
    letters: Embedding,
    convs: Vec<(Conv1d, Norm)>,
    letter_positions: ScaledPositions,
    encoder: Vec<Block>,
    encoder_norm: Norm,
    durations: Option<Durations>,
    prenet: Option<[Linear; 3]>,
    step_positions: ScaledPositions,
    decoder: Vec<Block>,
    decoder_norm: Norm,
    frames: Linear,
    stop: Linear,
    postnet: Vec<Conv1d>,
    config: VoiceConfig,
}

/// State of a speaking decoder: keys and values of its own steps and of the letters, per layer.
pub(crate) type VoiceState = Vec<[Option<KvCache<f32>>; 2]>;

/// Kernel size of convolutions, in letters or frames.
const KERNEL: usize = 5;

impl VoiceNetwork {
    /// Adds its parameters: `letters`, `convs.N`, `conv_norms.N`, `encoder`, `prenet.N`, `decoder`, `frames`, `stop`,
    /// `postnet.N`.
    pub fn new(at: &mut Builder<'_, f32>, config: &VoiceConfig, vocab_size: usize) -> Result<VoiceNetwork> {
        config.check()?;
        let width = config.d_model;
        let heads = Heads { query: config.heads, key: config.heads };
        let guide = Guide { weight: config.guide, width: config.guide_width };
        let attention = |mask: Mask, guide: Option<Guide>| {
            let mut attention = Attention::scaled_dot().mask(mask);
            if config.attention_dropout > 0.0 {
                attention.dropout = Some(Dropout { p: config.attention_dropout });
            }
            AttentionConfig { guide, ..AttentionConfig::new(attention, heads) }
        };
        let block = |own: Mask, cross: bool| {
            let cross = cross.then(|| {
                // The guidance is shared equally among the layers.
                let share = Guide { weight: guide.weight / config.decoder_layers as f64, ..guide };
                attention(Mask::Full, (guide.weight > 0.0).then_some(share))
            });
            let own = attention(own, None);
            let (dropout, inner_dropout) = (config.dropout, config.dropout);
            BlockConfig { dropout, inner_dropout, cross, ..BlockConfig::new(width, config.ffn_dim, own) }
        };
        let letters = &mut at.at("letters");
        let letters = Embedding::new(letters, vocab_size, width, PositionKind::None, 0);
        let windows = Windows { kernel: KERNEL, stride: 1, padding: KERNEL / 2 };
        let norm =
            |at: &mut Builder<'_, f32>, name: &str| Norm::new(&mut at.at(name), width, NormKind::Layer, Norm::EPSILON);
        let convs = (0..config.conv_layers).map(|layer| {
            let conv = Conv1d::new(&mut at.at(&format!("convs.{layer}")), width, width, windows);
            (conv, norm(at, &format!("conv_norms.{layer}")))
        });
        let convs = convs.collect();
        let positions = &mut at.at("encoder.positions");
        let letter_positions = ScaledPositions::new(positions, config.max_letters + 1, width);
        let stack = |at: &mut Builder<'_, f32>, side: &str, layers: usize, config: &BlockConfig| {
            let layer = |layer: usize| Ok(Block::new(&mut at.at(&format!("{side}.layers.{layer}")), config)?);
            (0..layers).map(layer).collect::<Result<Vec<Block>>>()
        };
        let encoder = stack(at, "encoder", config.encoder_layers, &block(Mask::Full, false))?;
        let encoder_norm = norm(at, "encoder.norm");
        let durations = config
            .durations
            .then(|| Durations::new(&mut at.at("durations"), width, config.max_letters + 1, config.dropout));
        let prenet = config.hears.then(|| {
            [
                Linear::new(&mut at.at("prenet.0"), config.bands, config.prenet, true),
                Linear::new(&mut at.at("prenet.1"), config.prenet, config.prenet, true),
                Linear::new(&mut at.at("prenet.2"), config.prenet, width, true),
            ]
        });
        let step_positions = ScaledPositions::new(&mut at.at("decoder.positions"), config.max_steps, width);
        // Steps that are written at once see later steps too.
        let seen = if config.hears { Mask::causal() } else { Mask::Full };
        let decoder = stack(at, "decoder", config.decoder_layers, &block(seen, true))?;
        let decoder_norm = norm(at, "decoder.norm");
        let frames = Linear::new(&mut at.at("frames"), width, config.reduction * config.bands, true);
        let stop = Linear::new(&mut at.at("stop"), width, 2, true);
        let postnet = (0..config.postnet_layers).map(|layer| {
            let inputs = if layer == 0 { config.bands } else { config.postnet };
            let outputs = if layer + 1 == config.postnet_layers { config.bands } else { config.postnet };
            Conv1d::new(&mut at.at(&format!("postnet.{layer}")), inputs, outputs, windows)
        });
        let (postnet, config) = (postnet.collect(), config.clone());
        Ok(VoiceNetwork {
            letters,
            convs,
            letter_positions,
            encoder,
            encoder_norm,
            durations,
            prenet,
            step_positions,
            decoder,
            decoder_norm,
            frames,
            stop,
            postnet,
            config,
        })
    }

    /// The linear layer that predicts whether a step is the last: class 0 or 1.
    pub fn stop(&self) -> Linear {
        self.stop
    }

    /// Encodes letters, `[B, M, C]`.
    pub fn encode(&self, tape: &mut Tape<'_, f32>, letters: &Rows) -> Result<Var<f32>> {
        let lengths = letters.ragged();
        let mut x = self.letters.forward(tape, &letters.ids, letters.length, 0);
        for (conv, norm) in &self.convs {
            // Padding after the end of a text must not leak into it.
            x = masked(tape, x, lengths);
            let y = conv.activated(tape, &x, Activation::Relu);
            let y = norm.forward(tape, &y);
            x = tape.residual(&x, y, self.config.dropout);
        }
        let x = self.letter_positions.add(tape, &x, 0);
        let mut x = tape.dropout(x, self.config.dropout);
        for block in &self.encoder {
            x = block.forward(tape, x, lengths, None, None)?;
        }
        let memory = self.encoder_norm.forward(tape, &x);
        Ok(match &self.durations {
            Some(durations) => durations.placed(tape, &memory),
            None => memory,
        })
    }

    /// The durations of letters, if the voice learns them.
    fn durations(&self) -> Option<&Durations> {
        self.durations.as_ref()
    }

    /// What the decoder hears of the last frame before each step: from `[B, N, bands]` to `[B, N, C]`, zeros if it
    /// hears nothing.
    pub fn hear(&self, tape: &mut Tape<'_, f32>, last: &Var<f32>) -> Var<f32> {
        let Some([first, second, third]) = &self.prenet else {
            let shape = [last.shape()[0], last.shape()[1], self.config.d_model];
            return tape.constant(Tensor::new(vec![0.0; shape.iter().product()], &shape));
        };
        let x = first.activated(tape, last, Activation::Relu, self.config.prenet_dropout);
        let x = second.activated(tape, &x, Activation::Relu, self.config.prenet_dropout);
        third.forward(tape, &x)
    }

    /// Adds positions to steps, the first of which is number `start`, and their places in the text if the voice learns
    /// durations.
    fn positioned(&self, tape: &mut Tape<'_, f32>, heard: &Var<f32>, start: usize, places: &[f32]) -> Var<f32> {
        let x = self.step_positions.add(tape, heard, start);
        match &self.durations {
            Some(durations) => durations.place(tape, &x, places),
            None => x,
        }
    }

    /// Hidden states of all steps at once, `[B, N, C]`, given what each heard, their places in the text if the voice
    /// learns durations, and the lengths of steps and letters.
    pub fn decode(
        &self,
        tape: &mut Tape<'_, f32>,
        heard: &Var<f32>,
        places: &[f32],
        lengths: Option<&[usize]>,
        memory: &Var<f32>,
        letters: Option<&[usize]>,
    ) -> Result<Var<f32>> {
        let x = self.positioned(tape, heard, 0, places);
        let mut x = tape.dropout(x, self.config.dropout);
        for block in &self.decoder {
            x = block.forward(tape, x, lengths, None, Some((memory, letters)))?;
        }
        Ok(self.decoder_norm.forward(tape, &x))
    }

    /// The state before the first step of one text.
    pub fn start(&self, tape: &mut Tape<'_, f32>, memory: &Var<f32>) -> Result<VoiceState> {
        self.decoder.iter().map(|block| Ok(block.caches(tape, 1, Some(memory))?)).collect()
    }

    /// The hidden state of step `at` of one text, `[1, 1, C]`; `place` is its place in the text, if the voice learns
    /// durations.
    pub fn step(
        &self,
        tape: &mut Tape<'_, f32>,
        heard: &Var<f32>,
        at: usize,
        place: &[f32],
        state: &mut VoiceState,
    ) -> Result<Var<f32>> {
        let mut x = self.positioned(tape, heard, at, place);
        for (block, caches) in self.decoder.iter().zip(state) {
            x = block.step(tape, x, caches, None, None)?;
        }
        Ok(self.decoder_norm.forward(tape, &x))
    }

    /// The frames of hidden states `[B, N, C]`: `[B, N · reduction, bands]`.
    pub fn frames(&self, tape: &mut Tape<'_, f32>, hidden: &Var<f32>) -> Var<f32> {
        let &[batch, steps, _] = hidden.shape() else { unreachable!("a decoder keeps the axes") };
        let frames = self.frames.forward(tape, hidden);
        frames.reshaped(&[batch, steps * self.config.reduction, self.config.bands])
    }

    /// Refined frames; `lengths` counts the frames of each sequence.
    pub fn refine(&self, tape: &mut Tape<'_, f32>, frames: &Var<f32>, lengths: Option<&[usize]>) -> Var<f32> {
        let Some((last, before)) = self.postnet.split_last() else { return frames.clone() };
        let mut x = masked(tape, frames.clone(), lengths);
        for conv in before {
            let y = conv.activated(tape, &x, Activation::Tanh);
            let y = tape.dropout(y, self.config.dropout);
            x = masked(tape, y, lengths);
        }
        let y = last.activated(tape, &x, Activation::None);
        tape.add(frames, y)
    }

    /// Number of encoder and decoder layers.
    pub fn depths(&self) -> [usize; 2] {
        [self.encoder.len(), self.decoder.len()]
    }
}

/// `x [B, N, C]` with zeros after the end of each sequence.
fn masked(tape: &mut Tape<'_, f32>, x: Var<f32>, lengths: Option<&[usize]>) -> Var<f32> {
    let (Some(lengths), &[batch, length, _]) = (lengths, x.shape()) else { return x };
    let place = |at: usize| (at % length < lengths[at / length]).then_some(at);
    let places: Vec<Option<usize>> = (0..batch * length).map(place).collect();
    tape.gather(&[&x], &places, [batch, length])
}

/// The last frame before each step of several texts, `[B, steps, bands]`: zeros for the first step and after the end.
pub(crate) fn last_frames(frames: &[&[f32]], bands: usize, reduction: usize, steps: usize) -> Tensor<f32> {
    let mut all = vec![0.0; frames.len() * steps * bands];
    for (frames, rows) in frames.iter().zip(all.chunks_exact_mut(steps * bands)) {
        for (step, row) in rows.chunks_exact_mut(bands).enumerate().skip(1) {
            if let Some(frame) = frames.chunks_exact(bands).nth(step * reduction - 1) {
                row.copy_from_slice(frame);
            }
        }
    }
    Tensor::new(all, &[frames.len(), steps, bands])
}
