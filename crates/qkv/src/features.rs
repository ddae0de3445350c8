//! **Features**: the feature maps of linear attention, a choice of [`Score::Linear`](crate::Score::Linear).

use serde::{Deserialize, Serialize};

/// A feature map `φ`, whose products are the weights of **linear attention** (Katharopoulos et al. 2020,
/// arXiv:2006.16236):
///
/// `out_i = Σ_j φ(q_i)·φ(k_j) v_j / Σ_j φ(q_i)·φ(k_j)` over the keys `j` that query `i` may see.
///
/// Since the sum over keys of `φ(k_j) v_jᵀ` does not depend on the query, time is linear in the length: for `F`
/// features it is `O((n + m)·F·Dv)`. The log-sum-exp is the log of the denominator; if that is 0 (no key is visible, or
/// every product is 0, which is possible with ReLU) it is −∞, the output is 0 and so are the gradients.
///
/// | map | `φ(x)` | features | paper |
/// | --- | --- | --- | --- |
/// | [`Elu`](Features::Elu) | `elu(x) + 1` | `D` | Katharopoulos et al. 2020, arXiv:2006.16236 |
/// | [`Relu`](Features::Relu) | `max(x, 0)` | `D` | Shen et al. 2021; Cai et al. 2022, arXiv:2205.14756 |
/// | [`Favor`](Features::Favor) | `exp(w_f·x' − ‖x'‖²/2) / √F`, `x' = √scale·x` | `count` | Choromanski et al. 2020, arXiv:2009.14794 |
///
/// **What it supports.** The masks [full](crate::Mask::full), [causal](crate::Mask::causal) at every
/// [place](crate::Place), [lengths](crate::Mask::lengths), [segments](crate::Mask::segments), and any `&` of these;
/// with FAVOR+ a fixed scale above 0. **What it does not support**, and refuses with
/// [`Error::Conflict`](crate::Error::Conflict): every other mask, and `|` and `!`, because the keys that a query sees
/// must be the first few of a sequence; biases, soft-cap, temperature and a learned scale, because there is no score to
/// change; dropout, sinks and entropy, because no weight is ever computed; a scale with elu or ReLU, which have none.
///
/// ```
/// use qkv::{Attention, Features, Inputs, Mask, Tensor};
/// let [q, k, v] = [1, 2, 3].map(|seed| Tensor::<f32, 4>::randn([1, 4, 1000, 32], seed));
/// let linear = Attention::linear(Features::Elu).mask(Mask::causal());
/// let out = linear.forward(Inputs::new(&q, &k, &v))?;
///
/// // An estimate of softmax attention, the better the more features there are and the smaller the scores.
/// let performer = Attention::linear(Features::Favor { count: 256, seed: 7 }).scale(0.03);
/// let near = performer.forward(Inputs::new(&q, &k, &v))?;
/// let exact = Attention::dot().scale(0.03).forward(Inputs::new(&q, &k, &v))?;
/// assert!((near.lse[[0, 0, 0]] - exact.lse[[0, 0, 0]]).abs() < 0.2);
/// # Ok::<(), qkv::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Features {
    /// `elu(x) + 1`: `x + 1` above 0 and `eˣ` below.
    Elu,
    /// `max(x, 0)`; its gradient at 0 is 0.
    Relu,
    /// FAVOR+, the Performer's positive orthogonal random features: `φ(q)·φ(k)` estimates `exp(scale·q·k)`, without
    /// bias. The scale is 1/√d unless another is given. The rows `w_f` are orthogonal in blocks of `d` and depend only
    /// on width, count and seed, on every machine. The exponentials are kept in range locally, by a row's own maximum
    /// and a running maximum over the keys seen so far, so neither causal attention nor decoding looks ahead.
    Favor {
        /// How many features, 1 to 65,536.
        count: usize,
        /// The seed of the draw.
        seed: u64,
    },
}

impl Features {
    /// How many features a row of width `d` has.
    pub(crate) fn count(self, d: usize) -> usize {
        match self {
            Features::Elu | Features::Relu => d,
            Features::Favor { count, .. } => count,
        }
    }
}
