//! The projections and normalizations of general, additive and cosine scores, and their gradients: work linear in the
//! sequence that is done once, so that tiles only deal with dot products, additive scores and distances.

use crate::exact::pack::Operand;
use crate::problem::Problem;
use crate::score::Score;
use crate::scratch::{Buffer, Scratch};
use crate::source::Source;
use crate::tuning::QUERIES;
use qkv_simd::shared::{Rows, for_each_task};
use qkv_simd::{Element, Isa, Matrix, Panels, Real, Target, View, ViewMut, padded, product};

/// The rows that the score compares.
pub(crate) struct ScoreOperands<'s, T: Element> {
    queries: Option<ProjectedBuffer<'s, T::Acc>>,
    keys: Option<ProjectedBuffer<'s, T::Acc>>,
}

struct ProjectedBuffer<'s, A: Real> {
    data: Buffer<'s, A>,
    shape: [usize; 4],
}

impl<A: Real> ProjectedBuffer<'_, A> {
    fn view(&self) -> View<'_, A> {
        View::new(&self.data, self.shape).expect("projected with its shape")
    }
}

/// The transform that is applied to each row.
#[derive(Clone, Copy)]
enum RowTransform<'a, T> {
    /// Multiplied by a matrix, `row · W`, or by its transpose.
    Matrix { w: View<'a, T>, transposed: bool },
    /// Divided by its norm.
    Unit,
}

impl<'s, T: Element> ScoreOperands<'s, T> {
    /// Projects or normalizes the inputs, if the score needs it.
    pub fn new(problem: &Problem<'_, T>, scratch: &'s Scratch<T::Acc>, threads: usize) -> Self {
        let inputs = &problem.inputs;
        let make = |x: Source<'_, T>, transform: Option<RowTransform<'_, T>>| {
            transform.map(|transform| transform_rows(Operand::Input(x), transform, problem.width, scratch, threads))
        };
        let (queries, keys) = match problem.attention.score {
            Score::General => (inputs.w.map(|w| RowTransform::Matrix { w, transposed: false }), None),
            Score::Additive => {
                let transposed = |w| RowTransform::Matrix { w, transposed: true };
                (inputs.w_q.map(transposed), inputs.w_k.map(transposed))
            }
            Score::Cosine => (Some(RowTransform::Unit), Some(RowTransform::Unit)),
            _ => (None, None),
        };
        ScoreOperands { queries: make(inputs.q.into(), queries), keys: make(inputs.k, keys) }
    }

    pub fn queries<'a>(&'a self, problem: &Problem<'a, T>) -> Operand<'a, T> {
        self.queries
            .as_ref()
            .map_or(Operand::Input(problem.inputs.q.into()), |projected| Operand::Computed(projected.view()))
    }

    pub fn keys<'a>(&'a self, problem: &Problem<'a, T>) -> Operand<'a, T> {
        self.keys.as_ref().map_or(Operand::Input(problem.inputs.k), |projected| Operand::Computed(projected.view()))
    }
}

/// A matrix of one head as padded rows, transposed on request.
fn matrix_rows<T: Element>(w: View<'_, T>, head: usize, transposed: bool) -> (Vec<T::Acc>, usize) {
    let [_, heads, r, c] = w.shape();
    let (rows, cols) = if transposed { (c, r) } else { (r, c) };
    let row = padded::<T::Acc>(cols);
    let mut out = vec![T::Acc::ZERO; rows * row];
    for i in 0..rows {
        for j in 0..cols {
            let (r, c) = if transposed { (j, i) } else { (i, j) };
            out[i * row + j] = w.at(0, head % heads, r, c).widen();
        }
    }
    (out, row)
}

/// Transforms rows `[B, H, L, width]`, block by block.
fn transform_rows<'s, T: Element>(
    x: Operand<'_, T>,
    transform: RowTransform<'_, T>,
    width: usize,
    scratch: &'s Scratch<T::Acc>,
    threads: usize,
) -> ProjectedBuffer<'s, T::Acc> {
    let [b, h, len, from] = x.shape();
    let to = [b, h, len, width];
    let mut data = scratch.take(b * h * len * width);
    {
        let out = Rows::new(ViewMut::new(&mut data, to).expect("as long as its shape"));
        transform_into(x, transform, &out, from, scratch, threads);
    }
    ProjectedBuffer { data, shape: to }
}

/// Transforms every row of `x` and writes it.
fn transform_into<T: Element, U: Element<Acc = T::Acc>>(
    x: Operand<'_, T>,
    transform: RowTransform<'_, T>,
    out: &Rows<'_, U>,
    from: usize,
    scratch: &Scratch<T::Acc>,
    threads: usize,
) {
    let isa = Isa::best();
    let [batch, heads, len, to] = out.shape();
    let (from_row, to_row) = (padded::<T::Acc>(from), padded::<T::Acc>(to));
    let blocks = len.div_ceil(QUERIES);
    let matrices: Vec<(Vec<T::Acc>, usize)> = match transform {
        RowTransform::Matrix { w, transposed } => {
            (0..heads.min(w.shape()[1])).map(|h| matrix_rows(w, h, transposed)).collect()
        }
        RowTransform::Unit => Vec::new(),
    };
    let worker = || (scratch.take(QUERIES * from_row), scratch.take(QUERIES * to_row));
    for_each_task(threads, batch * heads * blocks, worker, |(rows, projected), task| {
        let (b, h, block) = (task / (heads * blocks), task / blocks % heads, task % blocks);
        let range = block * QUERIES..((block + 1) * QUERIES).min(len);
        for (r, i) in range.clone().enumerate() {
            x.load_row(b, h, i, &mut rows[r * from_row..][..from_row]);
        }
        if let RowTransform::Matrix { .. } = transform {
            let (w, row) = &matrices[h % matrices.len()];
            projected.fill(T::Acc::ZERO);
            let panels = to_row / T::Acc::LANES;
            product(
                isa,
                Target::accumulate(projected, to_row),
                Matrix::rows(rows, from_row),
                Panels::rows(w, *row),
                range.len(),
                panels,
                from,
            );
        } else {
            for r in 0..range.len() {
                let row = &rows[r * from_row..][..from];
                let length = norm(row);
                for (to, &x) in projected[r * to_row..].iter_mut().zip(row) {
                    *to = if length == T::Acc::ZERO { T::Acc::ZERO } else { x / length };
                }
            }
        }
        for (r, i) in range.enumerate() {
            out.write(b, h, i, &projected[r * to_row..][..to_row]);
        }
    });
}

/// The norm of a row, computed relative to its largest element to avoid overflow and underflow.
fn norm<A: Real>(row: &[A]) -> A {
    let largest = row.iter().fold(A::ZERO, |a, &x| if x.abs() > a || x.is_nan() { x.abs() } else { a });
    if largest == A::ZERO || !largest.is_finite() {
        return largest;
    }
    row.iter().map(|&x| (x / largest) * (x / largest)).sum::<A>().sqrt() * largest
}

/// The side that a gradient belongs to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProjectedSide {
    Queries,
    Keys,
}

/// Backpropagates the gradients of the compared rows, `grads`, through [`ScoreOperands`], into the gradients of `q` or
/// `k` and of its matrix.
pub(crate) fn backward_projection<T: Element>(
    problem: &Problem<'_, T>,
    from: ProjectedSide,
    grads: View<'_, T::Acc>,
    (to, matrix): (ViewMut<'_, T>, Option<ViewMut<'_, T>>),
    scratch: &Scratch<T::Acc>,
    threads: usize,
) {
    let inputs = &problem.inputs;
    let x = if from == ProjectedSide::Queries { Source::Rows(inputs.q) } else { inputs.k };
    let grads = Operand::<T>::Computed(grads);
    let project_back = |w: View<'_, T>, transposed: bool, to: ViewMut<'_, T>| {
        let transform = RowTransform::Matrix { w, transposed };
        transform_into(grads, transform, &Rows::new(to), problem.width, scratch, threads);
    };
    match (problem.attention.score, from) {
        (Score::General, ProjectedSide::Queries) => {
            project_back(inputs.w.expect("checked"), true, to);
            if let Some(matrix) = matrix {
                matrix_gradient(Operand::Input(x), grads, matrix, scratch, threads);
            }
        }
        (Score::Additive, _) => match if from == ProjectedSide::Queries { inputs.w_q } else { inputs.w_k } {
            Some(w) => {
                project_back(w, false, to);
                if let Some(matrix) = matrix {
                    matrix_gradient(grads, Operand::Input(x), matrix, scratch, threads);
                }
            }
            None => copy(grads, to, scratch, threads),
        },
        (Score::Cosine, _) => backward_norm(x, grads, to, scratch, threads),
        _ => copy(grads, to, scratch, threads),
    }
}

/// Runs `f` for every row `(b, h, i)`, with two buffers of a padded row.
fn for_each_row<A: Real>(
    [batch, heads, len, width]: [usize; 4],
    scratch: &Scratch<A>,
    threads: usize,
    f: impl Fn(usize, usize, usize, &mut [A], &mut [A]) + Sync,
) {
    let row = padded::<A>(width);
    let blocks = len.div_ceil(QUERIES);
    for_each_task(
        threads,
        batch * heads * blocks,
        || (scratch.take(row), scratch.take(row)),
        |(a, c), task| {
            let (b, h, block) = (task / (heads * blocks), task / blocks % heads, task % blocks);
            for i in block * QUERIES..((block + 1) * QUERIES).min(len) {
                f(b, h, i, a, c);
            }
        },
    );
}

fn copy<T: Element>(grads: Operand<'_, T>, to: ViewMut<'_, T>, scratch: &Scratch<T::Acc>, threads: usize) {
    let out = Rows::new(to);
    for_each_row(out.shape(), scratch, threads, |b, h, i, row, _| {
        grads.load_row(b, h, i, row);
        out.write(b, h, i, row);
    });
}

/// Whether a row's gradient is zero: then the row has no effect, even if it holds NaN.
fn is_zero<A: Real>(row: &[A]) -> bool {
    row.iter().all(|&x| x == A::ZERO)
}

/// `(d − (d·u)u) / ‖x‖` with the unit vector `u` of `x`; 0 for the zero vector.
fn backward_norm<T: Element>(
    x: Source<'_, T>,
    grads: Operand<'_, T>,
    to: ViewMut<'_, T>,
    scratch: &Scratch<T::Acc>,
    threads: usize,
) {
    let width = x.shape()[3];
    let out = Rows::new(to);
    for_each_row(out.shape(), scratch, threads, |b, h, i, x_row, d_row| {
        x.load_row(b, h, i, x_row);
        grads.load_row(b, h, i, d_row);
        let length = norm(&x_row[..width]);
        if length == T::Acc::ZERO || is_zero(d_row) {
            d_row.fill(T::Acc::ZERO);
        } else {
            x_row.iter_mut().for_each(|x| *x = *x / length);
            let along: T::Acc = x_row.iter().zip(&*d_row).map(|(&u, &d)| u * d).sum();
            for (d, &u) in d_row.iter_mut().zip(&*x_row) {
                *d = (*d - along * u) / length;
            }
        }
        out.write(b, h, i, d_row);
    });
}

/// `Σ aᵢ ⊗ bᵢ` over all rows, of shape `[1, heads or 1, A, B]`: the gradient of a matrix. One task owns a strip of rows
/// of the result and reads the whole sequence, so the order of summation is fixed.
fn matrix_gradient<T: Element>(
    a: Operand<'_, T>,
    b: Operand<'_, T>,
    to: ViewMut<'_, T>,
    scratch: &Scratch<T::Acc>,
    threads: usize,
) {
    let isa = Isa::best();
    let [batch, heads, len, _] = a.shape();
    let [_, slots, rows, cols] = to.shape();
    let (a_row, b_row) = (padded::<T::Acc>(rows), padded::<T::Acc>(cols));
    let strips = rows.div_ceil(QUERIES);
    let written = Rows::new(to);
    let worker = || [QUERIES * a_row, QUERIES * b_row, QUERIES * b_row].map(|len| scratch.take(len));
    for_each_task(threads, slots * strips, worker, |[xs, ys, sums], task| {
        let (slot, strip) = (task / strips, task % strips);
        let strip = strip * QUERIES..((strip + 1) * QUERIES).min(rows);
        sums.fill(T::Acc::ZERO);
        for seq in 0..batch {
            for h in (0..heads).filter(|h| slots == 1 || *h == slot) {
                for start in (0..len).step_by(QUERIES) {
                    let count = QUERIES.min(len - start);
                    for r in 0..count {
                        let (x, y) = (&mut xs[r * a_row..][..a_row], &mut ys[r * b_row..][..b_row]);
                        a.load_row(seq, h, start + r, x);
                        b.load_row(seq, h, start + r, y);
                        if is_zero(x) || is_zero(y) {
                            x.fill(T::Acc::ZERO);
                            y.fill(T::Acc::ZERO);
                        }
                    }
                    let x = Matrix::transposed(&xs[strip.start..], a_row);
                    product(
                        isa,
                        Target::accumulate(sums, b_row),
                        x,
                        Panels::rows(ys, b_row),
                        strip.len(),
                        b_row / T::Acc::LANES,
                        count,
                    );
                }
            }
        }
        for (r, row) in strip.enumerate() {
            written.write(0, slot, row, &sums[r * b_row..][..b_row]);
        }
    });
}
