//! One layer of a Transformer: self-attention, cross-attention where it decodes, feed-forward, each with its norm and its
//! residual sum.

use super::{AttentionConfig, Builder, FeedForward, FeedKind, KeysValues, MultiHead, Norm, NormKind};
use crate::float::Float;
use crate::ops::rotary::Angles;
use crate::tape::{Tape, Var};
use serde::{Deserialize, Serialize};

/// Where the norms stand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NormPlace {
    /// In front of each part, and once at the end of the stack: trains without care.
    #[default]
    Pre,
    /// After each sum, as in the first Transformer.
    Post,
}

/// What a layer is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockConfig {
    /// The width of the model.
    pub width: usize,
    /// The inner width of the feed-forward part.
    pub inner: usize,
    /// What stands between its maps.
    pub feed: FeedKind,
    /// Whether its maps have biases.
    pub feed_bias: bool,
    /// Where the norms stand.
    pub norm: NormPlace,
    /// How they normalise.
    pub norm_kind: NormKind,
    /// Their `ε`.
    pub epsilon: f64,
    /// Dropped from what each part adds.
    pub dropout: f64,
    /// Dropped from the inner rows of the feed-forward part.
    pub inner_dropout: f64,
    /// Self-attention.
    pub own: AttentionConfig,
    /// Attention to another sequence, in a decoder.
    pub cross: Option<AttentionConfig>,
}

impl BlockConfig {
    /// Self-attention alone, ReLU, biases, layer normalisation in front, no dropout.
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

/// A layer.
#[derive(Clone, Debug)]
pub struct Block {
    self_attn: MultiHead,
    self_norm: Norm,
    cross: Option<(MultiHead, Norm)>,
    feed: FeedForward,
    feed_norm: Norm,
    norm: NormPlace,
    dropout: f64,
}

impl Block {
    /// Parameters: `self_attn`, `self_attn_layer_norm`, `encoder_attn`, `encoder_attn_layer_norm`, `fc1`, `fc2`,
    /// `gate`, `final_layer_norm`, as the translation models of Hugging Face call them.
    ///
    /// # Errors
    /// As [`MultiHead::new`].
    pub fn new<T: Float>(at: &mut Builder<'_, T>, config: &BlockConfig) -> qkv::Result<Self> {
        let BlockConfig { width, inner, feed, feed_bias, norm, dropout, inner_dropout, own, cross, .. } = config;
        let normal =
            |at: &mut Builder<'_, T>, name: &str| Norm::new(&mut at.at(name), *width, config.norm_kind, config.epsilon);
        let self_attn = MultiHead::new(&mut at.at("self_attn"), *width, own)?;
        let self_norm = normal(at, "self_attn_layer_norm");
        let cross = match cross {
            Some(cross) => {
                let attention = MultiHead::new(&mut at.at("encoder_attn"), *width, cross)?;
                Some((attention, normal(at, "encoder_attn_layer_norm")))
            }
            None => None,
        };
        let feed = FeedForward::new(at, *width, *inner, *feed, *feed_bias, *inner_dropout);
        let feed_norm = normal(at, "final_layer_norm");
        Ok(Block { self_attn, self_norm, cross, feed, feed_norm, norm: *norm, dropout: *dropout })
    }

    /// `x` and what `part` makes of it, with the norm where it belongs.
    fn add<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        x: Var<T>,
        norm: &Norm,
        part: impl FnOnce(&mut Tape<'_, T>, &Var<T>) -> qkv::Result<Var<T>>,
    ) -> qkv::Result<Var<T>> {
        match self.norm {
            NormPlace::Pre => {
                let normal = norm.forward(tape, &x);
                let y = part(tape, &normal)?;
                drop(normal);
                Ok(tape.residual(&x, y, self.dropout))
            }
            NormPlace::Post => {
                let y = part(tape, &x)?;
                let sum = tape.residual(&x, y, self.dropout);
                Ok(norm.forward(tape, &sum))
            }
        }
    }

    /// All tokens at once: `x [B, N, C]`, of which `lengths` count, turned by `angles` where positions are rotary, and the
    /// other sequence.
    ///
    /// # Errors
    /// What `qkv` refuses.
    pub fn forward<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        x: Var<T>,
        lengths: Option<&[usize]>,
        angles: Option<&Angles<T>>,
        other: Option<(&Var<T>, Option<&[usize]>)>,
    ) -> qkv::Result<Var<T>> {
        let mut x =
            self.add(tape, x, &self.self_norm, |tape, x| self.self_attn.forward(tape, x, x, lengths, lengths, angles))?;
        if let (Some((cross, norm)), Some((memory, kept))) = (&self.cross, other) {
            x = self.add(tape, x, norm, |tape, x| cross.forward(tape, x, memory, kept, lengths, None))?;
        }
        self.add(tape, x, &self.feed_norm, |tape, x| Ok(self.feed.forward(tape, x)))
    }

    /// Empty caches for `batch` sequences, the second filled from the other sequence.
    ///
    /// # Errors
    /// What `qkv` refuses.
    pub fn caches<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        batch: usize,
        memory: Option<&Var<T>>,
    ) -> qkv::Result<[Option<KeysValues<T>>; 2]> {
        let cross = match (&self.cross, memory) {
            (Some((cross, _)), Some(memory)) => {
                let mut cache = cross.cache(batch);
                cross.remember(tape, memory, &mut cache)?;
                Some(cache)
            }
            _ => None,
        };
        Ok([Some(self.self_attn.cache(batch)), cross])
    }

    /// New tokens `x [B, new, C]` after those that the caches hold, turned by the angles of their positions; adds to the first
    /// cache.
    ///
    /// # Errors
    /// What `qkv` refuses.
    pub fn step<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        x: Var<T>,
        caches: &mut [Option<KeysValues<T>>; 2],
        lengths: Option<&[usize]>,
        angles: Option<&Angles<T>>,
    ) -> qkv::Result<Var<T>> {
        let [own, other] = caches;
        let own = own.as_mut().expect("made by `caches`");
        let from = own.len();
        let mut x = self.add(tape, x, &self.self_norm, |tape, x| self.self_attn.step(tape, x, own, angles))?;
        if let (Some((cross, norm)), Some(memory)) = (&self.cross, other) {
            x = self.add(tape, x, norm, |tape, x| cross.look_back(tape, x, memory, lengths, from))?;
        }
        self.add(tape, x, &self.feed_norm, |tape, x| Ok(self.feed.forward(tape, x)))
    }
}
