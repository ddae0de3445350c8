//! The linear layer: `weight [O, I]` and `bias [O]`, named as in PyTorch.

use super::Builder;
use crate::float::Float;
use crate::loops::Activation;
use crate::parameters::{Init, Param};
use crate::tape::{Tape, Var};

/// A linear layer.
#[derive(Clone, Copy, Debug)]
pub struct Linear {
    /// `[O, I]`.
    pub weight: Param,
    /// `[O]`.
    pub bias: Option<Param>,
}

impl Linear {
    /// A layer from `inputs` to `outputs`, with the matrix initialized by [`Init::Xavier`] and the bias with zeros.
    pub fn new<T: Float>(at: &mut Builder<'_, T>, inputs: usize, outputs: usize, bias: bool) -> Self {
        Linear::with_init(at, inputs, outputs, bias, Init::Xavier)
    }

    /// A layer with another initialization of the matrix; a bias is uniform too if the matrix is, and zero otherwise.
    pub fn with_init<T: Float>(at: &mut Builder<'_, T>, inputs: usize, outputs: usize, bias: bool, init: Init) -> Self {
        let weight = at.add("weight", &[outputs, inputs], init);
        let begin = if let Init::Uniform(_) = init { init } else { Init::Zeros };
        Linear { weight, bias: bias.then(|| at.add("bias", &[outputs], begin)) }
    }

    /// `x Wᵀ + b`.
    pub fn forward<T: Float>(&self, tape: &mut Tape<'_, T>, x: &Var<T>) -> Var<T> {
        self.activated(tape, x, Activation::None, 0.0)
    }

    /// `residual + dropout(x Wᵀ + b)`.
    pub fn added<T: Float>(&self, tape: &mut Tape<'_, T>, x: &Var<T>, residual: &Var<T>, dropout: f64) -> Var<T> {
        tape.linear_residual(x, self.weight, self.bias, residual, dropout)
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
