//! Convolution over a sequence.

use super::{Builder, Linear};
use crate::float::Float;
use crate::loops::Activation;
use crate::ops::unfold::Windows;
use crate::tape::{Tape, Var};

/// A convolution over the tokens of a sequence.
#[derive(Clone, Copy, Debug)]
pub struct Conv1d {
    map: Linear,
    windows: Windows,
}

impl Conv1d {
    /// A convolution from `inputs` to `outputs` channels. Parameters: `weight [O, K·I]`, with the tokens of a window
    /// one after another, and `bias [O]`.
    pub fn new<T: Float>(at: &mut Builder<'_, T>, inputs: usize, outputs: usize, windows: Windows) -> Self {
        Conv1d { map: Linear::new(at, windows.kernel * inputs, outputs, true), windows }
    }

    /// `activation(conv(x) + b)`: `[B, N, I]` to `[B, count, O]`.
    pub fn activated<T: Float>(&self, tape: &mut Tape<'_, T>, x: &Var<T>, activation: Activation) -> Var<T> {
        let windows = tape.unfold(x, self.windows);
        self.map.activated(tape, &windows, activation, 0.0)
    }
}
