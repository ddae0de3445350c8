//! The normalization layers: layer norm and RMS norm.

use super::Builder;
use crate::float::Float;
use crate::parameters::{Init, Param};
use crate::tape::{Tape, Var};
use serde::{Deserialize, Serialize};

/// The kind of normalization.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NormKind {
    /// Layer norm: subtracts the mean and divides by the standard deviation, with gain and bias (Ba et al. 2016,
    /// arXiv:1607.06450).
    #[default]
    Layer,
    /// RMS norm: divides by the root mean square, with a gain (Zhang and Sennrich 2019, arXiv:1910.07467).
    Rms,
}

/// A normalization layer.
#[derive(Clone, Copy, Debug)]
pub struct Norm {
    weight: Param,
    /// Only in layer norm.
    bias: Option<Param>,
    epsilon: f64,
}

impl Norm {
    /// PyTorch's `ε`.
    pub const EPSILON: f64 = 1e-5;

    /// A norm of rows of `width`.
    pub fn new<T: Float>(at: &mut Builder<'_, T>, width: usize, kind: NormKind, epsilon: f64) -> Self {
        let weight = at.add("weight", &[width], Init::Ones);
        let bias = (kind == NormKind::Layer).then(|| at.add("bias", &[width], Init::Zeros));
        Norm { weight, bias, epsilon }
    }

    /// Normalizes each row.
    pub fn forward<T: Float>(&self, tape: &mut Tape<'_, T>, x: &Var<T>) -> Var<T> {
        match self.bias {
            Some(bias) => tape.layer_norm(x, self.weight, bias, self.epsilon),
            None => tape.rms_norm(x, self.weight, self.epsilon),
        }
    }
}
