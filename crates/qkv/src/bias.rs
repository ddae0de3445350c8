//! **Bias**: what is added to a score depending on the positions of query and key.

use serde::{Deserialize, Serialize};
use std::ops::Add;

/// A bias, added to every score after scale and cap. Biases add up: `Bias::alibi() + Bias::tensor()`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Bias {
    pub(crate) alibi: bool,
    pub(crate) tensor: bool,
    pub(crate) relative: Option<usize>,
    /// Two relative tables were added: an error at first use, since a call has one `table`.
    #[serde(skip)]
    pub(crate) two_tables: bool,
}

impl Bias {
    /// Whether it includes ALiBi.
    pub fn has_alibi(self) -> bool {
        self.alibi
    }

    /// Whether it includes the input `bias`.
    pub fn wants_tensor(self) -> bool {
        self.tensor
    }

    /// How far its relative table reaches, if it has one.
    pub fn reach(self) -> Option<usize> {
        self.relative
    }

    /// No bias.
    pub fn none() -> Bias {
        Bias::default()
    }

    /// ALiBi (Press et al. 2021, arXiv:2108.12409): `−slope · |p − j|`, with the paper's [`alibi_slopes`].
    ///
    /// ```
    /// use qkv::{Attention, Bias, Inputs, Mask, Tensor};
    /// let x = Tensor::<f32, 4>::randn([1, 8, 16, 32], 1);
    /// let far_is_less = Attention::scaled_dot().mask(Mask::causal()).bias(Bias::alibi());
    /// far_is_less.forward(Inputs::new(&x, &x, &x))?;
    /// # Ok::<(), qkv::Error>(())
    /// ```
    pub fn alibi() -> Bias {
        Bias { alibi: true, ..Bias::default() }
    }

    /// The input `bias`, any tensor that broadcasts to `[B, Hq, N, M]`, with its gradient (AlphaFold's pair bias, say:
    /// Jumper et al. 2021).
    ///
    /// ```
    /// use qkv::{Attention, Bias, Inputs, Tensor, Upstream};
    /// let x = Tensor::<f32, 4>::randn([2, 4, 16, 32], 1);
    /// let bias = Tensor::<f32, 4>::randn([1, 4, 16, 16], 2); // one for each head, shared by the batch
    /// let biased = Attention::scaled_dot().bias(Bias::tensor());
    /// let inputs = || Inputs::new(&x, &x, &x).bias(&bias);
    /// let out = biased.forward(inputs())?;
    /// let grad = biased.backward(inputs(), &out, Upstream::new(&x))?;
    /// assert_eq!(grad.bias.unwrap().shape(), [1, 4, 16, 16]);
    /// # Ok::<(), qkv::Error>(())
    /// ```
    pub fn tensor() -> Bias {
        Bias { tensor: true, ..Bias::default() }
    }

    /// The input `table [1 or Hq, 2·reach + 1]`, with its gradient: entry `clamp(j − p, −reach, reach) + reach` (Shaw
    /// et al. 2018, arXiv:1803.02155; Raffel et al. 2019, arXiv:1910.10683).
    ///
    /// ```
    /// use qkv::{Attention, Bias, Inputs, Tensor};
    /// let x = Tensor::<f32, 4>::randn([1, 2, 50, 8], 1);
    /// let table = Tensor::<f32, 2>::randn([2, 9], 2); // four to the left, itself, four to the right
    /// Attention::scaled_dot().bias(Bias::relative(4)).forward(Inputs::new(&x, &x, &x).table(&table))?;
    /// # Ok::<(), qkv::Error>(())
    /// ```
    pub fn relative(reach: usize) -> Bias {
        Bias { relative: Some(reach), ..Bias::default() }
    }
}

/// The sum of both. Two relative tables are an error at first use: a call has only one `table`.
impl Add for Bias {
    type Output = Bias;
    fn add(self, other: Bias) -> Bias {
        Bias {
            alibi: self.alibi || other.alibi,
            tensor: self.tensor || other.tensor,
            relative: other.relative.or(self.relative),
            two_tables: self.two_tables || other.two_tables || (self.relative.is_some() && other.relative.is_some()),
        }
    }
}

/// The slope of each head, as in the ALiBi paper: `2^(−8/H), 2^(−16/H), …` if the number of heads is a power of two;
/// otherwise the slopes of the next lower power, followed by every other slope of the next higher.
///
/// ```
/// assert_eq!(qkv::alibi_slopes(8)[..2], [0.5, 0.25]);
/// assert_eq!(qkv::alibi_slopes(12).len(), 12);
/// ```
pub fn alibi_slopes(heads: usize) -> Vec<f64> {
    let powers = |count: usize| (1..=count).map(move |h| 2f64.powf(-8.0 * h as f64 / count as f64));
    if heads == 0 {
        return Vec::new();
    }
    let lower = 1usize << heads.ilog2();
    powers(lower).chain(powers(lower.saturating_mul(2)).step_by(2)).take(heads).collect()
}
