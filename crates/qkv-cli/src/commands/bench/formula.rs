//! The materialized formula, softmax(QKᵀ/√D)·V with all scores stored, as a baseline: the three steps of the textbook,
//! each over its whole matrix, with the matrix product and the exponential of the engine. The difference to the engine
//! is the cost of storing the scores.

use super::case::{Case, Direction};
use super::ours::{Call, noise};
use super::shape::Shape;
use crate::dtype::Precision;
use crate::failure::Failure;
use qkv_simd::tile::{self, Exponential, RowOp, Running};
use qkv_simd::{Isa, Matrix, Panels, Real, Target, padded, product};
use rayon::prelude::*;
use std::hint::black_box;

/// The most bytes of scores that are measured.
pub(crate) const MOST: u128 = 1 << 30;

const LANES: usize = f32::LANES;
/// Queries of a task: enough to reuse a block of keys while it is in the cache.
const QUERIES: usize = 96;
/// Keys of a block: 256 rows of 64 or 128 elements stay in L2.
const KEYS: usize = 256;

/// Whether the formula is measured beside a case: f32, forward.
pub(crate) fn is_for(case: Case) -> bool {
    case.precision == Precision::F32 && case.direction == Direction::Forward
}

/// Whether its scores fit.
pub(crate) fn fits(case: Case) -> bool {
    case.shape.scores().saturating_mul(4) <= MOST
}

/// Prepares the data of a case, and its call, which allocates scores and outputs as any caller of the formula does.
pub(crate) fn prepare(case: Case) -> Result<Call, Failure> {
    let failed = |error| Failure::new(format!("`{case}`: {error}"));
    let (queries, keys) = (case.shape.queries(), case.shape.keys());
    let q = noise::<f32>(queries, 1).map_err(failed)?;
    let k = noise::<f32>(keys, 2).map_err(failed)?;
    let v = noise::<f32>(keys, 3).map_err(failed)?;
    Ok(Box::new(move || {
        black_box(formula(case.shape, case.causal, q.data(), k.data(), v.data()));
    }))
}

/// `[B, Hq, N, D]` from `[B, Hq, N, D]`, `[B, Hk, M, D]` and `[B, Hk, M, D]`.
fn formula(shape: Shape, causal: bool, q: &[f32], k: &[f32], v: &[f32]) -> Vec<f32> {
    let Shape { b, hq, hk, n, m, d } = shape;
    let (isa, wide) = (Isa::best(), padded::<f32>(m));
    let (k, v) = (panels_of_keys(k, m, d), padded_rows(v, d)); // [B·Hk, ⌈M⌉/16, D, 16], [B·Hk, M, ⌈D⌉]
    let key_head = |head: usize| head / hq * hk + head % hq / (hq / hk);
    let mut scores = vec![0.0; b * hq * n * wide]; // [B, Hq, N, ⌈M⌉]

    // Scores = Q · Kᵀ.
    for_blocks(&mut scores, n * wide, wide, |head, first, block| {
        let keys = &k[key_head(head) * d * wide..][..d * wide];
        let (rows, queries) = (block.len() / wide, Matrix::rows(&q[(head * n + first) * d..], d));
        for at in (0..wide).step_by(KEYS) {
            let panels = (wide - at).min(KEYS) / LANES;
            product(
                isa,
                Target::overwrite(&mut block[at..], wide),
                queries,
                Panels::packed(&keys[at * d..], d),
                rows,
                panels,
                d,
            );
        }
    });

    // Weights = softmax of each row.
    let how = Exponential { scale: 1.0 / (d as f32).sqrt(), spans: &[], accurate_exp: true };
    for_blocks(&mut scores, n * wide, wide, |_, first, block| {
        for (row, scores) in block.chunks_exact_mut(wide).enumerate() {
            let seen = if causal { (first + row + 1).min(m) } else { m };
            scores[seen..].fill(f32::NEG_INFINITY);
            let (mut max, mut sum, mut factor) = ([f32::NEG_INFINITY], [0.0], [0.0]);
            let running = Running { max: &mut max, sum: &mut sum, entropy_acc: &mut [], factor: &mut factor };
            tile::softmax(isa, scores, wide, 1, wide, how, running);
            tile::row_op(isa, scores, RowOp::Scale(1.0 / sum[0]));
        }
    });

    // Output = Weights · V.
    let width = padded::<f32>(d);
    let mut out = vec![0.0; b * hq * n * width]; // [B, Hq, N, ⌈D⌉]
    for_blocks(&mut out, n * width, width, |head, first, block| {
        let values = &v[key_head(head) * m * width..][..m * width];
        let (rows, weights) = (block.len() / width, &scores[(head * n + first) * wide..]);
        for at in (0..m).step_by(KEYS) {
            let (depth, weights) = ((m - at).min(KEYS), Matrix::rows(&weights[at..], wide));
            let values = Panels::rows(&values[at * width..], width);
            product(isa, Target::accumulate(block, width), weights, values, rows, width / LANES, depth);
        }
    });
    if width == d { out } else { out.chunks_exact(width).flat_map(|row| &row[..d]).copied().collect() }
}

/// Runs over blocks of rows of all heads in parallel: the head, the first row, and the rows.
fn for_blocks(data: &mut [f32], head: usize, row: usize, work: impl Fn(usize, usize, &mut [f32]) + Sync) {
    data.par_chunks_mut(head).enumerate().for_each(|(h, rows)| {
        rows.par_chunks_mut(QUERIES * row).enumerate().for_each(|(at, block)| work(h, at * QUERIES, block));
    });
}

/// Keys `[heads, M, D]` as panels of 16 keys, `[heads, ⌈M⌉/16, D, 16]`, with zeros where there is no key.
fn panels_of_keys(k: &[f32], m: usize, d: usize) -> Vec<f32> {
    let wide = padded::<f32>(m);
    let mut panels = vec![0.0; k.len() / m * wide];
    panels.par_chunks_mut(d * wide).zip(k.par_chunks(m * d)).for_each(|(panels, keys)| {
        for (key, numbers) in keys.chunks_exact(d).enumerate() {
            let panel = &mut panels[key / LANES * LANES * d..][..LANES * d];
            numbers.iter().enumerate().for_each(|(x, &number)| panel[x * LANES + key % LANES] = number);
        }
    });
    panels
}

/// Rows of `d` as rows of whole panels.
fn padded_rows(rows: &[f32], d: usize) -> Vec<f32> {
    let width = padded::<f32>(d);
    let mut wider = vec![0.0; rows.len() / d * width];
    wider.chunks_exact_mut(width).zip(rows.chunks_exact(d)).for_each(|(to, row)| to[..d].copy_from_slice(row));
    wider
}

#[cfg(test)]
mod tests {
    use super::*;
    use qkv::{Attention, Inputs, Mask};

    #[test]
    fn the_formula_is_attention() {
        for (axes, causal) in [
            ([1, 1, 1, 3, 5, 4], false),
            ([2, 4, 2, 130, 130, 64], true),
            ([1, 6, 2, 100, 300, 20], false),
            ([1, 2, 1, 300, 17, 33], true),
        ] {
            let shape = Shape::new(axes);
            let q = noise::<f32>(shape.queries(), 1).unwrap();
            let [k, v] = [2, 3].map(|seed| noise::<f32>(shape.keys(), seed).unwrap());
            let found = formula(shape, causal, q.data(), k.data(), v.data());
            let attention = Attention::scaled_dot().mask(if causal { Mask::causal() } else { Mask::full() });
            let expected = attention.forward(Inputs::new(&q, &k, &v)).unwrap().values;
            assert_eq!(found.len(), expected.data().len());
            for (found, expected) in found.iter().zip(expected.data()) {
                assert!((found - expected).abs() < 1e-5, "{shape} causal {causal}: {found} for {expected}");
            }
        }
    }
}
