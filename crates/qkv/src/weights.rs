//! **Weights on demand**: any rows, any rectangle, or a picture of any size, recomputed exactly from q, k and the
//! log-sum-exp. Nothing larger than what is asked for and its two sides is stored.

use crate::attention::Output;
use crate::element::Element;
use crate::error::{Error, Result};
use crate::exact::{Compared, KeyBlocks, Live, Operand, Plan, Room, RowAt, Rule, TileOps, Verdict, Weighing};
use crate::feature::{self, Weigher};
use crate::problem::Problem;
use crate::score::Score;
use crate::scratch::Scratch;
use crate::tensor::Tensor;
use crate::tuning::{KEYS, QUERIES};
use qkv_simd::shared::{Rows, for_each_task};
use qkv_simd::{Real, ViewMut};
use std::ops::Range;

/// How a cell of a picture is made from the weights it covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pool {
    /// The largest.
    Max,
    /// The mean; pairs that are absent count as 0.
    Mean,
}

/// The weights of one call, to be asked for. See [`Attention::weights`](crate::Attention::weights).
///
/// They are what multiplied the values: after dropout, 0 where a pair is absent. Without dropout a row sums to 1, or to
/// less if the head has a sink.
///
/// ```
/// use qkv::{Attention, Inputs, Mask, Pool, Tensor};
/// let x = Tensor::<f32, 4>::randn([1, 2, 1000, 16], 1);
/// let causal = Attention::scaled_dot().mask(Mask::causal());
/// let out = causal.forward(Inputs::new(&x, &x, &x))?;
/// let weights = causal.weights(Inputs::new(&x, &x, &x), &out)?;
///
/// let rows = weights.rows(0, 1, 500..510)?;                                       // [10, 1000]
/// let part = weights.rectangle(0, 1, 500..510, 490..500)?;                        // [10, 10]
/// assert_eq!(rows[[3, 495]], part[[3, 5]]);
/// let picture = weights.pooled(0, 1, 0..1000, 0..1000, [32, 32], Pool::Max)?;     // [32, 32]
/// assert_eq!(picture[[0, 31]], 0.0);                                              // nobody sees the future
/// # Ok::<(), qkv::Error>(())
/// ```
#[derive(Debug)]
pub struct Weights<'a, T: qkv_simd::Element> {
    problem: Problem<'a, T>,
    out: &'a Output<T>,
}

impl<'a, T: Element> Weights<'a, T> {
    pub(crate) fn new(problem: Problem<'a, T>, out: &'a Output<T>) -> Self {
        Weights { problem, out }
    }

    /// Whole rows of one head, `[rows, M]`.
    pub fn rows(&self, b: usize, h: usize, rows: Range<usize>) -> Result<Tensor<T::Acc, 2>> {
        self.rectangle(b, h, rows, 0..self.problem.m)
    }

    /// A rectangle of one head, `[rows, cols]`.
    pub fn rectangle(&self, b: usize, h: usize, rows: Range<usize>, cols: Range<usize>) -> Result<Tensor<T::Acc, 2>> {
        self.check(b, h, &rows, &cols)?;
        let shape = [rows.len(), cols.len()];
        let mut out = Tensor::zeros("weights", shape)?;
        let written = Rows::new(ViewMut::from(&mut out));
        let blocks = rows.len().div_ceil(QUERIES);
        let asked = Asked { b, h, cols: &cols, tasks: blocks, room: QUERIES * shape[1] };
        T::weigh(self, asked, &|weigh, room, block| {
            let range = rows.start + block * QUERIES..(rows.start + (block + 1) * QUERIES).min(rows.end);
            room.fill(T::Acc::ZERO);
            weigh(range.clone(), &mut |r, j, seen| room[r * shape[1] + j..][..seen.len()].copy_from_slice(seen));
            for (r, i) in range.enumerate() {
                written.write(0, 0, i - rows.start, &room[r * shape[1]..][..shape[1]]);
            }
        });
        drop(written);
        Ok(out)
    }

    /// A rectangle of one head as a picture: a grid of `[height, width]` cells, each the largest or the mean of the weights
    /// it covers. Where the grid is finer than the rectangle, weights repeat.
    pub fn pooled(
        &self,
        b: usize,
        h: usize,
        rows: Range<usize>,
        cols: Range<usize>,
        [height, width]: [usize; 2],
        pool: Pool,
    ) -> Result<Tensor<T::Acc, 2>> {
        self.check(b, h, &rows, &cols)?;
        let mut out = Tensor::zeros("picture", [height, width])?;
        if rows.is_empty() || cols.is_empty() || height == 0 || width == 0 {
            return Ok(out);
        }
        let written = Rows::new(ViewMut::from(&mut out));
        // Numbers of one column of the rectangle, then cells.
        let asked = Asked { b, h, cols: &cols, tasks: height, room: cols.len() };
        T::weigh(self, asked, &|weigh, column, y| {
            let covered = cell(y, rows.len(), height);
            column.fill(T::Acc::ZERO);
            for start in covered.clone().step_by(QUERIES) {
                let range = rows.start + start..rows.start + (start + QUERIES).min(covered.end);
                weigh(range, &mut |_, j, seen| {
                    let column = column[j..][..seen.len()].iter_mut().zip(seen);
                    match pool {
                        Pool::Max => column.for_each(|(most, &w)| *most = larger(*most, w)),
                        Pool::Mean => column.for_each(|(sum, &w)| *sum += w),
                    }
                });
            }
            let cells: Vec<T::Acc> = (0..width)
                .map(|x| {
                    let range = cell(x, cols.len(), width);
                    let covers = T::Acc::from_f64((range.len() * covered.len()) as f64);
                    let column = &column[range];
                    match pool {
                        Pool::Max => column.iter().copied().fold(T::Acc::ZERO, larger),
                        Pool::Mean => column.iter().copied().sum::<T::Acc>() / covers,
                    }
                })
                .collect();
            written.write(0, 0, y, &cells);
        });
        drop(written);
        Ok(out)
    }

    fn check(&self, b: usize, h: usize, rows: &Range<usize>, cols: &Range<usize>) -> Result<()> {
        let Problem { b: batch, n, m, heads, .. } = self.problem;
        let outside = |name, at: String, limit| Err(Error::value(name, at, format!("within 0..{limit}")));
        match () {
            () if b >= batch => outside("sequence", b.to_string(), batch),
            () if h >= heads.query => outside("head", h.to_string(), heads.query),
            () if rows.start > rows.end || rows.end > n => outside("rows", format!("{rows:?}"), n),
            () if cols.start > cols.end || cols.end > m => outside("columns", format!("{cols:?}"), m),
            () => Ok(()),
        }
    }
}

/// What is asked of the weights of one head: some columns, in so many tasks, with so much room for each.
#[derive(Clone, Copy)]
pub(crate) struct Asked<'a> {
    b: usize,
    h: usize,
    cols: &'a Range<usize>,
    tasks: usize,
    room: usize,
}

impl<T: qkv_simd::Element> Weights<'_, T> {
    /// Runs tasks that weigh rows of one head against some columns. A task gets a function that, for a range of at most
    /// [`QUERIES`] rows, reports their weights; and room of its own.
    pub(crate) fn run(&self, Asked { b, h, cols, tasks, room }: Asked<'_>, task: &Task<'_, T::Acc>) {
        let problem = &self.problem;
        let scratch = Scratch::new();
        let threads = rayon::current_num_threads();
        if let Score::Linear(_) = problem.attention.score {
            let sizes = feature::sizes_of(problem);
            let worker = || (Weigher::new(problem, &sizes, &scratch), scratch.take(room));
            return for_each_task(threads, tasks, worker, |(weigher, room), at| {
                task(&mut |range, report| weigher.weigh(self.out, [b, h], range, cols, report), room, at);
            });
        }
        let compared = Compared::new(problem, &scratch, threads);
        let plan = Plan::natural_over(Rule::of(problem), &problem.scene, cols);
        let piece = &plan.pieces[0];
        let ops = TileOps::after(problem, self.out);
        let weighing = Weighing { ops: &ops, out: self.out };
        let (queries, keys) = (compared.queries(problem), compared.keys(problem));
        let key_head = h / problem.heads.group;
        let mut keys_room = Room::new(&scratch, ops.arithmetic, piece, 1, problem.width, 0);
        let blocks = KeyBlocks::new(piece, keys, Operand::Given(problem.inputs.v), problem.heads.key, &mut keys_room);
        let blocks = blocks.starting_at(b, key_head);
        let tile = || (scratch.take(QUERIES * ops.query_row), scratch.take(QUERIES * KEYS), Live::default());
        let worker = || (ops.desk(&scratch), tile(), scratch.take(room));
        for_each_task(threads, tasks, worker, |(desk, (q, scores, live), room), at| {
            let mut weigh = |range: Range<usize>, report: &mut Report<'_, T::Acc>| {
                let rows: Vec<RowAt> = range.map(|i| RowAt { b, h, i, p: problem.scene.place(b, i) }).collect();
                desk.load_left(queries, rows.iter().map(|row| (b, h, row.i)), q);
                for tile in piece.key_tiles() {
                    let verdict = piece.verdict_of_rows(&problem.scene, &rows, tile);
                    if verdict == Verdict::Empty {
                        continue;
                    }
                    let keys = piece.tile_keys(b, key_head, tile);
                    ops.live(piece, &keys, verdict, &rows, live);
                    let columns = blocks.keys(b, key_head, tile, desk);
                    ops.raw(desk, q, columns, keys.len, (live, 0..rows.len()), scores);
                    ops.finish_all(&keys, live, &rows, scores);
                    weighing.apply(&rows, &keys, scores);
                    let asked = keys.start.max(cols.start)..(keys.start + keys.len).min(cols.end);
                    if asked.is_empty() {
                        continue;
                    }
                    for r in 0..rows.len() {
                        let seen = &scores[r * KEYS..][asked.start - keys.start..asked.end - keys.start];
                        report(r, asked.start - cols.start, seen);
                    }
                }
            };
            task(&mut weigh, room, at);
        });
    }
}

/// A task: it gets a function that weighs rows, room of its own, and its number.
pub(crate) type Task<'a, A> = dyn Fn(&mut Weigh<'_, A>, &mut [A], usize) + Sync + 'a;

/// Weighs a range of rows and reports them.
pub(crate) type Weigh<'a, A> = dyn FnMut(Range<usize>, &mut Report<'_, A>) + 'a;

/// Takes neighbouring weights of one row: the row and the first column, both from the corner, and the weights. What is not
/// reported is 0.
pub(crate) type Report<'a, A> = dyn FnMut(usize, usize, &[A]) + 'a;

/// The larger of two weights; NaN is not lost.
#[inline]
fn larger<A: Real>(a: A, b: A) -> A {
    if b > a || b.is_nan() { b } else { a }
}

/// The rows (or columns) of a rectangle of `len` that a cell of a grid of `cells` covers: at least one.
fn cell(at: usize, len: usize, cells: usize) -> Range<usize> {
    let start = (at as u128 * len as u128 / cells as u128) as usize;
    let end = ((at as u128 + 1) * len as u128 / cells as u128) as usize;
    start..end.max(start + 1)
}
