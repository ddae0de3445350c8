//! softmax(QKᵀ/√D)·V with all scores stored, in f32: the three steps of the textbook, each over its whole matrix, with
//! the matrix product and the exponential of the engine. A baseline for `qkv bench`, not part of the public interface.

use qkv_simd::tile::{self, Exponential, RowOp, Running};
use qkv_simd::{Isa, Matrix, Panels, Real, Target, padded, product};
use rayon::prelude::*;

const LANES: usize = f32::LANES;
/// Queries of a task: enough to reuse a block of keys while it is in the cache.
const QUERIES: usize = 96;
/// Keys of a block: 256 rows of 64 or 128 elements stay in L2.
const KEYS: usize = 256;

/// `[B, Hq, N, D]` from `q [B, Hq, N, D]`, `k [B, Hk, M, D]` and `v [B, Hk, M, D]`, with `[B, Hq, Hk, N, M, D]`.
///
/// # Panics
/// If a tensor has the wrong length, or `Hk` does not divide `Hq`.
pub fn materialized(sizes: [usize; 6], causal: bool, [q, k, v]: [&[f32]; 3]) -> Vec<f32> {
    let [b, hq, hk, n, m, d] = sizes;
    assert!(q.len() == b * hq * n * d && [k, v].iter().all(|x| x.len() == b * hk * m * d), "tensors of {sizes:?}");
    assert!(hq.is_multiple_of(hk), "{hq} heads of queries, {hk} of keys");
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
