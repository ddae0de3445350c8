//! A step of AdamW, and the moving average of parameters.

use qkv_simd::pass::{Pass, Smooth};

/// The constants of a step.
#[derive(Clone, Copy)]
pub struct StepFactors<T> {
    pub(crate) keep: T,
    pub(crate) rate: T,
    pub(crate) root: T,
    pub(crate) beta1: T,
    pub(crate) beta2: T,
    pub(crate) epsilon: T,
    pub(crate) factor: T,
}

/// One step of some elements of a parameter.
pub struct AdamWUpdate<'a, T> {
    pub(crate) factors: StepFactors<T>,
    pub(crate) value: &'a mut [T],
    pub(crate) gradient: &'a [T],
    pub(crate) first: &'a mut [T],
    pub(crate) second: &'a mut [T],
}

impl<T: Smooth> Pass for AdamWUpdate<'_, T> {
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

/// `own = decay · own + rest · other`.
pub struct MovingAverage<'a, T> {
    pub(crate) own: &'a mut [T],
    pub(crate) other: &'a [T],
    pub(crate) decay: T,
    pub(crate) rest: T,
}

impl<T: Smooth> Pass for MovingAverage<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (own, &other) in self.own.iter_mut().zip(self.other) {
            *own = *own * self.decay + other * self.rest;
        }
    }
}
