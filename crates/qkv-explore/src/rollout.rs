//! Attention rollout (Abnar and Zuidema 2020, arXiv:2005.00928): how much of each input token reaches each position
//! after a number of layers, assuming that a layer mixes tokens by the mean of its heads and the residual connection
//! carries the other half.
//!
//! `R₀ = I`, `Rₗ = ½ (I + Āₗ) Rₗ₋₁`, with `Āₗ` the mean over the heads of layer `l`. Rows of `R` are computed from the
//! last layer down, so that only those rows are stored: `r ← ½ (r + r Āₗ)`, with `Āₗ` recomputed a block of rows at a
//! time.

use crate::recording::Recording;
use qkv::Tensor;
use qkv_models::{Error, Result};
use std::ops::Range;

/// Rows of a layer recomputed at a time.
const BLOCK: usize = 256;

/// The rollout of some rows through layers of self-attention, listed from first to last: `[rows, N]`.
///
/// # Errors
/// If a layer is not self-attention, or has no such rows.
pub fn rollout(recording: &Recording, layers: &[usize], rows: Range<usize>) -> Result<Tensor<f32, 2>> {
    let Some(&first) = layers.first() else { return Err(Error::invalid("a rollout needs at least one layer")) };
    let [n, _] = recording.layers[first].size();
    for &layer in layers {
        let of = &recording.layers[layer];
        if !recording.is_self_attention(layer) || of.size() != [n, n] {
            return Err(Error::invalid(format!("`{}` is not self-attention and has no rollout", of.name)));
        }
    }
    if rows.start > rows.end || rows.end > n {
        return Err(Error::invalid(format!("rows {rows:?} are not within 0..{n}")));
    }
    // r [rows, N]: the identity's rows.
    let mut r: Tensor<f32, 2> =
        Tensor::from_fn([rows.len(), n], |[at, j]| if rows.start + at == j { 1.0 } else { 0.0 });
    for &layer in layers.iter().rev() {
        let of = &recording.layers[layer];
        let share = 0.5 / of.heads() as f32;
        let mut next = r.map(|x| 0.5 * x);
        for start in (0..n).step_by(BLOCK) {
            let block = start..(start + BLOCK).min(n);
            let used = |at: usize| block.clone().any(|i| r[[at, i]] != 0.0);
            if !(0..rows.len()).any(used) {
                continue;
            }
            let mut mean = vec![0.0; block.len() * n]; // half the mean over the heads, [block, N]
            for head in 0..of.heads() {
                let weights = of.rows(head, block.clone())?;
                mean.iter_mut().zip(weights.data()).for_each(|(sum, &w)| *sum += share * w);
            }
            for (at, out) in next.data_mut().chunks_exact_mut(n).enumerate() {
                for (i, row) in block.clone().zip(mean.chunks_exact(n)) {
                    let factor = r[[at, i]];
                    if factor != 0.0 {
                        out.iter_mut().zip(row).for_each(|(sum, &w)| *sum += factor * w);
                    }
                }
            }
        }
        r = next;
    }
    Ok(r)
}
