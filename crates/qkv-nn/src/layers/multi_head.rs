//! Multi-head attention with its four maps, W_Q, W_K, W_V and W_O (Vaswani et al. 2017): self or cross, any attention of the
//! library, with a cache for decoding.

use super::{Builder, Linear};
use crate::float::Float;
use crate::ops::attention::{Attend, Heads, Scoring};
use crate::ops::rotary::Angles;
use crate::parameters::Init;
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;
use qkv::{Attention, Cache, Mask, Scale, Score};

/// What a layer of attention computes.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionConfig {
    /// The description.
    pub attention: Attention,
    /// The heads.
    pub heads: Heads,
    /// The width of each head; `None` shares out the width of the model.
    pub head_width: Option<usize>,
    /// Whether the four maps have biases.
    pub bias: bool,
    /// See [`Attend::entropy`].
    pub entropy: f64,
}

impl AttentionConfig {
    /// With biases, heads that share out the width, and no penalty.
    pub fn new(attention: Attention, heads: Heads) -> Self {
        AttentionConfig { attention, heads, head_width: None, bias: true, entropy: 0.0 }
    }
}

/// A layer of attention.
#[derive(Clone, Debug)]
pub struct MultiHead {
    q: Linear,
    k: Linear,
    v: Linear,
    out: Linear,
    scoring: Scoring,
    config: AttentionConfig,
    head_width: usize,
}

/// Keys and values that new queries look back at.
#[derive(Clone, Debug)]
pub struct KeysValues<T> {
    cache: Cache<T>,
}

impl<T: Float> KeysValues<T> {
    /// How many tokens it holds.
    pub fn len(&self) -> usize {
        self.cache.len()
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.cache.is_empty()
    }

    /// Keeps these sequences, in this order; one may be kept several times, as a beam does.
    pub fn select(&mut self, sequences: &[usize]) {
        self.cache.select(sequences);
    }
}

/// Refuses what a layer has no data for.
pub(super) fn check(attention: &Attention) -> qkv::Result<()> {
    let needs = |tensor, needed_by| Err(qkv::Error::Missing { tensor, needed_by });
    if attention.bias.wants_tensor() {
        return needs("bias", "a bias tensor, which a layer has not (use `alibi` or `relative`)");
    }
    if attention.local.is_some() {
        return needs("center", "predictive local attention, which only the recurrent decoder has");
    }
    if attention.mask.uses(&Mask::Bits) || attention.mask.uses(&Mask::Segments) {
        return needs("mask", "a mask of bits or segments, which a layer has not");
    }
    Ok(())
}

impl MultiHead {
    /// For rows of `width`. Parameters: `q_proj`, `k_proj`, `v_proj`, `out_proj`, and what the score asks for.
    ///
    /// # Errors
    /// Where the heads do not fit, or the description asks for data that a layer has not.
    pub fn new<T: Float>(at: &mut Builder<'_, T>, width: usize, config: &AttentionConfig) -> qkv::Result<Self> {
        let Heads { query, key } = config.heads;
        qkv::Heads::new(query, key)?;
        check(&config.attention)?;
        let even = query > 0 && width.is_multiple_of(query);
        let head_width = config.head_width.or(even.then(|| width / query)).ok_or_else(|| qkv::Error::Value {
            name: "heads",
            found: query.to_string(),
            expected: format!("a divisor of the width, {width}"),
        })?;
        let linear = |at: &mut Builder<'_, T>, name: &str, inputs, outputs| {
            Linear::new(&mut at.at(name), inputs, outputs, config.bias)
        };
        let q = linear(at, "q_proj", width, query * head_width);
        let k = linear(at, "k_proj", width, key * head_width);
        let v = linear(at, "v_proj", width, key * head_width);
        let out = linear(at, "out_proj", query * head_width, width);
        let attention = &config.attention;
        let scoring = Scoring {
            w: (attention.score == Score::General)
                .then(|| at.add("score.weight", &[head_width, head_width], Init::Xavier)),
            v: (attention.score == Score::Additive)
                .then(|| at.add("score.v", &[head_width], Init::Uniform((head_width as f64).powf(-0.5)))),
            scale: (attention.scale == Scale::Learned).then(|| at.add("score.scale", &[1], Init::Ones)),
            table: attention.bias.reach().map(|reach| at.add("score.relative", &[query, 2 * reach + 1], Init::Zeros)),
            sinks: attention.sinks.then(|| at.add("score.sinks", &[query], Init::Zeros)),
        };
        Ok(MultiHead { q, k, v, out, scoring, config: config.clone(), head_width })
    }

    fn how<'a>(&'a self, lengths: Option<&'a [usize]>, queries: Option<&'a [usize]>) -> Attend<'a> {
        let AttentionConfig { attention, heads, entropy, .. } = &self.config;
        let (heads, scoring, entropy) = (*heads, self.scoring, *entropy);
        Attend { heads, scoring, lengths, queries, entropy, ..Attend::new(attention) }
    }

    /// Attends from `x [B, N, C]` to `memory [B, M, C]`, which is `x` itself in self-attention. `lengths` says how many tokens of
    /// each memory count, `queries` how many of `x`; or, where there are more of them than sequences, how long those are that lie
    /// one behind the other in the one row that there is (see [`Tape::attend_packed`]). With `angles`, queries and keys are turned by their positions.
    ///
    /// # Errors
    /// What `qkv` refuses.
    pub fn forward<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        x: &Var<T>,
        memory: &Var<T>,
        lengths: Option<&[usize]>,
        queries: Option<&[usize]>,
        angles: Option<&Angles<T>>,
    ) -> qkv::Result<Var<T>> {
        let q = turned(tape, self.q, x, angles);
        let k = turned(tape, self.k, memory, angles);
        let v = self.v.forward(tape, memory);
        let seen = match lengths {
            Some(packed) if packed.len() > x.shape()[0] => {
                tape.attend_packed([&q, &k, &v], packed, &self.how(None, None))?
            }
            _ => tape.attend(&q, &k, &v, None, &self.how(lengths, queries))?,
        };
        drop((q, k, v));
        Ok(self.out.forward(tape, &seen))
    }

    /// An empty cache for `batch` sequences.
    pub fn cache<T: Float>(&self, batch: usize) -> KeysValues<T> {
        KeysValues { cache: Cache::new(batch, self.config.heads.key, self.head_width, self.head_width) }
    }

    /// Adds the keys and values of `memory [B, M, C]` to the cache.
    ///
    /// # Errors
    /// Where it is another number of sequences.
    pub fn remember<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        memory: &Var<T>,
        cache: &mut KeysValues<T>,
    ) -> qkv::Result<()> {
        let [k, v] = [self.k, self.v].map(|map| map.forward(tape, memory));
        let heads = self.config.heads.key;
        cache.cache.append(split(k.value(), heads), split(v.value(), heads))
    }

    /// New tokens `x [B, new, C]` after those that the cache holds: their keys and values are added to it, and they attend to
    /// all that it then holds. The angles are those of the new positions.
    ///
    /// # Errors
    /// What `qkv` refuses.
    pub fn step<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        x: &Var<T>,
        cache: &mut KeysValues<T>,
        angles: Option<&Angles<T>>,
    ) -> qkv::Result<Var<T>> {
        let from = cache.len();
        let q = turned(tape, self.q, x, angles);
        let k = turned(tape, self.k, x, angles);
        let v = self.v.forward(tape, x);
        let heads = self.config.heads.key;
        cache.cache.append(split(k.value(), heads), split(v.value(), heads))?;
        // Nothing came before and much comes now: a full pass, in tiles.
        let seen = if from == 0 && x.shape()[1] > 1 {
            tape.attend(&q, &k, &v, None, &self.how(None, None))?
        } else {
            tape.attend_cached(&q, &cache.cache, &Attend { from, ..self.how(None, None) })?
        };
        Ok(self.out.forward(tape, &seen))
    }

    /// Attends from new tokens `x [B, new, C]`, the first of which stands at `from`, to what the cache holds.
    ///
    /// # Errors
    /// What `qkv` refuses.
    pub fn look_back<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        x: &Var<T>,
        cache: &KeysValues<T>,
        lengths: Option<&[usize]>,
        from: usize,
    ) -> qkv::Result<Var<T>> {
        let q = self.q.forward(tape, x);
        let seen = tape.attend_cached(&q, &cache.cache, &Attend { from, ..self.how(lengths, None) })?;
        Ok(self.out.forward(tape, &seen))
    }
}

/// A map of `x`, turned where there are angles.
fn turned<T: Float>(tape: &mut Tape<'_, T>, map: Linear, x: &Var<T>, angles: Option<&Angles<T>>) -> Var<T> {
    let y = map.forward(tape, x);
    match angles {
        Some(angles) => tape.rotary(y, angles),
        None => y,
    }
}

/// Heads side by side as `[B, H, L, D]`.
fn split<T: Float>(tensor: &Tensor<T>, heads: usize) -> qkv::View<'_, T> {
    crate::ops::attention::heads_of(tensor, heads)
}
