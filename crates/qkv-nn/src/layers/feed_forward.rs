//! The feed-forward sublayer of a Transformer.

use super::{Builder, Linear};
use crate::float::Float;
use crate::loops::{Activation, Gate};
use crate::tape::{Tape, Var};
use serde::{Deserialize, Serialize};

/// The activation between the two linear layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FeedKind {
    /// `max(x, 0)`.
    #[default]
    Relu,
    /// GELU with the error function.
    Gelu,
    /// GELU approximated with tanh.
    GeluTanh,
    /// SwiGLU: `silu(W_g x) · W₁ x` (Shazeer 2020, arXiv:2002.05202).
    #[serde(rename = "swiglu")]
    SwiGlu,
    /// GEGLU: `gelu(W_g x) · W₁ x`, from the same paper.
    #[serde(rename = "geglu")]
    GeGlu,
    /// GEGLU with the tanh approximation of GELU, as in Gemma.
    #[serde(rename = "geglu-tanh")]
    GeGluTanh,
}

impl FeedKind {
    /// The function of the gate, if there is one.
    pub fn gate(self) -> Option<Gate> {
        match self {
            FeedKind::Relu | FeedKind::Gelu | FeedKind::GeluTanh => None,
            FeedKind::SwiGlu => Some(Gate::Silu),
            FeedKind::GeGlu => Some(Gate::Gelu),
            FeedKind::GeGluTanh => Some(Gate::GeluTanh),
        }
    }

    /// The activation of the first linear layer; `Activation::None` if there is a gate, which combines two layers.
    pub fn activation(self) -> Activation {
        match self {
            FeedKind::Relu => Activation::Relu,
            FeedKind::Gelu => Activation::Gelu,
            FeedKind::GeluTanh => Activation::GeluTanh,
            FeedKind::SwiGlu | FeedKind::GeGlu | FeedKind::GeGluTanh => Activation::None,
        }
    }
}

/// `W₂ dropout(activation(W₁ x + b₁)) + b₂`.
#[derive(Clone, Copy, Debug)]
pub struct FeedForward {
    fc1: Linear,
    gate: Option<(Linear, Gate)>,
    fc2: Linear,
    activation: Activation,
    dropout: f64,
}

impl FeedForward {
    /// A sublayer from `width` to `inner` and back. Parameters: `fc1`, `fc2`, and `gate` if it has one.
    pub fn new<T: Float>(
        at: &mut Builder<'_, T>,
        width: usize,
        inner: usize,
        kind: FeedKind,
        bias: bool,
        dropout: f64,
    ) -> Self {
        let fc1 = Linear::new(&mut at.at("fc1"), width, inner, bias);
        let gate = kind.gate().map(|gate| (Linear::new(&mut at.at("gate"), width, inner, bias), gate));
        let fc2 = Linear::new(&mut at.at("fc2"), inner, width, bias);
        // The output of an activation has a few large elements, whose scale makes the rounding of the others coarse.
        at.round_finely(fc2.weight);
        FeedForward { fc1, gate, fc2, activation: kind.activation(), dropout }
    }

    /// `[.., C]` to `[.., C]`.
    pub fn forward<T: Float>(&self, tape: &mut Tape<'_, T>, x: &Var<T>) -> Var<T> {
        let inner = self.inner(tape, x);
        self.fc2.forward(tape, &inner)
    }

    /// The second linear layer.
    pub(super) fn output(&self) -> Linear {
        self.fc2
    }

    /// `dropout(activation(W₁ x + b₁))`: the input of the second linear layer.
    pub(super) fn inner<T: Float>(&self, tape: &mut Tape<'_, T>, x: &Var<T>) -> Var<T> {
        match self.gate {
            None => self.fc1.activated(tape, x, self.activation, self.dropout),
            Some((gate, of)) => {
                let inner = tape.gated_linear(x, [gate, self.fc1].map(|layer| (layer.weight, layer.bias)), of);
                tape.dropout(inner, self.dropout)
            }
        }
    }
}
