//! Layer normalisation as a layer.

use super::Builder;
use crate::float::Float;
use crate::parameters::{Init, Param};
use crate::tape::{Tape, Var};

/// Layer normalisation with gain and bias (Ba et al. 2016, arXiv:1607.06450).
#[derive(Clone, Copy, Debug)]
pub struct LayerNorm {
    weight: Param,
    bias: Param,
    epsilon: f64,
}

impl LayerNorm {
    /// Of rows of that width; `ε` is PyTorch's 1e-5.
    pub fn new<T: Float>(at: &mut Builder<'_, T>, width: usize) -> Self {
        let [weight, bias] =
            [("weight", Init::Ones), ("bias", Init::Zeros)].map(|(name, init)| at.add(name, &[width], init));
        LayerNorm { weight, bias, epsilon: 1e-5 }
    }

    /// Each row normalised.
    pub fn forward<T: Float>(&self, tape: &mut Tape<'_, T>, x: &Var<T>) -> Var<T> {
        tape.layer_norm(x, self.weight, self.bias, self.epsilon)
    }
}
