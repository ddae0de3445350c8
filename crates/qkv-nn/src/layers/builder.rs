//! Naming and initialization of a layer's parameters: the prefix of their names and the seed from which they are drawn.

use crate::float::Float;
use crate::parameters::{Init, Param, Parameters};
use std::sync::Arc;

/// Adds parameters under a prefix.
#[derive(Debug)]
pub struct Builder<'a, T: Float> {
    parameters: &'a mut Parameters<T>,
    prefix: String,
    /// `None` for parameters that are read from a file.
    seed: Option<u64>,
}

impl<'a, T: Float> Builder<'a, T> {
    /// A builder without a prefix.
    pub fn new(parameters: &'a mut Parameters<T>, seed: u64) -> Self {
        Builder { parameters, prefix: String::new(), seed: Some(seed) }
    }

    /// A builder without a prefix, for parameters that are read from a file: nothing is drawn, all parameters start as
    /// zeros.
    pub fn blank(parameters: &'a mut Parameters<T>) -> Self {
        Builder { parameters, prefix: String::new(), seed: None }
    }

    /// A builder one level down: `at("encoder")` adds parameters named `encoder.…`.
    pub fn at(&mut self, name: &str) -> Builder<'_, T> {
        let prefix = format!("{}{name}.", self.prefix);
        Builder { parameters: self.parameters, prefix, seed: self.seed }
    }

    /// The prefix without its trailing dot: the label of a layer's [captured](crate::Captured) attentions.
    pub fn label(&self) -> Arc<str> {
        self.prefix.trim_end_matches('.').into()
    }

    /// Makes 8-bit products with a matrix round their rows in [two parts](Parameters::round_finely).
    pub fn round_finely(&mut self, param: Param) {
        self.parameters.round_finely(param);
    }

    /// Adds a parameter under the prefix.
    pub fn add(&mut self, name: &str, shape: &[usize], init: Init) -> Param {
        let init = if self.seed.is_some() { init } else { Init::Zeros };
        self.parameters.add(&format!("{}{name}", self.prefix), shape, init, self.seed.unwrap_or(0))
    }
}
