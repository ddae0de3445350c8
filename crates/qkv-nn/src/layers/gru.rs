//! Stacked gated recurrent units, in one direction or both.

use super::{Builder, Linear};
use crate::float::Float;
use crate::parameters::{Init, Param};
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;

/// A stacked GRU. Parameters as in PyTorch: `weight_ih_l0`, `weight_hh_l0`, `bias_ih_l0`, `bias_hh_l0`, and the same
/// with `_reverse`.
#[derive(Clone, Debug)]
pub struct Gru {
    layers: Vec<Vec<Direction>>,
    width: usize,
    dropout: f64,
}

#[derive(Clone, Copy, Debug)]
struct Direction {
    input: Linear,
    weight: Param,
    bias: Param,
}

impl Gru {
    /// `layers` layers of `width` over rows of width `inputs`; with `both`, each runs in both directions and outputs
    /// twice the width. Initialized uniformly within `±1/√width`, as in PyTorch. `dropout` applies between layers.
    pub fn new<T: Float>(
        at: &mut Builder<'_, T>,
        inputs: usize,
        width: usize,
        layers: usize,
        both: bool,
        dropout: f64,
    ) -> Self {
        let init = Init::Uniform((width as f64).powf(-0.5));
        let directions = if both { &["", "_reverse"][..] } else { &[""] };
        let layers = (0..layers)
            .map(|layer| {
                let inputs = if layer == 0 { inputs } else { width * directions.len() };
                let direction = |suffix: &&str| Direction {
                    input: Linear {
                        weight: at.add(&format!("weight_ih_l{layer}{suffix}"), &[3 * width, inputs], init),
                        bias: Some(at.add(&format!("bias_ih_l{layer}{suffix}"), &[3 * width], init)),
                    },
                    weight: at.add(&format!("weight_hh_l{layer}{suffix}"), &[3 * width, width], init),
                    bias: at.add(&format!("bias_hh_l{layer}{suffix}"), &[3 * width], init),
                };
                directions.iter().map(direction).collect()
            })
            .collect();
        Gru { layers, width, dropout }
    }

    /// A zero state for each layer, `[B, 1, C]`.
    pub fn zeros<T: Float>(&self, tape: &Tape<'_, T>, batch: usize) -> Vec<Var<T>> {
        let zero = || Tensor::new(vec![T::ZERO; batch * self.width], &[batch, 1, self.width]);
        self.layers.iter().map(|_| tape.constant(zero())).collect()
    }

    /// Runs over `x [B, N, I]` from the initial state of each layer: `[B, N, C]`, or `[B, N, 2C]` in both directions.
    /// Outputs beyond a sequence's length are zero.
    pub fn forward<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        x: Var<T>,
        states: &[Var<T>],
        lengths: Option<&[usize]>,
    ) -> Var<T> {
        let mut x = x;
        for (at, (layer, start)) in self.layers.iter().zip(states).enumerate() {
            if at > 0 {
                x = tape.dropout(x, self.dropout);
            }
            let mut ways = Vec::with_capacity(2);
            for (way, direction) in layer.iter().enumerate() {
                let parts = direction.input.forward(tape, &x); // (B, N, 3C)
                ways.push(tape.gru(&parts, start, direction.weight, direction.bias, lengths, way == 1));
            }
            x = if ways.len() == 1 { ways.remove(0) } else { tape.concat(&ways.iter().collect::<Vec<_>>()) };
        }
        x
    }

    /// One step in one direction on `x [B, 1, I]`. Updates the state of each layer and returns that of the last.
    ///
    /// # Panics
    /// If the layers run in both directions.
    pub fn step<T: Float>(&self, tape: &mut Tape<'_, T>, x: &Var<T>, states: &mut [Var<T>]) -> Var<T> {
        let mut x = x.clone();
        for (at, (layer, state)) in self.layers.iter().zip(states).enumerate() {
            let [direction] = layer[..] else { panic!("a step has one direction") };
            if at > 0 {
                x = tape.dropout(x, self.dropout);
            }
            let parts = direction.input.forward(tape, &x);
            *state = tape.gru(&parts, state, direction.weight, direction.bias, None, false);
            x = state.clone();
        }
        x
    }
}
