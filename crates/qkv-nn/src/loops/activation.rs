//! Bias, activation and dropout of a row, and the activation's gradient.

use qkv_simd::pass::{Pass, Smooth};
use serde::{Deserialize, Serialize};

/// An activation function.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Activation {
    /// The identity.
    #[default]
    None,
    /// `max(x, 0)`.
    Relu,
    /// `x Φ(x)` with the error function (Hendrycks and Gimpel 2016).
    Gelu,
    /// Its approximation with tanh, `x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³)))`, as in GPT-2.
    #[serde(rename = "gelu-tanh")]
    GeluTanh,
    /// The hyperbolic tangent.
    Tanh,
    /// `1 / (1 + e⁻ˣ)`.
    Sigmoid,
}

/// The constants of GELU's tanh approximation.
const ROOT: f64 = 0.797_884_560_802_865_4;

const CUBE: f64 = 0.044_715;

#[inline(always)]
fn gelu_argument<T: Smooth>(x: T) -> T {
    T::of_f64(ROOT) * (x + T::of_f64(CUBE) * x * x * x)
}

/// `x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³)))`.
#[inline(always)]
pub(super) fn gelu_tanh<T: Smooth>(x: T) -> T {
    x * T::of_f64(0.5) * (T::ONE + gelu_argument(x).hyperbolic_tangent())
}

/// Its derivative.
#[inline(always)]
pub(super) fn gelu_tanh_slope<T: Smooth>(x: T) -> T {
    let (half, root, cube) = (T::of_f64(0.5), T::of_f64(ROOT), T::of_f64(3.0 * CUBE));
    let y = gelu_argument(x).hyperbolic_tangent();
    half * (T::ONE + y + x * (T::ONE - y * y) * root * (T::ONE + cube * x * x))
}

/// Bias, activation and dropout of one row.
pub struct Activate<'a, T> {
    pub(crate) row: &'a mut [T],
    pub(crate) out: Option<&'a mut [T]>,
    pub(crate) bias: Option<&'a [T]>,
    pub(crate) activation: Activation,
    pub(crate) words: Option<&'a [u64]>,
    pub(crate) scale: T,
}

impl<T: Smooth> Pass for Activate<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        if let Some(bias) = self.bias {
            for (x, &b) in self.row.iter_mut().zip(bias) {
                *x += b;
            }
        }
        let row = match self.out {
            Some(out) => {
                out.copy_from_slice(self.row);
                out
            }
            None => self.row,
        };
        match self.activation {
            Activation::None => {}
            Activation::Relu => {
                for x in row.iter_mut() {
                    *x = if *x > T::ZERO { *x } else { T::ZERO };
                }
            }
            Activation::Gelu => {
                let (half, root) = (T::of_f64(0.5), T::of_f64(std::f64::consts::FRAC_1_SQRT_2));
                for x in row.iter_mut() {
                    *x = *x * half * (T::ONE + (*x * root).error_function());
                }
            }
            Activation::GeluTanh => {
                for x in row.iter_mut() {
                    *x = gelu_tanh(*x);
                }
            }
            Activation::Tanh => {
                for x in row.iter_mut() {
                    *x = x.hyperbolic_tangent();
                }
            }
            Activation::Sigmoid => {
                for x in row.iter_mut() {
                    *x = x.sigmoid();
                }
            }
        }
        if let Some(words) = self.words {
            for (part, &word) in row.chunks_mut(64).zip(words) {
                for (j, x) in part.iter_mut().enumerate() {
                    *x = if word >> j & 1 == 1 { *x * self.scale } else { T::ZERO };
                }
            }
        }
    }
}

/// Multiplies the gradient of the output by the derivative of the activation, in place.
pub struct ActivationGradient<'a, T> {
    pub(crate) gradient: &'a mut [T],
    pub(crate) saved: &'a [T],
    pub(crate) activation: Activation,
    /// Dropout's factor of the elements that remain.
    pub(crate) scale: T,
}

impl<T: Smooth> Pass for ActivationGradient<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let pairs = self.gradient.iter_mut().zip(self.saved);
        match self.activation {
            Activation::None => {}
            Activation::Relu => {
                for (g, &y) in pairs {
                    *g = if y > T::ZERO { *g * self.scale } else { T::ZERO };
                }
            }
            Activation::Gelu => {
                let (half, root) = (T::of_f64(0.5), T::of_f64(std::f64::consts::FRAC_1_SQRT_2));
                let density = T::of_f64(1.0 / std::f64::consts::TAU.sqrt());
                for (g, &x) in pairs {
                    let below = half * (T::ONE + (x * root).error_function());
                    *g *= below + x * density * (-(half * x * x)).exponential();
                }
            }
            Activation::GeluTanh => {
                for (g, &x) in pairs {
                    *g *= gelu_tanh_slope(x);
                }
            }
            // The saved output includes dropout, so undo its scale; dropped elements have no gradient.
            Activation::Tanh => {
                let unscaled = T::ONE / self.scale;
                for (g, &y) in pairs {
                    let y = y * unscaled;
                    *g *= T::ONE - y * y;
                }
            }
            Activation::Sigmoid => {
                let unscaled = T::ONE / self.scale;
                for (g, &y) in pairs {
                    let y = y * unscaled;
                    *g = *g * y * (T::ONE - y);
                }
            }
        }
    }
}
