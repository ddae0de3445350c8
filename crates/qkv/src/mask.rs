//! **Mask**: which keys may a query see? A mask is a description, an expression of simple masks joined by `&`, `|` and
//! `!`. The data that some masks read (lengths, segments, bits) comes with the inputs.
//!
//! [`Mask::allows`] defines what each mask means, one pair at a time. The [compiled form](crate::engine::CompiledMask),
//! which engines run, is tested against it. `docs/adding-a-mask.md` says what a new mask needs.

mod data;

pub use data::MaskData;
pub(crate) use data::RowAt;

use crate::error::{Error, Result};
use crate::lsh::Lsh;
use qkv_simd::philox;
use serde::{Deserialize, Serialize};
use std::ops::{BitAnd, BitOr, Not};

/// Which keys a query may see. `p` is the query's position (see [`Place`](crate::Place)), `j` the key's index. Patterns
/// are not causal by themselves: join them with `& Mask::causal()`.
///
/// ```
/// use qkv::{Attention, Inputs, Mask, Tensor};
/// let x = Tensor::<f32, 4>::randn([1, 2, 300, 16], 1);
/// // The 128 tokens before and the token itself, but always the first four as well.
/// let mask = Mask::causal() & (Mask::window(128, 0) | Mask::longformer(0, [0, 1, 2, 3]));
/// Attention::scaled_dot().mask(mask).forward(Inputs::new(&x, &x, &x))?;
/// # Ok::<(), qkv::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Mask {
    /// Every key.
    #[default]
    Full,
    /// See [`Mask::causal`].
    Causal,
    /// See [`Mask::lengths`].
    Lengths,
    /// See [`Mask::segments`].
    Segments,
    /// See [`Mask::bits`].
    Bits,
    /// See [`Mask::window`].
    Window {
        /// How many keys before its position.
        left: usize,
        /// How many after.
        right: usize,
    },
    /// See [`Mask::dilated`].
    Dilated {
        /// The keys in the window, both sides together.
        window: usize,
        /// The distance between them.
        step: usize,
    },
    /// See [`Mask::strided`].
    Strided {
        /// The stride.
        stride: usize,
    },
    /// See [`Mask::fixed`].
    Fixed {
        /// The length of a block.
        stride: usize,
        /// How many keys at the end of each block are seen by all.
        summary: usize,
    },
    /// See [`Mask::longformer`].
    Longformer {
        /// The width of the window, both sides together.
        window: usize,
        /// Positions that see everything and are seen by all.
        globals: Vec<usize>,
    },
    /// See [`Mask::bigbird`].
    BigBird(BigBird),
    /// See [`Mask::blocks`].
    Blocks(Blocks),
    /// See [`Mask::lsh`].
    Lsh(Lsh),
    /// Pairs that both allow.
    And(Box<Mask>, Box<Mask>),
    /// Pairs that either allows.
    Or(Box<Mask>, Box<Mask>),
    /// Pairs that it does not allow.
    Not(Box<Mask>),
}

/// The parameters of BigBird, in blocks. See [`Mask::bigbird`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BigBird {
    /// Tokens in a block.
    pub block: usize,
    /// Blocks in the window, both sides and itself together.
    pub window: usize,
    /// Blocks at the start that see everything and are seen by all.
    pub globals: usize,
    /// Blocks drawn for each block of queries.
    pub random: usize,
    /// The seed of the draw.
    pub seed: u64,
}

impl BigBird {
    /// The blocks drawn for the queries of block `row`, out of `blocks` blocks of keys: ascending, each once.
    pub fn drawn(&self, row: usize, blocks: usize) -> Vec<usize> {
        // Floyd's sampling without replacement: one random number per draw, no rejection.
        let mut drawn = Vec::with_capacity(self.random.min(blocks));
        for last in blocks.saturating_sub(self.random)..blocks {
            let [word, ..] = philox::block([last as u32, row as u32, 0x6269_6721, 0], self.seed);
            let pick = ((u64::from(word) * (last as u64 + 1)) >> 32) as usize;
            drawn.push(if drawn.contains(&pick) { last } else { pick });
        }
        drawn.sort_unstable();
        drawn
    }
}

/// A bit for each pair of blocks. See [`Mask::blocks`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blocks {
    /// Tokens in a block.
    pub size: usize,
    /// One row for each block of queries, one entry for each block of keys.
    pub seen: Vec<Vec<bool>>,
}

impl Mask {
    /// Every key: no mask.
    pub fn full() -> Mask {
        Mask::Full
    }

    /// Keys at or before the query's position, `j ≤ p` (Vaswani et al. 2017, arXiv:1706.03762).
    ///
    /// ```
    /// # use qkv::*; let x = Tensor::<f32, 4>::randn([1, 1, 3, 4], 1);
    /// let causal = Attention::scaled_dot().mask(Mask::causal());
    /// let out = causal.forward(Inputs::new(&x, &x, &x))?;
    /// let seen = causal.weights(Inputs::new(&x, &x, &x), &out)?.rows(0, 0, 0..3)?;
    /// assert_eq!(&seen.data()[..3], [1.0, 0.0, 0.0]); // the first token sees itself alone
    /// # Ok::<(), qkv::Error>(())
    /// ```
    pub fn causal() -> Mask {
        Mask::Causal
    }

    /// Padding: keys before the length of their sequence, from the input `lengths [B]`.
    ///
    /// ```
    /// # use qkv::*; let x = Tensor::<f32, 4>::randn([2, 1, 5, 4], 1);
    /// let padded = Attention::scaled_dot().mask(Mask::lengths());
    /// padded.forward(Inputs::new(&x, &x, &x).lengths(&[5, 3]))?;
    /// # Ok::<(), qkv::Error>(())
    /// ```
    pub fn lengths() -> Mask {
        Mask::Lengths
    }

    /// Packed sequences: query and key of the same segment, from the inputs `segments_q [B, N]` and `segments_k [B,
    /// M]`.
    /// Cumulative lengths, the convention of "varlen" kernels, become segments with [`segments_of`].
    ///
    /// ```
    /// # use qkv::*; let x = Tensor::<f32, 4>::randn([1, 2, 9, 4], 1);
    /// let packed = Attention::scaled_dot().mask(Mask::causal() & Mask::segments());
    /// let segments = segments_of(&[0, 4, 9])?; // two sequences, of four and five tokens
    /// packed.forward(Inputs::new(&x, &x, &x).segments(&segments, &segments))?;
    /// # Ok::<(), qkv::Error>(())
    /// ```
    pub fn segments() -> Mask {
        Mask::Segments
    }

    /// Any bits: pairs where the input `bits`, which broadcasts to `[B, Hq, N, M]`, is `true` or not 0.
    ///
    /// ```
    /// # use qkv::*; let x = Tensor::<f32, 4>::randn([1, 2, 3, 4], 1);
    /// let bits = Tensor::from_fn([1, 1, 3, 3], |[_, _, i, j]| u8::from((i + j) % 2 == 0));
    /// Attention::scaled_dot().mask(Mask::bits()).forward(Inputs::new(&x, &x, &x).bits(&bits))?;
    /// # Ok::<(), qkv::Error>(())
    /// ```
    pub fn bits() -> Mask {
        Mask::Bits
    }

    /// Local attention: `p − left ≤ j ≤ p + right` (Luong et al. 2015, arXiv:1508.04025; Beltagy et al. 2020).
    ///
    /// ```
    /// # use qkv::*; let x = Tensor::<f32, 4>::randn([1, 1, 500, 8], 1);
    /// Attention::scaled_dot().mask(Mask::window(64, 64)).forward(Inputs::new(&x, &x, &x))?;
    /// # Ok::<(), qkv::Error>(())
    /// ```
    pub fn window(left: usize, right: usize) -> Mask {
        Mask::Window { left, right }
    }

    /// Dilated sliding window (Longformer, Beltagy et al. 2020, arXiv:2004.05150): every `step`-th key on both sides,
    /// `window/2` of them each way. That is `|p − j| ≤ window/2 · step` and `(p − j) mod step = 0`.
    ///
    /// ```
    /// # use qkv::*; let x = Tensor::<f32, 4>::randn([1, 1, 500, 8], 1);
    /// Attention::scaled_dot().mask(Mask::dilated(64, 4)).forward(Inputs::new(&x, &x, &x))?;
    /// # Ok::<(), qkv::Error>(())
    /// ```
    pub fn dilated(window: usize, step: usize) -> Mask {
        Mask::Dilated { window, step }
    }

    /// Strided (Child et al. 2019, "Sparse Transformers", arXiv:1904.10509): `|p − j| < stride`, or `(p − j) mod stride
    /// = 0`.
    ///
    /// ```
    /// # use qkv::*; let x = Tensor::<f32, 4>::randn([1, 1, 500, 8], 1);
    /// Attention::scaled_dot().mask(Mask::causal() & Mask::strided(22)).forward(Inputs::new(&x, &x, &x))?;
    /// # Ok::<(), qkv::Error>(())
    /// ```
    pub fn strided(stride: usize) -> Mask {
        Mask::Strided { stride }
    }

    /// Fixed (Child et al. 2019, arXiv:1904.10509): the same block of `stride`, or one of the last `summary` keys of
    /// any block.
    ///
    /// ```
    /// # use qkv::*; let x = Tensor::<f32, 4>::randn([1, 1, 500, 8], 1);
    /// Attention::scaled_dot().mask(Mask::causal() & Mask::fixed(32, 4)).forward(Inputs::new(&x, &x, &x))?;
    /// # Ok::<(), qkv::Error>(())
    /// ```
    pub fn fixed(stride: usize, summary: usize) -> Mask {
        Mask::Fixed { stride, summary }
    }

    /// Longformer (Beltagy et al. 2020, arXiv:2004.05150): `|p − j| ≤ window/2`, or `j` a global position, or `p` one.
    ///
    /// ```
    /// # use qkv::*; let x = Tensor::<f32, 4>::randn([1, 1, 500, 8], 1);
    /// Attention::scaled_dot().mask(Mask::longformer(64, [0, 250])).forward(Inputs::new(&x, &x, &x))?;
    /// # Ok::<(), qkv::Error>(())
    /// ```
    pub fn longformer(window: usize, globals: impl IntoIterator<Item = usize>) -> Mask {
        let mut globals: Vec<usize> = globals.into_iter().collect();
        globals.sort_unstable();
        globals.dedup();
        Mask::Longformer { window, globals }
    }

    /// BigBird (Zaheer et al. 2020, arXiv:2007.14062), in blocks: a window of blocks, the first blocks for all, and a
    /// few drawn at random for each block of queries. What is drawn depends on the number of keys: it is an encoder's
    /// mask.
    ///
    /// ```
    /// # use qkv::*; let x = Tensor::<f32, 4>::randn([1, 1, 500, 8], 1);
    /// let bigbird = BigBird { block: 32, window: 3, globals: 1, random: 2, seed: 7 };
    /// Attention::scaled_dot().mask(Mask::bigbird(bigbird)).forward(Inputs::new(&x, &x, &x))?;
    /// # Ok::<(), qkv::Error>(())
    /// ```
    pub fn bigbird(pattern: BigBird) -> Mask {
        Mask::BigBird(pattern)
    }

    /// Block-sparse (Gray et al. 2017): the bit of `(⌊i/size⌋, ⌊j/size⌋)`.
    ///
    /// ```
    /// # use qkv::*; let x = Tensor::<f32, 4>::randn([1, 1, 96, 8], 1);
    /// let diagonal_and_first = (0..3).map(|r| (0..3).map(|c| c == 0 || c == r).collect()).collect();
    /// let blocks = Blocks { size: 32, seen: diagonal_and_first };
    /// Attention::scaled_dot().mask(Mask::blocks(blocks)).forward(Inputs::new(&x, &x, &x))?;
    /// # Ok::<(), qkv::Error>(())
    /// ```
    pub fn blocks(blocks: Blocks) -> Mask {
        Mask::Blocks(blocks)
    }

    /// Hash buckets (Reformer, Kitaev et al. 2020, arXiv:2001.04451): pairs in the same bucket in any round, counted
    /// once.
    /// The buckets come with the inputs, from [`Lsh::hash`].
    ///
    /// ```
    /// # use qkv::*; let x = Tensor::<f32, 4>::randn([1, 1, 2000, 8], 1);
    /// let lsh = Lsh { buckets: 32, rounds: 2, seed: 7 };
    /// let buckets = lsh.hash(&x)?;
    /// let attention = Attention::scaled_dot().mask(Mask::lsh(lsh));
    /// attention.forward(Inputs::new(&x, &x, &x).buckets(&buckets, &buckets))?;
    /// # Ok::<(), qkv::Error>(())
    /// ```
    pub fn lsh(lsh: Lsh) -> Mask {
        Mask::Lsh(lsh)
    }
}

impl BitAnd for Mask {
    type Output = Mask;
    fn bitand(self, other: Mask) -> Mask {
        match (self, other) {
            (Mask::Full, mask) | (mask, Mask::Full) => mask,
            (a, b) => Mask::And(Box::new(a), Box::new(b)),
        }
    }
}

impl BitOr for Mask {
    type Output = Mask;
    fn bitor(self, other: Mask) -> Mask {
        Mask::Or(Box::new(self), Box::new(other))
    }
}

impl Not for Mask {
    type Output = Mask;
    fn not(self) -> Mask {
        match self {
            Mask::Not(mask) => *mask,
            mask => Mask::Not(Box::new(mask)),
        }
    }
}

/// The segment of every token, from cumulative lengths: `[0, 4, 9]` gives four tokens of segment 0 and five of segment
/// 1.
///
/// ```
/// assert_eq!(qkv::segments_of(&[0, 2, 2, 5])?, [0, 0, 2, 2, 2]);
/// assert!(qkv::segments_of(&[0, 5, 3]).is_err());
/// # Ok::<(), qkv::Error>(())
/// ```
pub fn segments_of(cumulative: &[usize]) -> Result<Vec<i32>> {
    let bad = |why: &str| Error::value("cumulative lengths", format!("{cumulative:?}"), why);
    if cumulative.first() != Some(&0) {
        return Err(bad("to start with 0"));
    }
    let mut segments = Vec::new();
    for (segment, pair) in cumulative.windows(2).enumerate() {
        let length = pair[1].checked_sub(pair[0]).ok_or_else(|| bad("to ascend"))?;
        let id = i32::try_from(segment).map_err(|_| bad("fewer segments"))?;
        segments.try_reserve(length).map_err(|_| bad("a total that fits in memory"))?;
        segments.extend(std::iter::repeat_n(id, length));
    }
    Ok(segments)
}

impl Mask {
    /// Whether query `i` may see key `j`. This is the definition of every mask, one pair at a time; engines run a
    /// compiled form that agrees with it.
    ///
    /// ```
    /// use qkv::{Mask, MaskData};
    /// let mask = Mask::causal() & (Mask::window(2, 0) | Mask::longformer(0, [0]));
    /// let data = MaskData::new(6, 6);
    /// for i in 0..6 {
    ///     let row: String = (0..6).map(|j| if mask.allows(i, j, &data).unwrap() { 'x' } else { '.' }).collect();
    ///     println!("{row}");
    /// }
    /// assert!(mask.allows(5, 0, &data)? && !mask.allows(5, 1, &data)? && mask.allows(5, 3, &data)?);
    /// assert!(Mask::lengths().allows(0, 0, &data).is_err()); // it needs `lengths`
    /// # Ok::<(), qkv::Error>(())
    /// ```
    ///
    /// # Errors
    /// If the pair is outside, or data that the mask reads is missing or too small.
    pub fn allows(&self, query: usize, key: usize, data: &MaskData<'_>) -> Result<bool> {
        data.check(self, query, key)?;
        let [b, h] = data.of;
        Ok(self.allows_pair(data, b, h, query, key))
    }

    /// [`allows`](Mask::allows) for any sequence and head, without checks.
    pub(crate) fn allows_pair(&self, data: &MaskData<'_>, b: usize, h: usize, i: usize, j: usize) -> bool {
        let (p, k) = (data.position(b, i), j as i64);
        match self {
            Mask::Full => true,
            Mask::Causal => k <= p,
            Mask::Lengths => data.lengths.is_none_or(|lengths| j < lengths[b]),
            Mask::Segments => data.segments.is_none_or(|(q, k)| q[b * data.n + i] == k[b * data.m + j]),
            Mask::Bits => data.bits.is_none_or(|bits| bits.at(b, h, i, j) != 0),
            Mask::Window { left, right } => p.saturating_sub(clamp(*left)) <= k && k <= p.saturating_add(clamp(*right)),
            Mask::Dilated { window, step } => {
                let (half, step) = (clamp(*window / 2), clamp(*step));
                (p - k).abs() <= half.saturating_mul(step) && (p - k).rem_euclid(step) == 0
            }
            Mask::Strided { stride } => {
                let stride = clamp(*stride);
                (p - k).abs() < stride || (p - k).rem_euclid(stride) == 0
            }
            Mask::Fixed { stride, summary } => {
                let (stride, summary) = (clamp(*stride), clamp(*summary));
                k.div_euclid(stride) == p.div_euclid(stride) || k.rem_euclid(stride) >= stride - summary
            }
            Mask::Longformer { window, globals } => {
                let global = |at: i64| at >= 0 && globals.binary_search(&(at as usize)).is_ok();
                (p - k).abs() <= clamp(*window / 2) || global(k) || global(p)
            }
            Mask::BigBird(pattern) => {
                let size = clamp(pattern.block);
                let (row, col) = (p.div_euclid(size), k / size);
                let drawn = || {
                    row >= 0 && pattern.drawn(row as usize, data.m.div_ceil(pattern.block)).contains(&(col as usize))
                };
                let globals = clamp(pattern.globals);
                (row - col).abs() <= clamp(pattern.window / 2) || row < globals && row >= 0 || col < globals || drawn()
            }
            Mask::Blocks(blocks) => blocks.seen[i / blocks.size][j / blocks.size],
            Mask::Lsh(lsh) => (0..lsh.rounds).any(|round| data.share_bucket(b, h, i, j, round)),
            Mask::And(x, y) => x.allows_pair(data, b, h, i, j) && y.allows_pair(data, b, h, i, j),
            Mask::Or(x, y) => x.allows_pair(data, b, h, i, j) || y.allows_pair(data, b, h, i, j),
            Mask::Not(x) => !x.allows_pair(data, b, h, i, j),
        }
    }

    /// Its name in messages.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Mask::Full => "a full mask",
            Mask::Causal => "a causal mask",
            Mask::Lengths => "a padding mask",
            Mask::Segments => "a segment mask",
            Mask::Bits => "a mask of bits",
            Mask::Window { .. } => "a window",
            Mask::Dilated { .. } => "a dilated window",
            Mask::Strided { .. } => "a strided mask",
            Mask::Fixed { .. } => "a fixed mask",
            Mask::Longformer { .. } => "a longformer mask",
            Mask::BigBird(_) => "a bigbird mask",
            Mask::Blocks(_) => "a mask of blocks",
            Mask::Lsh(_) => "a mask of hash buckets",
            Mask::And(..) => "masks joined by `&`",
            Mask::Or(..) => "masks joined by `|`",
            Mask::Not(_) => "a mask negated by `!`",
        }
    }

    /// Whether exactly this mask occurs anywhere in the expression.
    ///
    /// ```
    /// # use qkv::Mask;
    /// assert!((Mask::causal() & !Mask::window(3, 0)).uses(&Mask::Causal));
    /// ```
    pub fn uses(&self, kind: &Mask) -> bool {
        match self {
            Mask::And(a, b) | Mask::Or(a, b) => a.uses(kind) || b.uses(kind),
            Mask::Not(a) => a.uses(kind),
            mask => mask == kind,
        }
    }

    /// The hash of the LSH mask anywhere in the expression; of several, the first.
    pub fn lsh_buckets(&self) -> Option<Lsh> {
        match self {
            Mask::Lsh(lsh) => Some(*lsh),
            Mask::And(a, b) | Mask::Or(a, b) => a.lsh_buckets().or(b.lsh_buckets()),
            Mask::Not(a) => a.lsh_buckets(),
            _ => None,
        }
    }

    /// Refuses parameters that are invalid for `n` queries and `m` keys.
    pub(crate) fn check(&self, n: usize, m: usize) -> Result<()> {
        match self {
            Mask::Dilated { step: 0, .. } => Err(Error::value("dilated", 0, "a step of at least 1")),
            Mask::Strided { stride: 0 } => Err(Error::value("strided", 0, "a stride of at least 1")),
            Mask::Fixed { stride, summary } if *summary == 0 || summary > stride => Err(Error::value(
                "fixed",
                format!("{stride},{summary}"),
                "a summary of at least 1 and at most the stride",
            )),
            // A position beyond the keys is not an error: a growing cache will reach it.
            Mask::Longformer { globals, .. } if !globals.is_sorted_by(|a, b| a < b) => {
                Err(Error::value("longformer", format!("{globals:?}"), "global positions in ascending order"))
            }
            Mask::BigBird(BigBird { block: 0, .. }) => {
                Err(Error::value("bigbird", "a block of 0", "a block of at least 1"))
            }
            Mask::Blocks(Blocks { size: 0, .. }) => {
                Err(Error::value("blocks", "a block of 0", "a block of at least 1"))
            }
            Mask::Blocks(Blocks { size, seen }) => {
                let (rows, cols) = (n.div_ceil(*size), m.div_ceil(*size));
                let found =
                    format!("{} × {} blocks of {size}", seen.len(), seen.iter().map(Vec::len).min().unwrap_or(0));
                let fits = seen.len() >= rows && seen.iter().all(|row| row.len() >= cols);
                if fits { Ok(()) } else { Err(Error::value("blocks", found, format!("{rows} × {cols} at least"))) }
            }
            Mask::Lsh(lsh) => lsh.check(),
            Mask::And(a, b) | Mask::Or(a, b) => match (a.lsh_buckets(), b.lsh_buckets()) {
                (Some(x), Some(y)) if x != y => Err(Error::Conflict {
                    first: "one hash",
                    second: "another",
                    reason: "only one set of buckets can be given",
                }),
                _ => a.check(n, m).and(b.check(n, m)),
            },
            Mask::Not(a) => a.check(n, m),
            _ => Ok(()),
        }
    }
}

/// A size as a signed distance; a size beyond any sequence means no limit.
pub(crate) fn clamp(size: usize) -> i64 {
    i64::try_from(size).unwrap_or(i64::MAX / 4).min(i64::MAX / 4)
}

/// Random masks, for property tests of everything that interprets a mask.
#[cfg(test)]
pub(crate) mod arbitrary {
    use super::{BigBird, Blocks, Mask};
    use crate::place::Place;
    use proptest::prelude::*;

    /// Masks that depend only on positions, for up to 800 queries and keys: one of each, and expressions of them.
    pub fn masks() -> impl Strategy<Value = Mask> {
        let leaf = prop_oneof![
            Just(Mask::causal()),
            (0usize..200, 0usize..200).prop_map(|(l, r)| Mask::window(l, r)),
            (0usize..40, 1usize..30).prop_map(|(window, step)| Mask::dilated(window, step)),
            (1usize..90).prop_map(Mask::strided),
            (1usize..90).prop_flat_map(|s| (Just(s), 1..=s)).prop_map(|(s, c)| Mask::fixed(s, c)),
            (0usize..100, prop::collection::vec(0usize..500, 0..9)).prop_map(|(w, g)| Mask::longformer(w, g)),
            (1usize..90, 0usize..5, 0usize..3, 0usize..4).prop_map(|(block, window, globals, random)| {
                Mask::bigbird(BigBird { block, window, globals, random, seed: 9 })
            }),
            (40usize..90).prop_map(|size| {
                let seen = (0..20).map(|r| (0..20).map(|c| (r * 7 + c * 3) % 5 < 2).collect()).collect();
                Mask::blocks(Blocks { size, seen })
            }),
        ];
        leaf.prop_recursive(2, 5, 2, |inner| {
            prop_oneof![
                (inner.clone(), inner.clone()).prop_map(|(a, b)| a & b),
                (inner.clone(), inner.clone()).prop_map(|(a, b)| a | b),
                inner.prop_map(|a| !a),
            ]
        })
    }

    /// Places of queries, before, among and beyond the keys.
    pub fn places() -> impl Strategy<Value = Place> {
        prop_oneof![Just(Place::Start), Just(Place::End), (-300i64..300).prop_map(Place::Offset)]
    }
}
