//! Convolution over images, and the group norm that goes with it.

use super::{Builder, Linear};
use crate::float::Float;
use crate::loops::Activation;
use crate::ops::windows2d::Windows2d;
use crate::parameters::{Init, Param};
use crate::tape::{Tape, Var};

/// A convolution over images `[B, H, W, I]`.
#[derive(Clone, Copy, Debug)]
pub struct Conv2d {
    /// `weight [O, K·L·I]`, with the pixels of a window row by row and the channels of each pixel adjacent; `bias [O]`.
    pub map: Linear,
}

impl Conv2d {
    /// A convolution from `inputs` to `outputs` channels, with windows of `kernel × kernel`.
    pub fn new<T: Float>(at: &mut Builder<'_, T>, inputs: usize, outputs: usize, kernel: usize, bias: bool) -> Self {
        Conv2d { map: Linear::new(at, kernel * kernel * inputs, outputs, bias) }
    }

    /// `activation(conv(x) + b)`: `[B, H, W, I]` to `[B, rows, columns, O]`.
    pub fn activated<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        x: &Var<T>,
        windows: Windows2d,
        activation: Activation,
    ) -> Var<T> {
        tape.convolution(x, windows, (self.map.weight, self.map.bias), activation)
    }

    /// `max(conv(x) + b + residual, 0)`: the end of a residual block.
    pub fn added<T: Float>(&self, tape: &mut Tape<'_, T>, x: &Var<T>, windows: Windows2d, residual: &Var<T>) -> Var<T> {
        tape.convolution_residual(x, windows, (self.map.weight, self.map.bias), residual)
    }
}

/// A group norm.
#[derive(Clone, Copy, Debug)]
pub struct GroupNorm {
    weight: Param,
    bias: Param,
    groups: usize,
    epsilon: f64,
}

impl GroupNorm {
    /// A norm over `channels` in `groups`. Parameters: `weight [C]` and `bias [C]`.
    pub fn new<T: Float>(at: &mut Builder<'_, T>, channels: usize, groups: usize, epsilon: f64) -> Self {
        let weight = at.add("weight", &[channels], Init::Ones);
        let bias = at.add("bias", &[channels], Init::Zeros);
        GroupNorm { weight, bias, groups, epsilon }
    }

    /// Normalizes each image.
    pub fn forward<T: Float>(&self, tape: &mut Tape<'_, T>, x: &Var<T>) -> Var<T> {
        tape.group_norm(x, self.weight, self.bias, self.groups, self.epsilon)
    }
}
