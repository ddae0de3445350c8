//! The rounding of an engine that sums gradients of queries in fixed point: in units relative to the largest value that
//! a row can have.

use super::joint;
use crate::case::{Case, Data, Sizes};
use qkv::reference::Forward;

/// Keys whose part of a sum is rounded together: at least this many.
const KEYS: usize = 64;

/// Adds this rounding to the spreads of `d_q`.
///
/// With `δ` the row term, `|d_q| ≤ max|k| · Σ|ds| · scale` and `Σ|ds| ≤ |d_out| · √Dv · max|v| + |δ|`, since weights
/// sum to at most 1. A unit is 2⁻³⁰ of the next power of two above that bound, so 2⁻²⁹ of it at most, and each part of
/// a sum is off by half a unit at most. This is an absolute error, which matters where every key that a query sees is
/// nearly 0 in some column.
pub fn add_fixed_point(case: &Case, data: &Data<f64>, truth: &Forward<f64>, d_q: &mut [f64]) {
    let Sizes { b, hq, hk, n, m, d, dv, .. } = case.sizes;
    let group = (hq / hk.max(1)).max(1);
    let kept = case.attention.dropout.map_or(1.0, |dropout| dropout.kept_scale());
    let parts = (m.div_ceil(KEYS) as f64).sqrt();
    let scale = super::factor(case, data);
    for (b, h) in (0..b).flat_map(|b| (0..hq).map(move |h| (b, h))) {
        let most = |tensor: &qkv::Tensor<f64, 4>, width: usize| {
            let all = (0..m).flat_map(|j| (0..width).map(move |x| [b, h / group, j, x]));
            all.fold(0.0f64, |most, at| most.max(tensor[at].abs()))
        };
        let (key, value) = (most(&data.k, d), most(&data.v, dv));
        for i in 0..n {
            let d_out = |x: usize| data.d_out[[b, h, i, x]];
            let square: f64 = (0..dv).map(|x| d_out(x).powi(2)).sum();
            let delta: f64 = (0..dv).map(|x| d_out(x) * truth.output.values[[b, h, i, x]]).sum();
            let row = (b * hq + h) * n + i;
            let d_lse = data.d_lse.as_ref().map_or(0.0, |of| of[row]);
            let bound = key * (kept * (square * dv as f64).sqrt() * value + (delta - d_lse).abs());
            let error = bound * 2f64.powi(-30) * parts * scale(h).abs();
            d_q[row * d..][..d].iter_mut().for_each(|spread| *spread = joint([*spread, error]));
        }
    }
}
