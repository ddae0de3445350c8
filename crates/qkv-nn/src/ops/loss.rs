//! Fused output projection and cross-entropy, with label smoothing.
//!
//! The logits of a whole batch over the vocabulary would be the largest tensor of a training step. They are computed
//! for [a block of rows](rows_at_a_time) at a time, replaced in place by their gradient, multiplied into the gradients
//! of `x` and `W`, and dropped.

use crate::float::Float;
use crate::loops::{CrossEntropyRow, RowLoss};
use crate::machine::summed_rows;
use crate::parameters::Param;
use crate::pending::Pending;
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;
use qkv_cuda::operations::{Array, Factor, Kind, Operations, logits_stride};
use qkv_simd::matmul::{Operand, Product};
use std::ops::Range;

/// The targets of a loss.
#[derive(Clone, Copy, Debug)]
pub struct Target<'a> {
    /// The target class of each row.
    pub ids: &'a [u32],
    /// Rows of this class are ignored.
    pub ignore: Option<u32>,
    /// Label smoothing: the probability spread evenly over all classes (Szegedy et al. 2016).
    pub smoothing: f64,
    /// Factor of each row's gradient, such as one over the number of rows in a whole step.
    pub scale: f64,
}

/// A loss, summed over the rows that are not ignored.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Loss {
    /// The loss with label smoothing, which training minimizes.
    pub smoothed: f64,
    /// The loss without label smoothing: `−ln p` of the target class.
    pub nll: f64,
    /// Number of rows.
    pub rows: usize,
    /// Rows whose target class had the highest logit.
    pub right: usize,
}

impl std::ops::AddAssign for Loss {
    fn add_assign(&mut self, other: Loss) {
        self.smoothed += other.smoothed;
        self.nll += other.nll;
        self.rows += other.rows;
        self.right += other.right;
    }
}

/// A loss that a device may still be computing. Reading it blocks until it is complete.
#[derive(Clone, Debug)]
pub struct PendingLoss(LossState);

#[derive(Clone, Debug)]
enum LossState {
    Known(Loss),
    /// Four f64: see [`Operations::cross_entropy`].
    OnDevice(Operations, Array),
    /// Losses, each with its factor, and their number of rows.
    Sum(Vec<(f64, PendingLoss)>, usize),
}

impl From<Loss> for PendingLoss {
    fn from(loss: Loss) -> Self {
        PendingLoss(LossState::Known(loss))
    }
}

impl PendingLoss {
    /// A loss whose totals a device accumulates.
    pub(crate) fn on_device(operations: &Operations, totals: Array) -> PendingLoss {
        PendingLoss(LossState::OnDevice(operations.clone(), totals))
    }

    /// The sum of losses over the same rows, each times its factor. No row counts as right.
    pub fn sum(parts: Vec<(f64, PendingLoss)>, rows: usize) -> PendingLoss {
        PendingLoss(LossState::Sum(parts, rows))
    }

    /// The loss.
    pub fn read(&self) -> Loss {
        self.fetch().read()
    }

    /// Starts copying to the host the loss after the work submitted so far.
    pub fn fetch(&self) -> Pending<Loss> {
        match &self.0 {
            LossState::Known(loss) => (*loss).into(),
            LossState::OnDevice(operations, totals) => {
                let totals = operations.fetch(totals);
                Pending::later(move || {
                    let totals = totals.read::<f64>();
                    let [smoothed, nll] = [totals[0], totals[1]];
                    Loss { smoothed, nll, right: totals[2] as usize, rows: totals[3] as usize }
                })
            }
            LossState::Sum(parts, rows) => {
                let parts: Vec<(f64, Pending<Loss>)> =
                    parts.iter().map(|(factor, part)| (*factor, part.fetch())).collect();
                let mut sum = Loss { rows: *rows, ..Loss::default() };
                Pending::later(move || {
                    for (factor, part) in parts.into_iter().map(|(factor, part)| (factor, part.read())) {
                        sum.smoothed += factor * part.smoothed;
                        sum.nll += factor * part.nll;
                    }
                    sum
                })
            }
        }
    }
}

/// Bytes of logits in memory at a time on a device.
const LOGITS_BYTES: usize = 1 << 29;

/// Largest number of rows whose logits are in memory at a time.
const MOST_ROWS: usize = 1024;

/// Limit of the logits in memory at a time, 64 MiB in f32, unless `FEWEST_ROWS` rows need more. Every block of rows
/// packs the matrix again, a cost that blocks of hundreds of rows amortize.
const MOST_LOGITS: usize = 1 << 24;

/// Smallest number of rows whose logits are computed at a time: fewer would make products slow.
const FEWEST_ROWS: usize = 128;

/// Number of rows whose logits are in memory at a time. It is the same for all batches, so that they share the memory.
fn rows_at_a_time(classes: usize) -> usize {
    (MOST_LOGITS / classes.max(1) / FEWEST_ROWS * FEWEST_ROWS).clamp(FEWEST_ROWS, MOST_ROWS)
}

impl<T: Float> Tape<'_, T> {
    /// The cross-entropy of the logits `x Wᵀ + b`, with `x [.., C]`, `W [V, C]`, `b [V]`. On a training tape the
    /// backward pass starts here.
    ///
    /// # Panics
    /// If the shapes do not match, or a class is beyond the vocabulary.
    pub fn cross_entropy(&mut self, x: &Var<T>, w: Param, b: Option<Param>, target: Target<'_>) -> PendingLoss {
        self.cross_entropy_into(x, w, b, target, None)
    }

    /// [`cross_entropy`](Tape::cross_entropy), and the log-likelihood of each row's target; 0 for ignored rows.
    ///
    /// # Panics
    /// As [`cross_entropy`](Tape::cross_entropy).
    pub fn cross_entropy_of_rows(
        &mut self,
        x: &Var<T>,
        w: Param,
        b: Option<Param>,
        target: Target<'_>,
    ) -> (PendingLoss, Vec<f64>) {
        let mut rows = vec![0.0; target.ids.len()];
        (self.cross_entropy_into(x, w, b, target, Some(&mut rows)), rows)
    }

    fn cross_entropy_into(
        &mut self,
        x: &Var<T>,
        w: Param,
        b: Option<Param>,
        target: Target<'_>,
        mut log_likelihoods: Option<&mut [f64]>,
    ) -> PendingLoss {
        let &[classes, width] = self.parameters.shape(w) else { panic!("`{}` is no matrix", self.parameters.name(w)) };
        assert_eq!((x.value.rows(), x.value.width()), (target.ids.len(), width), "a class for each row");
        let counted: Vec<usize> = (0..target.ids.len()).filter(|&r| Some(target.ids[r]) != target.ignore).collect();
        assert!(counted.iter().all(|&r| (target.ids[r] as usize) < classes), "a class beyond the {classes} there are");
        if let Some(operations) = self.machine.cuda() {
            return self.cross_entropy_on_cuda(operations, x, [classes, width], w, b, target, log_likelihoods);
        }
        let (weight, bias) = (self.parameters.get(w), b.map(|b| self.parameters.get(b)));
        let (training, smoothing, scale) = (self.is_training(), target.smoothing, target.scale);
        let mut d_x = training.then(|| Tensor::zeros(self.pool, x.shape()));
        let each = rows_at_a_time(classes);
        let most = each.min(counted.len());
        let mut scores = Tensor::unwritten(self.pool, &[most, classes]);
        let mut inputs = Tensor::unwritten(self.pool, &[most, width]);
        let mut d_inputs = Tensor::unwritten(self.pool, &[if training { most } else { 0 }, width]);
        let mut losses = vec![RowLoss::default(); most];
        let mut loss = Loss { rows: counted.len(), ..Loss::default() };
        for rows in counted.chunks(each) {
            let count = rows.len();
            let inputs = &mut inputs.data_mut()[..count * width];
            for (to, &r) in inputs.chunks_exact_mut(width).zip(rows) {
                to.copy_from_slice(&x.value.data()[r * width..][..width]);
            }
            let scores = &mut scores.data_mut()[..count * classes];
            let w_rows = Operand::rows(weight, classes, width);
            self.machine.product(scores, Operand::rows(inputs, count, width), w_rows.transposed(), false);
            let parts = scores.chunks_exact_mut(classes).zip(&mut losses).zip(rows).collect();
            self.machine.each(parts, |_, ((scores, loss), &r): ((&mut [T], &mut RowLoss), &usize)| {
                let id = target.ids[r] as usize;
                self.machine.run(CrossEntropyRow { scores, bias, id, smoothing, scale, gradient: training, loss });
            });
            for (row, &r) in losses.iter().zip(rows) {
                if let Some(all) = &mut log_likelihoods {
                    all[r] = -row.nll;
                }
                loss.smoothed += row.smoothed;
                loss.nll += row.nll;
                loss.right += usize::from(row.right);
            }
            let (Some(gradients), Some(d_x)) = (self.gradients.as_deref_mut(), &mut d_x) else { continue };
            let d_scores = Operand::rows(&*scores, count, classes);
            if let Some(sum) = b.and_then(|b| gradients.sum(b)) {
                let blocks = scores.chunks(summed_rows(classes) * classes).collect();
                self.machine.add_columns(self.pool, blocks, Some(sum), |rows| rows);
            }
            let d_inputs = &mut d_inputs.data_mut()[..count * width];
            let mut products = vec![Product { c: &mut *d_inputs, a: d_scores, b: w_rows.into(), add: false }];
            if let Some(sum) = gradients.sum(w) {
                let inputs = Operand::rows(&*inputs, count, width);
                products.push(Product { c: sum, a: d_scores.transposed(), b: inputs.into(), add: true });
            }
            self.machine.products(&mut products);
            for (from, &r) in d_inputs.chunks_exact(width).zip(rows) {
                d_x.data_mut()[r * width..][..width].copy_from_slice(from);
            }
        }
        if let Some(d_x) = d_x {
            self.seed(x, d_x);
        }
        loss.into()
    }

    #[allow(clippy::too_many_arguments)] // The arguments of a loss.
    fn cross_entropy_on_cuda(
        &mut self,
        operations: &Operations,
        x: &Var<T>,
        [classes, width]: [usize; 2],
        w: Param,
        b: Option<Param>,
        target: Target<'_>,
        mut log_likelihoods: Option<&mut [f64]>,
    ) -> PendingLoss {
        let rows = target.ids.len();
        let weight = self.parameters.rounded_array(w, operations);
        let bias = b.map(|b| self.parameters.array(b, operations));
        let input = x.value.array(operations);
        let ids = operations.upload(Kind::U32, target.ids, "targets");
        let totals = operations.zeros(Kind::F64, 4, "a loss");
        let training = self.is_training();
        let scale = training.then_some(target.scale as f32);
        let d_x = (training && x.slot.is_some()).then(|| Tensor::activations(operations, x.shape()));
        let stride = logits_stride(classes);
        let each = (LOGITS_BYTES / operations.activation_kind().size() / stride.max(1)).max(64) / 64 * 64;
        for first in (0..rows).step_by(each) {
            let count = each.min(rows - first);
            let part = first * width..(first + count) * width;
            let (input, ids) = (input.slice(part.clone()), ids.slice(first..first + count));
            let logits = operations.activations(count * stride);
            for range in class_ranges(classes) {
                let (logits, sizes) = (logits.slice(range.start..count * stride), [count, range.len(), width]);
                let weight = weight.slice(range.start * width..range.end * width);
                operations.product_strided(&logits, stride, Factor::new(&input), Factor::transposed(&weight), sizes);
            }
            let (smoothing, bias) = (target.smoothing as f32, bias.as_ref());
            let losses =
                operations.cross_entropy(&logits, bias, &ids, classes, target.ignore, smoothing, scale, &totals);
            if let Some(all) = &mut log_likelihoods {
                let losses = operations.read(&losses);
                let each = all[first..first + count].iter_mut().zip(losses.chunks_exact(4));
                each.for_each(|(to, loss)| *to = -f64::from(loss[1]));
            }
            let Some(gradients) = self.gradients.as_deref_mut() else { continue };
            if let Some(sum) = b.and_then(|b| gradients.array(b, operations)) {
                operations.add_column_sums(&logits, &sum, [count, stride]);
            }
            if let Some(sum) = gradients.array(w, operations) {
                let (left, right) = (Factor::transposed(&logits).stride(stride), Factor::new(&input));
                operations.product(&sum, left, right, [classes, width, count], true);
            }
            if let Some(d_x) = &d_x {
                let d_x = d_x.array(operations).slice(part);
                for range in class_ranges(classes) {
                    let logits = logits.slice(range.start..count * stride);
                    let weight = weight.slice(range.start * width..range.end * width);
                    let (left, sizes) = (Factor::new(&logits).stride(stride), [count, width, range.len()]);
                    operations.product(&d_x, left, Factor::new(&weight), sizes, range.start > 0);
                }
            }
        }
        if let Some(d_x) = d_x {
            self.seed(x, d_x);
        }
        PendingLoss::on_device(operations, totals)
    }
}

/// The classes up to a multiple of eight, and the remainder: products of other sizes have slow kernels.
fn class_ranges(classes: usize) -> impl Iterator<Item = Range<usize>> {
    let whole = classes / 8 * 8;
    [0..whole, whole..classes].into_iter().filter(|range| !range.is_empty())
}
