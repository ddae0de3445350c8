//! **Place**: where the queries stand among the keys. One setting, used by causal, windows, patterns, ALiBi and
//! relative tables alike.

use serde::{Deserialize, Serialize};

/// The place `p(i)` of query `i` among the keys `0 .. m`.
///
/// ```
/// use qkv::{Attention, Inputs, Mask, Place, Tensor};
/// let (q, k) = (Tensor::<f32, 4>::randn([1, 1, 2, 8], 1), Tensor::<f32, 4>::randn([1, 1, 6, 8], 2));
/// // Two new tokens at the end of six: the last query sees all keys.
/// let last = Attention::scaled_dot().mask(Mask::causal()).place(Place::End);
/// let out = last.forward(Inputs::new(&q, &k, &k))?;
/// let seen = last.weights(Inputs::new(&q, &k, &k), &out)?.rows(0, 0, 0..2)?;
/// assert_eq!(seen[[0, 5]], 0.0);
/// assert!(seen[[1, 5]] > 0.0);
/// # Ok::<(), qkv::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Place {
    /// `p(i) = i`: the first query stands at the first key.
    #[default]
    Start,
    /// `p(i) = i + m − n`: the last query stands at the last key.
    End,
    /// `p(i) = i + offset`.
    Offset(i64),
    /// `p(i)` from the input `positions [B, N]`.
    Given,
}
