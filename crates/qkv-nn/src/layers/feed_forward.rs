//! The feed-forward part of a Transformer's layer: out to a greater width and back.

use super::{Builder, Linear};
use crate::float::Float;
use crate::ops::linear::Activation;
use crate::tape::{Tape, Var};

/// `W₂ dropout(activation(W₁ x + b₁)) + b₂`.
#[derive(Clone, Copy, Debug)]
pub struct FeedForward {
    fc1: Linear,
    fc2: Linear,
    activation: Activation,
    dropout: f64,
}

impl FeedForward {
    /// From `width` to `inner` and back.
    pub fn new<T: Float>(
        at: &mut Builder<'_, T>,
        width: usize,
        inner: usize,
        activation: Activation,
        dropout: f64,
    ) -> Self {
        let fc1 = Linear::new(&mut at.at("fc1"), width, inner, true);
        let fc2 = Linear::new(&mut at.at("fc2"), inner, width, true);
        FeedForward { fc1, fc2, activation, dropout }
    }

    /// `[.., C]` to `[.., C]`.
    pub fn forward<T: Float>(&self, tape: &mut Tape<'_, T>, x: &Var<T>) -> Var<T> {
        let inner = self.fc1.activated(tape, x, self.activation, self.dropout);
        self.fc2.forward(tape, &inner)
    }
}
