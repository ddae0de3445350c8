//! Normalisation as a layer, of either kind.

use super::Builder;
use crate::float::Float;
use crate::parameters::{Init, Param};
use crate::tape::{Tape, Var};
use serde::{Deserialize, Serialize};

/// How rows are normalised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NormKind {
    /// Mean taken away, divided by the deviation, with gain and bias (Ba et al. 2016, arXiv:1607.06450).
    #[default]
    Layer,
    /// Divided by the root of the mean square, with a gain (Zhang and Sennrich 2019, arXiv:1910.07467).
    Rms,
}

/// A norm.
#[derive(Clone, Copy, Debug)]
pub struct Norm {
    weight: Param,
    /// Only layer normalisation has one.
    bias: Option<Param>,
    epsilon: f64,
}

impl Norm {
    /// PyTorch's `ε`.
    pub const EPSILON: f64 = 1e-5;

    /// Of rows of that width.
    pub fn new<T: Float>(at: &mut Builder<'_, T>, width: usize, kind: NormKind, epsilon: f64) -> Self {
        let weight = at.add("weight", &[width], Init::Ones);
        let bias = (kind == NormKind::Layer).then(|| at.add("bias", &[width], Init::Zeros));
        Norm { weight, bias, epsilon }
    }

    /// Each row normalised.
    pub fn forward<T: Float>(&self, tape: &mut Tape<'_, T>, x: &Var<T>) -> Var<T> {
        match self.bias {
            Some(bias) => tape.layer_norm(x, self.weight, bias, self.epsilon),
            None => tape.rms_norm(x, self.weight, self.epsilon),
        }
    }
}
