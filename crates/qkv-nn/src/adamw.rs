//! The optimizer: Adam with decoupled weight decay (Loshchilov and Hutter 2017, arXiv:1711.05101).

use crate::elements::Elements;
use crate::float::Float;
use crate::loops::{AdamWUpdate, StepFactors};
use crate::machine::Machine;
use crate::parameters::{Gradients, Param, Parameters};
use crate::pending::Pending;
use qkv_cuda::operations::{Kind, Operations, OptimizerTable, ParameterArrays};
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::sync::Arc;

/// The hyperparameters of AdamW, except the learning rate.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdamW {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Weight decay, applied to matrices only: biases and norms do not decay.
    pub decay: f64,
}

impl Default for AdamW {
    fn default() -> Self {
        AdamW { beta1: 0.9, beta2: 0.98, epsilon: 1e-9, decay: 0.0 }
    }
}

/// The optimizer's state: running means of the gradients, and the number of steps.
#[derive(Clone, Debug)]
pub struct Moments<T: Float> {
    /// First moment of each parameter.
    pub first: Vec<Elements<T>>,
    /// Second moment of each parameter.
    pub second: Vec<Elements<T>>,
    /// Steps so far.
    pub steps: u64,
    /// The table of device arrays from the last step.
    table: Option<Arc<OptimizerTable>>,
}

impl<T: Float> Moments<T> {
    /// Zero moments for these parameters; none for frozen ones.
    pub fn of(parameters: &Parameters<T>) -> Self {
        let count = |param| if parameters.is_trained(param) { parameters.shape(param).iter().product() } else { 0 };
        let zeros = || parameters.all().map(|param| Elements::zeros(count(param))).collect();
        Moments { first: zeros(), second: zeros(), steps: 0, table: None }
    }
}

/// The moments of some elements of a parameter: one process's shard when several processes divide the optimizer's state
/// (ZeRO-1; Rajbhandari et al. 2019, arXiv:1910.02054).
#[derive(Debug)]
pub struct MomentsPart<'a, T> {
    /// The parameter.
    pub param: Param,
    /// The range of elements.
    pub range: Range<usize>,
    /// Their first moments.
    pub first: &'a mut [T],
    /// Their second moments.
    pub second: &'a mut [T],
}

/// Elements per task.
const CHUNK: usize = 1 << 14;

impl AdamW {
    /// One step along the gradients with learning rate `rate`, scaled by each parameter's factor. Frozen parameters do
    /// not change.
    pub fn step<T: Float>(
        &self,
        parameters: &mut Parameters<T>,
        gradients: &mut Gradients<T>,
        moments: &mut Moments<T>,
        rate: f64,
        machine: &Machine,
    ) {
        match machine.cuda() {
            Some(operations) => self.step_on_cuda(parameters, gradients, moments, rate, 0.0, operations),
            None => self.step_on_cpu(parameters, gradients, moments, rate, 1.0, machine),
        }
    }

    /// [`step`](AdamW::step) with gradients clipped to the global norm `clip`, or not clipped if `clip` is 0. Returns
    /// the norm before clipping; if it is not finite, no weight and no moment changes.
    pub fn step_clipped<T: Float>(
        &self,
        parameters: &mut Parameters<T>,
        gradients: &mut Gradients<T>,
        moments: &mut Moments<T>,
        rate: f64,
        clip: f64,
        machine: &Machine,
    ) -> Pending<f64> {
        if let Some(operations) = machine.cuda() {
            self.step_on_cuda(parameters, gradients, moments, rate, clip, operations);
            let Some(table) = &moments.table else { return 0.0.into() };
            let norm = operations.fetch_norm(table);
            return Pending::later(move || norm.read::<f64>()[0]);
        }
        let norm = gradients.norm(machine);
        if norm.is_finite() {
            let factor = if clip > 0.0 && norm > clip { clip / norm } else { 1.0 };
            self.step_on_cpu(parameters, gradients, moments, rate, factor, machine);
        }
        norm.into()
    }

    /// One step along the gradients times `factor`.
    fn step_on_cpu<T: Float>(
        &self,
        parameters: &mut Parameters<T>,
        gradients: &Gradients<T>,
        moments: &mut Moments<T>,
        rate: f64,
        factor: f64,
        machine: &Machine,
    ) {
        moments.steps += 1;
        for (at, param) in trained(parameters) {
            let factors = self.factors(parameters, param, moments.steps, rate, factor);
            let (value, gradient) = (parameters.get_mut(param), gradients.get(param));
            let (first, second) = (&mut moments.first[at], &mut moments.second[at]);
            update(AdamWUpdate { factors, value, gradient, first, second }, machine);
        }
    }

    /// Step number `steps` for the elements whose moments are in `part`, along the gradients times `factor`, on the
    /// CPU. Calls that together cover all elements are equivalent to one [`step_clipped`](AdamW::step_clipped).
    pub fn step_part<T: Float>(
        &self,
        parameters: &mut Parameters<T>,
        gradients: &Gradients<T>,
        part: MomentsPart<'_, T>,
        steps: u64,
        [rate, factor]: [f64; 2],
        machine: &Machine,
    ) {
        let MomentsPart { param, range, first, second } = part;
        let factors = self.factors(parameters, param, steps, rate, factor);
        let value = &mut parameters.get_mut(param)[range.clone()];
        let gradient = &gradients.get(param)[range];
        update(AdamWUpdate { factors, value, gradient, first, second }, machine);
    }

    fn factors<T: Float>(
        &self,
        parameters: &Parameters<T>,
        param: Param,
        steps: u64,
        rate: f64,
        factor: f64,
    ) -> StepFactors<T> {
        let (mean, square) = self.corrections(steps);
        let rate = rate * parameters.rate(param);
        StepFactors {
            keep: T::of_f64(1.0 - rate * self.decay_of(parameters, param)),
            rate: T::of_f64(rate / mean),
            root: T::of_f64(1.0 / square.sqrt()),
            beta1: T::of_f64(self.beta1),
            beta2: T::of_f64(self.beta2),
            epsilon: T::of_f64(self.epsilon),
            factor: T::of_f64(factor),
        }
    }

    /// `1 − β₁ᵗ` and `1 − β₂ᵗ`.
    fn corrections(&self, steps: u64) -> (f64, f64) {
        let power = i32::try_from(steps).unwrap_or(i32::MAX);
        (1.0 - self.beta1.powi(power), 1.0 - self.beta2.powi(power))
    }

    /// Biases and norms do not decay.
    fn decay_of<T: Float>(&self, parameters: &Parameters<T>, param: Param) -> f64 {
        if parameters.shape(param).len() > 1 { self.decay } else { 0.0 }
    }

    /// One step on a device: all parameters in one launch.
    fn step_on_cuda<T: Float>(
        &self,
        parameters: &mut Parameters<T>,
        gradients: &mut Gradients<T>,
        moments: &mut Moments<T>,
        rate: f64,
        clip: f64,
        operations: &Operations,
    ) {
        let mut arrays = Vec::new();
        for (at, param) in trained(parameters) {
            let (decay, factor) = (self.decay_of(parameters, param) as f32, parameters.rate(param) as f32);
            let (value, half) = parameters.arrays_mut(param, operations);
            let gradient = gradients.array(param, operations).expect("it is trained");
            let moments = [&mut moments.first[at], &mut moments.second[at]];
            let moments = moments.map(|moment| moment.array_mut(operations, Kind::F32));
            arrays.push(ParameterArrays { value, gradient, moments, half, rate: factor, decay });
        }
        // The arrays do not move from step to step, so the table stays valid.
        let table = match moments.table.take().filter(|table| table.is_of(&arrays)) {
            Some(table) => table,
            None => Arc::new(operations.optimizer_table(arrays)),
        };
        moments.steps += 1;
        let (mean, square) = self.corrections(moments.steps);
        operations.adamw(
            &table,
            &qkv_cuda::operations::StepFactors {
                rate: rate as f32,
                mean: (1.0 / mean) as f32,
                root: (1.0 / square.sqrt()) as f32,
                beta1: self.beta1 as f32,
                beta2: self.beta2 as f32,
                epsilon: self.epsilon as f32,
                clip: clip as f32,
            },
        );
        moments.table = Some(table);
    }
}

/// The trained parameters, each with its index.
fn trained<T: Float>(parameters: &Parameters<T>) -> Vec<(usize, Param)> {
    parameters.all().enumerate().filter(|&(_, param)| parameters.is_trained(param)).collect()
}

/// Updates elements, divided into tasks.
fn update<T: Float>(whole: AdamWUpdate<'_, T>, machine: &Machine) {
    let AdamWUpdate { factors, value, gradient, first, second } = whole;
    let values = value.chunks_mut(CHUNK).zip(gradient.chunks(CHUNK));
    let means = first.chunks_mut(CHUNK).zip(second.chunks_mut(CHUNK));
    let parts = values.zip(means).collect();
    #[allow(clippy::type_complexity)]
    machine.each(parts, |_, ((value, gradient), (first, second)): ((&mut [T], &[T]), (&mut [T], &mut [T]))| {
        machine.run(AdamWUpdate { factors, value, gradient, first, second });
    });
}
