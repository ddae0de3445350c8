//! The forward pass of selections other than softmax. Hard attention, top-k and sparsemax read whole rows of scores, a
//! few rows per worker, so memory stays linear in the number of keys. Their backward pass uses the same tiles as
//! softmax; what it needs (the chosen keys, the mean of the selected values) is in the output.

use crate::compiled::Expr;
use crate::compiled::tile::TileKeys;
use crate::error::Result;
use crate::exact::gemm::TileGemm;
use crate::exact::pack::{KeyBlocks, KeyBuffers, Operand};
use crate::exact::plan::{Piece, Plan};
use crate::exact::scores::projection::ScoreOperands;
use crate::exact::scores::{TileMask, TileOps, chosen_by};
use crate::mask::RowAt;
use crate::output::{Output, OutputRef};
use crate::problem::Problem;
use crate::scratch::{Buffer, Scratch};
use crate::select::{Choice, Select, gumbel, uniform};
use crate::source::Source;
use crate::tensor::Tensor;
use crate::tuning::{KEYS, QUERIES, SELECT_SCORES};
use qkv_simd::shared::{Rows, for_each_task};
use qkv_simd::tile::{Exponential, RowOp, Running, row_op, softmax, weights};
use qkv_simd::{Element, Matrix, Panels, Real, Target, ViewMut, padded, philox, product, product_skipping_zeros};

/// Computes the attention of a problem with a selection other than softmax.
pub(crate) fn select<T: Element>(
    problem: &Problem<'_, T>,
    out: &mut Output<T>,
    scratch: &Scratch<T::Acc>,
    threads: usize,
) -> Result<()> {
    let Problem { b: batch, n, m, dv, heads, .. } = *problem;
    let rows = [batch, heads.query, n];
    let per_row = match problem.attention.select {
        Select::TopK(k) => k.min(m.max(1)),
        _ => 1,
    };
    let hard = matches!(problem.attention.select, Select::Hard(_));
    let chooses = problem.attention.select != Select::Sparsemax;
    let keeps =
        matches!(problem.attention.select, Select::Hard(Choice { straight_through: true, .. }) | Select::Sparsemax);
    let mut chosen = chooses.then(|| Tensor::allocate("chosen", [batch, heads.query, n, per_row])).transpose()?;
    out.log_prob = hard.then(|| Tensor::allocate("log_prob", rows)).transpose()?;
    out.saved = keeps.then(|| Tensor::allocate("saved", [batch, heads.query, n, dv])).transpose()?;
    {
        // `Rows` writes numbers: keys below 2⁵³ are exact in f64.
        let mut keys_chosen = chosen.as_ref().map(|chosen| vec![0.0f64; chosen.data().len()]);
        {
            let to = SelectionWriter {
                values: Rows::new(ViewMut::from(&mut out.values)),
                lse: column(out.threshold.as_mut().unwrap_or(&mut out.lse)),
                entropy: out.entropy.as_mut().map(column),
                log_prob: out.log_prob.as_mut().map(column),
                saved: out.saved.as_mut().map(|saved| Rows::new(ViewMut::from(saved))),
                chosen: keys_chosen.as_mut().map(|keys| {
                    Rows::new(ViewMut::new(keys, [batch, heads.query, n, per_row]).expect("as long as its shape"))
                }),
            };
            run(problem, &to, scratch, threads);
        }
        if let (Some(chosen), Some(keys)) = (&mut chosen, keys_chosen) {
            chosen.data_mut().iter_mut().zip(keys).for_each(|(to, key)| *to = key as i64);
        }
    }
    out.chosen = chosen;
    Ok(())
}

/// One number per row.
fn column<A: Real>(tensor: &mut Tensor<A, 3>) -> Rows<'_, A> {
    let [b, h, n] = tensor.shape();
    Rows::new(ViewMut::new(tensor.data_mut(), [b, h, n, 1]).expect("as long as its shape"))
}

/// The outputs of a selection.
struct SelectionWriter<'a, T: Element> {
    values: Rows<'a, T>,
    lse: Rows<'a, T::Acc>,
    entropy: Option<Rows<'a, T::Acc>>,
    log_prob: Option<Rows<'a, T::Acc>>,
    saved: Option<Rows<'a, T::Acc>>,
    chosen: Option<Rows<'a, f64>>,
}

/// The buffers of a worker.
struct SelectWorker<'s, A: Real> {
    gemm: TileGemm<'s, A>,
    mask: TileMask,
    queries: Buffer<'s, A>,
    tile: Buffer<'s, A>,
    /// Whole rows of scores.
    scores: Buffer<'s, A>,
    /// A second copy of one row.
    copy: Buffer<'s, A>,
    values: Buffer<'s, A>,
    saved: Buffer<'s, A>,
    key: Buffer<'s, A>,
}

fn run<T: Element>(problem: &Problem<'_, T>, to: &SelectionWriter<'_, T>, scratch: &Scratch<T::Acc>, threads: usize) {
    let operands = ScoreOperands::new(problem, scratch, threads);
    let ops = TileOps::new(problem);
    let plan = Plan::natural(Expr::of(problem), &problem.mask_data);
    let piece = &plan.pieces[0];
    let heads = problem.heads;
    let mut buffers = KeyBuffers::new(scratch, ops.arithmetic, piece, problem.b * heads.key, problem.width, problem.dv);
    let values = Operand::Input(problem.inputs.v);
    let blocks = KeyBlocks::new(piece, operands.keys(problem), values, heads.key, &mut buffers);
    let (row, value_row) = (padded::<T::Acc>(problem.m).max(T::Acc::LANES), padded::<T::Acc>(problem.dv));
    // As many rows at once as have their scores fit in the second-level cache.
    let at_once = (SELECT_SCORES / row).clamp(1, QUERIES);
    let groups = problem.n.div_ceil(at_once);
    let worker = || SelectWorker {
        gemm: ops.tile_gemm(scratch),
        mask: TileMask::default(),
        queries: scratch.take(at_once * ops.query_row),
        tile: scratch.take(at_once * KEYS),
        scores: scratch.take(at_once * row),
        copy: scratch.take(row),
        values: scratch.take(value_row),
        saved: scratch.take(value_row),
        key: scratch.take(value_row),
    };
    for_each_task(threads, problem.b * heads.query * groups, worker, |worker, task| {
        let (b, h, group) = (task / (heads.query * groups), task / groups % heads.query, task % groups);
        let rows: Vec<RowAt> = (group * at_once..((group + 1) * at_once).min(problem.n))
            .map(|i| RowAt { b, h, i, p: problem.mask_data.position(b, i) })
            .collect();
        score_rows(&ops, piece, operands.queries(problem), &blocks, &rows, row, worker);
        for (r, at) in rows.iter().enumerate() {
            let SelectWorker { gemm, scores, copy, values, saved, key, .. } = &mut *worker;
            let scores = &mut scores[r * row..][..row];
            let reader = ValueReader { source: problem.inputs.v, b, head: h / heads.group, key };
            values.fill(T::Acc::ZERO);
            saved.fill(T::Acc::ZERO);
            match problem.attention.select {
                Select::Hard(choice) => {
                    hard(&ops, gemm, choice, at, scores, copy, reader, &blocks, piece, values, saved, to)
                }
                Select::TopK(_) => top_k(&ops, at, scores, copy, reader, values, to),
                Select::Sparsemax => sparsemax(at, scores, reader, values, saved, to),
                Select::Soft => unreachable!("softmax has its own pass"),
            }
            to.values.write(b, h, at.i, values);
            if let Some(to) = &to.saved {
                to.write(b, h, at.i, saved);
            }
        }
    });
}

/// The final scores of some rows against all keys; −∞ for absent pairs.
fn score_rows<T: Element>(
    ops: &TileOps<'_, T>,
    piece: &Piece,
    queries: Operand<'_, T>,
    blocks: &KeyBlocks<'_, T>,
    rows: &[RowAt],
    row: usize,
    worker: &mut SelectWorker<'_, T::Acc>,
) {
    let SelectWorker { gemm, mask, queries: q, tile, scores, .. } = worker;
    let (b, key_head) = (rows[0].b, rows[0].h / ops.problem.heads.group);
    scores.fill(T::Acc::NEG_INFINITY);
    let finite = gemm.pack_a(queries, rows.iter().map(|at| (b, at.h, at.i)), q);
    for key_tile in piece.key_tiles() {
        let verdict = piece.verdict_of_rows(&ops.problem.mask_data, rows, key_tile);
        if verdict == crate::compiled::Verdict::Empty {
            continue;
        }
        let keys = piece.tile_keys(b, key_head, key_tile);
        ops.tile_mask(piece, &keys, verdict, rows, mask);
        let columns = blocks.keys(b, key_head, key_tile, gemm);
        ops.raw(gemm, (q, finite), columns, keys.len, (mask, 0..rows.len()), tile);
        ops.finish_all(&keys, mask, rows, tile);
        for r in 0..rows.len() {
            scores[r * row + keys.start..][..keys.len].copy_from_slice(&tile[r * KEYS..][..keys.len]);
        }
    }
}

/// Reads values one key at a time.
struct ValueReader<'a, 'b, T: Element> {
    source: Source<'a, T>,
    b: usize,
    head: usize,
    key: &'b mut [T::Acc],
}

impl<T: Element> ValueReader<'_, '_, T> {
    /// Adds `weight` times the value of a key.
    fn add(&mut self, j: usize, weight: T::Acc, to: &mut [T::Acc]) {
        self.source.load_row(self.b, self.head, j, self.key);
        to.iter_mut().zip(&*self.key).for_each(|(to, &value)| *to += weight * value);
    }
}

/// The maximum, sum and entropy accumulator of a whole row of scores, which become `exp(score − max)`.
fn softmax_row<A: Real>(isa: qkv_simd::Isa, scores: &mut [A]) -> [A; 3] {
    let (mut max, mut sum, mut entropy_acc, mut factor) = ([A::NEG_INFINITY], [A::ZERO], [A::ZERO], [A::ONE]);
    let running = Running { max: &mut max, sum: &mut sum, entropy_acc: &mut entropy_acc, factor: &mut factor };
    let width = scores.len();
    softmax(isa, scores, width, 1, width, Exponential { scale: A::ONE, spans: &[], accurate_exp: true }, running);
    [max[0], sum[0], entropy_acc[0]]
}

/// The key with the largest score plus Gumbel noise; `powers` are the scores as `exp(score − max)`.
///
/// The noise of a key is `−ln(−ln u)`. Since `−ln u ≥ 1 − u`, a key can win only if `1 − u` is below its power times
/// `exp(max − best)`: most are rejected without a logarithm.
fn gumbel_argmax<A: Real>(seed: Option<u64>, at: &RowAt, scores: &[A], powers: &[A], max: A) -> Option<usize> {
    let mut best: Option<(f64, usize)> = None;
    let mut limit = f64::INFINITY;
    for (group, some) in scores.chunks(4).enumerate() {
        let words = seed.map(|seed| philox::words(seed, at.b, at.h, at.i, group));
        for (x, &score) in some.iter().enumerate() {
            let j = group * 4 + x;
            let cannot_win = words.is_some_and(|words| {
                let missing = 1.0 - uniform(words[x]);
                missing > powers[j].to_f64() * limit * (1.0 + 1e-5) + 1e-30
            });
            if score == A::NEG_INFINITY || cannot_win {
                continue;
            }
            let noisy = score.to_f64() + words.map_or(0.0, |words| gumbel(words[x]));
            if best.is_none_or(|(most, _)| noisy > most || noisy.is_nan() && !most.is_nan()) {
                best = Some((noisy, j));
                limit = (max.to_f64() - noisy).exp();
            }
        }
    }
    best.map(|(_, j)| j)
}

#[allow(clippy::too_many_arguments)]
fn hard<T: Element>(
    ops: &TileOps<'_, T>,
    gemm: &mut TileGemm<'_, T::Acc>,
    choice: Choice,
    at: &RowAt,
    scores: &mut [T::Acc],
    copy: &mut [T::Acc],
    mut reader: ValueReader<'_, '_, T>,
    blocks: &KeyBlocks<'_, T>,
    piece: &Piece,
    values: &mut [T::Acc],
    saved: &mut [T::Acc],
    to: &SelectionWriter<'_, T>,
) {
    copy.copy_from_slice(scores);
    let [max, sum, entropy_acc] = softmax_row(ops.isa, scores);
    let picked = gumbel_argmax(choice.sample.then(|| ops.problem.seed()), at, copy, scores, max).map(|j| (j, copy[j]));
    let lse = if picked.is_none() { T::Acc::NEG_INFINITY } else { max + sum.ln() };
    match picked {
        // A visible NaN or +∞ makes the row NaN, as it does for softmax.
        Some(_) if lse.is_nan() => values.fill(lse),
        Some((j, _)) => reader.add(j, T::Acc::ONE, values),
        None => {}
    }
    if choice.straight_through && picked.is_some() {
        let row = padded::<T::Acc>(ops.problem.dv);
        for tile in piece.key_tiles() {
            let keys: TileKeys<'_> = piece.tile_keys(at.b, reader.head, tile);
            let (value_rows, finite) = blocks.values(at.b, reader.head, tile, gemm);
            let multiply = if finite { product } else { product_skipping_zeros };
            let (p, v) = (Matrix::rows(&scores[keys.start..], scores.len()), Panels::rows(value_rows, row));
            multiply(ops.isa, Target::add_partial(saved, row), p, v, 1, row / T::Acc::LANES, keys.len);
        }
        row_op(ops.isa, saved, RowOp::Scale(T::Acc::ONE / sum));
    }
    let key = picked.map_or(-1.0, |(j, _)| j as f64);
    to.chosen.as_ref().expect("hard attention chooses").write(at.b, at.h, at.i, &[key]);
    let log_prob = picked.map_or(T::Acc::ZERO, |(_, score)| score - lse);
    to.log_prob.as_ref().expect("and says how likely that was").write(at.b, at.h, at.i, &[log_prob]);
    to.lse.write(at.b, at.h, at.i, &[lse]);
    if let Some(entropy) = &to.entropy {
        let of_row = if sum == T::Acc::ZERO { sum } else { (lse - max) - entropy_acc / sum };
        entropy.write(at.b, at.h, at.i, &[of_row]);
    }
}

fn top_k<T: Element>(
    ops: &TileOps<'_, T>,
    at: &RowAt,
    scores: &mut [T::Acc],
    copy: &mut [T::Acc],
    mut reader: ValueReader<'_, '_, T>,
    values: &mut [T::Acc],
    to: &SelectionWriter<'_, T>,
) {
    let chosen = to.chosen.as_ref().expect("top-k chooses");
    let k = chosen.shape()[3];
    // The k-th largest score, then every key above it, then the lowest keys that equal it. NaN counts as the largest.
    let rank = |a: &T::Acc, b: &T::Acc| b.to_f64().total_cmp(&a.to_f64());
    let place = |score: T::Acc| if score.is_nan() { T::Acc::from_f64(f64::NAN) } else { score };
    copy.iter_mut().zip(&*scores).for_each(|(copy, &score)| *copy = place(score));
    let limit = *copy.select_nth_unstable_by(k - 1, rank).1;
    let mut ties = k - copy[..k].iter().filter(|score| rank(score, &limit).is_lt()).count();
    let mut keys: Vec<f64> = Vec::with_capacity(k);
    for (j, score) in scores.iter_mut().enumerate() {
        let order = rank(&place(*score), &limit);
        let selected = *score != T::Acc::NEG_INFINITY && (order.is_lt() || order.is_eq() && ties > 0);
        if !selected {
            *score = T::Acc::NEG_INFINITY;
            continue;
        }
        ties -= usize::from(order.is_eq());
        keys.push(j as f64);
    }
    let [max, sum, _] = softmax_row(ops.isa, scores);
    for &j in &keys {
        reader.add(j as usize, scores[j as usize] / sum, values);
    }
    let lse = if keys.is_empty() { T::Acc::NEG_INFINITY } else { max + sum.ln() };
    to.lse.write(at.b, at.h, at.i, &[lse]);
    let missing = vec![-1.0; k - keys.len()];
    chosen.write(at.b, at.h, at.i, &[missing, keys].concat());
}

fn sparsemax<T: Element>(
    at: &RowAt,
    scores: &mut [T::Acc],
    mut reader: ValueReader<'_, '_, T>,
    values: &mut [T::Acc],
    saved: &mut [T::Acc],
    to: &SelectionWriter<'_, T>,
) {
    let one = T::Acc::ONE;
    let most = scores.iter().fold(T::Acc::NEG_INFINITY, |a, &s| if s > a || s.is_nan() { s } else { a });
    if most == T::Acc::NEG_INFINITY {
        to.lse.write(at.b, at.h, at.i, &[most]);
        return;
    }
    if !most.is_finite() {
        // A visible NaN or +∞ makes the row NaN, as it does for softmax.
        #[allow(clippy::eq_op)] // NaN of either a NaN or an infinity.
        let nan = most - most;
        values.fill(nan);
        saved.fill(nan);
        to.lse.write(at.b, at.h, at.i, &[nan]);
        return;
    }
    // The threshold is within 1 of the largest score. It grows with each pass over the scores above it until none falls
    // below (Michelot 1986). Scores are taken relative to the largest, to avoid cancellation.
    let mut support: Vec<(usize, T::Acc)> =
        scores.iter().enumerate().map(|(j, &s)| (j, s - most)).filter(|(_, s)| *s > -one).collect();
    let tau = loop {
        let sum: T::Acc = support.iter().map(|(_, s)| *s).sum();
        let tau = (sum - one) / T::Acc::from_f64(support.len() as f64);
        let before = support.len();
        support.retain(|(_, s)| *s > tau);
        if support.len() == before {
            break tau;
        }
    };
    let share = one / T::Acc::from_f64(support.len() as f64);
    for &(j, score) in &support {
        reader.add(j, score - tau, values);
        reader.add(j, share, saved);
    }
    to.lse.write(at.b, at.h, at.i, &[most + tau]);
}

/// Turns final scores into the weights that are returned to the user.
pub(crate) struct FinalWeights<'a, T: Element> {
    pub ops: &'a TileOps<'a, T>,
    pub out: OutputRef<'a, T>,
}

impl<T: Element> FinalWeights<'_, T> {
    /// Turns a tile of finished scores into weights.
    pub fn apply(&self, rows: &[RowAt], keys: &TileKeys<'_>, scores: &mut [T::Acc]) {
        let width = padded::<T::Acc>(keys.len);
        for (r, row) in rows.iter().enumerate() {
            let scores = &mut scores[r * KEYS..][..width];
            let problem = self.ops.problem;
            let lse = self.out.row_statistic[(row.b * problem.heads.query + row.h) * problem.n + row.i];
            match (problem.attention.select, self.out.chosen) {
                (Select::Hard(_), Some(chosen)) if !lse.is_nan() => one_hot(chosen, row, keys, scores),
                (Select::Sparsemax, _) => {
                    for score in scores {
                        let above = *score - lse;
                        *score =
                            if *score == T::Acc::NEG_INFINITY || above < T::Acc::ZERO { T::Acc::ZERO } else { above };
                    }
                }
                _ => weights(self.ops.isa, scores, lse),
            }
        }
        self.ops.modulate(rows, keys, scores);
    }
}

/// 1 for the key that hard attention chose, if it is in the tile, and 0 for all others.
pub(crate) fn one_hot<A: Real>(chosen: &Tensor<i64, 4>, row: &RowAt, keys: &TileKeys<'_>, weights: &mut [A]) {
    weights.fill(A::ZERO);
    if let Some(at) = chosen_in(chosen, row, keys) {
        weights[at] = A::ONE;
    }
}

/// The position in a tile of the key that hard attention chose.
pub(crate) fn chosen_in(chosen: &Tensor<i64, 4>, row: &RowAt, keys: &TileKeys<'_>) -> Option<usize> {
    let j = usize::try_from(chosen_by(chosen, row)[0]).ok()?;
    (keys.start..keys.start + keys.len).contains(&j).then(|| j - keys.start)
}
