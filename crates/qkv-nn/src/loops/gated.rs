//! The gated activation `f(gate) · up`, and its gradients.

use super::activation::{gelu_tanh, gelu_tanh_slope};
use qkv_simd::pass::{Pass, Smooth};

/// The function applied to a gate before the product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// `x / (1 + e⁻ˣ)`: SwiGLU.
    Silu,
    /// `x Φ(x)`: GEGLU.
    Gelu,
    /// Its approximation with tanh: GEGLU in Gemma.
    GeluTanh,
    /// `1 / (1 + e⁻ˣ)`: GLU.
    Sigmoid,
}

/// `y = f(gate) · up`.
pub struct Gated<'a, T> {
    pub(crate) y: &'a mut [T],
    pub(crate) gate: &'a [T],
    pub(crate) up: &'a [T],
    pub(crate) of: Gate,
}

/// `x Φ(x)` and its derivative.
#[inline(always)]
fn gelu<T: Smooth>(x: T) -> [T; 2] {
    let (half, root) = (T::of_f64(0.5), T::of_f64(std::f64::consts::FRAC_1_SQRT_2));
    let density = T::of_f64(1.0 / std::f64::consts::TAU.sqrt());
    let below = half * (T::ONE + (x * root).error_function());
    [x * below, below + x * density * (-(half * x * x)).exponential()]
}

impl<T: Smooth> Pass for Gated<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let all = self.y.iter_mut().zip(self.gate).zip(self.up);
        match self.of {
            Gate::Silu => all.for_each(|((y, &gate), &up)| *y = gate * gate.sigmoid() * up),
            Gate::Gelu => all.for_each(|((y, &gate), &up)| *y = gelu(gate)[0] * up),
            Gate::GeluTanh => all.for_each(|((y, &gate), &up)| *y = gelu_tanh(gate) * up),
            Gate::Sigmoid => all.for_each(|((y, &gate), &up)| *y = gate.sigmoid() * up),
        }
    }
}

/// Replaces the gradient of the output with that of `up` and writes that of `gate`.
pub struct GatedGradient<'a, T> {
    pub(crate) gradient: &'a mut [T],
    pub(crate) d_gate: &'a mut [T],
    pub(crate) gate: &'a [T],
    pub(crate) up: &'a [T],
    pub(crate) of: Gate,
}

impl<T: Smooth> Pass for GatedGradient<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let outs = self.gradient.iter_mut().zip(self.d_gate);
        let all = outs.zip(self.gate).zip(self.up);
        match self.of {
            Gate::Silu => {
                for (((g, d_gate), &gate), &up) in all {
                    let open = gate.sigmoid();
                    *d_gate = *g * up * open * (T::ONE + gate * (T::ONE - open));
                    *g = *g * gate * open;
                }
            }
            Gate::Gelu => {
                for (((g, d_gate), &gate), &up) in all {
                    let [open, slope] = gelu(gate);
                    *d_gate = *g * up * slope;
                    *g *= open;
                }
            }
            Gate::GeluTanh => {
                for (((g, d_gate), &gate), &up) in all {
                    *d_gate = *g * up * gelu_tanh_slope(gate);
                    *g *= gelu_tanh(gate);
                }
            }
            Gate::Sigmoid => {
                for (((g, d_gate), &gate), &up) in all {
                    let open = gate.sigmoid();
                    *d_gate = *g * up * open * (T::ONE - open);
                    *g *= open;
                }
            }
        }
    }
}
