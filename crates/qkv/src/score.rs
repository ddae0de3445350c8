//! **Score**: how alike are a query and a key? The scale, which applies to any score, is here too.

use crate::features::Features;
use serde::{Deserialize, Serialize};

/// The similarity of a query and a key, before scale, cap, bias and mask.
///
/// | score | formula | widths | needs | paper |
/// | --- | --- | --- | --- | --- |
/// | [`Dot`](Score::Dot) | `q·k` | equal | | Luong et al. 2015, arXiv:1508.04025 |
/// | [`ScaledDot`](Score::ScaledDot) | `q·k / √d` | equal | | Vaswani et al. 2017, arXiv:1706.03762 |
/// | [`General`](Score::General) | `qᵀ W k` | any | `w [D, Dk]` | Luong et al. 2015 |
/// | [`Additive`](Score::Additive) | `vᵀ tanh(W₁q + W₂k)` | any | `w_q [A, D]`, `w_k [A, Dk]`, `v_score [A]` | Bahdanau et al. 2014, arXiv:1409.0473 |
/// | [`Cosine`](Score::Cosine) | `q·k / (‖q‖ ‖k‖)` | equal | | Graves et al. 2014, arXiv:1410.5401 |
/// | [`Distance`](Score::Distance) | `−‖q − k‖²` | equal | | Kim et al. 2021, arXiv:2006.04710 |
/// | [`Linear`](Score::Linear) | `ln φ(q)·φ(k)` | equal | | Katharopoulos et al. 2020, arXiv:2006.16236; see [`Features`] |
///
/// ```
/// use qkv::{Attention, Inputs, Tensor};
/// let q = Tensor::<f32, 4>::randn([1, 1, 3, 4], 1); // [B, H, N, D]
/// let k = Tensor::<f32, 4>::randn([1, 1, 5, 6], 2); // [B, H, M, Dk]
/// let v = Tensor::<f32, 4>::randn([1, 1, 5, 2], 3); // [B, H, M, Dv]
///
/// // Luong's general score: q and k may differ in width.
/// let w = Tensor::<f32, 2>::randn([4, 6], 4);
/// let general = Attention::general().forward(Inputs::new(&q, &k, &v).w(&w))?;
///
/// // Bahdanau's additive score.
/// let (w_q, w_k) = (Tensor::<f32, 2>::randn([8, 4], 5), Tensor::<f32, 2>::randn([8, 6], 6));
/// let v_score = [0.3; 8];
/// let additive = Attention::additive().forward(Inputs::new(&q, &k, &v).w_q(&w_q).w_k(&w_k).v_score(&v_score))?;
/// assert_eq!(general.values.shape(), additive.values.shape());
/// # Ok::<(), qkv::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Score {
    /// `q·k`.
    Dot,
    /// `q·k / √d`.
    #[default]
    ScaledDot,
    /// `qᵀ W k`.
    General,
    /// `vᵀ tanh(W₁q + W₂k)`. Without `w_q` (or `w_k`) the queries (or keys) count as already projected, so that a
    /// decoder does not project its keys again at every step.
    Additive,
    /// `q·k / (‖q‖ ‖k‖)`; 0, with no gradient, if one of them is the zero vector.
    Cosine,
    /// `−‖q − k‖²`.
    Distance,
    /// `ln φ(q)·φ(k)`, so that the weight is a product of features: linear attention, in linear time. See [`Features`]
    /// for the maps and for what it supports.
    Linear(Features),
}

impl Score {
    /// Its name on the command line and in files.
    pub fn name(self) -> &'static str {
        match self {
            Score::Dot => "dot",
            Score::ScaledDot => "scaled-dot",
            Score::General => "general",
            Score::Additive => "additive",
            Score::Cosine => "cosine",
            Score::Distance => "distance",
            Score::Linear(_) => "linear",
        }
    }
}

/// The factor that a score is multiplied by.
///
/// A scale set here replaces the score's own (1/√d for the scaled dot product, 1 for the others). A temperature is a
/// separate setting, and divides afterwards.
///
/// ```
/// use qkv::{Attention, Inputs, Tensor};
/// let q = Tensor::<f32, 4>::randn([1, 2, 3, 4], 1);
/// // Cosine attention with one learned scale a head (Liu et al. 2021, arXiv:2111.09883); it has its own gradient.
/// let scale = [10.0, 20.0];
/// let cosine = Attention::cosine().learned_scale();
/// let inputs = || Inputs::new(&q, &q, &q).scale(&scale);
/// let out = cosine.forward(inputs())?;
/// let grad = cosine.backward(inputs(), &out, qkv::Upstream::new(&q))?;
/// assert_eq!(grad.scale.unwrap().len(), 2);
/// # Ok::<(), qkv::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scale {
    /// The score's own scale.
    #[default]
    Own,
    /// This number instead.
    Fixed(f64),
    /// The input `scale [1]` or `[Hq]` instead, with its gradient.
    Learned,
}

impl Scale {
    /// The factor of products of queries and keys of width `d` in FAVOR+.
    pub(crate) fn of_favor(self, d: usize) -> f64 {
        match self {
            Scale::Fixed(scale) => scale,
            _ => 1.0 / (d.max(1) as f64).sqrt(),
        }
    }
}
