//! [`sdpa`] and [`sdpa_causal`]: scaled dot-product attention in one line, for newcomers and for plain Transformers.

use crate::attention::Attention;
use crate::element::Element;
use crate::error::Result;
use crate::inputs::Inputs;
use crate::mask::Mask;
use crate::source::Source;
use crate::tensor::Tensor;
use qkv_simd::View;

/// Scaled dot-product attention, `softmax(q kᵀ / √d) v`: queries `[B, Hq, N, D]`, keys `[B, Hk, M, D]` and values
/// `[B, Hk, M, Dv]` give `[B, Hq, N, Dv]`. `Hq` may be a multiple of `Hk` (grouped-query attention).
///
/// For everything else (masks, biases, gradients, weights) describe an [`Attention`].
///
/// ```
/// use qkv::{sdpa, Tensor};
/// let q = Tensor::<f32, 4>::randn([2, 8, 10, 64], 1);
/// let [k, v] = [2, 3].map(|seed| Tensor::<f32, 4>::randn([2, 8, 20, 64], seed));
/// let out = sdpa(&q, &k, &v)?;
/// assert_eq!(out.shape(), [2, 8, 10, 64]);
/// # Ok::<(), qkv::Error>(())
/// ```
///
/// # Errors
/// If the shapes do not match.
pub fn sdpa<'a, T: Element>(
    q: impl Into<View<'a, T>>,
    k: impl Into<Source<'a, T>>,
    v: impl Into<Source<'a, T>>,
) -> Result<Tensor<T, 4>> {
    Ok(Attention::scaled_dot().forward(Inputs::new(q, k, v))?.values)
}

/// [`sdpa`] in which query `i` sees keys `0 ..= i`. For queries at the end of a longer cache, see
/// [`Attention::decode`].
///
/// ```
/// use qkv::{sdpa_causal, Tensor};
/// let x = Tensor::<f32, 4>::randn([1, 8, 16, 64], 1);
/// let out = sdpa_causal(&x, &x, &x)?;
/// assert_eq!(out[[0, 0, 0, 0]], x[[0, 0, 0, 0]]); // the first token sees itself alone
/// # Ok::<(), qkv::Error>(())
/// ```
///
/// # Errors
/// If the shapes do not match.
pub fn sdpa_causal<'a, T: Element>(
    q: impl Into<View<'a, T>>,
    k: impl Into<Source<'a, T>>,
    v: impl Into<Source<'a, T>>,
) -> Result<Tensor<T, 4>> {
    Ok(Attention::scaled_dot().mask(Mask::causal()).forward(Inputs::new(q, k, v))?.values)
}
