//! The feature maps: [`Features`], the choice, and [`Map`], the choice made ready for a width, which turns rows into
//! features and gradients of features into gradients of rows.
//!
//! A row of features comes with a log: it stands for `exp(log)` times what it holds. elu and ReLU have logs of 0. A row
//! of FAVOR+ holds `exp(w_f·x' − max)` with its own maximum, so no row overflows, and the rest is in its log.

use super::orthogonal::orthogonal_rows;
use crate::score::Scale;
use crate::source::Source;
use qkv_simd::features::{Positive, apply, exponentials, row_dots, slope};
use qkv_simd::tile::{RowOp, row_op};
use qkv_simd::{Element, Isa, Matrix, Panels, Real, Target, padded, product};
use serde::{Deserialize, Serialize};

/// A feature map `φ`, whose products are the weights of **linear attention** (Katharopoulos et al. 2020,
/// arXiv:2006.16236):
///
/// `out_i = Σ_j φ(q_i)·φ(k_j) v_j / Σ_j φ(q_i)·φ(k_j)` over the keys `j` that query `i` may see.
///
/// Since the sum over keys of `φ(k_j) v_jᵀ` does not depend on the query, time is linear in the length: for `F`
/// features it is `O((n + m)·F·Dv)`. The log-sum-exp is the log of the denominator; where that is 0 (nothing is seen,
/// or every product is 0, which ReLU can do) it is −∞, the output is 0 and so are the gradients.
///
/// | map | `φ(x)` | features | paper |
/// | --- | --- | --- | --- |
/// | [`Elu`](Features::Elu) | `elu(x) + 1` | `D` | Katharopoulos et al. 2020, arXiv:2006.16236 |
/// | [`Relu`](Features::Relu) | `max(x, 0)` | `D` | Shen et al. 2021; Cai et al. 2022, arXiv:2205.14756 |
/// | [`Favor`](Features::Favor) | `exp(w_f·x' − ‖x'‖²/2) / √F`, `x' = √scale·x` | `count` | Choromanski et al. 2020, arXiv:2009.14794 |
///
/// **What goes with it.** The masks [full](crate::Mask::full), [causal](crate::Mask::causal) at every
/// [place](crate::Place), [lengths](crate::Mask::lengths), [segments](crate::Mask::segments), and any `&` of these;
/// with FAVOR+ a fixed scale above 0. **What does not**, and is refused with
/// [`Error::Conflict`](crate::Error::Conflict): every other mask, and `|` and `!`, because the keys that a query sees
/// must be the first few of a sequence; biases, soft-cap, temperature and a learned scale, because there is no score to
/// change; dropout, sinks and entropy, because no weight is ever made; a scale with elu or ReLU, which have none.
///
/// ```
/// use qkv::{Attention, Features, Inputs, Mask, Tensor};
/// let [q, k, v] = [1, 2, 3].map(|seed| Tensor::<f32, 4>::randn([1, 4, 1000, 32], seed));
/// let linear = Attention::linear(Features::Elu).mask(Mask::causal());
/// let out = linear.forward(Inputs::new(&q, &k, &v))?;
///
/// // An estimate of softmax attention, the better the more features there are and the smaller the scores.
/// let performer = Attention::linear(Features::Favor { count: 256, seed: 7 }).scale(0.03);
/// let near = performer.forward(Inputs::new(&q, &k, &v))?;
/// let exact = Attention::dot().scale(0.03).forward(Inputs::new(&q, &k, &v))?;
/// assert!((near.lse[[0, 0, 0]] - exact.lse[[0, 0, 0]]).abs() < 0.2);
/// # Ok::<(), qkv::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Features {
    /// `elu(x) + 1`: `x + 1` above 0 and `eˣ` below.
    Elu,
    /// `max(x, 0)`; its gradient at 0 is 0.
    Relu,
    /// FAVOR+, the Performer's positive orthogonal random features: `φ(q)·φ(k)` estimates `exp(scale·q·k)`, without
    /// bias. The scale is 1/√d unless another is given. The rows `w_f` are orthogonal in blocks of `d` and depend on
    /// width, count and seed alone, on every machine. What keeps the exponentials in range is local, a row's own
    /// maximum and a running maximum over the keys seen so far, so that neither causal attention nor decoding looks
    /// ahead.
    Favor {
        /// How many features, 1 to 65,536.
        count: usize,
        /// The seed of the draw.
        seed: u64,
    },
}

impl Features {
    /// How many features a row of width `d` has.
    pub(crate) fn count(self, d: usize) -> usize {
        match self {
            Features::Elu | Features::Relu => d,
            Features::Favor { count, .. } => count,
        }
    }

    /// What FAVOR+ multiplies products of queries and keys by.
    pub(crate) fn scale(scale: Scale, d: usize) -> f64 {
        match scale {
            Scale::Fixed(scale) => scale,
            _ => 1.0 / (d.max(1) as f64).sqrt(),
        }
    }
}

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
                let scale = Features::scale(scale, d);
                let (mut rows, mut columns) = (vec![A::ZERO; count * d_row], vec![A::ZERO; d * row]);
                for (at, w) in orthogonal_rows(d, count, seed).into_iter().enumerate() {
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

    /// The log of what the products of features are to be divided by: of `F`, since each side has its `√F`.
    pub fn divisor_log(&self) -> A {
        if self.has_logs() { A::from_f64((self.count as f64).ln()) } else { A::ZERO }
    }

    /// Loads the rows that `indices` name and makes their features `[rows, row]` with their logs; says whether all of
    /// them are finite. Maps that need them again, to go [`back`](Map::back), leave the rows themselves in `x [rows,
    /// d_row]`.
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

    /// From the gradients of features, `[rows, row]`, which it uses up, those of the rows `x`, `[rows, d_row]`.
    ///
    /// The gradients are those of what the features stand for, times `exp(log)`: with elu and ReLU that is the gradient
    /// of the feature; with FAVOR+ their product with the features held is the gradient of the exponents.
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
                // The exponent is w·x − scale·‖x‖²/2: the second part pulls back along x.
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
