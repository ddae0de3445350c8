//! A linear map as a layer: `weight [O, I]` and `bias [O]`, as PyTorch names them.

use super::Builder;
use crate::float::Float;
use crate::ops::linear::Activation;
use crate::parameters::{Init, Param};
use crate::tape::{Tape, Var};

/// A linear map.
#[derive(Clone, Copy, Debug)]
pub struct Linear {
    /// `[O, I]`.
    pub weight: Param,
    /// `[O]`.
    pub bias: Option<Param>,
}

impl Linear {
    /// From `inputs` to `outputs`, the matrix drawn as [`Init::Xavier`], the bias zero.
    pub fn new<T: Float>(at: &mut Builder<'_, T>, inputs: usize, outputs: usize, bias: bool) -> Self {
        Linear::drawn(at, inputs, outputs, bias, Init::Xavier)
    }

    /// With another way to begin.
    pub fn drawn<T: Float>(at: &mut Builder<'_, T>, inputs: usize, outputs: usize, bias: bool, init: Init) -> Self {
        let weight = at.add("weight", &[outputs, inputs], init);
        let begin = if let Init::Uniform(_) = init { init } else { Init::Zeros };
        Linear { weight, bias: bias.then(|| at.add("bias", &[outputs], begin)) }
    }

    /// `x Wᵀ + b`.
    pub fn forward<T: Float>(&self, tape: &mut Tape<'_, T>, x: &Var<T>) -> Var<T> {
        self.activated(tape, x, Activation::None, 0.0)
    }

    /// `dropout(activation(x Wᵀ + b))`.
    pub fn activated<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        x: &Var<T>,
        activation: Activation,
        dropout: f64,
    ) -> Var<T> {
        tape.linear(x, self.weight, self.bias, activation, dropout)
    }
}
