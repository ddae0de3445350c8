//! **Weights on demand**: any rows, any rectangle, or a pooled map of any size, recomputed exactly from q, k and the
//! log-sum-exp. Memory is that of the result and of the queries and keys it covers.

use crate::compiled::{Expr, Verdict};
use crate::element::Element;
use crate::error::{Error, Result};
use crate::exact::{FinalWeights, KeyBlocks, KeyBuffers, Operand, Plan, ScoreOperands, TileMask, TileOps};
use crate::feature::{self, Weigher};
use crate::mask::RowAt;
use crate::output::OutputRef;
use crate::problem::Problem;
use crate::score::Score;
use crate::scratch::Scratch;
use crate::tensor::Tensor;
use crate::tuning::{KEYS, QUERIES};
use qkv_simd::shared::{Rows, for_each_task};
use qkv_simd::{Real, ViewMut};
use std::ops::Range;

/// How the weights covered by one cell of a map are pooled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pool {
    /// Their maximum.
    Max,
    /// Their mean; masked pairs count as 0.
    Mean,
}

/// The weights of one call, computed on request. See [`Attention::weights`](crate::Attention::weights).
///
/// They are the factors of the values: after dropout, and 0 where a pair is masked. Without dropout a row sums to 1, or
/// to less if the head has a sink.
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
    out: OutputRef<'a, T>,
}

impl<'a, T: Element> Weights<'a, T> {
    pub(crate) fn new(problem: Problem<'a, T>, out: OutputRef<'a, T>) -> Self {
        Weights { problem, out }
    }

    /// Whole rows of one head, `[rows, M]`.
    pub fn rows(&self, b: usize, h: usize, rows: Range<usize>) -> Result<Tensor<T::Acc, 2>> {
        self.rectangle(b, h, rows, 0..self.problem.m)
    }

    /// The listed rows of one head, `[rows, M]`.
    pub fn rows_at(&self, b: usize, h: usize, rows: &[usize]) -> Result<Tensor<T::Acc, 2>> {
        let end = rows.iter().max().map_or(0, |most| most + 1);
        self.check(b, h, &(0..end), &(0..0))?;
        self.listed(b, h, rows, 0..self.problem.m)
    }

    /// A rectangle of one head, `[rows, cols]`.
    pub fn rectangle(&self, b: usize, h: usize, rows: Range<usize>, cols: Range<usize>) -> Result<Tensor<T::Acc, 2>> {
        self.check(b, h, &rows, &cols)?;
        let rows: Vec<usize> = rows.collect();
        self.listed(b, h, &rows, cols)
    }

    fn listed(&self, b: usize, h: usize, rows: &[usize], cols: Range<usize>) -> Result<Tensor<T::Acc, 2>> {
        let width = cols.len();
        let mut out = Tensor::allocate("weights", [rows.len(), width])?;
        let written = Rows::new(ViewMut::from(&mut out));
        let asked = WeightsRequest { b, h, cols: &cols, tasks: rows.len().div_ceil(QUERIES), room: QUERIES * width };
        T::weigh(self, asked, &|weigh, room, block| {
            let first = block * QUERIES;
            let rows = &rows[first..(first + QUERIES).min(rows.len())];
            room.fill(T::Acc::ZERO);
            weigh(rows, &mut |r, j, seen| room[r * width + j..][..seen.len()].copy_from_slice(seen));
            for r in 0..rows.len() {
                written.write(0, 0, first + r, &room[r * width..][..width]);
            }
        });
        drop(written);
        Ok(out)
    }

    /// A rectangle of one head, pooled to a grid of `[height, width]` cells. If the grid is finer than the rectangle,
    /// weights repeat.
    pub fn pooled(
        &self,
        b: usize,
        h: usize,
        rows: Range<usize>,
        cols: Range<usize>,
        [height, width]: [usize; 2],
        pool: Pool,
    ) -> Result<Tensor<T::Acc, 2>> {
        let (down, across) = (rows.len(), cols.len());
        let grid = Grid {
            size: if down == 0 || across == 0 { [0; 2] } else { [height, width] },
            rows: &|y| cell(y, down, height),
            cols: &|x| cell(x, across, width),
            most: usize::MAX,
        };
        let found = self.gridded(b, h, rows, cols, grid, pool)?;
        if found.shape() == [height, width] { Ok(found) } else { Tensor::allocate("picture", [height, width]) }
    }

    /// A rectangle of one head, pooled to cells that each cover `[down, across]` weights; the last cells cover the
    /// rest. Maps of adjacent rectangles fit together. With `most`, at most that many rows of a cell are computed,
    /// spread evenly: faster, and not exact.
    ///
    /// ```
    /// # use qkv::{Attention, Inputs, Pool, Tensor};
    /// # let x = Tensor::<f32, 4>::randn([1, 1, 100, 16], 1);
    /// # let attention = Attention::scaled_dot();
    /// # let out = attention.forward(Inputs::new(&x, &x, &x))?;
    /// let weights = attention.weights(Inputs::new(&x, &x, &x), &out)?;
    /// let whole = weights.map(0, 0, 0..100, 0..100, [8, 8], Pool::Max, None)?;
    /// let corner = weights.map(0, 0, 64..100, 64..100, [8, 8], Pool::Max, None)?;
    /// assert_eq!((whole.shape(), corner.shape()), ([13, 13], [5, 5]));
    /// assert_eq!(whole[[12, 9]], corner[[4, 1]]);
    /// # Ok::<(), qkv::Error>(())
    /// ```
    #[expect(clippy::too_many_arguments, reason = "a place, a rectangle, and how it is pooled")]
    pub fn map(
        &self,
        b: usize,
        h: usize,
        rows: Range<usize>,
        cols: Range<usize>,
        [down, across]: [usize; 2],
        pool: Pool,
        most: Option<usize>,
    ) -> Result<Tensor<T::Acc, 2>> {
        if down == 0 || across == 0 {
            return Err(Error::value("cells", format!("{:?}", [down, across]), "at least one weight each way"));
        }
        let (n, m) = (rows.len(), cols.len());
        let grid = Grid {
            size: [n.div_ceil(down), m.div_ceil(across)],
            rows: &|y| y * down..((y + 1) * down).min(n),
            cols: &|x| x * across..((x + 1) * across).min(m),
            most: most.unwrap_or(usize::MAX).max(1),
        };
        self.gridded(b, h, rows, cols, grid, pool)
    }

    fn gridded(
        &self,
        b: usize,
        h: usize,
        rows: Range<usize>,
        cols: Range<usize>,
        grid: Grid<'_>,
        pool: Pool,
    ) -> Result<Tensor<T::Acc, 2>> {
        self.check(b, h, &rows, &cols)?;
        let [height, width] = grid.size;
        let mut out = Tensor::allocate("picture", grid.size)?;
        if height == 0 || width == 0 {
            return Ok(out);
        }
        let written = Rows::new(ViewMut::from(&mut out));
        // Numbers of one column of the rectangle, then cells.
        let asked = WeightsRequest { b, h, cols: &cols, tasks: height, room: cols.len() };
        T::pool(self, asked, PooledRows { grid, first: rows.start, pool, written: &written });
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

/// What is pooled: a grid over the rectangle that begins at a row, and where its rows of cells are written.
pub(crate) struct PooledRows<'a, A> {
    grid: Grid<'a>,
    first: usize,
    pool: Pool,
    written: &'a Rows<'a, A>,
}

/// A grid over a rectangle: the rows and columns that each cell covers, relative to the corner of the rectangle, and
/// the number of rows of a cell that are computed.
struct Grid<'a> {
    size: [usize; 2],
    rows: &'a (dyn Fn(usize) -> Range<usize> + Sync),
    cols: &'a (dyn Fn(usize) -> Range<usize> + Sync),
    most: usize,
}

/// A request for weights of one head: a range of columns, the number of tasks, and the scratch of each.
#[derive(Clone, Copy)]
pub(crate) struct WeightsRequest<'a> {
    b: usize,
    h: usize,
    cols: &'a Range<usize>,
    tasks: usize,
    room: usize,
}

impl<T: qkv_simd::Element> Weights<'_, T> {
    /// Runs tasks that each pool one row of cells.
    pub(crate) fn run_pooled(&self, asked: WeightsRequest<'_>, pooled: PooledRows<'_, T::Acc>) {
        let PooledRows { grid, first, pool, written } = pooled;
        let width = grid.size[1];
        self.run(asked, &|weigh, column, y| {
            let covered = (grid.rows)(y);
            let looked = covered.len().min(grid.most);
            let listed: Vec<usize> =
                (0..looked).map(|at| first + covered.start + at * covered.len() / looked).collect();
            column.fill(T::Acc::ZERO);
            for rows in listed.chunks(QUERIES) {
                weigh(rows, &mut |_, j, seen| {
                    let column = column[j..][..seen.len()].iter_mut().zip(seen);
                    match pool {
                        Pool::Max => column.for_each(|(most, &w)| *most = larger(*most, w)),
                        Pool::Mean => column.for_each(|(sum, &w)| *sum += w),
                    }
                });
            }
            let cells: Vec<T::Acc> = (0..width)
                .map(|x| {
                    let range = (grid.cols)(x);
                    let covers = T::Acc::from_f64((range.len() * looked) as f64);
                    let column = &column[range];
                    match pool {
                        Pool::Max => column.iter().copied().fold(T::Acc::ZERO, larger),
                        Pool::Mean => column.iter().copied().sum::<T::Acc>() / covers,
                    }
                })
                .collect();
            written.write(0, 0, y, &cells);
        });
    }

    /// Runs tasks that compute weights of rows of one head over some columns. A task gets a function that reports the
    /// weights of at most [`QUERIES`] rows, and its own scratch.
    pub(crate) fn run(&self, WeightsRequest { b, h, cols, tasks, room }: WeightsRequest<'_>, task: &Task<'_, T::Acc>) {
        let problem = &self.problem;
        let scratch = Scratch::new();
        let threads = rayon::current_num_threads();
        if let Score::Linear(_) = problem.attention.score {
            let sizes = feature::sizes_of(problem);
            let worker = || (Weigher::new(problem, &sizes, &scratch), scratch.take(room));
            return for_each_task(threads, tasks, worker, |(weigher, room), at| {
                let mut weigh = |rows: &[usize], report: &mut Report<'_, T::Acc>| {
                    // Adjacent rows together.
                    let mut first = 0;
                    for run in rows.chunk_by(|a, b| a + 1 == *b) {
                        let range = run[0]..run[0] + run.len();
                        weigher.weigh(self.out, [b, h], range, cols, &mut |r, j, seen| report(first + r, j, seen));
                        first += run.len();
                    }
                };
                task(&mut weigh, room, at);
            });
        }
        let operands = ScoreOperands::new(problem, &scratch, threads);
        let plan = Plan::natural_over(Expr::of(problem), &problem.mask_data, cols);
        let piece = &plan.pieces[0];
        let ops = TileOps::after(problem, self.out);
        let final_weights = FinalWeights { ops: &ops, out: self.out };
        let (queries, keys) = (operands.queries(problem), operands.keys(problem));
        let key_head = h / problem.heads.group;
        let mut keys_room = KeyBuffers::new(&scratch, ops.scoring, piece, 1, problem.width, 0);
        let blocks = KeyBlocks::new(piece, keys, Operand::Input(problem.inputs.v), problem.heads.key, &mut keys_room);
        let blocks = blocks.starting_at_head(b * problem.heads.key + key_head);
        let tile = || (scratch.take(QUERIES * ops.query_row), scratch.take(QUERIES * KEYS), TileMask::default());
        let worker = || (ops.score_gemm(&scratch), tile(), scratch.take(room));
        for_each_task(threads, tasks, worker, |(gemm, (q, scores, mask), room), at| {
            let mut weigh = |rows: &[usize], report: &mut Report<'_, T::Acc>| {
                let at = |&i: &usize| RowAt { b, h, i, p: problem.mask_data.position(b, i) };
                let rows: Vec<RowAt> = rows.iter().map(at).collect();
                let finite = gemm.pack_a(queries, rows.iter().map(|row| (b, h, row.i)), q);
                for tile in piece.key_tiles() {
                    let verdict = piece.verdict_of_rows(&problem.mask_data, &rows, tile);
                    if verdict == Verdict::Empty {
                        continue;
                    }
                    let keys = piece.tile_keys(b, key_head, tile);
                    ops.tile_mask(piece, &keys, verdict, &rows, mask);
                    let columns = blocks.keys(b, key_head, tile, gemm);
                    ops.raw(gemm, (q, finite), columns, keys.len, (mask, 0..rows.len()), scores);
                    ops.finish_all(&keys, mask, &rows, scores);
                    final_weights.apply(&rows, &keys, scores);
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

/// A task: it gets a function that computes weights of rows, its scratch, and its index.
pub(crate) type Task<'a, A> = dyn Fn(&mut Weigh<'_, A>, &mut [A], usize) + Sync + 'a;

/// Computes the weights of some rows and reports them.
pub(crate) type Weigh<'a, A> = dyn FnMut(&[usize], &mut Report<'_, A>) + 'a;

/// Receives adjacent weights of one row: the index of the row, the first column relative to the corner, and the
/// weights. Weights that are not reported are 0.
pub(crate) type Report<'a, A> = dyn FnMut(usize, usize, &[A]) + 'a;

/// The larger of two weights; NaN propagates.
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
