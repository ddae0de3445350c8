//! The feature maps: [`Features`] is the choice, and [`Map`] its implementation for one width, which turns rows into
//! features and gradients of features into gradients of rows.
//!
//! A row of features comes with a log: it stands for `exp(log)` times its contents. elu and ReLU have logs of 0. A row
//! of FAVOR+ holds `exp(w_f·x' − max)` with its own maximum, so no row overflows, and the rest is in its log.

use super::orthogonal::orthogonal_rows;
use crate::features::Features;
use crate::score::Scale;
use crate::source::Source;
use qkv_simd::features::{Positive, apply, exponentials, row_dots, slope};
use qkv_simd::tile::{RowOp, row_op};
use qkv_simd::{Element, Isa, Matrix, Panels, Real, Target, padded, product};

/// A feature map for rows of one width.
#[derive(Clone, Debug)]
pub(crate) struct Map<A: Real> {
    pub isa: Isa,
    kind: Kind<A>,
    /// The width of rows, and that of padded rows.
    pub d: usize,
    pub d_row: usize,
    /// The number of features, and that of a padded row of them.
    pub count: usize,
    pub row: usize,
}

#[derive(Clone, Debug)]
enum Kind<A> {
    Simple(Positive),
    Favor {
        scale: A,
        /// The random rows times √scale, `[F, d_row]`, and their transpose, `[D, row]`.
        rows: Vec<A>,
        columns: Vec<A>,
        /// A row of ones, `[row]`.
        ones: Vec<A>,
    },
}

impl<A: Real> Map<A> {
    pub fn new(features: Features, scale: Scale, d: usize) -> Self {
        let (count, d_row) = (features.count(d), padded::<A>(d));
        let row = padded::<A>(count);
        let kind = match features {
            Features::Elu => Kind::Simple(Positive::EluPlusOne),
            Features::Relu => Kind::Simple(Positive::Relu),
            Features::Favor { count, seed } => {
                let scale = scale.of_favor(d);
                let (mut rows, mut columns) = (vec![A::ZERO; count * d_row], vec![A::ZERO; d * row]);
                for (at, w) in orthogonal_rows(d, count, seed).iter().enumerate() {
                    let w = A::from_f64(w * scale.sqrt());
                    rows[at / d * d_row + at % d] = w;
                    columns[at % d * row + at / d] = w;
                }
                Kind::Favor { scale: A::from_f64(scale), rows, columns, ones: vec![A::ONE; row] }
            }
        };
        Map { isa: Isa::best(), kind, d, d_row, count, row }
    }

    /// Whether logs can be other than 0.
    pub fn has_logs(&self) -> bool {
        matches!(self.kind, Kind::Favor { .. })
    }

    /// The log of the divisor of products of features: with FAVOR+ that is `F`, since each side has its `√F`.
    pub fn divisor_log(&self) -> A {
        if self.has_logs() { A::from_f64((self.count as f64).ln()) } else { A::ZERO }
    }

    /// Loads the rows at `indices` and computes their features `[rows, row]` and logs; returns whether all of the rows
    /// are finite. Maps that need the rows again, to go [`back`](Map::back), leave them in `x [rows, d_row]`.
    pub fn load<T: Element<Acc = A>>(
        &self,
        from: Source<'_, T>,
        [b, h]: [usize; 2],
        indices: impl ExactSizeIterator<Item = usize>,
        x: &mut [A],
        features: &mut [A],
        logs: &mut [A],
    ) -> bool {
        let rows = indices.len();
        let mut finite = true;
        let loaded = if let Kind::Simple(_) = self.kind { &mut *features } else { &mut *x };
        for (i, row) in indices.zip(loaded.chunks_exact_mut(self.d_row.max(1))) {
            finite &= from.load_row(b, h, i, row);
        }
        logs[..rows].fill(A::ZERO);
        match &self.kind {
            Kind::Simple(map) => apply(self.isa, features, self.row, rows, self.count, *map),
            Kind::Favor { scale, columns, .. } => {
                row_dots(self.isa, (x, self.d_row), (x, self.d_row), self.d_row, &mut logs[..rows]);
                logs[..rows].iter_mut().for_each(|log| *log *= *scale * A::from_f64(-0.5));
                features[..rows * self.row].fill(A::ZERO);
                let (a, b) = (Matrix::rows(x, self.d_row), Panels::rows(columns, self.row));
                product(self.isa, Target::accumulate(features, self.row), a, b, rows, self.row / A::LANES, self.d);
                exponentials(self.isa, features, self.row, rows, self.count, logs);
            }
        }
        finite
    }

    /// Computes the gradients of the rows `x`, `[rows, d_row]`, from those of their features, `[rows, row]`, which are
    /// overwritten.
    ///
    /// The given gradients are those of the values that the features stand for, times `exp(log)`: with elu and ReLU
    /// that is the gradient of the feature; with FAVOR+ their product with the stored features is the gradient of the
    /// exponents.
    pub fn back(&self, x: &[A], features: &[A], rows: usize, grads: &mut [A], d_x: &mut [A]) {
        let (features, grads) = (&features[..rows * self.row], &mut grads[..rows * self.row]);
        match &self.kind {
            Kind::Simple(map) => {
                slope(self.isa, grads, features, *map);
                d_x[..rows * self.d_row].copy_from_slice(grads);
            }
            Kind::Favor { scale, rows: w, ones, .. } => {
                if rows > 0 {
                    row_op(self.isa, grads, RowOp::Multiply(features));
                }
                let d_x = &mut d_x[..rows * self.d_row];
                d_x.fill(A::ZERO);
                let (a, b) = (Matrix::rows(grads, self.row), Panels::rows(w, self.d_row));
                product(self.isa, Target::accumulate(d_x, self.d_row), a, b, rows, self.d_row / A::LANES, self.count);
                // The exponent is w·x − scale·‖x‖²/2: the gradient of the second part is along x.
                for (r, d_x) in d_x.chunks_exact_mut(self.d_row.max(1)).enumerate() {
                    let mut sum = [A::ZERO];
                    row_dots(self.isa, (&grads[r * self.row..], 0), (ones, 0), self.row, &mut sum);
                    for (d_x, &x) in d_x.iter_mut().zip(&x[r * self.d_row..]) {
                        *d_x += -(*scale * sum[0] * x);
                    }
                }
            }
        }
    }
}
