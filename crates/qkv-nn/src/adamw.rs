//! The optimizer: Adam with decoupled weight decay (Loshchilov and Hutter 2017, arXiv:1711.05101).

use crate::float::Float;
use crate::machine::Machine;
use crate::parameters::{Gradients, Param, Parameters};
use qkv_simd::pass::Pass;
use serde::{Deserialize, Serialize};

/// The hyperparameters of AdamW, but for the learning rate.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdamW {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Weight decay, of matrices alone: biases and norms do not decay.
    pub decay: f64,
}

impl Default for AdamW {
    fn default() -> Self {
        AdamW { beta1: 0.9, beta2: 0.98, epsilon: 1e-9, decay: 0.0 }
    }
}

/// The optimizer's state: running means of the gradients, and the number of steps.
#[derive(Clone, Debug)]
pub struct Moments<T> {
    /// First moment of each parameter.
    pub first: Vec<Vec<T>>,
    /// Second moment of each parameter.
    pub second: Vec<Vec<T>>,
    /// Steps so far.
    pub steps: u64,
}

impl<T: Float> Moments<T> {
    /// Zero moments for these parameters; none for those that are frozen.
    pub fn of(parameters: &Parameters<T>) -> Self {
        let count = |param| if parameters.is_trained(param) { parameters.get(param).len() } else { 0 };
        let zeros = || parameters.all().map(|param| vec![T::ZERO; count(param)]).collect();
        Moments { first: zeros(), second: zeros(), steps: 0 }
    }
}

/// Elements in one task.
const CHUNK: usize = 1 << 14;

impl AdamW {
    /// One step with learning rate `rate`, times the factor of each parameter, along the gradients times `factor` (for
    /// clipping). What is frozen stays.
    pub fn step<T: Float>(
        &self,
        parameters: &mut Parameters<T>,
        gradients: &Gradients<T>,
        moments: &mut Moments<T>,
        rate: f64,
        factor: f64,
        machine: &Machine,
    ) {
        moments.steps += 1;
        let power = i32::try_from(moments.steps).unwrap_or(i32::MAX);
        let (mean, square) = (1.0 - self.beta1.powi(power), 1.0 - self.beta2.powi(power));
        let all: Vec<Param> = parameters.all().collect();
        let trained = all.into_iter().enumerate().filter(|&(_, param)| parameters.is_trained(param));
        for (at, param) in trained.collect::<Vec<_>>() {
            let rate = rate * parameters.rate(param);
            let decay = if parameters.shape(param).len() > 1 { self.decay } else { 0.0 };
            let factors = StepFactors {
                keep: T::of_f64(1.0 - rate * decay),
                rate: T::of_f64(rate / mean),
                root: T::of_f64(1.0 / square.sqrt()),
                beta1: T::of_f64(self.beta1),
                beta2: T::of_f64(self.beta2),
                epsilon: T::of_f64(self.epsilon),
                factor: T::of_f64(factor),
            };
            let values = parameters.get_mut(param).chunks_mut(CHUNK).zip(gradients.get(param).chunks(CHUNK));
            let means = moments.first[at].chunks_mut(CHUNK).zip(moments.second[at].chunks_mut(CHUNK));
            let parts = values.zip(means).collect();
            #[allow(clippy::type_complexity)]
            machine.each(parts, |_, ((value, gradient), (first, second)): ((&mut [T], &[T]), (&mut [T], &mut [T]))| {
                machine.run(AdamWUpdate { factors, value, gradient, first, second });
            });
        }
    }
}

#[derive(Clone, Copy)]
struct StepFactors<T> {
    keep: T,
    rate: T,
    root: T,
    beta1: T,
    beta2: T,
    epsilon: T,
    factor: T,
}

/// One step of some elements of a parameter.
pub struct AdamWUpdate<'a, T> {
    factors: StepFactors<T>,
    value: &'a mut [T],
    gradient: &'a [T],
    first: &'a mut [T],
    second: &'a mut [T],
}

impl<T: Float> Pass for AdamWUpdate<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let StepFactors { keep, rate, root, beta1, beta2, epsilon, factor } = self.factors;
        let (new1, new2) = (T::ONE - beta1, T::ONE - beta2);
        for j in 0..self.value.len() {
            let g = self.gradient[j] * factor;
            let m = self.first[j] * beta1 + g * new1;
            let v = self.second[j] * beta2 + g * g * new2;
            self.first[j] = m;
            self.second[j] = v;
            self.value[j] = self.value[j] * keep - rate * m / (v.sqrt() * root + epsilon);
        }
    }
}
