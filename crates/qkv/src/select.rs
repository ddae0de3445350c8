//! **Select**: how do scores become weights? By softmax, optionally with dropout and sinks; or by choosing one key, a
//! few, or as many as sparsemax finds.

use crate::error::{Error, Result};
use qkv_simd::philox;
use serde::{Deserialize, Deserializer, Serialize};

/// How the scores of a row become weights.
///
/// | selection | weights | memory | gradients | paper |
/// | --- | --- | --- | --- | --- |
/// | [`Soft`](Select::Soft) | softmax | O(n) | exact | Bahdanau et al. 2014, arXiv:1409.0473 |
/// | [`Hard`](Select::Hard) | 1 for one key | O(n) | exact for v; for scores by the log-probability, or straight-through | Xu et al. 2015, arXiv:1502.03044 |
/// | [`TopK`](Select::TopK) | softmax over the k largest scores | O(n·k) | exact | Gupta et al. 2021, arXiv:2106.06899 |
/// | [`Sparsemax`](Select::Sparsemax) | the nearest point of the simplex | O(n) | exact | Martins and Astudillo 2016, arXiv:1602.02068 |
///
/// All except softmax read whole rows of scores at a time, a few rows per worker.
///
/// ```
/// use qkv::{Attention, Inputs, Tensor};
/// let x = Tensor::<f32, 4>::randn([1, 1, 50, 8], 1);
/// let weights = |attention: Attention| {
///     let inputs = Inputs::new(&x, &x, &x).seed(42);
///     let out = attention.forward(inputs)?;
///     let row = attention.weights(inputs, &out)?.rows(0, 0, 7..8)?;
///     Ok::<usize, qkv::Error>(row.data().iter().filter(|&&w| w > 0.0).count())
/// };
/// assert_eq!(weights(Attention::scaled_dot())?, 50);
/// assert_eq!(weights(Attention::scaled_dot().hard())?, 1);
/// assert_eq!(weights(Attention::scaled_dot().sample())?, 1);
/// assert_eq!(weights(Attention::scaled_dot().top_k(5))?, 5);
/// assert!(weights(Attention::scaled_dot().sparsemax())? < 25);
/// # Ok::<(), qkv::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Select {
    /// Softmax: every visible key, weighted by the exponential of its score.
    #[default]
    Soft,
    /// One key: the one with the largest score (the lowest on a tie), or one drawn from the softmax.
    Hard(Choice),
    /// Softmax over the `k` keys with the largest scores (the lowest on ties).
    TopK(usize),
    /// The weights nearest to the scores: `max(score − τ, 0)` with the `τ` for which they sum to 1.
    Sparsemax,
}

/// How hard attention chooses a key, and which gradient the scores get.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Choice {
    /// Draw the key from the softmax, with [`Inputs::seed`](crate::Inputs::seed); otherwise take the largest score.
    #[serde(deserialize_with = "sample_or_old_seed")]
    pub sample: bool,
    /// Pass the gradient of the output to the scores as if the weights had been soft (Bengio et al. 2013,
    /// arXiv:1308.3432). Otherwise only the gradient of the log-probability reaches them.
    pub straight_through: bool,
}

/// Descriptions once held the seed here: a number meant sampling, `null` the largest score.
fn sample_or_old_seed<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<bool, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Written {
        Sample(bool),
        Seed(#[expect(dead_code, reason = "only its presence matters")] u64),
        Largest(()),
    }
    Ok(match Written::deserialize(from)? {
        Written::Sample(sample) => sample,
        Written::Seed(_) => true,
        Written::Largest(()) => false,
    })
}

impl Choice {
    /// What is added to a score before the largest is taken: 0, or Gumbel noise, with which the largest is a draw from
    /// the softmax (Gumbel 1954; Maddison et al. 2014). In f64, so that every engine adds the same number.
    pub(crate) fn noise(self, seed: u64, b: usize, h: usize, i: usize, j: usize) -> f64 {
        if self.sample { gumbel(philox::words(seed, b, h, i, j / 4)[j % 4]) } else { 0.0 }
    }
}

/// 32 random bits as a number between 0 and 1, both excluded.
pub(crate) fn uniform(word: u32) -> f64 {
    (f64::from(word) + 0.5) / 4_294_967_296.0
}

/// 32 random bits as Gumbel noise.
pub(crate) fn gumbel(word: u32) -> f64 {
    -(-uniform(word).ln()).ln()
}

/// Attention dropout (Srivastava et al. 2014; Vaswani et al. 2017): each weight is dropped with probability `p` and the
/// others are scaled up. Which are dropped is a pure function of [`Inputs::seed`](crate::Inputs::seed), sequence, query
/// head, query and key: [`qkv_simd::philox`] defines it, and every device draws the same.
///
/// Descriptions once held the seed as well; it is accepted and ignored when one is read.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Dropout {
    /// The probability of dropping a weight, from 0 up to but not including 1, rounded to 1/65,536.
    pub p: f64,
}

impl Dropout {
    /// A weight whose 16 random bits are below this is dropped.
    pub fn threshold(self) -> u32 {
        (self.p * 65536.0).round().min(65535.0) as u32
    }

    /// The factor of a kept weight: one over the probability of being kept, as rounded in the threshold.
    pub fn kept_scale(self) -> f64 {
        65536.0 / (65536.0 - f64::from(self.threshold()))
    }

    pub(crate) fn check(self) -> Result<()> {
        match self.p {
            p if (0.0..1.0).contains(&p) => Ok(()),
            p => Err(Error::value("dropout", p, "a probability, at least 0 and less than 1")),
        }
    }
}
