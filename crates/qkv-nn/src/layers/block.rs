//! One layer of a Transformer: self-attention, cross-attention in a decoder, and feed-forward, each with its norm and
//! residual connection.

use super::multi_head::OutputMap;
use super::{AttentionConfig, Builder, FeedForward, FeedKind, KvCache, MultiHead, Norm, NormKind};
use crate::float::Float;
use crate::ops::rotary::Angles;
use crate::tape::{Tape, Var};
use qkv_cuda::operations::{DecodeBatch, Operations};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Where the norms are applied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NormPlace {
    /// Before each sublayer, and once after the last layer: trains stably without a careful warm-up.
    #[default]
    Pre,
    /// After each residual addition, as in the original Transformer.
    Post,
    /// Before each sublayer and again on its output before the residual addition (Ding et al. 2021, arXiv:2105.13290),
    /// and once after the last layer.
    Both,
}

/// The configuration of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockConfig {
    /// Width of the model, `C`.
    pub width: usize,
    /// Inner width of the feed-forward sublayer.
    pub inner: usize,
    /// The activation of the feed-forward sublayer.
    pub feed: FeedKind,
    /// Whether the linear maps of the feed-forward sublayer have biases.
    pub feed_bias: bool,
    /// Where the norms are applied.
    pub norm: NormPlace,
    /// Layer norm or RMS norm.
    pub norm_kind: NormKind,
    /// `ε` of the norms.
    pub epsilon: f64,
    /// Dropout of each sublayer's output, before the residual addition.
    pub dropout: f64,
    /// Dropout inside the feed-forward sublayer.
    pub inner_dropout: f64,
    /// Self-attention.
    pub own: AttentionConfig,
    /// Cross-attention, in a decoder.
    pub cross: Option<AttentionConfig>,
}

impl BlockConfig {
    /// Self-attention only, ReLU, biases, pre-norm with layer norm, no dropout.
    pub fn new(width: usize, inner: usize, own: AttentionConfig) -> Self {
        BlockConfig {
            width,
            inner,
            feed: FeedKind::Relu,
            feed_bias: true,
            norm: NormPlace::Pre,
            norm_kind: NormKind::Layer,
            epsilon: Norm::EPSILON,
            dropout: 0.0,
            inner_dropout: 0.0,
            own,
            cross: None,
        }
    }
}

/// The norms of a sublayer.
#[derive(Clone, Copy, Debug)]
struct SublayerNorm {
    norm: Norm,
    /// The norm of the sublayer's output, if norms are on both sides.
    after: Option<Norm>,
}

/// A Transformer layer.
#[derive(Clone, Debug)]
pub struct Block {
    self_attn: MultiHead,
    self_norm: SublayerNorm,
    cross: Option<(MultiHead, SublayerNorm)>,
    feed: FeedForward,
    feed_norm: SublayerNorm,
    norm: NormPlace,
    dropout: f64,
}

impl Block {
    /// Parameters: `self_attn`, `self_attn_layer_norm`, `encoder_attn`, `encoder_attn_layer_norm`, `fc1`, `fc2`,
    /// `gate`, `final_layer_norm`, named as in the translation models of Hugging Face; with norms on both sides, also
    /// `post_self_attn_layer_norm`, `post_encoder_attn_layer_norm` and `post_final_layer_norm`.
    ///
    /// # Errors
    /// As [`MultiHead::new`].
    pub fn new<T: Float>(at: &mut Builder<'_, T>, config: &BlockConfig) -> qkv::Result<Self> {
        let BlockConfig { width, inner, feed, feed_bias, norm, dropout, inner_dropout, own, cross, .. } = config;
        let new_norm = |at: &mut Builder<'_, T>, name: &str| {
            let mut one = |name: &str| Norm::new(&mut at.at(name), *width, config.norm_kind, config.epsilon);
            let after = *norm == NormPlace::Both;
            SublayerNorm { norm: one(name), after: after.then(|| one(&format!("post_{name}"))) }
        };
        let self_attn = MultiHead::new(&mut at.at("self_attn"), *width, own)?;
        let self_norm = new_norm(at, "self_attn_layer_norm");
        let cross = match cross {
            Some(cross) => {
                let attention = MultiHead::new(&mut at.at("encoder_attn"), *width, cross)?;
                Some((attention, new_norm(at, "encoder_attn_layer_norm")))
            }
            None => None,
        };
        let feed = FeedForward::new(at, *width, *inner, *feed, *feed_bias, *inner_dropout);
        let feed_norm = new_norm(at, "final_layer_norm");
        Ok(Block { self_attn, self_norm, cross, feed, feed_norm, norm: *norm, dropout: *dropout })
    }

    /// `x + dropout(output(sublayer(x)))`, with the norm before or after. `output` is the sublayer's last map, kept
    /// separate so that its product can also add the residual.
    fn add<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        x: Var<T>,
        (SublayerNorm { norm, after }, output): (&SublayerNorm, OutputMap),
        sublayer: impl FnOnce(&mut Tape<'_, T>, &Var<T>) -> qkv::Result<Var<T>>,
    ) -> qkv::Result<Var<T>> {
        match self.norm {
            NormPlace::Pre | NormPlace::Both => {
                let normalized = norm.forward(tape, &x);
                let inner = sublayer(tape, &normalized)?;
                drop(normalized);
                let Some(after) = after else { return Ok(output.added(tape, &inner, &x, self.dropout)) };
                let y = output.forward(tape, &inner);
                let y = after.forward(tape, &y);
                Ok(tape.residual(&x, y, self.dropout))
            }
            NormPlace::Post => {
                let inner = sublayer(tape, &x)?;
                let sum = output.added(tape, &inner, &x, self.dropout);
                Ok(norm.forward(tape, &sum))
            }
        }
    }

    /// The norms and the last map of self-attention.
    fn own(&self) -> (&SublayerNorm, OutputMap) {
        (&self.self_norm, self.self_attn.output())
    }

    /// The norms and the last map of the feed-forward sublayer.
    fn last(&self) -> (&SublayerNorm, OutputMap) {
        (&self.feed_norm, OutputMap::plain(self.feed.output()))
    }

    /// Runs the layer on all tokens `x [B, N, C]` at once, of which the first `lengths[b]` are not padding. `angles`
    /// rotates queries and keys if positions are rotary; `memory` is, in a decoder, the encoder's output `[B, M, C]`
    /// and its lengths. On a tape that [recomputes](Tape::recompute), a layer without `memory` saves only its input.
    ///
    /// # Errors
    /// As [`Tape::attend`].
    pub fn forward<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        x: Var<T>,
        lengths: Option<&[usize]>,
        angles: Option<&Angles<T>>,
        memory: Option<(&Var<T>, Option<&[usize]>)>,
    ) -> qkv::Result<Var<T>> {
        if !tape.recomputes() || memory.is_some() {
            return self.forward_once(tape, x, lengths, angles, memory);
        }
        let (block, lengths, angles) = (self.clone(), lengths.map(<[usize]>::to_vec), angles.cloned());
        tape.recomputed(x, move |tape, x| block.forward_once(tape, x, lengths.as_deref(), angles.as_ref(), None))
    }

    fn forward_once<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        x: Var<T>,
        lengths: Option<&[usize]>,
        angles: Option<&Angles<T>>,
        memory: Option<(&Var<T>, Option<&[usize]>)>,
    ) -> qkv::Result<Var<T>> {
        let mut x =
            self.add(tape, x, self.own(), |tape, x| self.self_attn.heads(tape, x, x, lengths, lengths, angles))?;
        if let (Some((cross, norm)), Some((memory, key_lengths))) = (&self.cross, memory) {
            let sublayer = (norm, cross.output());
            x = self.add(tape, x, sublayer, |tape, x| cross.heads(tape, x, memory, key_lengths, lengths, None))?;
        }
        self.add(tape, x, self.last(), |tape, x| Ok(self.feed.inner(tape, x)))
    }

    /// Runs the layer on packed sequences, `x [B, N, C]` with the segment of each token, `[B, N]`: each token attends
    /// within its segment. `angles` are those of each token's position in its segment.
    ///
    /// # Errors
    /// As [`Tape::attend`].
    pub fn forward_segments<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        x: Var<T>,
        segments: &Arc<[i32]>,
        angles: Option<&Angles<T>>,
    ) -> qkv::Result<Var<T>> {
        let (block, segments, angles) = (self.clone(), segments.clone(), angles.cloned());
        let run = move |tape: &mut Tape<'_, T>, x: Var<T>| {
            let x = block.add(tape, x, block.own(), |tape, x| {
                block.self_attn.forward_segments(tape, x, &segments, angles.as_ref())
            })?;
            block.add(tape, x, block.last(), |tape, x| Ok(block.feed.inner(tape, x)))
        };
        if tape.recomputes() { tape.recomputed(x, run) } else { run(tape, x) }
    }

    /// Runs the layer, in an encoder, on packed sequences `x [1, T, C]` of these lengths, concatenated without padding.
    /// For inference.
    ///
    /// # Errors
    /// As [`Tape::attend`].
    pub fn forward_packed<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        x: Var<T>,
        lengths: &[usize],
    ) -> qkv::Result<Var<T>> {
        let x = self.add(tape, x, self.own(), |tape, x| self.self_attn.forward_packed(tape, x, lengths))?;
        self.add(tape, x, self.last(), |tape, x| Ok(self.feed.inner(tape, x)))
    }

    /// Caches for `batch` sequences: an empty one for self-attention, and one for cross-attention filled from the
    /// encoder's output.
    ///
    /// # Errors
    /// As [`Tape::attend`].
    pub fn caches<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        batch: usize,
        memory: Option<&Var<T>>,
    ) -> qkv::Result<[Option<KvCache<T>>; 2]> {
        let cross = match (&self.cross, memory) {
            (Some((cross, _)), Some(memory)) => {
                let mut cache = cross.cache(batch);
                cross.fill(tape, memory, &mut cache)?;
                Some(cache)
            }
            _ => None,
        };
        Ok([Some(self.self_attn.cache(batch)), cross])
    }

    /// Whether a GPU can compute its self-attention.
    pub fn runs_on_gpu(&self) -> bool {
        self.self_attn.runs_on_gpu()
    }

    /// Whether a GPU can compute all of its attention, and its cross-attention does not depend on positions.
    pub fn shares_memory_on_gpu(&self) -> bool {
        let cross = self.cross.as_ref().is_none_or(|(cross, _)| cross.runs_on_gpu() && !cross.sees_positions());
        self.runs_on_gpu() && cross
    }

    /// A self-attention cache for sequences whose positions are tracked on a device.
    pub fn counted_cache<T: Float>(&self, operations: &Operations, batch: &DecodeBatch) -> KvCache<T> {
        self.self_attn.counted_cache(operations, batch)
    }

    /// Decodes new tokens `x [B, new, C]`, with `angles` those of their positions, and appends their keys and values to
    /// the first cache. `lengths` are those of the encoder's output.
    ///
    /// # Errors
    /// As [`Tape::attend`].
    pub fn step<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        x: Var<T>,
        caches: &mut [Option<KvCache<T>>; 2],
        lengths: Option<&[usize]>,
        angles: Option<&Angles<T>>,
    ) -> qkv::Result<Var<T>> {
        let [own, other] = caches;
        self.step_over(tape, x, own.as_mut().expect("made by `caches`"), other.as_ref(), lengths, angles)
    }

    /// Decodes the next token of each of several sequences, `x [B, 1, C]`, in a decoder without an encoder. Each
    /// sequence has a separate cache; `angles` are those of its position. For inference.
    ///
    /// # Errors
    /// As [`Tape::attend`].
    pub fn step_each<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        x: Var<T>,
        caches: &mut [&mut KvCache<T>],
        angles: Option<&Angles<T>>,
    ) -> qkv::Result<Var<T>> {
        let x = self.add(tape, x, self.own(), |tape, x| self.self_attn.step_each(tape, x, caches, angles))?;
        self.add(tape, x, self.last(), |tape, x| Ok(self.feed.inner(tape, x)))
    }

    /// [`step`](Block::step) with the two caches passed separately. If `memory` has fewer sequences than `x`, as in
    /// beam search, each memory serves an equal number of consecutive sequences and is read once for all of them.
    /// Cross-attention then must not depend on positions.
    ///
    /// # Errors
    /// As [`Tape::attend`].
    pub fn step_over<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        x: Var<T>,
        own: &mut KvCache<T>,
        memory: Option<&KvCache<T>>,
        lengths: Option<&[usize]>,
        angles: Option<&Angles<T>>,
    ) -> qkv::Result<Var<T>> {
        let start = own.len();
        let mut x = self.add(tape, x, self.own(), |tape, x| self.self_attn.step(tape, x, own, angles))?;
        if let (Some((cross, norm)), Some(memory)) = (&self.cross, memory) {
            let &[batch, new, width] = x.shape() else { panic!("sequences have three axes, not {:?}", x.shape()) };
            let shared = memory.batch() < batch && batch.is_multiple_of(memory.batch().max(1));
            x = self.add(tape, x, (norm, cross.output()), |tape, x| match shared {
                true => {
                    let memories = memory.batch().max(1);
                    let together = x.clone().reshaped(&[memories, batch / memories * new, width]);
                    let heads = cross.attend_cache(tape, &together, memory, lengths, 0)?;
                    let across = heads.value().width();
                    Ok(heads.reshaped(&[batch, new, across]))
                }
                false => cross.attend_cache(tape, x, memory, lengths, start),
            })?;
        }
        self.add(tape, x, self.last(), |tape, x| Ok(self.feed.inner(tape, x)))
    }
}
