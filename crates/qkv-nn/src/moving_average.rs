//! Exponential moving averages of elements, such as those of weights.

use crate::float::Float;
use crate::loops::MovingAverage;
use crate::machine::Machine;

/// Elements per task.
const CHUNK: usize = 1 << 13;

/// Updates an exponential moving average of some elements: `own = decay · own + (1 − decay) · others`.
pub fn moving_average<T: Float>(own: &mut [T], others: &[T], decay: f64, machine: &Machine) {
    let (decay, rest) = (T::of_f64(decay), T::of_f64(1.0 - decay));
    let parts = own.chunks_mut(CHUNK).zip(others.chunks(CHUNK)).collect();
    machine.each(parts, |_, (own, other): (&mut [T], &[T])| machine.run(MovingAverage { own, other, decay, rest }));
}
