//! The end of a tape: a linear map to the vocabulary and the cross-entropy of what should have come, with label smoothing.
//!
//! Scores for a whole batch over a whole vocabulary are the largest thing that training could hold, so they are made for some
//! rows at a time, turned into their gradient where they lie, multiplied back, and forgotten.

use super::sum_over;
use crate::float::Float;
use crate::parameters::Param;
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;
use qkv_simd::matmul::Operand;
use qkv_simd::pass::Pass;

/// What should have come out.
#[derive(Clone, Copy, Debug)]
pub struct Target<'a> {
    /// The right class of each row.
    pub ids: &'a [u32],
    /// Rows whose class is this one do not count.
    pub ignore: Option<u32>,
    /// How much of the mass is spread over all classes evenly (Szegedy et al. 2016).
    pub smoothing: f64,
    /// What each row's gradient is multiplied by: one over the rows that count in a whole step, say.
    pub scale: f64,
}

/// What a loss came to, summed over the rows that count.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Loss {
    /// With label smoothing: what training makes small.
    pub smoothed: f64,
    /// Without: `−ln p` of the right class.
    pub nll: f64,
    /// Rows that count.
    pub rows: usize,
    /// Rows whose right class had the highest score.
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

/// Rows whose scores exist at the same time.
const ROWS: usize = 1024;

impl<T: Float> Tape<'_, T> {
    /// The loss of `x Wᵀ + b` against the target, `x [.., C]`, `W [V, C]`, `b [V]`. On a tape that trains, the gradient starts
    /// here.
    ///
    /// # Panics
    /// Where the shapes do not fit, or a class is beyond the vocabulary.
    pub fn cross_entropy(&mut self, x: &Var<T>, w: Param, b: Option<Param>, target: Target<'_>) -> Loss {
        let &[classes, width] = self.parameters.shape(w) else { panic!("`{}` is no matrix", self.parameters.name(w)) };
        assert_eq!((x.value.rows(), x.value.width()), (target.ids.len(), width), "a class for each row");
        let counted: Vec<usize> = (0..target.ids.len()).filter(|&r| Some(target.ids[r]) != target.ignore).collect();
        assert!(counted.iter().all(|&r| (target.ids[r] as usize) < classes), "a class beyond the {classes} there are");
        let (weight, bias) = (self.parameters.get(w), b.map(|b| self.parameters.get(b)));
        let training = self.is_training();
        let mut d_x = training.then(|| Tensor::zeros(self.pool, x.shape()));
        let most = ROWS.min(counted.len());
        let mut scores = Tensor::unwritten(self.pool, &[most, classes]);
        let mut inputs = Tensor::unwritten(self.pool, &[most, width]);
        let mut found = vec![Row::default(); most];
        let mut loss = Loss { rows: counted.len(), ..Loss::default() };
        for rows in counted.chunks(ROWS) {
            let count = rows.len();
            let inputs = &mut inputs.data_mut()[..count * width];
            for (to, &r) in inputs.chunks_exact_mut(width).zip(rows) {
                to.copy_from_slice(&x.value.data()[r * width..][..width]);
            }
            let scores = &mut scores.data_mut()[..count * classes];
            let w_rows = Operand::rows(weight, classes, width);
            self.machine.product(scores, Operand::rows(inputs, count, width), w_rows.transposed(), false);
            let parts = scores.chunks_exact_mut(classes).zip(&mut found).zip(rows).collect();
            self.machine.each(parts, |_, ((scores, found), &r): ((&mut [T], &mut Row), &usize)| {
                let id = target.ids[r] as usize;
                *found = self.machine.run(Entropy { scores, bias, id, target: &target, gradient: training });
            });
            for row in &found[..count] {
                loss.smoothed += row.smoothed;
                loss.nll += row.nll;
                loss.right += usize::from(row.right);
            }
            let (Some(gradients), Some(d_x)) = (self.gradients.as_deref_mut(), &mut d_x) else { continue };
            let d_scores = Operand::rows(&*scores, count, classes);
            if let Some(b) = b {
                self.machine.add_columns(scores, gradients.get_mut(b));
            }
            self.machine.product(
                gradients.get_mut(w),
                d_scores.transposed(),
                Operand::rows(inputs, count, width),
                true,
            );
            self.machine.product(inputs, d_scores, w_rows, false);
            for (from, &r) in inputs.chunks_exact(width).zip(rows) {
                d_x.data_mut()[r * width..][..width].copy_from_slice(from);
            }
        }
        if let Some(d_x) = d_x {
            self.seed(x, d_x);
        }
        loss
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Row {
    smoothed: f64,
    nll: f64,
    right: bool,
}

/// The loss of one row of scores, and its gradient in their place.
struct Entropy<'a, T> {
    scores: &'a mut [T],
    bias: Option<&'a [T]>,
    id: usize,
    target: &'a Target<'a>,
    gradient: bool,
}

impl<T: Float> Pass for Entropy<'_, T> {
    type Output = Row;

    #[inline(always)]
    fn run(self) -> Row {
        let scores = self.scores;
        if let Some(bias) = self.bias {
            for (score, &b) in scores.iter_mut().zip(bias) {
                *score += b;
            }
        }
        let mut highest = [T::NEG_INFINITY; super::SIDE];
        let chunks = scores.chunks_exact(super::SIDE);
        let mut most = T::NEG_INFINITY;
        for &x in chunks.remainder() {
            most = if x > most { x } else { most };
        }
        for chunk in chunks {
            for l in 0..super::SIDE {
                highest[l] = if chunk[l] > highest[l] { chunk[l] } else { highest[l] };
            }
        }
        for x in highest {
            most = if x > most { x } else { most };
        }
        let right = scores[self.id];
        let total = sum_over!(T, scores, scores, |x, _y| x);
        for x in scores.iter_mut() {
            *x = (*x - most).exponential();
        }
        let mass = sum_over!(T, scores, scores, |x, _y| x);
        let classes = scores.len() as f64;
        let smoothing = self.target.smoothing;
        let lse = most.to_f64() + mass.to_f64().ln();
        let nll = lse - right.to_f64();
        let smoothed = (1.0 - smoothing) * nll + smoothing * (lse - total.to_f64() / classes);
        if self.gradient {
            let scale = self.target.scale;
            let (each, even) = (T::of_f64(scale / mass.to_f64()), T::of_f64(scale * smoothing / classes));
            for x in scores.iter_mut() {
                *x = *x * each - even;
            }
            scores[self.id] = scores[self.id] - T::of_f64(scale * (1.0 - smoothing));
        }
        Row { smoothed, nll, right: right == most }
    }
}
